"""hsvit study: the networks of a paper's table or figure."""

from pathlib import Path

from absl import flags

from hsvit_jax import cli
from hsvit_jax.cli import EVERYTHING, Command, Request, define_path

COMMAND = Command(
    "Trains the networks of a paper's table or figure and draws it.",
    __name__,
    "$ fig5 --data=digits --epochs=4 --seeds=0,1,2\n"
    "NAME is dhvt_ablations, dhvt_table5, fig5, fig6, fig7, fig8, hvt_ablations, table4 or\n"
    "vix_table1, or a Python file whose get_study() returns a Study.\n"
    "The same command resumes.",
    (
        (flags.DEFINE_string, "data", None, "DATA,RECIPE; default: the paper's."),
        (flags.DEFINE_float, "epochs", None, "Epochs of each run; default: the recipe's."),
        (flags.DEFINE_list, "seeds", ["0"], "Seeds; one run of every network for each."),
        (define_path, "out", None, "Parent folder; default: runs/study-NAME."),
    ),
    config=EVERYTHING,
    words="NAME",
    exclusive=("epochs train.epochs train.steps", "seeds seed"),
)


def run(request: Request) -> None:
    """Trains the networks that are not trained yet; prints and writes the table."""
    from hsvit_jax.studies import engine, grid, study

    values, settings = request.flags, list(request.settings)
    with cli.misuse():
        path = study.find(*request.words)
    found = study.load(path)
    if values.epochs is not None:
        settings = [f"train.epochs={values.epochs:g}", *settings]
    systems, given = found.systems(values.data), (settings, values.seeds)
    with cli.misuse():
        engine.configure(systems, *given)
    out = Path(values.out or f"runs/study-{path.stem}")
    rows = engine.train_all(systems, out, *given, "data")
    axes = found.x, found.line
    print(*grid.write(rows, found.title, axes, out, path.stem, request.line), sep="\n")
    engine.refuse_left_out(len(systems), len(rows))
