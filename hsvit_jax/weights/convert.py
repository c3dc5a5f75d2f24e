"""Converts a weight file of another library to a run's folder.

If the file also holds `input` (NCHW) and `logits_f64` or `logits`, the converted network must agree
with them in float64 before anything is written. Only `logits_f64` shows one weight that is off by
0.1 %.
"""

import copy
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from hsvit_jax import config as config_lib
from hsvit_jax import models
from hsvit_jax.artifacts import write_file
from hsvit_jax.checkpoint import Checkpoints, probe
from hsvit_jax.models.network import Network
from hsvit_jax.text import few
from hsvit_jax.weights import adapt, files, read, sources
from hsvit_jax.weights.files import Tensors


class Disagreement(ValueError):
    """The converted network's logits differ from the file's; `report` has the figures."""

    def __init__(self, message: str, report: dict[str, Any]) -> None:
        super().__init__(message)
        self.report = report


def convert(
    path: str | Path,
    out: str | Path | None = None,
    *,
    config: ml_collections.ConfigDict | None = None,
    data: str | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    class_names: Sequence[str] | None = None,
    tolerance: float | None = None,
) -> dict[str, Any]:
    """Converts a file to a work directory with `checkpoints/` (step 0) and `config.json`.

    Args:
      path: a file, or a source of `sources.locate`.
      out: the work directory; defaults to `<stem>-jax` beside the file.
      config: the network's, for a file that does not describe it.
      data: name of the data set in a file's own configuration; defaults to cifar10.
      mean, std: one value or one per channel, for pixels in [0, 1]. They default to those of the
        configuration, then to those beside a published file, then to 0.5.
      class_names: the name of each logit, by which labels are matched; defaults to those in the
        file, then to numbers.
      tolerance: the largest error of logits relative to the largest logit. It defaults to 1e-9 for
        `logits_f64` (1e-6 with rotary positions, whose angles the reference keeps in float32) and
        to 1e-5 for `logits`.

    Returns:
      `parameters`, `checkpoint` and, if compared, `max_abs_error`, `max_abs_logit` and
      `tolerance`; for Performer and Nyström `batch_coupling`.

    Raises:
      ValueError: the file cannot be read, its tensors or sizes do not fit, or `out` holds something
        else.
      Disagreement: the logits differ; nothing is written.
    """
    path = sources.locate(path)
    tensors, description = files.read(path)
    if files.is_release(description):
        raise ValueError(
            f"{path} is a network of this package already: use it with hsvit eval, predict or "
            "serve, or with init.from"
        )
    try:
        like, family = (None, "") if config is None else (_network(config), config.model.family)
        found = read.read(path, tensors, description, like, family)
        config = _completed(found, config, like, data, mean, std, sources.pixels(path))
        names = _names(found, class_names)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    model, trees = config_lib.build_model(config), {"params": found.params, "stats": found.stats}
    report = {"parameters": sum(int(leaf.size) for leaf in jax.tree.leaves(found.params))}
    if "input" in tensors and {"logits", "logits_f64"} & set(tensors):
        if tolerance is None:
            exact = 1e-6 if config.model.get("positions") == "rope" else 1e-9
            tolerance = exact if "logits_f64" in tensors else 1e-5
        report |= _compare(path, model, trees, tensors, tolerance)
    out = path.with_name(f"{path.stem}-jax") if out is None else Path(out)
    meta = {"config": config.to_dict(), "class_names": names, "converted": True}
    _write(out, config, trees, meta)
    if config.model.get("mixer") in ("performer", "nystrom"):
        report["batch_coupling"] = config.model.batch_coupling
    return report | {"checkpoint": str(out)}


def _network(config: ml_collections.ConfigDict) -> Network:
    """Builds the network of a configuration without a data set."""
    family = models.FAMILIES[config.model.family]
    side = family.native_sizes.get(config.model.variant, family.native_size)
    sides = tuple(config.data.image_size) or (side,)
    if not all(sides):
        raise ValueError("no tensor shows the image's size: add --config.data.image_size=32,32")
    return models.build(
        config.model.to_dict(),
        image_size=(sides[0], sides[-1]),
        channels=config.data.channels or 3,
        num_classes=config.data.num_classes or 10,
    )


def _completed(
    found: read.Weights,
    given: ml_collections.ConfigDict | None,
    like: Network | None,
    data: str | None,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    published: sources.Pixels | None,
) -> ml_collections.ConfigDict:
    """Returns the file's configuration, or the given one, with the file's sizes."""
    c = found.network.config
    if like is not None and type(c) is not type(like.config):
        raise ValueError(f"it holds the backbone ({found.family}) alone: use it with init.from")
    if like is not None and found.config is not None:
        adapt.check(c, adapt.at_sizes_of(like, found.network).config)
    config = found.config if given is None else given
    family, channels = models.FAMILIES[config.model.family], c.image_channels
    values = {"data.image_size": c.image_size, "data.channels": channels}
    values |= {"data.num_classes": c.num_classes, "data.name": data or config.data.name}
    values["model.variant"] = family.variant_of(config.model.to_dict(), c.image_size)
    for name, own in (("mean", mean), ("std", std)):
        own = tuple(own or config.data[name] or getattr(published, name, (0.5,)))
        if len(own) not in (1, channels):
            raise ValueError(f"--{name} takes 1 value or {channels}, one per channel; got {own}")
        values[f"data.{name}"] = config_lib.per_channel(name, own, channels)
    config = config.filled(values)
    config_lib.validate(config)
    return config


def _names(found: read.Weights, given: Sequence[str] | None) -> list[str]:
    """Returns the given class names, the file's, or numbers."""
    count = found.network.config.num_classes
    if given is not None and (len(given) != count or len(set(given)) != count):
        raise ValueError(
            f"--class_names takes {count} different names, one per logit in their order; got "
            f"{len(given)} ({few(given)})"
        )
    return list(given or found.class_names or map(str, range(count)))


def _compare(
    path: Path, model: Network, trees: dict, tensors: Tensors, tolerance: float
) -> dict[str, float]:
    """Compares the logits on the file's images; raises Disagreement beyond the tolerance."""
    images = tensors["input"]
    logits = tensors["logits_f64"] if "logits_f64" in tensors else tensors["logits"]
    size = (model.config.image_channels, *model.config.image_size)
    if images.shape != (*logits.shape[:1], *size) or logits.shape[1:] != (
        model.config.num_classes,
    ):
        raise ValueError(
            f"{path}: input {images.shape} and logits {logits.shape} do not fit a network for "
            f"{size} (channels, rows, columns) and {model.config.num_classes} classes"
        )
    # In double precision: in single, the rounding of many layers would hide a small difference.
    model = copy.copy(model)
    model.dtype = jnp.dtype(jnp.float32)  # which widens with the images
    with jax.enable_x64(True):
        run = jax.jit(lambda p, s, x: model.apply(p, s, x)[0])
        wide = jax.tree.map(lambda x: np.asarray(x, np.float64), (trees["params"], trees["stats"]))
        ours = np.asarray(run(*wide, images.transpose(0, 2, 3, 1).astype(np.float64)))
    logits = logits.astype(np.float64)
    error = float(np.abs(ours - logits).max(initial=0.0))
    largest = float(np.abs(logits).max(initial=0.0))
    report = {"max_abs_error": error, "max_abs_logit": largest, "tolerance": tolerance}
    if not (largest and error <= tolerance * largest):  # written so that NaN fails
        finite = {k: v if math.isfinite(v) else None for k, v in report.items()}
        raise Disagreement(
            f"{path}: the converted network's logits differ from the file's by {error:.3g}, more "
            f"than {tolerance:g} of the largest, {largest:.3g}; nothing was written",
            finite,
        )
    return report


def _write(out: Path, config: ml_collections.ConfigDict, state: dict, meta: dict) -> None:
    """Writes the work directory, unless it holds anything but the same conversion."""
    text, file = config_lib.to_json(config) + "\n", out / "config.json"
    in_the_way = out.exists() and (not out.is_dir() or any(out.iterdir()))
    if in_the_way and not (file.is_file() and file.read_bytes() == text.encode()):
        raise ValueError(f"{out} already holds something else: remove it or name another OUT")
    probe(out)
    write_file(file, text)
    with Checkpoints(out / "checkpoints") as checkpoints:
        # Step 0 with these weights would stay as it is, and config.json has no class names.
        saved = checkpoints.meta() if checkpoints.steps() else meta
        if saved.get("class_names") != meta["class_names"]:
            raise ValueError(
                f"{out} already holds this network with other class names: remove it or name "
                "another OUT"
            )
        checkpoints.save(0, state, meta, wait=True)
