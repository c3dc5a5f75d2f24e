"""hsvit compare: several systems on the same data, in one table."""

from pathlib import Path

from absl import flags

from hsvit_jax import cli
from hsvit_jax.cli import EVERYTHING, Command, Numbers, Request, define_path

COMMAND = Command(
    "Trains several systems on the same data and compares them.",
    __name__,
    "$ configs/c2a2.py:digits configs/c3a4.py:digits --seeds=0,1,2\n"
    "$ 'c2a2:digits model.depth=1' 'c2a2:digits model.depth=4' resnet:18,digits\n"
    "$ c2a2:cifar10 vix:vit,cifar10 --fractions=0.01,0.05,0.1\n"
    "SPEC is a value of --config, with its own settings after blanks.\n"
    "--fractions: nested shares of each class; the first system's steps times FLOPs set\n"
    "the steps of the others. The same command resumes.",
    (
        (flags.DEFINE_list, "seeds", ["0"], "Seeds; one run of every system for each."),
        (define_path, "out", "runs/comparison", "Folder of the runs and the table."),
        (flags.DEFINE_integer, "batch", 64, "Images of the memory columns.", 1),
        (flags.DEFINE, Numbers(float), "fractions", None, "Shares of the images, as 0.01,0.1."),
    ),
    config=EVERYTHING,
    words="SPEC SPEC ...",
    exclusive=("seeds seed", "fractions data.fraction"),
)


def run(request: Request) -> None:
    """Trains and compares the systems that the words name; prints and writes the table."""
    from hsvit_jax.studies import compare, engine, grid

    values, settings, line = request.flags, request.settings, request.line
    fractions = sorted(set(values.fractions or ()))
    with cli.misuse():
        systems = engine.System.parse_all(request.words)
        for share in [[f"data.fraction={fraction:g}"] for fraction in fractions] or [[]]:
            engine.configure(systems, [*settings, *share], values.seeds)
    out, given = Path(values.out), (settings, values.seeds)
    if not fractions:
        rows = compare.ranked(engine.train_all(systems, out, *given), values.batch)
        print(compare.table(rows), *compare.write(rows, out, line), sep="\n")
    else:
        rows = compare.learning_curves(systems, out, fractions, *given)
        title = "Accuracy against training images, at equal compute for each number of images"
        axes = "training images of a class", "system"
        print(*grid.write(rows, title, axes, out, "fractions", line), sep="\n")
    engine.refuse_left_out(len(systems) * max(len(fractions), 1), len(rows))
