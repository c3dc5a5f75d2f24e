"""hsvit predict: the top classes of image files."""

from absl import flags

from hsvit_jax.cli import MESH, Command, Request
from hsvit_jax.commands.trained import JOB, RUN, load_classifier

_FILES_AT_ONCE = 256  # decoded images in memory

COMMAND = Command(
    "Classifies image files and folders of them.",
    __name__,
    "$ runs/c2a2-digits-strong-seed0 cat.jpg photos/",
    (
        *RUN,
        JOB,
        (flags.DEFINE_integer, "top_k", 5, "Classes per image.", 1),
        (flags.DEFINE_enum, "format", "table", ["table", "csv", "json"], "The output."),
        (flags.DEFINE_bool, "calibrated", False, "Use the temperature of the run's report."),
    ),
    config=MESH,
    words="IMAGE ...",
)


def run(request: Request) -> int:
    """Prints the top classes of each image; returns 1 where a file is no image."""
    from hsvit_jax.classifier import files
    from hsvit_jax.runtime import coordination

    paths, form = files.listed(request.words), request.flags.format
    network, rows, errors = load_classifier(request), [], []
    shows, head = coordination.is_lead(), True
    for first in range(0, len(paths), _FILES_AT_ONCE):
        some = paths[first : first + _FILES_AT_ONCE]
        found, unread = files.predict(network, some, request.flags.top_k)
        errors += unread
        if form != "csv":
            rows += found
        elif found and shows:  # at once, as a long run may end early
            print(files.render(found, form, head=head), flush=True)
            head = False
    if shows and (rows or form == "json" or (form == "csv" and head)):
        print(files.render(rows, form))
    for error in errors:
        coordination.print_once(error)
    return 1 if errors else 0
