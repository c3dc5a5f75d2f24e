"""``csv=<path>``: a table of image files and their labels."""

import csv
import errno
import os
import unicodedata
import warnings
from pathlib import Path

from hsvit_jax.data.dataset import used_as
from hsvit_jax.data.listing import SPLIT_NAMES, File, Listing, Row
from hsvit_jax.text import few, one_line

_COLUMNS = {
    "image": ("image", "file", "filename", "path", "filepath"),
    "label": ("label", "class"),
    "split": ("split",),
}


def list_csv(path: str, test_only: bool = False) -> Listing:
    """Lists the images of a table: a head with the columns image, label and, at will, split.

    Paths are relative to the table's folder; without `split` a part of every class is held out.

    Args:
      test_only: one class will do.

    Raises:
      ValueError: there is no such table, it lacks a column, fewer than two classes, or an image
        with several labels or splits.
    """
    table = Path(os.path.expanduser(path))
    try:
        if table.exists() and not table.is_file():  # a pipe may have no end
            raise OSError(errno.EINVAL, "a directory, pipe or device, not a regular file")
        with table.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, skipinitialspace=True)
            columns = [str(name).strip().lower() for name in reader.fieldnames or ()]
            head = dict(zip(columns, reader.fieldnames or (), strict=True))
            found = {
                role: next((head[name] for name in names if name in head), None)
                for role, names in _COLUMNS.items()
            }
            if not (found["image"] and found["label"]):
                other = any(mark in name for name in head for mark in ";\t")
                raise ValueError(
                    f"csv={path} needs a head with the columns image and label; it has "
                    f"{few(head)}{': put commas between the columns' * other}"
                )
            if again := [name for name in head if name and columns.count(name) > 1]:
                raise ValueError(f"csv={path} has several columns {few(again)}: keep one of each")
            if unread := [n for n in head.values() if n and n not in found.values()]:
                warnings.warn(f"csv={path}: columns not read: {few(unread)}", stacklevel=2)
            lines, blank = [], 0
            for cells in reader:
                if any(cells.get(None, ())):  # beyond the head
                    raise ValueError(
                        f"csv={path}: line {reader.line_num} has more cells than the head has "
                        'columns: put a label with a comma in it in quotation marks, "cat, small"'
                    )
                line = {r: (cells[name] or "").strip() for r, name in found.items() if name}
                if not (line["image"] and line["label"]):
                    raise ValueError(
                        f"csv={path}: line {reader.line_num} lacks its image or its label"
                    )
                lines.append(line)
                blank += not line.get("split")
                line["split"] = line.get("split", "").lower() or "train"
                line["label"] = unicodedata.normalize("NFC", line["label"])  # as a folder's name
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        why = getattr(error, "strerror", None) or error
        if isinstance(error, UnicodeDecodeError):
            why = f"{error}; save the table as UTF-8"
        raise ValueError(f"csv={one_line(path)} cannot be read: {why}") from None
    if 0 < blank < len(lines):
        warnings.warn(
            f"csv={path}: {blank:,} of {len(lines):,} lines have a blank split and count as train",
            stacklevel=2,
        )
    names = sorted({line["label"] for line in lines})
    unknown = {line["split"] for line in lines} - set(SPLIT_NAMES)
    least = 1 if test_only else 2
    if len(names) < least:
        raise ValueError(f"csv={path} needs {least} or more labels; it has {few(names)}")
    if unknown:
        raise ValueError(
            f"csv={path} has the splits {few(sorted(unknown))}, of which {few(SPLIT_NAMES)} "
            "are known"
        )
    first: dict[str, dict[str, str]] = {}
    twice = []
    for line in lines:
        same = first.setdefault(os.path.abspath(table.parent / line["image"]), line)  # by any path
        if {**same, "image": line["image"]} != line:
            twice.append(line["image"])
    if twice:
        raise ValueError(
            f"csv={path} gives several labels or splits to {few(twice)}: give each image one"
        )
    if len(first) < len(lines):  # else one copy could be trained on and another be the test
        warnings.warn(
            f"csv={path}: {len(lines) - len(first):,} lines name an image again and are not used",
            stacklevel=2,
        )
        lines = list(first.values())
    parts = [SPLIT_NAMES[line["split"]] for line in lines]
    used = used_as(set(parts))
    number = {name: i for i, name in enumerate(names)}
    rows = []
    for line, part in zip(lines, parts, strict=True):
        file = table.parent / line["image"]
        info = file.stat() if os.path.isfile(file) else None  # decoding reports a missing one
        stamp = (info.st_size, info.st_ctime_ns) if info else ()
        row = File(line["image"], os.fspath(file), *stamp)
        rows.append(Row(row, number[line["label"]], used[part]))
    if not any(os.path.isfile(row.file.path) for row in rows):
        hint = ", with / in place of \\" if "\\" in lines[0]["image"] else ""
        raise ValueError(
            f"csv={path}: none of its images is there, {one_line(lines[0]['image'])} first; paths "
            f"are relative to the table's folder{hint}"
        )
    return Listing(os.fspath(table.parent), tuple(names), tuple(rows))
