"""HVT: a vision transformer whose token sequence is pooled after the first block of each stage.

A ViT without a CLS token: after block i with i mod stage_depth = 0 the sequence is pooled (window
3, stride 2) and new positions are added; the classifier reads the mean of the normalised tokens.

Source: HVT paper, section 3.2, equations 5 and 6; the authors' code for biases, normalisation and
the order of pooling. Pooling other than 1-D maximum, and no pooling, are reconstructed from the
parameters and FLOPs of tables 3, 4 and 9.
"""

import dataclasses
from collections.abc import Mapping
from functools import reduce
from itertools import pairwise
from math import prod
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from hsvit_jax.models import layers, settings
from hsvit_jax.models.family import Family
from hsvit_jax.models.network import ForwardContext, Network
from hsvit_jax.models.vit import vit
from hsvit_jax.ops.max_pool import max_pool, windows

Array = jax.Array

#: Named systems of the paper's tables 1 to 9 and section 4.2, as they differ from the defaults.
VARIANTS: Mapping[str, Mapping[str, Any]] = (
    {f"ti-{m}": {"heads": 3, "stage_depth": 12 // m if m else 0} for m in range(5)}
    | {f"s-{m}": {"stage_depth": 12 // m if m else 0} for m in range(5)}
    | {
        "scale-ti-4": {},  # the same network as s-4
        "s-4-conv": {"pool": "conv"},
        "s-4-average": {"pool": "average"},
        "s-2-2d": {"stage_depth": 6, "pool_dims": 2, "patch": 8},
        "s-4-patch8": {"patch": 8},
        "s-4-patch32": {"patch": 32},
    }
    | {f"s-4-depth{n}": {"depth": n, "stage_depth": n // 4} for n in (16, 20, 24, 48)}
    | {f"ti-4-heads{n}": {"heads": n} for n in (6, 11, 12, 16)}
)

_POOLS = {"stage_depth": settings.ON}


@dataclasses.dataclass(frozen=True)
class SmallSizes(vit.PatchSizes):
    """Sizes that HVT and DeiT share, by default those of DeiT-S."""

    patch: int = settings.patch(16, meaning="patch size in pixels; 0: by the image size", low=0)
    heads: int = settings.heads(6)
    head_dim: int = settings.width(64, "width of an attention head")
    depth: int = settings.depth(12, "blocks")
    mlp_ratio: float = settings.mlp_ratio(4.0)
    qkv_bias: bool = settings.qkv_bias(True)
    eps: float = settings.epsilon(1e-6, meaning="epsilon of normalisation")
    drop_path: float = settings.drop_path(0.1)


@dataclasses.dataclass(frozen=True)
class HVTConfig(SmallSizes):
    """Sizes of an HVT; a 2-D pool is padded by pool_window//2, a 1-D one is not."""

    stage_depth: int = settings.depth(3, "blocks between pools; 0: no pools", low=0)
    pool: str = settings.setting(
        "max", "kind of token pooling", choices=("max", "average", "conv"), when=_POOLS
    )
    pool_dims: int = settings.setting(
        1, "pooling of tokens as a sequence (1) or a map (2)", choices=(1, 2), when=_POOLS
    )
    pool_window: int = settings.kernel(3, "window of a pool", low=2, when=_POOLS)
    cls: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stage_depth and self.pool_dims == 2 and self.pool_window % 2 == 0:
            raise ValueError(f"pool_window must be odd in 2-D; got {self.pool_window}")
        for i, (before, after) in enumerate(pairwise(self.lengths())):
            if min(after) < 1:
                raise ValueError(
                    f"{'×'.join(map(str, before))} tokens after block {i} are fewer than "
                    f"pool_window={self.pool_window}: use fewer pooling stages (a larger "
                    "model.stage_depth), a smaller model.patch or a larger data.image_size"
                )

    def pools_after(self, block: int) -> bool:
        """Returns whether the sequence is pooled after this block."""
        return self.stage_depth > 0 and block % self.stage_depth == 0

    def lengths(self) -> list[tuple[int, ...]]:
        """Lists the lengths before each block and at the end: (T,), or (rows, columns)."""
        now = self.grid if self.pool_dims == 2 else (self.tokens,)
        out = [now]
        for i in range(self.depth):
            if self.pools_after(i):
                pad = self.pool_window // 2 if self.pool_dims == 2 else 0
                now = tuple((n + 2 * pad - self.pool_window) // 2 + 1 for n in now)
            out.append(now)
        return out


class Pool(nnx.Module):
    """Pooling of the sequence to half its length, and new positions (equation 5)."""

    def __init__(
        self, c: HVTConfig, before: tuple[int, ...], after: tuple[int, ...], key: Array
    ) -> None:
        self.kind, self.window, self.before = c.pool, c.pool_window, before
        conv_key, bias_key, position_key = jax.random.split(key, 3)
        self.position = nnx.Param(0.02 * layers.normal(position_key, (prod(after), c.dim)))
        self.conv = nnx.Dict()
        if c.pool == "conv":
            fan_in = c.dim * c.pool_window ** len(before)
            shape = (c.pool_window,) * len(before) + (c.dim, c.dim)
            self.conv["kernel"] = nnx.Param(layers.init_kernel(conv_key, shape, fan_in, "torch"))
            self.conv["bias"] = nnx.Param(layers.init_bias(bias_key, c.dim, fan_in, "torch"))

    def __call__(self, x_BTD: Array) -> Array:
        """(B, T, D) → (B, T', D)."""
        batch, _, dim = x_BTD.shape
        x = x_BTD.reshape(batch, *self.before, dim)
        pad = self.window // 2 if len(self.before) == 2 else 0
        x = max_pool(x, self.window, 2) if self.kind == "max" and pad else self._combined(x, pad)
        return layers.add_bias(x.reshape(batch, -1, dim), self.position[...])

    def _combined(self, x: Array, pad: int) -> Array:
        """Returns the maximum, mean (padded by zeros) or convolution of every window."""
        if self.kind == "conv":
            dims = ("NWC", "WIO", "NWC") if x.ndim == 3 else ("NHWC", "HWIO", "NHWC")
            kernel = self.conv["kernel"][...].astype(x.dtype)
            strides, pads = (2,) * (x.ndim - 2), ((pad, pad),) * (x.ndim - 2)
            y = lax.conv_general_dilated(x, kernel, strides, pads, dimension_numbers=dims)
            return layers.add_bias(y, self.conv["bias"][...])
        combine = jnp.maximum if self.kind == "max" else jnp.add
        for axis in range(1, x.ndim - 1):
            x = reduce(combine, windows(x, axis, self.window, 2, pad))
        return x if self.kind == "max" else x / self.window ** (x.ndim - 2)


class Encoder(nnx.Module):
    """Blocks, and pools by the index of the block that they follow."""

    def __init__(self, c: HVTConfig, key: Array) -> None:
        self.blocks, self.pools = vit.Encoder(c, key).blocks, nnx.Dict()
        keys, lengths = jax.random.split(key, c.depth), c.lengths()
        for i in filter(c.pools_after, range(c.depth)):
            pool_key = jax.random.split(keys[i], 3)[2]
            self.pools[f"after{i}"] = Pool(c, lengths[i], lengths[i + 1], pool_key)

    def __call__(self, x_BTD: Array, context: ForwardContext) -> Array:
        """(B, T, D) → (B, T', D), T' after all pools."""
        for i, block in enumerate(self.blocks):
            x_BTD = block(x_BTD, context, i)
            if f"after{i}" in self.pools:
                x_BTD = self.pools[f"after{i}"](x_BTD)
        return x_BTD


class HVT(vit.ViT):
    """Parameters: {'embedding', 'encoder', 'head'}."""

    modules: ClassVar = {**vit.ViT.modules, "encoder": Encoder}

    def grid(self, tokens: int) -> tuple[int, int, int] | None:
        """Returns the grid as `Network.grid`; a sequence after 1-D pooling has none."""
        c = self.config
        regular = (c.stage_depth and c.pool_dims == 2) or tokens == c.tokens
        return Network.grid(self, tokens) if regular else None

    def at_places(self, x_BTC: Array) -> Array | None:
        """Returns a map as `Network.at_places`, after 1-D pooling by interpolation.

        Source: HVT paper, figure 3.
        """
        c = self.config
        if not (c.stage_depth and c.pool_dims == 1) or x_BTC.shape[1] == c.tokens:
            return super().at_places(x_BTC)
        size = (x_BTC.shape[0], c.tokens, x_BTC.shape[2])
        return super().at_places(jax.image.resize(x_BTC, size, "linear"))

    def paper_flops(self, multiply_adds: int) -> tuple[int, str]:
        """Returns the HVT paper's FLOPs, tables 1 to 9."""
        return multiply_adds, "multiply-adds, attention's included"


def default_patch(image_size: tuple[int, int]) -> int:
    """Returns the largest of 16, 8, 4 and 2 that divides both sides and leaves at least 7×7 tokens.

    These can be pooled four times. Smaller images have patches of 1 pixel.

    Raises ValueError for more than 64×64 pixels with an odd side: each would be a token.
    """
    rows, columns = image_size
    for patch in (16, 8, 4, 2):
        if rows % patch == columns % patch == 0 and rows * columns >= 49 * patch**2:
            return patch
    if rows * columns > 64**2:
        raise ValueError(
            f"no patch of 2 to 16 divides {rows}×{columns} pixels: set model.patch or another "
            "data.image_size"
        )
    return 1


def tiny(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sizes of a smoke run of an HVT or a DeiT, with as many pools as it has."""
    stage_depth = settings.get("stage_depth", 0)
    stages = settings["depth"] // stage_depth if stage_depth else 0
    sizes = {"heads": 2, "head_dim": 8, "depth": stages or 2, "patch": 4}
    return {**sizes, "stage_depth": min(stages, 1)} if "stage_depth" in settings else sizes


FAMILY = Family(
    name="hvt",
    keys=settings.keys_of(HVTConfig, patch=0),
    variants=VARIANTS,
    default_variant="s-4",
    config=HVTConfig,
    network=HVT,
    automatic={"patch": lambda settings, image_size: default_patch(image_size)},
    paper_recipe="hvt",
    tiny=tiny,
)
