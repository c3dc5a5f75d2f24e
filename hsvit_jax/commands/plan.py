"""--mode=plan: what a network would need on many devices."""

from pathlib import Path

from hsvit_jax import config as config_lib
from hsvit_jax import data
from hsvit_jax.cli import Request
from hsvit_jax.planner import plan


def run(request: Request) -> int:
    """Prints how a network spreads over many devices, and what that costs."""
    given = request.flags
    if given.devices is None:
        raise ValueError("--mode=plan needs --devices, for example --devices=4096")
    info = data.describe(request.config.data.name, request.config.data.dir or None)
    print(
        plan.run(
            config_lib.resolve(request.config, info),
            devices=given.devices,
            group=given.group,
            batch=given.batch,
            bandwidth=given.bandwidth,
            flops=given.flops,
            latency=given.latency,
            verify=given.verify,
            json=given.json,
            out=Path(given.out) if given.out else None,
        )
    )
    return 0
