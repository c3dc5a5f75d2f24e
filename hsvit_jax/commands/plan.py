"""hsvit plan: memory, traffic and time of a network on many devices."""

import json

from absl import flags

from hsvit_jax import cli
from hsvit_jax.cli import Command, Request, define_path
from hsvit_jax.commands.summary import COSTS, resolved

COMMAND = Command(
    "Predicts communication and efficiency of an HSViT on many devices.",
    __name__,
    "$ --config=configs/c4a8.py --devices=4096",
    (
        (flags.DEFINE_integer, "devices", None, "Maximum number of devices.", 1),
        (flags.DEFINE_integer, "group", None, "Most devices on the group axis.", 1),
        (flags.DEFINE_integer, "batch", None, "Examples per step.", 1),
        (flags.DEFINE_float, "bandwidth", 5e10, "Bytes/s between two devices.", 1.0),
        (flags.DEFINE_float, "flops", 1e14, "FLOP/s of a device.", 1.0),
        (flags.DEFINE_float, "latency", 5e-6, "Seconds of one message.", 0.0),
        (flags.DEFINE_bool, "json", False, "Print JSON."),
        (define_path, "out", None, "A PNG to draw."),
    ),
    config=f"{COSTS} mesh.aggregate mesh.gradients",
    needs_config=True,
)


def run(request: Request) -> None:
    """Prints the plan: how a network spreads over the devices, and the costs."""
    from hsvit_jax.models import costs
    from hsvit_jax.planner import figure, plan

    values = request.flags
    if values.devices is None:
        raise cli.Misuse("plan needs --devices, for example --devices=4096")
    out = cli.ending(values.out) if values.out else None
    config, model, moments = resolved(request)
    found = plan.plan(
        config,
        values.devices,
        plan.Machine(values.flops, values.bandwidth, values.latency),
        group=values.group,
        batch=values.batch,
        moments=moments / (4 * costs.parameters(model)),
    )
    if out:
        figure.draw(found, out)
        found["figure"] = str(out)
    print(json.dumps(found, indent=2) if values.json else plan.render(found))
