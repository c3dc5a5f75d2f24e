"""The commands of `hsvit`: one table, which the program, its --help and docs/ are made from.

A command is a function below its row, a `cli.Command`. The function imports what the work needs.
"""

import dataclasses

from hsvit_jax.commands import (
    benchmark,
    completion,
    networks,
    serve,
    studies,
    train,
    trained,
    weights,
)

ABOUT = """\
FILE[:DATA,RECIPE,SWITCHES] is, for example, configs/c2a2.py:cifar100,paper or, without a file,
c2a2:cifar100,paper.
  DATA      digits cifar10 cifar100 fashion_mnist tiny_imagenet food101 imagenet
            domainnet/clipart (infograph, painting, quickdraw, real, sketch)
            folder=<path> csv=<path> hf=<name or path> tfds=<name>      (default: cifar10)
  RECIPE    strong (default; small for small custom data sets) fast small paper finetune
  SWITCHES  tiny (a smoke run: its accuracy means nothing) bf16 conv_only attention_only"""

#: Name → what it does and reads; all other input is refused.
COMMANDS = {
    "train": train.train,
    "eval": trained.evaluate,
    "probe": trained.probe,
    "predict": trained.predict,
    "visualize": trained.visualize,
    "serve": serve.serve,
    "export": weights.export,
    "report": trained.report,
    "list": networks.listing,
    "summary": networks.summary,
    "plan": networks.plan,
    "compare": studies.compare,
    "study": studies.study,
    "curves": studies.curves,
    "crossval": studies.crossval,
    "search": studies.search,
    "power-search": studies.power_search,
    "convert": weights.convert,
    "benchmark": benchmark.benchmark,
}
COMMANDS["completion"] = completion.of(COMMANDS)
_GROUPS = {
    "Train": "train search crossval compare study curves power-search",
    "Use a trained network": "eval probe predict report visualize serve export",
    "Look before training": "list summary plan benchmark",
    "Tools": "convert completion",
}
for _group, _names in _GROUPS.items():
    for _name in _names.split():
        COMMANDS[_name] = dataclasses.replace(COMMANDS.pop(_name), group=_group)
