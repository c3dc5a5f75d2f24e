"""Settings: what a key or a field of a config dataclass means, its values, and when it is read.

    heads: int = settings.setting(8, "attention heads", low=1, when={"groups": settings.ON})

Parsing, range errors, `--help`, docs/configuration.md and the error on a setting without effect
derive from these declarations.
"""

import dataclasses
import functools
import math
import reprlib
import typing
from collections.abc import Collection, Container, Mapping, Sequence
from typing import Any

_MOST_VALUES = 256
_MOST_TEXT = 4096
_TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}

#: Other settings with the values that they need; one of them suffices.
Condition = Mapping[str, Container[Any]]


class _On:
    """All values but zero, false and empty ones."""

    def __contains__(self, value: object) -> bool:
        return bool(value)


ON = _On()


@dataclasses.dataclass(frozen=True)
class Key:
    """The meaning, the range and the default of a setting.

    Attributes:
      meaning: a phrase, without a full stop.
      low, high: the range of a number, its ends included.
      kind: int, float, bool or str.
      above, below: the range of a number, its ends excluded.
      besides: special values outside the range.
      odd: whether a number must be odd.
      choices: all values of an enumeration; () for other keys.
      several: whether the value is a tuple of such values.
      per: the setting or property of a config with as many entries; '' for any number.
      default: the initial value, where it is not the one that `initial` falls back on.
      when: conditions that must all hold for the setting to have an effect. They name other
        settings of its section, or of all sections by 'section.key'.
      off: the value that needs no condition, as it asks for nothing.
      fixed: why a resumed run keeps its value; '' if it may change.
    """

    meaning: str
    low: float = -math.inf
    high: float = math.inf
    kind: type = float
    above: float = -math.inf
    below: float = math.inf
    besides: tuple[float, ...] = ()
    odd: bool = False
    choices: tuple[Any, ...] = ()
    several: bool = False
    per: str = ""
    default: Any = None
    when: Sequence[Condition] = ()
    off: Any = None
    fixed: str = ""

    @property
    def initial(self) -> Any:
        """The value that recipes start from: the default, or the lowest, first or empty one."""
        if self.default is not None or self.several:
            return () if self.default is None else self.default
        if self.choices:
            return self.choices[0]
        return self.kind(self.low) if self.kind in (int, float) else self.kind()

    @property
    def each(self) -> str:
        """The range of one value as text."""
        if self.choices:
            return f"one of {', '.join(map(repr, self.choices))}"
        if self.kind in (bool, str):
            return "true or false" if self.kind is bool else f"text, at most {_MOST_TEXT} letters"
        span = f" from {self.low:.10g} to {self.high:.10g}"
        if math.isfinite(self.above):
            span = f" above {self.above:g}, at most {self.high:g}"
        elif math.isfinite(self.below):
            span = f" from {self.low:g}, below {self.below:g}"
        elif math.isinf(self.high):
            span = f" from {self.low:.10g}" if math.isfinite(self.low) else ""
        also = "".join(f", or {value:g}" for value in self.besides)
        number = "a whole number" if self.kind is int else "a number"
        return f"{'an odd number' if self.odd else number}{span}{also}"

    @property
    def expected(self) -> str:
        """The range as text, for messages and help."""
        few = f"values with commas between them (or none), each {self.each}"
        return few if self.several else self.each

    def fits(self, value: Any) -> bool:
        """Whether a value is of the type and in the range."""
        if self.several:
            listed = isinstance(value, tuple | list) and len(value) <= _MOST_VALUES
            return listed and all(map(self._fits, value))
        return self._fits(value)

    def _fits(self, value: Any) -> bool:
        if isinstance(value, bool) != (self.kind is bool):
            return False
        if not isinstance(value, (int, float) if self.kind is float else self.kind):
            return False
        if self.choices:
            return value in self.choices
        if self.kind is str:
            return len(value) <= _MOST_TEXT and "\0" not in value
        if self.kind not in (int, float) or value in self.besides:
            return True
        within = self.low <= value <= self.high and self.above < value < self.below  # no NaN
        return within and not (self.odd and value % 2 == 0)

    def check(self, name: str, value: Any) -> None:
        """Raises ValueError for a value that does not fit."""
        if not self.fits(value):
            raise ValueError(f"{name} must be {self.expected}; got {reprlib.repr(value)}")

    def parse(self, text: str) -> Any:
        """Parses a value: integers also as '1e3', tuples as '64,32' or '(64,)'.

        Raises ValueError for a text of another type.
        """
        if self.several:
            parts = text.strip().strip("()[]").split(",")
            return tuple(self._parse(part) for part in parts if part.strip())
        return self._parse(text)

    def _parse(self, text: str) -> Any:
        if self.kind is bool:
            if text.strip().lower() not in _TRUTH:
                raise ValueError("neither true nor false")
            return _TRUTH[text.strip().lower()]
        if self.kind is int:
            try:
                return int(text)
            except ValueError:
                number = float(text)
                if not number.is_integer():
                    raise
                return int(number)
        return self.kind(text)


def setting(default: Any, meaning: str, *, when: Condition | None = None, **limits: Any) -> Any:
    """Declares a field of a config dataclass; its annotation is the kind, `tuple[…]` for several.

    Args:
      default: `dataclasses.MISSING` for none.
      when: the condition under which it has an effect, or a sequence of them.
      limits: other attributes of a `Key`.
    """
    conditions = (when,) if isinstance(when, Mapping) else tuple(when or ())
    key = {"meaning": meaning, "when": conditions, **limits}
    return dataclasses.field(default=default, metadata={"key": key})


@functools.cache
def declared(config: type) -> Mapping[str, Key]:
    """The fields of a config dataclass as keys: those that are declared or have a default."""
    hints, found = typing.get_type_hints(config), {}
    for field in dataclasses.fields(config):
        own, default = field.metadata.get("key"), field.default
        if own is None and default is dataclasses.MISSING:
            continue
        several = typing.get_origin(hints[field.name]) is tuple
        kind = typing.get_args(hints[field.name])[0] if several else hints[field.name]
        own = own or {"meaning": field.name.replace("_", " ")}
        found[field.name] = Key(kind=kind, several=several, default=default, **own)
    return found


def check(config: Any) -> None:
    """Raises ValueError for the first field of a config that does not fit its declaration."""
    keys = declared(type(config))
    for name, key in keys.items():
        key.check(name, getattr(config, name))
    for name, key in keys.items():
        value, each = getattr(config, name), getattr(config, key.per) if key.per else ()
        if key.per and (len(value) != len(each) or (key.per == name and not value)):
            raise ValueError(f"{name}={value} needs one entry for each of {key.per}={each}")


def keys_of(config: type, *, without: Collection[str] = (), **defaults: Any) -> dict[str, Key]:
    """The keys of a `model` section that a config dataclass declares, with other `defaults`."""
    return {
        name: dataclasses.replace(key, default=defaults.get(name, key.default))
        for name, key in declared(config).items()
        if key.default is not dataclasses.MISSING and name not in without
    }


# --- Settings of several networks ----------------------------------------------------------------

width = functools.partial(setting, low=1, high=2**16)
depth = functools.partial(setting, low=1, high=256)
kernel = functools.partial(setting, low=1, high=255)
stride = functools.partial(setting, low=1, high=256)
ratio = functools.partial(setting, above=0.0, high=64.0)
rate = functools.partial(setting, low=0.0, below=1.0)
epsilon = functools.partial(setting, meaning="epsilon of batch normalisation", above=0.0, high=1.0)
momentum = functools.partial(
    rate, meaning="momentum of batch normalisation: weight of the old averages"
)

heads = functools.partial(setting, meaning="attention heads", low=1, high=1024)
stage_heads = functools.partial(heads, meaning="attention heads of each stage", per="depths")
depths = functools.partial(depth, meaning="blocks of each stage", per="depths")
widths = functools.partial(width, meaning="token width of each stage", per="depths")
mlp_dim = functools.partial(width, meaning="hidden width of the feed-forward")
mlp_ratio = functools.partial(
    ratio, meaning="hidden width of the feed-forward over the token's width"
)
mlp_ratios = functools.partial(
    ratio, meaning="hidden width of each stage's feed-forward over its tokens' width", per="depths"
)
patch = functools.partial(setting, meaning="patch size in pixels", low=1, high=2**13)
qkv_bias = functools.partial(setting, meaning="biases of queries, keys and values")
layer_scale = functools.partial(setting, meaning="initial layer scale; 0: none", low=0.0, high=1e3)
dropout = functools.partial(rate, meaning="dropout rate")
attention_dropout = functools.partial(rate, meaning="dropout rate of attention weights")
head_dropout = functools.partial(rate, meaning="dropout rate before the classifier")
drop_path = functools.partial(
    rate, meaning="stochastic depth rate of the last block, linear from 0 at the first"
)
activation = functools.partial(setting, meaning="name of the activation")
