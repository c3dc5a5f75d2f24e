"""Image files and folders of them, and their predicted classes."""

import json
import os
from collections.abc import Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

import numpy as np

from hsvit_jax import data
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
    network: Classifier, paths: Sequence[Path], top_k: int = 5
) -> tuple[list[dict[str, Any]], list[str]]:
    """Classifies image files, all in memory together.

    Returns:
      a row for each file and rank (file, rank from 1, label, probability), and the errors of files
      that could not be read.
    """
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
        for rank, k in enumerate(np.argsort(-p_K, kind="stable")[:top_k], 1):
            label = network.class_names[k]
            rows.append({"file": name, "rank": rank, "label": label, "probability": float(p_K[k])})
    return rows, errors


def render(rows: list[dict[str, Any]], form: str, *, head: bool = True) -> str:
    """Formats rows as 'table', 'csv' (with a `head`) or 'json'; control characters are escaped."""
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
