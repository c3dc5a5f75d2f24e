"""The commands of `hsvit`: one table, which the program, its --help and docs/ are made from.

A command is a module: what it reads, beside its work. What the work needs is imported by it.
"""

from collections.abc import Mapping

from absl import flags

from hsvit_jax.cli import Command, Numbers
from hsvit_jax.commands import (
    benchmark,
    compare,
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

_TOLERANCE = "Of the largest logit; default: 1e-9 for logits_f64 (rotary 1e-6), 1e-5 for logits."

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
    "convert": Command(
        "Converts PyTorch weights to a run's folder.",
        "hsvit_jax.commands.convert",
        "$ weights.safetensors\n"
        "$ last.ckpt runs/converted --config=c2a2 --config.data.image_size=32,48\n"
        "FILE is a state dict (.npz, .safetensors; with torch installed .ckpt, .pt, .pth, .bin).\n"
        "OUT is the folder to write: <stem>-jax beside FILE by default. Prints one line of JSON.",
        (
            (flags.DEFINE, Numbers(float), "mean", None, "Of pixels in [0, 1]; default: 0.5."),
            (flags.DEFINE, Numbers(float), "std", None, "Of pixels in [0, 1]; default: 0.5."),
            (flags.DEFINE_string, "data", None, "Data set of the configuration; default: cifar10."),
            (flags.DEFINE_list, "class_names", None, "Of the logits, in their order, as cat,dog."),
            (flags.DEFINE_float, "tolerance", None, _TOLERANCE, 0.0, 0.1),
        ),
        config="model data",
        words="FILE [OUT]",
    ),
    "benchmark": benchmark.COMMAND,
}
