"""The commands that describe networks without training: hsvit list, summary, plan."""

import json
import textwrap
from typing import Any

from absl import flags

from hsvit_jax import cli
from hsvit_jax import config as config_lib
from hsvit_jax.cli import Command, Request, define_path
from hsvit_jax.commands.trained import DATA

_COSTS = f"model {DATA} data.image_size data.channels data.num_classes optim.name train.batch "
_COSTS += "train.ema_decay"


@Command("Lists the networks, data sets, recipes and trained networks that have names.", "$")
def listing(request: Request) -> None:
    """Prints the names, each kind under the words that take them."""
    from hsvit_jax.config import words
    from hsvit_jax.models import DEFAULT, FAMILIES
    from hsvit_jax.weights import sources

    siblings = {family.config_file or name: family for name, family in FAMILIES.items()}
    hsvits = siblings.pop(DEFAULT.name).variants
    kinds = {
        "networks, as in --config=c2a2 or --config=resnet:18": {
            " ".join(hsvits): "HSViT",
            **{f"{name}:": " ".join(family.variants) for name, family in siblings.items()},
        },
        "data sets, after the colon, as in --config=c2a2:cifar100": {
            "named": " ".join(config_lib.DATA_SETS),
            "your own": ", ".join(words.DATA_KINDS),
        },
        "recipes and switches, after the colon too, as in --config=c2a2:cifar100,fast,bf16": {
            **words.RECIPES,
            **words.SWITCHES,
        },
        f"trained networks, as in {request.program} predict zoo:c2a2-digits IMAGE": {
            f"zoo:{name}": f"--config.init.from=zoo:{name}" for name in sources.zoo()
        },
    }
    for kind, rows in kinds.items():
        print(kind)
        width = max(map(len, rows))
        for name, text in rows.items():
            start, hanging = f"  {name:<{width}}  ", " " * (width + 4)
            fill = textwrap.TextWrapper(100, start, hanging, break_on_hyphens=False).fill
            print(fill(text))


@Command(
    "Prints parameters, FLOPs by module, and memory of a network.",
    "$ --config=configs/c4a8.py:tiny_imagenet",
    config=f"{_COSTS} eval.batch",
    needs_config=True,
)
def summary(request: Request) -> None:
    """Prints the network's modules and costs."""
    from hsvit_jax.planner import summary

    print(summary.summarise(*_resolved(request)))


@Command(
    "Predicts communication and efficiency of an HSViT on many devices.",
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
    config=f"{_COSTS} mesh.aggregate mesh.gradients",
    needs_config=True,
)
def plan(request: Request) -> None:
    """Prints the plan: how a network spreads over the devices, and the costs."""
    from hsvit_jax.models import costs
    from hsvit_jax.planner import figure, plan

    values = request.flags
    if values.devices is None:
        raise cli.Misuse("plan needs --devices, for example --devices=4096")
    out = cli.ending(values.out) if values.out else None
    config, model, moments = _resolved(request)
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


def _resolved(request: Request) -> tuple[Any, Any, int]:
    """Returns the resolved configuration, its network, and the optimizer's bytes."""
    from hsvit_jax import data, train
    from hsvit_jax.train import optim

    about = request.config.data
    info = data.describe(about.name, about.dir or None, about.task)
    config_lib.refuse_unread(request.config)
    config = config_lib.resolve(request.config, info)
    if config.data.name not in config_lib.DATA_SETS and "recipe" not in config.user:
        cli.note(
            "batch and optimizer assume many images; for few images training chooses the recipe "
            "small (docs/data.md, Few images)"
        )
    model = train.build_model(config)
    return config, model, optim.moment_bytes(config.optim, model)
