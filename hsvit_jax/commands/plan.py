"""hsvit plan: memory, traffic and time of a network on many devices."""

from hsvit_jax import cli, data, train
from hsvit_jax import config as config_lib
from hsvit_jax.cli import Misuse, Request
from hsvit_jax.commands.summary import note_of_few
from hsvit_jax.models import costs
from hsvit_jax.planner import plan
from hsvit_jax.train import optim


def run(request: Request) -> int:
    """Prints the plan: how a network spreads over the devices, and the costs."""
    values = request.flags.flag_values_dict()
    if values["devices"] is None:
        raise Misuse("plan needs --devices, for example --devices=4096")
    if values["out"]:
        cli.ending(values["out"])
    info = data.describe(request.config.data.name, request.config.data.dir or None)
    config_lib.refuse_unread(request.config)
    config = config_lib.resolve(request.config, info)
    model = train.build_model(config)
    kept = optim.moment_bytes(config.optim, model) / (4 * costs.parameters(model))
    print(plan.run(config, **values, moments=kept))
    note_of_few(config)
    return 0
