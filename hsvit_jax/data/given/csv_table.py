"""``csv=<path>``: a table of image files and their labels."""

import csv
import io
import os
import unicodedata
import warnings
from pathlib import Path

from hsvit_jax.data.dataset import used_as
from hsvit_jax.data.images import read_file
from hsvit_jax.data.listing import SPLIT_NAMES, File, Listing, Row
from hsvit_jax.text import few, one_line

_COLUMNS = {
    "image": ("image", "file", "filename", "path", "filepath"),
    "label": ("label", "class"),
    "split": ("split",),
}


def list_csv(path: str) -> Listing:
    """Lists the images of a table: a head with the columns image, label and, at will, split.

    Paths are relative to the table's folder; without `split` a part of every class is held out.

    Raises:
      ValueError: the table cannot be read, it lacks a column, or a line lacks its image or label,
        has more cells than the head or an unknown split.
    """
    table = Path(os.path.expanduser(path))
    try:
        text = io.StringIO(read_file(table).decode("utf-8-sig"), newline="")
        reader = csv.DictReader(text, skipinitialspace=True)
        head = {name.strip().lower(): name for name in reader.fieldnames or ()}
        image, label, split = (
            next((head[name] for name in names if name in head), "") for names in _COLUMNS.values()
        )
        if not (image and label):
            raise ValueError(f"it needs the columns image and label; it has {few(head)}")
        lines = []
        for cells in reader:
            texts = [(cells.get(name) or "").strip() for name in (image, label, split)]
            texts[1:] = (
                unicodedata.normalize("NFC", texts[1]),
                texts[2].lower(),
            )  # as a folder's name
            if not all(texts[:2]) or any(cells.get(None, ())) or texts[2] not in ("", *SPLIT_NAMES):
                raise ValueError(
                    f"line {reader.line_num} must have an image, a label (with a comma in it, in "
                    f"quotation marks) and no split but {few(SPLIT_NAMES)}; got {few(texts)}"
                )
            lines.append(texts)
    except (OSError, ValueError, csv.Error) as error:
        raise ValueError(f"csv={one_line(path)} cannot be read: {error}") from None
    if unread := [name for name in head.values() if name and name not in (image, label, split)]:
        warnings.warn(f"csv={path}: columns not read: {few(unread)}", stacklevel=2)
    blank = sum(not of for *_, of in lines)
    if 0 < blank < len(lines):
        warnings.warn(
            f"csv={path}: {blank:,} of {len(lines):,} lines have a blank split and count as train",
            stacklevel=2,
        )
    names = tuple(sorted({name for _, name, _ in lines}))
    number = {name: i for i, name in enumerate(names)}
    used = used_as({SPLIT_NAMES[of or "train"] for *_, of in lines})
    rows = {}  # lines that say the same of one file, however its path is written, are one
    for written, name, of in lines:
        file = os.fspath(table.parent / written)
        info = os.stat(file) if os.path.isfile(file) else None  # decoding reports a missing one
        stamp = (info.st_size, info.st_ctime_ns) if info else ()
        row = Row(File(written, file, *stamp), number[name], used[SPLIT_NAMES[of or "train"]])
        rows.setdefault((os.path.abspath(file), row.label, row.part), row)
    return Listing(os.fspath(table.parent), names, tuple(rows.values()))
