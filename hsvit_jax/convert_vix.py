"""ViX's state dicts: their constructors, their keys, and where each tensor goes.

The MLP-Mixers are plain sequences, whose keys are numbers; the others have named parts.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from hsvit_jax.convert_mixing import IGNORED, argument, count, entries, find, named, rate, shape
from hsvit_jax.convert_tensors import Entry, Tensors, assemble, conv, ints, linear, norm, pair
from hsvit_jax.models import conv_layers
from hsvit_jax.models.vix import vix

_TOKEN_MLP = re.compile(r"(\d+)\.0\.fn\.0\.weight$")


def settings(tensors: Tensors, given: dict[str, Any]) -> tuple[dict, dict]:
    """Sections `model` and `data` of a configuration. Raises ValueError for unknown sizes."""
    model = {"family": "vix", "variant": "custom", "dropout": rate(given, "dropout")}
    model["embed_dropout"] = rate(given, "emb_dropout")
    first = [int(m[1]) for m in map(_TOKEN_MLP.match, tensors) if m]
    if first:
        model = {**find(tensors, "", given), **model, "mixer": "mlp_mixer"}
        key, start = "", min(first)
        model["depth"] = count(tensors, lambda i: f"{start + i}.0.fn.")
        hidden, tokens, _ = shape(tensors, f"{start}.0.fn.0.weight", 3)
        model |= {"expansion": hidden / tokens, "mlp_dim": 256, "positions": "learned"}
        head = f"{start + model['depth'] + 2}.weight"
    else:
        mixer = "transformer.layers.0.0.fn."
        model = {**find(tensors, mixer, given), **model, "expansion": 1.0}
        key, head = "to_patch_embedding.", "mlp_head.1.weight"
        model["depth"] = count(tensors, lambda i: f"transformer.layers.{i}.")
        model["mlp_dim"] = shape(tensors, "transformer.layers.0.1.fn.net.0.weight", 2)[0]
        rope = any(re.match(IGNORED, k) for k in tensors) or "pos_embedding" not in tensors
        model["positions"] = "rope" if rope else "learned"
        tokens = token_count(tensors, f"{mixer}proj_k")
    classes, model["embed_dim"] = shape(tensors, head, 2)
    convs = conv_count(tensors, key)
    sizes, image_size, channels = embedding(tensors, given, key, convs, tokens, linear_at=1)
    model |= sizes
    model["variant"] = named(model, vix)
    return model, {"image_size": image_size, "channels": channels, "num_classes": classes}


def conv_count(tensors: Tensors, key: str) -> int:
    """Convolutions of a stem whose tensors' names begin with `key`; 0 for a linear map."""
    return sum(
        1
        for k, t in tensors.items()
        if re.match(re.escape(key) + r"\d+\.weight$", k) and t.ndim == 4
    )


def token_count(tensors: Tensors, sequence_key: str) -> int | None:
    """Tokens without CLS, where positions or a projection along the sequence tell."""
    if "pos_embedding" in tensors:
        return shape(tensors, "pos_embedding", 3)[1] - 1
    return shape(tensors, sequence_key, 2)[0] - 1 if sequence_key in tensors else None


def embedding(
    tensors: Tensors,
    given: Mapping[str, Any],
    key: str,
    convs: int,
    tokens: int | None,
    *,
    linear_at: int,
) -> tuple[dict[str, Any], tuple[int, int], int]:
    """(settings of patches or stem, image size, channels).

    key: what the tensors' names begin with; convs: convolutions of the stem, or 0; linear_at:
    number of the linear map of patches otherwise.
    """
    images = tensors["input"].shape if "input" in tensors else ()
    images = images if len(images) == 4 else ()
    if convs:
        weights = [shape(tensors, f"{key}{i}.weight", 4) for i in range(convs)]
        image_size, strides = stem_sizes(given, images[2:], convs, tokens)
        widths = tuple(w[0] for w in weights[:-1])
        sizes = {"patch": 1, "stem_channels": widths, "stem_strides": strides}
        return sizes, image_size, weights[0][1]
    pixels = shape(tensors, f"{key}{linear_at}.weight", 2)[1]
    channels = argument(given, "num_channels", "channels") or (images[1] if images else 3)
    patch = argument(given, "patch_size") or math.isqrt(pixels // channels)
    if patch * patch * channels != pixels:
        raise ValueError(
            f"{key}{linear_at}.weight is for patches of {pixels} values, which are not "
            f"{patch}×{patch} pixels of {channels} channels: say --channels"
        )
    size = given.get("image_size", given.get("img_size", images[2:] or None))
    if size is None:
        side = math.isqrt(tokens or 0)
        if not tokens or side * side != tokens:
            raise ValueError("the tensors' shapes do not tell the image's size: say --image_size")
        size = side * patch
    return {"patch": patch, "stem_channels": (), "stem_strides": ()}, pair(size), channels


def stem_sizes(
    given: Mapping[str, Any], image: tuple[int, ...], convs: int, tokens: int | None
) -> tuple[tuple[int, int], tuple[int, ...]]:
    """Image size and strides of a stem, from what is known of both and of the map's tokens.

    image: rows and columns of the file's images, or (). The reference calls `image_size` what its
    stem leaves, where the stem has strides; a size that has `tokens` pixels is read so.
    """
    strides = next(
        (ints(k, given[k]) for k in ("pool_strides", "stem_strides", "stride") if given.get(k)), ()
    )
    strides = (*strides, *(1,) * (convs - len(strides))) if strides else ()
    size = given.get("image_size", given.get("img_size"))
    size = pair(size) if size is not None else None
    if image:
        left, size = size, (image[0], image[1])
        if not tokens and left is not None and not strides:
            tokens = left[0] * left[1]
    elif size is None:
        side = math.isqrt(tokens or 0)
        if not tokens or side * side != tokens:
            raise ValueError("the tensors' shapes do not tell the image's size: say --image_size")
        size = (side * math.prod(strides),) * 2
    elif strides and math.prod(strides) > 1 and tokens == size[0] * size[1]:
        size = (size[0] * math.prod(strides), size[1] * math.prod(strides))
    if not strides:
        ways = [(2,) * n + (1,) * (convs - n) for n in range(convs + 1)]
        ways += [(4, *(1,) * (convs - 1))]
        maps = [conv_layers.map_size(size, way) for way in ways]
        fitting = (w for w, (r, c) in zip(ways, maps, strict=True) if r * c == tokens)
        strides = next(fitting, None) or ways[0]
    return size, strides


def params_from_torch(tensors: Tensors, config: vix.ViXConfig) -> tuple[dict, dict]:
    """The reference's state dict as (params, stats); see `convert_tensors.assemble`."""
    return assemble(tensors, listing(config), IGNORED)


def listing(config: vix.ViXConfig) -> Iterator[Entry]:
    """Every tensor the reference saves for these sizes."""
    return _mixer_entries(config) if config.mixing.name == "mlp_mixer" else _entries(config)


def _entries(c: vix.ViXConfig) -> Iterator[Entry]:
    yield from tokens_entries(c, "to_patch_embedding.", 1)
    for i in range(c.depth):
        key, path = f"transformer.layers.{i}.", ("encoder", "blocks", str(i))
        yield from block_entries(c.mixing, key, path, c, tokens=c.tokens)
    yield from head_entries("mlp_head.0", "mlp_head.1", c)


def tokens_entries(c: Any, key: str, linear_at: int) -> Iterator[Entry]:
    """CLS, positions, and the patches or the stem."""
    d = c.embed_dim
    cls, position = ("params", "encoder", "cls"), ("params", "encoder", "position")
    yield Entry("cls_token", (1, 1, d), cls, lambda t: t[0, 0])
    if c.position_table:
        yield Entry("pos_embedding", (1, c.tokens, d), position, lambda t: t[0])
    yield from patches_entries(c, key, linear_at)


def patches_entries(c: Any, key: str, linear_at: int) -> Iterator[Entry]:
    """The patches' linear map, or the stem's convolutions."""
    if c.stem_channels:
        yield from stem_entries(c.image_channels, c.stem_widths, key, ("patches", "embed"))
    else:
        fan_in = c.patch**2 * c.image_channels
        path = ("patches", "embed", "linear")
        yield from linear(f"{key}{linear_at}", fan_in, c.embed_dim, path)


def stem_entries(
    channels: int, widths: tuple[int, ...], key: str, path: tuple[str, ...]
) -> Iterator[Entry]:
    """The 3×3 convolutions of a stem."""
    for i, width in enumerate(widths):
        yield from conv(f"{key}{i}", channels, width, 3, (*path, "convs", str(i)))
        channels = width


def block_entries(
    m: Any, key: str, path: tuple[str, ...], c: Any, *, tokens: int
) -> Iterator[Entry]:
    """One pre-norm block of width c.embed_dim, with a hidden width of c.mlp_dim."""
    d = c.embed_dim
    yield from norm(f"{key}0.norm", d, (*path, "norm1"))
    yield from entries(m, f"{key}0.fn.", (*path, "mixer"), tokens, d)
    yield from norm(f"{key}1.norm", d, (*path, "norm2"))
    up, down = ("0", "3") if m.name == "mlp_mixer" else ("net.0", "net.3")
    yield from linear(f"{key}1.fn.{up}", d, c.mlp_dim, (*path, "feed_forward", "up"))
    yield from linear(f"{key}1.fn.{down}", c.mlp_dim, d, (*path, "feed_forward", "down"))


def head_entries(norm_key: str, linear_key: str, c: Any) -> Iterator[Entry]:
    """LayerNorm and classifier."""
    yield from norm(norm_key, c.embed_dim, ("head", "norm"))
    yield from linear(linear_key, c.embed_dim, c.num_classes, ("head", "linear"))


def _mixer_entries(c: vix.ViXConfig) -> Iterator[Entry]:
    """The MLP-Mixers: patches or stem, flattening, blocks, norm, mean, classifier."""
    start = len(c.stem_widths) + 1 if c.stem_channels else 2
    yield from patches_entries(c, "", 1)
    for i in range(c.depth):
        key, path = f"{start + i}.", ("encoder", "blocks", str(i))
        yield from block_entries(c.mixing, key, path, c, tokens=c.tokens)
    yield from head_entries(f"{start + c.depth}", f"{start + c.depth + 2}", c)
