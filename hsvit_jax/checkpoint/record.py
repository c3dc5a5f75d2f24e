"""The record of a step: its leaves, their checksums and the caller's metadata.

JSON of the form {"sha256": digest of content, "content": {"format", "step", "metric", "leaves",
"empty", "meta"}}, where "leaves" is a list of [path, dtype, shape, checksum].
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from flax import traverse_util

from hsvit_jax.checkpoint import checksum
from hsvit_jax.text import few

FORMAT = 1
_MAX_BYTES = 1 << 28  # of metadata, which 100,000 arrays and class names do not reach

TreePath = tuple[str | int, ...]


class CheckpointError(ValueError):
    """A checkpoint cannot be written, read or trusted, or does not fit the template."""


class Damage(Exception):
    """A step cannot be trusted; the message is the reason."""


class Record(NamedTuple):
    """The contents of `meta/metadata`; `leaves` maps a path to (dtype, shape, checksum)."""

    metric: float | None
    leaves: dict[TreePath, tuple[str, tuple[int, ...], str]]
    empty: list[TreePath]
    meta: dict


def seal(
    step: int,
    metric: float | None,
    leaves: dict[TreePath, Any],
    sums: list[str],
    empty: list[TreePath],
    meta: dict,
) -> dict:
    """Builds the JSON document of a step, with the digest that shows any change of it.

    `sums` are the leaves' checksums in their order.
    """
    table = [
        [list(path), str(leaf.dtype), list(leaf.shape), checksum]
        for (path, leaf), checksum in zip(leaves.items(), sums, strict=True)
    ]
    content = {"format": FORMAT, "step": step, "metric": metric, "leaves": table, "empty": empty}
    content = json.loads(json.dumps(content | {"meta": meta}))
    return {"sha256": _digest(content), "content": content}


def unseal(document: dict, step: int) -> Record:
    """Reads the record in a document, which may be anybody's.

    Raises:
      Damage: a digest or number that does not agree, or entries that describe no tree of arrays.
      CheckpointError: another version of the format.
      Exception: entries of any other kind, as Python finds them.
    """
    content = document["content"]
    if _digest(content) != document["sha256"]:
        raise Damage("its contents do not agree with their SHA-256")
    if content["format"] != FORMAT:
        raise CheckpointError(
            f"step {step} was written in format {content['format']!r:.20}, this version reads "
            f"format {FORMAT}; use the version that wrote it"
        )
    if content["step"] != step:
        raise Damage(f"it describes step {content['step']}")
    metric, meta = content["metric"], content["meta"]
    if not isinstance(meta, dict) or not (metric is None or math.isfinite(metric)):
        raise Damage("its metric or metadata are of another kind")
    leaves = {}
    for path, dtype, shape, digits in content["leaves"]:
        is_shape = len(shape) <= 32 and all(type(n) is int and n >= 0 for n in shape)
        if dtype not in checksum.DTYPES or not is_shape:
            raise Damage(f"it describes an array of dtype {dtype!r:.20} and shape {shape!r:.80}")
        leaves[_path(path)] = (dtype, tuple(shape), digits)
    empty = [_path(path) for path in content["empty"]]
    ends = [tuple(map(str, path)) for path in (*leaves, *empty)]
    inner = {path[:n] for path in ends for n in range(1, len(path))}
    if not leaves or len(set(ends)) < len(content["leaves"] + empty) or inner & set(ends):
        raise Damage("its arrays' names do not make a tree")
    return Record(metric, leaves, empty, meta)


def _path(keys: list) -> TreePath:
    """Checks the keys of a leaf, which are as `flatten` writes them."""
    valid = all(type(key) is int or (type(key) is str and key) for key in keys)
    if not 1 <= len(keys) <= 64 or not valid:
        raise Damage(f"it describes an array named {keys!r:.80}")
    return tuple(keys)


def read_record(directory: Path, step: int) -> Record:
    """Reads the record of a step; raises Damage or CheckpointError as `unseal` does."""
    path = directory / str(step) / "meta" / "metadata"
    try:
        if not path.is_file() or path.stat().st_size > _MAX_BYTES:
            raise Damage("no file, or one too long for metadata")
        return unseal(json.loads(path.read_bytes()), step)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged or foreign document can raise nearly anything
        raise Damage(f"{path}: {brief(error)}") from error


def _digest(content: dict) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def check_fits(directory: Path, record: Record, wanted: dict[TreePath, Any]) -> None:
    """Raises CheckpointError where a healthy step has other leaves than `wanted`.

    That is the caller's to solve: unlike a damaged step, it is not passed over.
    """
    saved = {p: jax.ShapeDtypeStruct(shape, kind) for p, (kind, shape, _) in record.leaves.items()}
    if lines := _misfits(saved, wanted):
        raise CheckpointError(
            f"{directory} holds another model or training state; restore it with the "
            f"configuration it was saved with, or start in another directory: {few(lines, '; ')}"
        )


def misfits(saved: dict, wanted: dict) -> list[str]:
    """Lists the leaves that are missing, extra or of another shape or dtype in `saved`.

    Both are nested dicts, of arrays or `jax.ShapeDtypeStruct`. Returns a line for each leaf.
    """
    return _misfits(flatten(saved)[0], flatten(wanted)[0])


def _misfits(*trees: dict[TreePath, Any]) -> list[str]:
    saved, wanted = (
        {path: f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves.items()}
        for leaves in trees
    )
    lines = [f"missing: {dotted(path)} {wanted[path]}" for path in wanted if path not in saved]
    lines += [f"extra: {dotted(path)} {saved[path]}" for path in saved if path not in wanted]
    return lines + [
        f"different: {dotted(path)} checkpoint {saved[path]}, wanted {wanted[path]}"
        for path in wanted
        if saved.get(path, wanted[path]) != wanted[path]
    ]


def flatten(tree: dict) -> tuple[dict[TreePath, Any], list[TreePath]]:
    """Flattens a nested dict of arrays, in the order of its keys as strings.

    Returns:
      the leaves by path, and the paths of empty dicts, which Orbax would drop.

    Raises:
      ValueError: a leaf's dtype could not be read back.
    """
    flat = traverse_util.flatten_dict(tree, keep_empty_nodes=True)
    order = sorted(flat, key=lambda path: tuple(map(str, path)))
    empty = [path for path in order if flat[path] is traverse_util.empty_node]
    leaves = {path: flat[path] for path in order if flat[path] is not traverse_util.empty_node}
    for path, leaf in leaves.items():
        if str(leaf.dtype) not in checksum.DTYPES:
            raise ValueError(
                f"{dotted(path)} is {leaf.dtype}, expected one of {', '.join(checksum.DTYPES)} "
                "(of a random key: jax.random.key_data)"
            )
    return leaves, empty


def nest(leaves: dict[TreePath, Any], empty: Sequence[TreePath] = ()) -> dict:
    """Builds the nested dict of leaves by path: the inverse of `flatten`."""
    return traverse_util.unflatten_dict({**leaves, **{path: {} for path in empty}})


def dotted(path: TreePath) -> str:
    """The name of a leaf in messages."""
    return ".".join(map(str, path))


def brief(error: BaseException) -> str:
    """A library's message in one line; of a long one the beginning and the end, where advice
    stands: Orbax and TensorStore append whole specifications."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):  # after a long path
        if os.strerror(number) in str(error):
            return os.strerror(number)
    text = " ".join(str(error).split())
    text = text if len(text) <= 1000 else f"{text[:300]} … {text[-600:]}"
    return text if isinstance(error, Damage) else f"{type(error).__name__}: {text}"
