"""hsvit predict: the top classes of image files."""

import dataclasses
import json
import os
import re
from collections.abc import Sequence
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from hsvit_jax import artifacts, classifier, data
from hsvit_jax import config as config_lib
from hsvit_jax.cli import Misuse, Request
from hsvit_jax.data.listing import tell_others, walk
from hsvit_jax.run_report.measures import CALIBRATION
from hsvit_jax.runtime import cluster, coordination
from hsvit_jax.text import one_line, printable
from hsvit_jax.weights import sources

# Decoded images of a large folder would not fit in memory together.
_FILES_AT_ONCE = 256


def run(request: Request) -> int:
    """Prints the top classes of each image; returns 1 where a file is no image."""
    files, form = image_files(request.words), request.flags.format
    network, rows, errors = load_classifier(request), [], []
    shows, head = coordination.is_lead(), True
    for first in range(0, len(files), _FILES_AT_ONCE):
        some = files[first : first + _FILES_AT_ONCE]
        found, unread = predict_files(network, some, request.flags.top_k)
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


def load_classifier(request: Request) -> classifier.Classifier:
    """Loads the network of the run named, or of the configuration's default folder."""
    job = cluster.find(request.flags.distributed)
    if job is not None:
        cluster.start(job)
        given = "\n".join([request.name, *request.argv])
        own = r"^--?distributed[=\n].*$"  # of each process
        coordination.check_same("command line", re.sub(own, "", given, flags=re.MULTILINE))
    mesh = (request.config or config_lib.get_config("c2a2", *request.settings)).mesh
    devices = {name: mesh[name] for name in ("group", "data", "aggregate")}
    values = request.flags
    network = classifier.load(request.source, values.which, **devices)
    if "calibrated" in values and values.calibrated:
        temperature = _temperature(request.source, network.step)
        return dataclasses.replace(network, temperature=temperature)
    return network


def _temperature(source: str, step: int) -> float:
    """The temperature that a report has fitted to a step of a run."""
    try:
        found = json.loads((sources.run_folder(source) / CALIBRATION).read_bytes())
        if found["step"] == step and 0.01 < found["temperature"] < 100:
            return float(found["temperature"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        pass
    raise ValueError(
        f"--calibrated needs the temperature that a report fits, and {source} has none of step "
        f"{step:,}: say hsvit report {source} first"
    )


def image_files(paths: Sequence[str], command: str = "predict") -> list[Path]:
    """Lists the files named and the images in the folders named, in order.

    Raises:
      ValueError: a path does not exist, or there is no image at all.
    """

    how = f"name image files or folders of them, as in hsvit {command} runs/my-run cat.jpg photos/"
    if not paths:
        raise Misuse(f"no images given: {how}")
    files: list[Path] = []
    for name in paths:
        path = Path(name)
        if not os.path.exists(name):  # false for a name too long, which Path refuses to look up
            raise ValueError(f"no such file or folder: {name}")
        if not path.is_dir():
            files.append(path)
            continue
        tree = walk(path)
        tell_others(tree)
        files += [Path(file.path) for file in tree.files]
    if not files:
        raise ValueError(f"no images in {', '.join(paths)}: {how}")
    return list(dict.fromkeys(files))


def predict_files(
    network: classifier.Classifier, paths: Sequence[Path], top_k: int = 5
) -> tuple[list[dict[str, Any]], list[str]]:
    """Classifies image files, whose pixels are in memory together.

    Returns:
      a row for each file and rank (file, rank from 1, label, probability), and the errors of files
      that could not be read.
    """
    rows, errors, images, names = [], [], [], []
    pool = ThreadPoolExecutor(os.cpu_count())  # decoding photos is most of the work
    try:
        reads = [pool.submit(network.read, path) for path in paths]
        futures.wait(reads)
    finally:  # Ctrl-C does not wait for the rest of them
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
    """Formats rows as 'table', 'csv' or 'json', with control characters in names escaped.

    Args:
      head: whether a CSV begins with its head.
    """
    if form == "json":
        return json.dumps(rows, indent=2)
    if form == "csv":
        columns = ["file", "rank", "label", "probability"]
        cells = [[r["file"], r["rank"], r["label"], f"{r['probability']:.6f}"] for r in rows]
        return printable(artifacts.csv_text([columns] * head + cells).rstrip("\n"))
    by_file: dict[str, list[str]] = {}
    for row in rows:
        by_file.setdefault(one_line(row["file"]), []).append(
            f"{row['label']} {row['probability']:.1%}"
        )
    width = max((len(name) for name in by_file), default=0)
    lines = (f"{name:<{width}}  {'  '.join(top)}" for name, top in by_file.items())
    return printable("\n".join(lines))
