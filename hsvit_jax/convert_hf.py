"""Fields of a configuration of the `transformers` library, read with their defaults and checked."""

from collections.abc import Collection, Mapping
from typing import Any

from hsvit_jax.convert_tensors import Tensors, pair
from hsvit_jax.ops.activations import activation

#: `model_type` of a configuration → family of ours.
MODEL_TYPES: Mapping[str, str] = {
    "cvt": "cvt",
    "efficientformer": "efficientformer",
    "efficientnet": "efficientnet",
    "mobilenet_v2": "mobilenet_v2",
    "mobilevit": "mobilevit",
    "resnet": "resnet",
    "swiftformer": "swiftformer",
    "vit": "vit",
}


def family_of(description: Mapping[str, Any]) -> str | None:
    """The family that a file's description names by `model_type`, in it or in its `constructor`.

    None where there is no `model_type`. Raises ValueError for one that is not known.
    """
    constructor = description.get("constructor", {})
    inner = constructor.get("model_type") if isinstance(constructor, Mapping) else None
    named = inner or description.get("model_type")
    if named is None:
        return None
    if named not in MODEL_TYPES:
        raise ValueError(f"unknown model_type {named!r}; known: {', '.join(sorted(MODEL_TYPES))}")
    return MODEL_TYPES[named]


def field(given: Mapping[str, Any], name: str, default: Any) -> Any:
    """A field of the default's type, the default where it is left out; an int may be a float.

    Raises ValueError for a value of another type.
    """
    value = given.get(name)
    if value is None:
        return default
    kind = type(default)
    fits = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not fits:
        raise ValueError(f"{name} must be of type {kind.__name__}; got {value!r}")
    return value


def fields(given: Mapping[str, Any], name: str, default: Collection[Any]) -> tuple:
    """A field that holds a list, each entry as `field` reads it.

    Raises ValueError for anything else and for an empty list.
    """
    values, like = given.get(name), next(iter(default))
    if values is None:
        return tuple(default)
    if not isinstance(values, list | tuple) or not values:
        raise ValueError(f"{name} must be a list of {type(like).__name__}; got {values!r}")
    return tuple(field({name: value}, name, like) for value in values)


def act(given: Mapping[str, Any], name: str, default: str) -> str:
    """The name of an activation that we have; raises ValueError for another."""
    word = field(given, name, default)
    try:
        activation(word)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return word


def only(given: Mapping[str, Any], name: str, *allowed: Any) -> None:
    """Raises ValueError for a field that is there with a value we have no network for."""
    value = given.get(name, allowed[0])
    value = tuple(value) if isinstance(value, list) else value
    if value not in allowed:
        known = " or ".join(repr(v) for v in allowed)
        raise ValueError(f"{name}={value!r} is not supported; expected {known}")


def data(tensors: Tensors, given: Mapping[str, Any], first: str, last: str) -> dict[str, Any]:
    """The `data` section: image size, channels and classes.

    first, last: keys of the first convolution's and the classifier's weight. The image's size is
    that of the file's `input`, or the `image_size` given. Raises ValueError where nothing tells.
    """
    if len(tensors[first].shape if first in tensors else ()) != 4:
        raise ValueError(f"missing or misshapen {first}, which tells the image's channels")
    if len(tensors[last].shape if last in tensors else ()) != 2:
        raise ValueError(f"missing or misshapen {last}, which tells the classes")
    images = tensors["input"].shape if "input" in tensors else ()
    size = images[2:] if len(images) == 4 else given.get("image_size")
    if size is None:
        raise ValueError("the tensors' shapes do not tell the image's size: say --image_size")
    return {
        "image_size": pair(size),
        "channels": tensors[first].shape[1],
        "num_classes": tensors[last].shape[0],
    }


def named(model: Mapping[str, Any], module: Any) -> str:
    """The variant of `module` with all these settings, 'custom' where there is none."""
    for name, changes in module.VARIANTS.items():
        if all(model[k] == v for k, v in {**module.DEFAULTS, **changes}.items()):
            return name
    return "custom"
