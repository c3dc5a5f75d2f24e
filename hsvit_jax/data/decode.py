"""Turns a list of undecoded images into arrays (small sets) or a checked list (large ones).

Every image is read and decoded once, in threads, before training may start, so that a damaged
file stops the run here and not at step 30,000. Small sets keep the pixels; of large sets only the
outcome is kept, and images are decoded again as they are needed.
"""

import hashlib
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from hsvit_jax.data.cache import new_array, read_or_build
from hsvit_jax.data.dataset import TEST
from hsvit_jax.data.images import BadImage, few, printable, read_image

Progress = Callable[[str, int, int], None]
_CHUNK = 64


@dataclass(frozen=True)
class Items:
    """Undecoded examples: ``fetch(i)`` gives the file's bytes and the label."""

    names: Sequence[str]
    parts: np.ndarray
    fetch: Callable[[int], tuple[bytes, int]]


@dataclass(frozen=True)
class Source:
    """Every usable example of a set before it is split.

    ``images`` is uint8 (N, H, W, C) or None, and then ``read(i)`` gives one image. ``content``
    is a SHA-256 of what was read. ``parts`` says for which split each example was meant.
    """

    labels: np.ndarray
    parts: np.ndarray
    class_names: tuple[str, ...]
    content: str
    images: np.ndarray | None = None
    read: Callable[[int], np.ndarray] | None = None


def decode_items(
    items: Items,
    class_names: tuple[str, ...],
    *,
    folder: Path,
    image_size: tuple[int, int],
    channels: int,
    resident: bool,
    on_bad_image: str,
    progress: Progress | None,
) -> Source:
    """Reads and checks every item, or takes the result of an earlier time from ``folder``.

    Raises:
      ValueError: with ``on_bad_image='error'``, when images cannot be used; it names the first
        five. With 'skip' they are left out with a warning, unless a class loses all its images.
    """

    def build(scratch: Path) -> dict[str, Any]:
        return _build(items, scratch, image_size, channels, resident, on_bad_image, progress)

    arrays, notes = read_or_build(folder, build)
    bad = notes["bad"]
    if bad:
        report_bad(bad, len(items.names), on_bad_image)
    good = np.flatnonzero(arrays["good"])
    labels = np.asarray(arrays["labels"][good], dtype=np.int32)
    if len(labels) and not 0 <= labels.min() <= labels.max() < len(class_names):
        raise ValueError(
            f"labels run from {labels.min()} to {labels.max()}, but there are {len(class_names)} "
            "classes; examples without a label cannot be used"
        )
    trained = np.bincount(labels[items.parts[good] != TEST], minlength=len(class_names))
    lost = [name for name, count in zip(class_names, trained, strict=True) if not count]
    if bad and lost:
        raise ValueError(f"after leaving out bad images nothing is left of: {few(lost)}")
    if resident:
        images = arrays["images"] if len(good) == len(arrays["good"]) else arrays["images"][good]
        return Source(labels, items.parts[good], class_names, notes["content"], images=images)

    def read(index: int) -> np.ndarray:
        item = int(good[index])
        try:
            raw, _ = items.fetch(item)
        except OSError as error:
            why = error.strerror or error
            raise BadImage(f"{printable(items.names[item])}: cannot be read: {why}") from error
        return read_image(raw, image_size, channels, name=items.names[item])

    return Source(labels, items.parts[good], class_names, notes["content"], read=read)


def report_bad(bad: Sequence[str], total: int, on_bad_image: str) -> None:
    """Raises, or warns, with the count and the first five messages."""
    shown = "".join(f"\n  {line}" for line in bad[:5])
    more = f"\n  … and {len(bad) - 5:,} more" if len(bad) > 5 else ""
    if on_bad_image == "skip":
        warnings.warn(
            f"{len(bad)} of {total} images cannot be used and are left out:{shown}{more}",
            stacklevel=2,
        )
        return
    raise ValueError(
        f"{len(bad)} of {total} images cannot be used:{shown}{more}\n"
        "Repair or remove them, or leave them out with on_bad_image='skip'."
    )


def _build(
    items: Items,
    scratch: Path,
    image_size: tuple[int, int],
    channels: int,
    resident: bool,
    on_bad_image: str,
    progress: Progress | None,
) -> dict[str, Any]:
    """Writes labels, which images are good and, if resident, their pixels; returns the notes."""
    total = len(items.names)
    out = None
    if resident:
        shape = (total, *image_size, channels)
        out = new_array(scratch / "images.npy", np.uint8, shape)
    labels = np.zeros(total, np.int32)
    digests: list[bytes] = [b""] * total
    reasons: dict[int, str] = {}

    def work(indices: range) -> int:
        for i in indices:
            try:
                raw, labels[i] = items.fetch(i)
                image = read_image(raw, image_size, channels, name=items.names[i])
            except OSError as error:
                why = error.strerror or str(error)
                reasons[i] = f"{printable(items.names[i])}: cannot be read: {why}"
            except BadImage as error:
                reasons[i] = str(error)
            else:
                digests[i] = hashlib.sha256(raw).digest()
                if out is not None:
                    out[i] = image
        return len(indices)

    chunks = (range(at, min(at + _CHUNK, total)) for at in range(0, total, _CHUNK))
    done = 0
    for count in in_threads(work, chunks, threads=os.cpu_count() or 1):
        done += count
        if progress is not None:
            progress("decoding images", done, total)
    bad = [reasons[i] for i in sorted(reasons)]
    if bad and on_bad_image == "error":
        report_bad(bad, total, on_bad_image)
    if out is not None:
        out.flush()
    content = hashlib.sha256()
    for i in range(total):
        if digests[i]:
            content.update(b"%d %d " % (items.parts[i], labels[i]) + digests[i])
    good = np.array([bool(d) for d in digests])
    np.save(scratch / "labels.npy", labels)
    np.save(scratch / "good.npy", good)
    return {"bad": bad, "content": content.hexdigest()}


def in_threads(work: Callable[[range], int], tasks: Iterator[range], threads: int) -> Iterator[int]:
    """``map`` in threads with a bounded queue, so that a million tasks are not all held at once."""
    with ThreadPoolExecutor(threads) as pool:
        waiting: list[Future[int]] = [pool.submit(work, t) for t in islice(tasks, 2 * threads)]
        try:
            while waiting:
                yield waiting.pop(0).result()
                waiting.extend(pool.submit(work, t) for t in islice(tasks, 1))
        finally:
            for future in waiting:
                future.cancel()
