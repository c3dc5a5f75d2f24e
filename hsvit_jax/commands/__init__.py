"""The commands of `hsvit`: one table, which the program, its --help and docs/ are made from.

A command is a module: what it reads, beside its work. What the work needs is imported by it.
"""

from collections.abc import Mapping

from hsvit_jax.cli import Command
from hsvit_jax.commands import (
    benchmark,
    compare,
    convert,
    crossval,
    curves,
    evaluate,
    export,
    listing,
    lr_find,
    plan,
    power_search,
    predict,
    report,
    serve,
    study,
    summary,
    train,
    visualize,
)

ABOUT = """\
FILE[:DATA,RECIPE,SWITCHES] is, for example, configs/c2a2.py:cifar100,paper or, without a file,
c2a2:cifar100,paper.
  DATA      digits cifar10 cifar100 fashion_mnist tiny_imagenet food101 imagenet
            domainnet/clipart (infograph, painting, quickdraw, real, sketch)
            folder=<path> csv=<path> hf=<name or path> tfds=<name>      (default: cifar10)
  RECIPE    strong (default; small for few images of one's own) fast small paper finetune
  SWITCHES  tiny (a smoke run: its accuracy means nothing) bf16 conv_only attention_only"""

#: Name → what it does and reads; all other input is refused.
COMMANDS: Mapping[str, Command] = {
    "train": train.COMMAND,
    "eval": evaluate.COMMAND,
    "predict": predict.COMMAND,
    "visualize": visualize.COMMAND,
    "serve": serve.COMMAND,
    "export": export.COMMAND,
    "report": report.COMMAND,
    "list": listing.COMMAND,
    "summary": summary.COMMAND,
    "plan": plan.COMMAND,
    "compare": compare.COMMAND,
    "study": study.COMMAND,
    "curves": curves.COMMAND,
    "crossval": crossval.COMMAND,
    "lr-find": lr_find.COMMAND,
    "power-search": power_search.COMMAND,
    "convert": convert.COMMAND,
    "benchmark": benchmark.COMMAND,
}
