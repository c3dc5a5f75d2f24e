"""Decodes images to arrays (small sets) or to a checked list (large ones).

Every image is decoded once, in threads, before training starts, so that a damaged file ends the run
here and not at step 30,000. Small sets keep the pixels. Large sets keep only the outcome, and
images are decoded again as they are needed.
"""

import errno
import hashlib
import os
import shutil
import warnings
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hsvit_jax.data.cache import cache_folder, new_array, read_or_build
from hsvit_jax.data.dataset import Source, Split, describe_copies
from hsvit_jax.data.images import BadImage, read_image
from hsvit_jax.text import one_line

Progress = Callable[[str, int, int], None]  # (stage, done, total); a total of 0: unknown
_CHUNK = 64
#: These errors stay as long as the file's size and time; others may be gone at the next start.
_LASTING = (None, errno.ENOENT, errno.EINVAL, errno.EFBIG)


@dataclass(frozen=True)
class Request:
    """Holds the arguments of `load`, with the defaults filled in."""

    data_dir: Path
    image_size: tuple[int, int]
    channels: int
    fit: str
    on_bad_image: str
    resident_limit_bytes: int
    progress: Progress

    def resident(self, examples: int) -> bool:
        """Returns whether that many images stay within the limit."""
        height, width = self.image_size
        return examples * height * width * self.channels <= self.resident_limit_bytes


@dataclass(frozen=True)
class Items:
    """Holds undecoded examples; ``fetch(i)`` reads the bytes of a file and its label.

    Copies are reported for the user's `own` files, which the user can change. `targets` (N, K)
    replace the labels.
    """

    names: Sequence[str]
    parts: np.ndarray
    fetch: Callable[[int], tuple[bytes, int]]
    own: bool = False
    targets: np.ndarray | None = None

    def decode(
        self, index: int, request: Request, remark: Callable[[str], Any] = bool
    ) -> tuple[np.ndarray, int, bytes]:
        """Reads one example: image uint8 (H, W, C), label, bytes. Raises BadImage."""
        name = self.names[index]
        try:
            raw, label = self.fetch(index)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise BadImage(f"{one_line(name)}: cannot be read: {why}") from error
        how = {"name": name, "fit": request.fit, "remark": remark}
        return read_image(raw, request.image_size, request.channels, **how), label, raw


def decode_items(
    items: Items, class_names: tuple[str, ...], request: Request, name: str, key: dict[str, Any]
) -> Source:
    """Reads and checks every item, or takes the result of an earlier start from the cache.

    ``name`` names the cache's folder, and ``key`` identifies the items' content. Images that cannot
    be used raise ValueError, or are dropped with a warning if ``on_bad_image='skip'``.
    """
    resident, total = request.resident(len(items.names)), len(items.names)
    key = {**key, "shape": [*request.image_size, request.channels]}
    folder = cache_folder(request.data_dir, name, key | {"fit": request.fit, "in": resident})
    arrays, notes = read_or_build(folder, lambda scratch: _build(items, scratch, request, resident))
    if notes["unread"]:  # these may be readable at the next start, of the same size and time
        shutil.rmtree(folder, ignore_errors=True)
    bad = notes["bad"]
    _report_bad(bad, total, request.on_bad_image)
    for remark, (count, first) in sorted(notes["remarks"].items()):
        where = f"{count:,} of {total:,} images"
        warnings.warn(f"{where} {remark}, {one_line(items.names[first])} first", stacklevel=2)
    if items.own and notes["copies"]:
        warnings.warn(notes["copies"], stacklevel=2)
    good = np.flatnonzero(arrays["good"])
    labels = np.asarray(arrays["labels"][good], dtype=np.int32)
    wrong = np.flatnonzero((labels < 0) | (labels >= len(class_names)))
    if len(wrong):
        raise ValueError(
            f"{len(wrong):,} of {len(labels):,} examples have none of the {len(class_names)} "
            f"classes for a label, {one_line(items.names[good[wrong[0]]])} first: remove them"
        )
    images = arrays.get("images")
    if bad and images is not None:
        images = images[good]

    def read(index: int) -> np.ndarray:
        number = int(good[index])
        image, _, raw = items.decode(number, request)
        if zlib.crc32(raw) != arrays["checks"][number]:
            name = one_line(items.names[number])
            raise BadImage(f"{name}: replaced or changed after it was checked; start again")
        return image

    names = np.array(items.names, object)[good]
    content = notes["content"]
    if items.targets is not None:
        labels = items.targets[good]
        content = hashlib.sha256(content.encode() + labels.tobytes()).hexdigest()
    return Source(Split(labels, images, read, names), items.parts[good], class_names, content)


def _report_bad(bad: Sequence[str], total: int, on_bad_image: str) -> None:
    """Raises, or warns, with the count and the first five messages, if there are any."""
    if not bad:
        return
    more = f"\n  … and {len(bad) - 5:,} more" if len(bad) > 5 else ""
    lines = "".join(f"\n  {line}" for line in bad[:5]) + more
    count = f"{len(bad)} of {total} images cannot be used"
    if on_bad_image == "skip":
        warnings.warn(f"{count} and are dropped:{lines}", stacklevel=2)
        return
    raise ValueError(
        f"{count}:{lines}\nRepair or remove them, or drop them with on_bad_image='skip' "
        "(config key data.on_bad_image)."
    )


def _build(items: Items, scratch: Path, request: Request, resident: bool) -> dict[str, Any]:
    """Writes labels, which images are good and, if resident, their pixels; returns the notes."""
    total = len(items.names)
    images = None
    if resident:
        shape = (total, *request.image_size, request.channels)
        images = new_array(scratch / "images.npy", np.uint8, shape)
    labels, checks = np.zeros(total, np.int32), np.zeros(total, np.uint32)
    remarks: dict[str, list[int]] = {}
    digests: list[bytes] = [b""] * total
    reasons: dict[int, str] = {}
    unread = []

    def decode(indices: range) -> int:
        for i in indices:
            found: list[str] = []
            try:
                image, labels[i], raw = items.decode(i, request, found.append)
            except BadImage as error:
                reasons[i] = str(error)
                why = error.__cause__
                if isinstance(why, MemoryError) or getattr(why, "errno", None) not in _LASTING:
                    unread.append(i)
                continue
            for remark in found:
                remarks.setdefault(remark, []).append(i)
            checks[i] = zlib.crc32(raw)
            digests[i] = hashlib.sha256(raw).digest()
            if images is not None:
                images[i] = image
        return len(indices)

    chunks = [range(start, min(start + _CHUNK, total)) for start in range(0, total, _CHUNK)]
    done = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for count in pool.map(decode, chunks):
            done += count
            request.progress("decoding images", done, total)
    bad = [reasons[i] for i in sorted(reasons)]
    if request.on_bad_image != "skip":
        _report_bad(bad, total, request.on_bad_image)
    if images is not None:
        images.flush()
    content = hashlib.sha256()
    for part, label, digest in zip(items.parts, labels, digests, strict=True):
        if digest:
            content.update(b"%d %d " % (part, label) + digest)
    np.save(scratch / "labels.npy", labels)
    np.save(scratch / "checks.npy", checks)
    np.save(scratch / "good.npy", np.array([bool(digest) for digest in digests]))
    return {
        "bad": bad,
        "copies": describe_copies(digests, items.names),
        "unread": bool(unread),
        "remarks": {remark: (len(of), min(of)) for remark, of in remarks.items()},
        "content": content.hexdigest(),
    }
