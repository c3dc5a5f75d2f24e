"""hsvit plan: memory, traffic and time of a network on many devices."""

from pathlib import Path

from hsvit_jax import config as config_lib
from hsvit_jax import data
from hsvit_jax.cli import Request
from hsvit_jax.planner import plan


def run(request: Request) -> int:
    """Prints the plan: how a network spreads over the devices, and the costs."""
    values = request.flags
    if values.devices is None:
        raise ValueError("plan needs --devices, for example --devices=4096")
    info = data.describe(request.config.data.name, request.config.data.dir or None)
    print(
        plan.run(
            config_lib.resolve(request.config, info),
            devices=values.devices,
            group=values.group,
            batch=values.batch,
            bandwidth=values.bandwidth,
            flops=values.flops,
            latency=values.latency,
            verify=values.verify,
            json=values.json,
            out=Path(values.out) if values.out else None,
        )
    )
    return 0
