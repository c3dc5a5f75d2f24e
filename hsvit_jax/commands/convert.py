"""Converts PyTorch weights to a checkpoint: `hsvit convert FILE [OUT]`.

The network's sizes come from options, else from the JSON under `config` (its `constructor`), else
from the tensors' shapes. Where FILE also holds `input` (NCHW) and `logits_f64` or `logits`, the
converted network must agree with them in float64 before anything is written. One weight that is off
by 0.1 % shows in `logits_f64` alone: save those.
"""

import copy
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hsvit_jax import cli
from hsvit_jax import config as configs
from hsvit_jax.artifacts import write_file
from hsvit_jax.checkpoint import Checkpoints, probe
from hsvit_jax.text import few
from hsvit_jax.weights import files, release, torch
from hsvit_jax.weights.torch.base import Tensors


class Disagreement(ValueError):
    """The converted network's logits differ from the file's; `report` says by how much."""

    def __init__(self, message: str, report: dict[str, Any]) -> None:
        super().__init__(message)
        self.report = report


# --- Converting ----------------------------------------------------------------------------------


def convert_file(
    path: str | Path,
    out: str | Path | None = None,
    *,
    family: str | None = None,
    image_size: Sequence[int] | None = None,
    channels: int | None = None,
    strides: Sequence[int] | None = None,
    heads: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    data: str | None = None,
    class_names: Sequence[str] | None = None,
    tolerance: float | None = None,
) -> dict[str, Any]:
    """Converts a file to a work directory with `checkpoints/` (step 0) and `config.json`.

    Args:
      out: the work directory; by default `<stem>-jax` beside the file.
      family: of the network, where the file's `config` does not name it; hsvit by default.
      image_size: (rows, columns), where the file does not say.
      channels, strides, heads: where the file does not say.
      mean, std: of pixels in [0, 1], one value or one per channel; no state dict holds them. 0.5 by
        default.
      data: name of the data set for the configuration; cifar10 by default.
      class_names: the name of each logit; by default those that the file's `config` holds, or
        numbers. The labels of data are matched with them by name.
      tolerance: of the logits, where the file has them, relative to the largest. By default 1e-9
        for `logits_f64`, or 1e-6 with rotary positions, whose angles the reference keeps in
        float32; 1e-5 for `logits`.

    Returns:
      `parameters`, `checkpoint` and, where compared, `max_abs_error`, `max_abs_logit` and
      `tolerance`; the pool `strides`, where they were guessed; of Performer and Nyström
      `batch_coupling`.

    Raises:
      ValueError: the file cannot be read, its tensors or sizes do not fit, or `out` holds something
        else.
      Disagreement: the logits differ; nothing is written.
    """
    path = Path(path)
    tensors, description = files.read(path)
    if release.is_release(description):
        raise ValueError(
            f"{path} is a network of this package already: give it to hsvit eval, predict or "
            "serve, or to init.from"
        )
    try:
        record = torch.family_of({"family": family} if family else description)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from None
    fitting = [name for name, table in torch.TABLES.items() if table.recognises(tensors)]
    if fitting and record.name not in fitting:
        raise ValueError(
            f"{path}: the names of its tensors are not those of the family {record.name!r} but, it "
            f"may be, of {few(fitting)}: say which with --family"
        )
    for flag, setting, value in (("heads", "heads", heads), ("strides", "pool_strides", strides)):
        if value is not None and setting not in record.defaults:
            raise ValueError(f"{path}: the family {record.name!r} has no use for --{flag}")
    options = {"image_size": image_size, "num_channels": channels, "num_heads": heads}
    options["pool_strides"] = strides
    try:
        given = torch.constructor(description)
        given |= {k: v for k, v in options.items() if v is not None}
        tensors, own = torch.table(record.name).unwrapped(tensors), description.get("config")
        if isinstance(own, dict):  # what export wrote under the authors' names
            if any(value is not None for value in (*options.values(), mean, std, data)):
                raise ValueError(
                    "it holds its own configuration: leave out the options that say what it is"
                )
            config = configs.completed(own)
        else:
            sizes, shapes = torch.torch_settings(record, tensors, given)
            config = configs.base(data or "cifar10", sizes)
            for name, values in (("mean", mean or (0.5,)), ("std", std or (0.5,))):
                if len(values) not in (1, shapes["channels"]):
                    raise ValueError(
                        f"--{name} takes one value or one per channel ({shapes['channels']}); got "
                        f"{tuple(values)}"
                    )
                shapes[name] = configs.per_channel(name, tuple(values), shapes["channels"])
            config.data.update(shapes)
        configs.validate(config)
        model = configs.build_model(config)
        params, stats = torch.table(record.name).load(tensors, model)
        names = _class_names(description, class_names, config.data.num_classes)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    except (TypeError, LookupError, AttributeError, ArithmeticError, MemoryError) as error:
        raise ValueError(
            f"{path}: its `config` and tensors do not describe a network of the family "
            f"{record.name!r} ({type(error).__name__}: {error})"
        ) from error
    report = {"parameters": sum(int(leaf.size) for leaf in jax.tree.leaves(params))}
    if "input" in tensors and {"logits", "logits_f64"} & set(tensors):
        if tolerance is None:
            exact = 1e-6 if config.model.get("positions") == "rope" else 1e-9
            tolerance = exact if "logits_f64" in tensors else 1e-5
        report |= _compare(path, model, params, stats, tensors, tolerance)
    out = path.with_name(f"{path.stem}-jax") if out is None else Path(out)
    meta = {"config": config.to_dict(), "class_names": names, "converted": True}
    _write(out, config, {"params": params, "stats": stats}, meta)
    settings = config.model.to_dict()
    if "pool_strides" in settings and not (isinstance(own, dict) or "pool_strides" in given):
        report["strides"] = list(settings["pool_strides"])
    if settings.get("mixer") in ("performer", "nystrom"):
        report["batch_coupling"] = settings["batch_coupling"]
    return report | {"checkpoint": str(out)}


def _class_names(description: dict[str, Any], given: Sequence[str] | None, count: int) -> list[str]:
    """The given names, the file's or numbers; raises ValueError for what are no names."""
    if given is not None:
        if len(given) != count or len(set(given)) != count:
            raise ValueError(
                f"--class_names takes {count} different names, one per logit in their order; got "
                f"{len(given)} ({few(given)})"
            )
        return list(given)
    names = description.get("class_names")
    if names is None:
        return [str(i) for i in range(count)]
    texts = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if not texts or not 1 <= len(names) <= count:
        raise ValueError(
            f"`class_names` in its `config` must be a list of 1 to {count} texts, one per class; "
            f"got {len(names) if texts else names!r:.60}: correct it or leave it out"
        )
    return names


def _compare(
    path: Path, model: Any, params: dict, stats: dict, tensors: Tensors, tolerance: float
) -> dict[str, float]:
    """Compares the logits on the file's images; raises Disagreement beyond the tolerance."""
    images = tensors["input"]
    logits = tensors["logits_f64"] if "logits_f64" in tensors else tensors["logits"]
    size = (model.config.image_channels, *model.config.image_size)
    fits = images.shape == (*logits.shape[:1], *size) and images.size
    if not fits or logits.shape[1:] != (model.config.num_classes,):
        raise ValueError(
            f"{path}: input {images.shape} and logits {logits.shape} do not fit a network for "
            f"{size} (channels, rows, columns) and {model.config.num_classes} classes"
        )
    floats = all(t.dtype.kind == "f" or t.dtype.name == "bfloat16" for t in (images, logits))
    if not floats or not all(np.isfinite(t).all() for t in (images, logits)):
        raise ValueError(f"{path}: input and logits must be finite floating-point numbers")
    # In double precision: in single, the rounding of many layers would hide a small difference.
    model = copy.copy(model)
    model.dtype = jnp.dtype(jnp.float32)  # which widens with the images
    with jax.enable_x64(True):
        run = jax.jit(lambda p, s, x: model.apply(p, s, x)[0])
        wide = jax.tree.map(lambda x: np.asarray(x, np.float64), (params, stats))
        ours = np.asarray(run(*wide, images.transpose(0, 2, 3, 1).astype(np.float64)))
    logits = logits.astype(np.float64)
    error = float(np.abs(ours - logits).max())
    largest = float(np.abs(logits).max())
    report = {"max_abs_error": error, "max_abs_logit": largest, "tolerance": tolerance}
    if not error <= tolerance * largest:  # written so that NaN fails
        finite = {k: v if math.isfinite(v) else None for k, v in report.items()}
        raise Disagreement(
            f"{path}: the converted network's logits differ from the file's by {error:.3g}, more "
            f"than {tolerance:g} of the largest, {largest:.3g}; nothing was written",
            finite,
        )
    return report


def _write(out: Path, config: Any, state: dict, meta: dict) -> None:
    """Writes the work directory, unless it holds anything but the same conversion."""
    text, file = configs.to_json(config) + "\n", out / "config.json"
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


# --- Command line --------------------------------------------------------------------------------


def run(request: cli.Request) -> None:
    """Converts the file that the words name, and prints a line of JSON."""
    try:
        report = convert_file(*request.words, **request.flags.flag_values_dict())
    except Disagreement as error:
        print(json.dumps(error.report))
        raise
    except OSError as error:
        raise ValueError(f"{error.filename or 'writing'}: {error.strerror}") from error
    print(json.dumps(report))
    if "strides" in report:
        cli.note(
            f"note: no tensor holds the pool strides: {report['strides']} follow from the image's "
            "size, as others of the same product would; --strides sets them"
        )
    if report.get("tolerance", 0) >= 1e-6:
        cli.note(
            f"note: an error below {report['tolerance']:g} of the largest logit goes unseen; with "
            "`logits_f64`, the logits computed in float64, one below 1e-9 does"
        )
    if report.get("batch_coupling"):
        cli.note(
            "note: as the reference computes it, an image's answer depends on the other images of "
            "its batch (model.batch_coupling=True)"
        )
