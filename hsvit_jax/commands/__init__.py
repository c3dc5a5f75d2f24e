"""The commands of `hsvit`: one table, which the program, its --help and docs/ are made from.

A command is a module with its flags beside its `run()`, which imports what the work needs.
"""

import importlib
from collections.abc import Mapping

from hsvit_jax.cli import Command

ABOUT = """\
FILE[:DATA,RECIPE,SWITCHES] is, for example, configs/c2a2.py:cifar100,paper or, without a file,
c2a2:cifar100,paper.
  DATA      digits cifar10 cifar100 fashion_mnist tiny_imagenet food101 imagenet
            domainnet/clipart (infograph, painting, quickdraw, real, sketch)
            folder=<path> csv=<path> hf=<name or path> tfds=<name>      (default: cifar10)
  RECIPE    strong (default; small for small custom data sets) fast small paper finetune
  SWITCHES  tiny (a smoke run: its accuracy means nothing) bf16 conv_only attention_only"""

_FILES = {"eval": "evaluate", "list": "listing"}
_NAMES = "train eval predict visualize serve export report list summary plan compare study curves "
_NAMES += "crossval lr-find power-search convert benchmark"


def _command(name: str) -> Command:
    file = _FILES.get(name, name.replace("-", "_"))
    return importlib.import_module(f"{__name__}.{file}").COMMAND


#: Name → what it does and reads; all other input is refused.
COMMANDS: Mapping[str, Command] = {name: _command(name) for name in _NAMES.split()}
