"""The commands that train several runs, or draw them: hsvit compare, study, curves and others."""

from pathlib import Path

from absl import flags

from hsvit_jax import cli, storage
from hsvit_jax.cli import EVERYTHING, Command, Request, define_numbers, define_path

_SEEDS = "Seeds; one run of every network for each."
_PLACE = "Parent folder without -foldsN; default: as for train."


@Command(
    "Trains several systems on the same data and compares them.",
    "$ configs/c2a2.py:digits configs/c3a4.py:digits --seeds=0,1,2\n"
    "$ 'c2a2:digits model.depth=1' 'c2a2:digits model.depth=4' resnet:18,digits\n"
    "$ c2a2:cifar10 vix:vit,cifar10 --fractions=0.01,0.05,0.1\n"
    "SPEC is a value of --config, with its own settings after blanks.\n"
    "--fractions: nested shares of each class; the first system's steps times FLOPs set\n"
    "the steps of the others. The same command resumes.",
    (
        (flags.DEFINE_list, "seeds", ["0"], _SEEDS),
        (define_path, "out", "runs/comparison", "Folder of the runs and the table."),
        (flags.DEFINE_integer, "batch", 64, "Images of the memory columns.", 1),
        (define_numbers, "fractions", None, "Shares of the images, as 0.01,0.1."),
    ),
    config=EVERYTHING,
    words="SPEC SPEC ...",
    exclusive=("seeds seed", "fractions data.fraction"),
)
def compare(request: Request) -> None:
    """Trains and compares the systems that the words name; prints and writes the table."""
    from hsvit_jax.studies import engine, tables

    values, settings, line = request.flags, request.settings, request.line
    fractions = sorted(set(values.fractions or ()))
    with cli.misuse():
        systems = engine.System.parse_all(request.words)
        for share in [[f"data.fraction={fraction:g}"] for fraction in fractions] or [[]]:
            engine.configure(systems, [*settings, *share], values.seeds)
    out, given = Path(values.out), (settings, values.seeds)
    if not fractions:
        rows = tables.ranked(engine.train_all(systems, out, *given), values.batch)
        print(tables.comparison(rows), *tables.write_comparison(rows, out, line), sep="\n")
    else:
        rows = engine.learning_curves(systems, out, fractions, *given)
        title = "Accuracy against training images, at equal compute for each number of images"
        axes = "training images of a class", "system"
        print(*tables.write_grid(rows, title, axes, out, "fractions", line), sep="\n")
    engine.refuse_left_out(len(systems) * max(len(fractions), 1), len(rows))


@Command(
    "Trains the networks of a paper's table or figure and draws it.",
    "$ fig5 --data=digits --epochs=4 --seeds=0,1,2\n"
    "NAME is dhvt_ablations, dhvt_table5, fig5, fig6, fig7, fig8, hvt_ablations, table4 or\n"
    "vix_table1, or a Python file whose get_study() returns a Study.\n"
    "The same command resumes.",
    (
        (flags.DEFINE_string, "data", None, "DATA,RECIPE; default: the paper's."),
        (flags.DEFINE_float, "epochs", None, "Epochs of each run; default: the recipe's."),
        (flags.DEFINE_list, "seeds", ["0"], _SEEDS),
        (define_path, "out", None, "Parent folder; default: runs/study-NAME."),
    ),
    config=EVERYTHING,
    words="NAME",
    exclusive=("epochs train.epochs train.steps", "seeds seed"),
)
def study(request: Request) -> None:
    """Trains the networks that are not trained yet; prints and writes the table."""
    from hsvit_jax.studies import engine, study, tables

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
    print(*tables.write_grid(rows, found.title, axes, out, path.stem, request.line), sep="\n")
    engine.refuse_left_out(len(systems), len(rows))


@Command(
    "Draws accuracy and loss of several runs in one plot.",
    "$ runs/c2a2-digits-strong-seed0 runs/c3a4-digits-strong-seed0",
    ((define_path, "out", "curves.png", "A PNG to draw."),),
    words="RUN RUN ...",
)
def curves(request: Request) -> None:
    """Draws the curves of the runs that the words name."""
    from hsvit_jax.studies import curves

    out, folders = cli.ending(request.flags.out), list(map(storage.local, request.words))
    if out.name == "curves.png" and (out.parent / "metrics.jsonl").exists():
        raise cli.Misuse(f"--out={out} is the plot of a run: choose another name")
    curves.draw(curves.read(folders), out)
    print(out)


@Command(
    "Cross-validates: a run for each fold of the training images, tested on that fold.",
    "$ --config=c2a2:folder=my_images --folds=5\nThe same command resumes.",
    (
        (define_path, "workdir", None, _PLACE),
        (flags.DEFINE_integer, "folds", 5, "Folds of each class.", 2),
    ),
    config=EVERYTHING,
    needs_config=True,
)
def crossval(request: Request) -> None:
    """Trains a run for each fold that is not trained yet; prints and writes the table."""
    from hsvit_jax.studies import crossval

    place, count = Path(request.workdir), request.flags.folds  # it may end in a slash
    place = place if place.name not in ("", "..") else place.resolve()
    out = place.with_name(f"{place.name}-folds{count}")
    print(*crossval.train_folds(request.config, count, out), sep="\n")


def _lowest(settings: list[str]) -> list[str]:
    """Maps a search's settings to those of one configuration: the first values."""
    from hsvit_jax.studies import space

    fixed, spans = space.split(settings)
    return [*fixed, *(f"{key}={span.values[0]}" for key, span in spans.items())]


@Command(
    "Searches settings by short trainings, judged on the validation split.",
    "$ --config=c2a2:folder=my_images --config.optim.learning_rate=1e-4..1e-2:log\n"
    "$ --config=c2a2:digits --trials=40 --config.model.depth={1,2} --config.seed=1\n"
    "LOW..HIGH: any number between, with :log evenly in its logarithm. {A,B} or a repeated\n"
    "key: one of them. The same command resumes, and a larger --trials adds trials.",
    (
        (flags.DEFINE_integer, "trials", 20, "Trials, with those of earlier calls.", 1),
        (define_path, "workdir", None, "Folder of the trials; default: as for train."),
    ),
    config=EVERYTHING,
    needs_config=True,
    single=_lowest,
)
def search(request: Request) -> None:
    """Runs the trials; prints the table, and the command that evaluates the best one."""
    from hsvit_jax.studies import search, space

    fixed, spans = space.split(request.settings)
    with cli.misuse():
        found = search.Search.of(request.spec, fixed, spans)
    out = Path(request.workdir)
    rows = found.run(out, request.flags.trials)
    print(*found.write(rows, out, request.line), sep="\n")
    line = request.train_line(**{key: str(rows[0][key]) for key in spans})
    print(
        f"best, with its evaluation on the test split:\n  {line} --workdir={out / rows[0]['trial']}"
    )


@Command(
    "Learns how many tokens each block of a trained DeiT keeps, by PoWER's soft extraction.",
    "$ --config=deit:ti,cifar100,paper --config.init.from=runs/deit-ti\n"
    "Writes the network and prints the command that resumes its training.",
    (
        (flags.DEFINE_float, "epochs", 1.0, "Epochs of the search; replaces train.epochs.", 0.0),
        (flags.DEFINE_float, "penalty", 1e-4, "Penalty of a token; larger keeps fewer.", 0.0),
        (flags.DEFINE_float, "rate", 1e-2, "Learning rate of the retention.", 0.0),
        (define_path, "out", "power.safetensors", "The file to write."),
    ),
    config=EVERYTHING,
    needs_config=True,
    exclusive=("epochs train.epochs train.steps",),
)
def power_search(request: Request) -> None:
    """Searches, writes the network, and prints what it keeps and the command of the third step."""
    from hsvit_jax import artifacts
    from hsvit_jax import config as config_lib
    from hsvit_jax.studies import power_search

    values, path = request.flags, cli.ending(request.flags.out, ".safetensors")
    artifacts.prepare_for(path)  # it may fail
    if path.exists():
        raise ValueError(f"--out={path} is there already: move it or choose another name")
    config = config_lib.override(request.config, [f"train.epochs={values.epochs}"])
    found = power_search.search(config, values.penalty, values.rate)
    artifacts.write_file(path, found.file)
    kept = ",".join(map(str, found.retained))
    print(
        f"tokens after each block's attention: {kept}, {found.share:.0%} of the "
        f"multiply-adds\n  network  {path}\n"
        f"  train    {request.train_line(**{'init.from': str(path)}, **found.changes)}"
    )
