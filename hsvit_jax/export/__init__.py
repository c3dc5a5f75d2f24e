"""A trained network as one file, as a folder for the Hugging Face hub, as a state
dict with the authors' names, or as programs that run without this package."""

import json
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from hsvit_jax import artifacts
from hsvit_jax.export import programs
from hsvit_jax.train import metrics
from hsvit_jax.weights import release, sources, torch
from hsvit_jax.weights.stored import Stored, fuse, of_survivors, stored_network

#: Licences of data sets, where one is stated.
_LICENCES = {
    "digits": "[CC BY 4.0](https://doi.org/10.24432/C50P49)",
    "fashion_mnist": "[MIT](https://github.com/zalandoresearch/fashion-mnist)",
}


def describe(stored: Stored, source: str) -> dict[str, Any]:
    """Describes a network for whoever gets its file: no path of this machine is in it.

    Args:
      source: the folder of the run or its checkpoints; the run's metrics of this step are the
        figures measured.
    """
    config = stored.config.copy_and_resolve_references().to_dict()
    kind, equals, path = config["data"]["name"].partition("=")
    on_hub = kind == "hf" and re.fullmatch(r"\w[\w.-]*/[\w.-]+", path) and not Path(path).exists()
    path = path if kind == "tfds" or on_hub else Path(path).name
    config["data"] |= {"name": kind + equals + path, "dir": ""}
    start = config["init"]["from"]
    start = start if start.startswith(("hub:", "zoo:")) else Path(start).name
    config["init"] |= {"from": start, "cache": ""}
    given = stored.meta.get("measured")  # of a file
    given = given.items() if isinstance(given, dict) else ()
    lines = [{**x, "split": name, "step": stored.step} for name, x in given if isinstance(x, dict)]
    lines += metrics.read_metrics(sources.run_folder(source) / "metrics.jsonl")
    about = {
        "family": config["model"]["family"],
        "config": config,
        "class_names": list(stored.class_names),
        "step": stored.step,
        "fingerprint": stored.fingerprint,
        "measured": metrics.measured(lines, stored.step),
        "converted": bool(stored.meta.get("converted")),
        "made_by": f"hsvit_jax {metadata.version('hsvit_jax')}",
    }
    return json.loads(json.dumps(about))


def write_file(stored: Stored, about: dict[str, Any], out: Path) -> list[Path]:
    """Writes one file with all that `hsvit_jax.load` needs."""
    artifacts.write_file(out, release.pack({"params": stored.params, "stats": stored.stats}, about))
    return [out]


def write_reference(stored: Stored, about: dict[str, Any], out: Path) -> list[Path]:
    """Writes a state dict with the names and layouts of the authors' PyTorch code.

    Raises:
      ValueError: the authors' code has no such network.
    """
    weights = torch.table(about["family"])
    weights.check_known(stored.model.config)
    if (backbone := stored.model.feature_network()) is not None:
        torch.table(backbone[0]).check_known(backbone[1].config)
    tensors = weights.dump(stored.params, stored.stats, stored.model)
    artifacts.write_file(out, release.save(tensors, about, format="pt"))
    return [out]


def write_hub(stored: Stored, about: dict[str, Any], out: Path) -> list[Path]:
    """Writes a folder as the Hugging Face hub has it: the file, its settings as JSON, and a card.

    Raises:
      ValueError: `out` is a file, or a folder of other things, or holds an edited card.
    """
    names, data = about["class_names"], about["config"]["data"]
    settings = {
        "model_type": "hsvit_jax",
        "architectures": [about["config"]["model"]["variant"]],
        "id2label": dict(enumerate(names)),
        "label2id": {name: i for i, name in enumerate(names)},
        **about,
    }
    height, width = data["image_size"]
    pixels = {
        "image_mean": data["mean"],
        "image_std": data["std"],
        "size": {"height": height, "width": width},
        "rescale_factor": 1 / 255,
    }
    texts = {
        "config.json": json.dumps(settings, indent=2) + "\n",
        "preprocessor_config.json": json.dumps(pixels, indent=2) + "\n",
        "README.md": card(about, sum(x.size for x in jax.tree.leaves(stored.params))),
    }
    if out.exists() and not _is_ours(out, {*texts, _FILE}):
        raise ValueError(f"{out} already holds something else: remove it or name another OUT")
    old = out / "README.md"
    if old.exists() and old.read_text("utf-8", "replace") != texts["README.md"]:
        raise ValueError(
            f"{old} is edited, or of another network: move it away, or name another OUT"
        )
    written = write_file(stored, about, out / _FILE)
    for name, text in texts.items():
        artifacts.write_file(out / name, text)
    return [*written, *(out / name for name in texts)]


_FILE = "model.safetensors"
_FORMATS = {"file": write_file, "hub": write_hub, "reference": write_reference}
#: Format → the ending of a file of it; a folder has none.
ENDINGS = {"file": ".safetensors", "hub": "", "reference": ".safetensors"} | {
    form: f".{form}" for form in programs.FORMATS
}


def write(
    source: str, which: str, out: Path, form: str, *, parts: int | None = None, fused: bool = False
) -> tuple[Stored, list[str]]:
    """Writes the network of a run.

    Args:
      source: the run, or what holds its network.
      which: of its checkpoints.
      out: a file with the format's ending, or a folder.
      form: a key of ENDINGS.
      parts: how many programs to cut it into.
      fused: whether branches become single convolutions.

    Returns:
      the network, and a line for each file.
    """
    stored = of_survivors(stored_network(source, which))
    stored = fuse(stored) if fused else stored
    about = describe(stored, source)
    if about["config"]["eval"]["tta"] != "none" and (parts or form == "reference"):
        about["measured"] = {}  # of more views of an image than what is written has
    if form in programs.FORMATS:
        return stored, programs.write(stored, about, out, form, parts)
    paths = _FORMATS[form](stored, about, out)
    return stored, [f"{path}  {artifacts.byte_text(path.stat().st_size)}" for path in paths]


def _is_ours(out: Path, names: set[str]) -> bool:
    """Whether a folder is empty, or was written by `write_hub`."""
    if not out.is_dir() or {path.name for path in out.iterdir()} - names:
        return False
    try:
        return json.loads((out / "config.json").read_bytes())["model_type"] == "hsvit_jax"
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return not any(out.iterdir())


def card(about: dict[str, Any], parameters: int) -> str:
    """The model card: Markdown behind a head of YAML, of which JSON is a part."""
    config = about["config"]
    model, data, recipe = config["model"], config["data"], config["recipe"]
    name, tests = f"{model['variant']} on {data['name']}", about["measured"].get("test")
    name = model["variant"] if about["converted"] else name
    height, width = data["image_size"]
    head: dict[str, Any] = {
        "library_name": "hsvit_jax",
        "pipeline_tag": "image-classification",
        "tags": ["jax", "hsvit_jax", model["family"]],
    }
    if tests:
        of = {"name": data["name"], "type": data["name"], "split": "test"}
        accuracy = {"type": "accuracy", "value": tests["accuracy"]}
        task = {"type": "image-classification"}
        result = {"task": task, "dataset": of, "metrics": [accuracy]}
        head["model-index"] = [{"name": name, "results": [result]}]
    rows = [("split", "images", "accuracy", "loss")]
    for split, m in about["measured"].items():
        loss = "not finite" if m["loss"] is None else f"{m['loss']:.4f}"
        rows.append((split, f"{m['examples']:,}", f"{m['accuracy']:.2%}", loss))
    figures = artifacts.markdown(rows) if len(rows) > 1 else "None were recorded."
    licence = _LICENCES.get(data["name"], "see its publisher's terms")
    licence = f"{artifacts.plain_markdown(data['name'])}): {licence}"
    training = f"Recipe {artifacts.code(recipe)}, seed {config['seed']}, step {about['step']:,}"
    if about["converted"]:  # the configuration's data and recipe are the command's defaults
        training, licence = "Converted from PyTorch weights", "not recorded)"
    chosen = config["train"]["select_on"]
    if len(rows) > 1 and chosen != "last":
        figures += f"\n\nThe checkpoint was selected on `{chosen}`, which flatters it."
    names = ", ".join(map(artifacts.code, about["class_names"][:20]))
    more = len(about["class_names"]) - 20
    yaml = "\n".join(f"{key}: {json.dumps(value)}" for key, value in head.items())
    return f"""---
{yaml}
---

# {artifacts.plain_markdown(name)}

{model["variant"]} ({model["family"]}): {parameters:,} parameters, images of {height}×{width} pixels
and {data["channels"]} channel{"s" * (data["channels"] > 1)}, normalised from [0, 1] by mean
{data["mean"]} and standard deviation {data["std"]}.

Classes ({len(about["class_names"])}): {names}{f" and {more} more" if more > 0 else ""}.

    import hsvit_jax
    network = hsvit_jax.load("{_FILE}")
    probabilities = network.predict("image.png")

## Training

{training}; exported by `{about["made_by"]}`.
The file's header holds the whole configuration.

## Figures measured

{figures}

## Licence

Code: Apache-2.0. Training data ({licence}. That of the weights is for their
publisher to state, as `license:` in the head of this card.
"""
