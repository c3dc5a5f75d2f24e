"""The command line: flags, then one call. Everything else can be imported from a notebook."""

import contextlib
import sys

from hsvit_jax import host

if __name__ == "__main__":
    host.use_huge_pages()
host.prepare()  # before anything imports jax

from absl import flags  # noqa: E402

_MODES = ("train", "eval", "predict", "visualize", "summary", "plan")

USAGE = """usage: python -m hsvit_jax.main --config=FILE[:DATA,RECIPE,SWITCHES] [--config.KEY=VALUE]

  train     python -m hsvit_jax.main --config=configs/c4a8.py
            python -m hsvit_jax.main --config=configs/c2a2.py:digits --config.train.epochs=5
            python -m hsvit_jax.main --config=configs/c2a2.py:folder=my_images
            python -m hsvit_jax.main --config=configs/vix.py:vin,hybrid,cifar10
  eval      python -m hsvit_jax.main --mode=eval --checkpoint=runs/c2a2-digits-strong-seed0
  predict   python -m hsvit_jax.main --mode=predict --checkpoint=runs/... cat.jpg photos/
  visualize python -m hsvit_jax.main --mode=visualize --checkpoint=runs/... cat.jpg --out=views
  summary   python -m hsvit_jax.main --mode=summary --config=configs/c4a8.py:tiny_imagenet
  plan      python -m hsvit_jax.main --mode=plan --config=configs/c4a8.py --devices=4096

DATA      digits cifar10 cifar100 fashion_mnist tiny_imagenet food101 imagenet
          folder=<path> tfds=<name>          (default: cifar10)
RECIPE    strong (default) or paper          SWITCHES  tiny bf16 conv_only attention_only
All flags: python -m hsvit_jax.main --help      All keys: the same with --config=... --help"""


def make_flags() -> flags.FlagValues:
    """The flags besides --config, in a set of their own: those of a notebook stay untouched."""
    values = flags.FlagValues()
    values.set_gnu_getopt(True)  # flags may come after the images to predict
    own = {"flag_values": values}
    flags.DEFINE_enum("mode", "train", _MODES, "What to do.", **own)
    flags.DEFINE_string("workdir", None, "Folder of the run; default: a name under runs/.", **own)
    where = "train: auto, off, or host:port,n,i of process 0, their number and this one."
    flags.DEFINE_string("distributed", "auto", where, **own)
    stall = "train: seconds without a step, then exit 75; 0: never. Default: 600 with processes."
    flags.DEFINE_float("stall_timeout", None, stall, lower_bound=0.0, **own)
    lost = "train: when a process is lost, go on with the groups that are left."
    flags.DEFINE_bool("recoverable", False, lost, **own)
    flags.DEFINE_string("checkpoint", None, "A run's or checkpoint folder.", **own)
    flags.DEFINE_string("which", "best", "Of --checkpoint: 'best', 'latest' or a step.", **own)
    flags.DEFINE_enum("split", "test", ("train", "val", "test"), "eval: the split.", **own)
    flags.DEFINE_integer("top_k", 5, "predict: classes per image.", lower_bound=1, **own)
    flags.DEFINE_enum("format", "table", ("table", "csv", "json"), "predict: the output.", **own)
    flags.DEFINE_list("drop_groups", [], "eval: numbers of lost attention groups.", **own)
    flags.DEFINE_string("curve", None, "eval: a PNG of accuracy against groups lost.", **own)
    flags.DEFINE_integer("devices", None, "plan: the most devices.", lower_bound=1, **own)
    flags.DEFINE_integer("group", None, "plan: devices on the group axis.", **own)
    flags.DEFINE_integer("batch", None, "plan: examples per step.", **own)
    flags.DEFINE_float("bandwidth", 5e10, "plan: bytes/s between two devices.", **own)
    flags.DEFINE_float("flops", 1e14, "plan: FLOP/s of a device.", **own)
    flags.DEFINE_float("latency", 5e-6, "plan: seconds of one message.", **own)
    flags.DEFINE_bool("verify", False, "plan: compile on 1-8 devices and compare.", **own)
    flags.DEFINE_bool("json", False, "plan: print JSON.", **own)
    flags.DEFINE_string("out", None, "plan: a PNG to draw; visualize: a folder.", **own)
    return values


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns its exit code; user mistakes are told in one line."""
    argv = sys.argv if argv is None else argv
    if len(argv) == 1:
        with contextlib.suppress(BrokenPipeError):
            print(USAGE, flush=True)
        return 2
    from hsvit_jax import commands

    return commands.run(argv, USAGE, make_flags())


if __name__ == "__main__":
    host.remember_compilations()
    sys.exit(main())
