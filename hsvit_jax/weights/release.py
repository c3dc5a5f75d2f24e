"""A trained network in one file: safetensors whose header says what it is.

The header's `config` is a JSON object: "format", "version", the SHA-256 of the tensors, and what
the caller has to say: configuration, class names, figures measured.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import traverse_util

from hsvit_jax import checkpoint
from hsvit_jax.text import few
from hsvit_jax.weights.torch.base import Tensors

_FORMAT, _VERSION = "hsvit_jax", 1


def is_release(description: Mapping[str, Any]) -> bool:
    """Whether a file's description says that a network of ours is in it, under our names."""
    return description.get("format") == _FORMAT


def pack(trees: Mapping[str, Any], about: Mapping[str, Any]) -> bytes:
    """Writes a network as the bytes of a file.

    Args:
      trees: 'params' and 'stats'.
      about: to be read again as `files.read` returns it; plain values of JSON.

    Raises:
      ValueError: an array holds a number that is not finite.
    """
    leaves = jax.tree_util.tree_leaves_with_path(trees)
    tensors = {_name(path): np.array(leaf, np.float32) for path, leaf in leaves}
    _check_finite(tensors)
    head = {"format": _FORMAT, "version": _VERSION, "sha256": _digest(tensors)}
    return save(tensors, {**about, **head})


def save(tensors: Tensors, description: Mapping[str, Any], **metadata: str) -> bytes:
    """Writes tensors as the bytes of a safetensors file that `files.read` reads."""
    from safetensors.numpy import save

    return save(dict(tensors), {**metadata, "config": json.dumps(description)})


def unpack(tensors: Tensors, description: Mapping[str, Any], wanted: Any) -> Any:
    """Arranges the tensors of a file, which anybody may have written, as a tree.

    Args:
      wanted: the tree of `jax.ShapeDtypeStruct` that the network has.

    Raises:
      ValueError: another version, tensors that are not those that were written, or not those of
        the network.
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


def _name(path: tuple) -> str:
    return ".".join(str(key.key) for key in path)


def _digest(tensors: Tensors) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + np.ascontiguousarray(tensors[name]).tobytes())
    return digest.hexdigest()


def _check_finite(tensors: Tensors) -> None:
    wrong = [name for name, tensor in tensors.items() if not np.isfinite(tensor).all()]
    if wrong:
        raise ValueError(f"{len(wrong)} arrays hold numbers that are not finite, as {wrong[0]}")
