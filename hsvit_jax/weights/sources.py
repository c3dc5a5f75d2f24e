"""Where trained weights come from: a path, or the name of a network of the zoo."""

import os
from importlib import resources
from pathlib import Path


def locate(source: str | os.PathLike) -> Path:
    """Finds the file or folder of a source; a folder with `model.safetensors` gives that file.

    Args:
      source: a path, or 'zoo:NAME'.

    Raises:
      ValueError: there is no network of that name.
    """
    kind, _, name = str(source).partition(":")
    if kind == "zoo":
        return _of_zoo(name)
    path = Path(source).expanduser()
    file = path / "model.safetensors"
    return file if os.path.isfile(file) else path


def _of_zoo(name: str) -> Path:
    """The file of a network that comes with the package."""
    folder = Path(str(resources.files("hsvit_jax") / "zoo"))
    known = sorted(path.stem for path in folder.glob("*.safetensors"))
    if name not in known:
        raise ValueError(f"no network {name!r:.80} in the zoo; it has {', '.join(known) or 'none'}")
    return folder / f"{name}.safetensors"
