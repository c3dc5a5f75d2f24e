"""hsvit crossval: a run for each fold of the training images."""

from pathlib import Path

from absl import flags

from hsvit_jax.cli import EVERYTHING, Command, Request, define_path

_FOLDS = (define_path, "workdir", None, "Parent folder without -foldsN; default: as for train.")

COMMAND = Command(
    "Cross-validates: a run for each fold of the training images, tested on that fold.",
    __name__,
    "$ --config=c2a2:folder=my_images --folds=5\nThe same command resumes.",
    (_FOLDS, (flags.DEFINE_integer, "folds", 5, "Folds of each class.", 2)),
    config=EVERYTHING,
    needs_config=True,
)


def run(request: Request) -> None:
    """Trains a run for each fold that is not trained yet; prints and writes the table."""
    from hsvit_jax.studies import crossval

    place, count = Path(request.workdir), request.flags.folds  # it may end in a slash
    place = place if place.name not in ("", "..") else place.resolve()
    out = place.with_name(f"{place.name}-folds{count}")
    print(*crossval.train_folds(request.config, count, out), sep="\n")
