"""Variants of the sibling families, named by the words after the colon.

`configs/vix.py:vin,hybrid,rope,cifar10` names ViX's variant `hybrid_vin_rope` by its parts, in any
order; `configs/hvt.py:s-4` by its name. `words.parse_argument` parses all other words.
"""

import re
from collections.abc import Mapping

import ml_collections

from hsvit_jax import tasks
from hsvit_jax.config import resolution, words
from hsvit_jax.models import DEFAULT, FAMILIES, is_built_in
from hsvit_jax.models.family import Family
from hsvit_jax.text import few, nearest

#: Names of files in configs/ that differ from the family's, with the family.
OF_FILE: Mapping[str, str] = {v.config_file: k for k, v in FAMILIES.items() if v.config_file}


def siblings() -> Mapping[str, Family]:
    """Returns the families other than HSViT, whose variants are networks with their own names."""
    return {name: family for name, family in FAMILIES.items() if family is not DEFAULT}


def get_config(family: str, argument: str | None = None) -> ml_collections.ConfigDict:
    """Makes the configuration of a sibling family.

    Args:
      argument: the words after the colon: variant, data set, recipe and switches.

    Raises:
      ValueError: the family or a word is unknown, or the words name no variant or several.
    """
    record = family_of(family)
    known = {part for name in record.variants for part in _parts(name)}
    given, rest = [], []
    for word in words.split(argument):
        if words.is_word(word):
            rest.append(word)
        elif known.issuperset(_parts(word)):
            given.append(word)
        else:
            raise words.unknown(word, (*record.variants, *sorted(known), *words.COMMON), family)
    model = record.settings(_variant(record, given, "finetune" in rest))
    argument = ",".join(rest)
    data, recipe, _ = words.parse_argument(argument)
    if data == "digits" and recipe != "paper":
        model |= record.digits(model)
    return resolution.base(argument, model)


def is_registered(config: ml_collections.ConfigDict) -> bool:
    """Whether a file registered the family, loss or a metric, without which nothing evaluates."""
    return not is_built_in(config.model.family) or tasks.has_own(config)


def family_of(name: str) -> Family:
    """Returns the record of a family; raises ValueError for an unknown name."""
    if name not in FAMILIES:
        near = nearest(name, FAMILIES)
        raise ValueError(f"unknown family {name!r}.{near} Known: {few(FAMILIES)}")
    return FAMILIES[name]


def _parts(name: str) -> list[str]:
    return re.split("[-_]", name)


def _variant(record: Family, given: list[str], finetuned: bool) -> str:
    """Returns the one variant with just these parts, in this order if there are several.

    Fine-tuning prefers variants whose weights have an image size, and of those ImageNet's.
    """
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
        raise ValueError(f"{wanted} could be {few(wider, ' or ')}: name one after the colon")
    near = nearest("_".join(parts), names)
    raise ValueError(f"{wanted} names no variant of {record.name}.{near} Known: {few(names)}")
