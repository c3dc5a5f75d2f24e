"""Weight files of other libraries, read without running code in them.

`.npz`, `.safetensors`, and `.ckpt`, `.pt`, `.pth` or `.bin` where PyTorch is installed, by its
restricted reader (`weights_only=True`).
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

#: Errors of reading metadata that this program did not write.
FOREIGN = (
    *(ValueError, TypeError, LookupError, AttributeError, ArithmeticError),
    *(MemoryError, RecursionError),
)

_SUFFIXES = (".npz", ".safetensors", ".ckpt", ".pt", ".pth", ".bin")
#: The safetensors types that are read; floats of 8 bits mean nothing without a scale.
_NUMBERS = {"BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64"}
_NUMBERS |= {"F16", "BF16", "F32", "F64"}
# Bytes that any archive may unpack to, and how many times its own size beyond that.
_PLAUSIBLE, _DENSEST = 1 << 31, 100


def is_weights(path: Path) -> bool:
    """Whether the suffix is that of a weight file; a run's folder may have it too."""
    return path.suffix.lower() in _SUFFIXES and not path.is_dir()


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
    tensors, text = readers.get(suffix, _read_torch)(path)
    try:
        description = json.loads(text) if text else {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: its `config` is not JSON: {error}") from None
    if not isinstance(description, dict):
        raise ValueError(f"{path}: its `config` is not a JSON object")
    return tensors, description


def _unreadable(path: Path, kind: str, error: Exception) -> ValueError:
    if "allow_pickle" in str(error):  # NumPy's advice is to run what it may hold
        error = ValueError("it holds no arrays of NumPy's")
    return ValueError(
        f"{path} is not a whole {kind} file ({type(error).__name__}: {error}); it may be cut off, "
        "or something else under that name: fetch or export it again"
    )


def _read_npz(path: Path) -> tuple[dict[str, np.ndarray], str]:
    try:
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
    except Exception as error:  # of damage there is no end: zlib's, struct's, a bare .npy's
        raise _unreadable(path, ".npz", error) from None


def _read_safetensors(path: Path) -> tuple[dict[str, np.ndarray], str]:
    import safetensors

    try:
        with safetensors.safe_open(path, "numpy") as file:
            names = list(file.keys())
            foreign = sorted({file.get_slice(name).get_dtype() for name in names} - _NUMBERS)
            tensors = {} if foreign else {name: np.array(file.get_tensor(name)) for name in names}
            text = (file.metadata() or {}).get("config", "")
    except Exception as error:
        raise _unreadable(path, ".safetensors", error) from None
    _refuse_types(path, foreign)
    return tensors, text


def _refuse_types(path: Path, foreign: list[str]) -> None:
    if foreign:
        raise ValueError(
            f"{path} holds tensors of type {', '.join(foreign)}, which cannot be read here: save "
            "its weights as F32, F16 or BF16"
        )


def _read_torch(path: Path) -> tuple[dict[str, np.ndarray], str]:
    try:
        import torch
    except ImportError:
        raise ValueError(
            f"{path} needs PyTorch to be read, which is not installed here. Install torch, or "
            "export the weights where it is: numpy.savez('weights.npz', **{k: v.numpy() for k, v "
            f"in torch.load('{path.name}', map_location='cpu', weights_only=True)['state_dict']"
            ".items()}) (omit ['state_dict'] for a plain state dict)"
        ) from None
    try:
        tree = torch.load(path, map_location="cpu", weights_only=True)
        for name in ("state_dict", "model"):  # Lightning's, and the DeiT family's trainers
            tree = tree.get(name, tree) if isinstance(tree, dict) else tree
        plain = tree if isinstance(tree, dict) else {}
        tensors = {str(k): v.detach() for k, v in plain.items() if isinstance(v, torch.Tensor)}
        floats = {str(v.dtype): v.element_size() for v in tensors.values() if v.is_floating_point()}
        foreign = sorted(kind for kind, size in floats.items() if size < 2)
        # NumPy has no bfloat16, and float64 stays: `convert` compares to 1e-9.
        arrays = {
            k: (v.float() if v.dtype == torch.bfloat16 else v).numpy()
            for k, v in ({} if foreign else tensors).items()
        }
    except Exception as error:
        raise _unreadable(path, path.suffix, error) from None
    _refuse_types(path, foreign)
    if not isinstance(tree, dict):
        raise ValueError(f"{path} holds a {type(tree).__name__}, expected a state dict")
    text = tree.get("config", "")
    return arrays, text if isinstance(text, str) else ""
