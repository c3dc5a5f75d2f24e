"""The command line: its flags and modes, then one call."""

import sys

from hsvit_jax.runtime import program

program.prepare("hsvit_jax.main", __name__)

from absl import flags  # noqa: E402

from hsvit_jax import cli  # noqa: E402

USAGE = """usage: python -m hsvit_jax.main --config=FILE[:DATA,RECIPE,SWITCHES] [--config.KEY=VALUE]

  train     python -m hsvit_jax.main --config=configs/c4a8.py
            python -m hsvit_jax.main --config=configs/c2a2.py:digits --config.train.epochs=5
            python -m hsvit_jax.main --config=configs/c2a2.py:folder=my_images
            python -m hsvit_jax.main --config=configs/vix.py:vin,hybrid,cifar10
  eval      python -m hsvit_jax.main --mode=eval --checkpoint=runs/c2a2-digits-strong-seed0
  predict   python -m hsvit_jax.main --mode=predict --checkpoint=runs/... cat.jpg photos/
  visualize python -m hsvit_jax.main --mode=visualize --checkpoint=runs/... cat.jpg --out=views
  export    python -m hsvit_jax.main --mode=export runs/c2a2-digits-strong-seed0 model.safetensors
  summary   python -m hsvit_jax.main --mode=summary --config=configs/c4a8.py:tiny_imagenet
  plan      python -m hsvit_jax.main --mode=plan --config=configs/c4a8.py --devices=4096

DATA      digits cifar10 cifar100 fashion_mnist tiny_imagenet food101 imagenet
          folder=<path> tfds=<name>          (default: cifar10)
RECIPE    strong (default), fast or paper    SWITCHES  tiny bf16 conv_only attention_only
All flags: python -m hsvit_jax.main --help      All keys: the same with --config=... --help"""

_RUN = "checkpoint workdir which"
_PLAN = "devices group batch bandwidth flops latency verify json out"
_DATA = "data.name data.dir"
_EVALUATION = f"{_DATA} data.val_fraction data.on_bad_image eval"
_COSTS = f"model {_DATA} data.image_size data.channels data.num_classes train.batch train.ema_decay"

#: What each mode reads: flags, and sections or keys of the configuration. The rest is refused.
MODES = {
    "train": cli.Mode("train", "workdir distributed stall_timeout recoverable", cli.EVERYTHING),
    "eval": cli.Mode("evaluate", f"{_RUN} split drop_groups curve", _EVALUATION),
    "predict": cli.Mode("predict", f"{_RUN} top_k format", files=True),
    "visualize": cli.Mode("visualize", f"{_RUN} out", files=True),
    "export": cli.Mode("export", f"{_RUN} format", files=True),
    "summary": cli.Mode("summary", "", f"{_COSTS} eval.batch"),
    "plan": cli.Mode("plan", _PLAN, f"{_COSTS} mesh.aggregate mesh.gradients"),
}

_STALL = "Seconds without a step, then exit 75; 0: never. Default: 600, alone 3600."
_SPLIT = "Which images; default: all of a folder in --config beside --checkpoint, else test."
_FORMATS = ["table", "csv", "json", "file", "hub", "reference"]
_FORMAT = "predict: table, csv or json; export: file, hub (a folder) or reference (PyTorch names)."
FLAGS = (
    (flags.DEFINE_enum, "mode", "train", [*MODES], "What to do."),
    (flags.DEFINE_string, "workdir", None, "Folder of the run; default: a name under runs/."),
    (flags.DEFINE_string, "distributed", "auto", "auto, off, or COORDINATOR:PORT,PROCESSES,INDEX."),
    (flags.DEFINE_float, "stall_timeout", None, _STALL, 0.0),
    (flags.DEFINE_bool, "recoverable", False, "Go on with the groups of surviving processes."),
    (
        flags.DEFINE_string,
        "checkpoint",
        None,
        "A run's or checkpoint folder, an exported file, or zoo:NAME.",
    ),
    (flags.DEFINE_string, "which", "best", "Of --checkpoint: 'best', 'latest' or a step."),
    (flags.DEFINE_enum, "split", None, ["all", "train", "val", "test"], _SPLIT),
    (flags.DEFINE_integer, "top_k", 5, "Classes per image.", 1),
    (flags.DEFINE_enum, "format", None, _FORMATS, _FORMAT),
    (flags.DEFINE_list, "drop_groups", [], "Numbers of lost attention groups."),
    (flags.DEFINE_string, "curve", None, "A PNG of accuracy against groups lost."),
    (flags.DEFINE_integer, "devices", None, "The most devices.", 1),
    (flags.DEFINE_integer, "group", None, "Devices on the group axis."),
    (flags.DEFINE_integer, "batch", None, "Examples per step."),
    (flags.DEFINE_float, "bandwidth", 5e10, "Bytes/s between two devices."),
    (flags.DEFINE_float, "flops", 1e14, "FLOP/s of a device."),
    (flags.DEFINE_float, "latency", 5e-6, "Seconds of one message."),
    (flags.DEFINE_bool, "verify", False, "Compile on 1-8 devices and compare."),
    (flags.DEFINE_bool, "json", False, "Print JSON."),
    (flags.DEFINE_string, "out", None, "plan: a PNG to draw; visualize: a folder."),
)


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    return cli.run(argv, USAGE, FLAGS, modes=MODES)


if __name__ == "__main__":
    sys.exit(main())
