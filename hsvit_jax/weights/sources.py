"""Finds trained weights: a path, the package's zoo, or the Hugging Face hub."""

import json
import math
import os
import re
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from hsvit_jax import storage

_FILE = "model.safetensors"
#: The hub's files beside it that describe how pixels are normalised: transformers', timm's.
_DESCRIPTIONS = ("preprocessor_config.json", "config.json")


def locate(source: str | os.PathLike) -> Path:
    """Returns the file or folder of a source.

    A folder with `model.safetensors` and without checkpoints gives that file.

    Args:
      source: a path, the URL of a run in an object store, 'zoo:NAME', or 'hub:OWNER/NAME', with
        '@REVISION' for another one than the newest. The hub's files are kept in its own cache,
        which also serves without a network.

    Raises:
      ValueError: there is no network of that name, or the hub cannot be read.
    """
    kind, colon, name = str(source).partition(":")
    if colon and kind == "zoo":
        known = zoo()
        if name not in known:
            names = ", ".join(known) or "none"
            raise ValueError(f"no network {name!r:.80} in the zoo; it has {names}")
        return known[name]
    if colon and kind == "hub":
        return _of_hub(name)
    path = storage.local(source)
    published = os.path.isfile(path / _FILE) and not (path / "checkpoints").is_dir()
    return path / _FILE if published else path


def pinned(source: str) -> str:
    """Returns a source of the hub with its commit as the revision; other sources unchanged."""
    if not source.startswith("hub:") or re.search("@[0-9a-f]{40}$", source):
        return source
    return f"{source.partition('@')[0]}@{locate(source).parent.name}"


def description(file: Path, name: str = "config.json") -> dict[str, Any]:
    """Reads a JSON file beside a published `model.safetensors`; {} without one.

    Raises:
      ValueError: it is no JSON object.
    """
    path = file.parent / name
    if file.name != _FILE or not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not a JSON object")
    return found


class Pixels(NamedTuple):
    """How a published network normalises pixels in [0, 1].

    Attributes:
      mean, std: one value or one per channel.
      blue_first: whether blue is the first channel.
      file: the JSON file that describes it.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    blue_first: bool
    file: str


def pixels(source: str) -> Pixels | None:
    """Reads mean and standard deviation of pixels in [0, 1] beside a model of the hub or its copy.

    Returns:
      None without a JSON file that describes them.

    Raises:
      ValueError: the values are no numbers that can normalise pixels.
    """
    file = locate(source)
    for name in _DESCRIPTIONS:
        described = description(file, name)
        try:
            found = _mean_and_std(described)
        except (ValueError, TypeError, AttributeError, ArithmeticError) as error:
            path = file.parent / name
            raise ValueError(f"{path} does not say how to normalise pixels: {error}") from None
        if found:
            return Pixels(*found, described.get("do_flip_channel_order") is True, name)
    return None


def _mean_and_std(described: dict[str, Any]) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Returns those of a preprocessor of transformers or of timm's `pretrained_cfg`."""
    if described.get("do_normalize") is False:
        return (0.0,), (1.0,)
    if "do_flip_channel_order" in described:  # the preprocessors that have no mean
        return (0.0,) * 3, (1.0,) * 3
    timm = described.get("pretrained_cfg") or {}
    mean = described.get("image_mean", timm.get("mean"))
    std = described.get("image_std", timm.get("std"))
    if mean is None or std is None:
        return None
    mean, std = tuple(map(float, mean)), tuple(map(float, std))
    rescaled = described.get("do_rescale") is not False
    # The value of a pixel of 255, less the offset of some EfficientNets.
    white = 255 * float(described.get("rescale_factor", 1 / 255) if rescaled else 1)
    offset = float(rescaled and described.get("rescale_offset") is True)
    if offset or not math.isclose(white, 1, rel_tol=1e-6):
        mean = tuple((x + offset) / white for x in mean)
        std = tuple(x / white for x in std)
    fit = all(0 <= x <= 1 for x in mean) and all(0 < x <= 1 for x in std)
    if not (mean and len(mean) == len(std) and fit):
        raise ValueError(f"mean {mean!s:.80} and std {std!s:.80}, of pixels from 0 to 1")
    kind = str(described.get("image_processor_type"))
    if kind.startswith("EfficientNet") and described.get("include_top", True):
        std = tuple(x * x for x in std)  # transformers divides a second time
    return mean, std


def run_folder(source: str | os.PathLike) -> Path:
    """Returns the folder of a run or of its checkpoints; otherwise the file or folder itself."""
    place = locate(source).resolve()
    of_steps = place.is_dir() and not (place / "checkpoints").is_dir()
    return place.parent if of_steps else place


def zoo() -> dict[str, Path]:
    """Returns the files of the package's own trained networks by name."""
    folder = Path(str(resources.files("hsvit_jax") / "weights" / "zoo"))
    return {path.stem: path for path in sorted(folder.glob("*.safetensors"))}


def _of_hub(name: str) -> Path:
    """Returns the weight file of a model on the hub in the hub's cache, with its descriptions."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    model, _, revision = name.partition("@")
    try:
        file = Path(hf_hub_download(model, _FILE, revision=revision or None))
        for description in _DESCRIPTIONS:
            try:
                hf_hub_download(model, description, revision=file.parent.name)
            except EntryNotFoundError:  # not every model has both
                continue
    except Exception as error:  # the network's, the disk's or a wrong name's
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"hub:{name}: {_FILE} cannot be read: {reason}") from None
    return file
