"""Writes a trained network as a file, a hub folder, a PyTorch state dict, or programs."""

import json
import re
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax

from hsvit_jax import artifacts, tasks
from hsvit_jax.export import programs, quantize
from hsvit_jax.train import metrics
from hsvit_jax.weights import files, sources, torch
from hsvit_jax.weights.stored import Stored


def describe(stored: Stored, source: str) -> dict[str, Any]:
    """Describes a network for users of its file, without paths of this machine.

    Args:
      source: the folder of the run or its checkpoints, whose metrics are the figures measured.
    """
    config = stored.config.copy_and_resolve_references().to_dict()
    kind, equals, path = config["data"]["name"].partition("=")
    on_hub = kind == "hf" and re.fullmatch(r"\w[\w.-]*/[\w.-]+", path) and not Path(path).exists()
    path = path if kind == "tfds" or on_hub else Path(path).name
    config["data"] |= {"name": kind + equals + path, "dir": ""}
    start = config["init"]["from"]
    start = start if start.startswith(("hub:", "zoo:")) else Path(start).name
    config["init"] |= {"from": start, "cache": ""}
    given = stored.meta.get("measured")  # of an exported file
    given = given.items() if isinstance(given, dict) else ()
    lines = [{**x, "split": name, "step": stored.step} for name, x in given if isinstance(x, dict)]
    lines += metrics.read_metrics(sources.run_folder(source) / "metrics.jsonl")
    about = {
        "family": config["model"]["family"],
        "config": config,
        "class_names": list(stored.class_names),
        "step": stored.step,
        "fingerprint": stored.fingerprint,
        "measured": metrics.measured(lines, stored.step, tasks.of(stored.config).reported),
        **({"lost_groups": lost} if (lost := stored.meta.get("lost_groups")) else {}),
        "converted": bool(stored.meta.get("converted")),
        "made_by": f"hsvit_jax {metadata.version('hsvit_jax')}",
    }
    return json.loads(json.dumps(about))


def _file(stored: Stored, about: dict[str, Any], out: str, _: None = None) -> dict[str, bytes]:
    """Returns one file for `hsvit_jax.load`."""
    return {out: files.pack({"params": stored.params, "stats": stored.stats}, about)}


def _reference(stored: Stored, about: dict[str, Any], out: str, _: None = None) -> dict[str, bytes]:
    """Returns a state dict with the names and layouts of the authors' PyTorch code."""
    if "lost_groups" in about:
        raise ValueError(
            "the authors' code cannot leave lost groups without votes: use another format"
        )
    weights = torch.table(about["family"])
    weights.check_known(stored.model.config)
    if (backbone := stored.model.feature_network()) is not None:
        torch.table(backbone[0]).check_known(backbone[1].config)
    tensors = weights.dump(stored.params, stored.stats, stored.model)
    return {out: files.save(tensors, about, format="pt")}


def _hub(stored: Stored, about: dict[str, Any], out: str, _: None = None) -> dict[str, str | bytes]:
    """Returns a folder of the Hugging Face hub: a card, the settings as JSON, and the file."""
    names, data = about["class_names"], about["config"]["data"]
    settings = {
        "model_type": "hsvit_jax",
        "architectures": [about["config"]["model"]["variant"]],
        "id2label": dict(enumerate(names)),
        "label2id": {name: i for i, name in enumerate(names)},
        **about,
    }
    if data["task"] != "classify":
        kind = {"multilabel": "multi_label_classification", "regress": "regression"}
        settings["problem_type"] = kind[data["task"]]
    height, width = data["image_size"]
    pixels = {
        "image_mean": data["mean"],
        "image_std": data["std"],
        "size": {"height": height, "width": width},
        "rescale_factor": 1 / 255,
    }
    return {
        "README.md": card(about, sum(x.size for x in jax.tree.leaves(stored.params))),
        "config.json": json.dumps(settings, indent=2) + "\n",
        "preprocessor_config.json": json.dumps(pixels, indent=2) + "\n",
        **_file(stored, about, "model.safetensors"),
    }


def write(
    stored: Stored, about: dict[str, Any], out: Path, form: str, parts: int | None = None
) -> list[str]:
    """Writes a network in a format.

    Args:
      about: its description.
      out: a file with the format's ending, or a folder.
      form: a key of FORMATS.
      parts: number of programs beside that of the head; None for one program.

    Returns:
      a line for each file.

    Raises:
      ValueError: `out` holds something else, or the format cannot hold the network; nothing is
        written.
    """
    if stored.config.eval.tta != "none" and (parts or form == "reference"):
        about = about | {"measured": {}}  # measured with more views of an image
    contents = FORMATS[form].contents(stored, about, out.name, parts)
    folder = out.parent
    if parts is not None or not FORMATS[form].ending:
        folder, (sheet, text) = out, next(iter(contents.items()))
        names = {path.name for path in folder.glob("*")}
        kept = (folder / sheet).read_text("utf-8", "replace") if sheet in names else ""
        # Bytes of programs vary.
        same = kept.partition('"programs"')[0] == text.partition('"programs"')[0]
        if names and (names - {*contents} or not same):
            other = f"something else, another network, or an edited {sheet}"
            raise ValueError(f"{folder} holds {other}: remove it, or name another OUT")
    for name, content in contents.items():
        artifacts.write_file(folder / name, content)
    paths = [folder / name for name in contents]
    return [f"{path}  {artifacts.byte_text(path.stat().st_size)}" for path in paths]


def card(about: dict[str, Any], parameters: int) -> str:
    """Returns the model card of a network."""
    task = tasks.TASKS[about["config"]["data"]["task"]]
    names = {"plain": artifacts.plain_markdown, "code": artifacts.code, "task": task}
    names |= {"name_of": tasks.name_of, "form": lambda name, x: format(x, tasks.form(name))}
    template = Path(__file__).with_name("card.md")
    return artifacts.filled(template, **about, **names, parameters=parameters)


class Format(NamedTuple):
    """A format.

    Attributes:
      ending: of its file's name; '' for a folder.
      contents: maps a network, its description, OUT's name and a number of parts to files by
        name; a folder's first file describes it.
    """

    ending: str
    contents: Callable[..., dict[str, Any]]


FORMATS = {
    "file": Format(".safetensors", _file),
    "hub": Format("", _hub),
    "reference": Format(".safetensors", _reference),
    "stablehlo": Format(".stablehlo", partial(programs.contents, programs.stablehlo)),
    "onnx": Format(".onnx", partial(programs.contents, programs.onnx)),
    "tflite": Format(".tflite", partial(programs.contents, programs.tflite)),
    "int8": Format(".onnx", quantize.contents),
}
#: The formats that can be cut into parts.
PROGRAMS = ("stablehlo", "onnx", "tflite", "int8")
