"""Weight files: other libraries' ones, read without running code in them, and this package's own.

Files are `.npz`, `.safetensors`, and `.ckpt`, `.pt`, `.pth` or `.bin` if PyTorch is installed, by
its restricted reader (`weights_only=True`). A trained network of this package is a safetensors file
whose header has a JSON object `config` with "format", "version", the SHA-256 of the tensors and
what the caller adds: configuration, class names, figures measured.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax import traverse_util

from hsvit_jax import checkpoint
from hsvit_jax.text import few

Tensors = Mapping[str, np.ndarray]
#: Errors of reading metadata that this program did not write.
FOREIGN = (
    *(ValueError, TypeError, LookupError, AttributeError, ArithmeticError),
    *(MemoryError, RecursionError),
)

_SUFFIXES = (".npz", ".safetensors", ".ckpt", ".pt", ".pth", ".bin")
#: The safetensors types that are read; floats of 8 bits mean nothing without a scale.
_NUMBERS = {"BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64"}
_NUMBERS |= {"F16", "BF16", "F32", "F64"}
#: Bytes that any archive may unpack to, and how many times its own size beyond that.
_PLAUSIBLE, _DENSEST = 1 << 31, 100
_FORMAT, _VERSION = "hsvit_jax", 1


def is_weights(path: Path) -> bool:
    """Whether the suffix is that of a weight file; a run's folder may have it too."""
    return path.suffix.lower() in _SUFFIXES and not path.is_dir()


class _Unsupported(ValueError):
    """A whole file that cannot be read here."""


def read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Reads all tensors of a weight file, and its `config` JSON ({} without one).

    Raises:
      ValueError: the file is missing, cut short, or of another format than its suffix says.
    """
    if not path.is_file():
        raise ValueError(f"{path} is not a file")
    suffix = path.suffix.lower()
    if suffix not in _SUFFIXES:
        raise ValueError(f"{path}: expected a file ending in {', '.join(_SUFFIXES)}")
    readers = {".npz": _read_npz, ".safetensors": _read_safetensors}
    try:
        tensors, text = readers.get(suffix, _read_torch)(path)
    except _Unsupported as error:
        raise ValueError(f"{path} {error}") from None
    except Exception as error:  # damage has no one type: zlib's, struct's, a bare .npy's
        if "allow_pickle" in str(error):  # NumPy's advice is to run what it may hold
            error = ValueError("it holds no arrays of NumPy's")
        raise ValueError(
            f"{path} is not a whole {suffix} file ({type(error).__name__}: {error}); it may be cut "
            "off, or something else under that name: fetch or export it again"
        ) from None
    try:
        description = json.loads(text) if text else {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: its `config` is not JSON: {error}") from None
    if not isinstance(description, dict):
        raise ValueError(f"{path}: its `config` is not a JSON object")
    return tensors, description


def _read_npz(path: Path) -> tuple[dict[str, np.ndarray], str]:
    with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
        size = sum(info.file_size for info in archive.zip.infolist())
        if size > max(_PLAUSIBLE, _DENSEST * path.stat().st_size):
            raise ValueError(f"it would unpack to {size:,} bytes")
        names = [k for k in archive.files if not k.startswith(("grad/", "after/"))]
        tensors = {k: archive[k] for k in names}
    if not all(isinstance(v, np.ndarray) for v in tensors.values()):
        raise ValueError("an entry is not an array")
    text = tensors.pop("config", np.array("")).item()
    return tensors, text.decode() if isinstance(text, bytes) else str(text)


def _read_safetensors(path: Path) -> tuple[dict[str, np.ndarray], str]:
    import safetensors

    with safetensors.safe_open(path, "numpy") as file:
        names = list(file.keys())
        _check_types({file.get_slice(name).get_dtype() for name in names} - _NUMBERS)
        tensors = {name: np.array(file.get_tensor(name)) for name in names}
        return tensors, (file.metadata() or {}).get("config", "")


def _check_types(foreign: set[str]) -> None:
    if foreign:
        raise _Unsupported(
            f"holds tensors of type {', '.join(sorted(foreign))}, which cannot be read here: save "
            "its weights as F32, F16 or BF16"
        )


def _read_torch(path: Path) -> tuple[dict[str, np.ndarray], str]:
    try:
        import torch
    except ImportError:
        raise _Unsupported(
            "needs PyTorch to be read, which is not installed here. Install torch, or export the "
            "weights where it is: numpy.savez('weights.npz', **{k: v.numpy() for k, v in "
            f"torch.load('{path.name}', map_location='cpu', weights_only=True)['state_dict']"
            ".items()}) (without ['state_dict'] for a plain state dict)"
        ) from None
    tree = torch.load(path, map_location="cpu", weights_only=True)
    for name in ("state_dict", "model"):  # Lightning's, and the DeiT family's trainers
        tree = tree.get(name, tree) if isinstance(tree, dict) else tree
    if not isinstance(tree, dict):
        raise _Unsupported(f"holds a {type(tree).__name__}, expected a state dict")
    tensors = {str(k): v.detach() for k, v in tree.items() if isinstance(v, torch.Tensor)}
    floats = {str(v.dtype): v.element_size() for v in tensors.values() if v.is_floating_point()}
    _check_types({kind for kind, size in floats.items() if size < 2})
    # NumPy has no bfloat16, and float64 stays: `convert` compares to 1e-9.
    wide = {k: v.float() if v.dtype == torch.bfloat16 else v for k, v in tensors.items()}
    text = tree.get("config", "")
    return {k: v.numpy() for k, v in wide.items()}, text if isinstance(text, str) else ""


# --- Files of this package -----------------------------------------------------------------------


def is_release(description: Mapping[str, Any]) -> bool:
    """Whether a file's description says that it holds a network of ours under our names."""
    return description.get("format") == _FORMAT


def pack(trees: Mapping[str, Any], about: Mapping[str, Any]) -> bytes:
    """Writes a network as the bytes of a file.

    Args:
      trees: 'params' and 'stats'.
      about: plain JSON values, which `read` returns again.

    Raises:
      ValueError: an array holds a number that is not finite.
    """
    leaves = traverse_util.flatten_dict(dict(trees), sep=".")
    tensors = {name: np.array(leaf, np.float32) for name, leaf in leaves.items()}
    _check_finite(tensors)
    head = {"format": _FORMAT, "version": _VERSION, "sha256": _digest(tensors)}
    return save(tensors, {**about, **head})


def save(tensors: Tensors, description: Mapping[str, Any], **metadata: str) -> bytes:
    """Writes tensors as the bytes of a safetensors file that `read` reads."""
    from safetensors.numpy import save

    return save(dict(tensors), {**metadata, "config": json.dumps(description)})


def unpack(tensors: Tensors, description: Mapping[str, Any], wanted: Any) -> Any:
    """Arranges the tensors of an untrusted file as a tree.

    Args:
      wanted: the network's tree of `jax.ShapeDtypeStruct`.

    Raises:
      ValueError: another version, or tensors that are damaged or not the network's.
    """
    if description.get("version") != _VERSION:
        raise ValueError(
            f"it has version {description.get('version')!r:.20} of the format, and this program "
            f"reads {_VERSION}"
        )
    tree = {kind: {} for kind in wanted} | traverse_util.unflatten_dict(dict(tensors), sep=".")
    if wrong := checkpoint.misfits(tree, wanted):
        raise ValueError(few(wrong, "; "))
    if description.get("sha256") != _digest(tensors):
        raise ValueError("its tensors do not agree with their SHA-256: it is damaged")
    _check_finite(tensors)
    return tree


def _digest(tensors: Tensors) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + np.ascontiguousarray(tensors[name]).tobytes())
    return digest.hexdigest()


def _check_finite(tensors: Tensors) -> None:
    wrong = [name for name, tensor in tensors.items() if not np.isfinite(tensor).all()]
    if wrong:
        raise ValueError(f"{len(wrong)} arrays hold numbers that are not finite, as {wrong[0]}")
