"""The command line: flags, then one call. Everything else can be imported from a notebook."""

import sys

from hsvit_jax import host

host.prepare()  # before anything imports jax

from absl import flags  # noqa: E402
from ml_collections import config_flags  # noqa: E402

_MODES = ("train", "eval", "predict", "summary")

config_flags.DEFINE_config_file("config", None, "Configuration file, with :data,recipe,switches.")
flags.DEFINE_enum("mode", "train", _MODES, "What to do.")
flags.DEFINE_string("workdir", None, "Folder of the run; default: a readable name under runs/.")
flags.DEFINE_string("checkpoint", None, "eval, predict: a run's or checkpoint's folder.")
flags.DEFINE_string("which", "best", "eval, predict: 'best', 'latest' or a step.")
flags.DEFINE_enum("split", "test", ("train", "val", "test"), "eval: the split.")
flags.DEFINE_integer("top_k", 5, "predict: classes per image.", lower_bound=1)
flags.DEFINE_enum("format", "table", ("table", "csv", "json"), "predict: form of the output.")

USAGE = """usage: python -m hsvit_jax.main --config=FILE[:DATA,RECIPE,SWITCHES] [--config.KEY=VALUE]

  train     python -m hsvit_jax.main --config=configs/c4a8.py
            python -m hsvit_jax.main --config=configs/c2a2.py:digits --config.train.epochs=5
            python -m hsvit_jax.main --config=configs/c2a2.py:folder=my_images
  eval      python -m hsvit_jax.main --mode=eval --checkpoint=runs/c2a2-digits-strong-seed0
  predict   python -m hsvit_jax.main --mode=predict --checkpoint=runs/... cat.jpg photos/
  summary   python -m hsvit_jax.main --mode=summary --config=configs/c4a8.py:tiny_imagenet

DATA      digits cifar10 cifar100 fashion_mnist tiny_imagenet food101 imagenet
          folder=<path> tfds=<name>          (default: cifar10)
RECIPE    strong (default) or paper          SWITCHES  tiny bf16 conv_only attention_only
All flags: python -m hsvit_jax.main --help"""


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns its exit code; user mistakes are told in one line."""
    argv = sys.argv if argv is None else argv
    if len(argv) == 1:
        print(USAGE)
        return 2
    from hsvit_jax import commands

    return commands.run(argv, USAGE)


if __name__ == "__main__":
    sys.exit(main())
