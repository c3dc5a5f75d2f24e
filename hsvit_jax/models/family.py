"""A family of networks as one record: its settings, its named variants and how it is built."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, MISSING, dataclass, field, fields, is_dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp

from hsvit_jax.models.network import Network
from hsvit_jax.models.settings import Key, check, keys_of, setting
from hsvit_jax.text import few

Settings = Mapping[str, Any]
ImageSize = tuple[int, int]


@dataclass(frozen=True)
class Sizes:
    """The sizes that every network's config has; a family adds its settings, see `settings`.

    Raises:
        ValueError: a value is outside its range, or sizes do not fit each other.
    """

    image_size: tuple[int, int] = setting(MISSING, "rows and columns of pixels, (H, W)", low=1)
    image_channels: int = setting(MISSING, "channels of an image", low=1)
    num_classes: int = setting(MISSING, "logits, K", low=1)

    def __post_init__(self) -> None:
        check(self)


class Difference(NamedTuple):
    """Why a network cannot continue from another, and the settings with which it could."""

    text: str
    settings: Settings = MappingProxyType({})


def differences(old: Any, new: Any, names: Sequence[str], place: str = "") -> list[Difference]:
    """Lists the settings of these names that differ, but for rates of dropout, also those of a
    mixer's or a backbone's config inside."""
    lines = []
    for name in names:
        a, b = getattr(old, name), getattr(new, name)
        if is_dataclass(a) and type(a) is type(b):
            inner = [field.name for field in fields(a)]
            lines += differences(a, b, inner, f"{place}{name}.")
        elif a != b and "drop" not in name:
            text = f"{place}{name}: checkpoint {a}, config {b}"
            lines.append(Difference(text, {f"{place}{name}": a}))
    return lines


def misfits(old: Any, new: Any) -> list[Difference]:
    """Lists why a network of config `new` cannot continue from one of config `old`.

    A config with a method `cannot_grow(old)` says itself what may be larger; of others all settings
    must be the same. Rates of dropout may differ.
    """
    if type(old) is not type(new):
        return [Difference(f"sizes: checkpoint {old}, config {new}")]
    if hasattr(new, "cannot_grow"):
        return new.cannot_grow(old)
    return differences(old, new, [field.name for field in fields(old)])


def scaled(width: int, ratio: float) -> int:
    """width·ratio rounded down, but up where only a float's rounding keeps it below an integer.

    Raises ValueError for less than 1.
    """
    product = int(round(width * ratio, 6))
    if product < 1:
        raise ValueError(f"a ratio of {ratio:g} to a width of {width} leaves no unit: raise it")
    return product


def check_heads(dim: int, heads: int) -> None:
    """Raises ValueError for heads that do not divide a token's width."""
    if heads < 1 or dim % heads:
        fits = few(n for n in range(1, dim + 1) if dim % n == 0)
        raise ValueError(f"embed_dim={dim} is not divisible by heads={heads}: choose one of {fits}")


def _nothing(settings: Settings) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Family:
    """The record of one family, at the end of its module; everything by family derives from it.

    A family needs a name, a config and a network; see `hsvit_jax.register`.

    Attributes:
      name: `model.family`.
      keys: settings of a `model` section; default: the fields of `config` with a default.
      sections: sections within the `model` section, and a function with the keys of each.
      defaults: settings that a variant does not change; default: the defaults of `keys`.
      variants: named networks, as they differ from `defaults`; default: one named 'default'.
      default_variant: the variant without a name; default: the first.
      config: from `image_size`, `image_channels`, `num_classes` and all settings to the network's
        config; its dataclass, where every setting is a field.
      network: the class of its networks.
      automatic: settings which, left empty, follow from the others and the image size.
      named_by: settings that identify a variant; () means all of them.
      config_file: the stem of its file in configs/, where that is not `name`.
      native_size: pixels of a side of the images it was made for; 0 for any.
      native_sizes: the same by variant, where it is another.
      paper_recipe: the recipe of its paper, by its name in `config.recipes`.
      tiny: changes of the settings for a smoke run of seconds; default: the network's.
      digits: changes of the settings for images of 8×8 pixels, enlarged, by the strong recipe.
    """

    name: str
    _: KW_ONLY
    keys: Mapping[str, Key] = field(default_factory=dict)
    sections: Mapping[str, Callable[[Settings], Mapping[str, Key]]] = field(default_factory=dict)
    defaults: Settings = field(default_factory=dict)
    variants: Mapping[str, Settings] = field(default_factory=lambda: {"default": {}})
    default_variant: str = ""
    config: Callable[..., Any]
    network: type[Network]
    automatic: Mapping[str, Callable[[Settings, ImageSize], Any]] = field(default_factory=dict)
    named_by: tuple[str, ...] = ()
    config_file: str = ""
    native_size: int = 0
    native_sizes: Mapping[str, int] = field(default_factory=dict)
    paper_recipe: str = ""
    tiny: Callable[[Settings], dict[str, Any]] | None = None
    digits: Callable[[Settings], dict[str, Any]] = _nothing

    def __post_init__(self) -> None:
        if not self.keys:
            object.__setattr__(self, "keys", keys_of(self.config))
        if not self.defaults:
            defaults = {name: key.default for name, key in self.keys.items()}
            object.__setattr__(self, "defaults", defaults)
        if self.tiny is None:
            object.__setattr__(self, "tiny", self.network.tiny)
        if not self.default_variant:
            object.__setattr__(self, "default_variant", next(iter(self.variants)))

    def settings(self, variant: str = "") -> dict[str, Any]:
        """The whole `model` section of a variant but for `dtype`; of the default one if empty."""
        variant = variant or self.default_variant
        return {"family": self.name, "variant": variant, **self.defaults, **self.variants[variant]}

    def key(self, path: str, settings: Settings) -> Key | None:
        """The declaration of a setting such as 'depth' or 'section.depth', None for no such one."""
        section, _, name = path.rpartition(".")
        return (self.sections[section](settings) if section else self.keys).get(name)

    def variant_of(self, settings: Settings, image_size: ImageSize) -> str:
        """The variant with these settings for such images, 'custom' where there is none."""

        def named(own: Settings) -> dict[str, Any]:
            """The settings that name a variant, none of them left empty."""
            values = {key: own[key] for key in self.named_by or self.defaults}
            for key in values.keys() & self.automatic.keys():
                with contextlib.suppress(ValueError):  # no variant is made for these images
                    values[key] = values[key] or self.automatic[key](own, image_size)
            return values

        wanted = named(settings)
        for name, changes in self.variants.items():
            if named({**self.defaults, **changes}) == wanted:
                return name
        return "custom"

    def sizes(
        self, settings: Settings, *, image_size: ImageSize, channels: int, num_classes: int
    ) -> Any:
        """The network's config that a `model` section gives for such images and classes.

        Raises:
            ValueError: the sizes do not fit each other or the images.
        """
        values = {key: settings[key] for key in self.defaults}
        values = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
        for name, key in self.keys.items():
            key.check(f"model.{name}", values[name])
        for name, follows in self.automatic.items():
            values[name] = values[name] or follows({**settings, **values}, image_size)
        return self.config(
            image_size=image_size, image_channels=channels, num_classes=num_classes, **values
        )

    def build(
        self,
        settings: Settings,
        *,
        image_size: ImageSize,
        channels: int,
        num_classes: int,
        dtype: jnp.dtype = jnp.float32,
    ) -> Network:
        """The network of a `model` section, which computes in `dtype`; raises as `sizes`."""
        size = {"image_size": image_size, "channels": channels, "num_classes": num_classes}
        return self.network.of(self.sizes(settings, **size), dtype)
