"""hsvit plan: memory, traffic and time of a network on many devices."""

from hsvit_jax import config as config_lib
from hsvit_jax import data
from hsvit_jax.cli import Misuse, Request
from hsvit_jax.planner import plan


def run(request: Request) -> int:
    """Prints the plan: how a network spreads over the devices, and the costs."""
    values = request.flags.flag_values_dict()
    if values["devices"] is None:
        raise Misuse("plan needs --devices, for example --devices=4096")
    info = data.describe(request.config.data.name, request.config.data.dir or None)
    print(plan.run(config_lib.resolve(request.config, info), **values))
    return 0
