"""hsvit summary: a network's modules, parameters, FLOPs and memory."""

from typing import Any

from hsvit_jax import cli
from hsvit_jax import config as config_lib
from hsvit_jax.cli import Command, Request
from hsvit_jax.commands.trained import DATA

COSTS = f"model {DATA} data.image_size data.channels data.num_classes optim.name train.batch "
COSTS += "train.ema_decay"

COMMAND = Command(
    "Prints parameters, FLOPs by module, and memory of a network.",
    __name__,
    "$ --config=configs/c4a8.py:tiny_imagenet",
    config=f"{COSTS} eval.batch",
    needs_config=True,
)


def run(request: Request) -> None:
    """Prints the network's modules and costs."""
    from hsvit_jax.planner import summary

    print(summary.summarise(*resolved(request)))


def resolved(request: Request) -> tuple[Any, Any, int]:
    """Returns the resolved configuration, its network, and the optimizer's bytes."""
    from hsvit_jax import data, train
    from hsvit_jax.train import optim

    info = data.describe(request.config.data.name, request.config.data.dir or None)
    config_lib.refuse_unread(request.config)
    config = config_lib.resolve(request.config, info)
    if config.data.name not in config_lib.DATA_SETS and "recipe" not in config.user:
        cli.note(
            "batch and optimizer assume many images; for few images training chooses the recipe "
            "small (docs/data.md, Few images)"
        )
    model = train.build_model(config)
    return config, model, optim.moment_bytes(config.optim, model)
