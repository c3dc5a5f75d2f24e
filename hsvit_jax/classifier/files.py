"""Image files and folders of them, and their predicted classes."""

import json
import os
from collections.abc import Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

import numpy as np

from hsvit_jax import data, tasks
from hsvit_jax.artifacts import csv_text
from hsvit_jax.classifier.classifier import Classifier
from hsvit_jax.data.listing import walk, warn_of_others
from hsvit_jax.runtime import coordination
from hsvit_jax.text import one_line, printable


def listed(paths: Sequence[str]) -> list[Path]:
    """Lists the files and the images of the folders in `paths`, in order, each once.

    Raises:
      ValueError: a path does not exist, or there is no image.
    """
    files: list[Path] = []
    for name in paths:
        path = Path(name)
        if not os.path.exists(name):  # Path.exists raises for a name that is too long
            raise ValueError(f"no such file or folder: {name}")
        if not path.is_dir():
            files.append(path)
            continue
        tree = walk(path)
        warn_of_others(tree)
        files += [Path(file.path) for file in tree.files]
    if not files:
        raise ValueError(f"no images in {', '.join(paths)}: name image files or folders of them")
    return list(dict.fromkeys(files))


def predict(
    network: Classifier, paths: Sequence[Path], top_k: int | None = None
) -> tuple[list[dict[str, Any]], list[str]]:
    """Classifies image files, all in memory together.

    Returns:
      a row for each file and rank (file, rank from 1, label, and its probability or value), and the
      errors of files that could not be read. A file without a label over its threshold has one row
      of the label ''.
    """
    task = tasks.of(network.config)
    rows, errors, images, names = [], [], [], []
    pool = futures.ThreadPoolExecutor(os.cpu_count())
    try:
        reads = [pool.submit(network.read, path) for path in paths]
        futures.wait(reads)
    finally:  # Ctrl-C cancels the rest
        pool.shutdown(cancel_futures=True)
    for path, image in zip(paths, reads, strict=True):
        try:
            images.append(image.result())
            names.append(str(path))
        except data.BadImage as error:
            errors.append(str(error))
    coordination.check_same("list of images", "\n".join(names))
    probabilities_BK = network.predict(np.stack(images)) if images else ()
    for name, p_K in zip(names, probabilities_BK, strict=True):
        found = task.rows(p_K, network.class_names, top_k or task.most)
        found = found or [{"label": "", task.unit: None}]
        rows += [{"file": name, "rank": rank, **row} for rank, row in enumerate(found, 1)]
    return rows, errors


def render(rows: list[dict[str, Any]], form: str, *, head: bool = True) -> str:
    """Formats rows as 'table', 'csv' (with a `head`) or 'json'; control characters are escaped."""
    if form == "json":
        return json.dumps(rows, indent=2)
    if form == "csv":
        columns = [*rows[0]] if rows else ["file", "rank", "label", "probability"]
        cells = [[*[*row.values()][:3], _amount(row, ".6f", ".8g")] for row in rows]
        return printable(csv_text([columns] * head + cells).rstrip("\n"))
    by_file: dict[str, list[str]] = {}
    for row in rows:
        top = f"{row['label']} {_amount(row, '.1%', '.5g')}" if row["label"] else "no label"
        by_file.setdefault(one_line(row["file"]), []).append(top)
    width = max((len(name) for name in by_file), default=0)
    lines = (f"{name:<{width}}  {'  '.join(top)}" for name, top in by_file.items())
    return printable("\n".join(lines))


def _amount(row: dict[str, Any], probability: str, value: str) -> str:
    """Formats a row's probability or value; '' for none."""
    amount = row.get("probability", row.get("value"))
    return "" if amount is None else format(amount, probability if "probability" in row else value)
