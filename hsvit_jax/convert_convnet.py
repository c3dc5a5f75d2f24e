"""State dicts of convolutional networks: what ResNet's, EfficientNet's and MobileNetV2's share.

Their files are those of the `transformers` library: keys after a prefix that names the network, and
a configuration as plain fields, of which only those that change the network are read.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from hsvit_jax.convert_tensors import Entry, Tensors, batch_norm, conv, ints, pair
from hsvit_jax.models.convnets.convnet import Conv
from hsvit_jax.ops.activations import ACTIVATIONS


def conv_norm(key: tuple[str, str], spec: Conv, path: tuple[str, ...]) -> Iterator[Entry]:
    """A `Conv` whose convolution and normalisation have these two keys."""
    groups = spec.c_in if spec.depthwise else 1
    yield from conv(key[0], spec.c_in, spec.c_out, spec.size, path, groups=groups, bias=False)
    yield from batch_norm(key[1], spec.c_out, (*path, "norm"))


class Fields:
    """A configuration's fields, each checked as it is read; what is absent has a default."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given = given

    def value(self, name: str, default: Any) -> Any:
        """A field as it is; None counts as absent."""
        found = self.given.get(name)
        return default if found is None else found

    def number(self, name: str, default: float) -> float:
        """A finite number."""
        value = self.value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value - value != 0:
            raise ValueError(f"{name} must be a number; got {value!r}")
        return float(value)

    def whole(self, name: str, default: int) -> int:
        """One integer."""
        return self.wholes(name, (default,))[0]

    def wholes(self, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
        """Integers; none is allowed where a list is."""
        value = self.value(name, default)
        return () if value in ([], ()) else ints(name, value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.value(name, default)
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false; got {value!r}")
        return value

    def word(self, name: str, default: str, known: Mapping[str, Any]) -> str:
        """One of the keys of `known`."""
        value = self.value(name, default)
        if not isinstance(value, str) or value not in known:
            raise ValueError(f"{name}={value!r} is not supported; known: {', '.join(known)}")
        return value

    def activation(self, default: str) -> str:
        """`hidden_act`, by our name."""
        word = self.word("hidden_act", default, {k: k for k in ACTIVATIONS if k})
        return {"swish": "silu", "gelu_python": "gelu"}.get(word, word)


def data_section(
    tensors: Tensors, given: Mapping[str, Any], classes: int | None, native: int = 224
) -> dict[str, Any]:
    """Image size, channels and classes; the images that lie in the file tell their size best.

    classes: of the classifier; a configuration's `num_labels` must agree.
    """
    fields = Fields(given)
    said = fields.value("num_labels", fields.value("num_classes", classes))
    if said is None:
        raise ValueError("neither num_labels nor a classifier tells the number of classes")
    size = given.get("image_size")
    if "input" in tensors and tensors["input"].ndim == 4:
        size = tensors["input"].shape[2:]
    return {
        "image_size": pair(list(size) if isinstance(size, tuple) else size or native),
        "channels": fields.whole("num_channels", 3),
        "num_classes": ints("num_labels", said)[0],
    }


def variant_of(family: Any, model: Mapping[str, Any]) -> str:
    """The name of these sizes in a family, where they have one."""
    for name, changes in family.VARIANTS.items():
        if all(model[key] == value for key, value in {**family.DEFAULTS, **changes}.items()):
            return name
    return "custom"
