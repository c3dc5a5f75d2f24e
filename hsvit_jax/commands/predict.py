"""hsvit predict: the top classes of image files."""

import json
from typing import Any

from absl import flags

from hsvit_jax.cli import MESH, Command, Request
from hsvit_jax.commands.trained import JOB, RUN, load_classifier
from hsvit_jax.text import one_line, printable

# Decoded images of a large folder would not fit in memory together.
_FILES_AT_ONCE = 256

COMMAND = Command(
    "Classifies image files and folders of them.",
    __name__,
    "$ runs/c2a2-digits-strong-seed0 cat.jpg photos/",
    (
        *RUN,
        JOB,
        (flags.DEFINE_integer, "top_k", 5, "Classes per image.", 1),
        (flags.DEFINE_enum, "format", "table", ["table", "csv", "json"], "The output."),
        (flags.DEFINE_bool, "calibrated", False, "By the temperature of the run's report."),
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
        if form != "csv":  # a table is aligned and JSON closed over all files
            rows += found
        elif found and shows:  # kept, whatever ends a long run early
            print(render(found, form, head=head), flush=True)
            head = False
    if shows and (rows or form == "json" or (form == "csv" and head)):
        print(render(rows, form))
    for error in errors:
        coordination.print_once(error)
    return 1 if errors else 0


def render(rows: list[dict[str, Any]], form: str, *, head: bool = True) -> str:
    """Formats rows as 'table', 'csv' or 'json', with control characters in names escaped.

    Args:
      head: whether a CSV begins with its head.
    """
    from hsvit_jax.artifacts import csv_text

    if form == "json":
        return json.dumps(rows, indent=2)
    if form == "csv":
        columns = ["file", "rank", "label", "probability"]
        cells = [[r["file"], r["rank"], r["label"], f"{r['probability']:.6f}"] for r in rows]
        return printable(csv_text([columns] * head + cells).rstrip("\n"))
    by_file: dict[str, list[str]] = {}
    for row in rows:
        top = f"{row['label']} {row['probability']:.1%}"
        by_file.setdefault(one_line(row["file"]), []).append(top)
    width = max((len(name) for name in by_file), default=0)
    lines = (f"{name:<{width}}  {'  '.join(top)}" for name, top in by_file.items())
    return printable("\n".join(lines))
