"""The commands of `hsvit`: one table, which the program, its --help and docs/ are made from."""

from collections.abc import Mapping

from absl import flags

from hsvit_jax.cli import EVERYTHING, MESH, Command, Numbers, define_path
from hsvit_jax.commands import compare, crossval, curves, lr_find, power_search, study

ABOUT = """\
FILE[:DATA,RECIPE,SWITCHES] is, for example, configs/c2a2.py:cifar100,paper or, without a file,
c2a2:cifar100,paper.
  DATA      digits cifar10 cifar100 fashion_mnist tiny_imagenet food101 imagenet
            domainnet/clipart (infograph, painting, quickdraw, real, sketch)
            folder=<path> csv=<path> hf=<name or path> tfds=<name>      (default: cifar10)
  RECIPE    strong (default; small for few images of one's own) fast small paper finetune
  SWITCHES  tiny (a smoke run: its accuracy means nothing) bf16 conv_only attention_only"""

_DATA = "data.name data.dir"
_EVALUATION = f"{_DATA} data.val_fraction data.on_bad_image eval {MESH}"
_COSTS = f"model {_DATA} data.image_size data.channels data.num_classes optim.name train.batch "
_COSTS += "train.ema_decay"

_WORKDIR = (define_path, "workdir", None, "Folder of the run; default: a name under runs/.")
_RUN = (
    (define_path, "checkpoint", None, "As RUN: a run or checkpoint, exported file, or zoo:NAME."),
    (define_path, "workdir", None, "As RUN: the folder of a run."),
    (flags.DEFINE_string, "which", "best", "Checkpoint of RUN: 'best', 'latest' or a step."),
)
_DISTRIBUTED = "auto, off, or COORDINATOR:PORT,PROCESSES,INDEX."
_JOB = (flags.DEFINE_string, "distributed", "auto", _DISTRIBUTED)
_STALL = "Seconds without a step, then exit 75; 0: never. Default: 600, alone 3600."
_SPLIT = "Which images; default: all of a folder or csv in --config beside RUN, else test."
_EXPORT_FORMATS = ["file", "hub", "reference", "stablehlo", "onnx"]
_EXPORT_FORMAT = "Default: by OUT's ending. hub: a folder; reference: the authors' PyTorch names."
_TOLERANCE = "Of the largest logit; default: 1e-9 for logits_f64 (rotary 1e-6), 1e-5 for logits."
_WORK = ["train", "infer", "input", "eval"]

#: Name → what it does and reads; all other input is refused.
COMMANDS: Mapping[str, Command] = {
    "train": Command(
        "Trains a network, or goes on with a run that was stopped.",
        "hsvit_jax.commands.train",
        "$ --config=configs/c4a8.py\n"
        "$ --config=c2a2:digits --config.train.epochs=5\n"
        "$ --config=c2a2:folder=my_images",
        (
            _WORKDIR,
            _JOB,
            (flags.DEFINE_float, "stall_timeout", None, _STALL, 0.0),
            (flags.DEFINE_bool, "recoverable", False, "Go on with surviving processes' groups."),
            (flags.DEFINE_bool, "report", True, "Write report.html at the end."),
        ),
        config=EVERYTHING,
        needs_config=True,
    ),
    "eval": Command(
        "Evaluates a trained network on a split, on other data, or with groups lost.",
        "hsvit_jax.commands.evaluate",
        "$ runs/c2a2-digits-strong-seed0 --split=test\n"
        "$ runs/pets --config=c2a2:folder=other_photos",
        (
            *_RUN,
            _JOB,
            (flags.DEFINE_enum, "split", None, ["all", "train", "val", "test"], _SPLIT),
            (flags.DEFINE_list, "drop_groups", None, "Numbers of lost attention groups."),
            (define_path, "curve", None, "A PNG of accuracy against groups lost."),
        ),
        config=_EVALUATION,
        exclusive=("curve drop_groups",),
    ),
    "predict": Command(
        "Classifies image files and folders of them.",
        "hsvit_jax.commands.predict",
        "$ runs/c2a2-digits-strong-seed0 cat.jpg photos/",
        (
            *_RUN,
            _JOB,
            (flags.DEFINE_integer, "top_k", 5, "Classes per image.", 1),
            (flags.DEFINE_enum, "format", "table", ["table", "csv", "json"], "The output."),
            (flags.DEFINE_bool, "calibrated", False, "By the temperature of the run's report."),
        ),
        config=MESH,
        words="IMAGE ...",
    ),
    "visualize": Command(
        "Draws feature maps, votes and attention maps of images.",
        "hsvit_jax.commands.visualize",
        "$ runs/c2a2-digits-strong-seed0 cat.jpg --out=views",
        (*_RUN, _JOB, (define_path, "out", "views", "Folder of the PNGs.")),
        config=MESH,
        words="IMAGE ...",
    ),
    "serve": Command(
        "Serves a trained network over HTTP, with a page to try it on.",
        "hsvit_jax.commands.serve",
        "$ runs/c2a2-digits-strong-seed0 --port=8000\n"
        "$ zoo:c2a2-digits --host=0.0.0.0 --token=SECRET",
        (
            *_RUN,
            (flags.DEFINE_string, "host", "127.0.0.1", "Address; beyond loopback with --token."),
            (flags.DEFINE_integer, "port", 8000, "Port; 0 for a free one.", 0, 65535),
            (flags.DEFINE_string, "token", None, "Requests must bear it; or give HSVIT_TOKEN."),
            (flags.DEFINE_integer, "batch", 64, "The most images computed together.", 1, 4096),
            (flags.DEFINE_float, "wait", 2.0, "Milliseconds that an image waits for others.", 0.0),
            (flags.DEFINE_integer, "queue", 256, "Requests at a time, and images that wait.", 1),
            (flags.DEFINE_float, "timeout", 30.0, "Seconds until a request is given up.", 0.1),
            (flags.DEFINE_integer, "max_megabytes", 32, "Of a request.", 1, 256),
            (flags.DEFINE_integer, "max_pixels", 25_000_000, "Of an image.", 1, 89_478_485),
            (flags.DEFINE_integer, "parts", 0, "Ray deployments to cut it into; 0: none.", 0),
            (flags.DEFINE_float, "deadline", 1.0, "--parts: seconds that a part may take.", 0.01),
            (flags.DEFINE_float, "part_cpus", 0.0, "--parts: CPUs of each, as Ray counts.", 0.0),
            (flags.DEFINE_float, "part_gpus", 0.0, "--parts: GPUs of each.", 0.0),
        ),
    ),
    "export": Command(
        "Writes a trained network as one file, for the hub, under other names, or as programs.",
        "hsvit_jax.commands.export",
        "$ runs/c2a2-digits-strong-seed0 model.safetensors\n"
        "$ runs/c2a2-digits-strong-seed0 model.onnx\n"
        "$ runs/c2a2-digits-strong-seed0 four --format=stablehlo --parts=4",
        (
            *_RUN,
            (flags.DEFINE_enum, "format", None, _EXPORT_FORMATS, _EXPORT_FORMAT),
            (flags.DEFINE_integer, "parts", None, "Programs of an HSViT's groups, and a head.", 1),
            (flags.DEFINE_bool, "fused", False, "A FastViT's branches as single convolutions."),
        ),
        words="OUT",
    ),
    "report": Command(
        "Writes a run's curves, figures by class, calibration and hardest images as one HTML file.",
        "hsvit_jax.commands.report",
        "$ runs/c2a2-digits-strong-seed0 --split=test",
        (
            *_RUN,
            (flags.DEFINE_enum, "split", "val", ["train", "val", "test"], "Which images."),
            (define_path, "out", None, "Default: report.html of the run, or NAME-report.html."),
        ),
    ),
    "list": Command(
        "Lists the networks, data sets, recipes and trained networks that have names.",
        "hsvit_jax.commands.listing",
        "$",
    ),
    "summary": Command(
        "Prints parameters, FLOPs by module, and memory of a network.",
        "hsvit_jax.commands.summary",
        "$ --config=configs/c4a8.py:tiny_imagenet",
        config=f"{_COSTS} eval.batch",
        needs_config=True,
    ),
    "plan": Command(
        "Predicts communication and efficiency of an HSViT on many devices.",
        "hsvit_jax.commands.plan",
        "$ --config=configs/c4a8.py --devices=4096",
        (
            (flags.DEFINE_integer, "devices", None, "The most devices.", 1),
            (flags.DEFINE_integer, "group", None, "Devices on the group axis.", 1),
            (flags.DEFINE_integer, "batch", None, "Examples per step.", 1),
            (flags.DEFINE_float, "bandwidth", 5e10, "Bytes/s between two devices.", 1.0),
            (flags.DEFINE_float, "flops", 1e14, "FLOP/s of a device.", 1.0),
            (flags.DEFINE_float, "latency", 5e-6, "Seconds of one message.", 0.0),
            (flags.DEFINE_bool, "json", False, "Print JSON."),
            (define_path, "out", None, "A PNG to draw."),
        ),
        config=f"{_COSTS} mesh.aggregate mesh.gradients",
        needs_config=True,
    ),
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
    "benchmark": Command(
        "Measures speed and memory, in one line of JSON.",
        "hsvit_jax.benchmark.measure",
        "$ --config=configs/c2a2.py --batch=128 --work=train\n"
        "$ --config=configs/c2a2.py --vs='COMMAND THAT PRINTS A JSON LINE'\n"
        "$ --peak",
        (
            (flags.DEFINE_enum, "work", "train", _WORK, "Work to time."),
            (flags.DEFINE_integer, "batch", None, "Images per step.", 1),
            (flags.DEFINE_integer, "steps", 10, "Steps that are timed.", 1),
            (flags.DEFINE_integer, "warmup", 2, "Steps before them.", 1),
            (flags.DEFINE_bool, "no_augment", False, "train, input: only normalise the images."),
            (flags.DEFINE_bool, "data", False, "The config's data set, not random images."),
            (define_path, "trace", None, "Write a profile of a few more steps here."),
            (flags.DEFINE_bool, "peak", False, "Time a large product and convolution, no more."),
            (flags.DEFINE_string, "vs", None, "Shell command to alternate with."),
            (flags.DEFINE_integer, "rounds", 5, "--vs: runs of each.", 1),
        ),
        config=EVERYTHING,
        exclusive=("vs peak", "batch train.batch"),
        remember=False,
    ),
}
