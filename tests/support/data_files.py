"""Images, archives and records as the bytes of files, for tiny versions of data sets."""

import io
import tarfile
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def noise(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Random pixels, uint8 of that shape."""
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def encoded(image: Image.Image | np.ndarray, kind: str = "PNG", **options: Any) -> bytes:
    """An image's file."""
    file = io.BytesIO()
    image = Image.fromarray(image) if isinstance(image, np.ndarray) else image
    image.save(file, kind, **options)
    return file.getvalue()


def idx(array: np.ndarray) -> bytes:
    """An array of unsigned bytes as MNIST's files have it."""
    head = b"\0\0\x08" + bytes([array.ndim]) + np.array(array.shape, ">u4").tobytes()
    return head + array.tobytes()


def tar_gz(files: Mapping[str, bytes]) -> bytes:
    """A compressed tar of files by their names."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, body in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(body)
            archive.addfile(info, io.BytesIO(body))
    return out.getvalue()


def zipped(files: Mapping[str, bytes]) -> bytes:
    """A zip of files by their names."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, body in files.items():
            archive.writestr(name, body)
    return out.getvalue()


def write(folder: Path, files: Mapping[str, bytes]) -> Path:
    """Writes files, by their names below a folder, which is returned."""
    for name, body in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(body)
    return folder


def class_folders(
    root: Path,
    classes: Iterable[str],
    count: int = 12,
    size: tuple[int, ...] = (8, 8),
    ext: str = "png",
) -> Path:
    """A folder of noise for each class; `root` is returned."""
    kind = {"png": "PNG", "jpg": "JPEG"}[ext]
    for number, name in enumerate(classes):
        images = [encoded(noise(size, 1000 * number + i), kind) for i in range(count)]
        write(root / name, {f"{i}.{ext}": image for i, image in enumerate(images)})
    return root
