"""Writes the tables in docs/ that derive from the code: `python docs/generate.py`."""

import ast
import inspect
import re
import runpy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hsvit_jax import cli, get_config
from hsvit_jax.augment.transforms import TRANSFORMS
from hsvit_jax.commands import COMMANDS
from hsvit_jax.config import schema
from hsvit_jax.models import FAMILIES
from hsvit_jax.models.settings import ON

DOCS = Path(__file__).resolve().parent
#: Room of the package → the rooms it may import: the table that tests hold.
FLOORS = runpy.run_path(str(DOCS.parent / "tests/test_imports.py"))["FLOORS"]


def regenerated(page: str) -> str:
    """A page with everything between '<!-- NAME -->' and '<!-- end -->' written anew.

    Args:
      page: Markdown; NAME is a key of `TABLES`.
    """

    def table(match: re.Match) -> str:
        return "\n".join([f"<!-- {match[1]} -->", *TABLES[match[1]](), "<!-- end -->"])

    return re.sub(f"<!-- ({'|'.join(TABLES)}) -->\n.*?<!-- end -->", table, page, flags=re.DOTALL)


def _commands() -> list[str]:
    """The table of the commands."""
    lines = ["| command | work |", "|---|---|"]
    return lines + [f"| `hsvit {name}` | {row.purpose} |" for name, row in COMMANDS.items()]


def _flags() -> list[str]:
    """The table of the commands' flags."""
    lines = ["| command | flag | default | meaning |", "|---|---|---|---|"]
    for name, command in COMMANDS.items():
        flags = cli.make_flags(command.flags)
        for flag in (flags[flag] for flag in flags):
            default = "" if flag.default is None else flag.default_as_str.strip("'")
            default = f"`{default}`" if default else "none"
            choices = ", ".join(f"`{x}`" for x in getattr(flag.parser, "enum_values", ()))
            meaning = flag.help.rpartition(">: ")[2] + (choices and f" One of {choices}.")
            lines.append(f"| `{name}` | `--{flag.name}` | {default} | {meaning} |")
    return lines


def _imports() -> list[str]:
    """The table of imports between the rooms of the package."""
    lines = ["| floor | rooms | may import |", "|---|---|---|"]
    for floor, *names in FLOORS:
        rooms, others = (", ".join(f"`{name}`" for name in part.split()) for part in names)
        others = others.replace("`*`", "every lower floor") or "nothing"
        lines.append(f"| {floor} | {rooms} | {others} |")
    return lines


def _families() -> list[str]:
    """The table of the families, by their records and the docstrings of their config files."""
    lines = ["| config file | network | variants, the default in bold |", "|---|---|---|"]
    for name, family in FAMILIES.items():
        if name == "hsvit":  # its variants have files of their own
            continue
        file = f"configs/{family.config_file or name}.py"
        docstring = ast.get_docstring(ast.parse((DOCS.parent / file).read_text("utf-8")))
        network = docstring.partition("\n")[0].removesuffix(".")
        variants = ", ".join(
            f"**`{variant}`**" if variant == family.default_variant else f"`{variant}`"
            for variant in family.variants
        )
        lines.append(f"| `{file}` | {network} | {variants} |")
    return lines


def _transforms() -> list[str]:
    """The table of the transforms of images, by their signatures and docstrings."""
    lines = ["| transform | what it does |", "|---|---|"]
    for name, function in TRANSFORMS.items():
        numbers = list(inspect.signature(function).parameters.values())[2:]
        text = "".join([name, *(f":{number.default:g}" for number in numbers)])
        meaning = function.__doc__.partition("\n")[0].removesuffix(".")
        lines.append(f"| `{text}` | {meaning[0].lower()}{meaning[1:]} |")
    return lines


def _keys() -> list[str]:
    """The table of the keys outside `model`."""
    strong, paper = (dict(schema.leaves(get_config(f"c2a2:{r}"))) for r in ("", "paper"))
    lines = ["| key | meaning | values | default |", "|---|---|---|---|"]
    for name, key in schema.KEYS.items():
        default = _shown(strong[name])
        if _shown(paper[name]) != default:
            default += f" ({_shown(paper[name])})"
        lines.append(f"| `{name}` | {_meaning(key)} | {_values(key)} | {default} |")
    return lines


def _model_keys() -> list[str]:
    """The table of the keys of `model`, with the families that have them."""
    rows: dict[tuple[str, str, str], dict[str, list[str]]] = {}
    for name, family in FAMILIES.items():
        for leaf, key in family.keys.items():
            row = rows.setdefault((leaf, _meaning(key), _values(key)), {})
            row.setdefault(_shown(family.settings()[leaf]), []).append(name)
    lines = ["| key | meaning | values | defaults |", "|---|---|---|---|"]
    for leaf, key in schema.OF_MODELS.items():
        default = "`float32`" if leaf == "dtype" else "named by `--config`"
        lines.append(f"| `model.{leaf}` | {key.meaning} | {_values(key)} | {default} |")
    for (leaf, meaning, values), readers in rows.items():
        defaults = ", ".join(f"{value} ({', '.join(who)})" for value, who in readers.items())
        lines.append(f"| `model.{leaf}` | {meaning} | {values} | {defaults} |")
    return lines


def _meaning(key: schema.Key) -> str:
    """What a key means, and the settings without which it has no effect, for a cell of a table."""
    needed = (
        " or ".join(
            f"`{name}`" if wanted is ON else f"`{name}={'` or `'.join(map(schema.shown, wanted))}`"
            for name, wanted in condition.items()
        )
        for condition in key.when
    )
    return key.meaning + "".join(f"; only with {text}" for text in needed)


def _values(key: schema.Key) -> str:
    """The values that fit a key, for a cell of a table."""
    text = f"a tuple, each {key.each}" if key.several else key.each
    return re.sub("'(.*?)'", r"`\1`", text.removesuffix(", at most 4096 letters"))


def _shown(value: Any) -> str:
    """A value as the command line takes it, for a cell of a table."""
    return f"`{schema.shown(value)}`" if value not in ("", ()) else "empty"


#: Name of a table → its lines.
TABLES: Mapping[str, Callable[[], list[str]]] = {
    "commands": _commands,
    "flags": _flags,
    "imports": _imports,
    "families": _families,
    "transforms": _transforms,
    "keys": _keys,
    "model keys": _model_keys,
}


def main() -> None:
    """Rewrites every page that has a table of the code's."""
    for path in DOCS.glob("*.md"):
        page = path.read_text("utf-8")
        path.write_text(regenerated(page), "utf-8")


if __name__ == "__main__":
    main()
