"""Swin: attention inside windows of a map, which every second block shifts; maps shrink by merging.

Source: Liu et al., "Swin Transformer", sections 3.1 and 3.2; the windows of maps that they do not
divide, and of small ones, as in timm.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from hsvit_jax.models import conv_layers, layers, settings
from hsvit_jax.models.family import Family, Sizes, scaled
from hsvit_jax.models.network import BoundModules, ForwardContext, Network
from hsvit_jax.ops.attention import biased_attention

Array = jax.Array
Size = tuple[int, int]

#: Added to the score of two pixels that the shift, not the image, made neighbours.
_APART = -100.0


@dataclasses.dataclass(frozen=True)
class SwinConfig(Sizes):
    """Sizes of a Swin, with an entry for each stage; a smaller map cuts its windows."""

    patch: int = settings.patch(4)
    widths: tuple[int, ...] = settings.widths((96, 192, 384, 768))
    depths: tuple[int, ...] = settings.depths((2, 2, 6, 2))
    heads: tuple[int, ...] = settings.stage_heads((3, 6, 12, 24))
    windows: tuple[int, ...] = settings.width(
        (7, 7, 7, 7), "side of each stage's attention windows", per="depths"
    )
    mlp_ratio: float = settings.mlp_ratio(4.0)
    qkv_bias: bool = settings.qkv_bias(True)
    drop_path: float = settings.drop_path(0.2)

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(width % heads for width, heads in zip(self.widths, self.heads, strict=True)):
            raise ValueError(f"heads={self.heads} do not divide widths={self.widths}")
        layers.check_patches(self.image_size, self.patch)

    def maps(self) -> list[Size]:
        """Lists rows and columns of each stage's map; merging pads an odd side."""
        grid = (self.image_size[0] // self.patch, self.image_size[1] // self.patch)
        return [conv_layers.map_size(grid, (2,) * i) for i in range(len(self.depths))]

    def window(self, stage: int, block: int) -> tuple[Size, Size]:
        """Returns rows and columns of a block's windows, and how far they are shifted."""
        side, size = self.windows[stage], self.maps()[stage]
        rows, columns = (min(n, side) for n in size)
        down, right = (side // 2 if n > side and block % 2 else 0 for n in size)
        return (rows, columns), (down, right)


class Embedding(nnx.Module):
    """Patch embedding and LayerNorm."""

    def __init__(self, c: SwinConfig, key: Array) -> None:
        self.patches = layers.PatchEmbedding(c.patch, c.image_channels, c.widths[0], key)
        self.norm = layers.LayerNorm(c.widths[0])

    def __call__(self, images_BHWC: Array) -> Array:
        """(B, H, W, C) → (B, T, D)."""
        return self.norm(self.patches(images_BHWC))


class Merging(nnx.Module):
    """The four pixels of each 2×2 cell side by side, LayerNorm, a linear map."""

    def __init__(self, map_size: Size, dim: int, dim_out: int, key: Array) -> None:
        self.map_size = map_size
        self.norm = layers.LayerNorm(4 * dim)
        self.reduction = layers.Linear(4 * dim, dim_out, key, bias=False, init="normal")

    def __call__(self, x_BTD: Array) -> Array:
        """(B, T, D) → (B, T', D'), of half as many rows and columns; odd ones are padded."""
        batch, _, dim = x_BTD.shape
        rows, columns = self.map_size
        x = x_BTD.reshape(batch, rows, columns, dim)
        x = jnp.pad(x, ((0, 0), (0, rows % 2), (0, columns % 2), (0, 0)))
        x = x.reshape(batch, -(-rows // 2), 2, -(-columns // 2), 2, dim)
        cells = x.transpose(0, 1, 3, 4, 2, 5)  # columns before rows
        return self.reduction(self.norm(cells.reshape(batch, -1, 4 * dim)))


class WindowAttention(layers.MultiHeadAttention):
    """Attention of the pixels in each window, with a learned bias for each head and offset.

    The map is rolled by the shift, then padded at its bottom and right by zeros; they are keys too.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        map_size: Size,
        window: Size,
        shift: Size,
        key: Array,
        **how: Any,
    ) -> None:
        qkv_key, bias_key = jax.random.split(key)
        super().__init__(dim, heads, qkv_key, init="normal", **how)
        self.map_size, self.window, self.shift = map_size, window, shift
        offsets = (2 * window[0] - 1) * (2 * window[1] - 1)
        self.offset_bias = nnx.Param(0.02 * layers.normal(bias_key, (offsets, heads)))

    def __call__(self, x_BTD: Array, context: ForwardContext, stream: int) -> Array:
        """(B, T, D) → (B, T, D)."""
        batch, _, dim = x_BTD.shape
        (rows, columns), (down, right) = self.map_size, self.shift
        x = jnp.roll(x_BTD.reshape(batch, rows, columns, dim), (-down, -right), (1, 2))
        pads = [-n % side for n, side in zip(self.map_size, self.window, strict=True)]
        x = jnp.pad(x, ((0, 0), (0, pads[0]), (0, pads[1]), (0, 0)))
        (high, wide), padded = self.window, x.shape
        windows = x.reshape(batch, padded[1] // high, high, padded[2] // wide, wide, dim)
        windows = windows.swapaxes(2, 3)
        bias_NTT = self.offset_bias[...][window_offsets(self.window)].transpose(2, 0, 1)
        bias_1LNTT = bias_NTT[None, None]
        if any(self.shift):
            apart = window_masks(padded[1:3], self.window, self.shift)
            bias_1LNTT = bias_1LNTT + jnp.asarray(apart, bias_1LNTT.dtype)[None, :, None]

        q, k, v = (
            part.reshape(batch, -1, *part.shape[1:])
            for part in self.project(windows.reshape(-1, high * wide, dim))
        )
        o_LNTE = biased_attention(q, k, v, bias_1LNTT).reshape(-1, *q.shape[2:])
        out = self.out(layers.merge_heads(o_LNTE)).reshape(windows.shape)
        x = out.swapaxes(2, 3).reshape(padded)[:, :rows, :columns]
        return jnp.roll(x, (down, right), (1, 2)).reshape(x_BTD.shape)


def window_offsets(window: Size) -> np.ndarray:
    """Returns the bias's index for every query and key of a window, int32 (T, T)."""
    places = np.stack(np.meshgrid(*map(np.arange, window), indexing="ij"), -1).reshape(-1, 2)
    rows, columns = np.moveaxis(places[:, None] - places[None] + np.array(window) - 1, -1, 0)
    return (rows * (2 * window[1] - 1) + columns).astype(np.int32)


def window_masks(map_size: Size, window: Size, shift: Size) -> np.ndarray:
    """Returns the terms added to the scores of each window of a shifted map, (L, T, T)."""
    labels = [
        np.digitize(np.arange(n), (n - side, n - by)) if by else np.zeros(n, int)
        for n, side, by in zip(map_size, window, shift, strict=True)
    ]
    regions = labels[0][:, None] * 3 + labels[1][None]
    (rows, columns), (high, wide) = map_size, window
    regions = regions.reshape(rows // high, high, columns // wide, wide).swapaxes(1, 2)
    regions = regions.reshape(-1, high * wide)
    return np.where(regions[:, :, None] == regions[:, None], 0.0, _APART)


class Stage(layers.Encoder):
    """Merging of the stage before, if any, and blocks."""

    def __init__(self, c: SwinConfig, number: int, key: Array) -> None:
        merge_key, *keys = jax.random.split(key, c.depths[number] + 1)
        super().__init__((), first=sum(c.depths[:number]))
        dim, maps = c.widths[number], c.maps()
        rates = layers.drop_path_rates(c.drop_path, sum(c.depths))[self.first :]
        before = (maps[number - 1], c.widths[number - 1])
        self.merging = Merging(*before, dim, merge_key) if number else None
        for i, block_key in enumerate(keys):
            mix_key, feed_key = jax.random.split(block_key)
            sizes = (dim, c.heads[number], maps[number], *c.window(number, i))
            mixer = WindowAttention(*sizes, mix_key, bias=c.qkv_bias)
            hidden = scaled(dim, c.mlp_ratio)
            feed_forward = layers.FeedForward(dim, hidden, feed_key, init="normal")
            self.blocks.append(layers.Block(dim, mixer, feed_forward, drop_path=rates[i]))

    def __call__(self, x_BTD: Array, context: ForwardContext) -> Array:
        """(B, T, D) → (B, T', D')."""
        return super().__call__(x_BTD if self.merging is None else self.merging(x_BTD), context)


class Swin(Network):
    """Parameters: {'embedding', 'stage0', …, 'head'}."""

    def parts(self, key: Array) -> dict[str, nnx.Module]:
        c = self.config
        embedding_key, head_key, *keys = jax.random.split(key, len(c.depths) + 2)
        return {
            "embedding": Embedding(c, embedding_key),
            **{f"stage{i}": Stage(c, i, k) for i, k in enumerate(keys)},
            "head": layers.TokenHead(
                c.widths[-1], c.num_classes, head_key, mean=True, init="normal"
            ),
        }

    def logits(self, bound: BoundModules, images_BHWC: Array, context: ForwardContext) -> Array:
        return bound["head"](bound.through_stages(bound["embedding"](images_BHWC), context))


FAMILY = Family(
    name="swin",
    variants={  # the paper's section 3.3, with the authors' rates
        "t": {},
        "s": {"depths": (2, 2, 18, 2), "drop_path": 0.3},
        "b": {
            "widths": (128, 256, 512, 1024),
            "heads": (4, 8, 16, 32),
            "depths": (2, 2, 18, 2),
            "drop_path": 0.5,
        },
    },
    config=SwinConfig,
    network=Swin,
    named_by=tuple(key for key in settings.keys_of(SwinConfig) if key != "drop_path"),
    native_size=224,
    paper_recipe="dhvt",
    tiny=lambda settings: {"widths": (8, 16), "depths": (1, 2), "heads": (2, 4), "windows": (4, 3)},
)
