"""The commands of `hsvit`: one table, which the program, its --help and docs/ are made from."""

from collections.abc import Mapping

from absl import flags

from hsvit_jax.cli import EVERYTHING, MESH, Command, Numbers, define_path

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
_FOLDS = (define_path, "workdir", None, "Folder of all, less its -foldsN; default as of train.")
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
        "commands.train",
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
        "commands.evaluate",
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
    ),
    "predict": Command(
        "Classifies image files and folders of them.",
        "commands.predict",
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
        "commands.visualize",
        "$ runs/c2a2-digits-strong-seed0 cat.jpg --out=views",
        (*_RUN, _JOB, (define_path, "out", "views", "Folder of the PNGs.")),
        config=MESH,
        words="IMAGE ...",
    ),
    "serve": Command(
        "Serves a trained network over HTTP, with a page to try it on.",
        "commands.serve",
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
        "commands.export",
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
        "commands.report",
        "$ runs/c2a2-digits-strong-seed0 --split=test",
        (
            *_RUN,
            (flags.DEFINE_enum, "split", "val", ["train", "val", "test"], "Which images."),
            (define_path, "out", None, "Default: report.html of the run, or NAME-report.html."),
        ),
    ),
    "list": Command(
        "Lists the networks, data sets, recipes and trained networks that have names.",
        "commands.listing",
        "$",
    ),
    "summary": Command(
        "Prints parameters, FLOPs by module, and memory of a network.",
        "commands.summary",
        "$ --config=configs/c4a8.py:tiny_imagenet",
        config=f"{_COSTS} eval.batch",
        needs_config=True,
    ),
    "plan": Command(
        "Predicts communication and efficiency of an HSViT on many devices.",
        "commands.plan",
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
    "compare": Command(
        "Trains several systems on the same data and compares them.",
        "commands.compare",
        "$ configs/c2a2.py:digits configs/c3a4.py:digits --seeds=0,1,2\n"
        "$ 'c2a2:digits model.depth=1' 'c2a2:digits model.depth=4' resnet:18,digits\n"
        "$ c2a2:cifar10 vix:vit,cifar10 --fractions=0.01,0.05,0.1\n"
        "SPEC is what --config takes elsewhere, and settings of its own after blanks.\n"
        "--fractions: nested shares of each class; the first system's steps times FLOPs decide\n"
        "the steps of the others. The same command again goes on where it stopped.",
        (
            (flags.DEFINE_list, "seeds", ["0"], "A run of every system for each of these."),
            (define_path, "out", "runs/comparison", "Folder of the runs and one table."),
            (flags.DEFINE_integer, "batch", 64, "Images of the memory columns.", 1),
            (flags.DEFINE, Numbers(float), "fractions", None, "Shares of the images, as 0.01,0.1."),
        ),
        config=EVERYTHING,
        words="SPEC SPEC ...",
    ),
    "study": Command(
        "Trains the networks of a paper's table or figure and draws it.",
        "studies.study",
        "$ fig5 --data=digits --epochs=4 --seeds=0,1,2\n"
        "NAME is dhvt_ablations, dhvt_table5, fig5, fig6, fig7, fig8, hvt_ablations, table4 or\n"
        "vix_table1, or a Python file whose get_study() returns a Study.\n"
        "The same command again goes on where it stopped.",
        (
            (flags.DEFINE_string, "data", None, "DATA,RECIPE; default: those of the paper."),
            (flags.DEFINE_float, "epochs", None, "Of each run; default: the recipe's."),
            (flags.DEFINE_list, "seeds", ["0"], "A run of every network for each of these."),
            (define_path, "out", None, "Folder of all; default: runs/study-NAME."),
        ),
        config=EVERYTHING,
        words="NAME",
    ),
    "curves": Command(
        "Draws accuracy and loss of several runs in one plot.",
        "studies.curves",
        "$ runs/c2a2-digits-strong-seed0 runs/c3a4-digits-strong-seed0",
        ((define_path, "out", "curves.png", "A PNG to draw."),),
        words="RUN RUN ...",
    ),
    "crossval": Command(
        "Cross-validates: a run for each fold of the training images, tested on that fold.",
        "studies.crossval",
        "$ --config=c2a2:folder=my_images --folds=5\n"
        "The same command again goes on where it stopped.",
        (_FOLDS, (flags.DEFINE_integer, "folds", 5, "Folds of each class.", 2)),
        config=EVERYTHING,
        needs_config=True,
    ),
    "lr-find": Command(
        "Finds a learning rate: draws the loss of a short run whose rate grows.",
        "studies.lr_find",
        "$ --config=c2a2:folder=my_images",
        (
            (flags.DEFINE_integer, "steps", 100, "Steps, each at a larger rate; at least 30.", 30),
            (define_path, "out", "lr-find.png", "A PNG to draw."),
        ),
        config=EVERYTHING,
        needs_config=True,
    ),
    "power-search": Command(
        "Learns how many tokens each block of a trained DeiT keeps, by PoWER's soft extraction.",
        "studies.power_search",
        "$ --config=deit:ti,cifar100,paper --config.init.from=runs/deit-ti\n"
        "Writes the network, which goes on training with the command that is printed.",
        (
            (flags.DEFINE_float, "epochs", 1.0, "Of the search, in place of train.epochs.", 0.0),
            (flags.DEFINE_float, "penalty", 1e-4, "Of a token; larger: fewer are kept.", 0.0),
            (flags.DEFINE_float, "rate", 1e-2, "Learning rate of what is kept.", 0.0),
            (define_path, "out", "power.safetensors", "The file to write."),
        ),
        config=EVERYTHING,
        needs_config=True,
    ),
    "convert": Command(
        "Converts PyTorch weights to a run's folder.",
        "commands.convert",
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
        words="FILE [OUT]",
    ),
    "benchmark": Command(
        "Measures speed and memory, in one line of JSON.",
        "benchmark.measure",
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
        remember=False,
    ),
}
