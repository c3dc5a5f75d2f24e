"""Variants of the sibling families, named by the words after the colon.

`configs/vix.py:vin,hybrid,rope,cifar10` names ViX's variant `hybrid_vin_rope` by its parts, in any
order; `configs/hvt.py:s-4` by its name. All other words are those of `words.parse_argument`.
"""

import re
from collections.abc import Mapping

import ml_collections

from hsvit_jax.config import resolution, words
from hsvit_jax.models import DEFAULT, FAMILIES, is_built_in
from hsvit_jax.models.family import Family
from hsvit_jax.text import few, nearest

#: Families whose file in configs/ has another name, by that name.
OF_FILE: Mapping[str, str] = {v.config_file: k for k, v in FAMILIES.items() if v.config_file}


def siblings() -> Mapping[str, Family]:
    """The families other than HSViT, whose variants are networks with names of their own."""
    return {name: family for name, family in FAMILIES.items() if family is not DEFAULT}


def get_config(family: str, argument: str | None = None) -> ml_collections.ConfigDict:
    """Makes the configuration of a sibling family.

    Args:
      argument: the words after the colon: variant, data set, recipe and switches.

    Raises:
      ValueError: a word is unknown, the words name no variant of the family or several, or the
        family is unknown.
    """
    record = family_of(family)
    variant, rest = _split(record, argument)
    model, (data, recipe, _) = record.settings(variant), words.parse_argument(rest)
    if data == "digits" and recipe != "paper":
        model |= record.digits(model)
    return resolution.base(rest, model)


def is_registered(config: ml_collections.ConfigDict) -> bool:
    """Whether the network is of a family that a file registered, without which nothing reads it."""
    return not is_built_in(config.model.family)


def family_of(name: str) -> Family:
    """The record of a family. Raises ValueError for an unknown name."""
    if name not in FAMILIES:
        near = nearest(name, FAMILIES)
        raise ValueError(f"unknown family {name!r}.{near} Known: {few(FAMILIES)}")
    return FAMILIES[name]


def _split(record: Family, argument: str | None) -> tuple[str, str]:
    """Separates the text after the colon into the variant and the other words, with commas."""
    names = tuple(record.variants)
    known = {part for name in names for part in _parts(name)}
    variant, rest = [], []
    for word in filter(None, (w.strip() for w in (argument or "").split(","))):
        if words.is_word(word):
            rest.append(word)
        elif known.issuperset(_parts(word)):
            variant.append(word)
        else:
            common = (*words.DATA_SETS, *words.RECIPES, *words.SWITCHES)
            near = words.hint(word, (*names, *sorted(known), *common), record.name)
            raise ValueError(
                f"unknown word {word!r} after the colon.{near} {_known(record)}; other words: "
                f"{few(common)} (a path with a comma: --config.data.name=KIND=PATH)"
            )
    return _variant(record, variant, "finetune" in rest), ",".join(rest)


def _parts(name: str) -> list[str]:
    return re.split("[-_]", name)


def _variant(record: Family, given: list[str], finetuned: bool) -> str:
    """The one variant with just these parts, in this order where there are several; for fine-tuning
    also the one with more parts whose weights have an image size, of several that for ImageNet."""
    if not given:
        return record.default_variant
    names = record.variants
    parts = [part for word in given for part in _parts(word)]
    same = [name for name in names if sorted(_parts(name)) == sorted(parts)]
    exact = [name for name in same if _parts(name) == parts]
    if len(exact or same) == 1:
        return (exact or same)[0]
    wanted = ",".join(given)
    wider = same or [name for name in names if not set(parts) - set(_parts(name))]
    native = [name for name in wider if finetuned and name in record.native_sizes]
    native = [name for name in native if "imagenet" in _parts(name)] or native
    if len(native) == 1:
        return native[0]
    if wider:
        raise ValueError(
            f"{wanted} could be {few(wider, ' or ')}: name one of them after the colon, whole "
            "or by its parts"
        )
    near = nearest("_".join(parts), names)
    raise ValueError(f"{wanted} names no variant of {record.name}.{near} {_known(record)}")


def _known(record: Family) -> str:
    return f"Known variants of {record.name}: {few(record.variants)}"
