"""HSViT: every convolution kernel's whole feature map is one token, attended to in groups.

Trunk: convolution blocks, then each channel's map is flattened and projected to one token. Groups:
the tokens are split into G contiguous attention groups that never meet; each has its own CLS,
positions and encoder. Head: the groups' CLS tokens are averaged, normalised and classified.

Source: HSViT paper, sections 3.1 to 3.3; where it is silent (projection, learned positions,
dropout) the authors' code. Only `Groups` has a leading G axis, so a mesh can spread it; the sum
over groups is the one thing the caller supplies.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from math import log, prod
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from hsvit_jax.models import layers

Array = jax.Array

#: Named sizes: convolution channels, attention blocks, pool strides by image size (paper, table 2).
VARIANTS: Mapping[str, dict] = {
    "c2a2": {
        "channels": (64, 128),
        "depth": 2,
        "strides": {28: (2, 2), 32: (2, 2), 64: (4, 2), 128: (4, 4)},
    },
    "c3a4": {
        "channels": (64, 128, 256),
        "depth": 4,
        "strides": {28: (2, 1, 2), 32: (2, 1, 2), 64: (2, 2, 2), 128: (4, 2, 2)},
    },
    "c4a8": {
        "channels": (64, 128, 256, 512),
        "depth": 8,
        "strides": {28: (2, 1, 2, 1), 32: (2, 1, 2, 1), 64: (2, 2, 2, 1), 128: (2, 2, 2, 2)},
    },
}


@dataclasses.dataclass(frozen=True)
class HSViTConfig:
    """Every size of an HSViT. `groups=0` leaves attention out, a last kernel of 0 convolution.

    image_size in pixels (H, W); conv_kernels are odd sizes of each block's first convolution and of
    its pool; pool_strides of 1 mean no pool. Raises ValueError for sizes that do not fit together.
    """

    image_size: tuple[int, int]
    image_channels: int
    num_classes: int
    conv_channels: tuple[int, ...]
    conv_kernels: tuple[int, ...]
    pool_strides: tuple[int, ...]
    groups: int = 16
    depth: int = 2
    embed_dim: int = 64
    heads: int = 8
    dropout: float = 0.2

    def __post_init__(self) -> None:
        _check_sizes(self)

    @property
    def convolution(self) -> bool:
        """False for the attention-only ablation."""
        return self.conv_kernels[-1] != 0

    @property
    def map_size(self) -> tuple[int, int]:
        """Rows and columns of the feature map that becomes a token."""
        stride = prod(self.pool_strides) if self.convolution else 1
        return self.image_size[0] // stride, self.image_size[1] // stride

    @property
    def tokens(self) -> int:
        """Tokens of one group, its CLS included."""
        return self.conv_channels[-1] // self.groups + 1


def _check_sizes(c: HSViTConfig) -> None:
    """Names both numbers of every pair that does not fit, and the way out."""
    blocks = len(c.conv_channels)
    if not blocks or blocks != len(c.conv_kernels) or blocks != len(c.pool_strides):
        raise ValueError(
            "conv_channels, conv_kernels and pool_strides need one entry per block; got "
            f"{c.conv_channels}, {c.conv_kernels} and {c.pool_strides}"
        )
    sizes = (*c.image_size, c.image_channels, c.num_classes, *c.conv_channels, *c.pool_strides)
    if min(*sizes, c.embed_dim) < 1 or c.groups < 0 or c.depth < 0:
        raise ValueError(f"sizes must be positive; got {c}")
    if not 0 <= c.dropout < 1:
        raise ValueError(f"dropout must be in [0, 1); got {c.dropout}")
    if c.convolution:
        if any(k < 1 or k % 2 == 0 for k in c.conv_kernels):
            raise ValueError(f"convolution kernels must be odd; got conv_kernels={c.conv_kernels}")
        divisor = prod(c.pool_strides)
        if c.image_size[0] % divisor or c.image_size[1] % divisor:
            raise ValueError(
                f"an image of {c.image_size[0]}×{c.image_size[1]} pixels does not fit pool_strides="
                f"{c.pool_strides}: both sides must be divisible by their product {divisor}"
            )
    elif c.image_size[0] * c.image_size[1] != c.embed_dim:
        raise ValueError(
            "without convolution each colour plane is a token, so height × width must equal "
            f"embed_dim={c.embed_dim}; got {c.image_size[0]}×{c.image_size[1]}"
        )
    if c.groups:
        if c.conv_channels[-1] % c.groups:
            raise ValueError(
                f"{c.conv_channels[-1]} channel tokens cannot split into groups={c.groups}: "
                f"choose a divisor of {c.conv_channels[-1]}: {divisors(c.conv_channels[-1])}"
            )
        if c.depth < 1:
            raise ValueError("attention groups need depth of at least 1; for none set groups=0")
        if c.heads < 1 or c.embed_dim % c.heads:
            raise ValueError(
                f"embed_dim={c.embed_dim} is not divisible by heads={c.heads}: choose one of "
                f"{divisors(c.embed_dim)}"
            )


def divisors(n: int) -> list[int]:
    """All divisors of n, ascending: what an error message offers."""
    return [d for d in range(1, n + 1) if n % d == 0]


class ConvBlock(nnx.Module):
    """Two convolutions, each with BatchNorm and ReLU, then a max pool if the stride is over 1."""

    def __init__(self, c_in: int, c_out: int, kernel: int, stride: int, key: Array) -> None:
        self.window, self.stride = kernel, stride
        keys = jax.random.split(key)
        self.kernels = nnx.List(
            nnx.Param(layers.uniform(k, (s, s, i, c_out), (s * s * i) ** -0.5))
            for k, s, i in zip(keys, (kernel, 3), (c_in, c_out), strict=True)
        )
        self.norms = nnx.List(layers.BatchNorm(c_out) for _ in range(2))

    def __call__(self, x_BHWC: Array, *, train: bool, batch_axes: tuple[str, ...]) -> Array:
        for kernel, norm in zip(self.kernels, self.norms, strict=True):
            y = layers.conv2d(x_BHWC, kernel[...])
            x_BHWC = jax.nn.relu(norm(y, train=train, batch_axes=batch_axes))
        return layers.max_pool(x_BHWC, self.window, self.stride) if self.stride > 1 else x_BHWC


class Trunk(nnx.Module):
    """Images to one token per channel of the last block."""

    def __init__(self, c: HSViTConfig, key: Array) -> None:
        self.tokens = c.conv_channels[-1]
        self.blocks, self.embed, self.dropout = nnx.List(), nnx.Dict(), c.dropout
        if not c.convolution:
            return
        *block_keys, embed_key = jax.random.split(key, len(c.conv_channels) + 1)
        c_in = c.image_channels
        for block_key, c_out, kernel, stride in zip(
            block_keys, c.conv_channels, c.conv_kernels, c.pool_strides, strict=True
        ):
            self.blocks.append(ConvBlock(c_in, c_out, kernel, stride, block_key))
            c_in = c_out
        self.embed = nnx.Dict(layers.torch_linear(embed_key, (), prod(c.map_size), c.embed_dim))

    def __call__(
        self,
        images_BHWC: Array,
        *,
        train: bool,
        dropout_words: tuple[Array, ...] | None,
        example_ids_B: Array,
        batch_axes: tuple[str, ...],
    ) -> Array:
        """(B, H, W, C) → (B, channel tokens, D)."""
        x_BHWC = images_BHWC
        for block in self.blocks:
            x_BHWC = block(x_BHWC, train=train, batch_axes=batch_axes)
        batch, rows, columns, channels = x_BHWC.shape
        x_BPC = x_BHWC.reshape(batch, rows * columns, channels)
        if not self.blocks:  # colour planes, repeated R, G, B, R, … up to the number of tokens
            repeats = -(-self.tokens // channels)
            return jnp.tile(x_BPC.swapaxes(1, 2), (1, repeats, 1))[:, : self.tokens]
        kernel_PD = self.embed["kernel"][...].astype(x_BPC.dtype)
        bias_D = self.embed["bias"][...].astype(x_BPC.dtype)
        z_BCD = jax.nn.relu(jnp.einsum("bpc,pd->bcd", x_BPC, kernel_PD) + bias_D[None, None])
        if dropout_words is not None and self.dropout:
            words = (*dropout_words, 0, example_ids_B.reshape(-1, 1, 1))
            z_BCD = z_BCD * layers.dropout_scale(words, z_BCD.shape, self.dropout).astype(
                z_BCD.dtype
            )
        return z_BCD


class Block(nnx.Module):
    """One attention block of all groups: z + MHSA(LN(z)), and nothing else (no MLP)."""

    def __init__(self, c: HSViTConfig, key: Array) -> None:
        self.heads, self.rate = c.heads, c.dropout
        qkv_key, out_key = jax.random.split(key)
        g, d = c.groups, c.embed_dim
        self.norm_scale, self.norm_bias = nnx.Param(jnp.ones((g, d))), nnx.Param(jnp.zeros((g, d)))
        # Xavier-uniform over the packed (D, 3D) matrix, zero bias.
        self.qkv_kernel = nnx.Param(layers.uniform(qkv_key, (g, 3, d, d), (6 / (4 * d)) ** 0.5))
        self.qkv_bias = nnx.Param(jnp.zeros((g, 3, d)))
        self.out_kernel = nnx.Param(layers.uniform(out_key, (g, d, d), d**-0.5))
        self.out_bias = nnx.Param(jnp.zeros((g, d)))

    def __call__(
        self, z_GBTD: Array, words: tuple[Array | int, ...] | None, *, cls_only: bool
    ) -> Array:
        """(G, B, T, D) → same, or (G, B, 1, D) where only the CLS token's output is wanted."""
        g, batch, _, d = z_GBTD.shape
        y_GBTD = layers.layer_norm(
            z_GBTD, self.norm_scale[...][:, None, None], self.norm_bias[...][:, None, None]
        )
        kernel_GJDD = self.qkv_kernel[...].astype(z_GBTD.dtype)
        bias_GJD = self.qkv_bias[...].astype(z_GBTD.dtype)

        def project(y: Array, j: int) -> Array:
            """Queries, keys or values, heads as a batch axis: (G, B, N, T, D/N)."""
            out = jnp.einsum("gbtd,gde->gbte", y, kernel_GJDD[:, j]) + bias_GJD[:, j, None, None]
            return out.reshape(g, batch, -1, self.heads, d // self.heads).swapaxes(2, 3)

        z_in = z_GBTD[:, :, :1] if cls_only else z_GBTD
        q_in = y_GBTD[:, :, :1] if cls_only else y_GBTD
        o_GBNTE = layers.attention(
            self.rate if words is not None else 0.0,
            project(q_in, 0),
            project(y_GBTD, 1),
            project(y_GBTD, 2),
            words or (),
        )
        o_GBTD = o_GBNTE.swapaxes(2, 3).reshape(z_in.shape)
        out = jnp.einsum("gbtd,gde->gbte", o_GBTD, self.out_kernel[...].astype(z_GBTD.dtype))
        return z_in + out + self.out_bias[...].astype(z_GBTD.dtype)[:, None, None]


class Groups(nnx.Module):
    """All attention groups' encoders at once; every parameter has a leading G axis."""

    def __init__(self, c: HSViTConfig, key: Array) -> None:
        cls_key, position_key, *block_keys = jax.random.split(key, c.depth + 2)
        self.cls = nnx.Param(jax.random.normal(cls_key, (c.groups, c.embed_dim)))
        self.position = nnx.Param(
            jax.random.normal(position_key, (c.groups, c.tokens, c.embed_dim))
        )
        self.blocks = nnx.List(Block(c, k) for k in block_keys)

    def __call__(
        self,
        z_BGTD: Array,
        *,
        dropout_words: tuple[Array, ...] | None,
        example_ids_B: Array,
        group_ids_G: Array,
    ) -> Array:
        """Channel tokens (B, G, T−1, D) → each group's CLS output (G, B, D)."""
        batch, g, _, d = z_BGTD.shape
        cls_GBTD = jnp.broadcast_to(
            self.cls[...].astype(z_BGTD.dtype)[:, None, None], (g, batch, 1, d)
        )
        z_GBTD = jnp.concatenate([cls_GBTD, z_BGTD.swapaxes(0, 1)], axis=2)
        z_GBTD = z_GBTD + self.position[...].astype(z_BGTD.dtype)[:, None]
        for i, block in enumerate(self.blocks):
            words = None
            if dropout_words is not None:
                group_word = group_ids_G.reshape(-1, 1, 1, 1, 1)
                words = (*dropout_words, i + 1, group_word, example_ids_B.reshape(1, -1, 1, 1, 1))
            z_GBTD = block(z_GBTD, words, cls_only=i == len(self.blocks) - 1)
        return z_GBTD[:, :, 0]


class Head(nnx.Module):
    """LayerNorm and a linear classifier on the averaged CLS token."""

    def __init__(self, c: HSViTConfig, key: Array) -> None:
        self.norm_scale = nnx.Param(jnp.ones(c.embed_dim))
        self.norm_bias = nnx.Param(jnp.zeros(c.embed_dim))
        self.linear = nnx.Dict(layers.torch_linear(key, (), c.embed_dim, c.num_classes))

    def __call__(self, cls_BD: Array) -> Array:
        """(B, D) → logits (B, K)."""
        y_BD = layers.layer_norm(cls_BD, self.norm_scale[...][None], self.norm_bias[...][None])
        kernel_DK = self.linear["kernel"][...].astype(y_BD.dtype)
        return y_BD @ kernel_DK + self.linear["bias"][...].astype(y_BD.dtype)[None]


#: Runs `encode(params_G, tokens_BGTD, example_ids_B, group_ids_G) -> cls_GBD` and sums it over
#: groups to (B, D). On one device this is `sum_groups`; a mesh supplies its own.
RunGroups = Callable[[Callable[..., Array], dict, Array, Array, Array], Array]


def sum_groups(
    encode: Callable[..., Array],
    params: dict,
    z_BGTD: Array,
    example_ids_B: Array,
    group_ids_G: Array,
) -> Array:
    """All groups on this device: their CLS tokens summed, (B, D)."""
    return encode(params, z_BGTD, example_ids_B, group_ids_G).sum(0)


class HSViT:
    """The network as two pure functions, `init` and `apply`, over plain nested dicts.

    Parameters: {'trunk', 'groups' (leading G axis), 'head'}; statistics: {'trunk'} (BatchNorm).
    """

    def __init__(self, config: HSViTConfig, dtype: jnp.dtype = jnp.float32) -> None:
        """dtype: of the computation; parameters stay float32."""
        self.config, self.dtype = config, jnp.dtype(dtype)
        self.groups = config.groups
        parts = nnx.eval_shape(lambda: self._modules(jax.random.key(0)))
        self._graphs = {name: nnx.graphdef(module) for name, module in parts.items()}

    def _modules(self, key: Array) -> dict[str, nnx.Module]:
        trunk_key, groups_key, head_key = jax.random.split(key, 3)
        parts = {"trunk": Trunk(self.config, trunk_key), "head": Head(self.config, head_key)}
        if self.groups:
            parts["groups"] = Groups(self.config, groups_key)
        return parts

    def init(self, key: Array) -> tuple[dict, dict]:
        """Fresh (params, stats) of float32 arrays, started as the reference starts them."""
        params, stats = {}, {}
        for name, module in self._modules(key).items():
            params[name] = _plain(module, nnx.Param)
            stats[name] = _plain(module, nnx.BatchStat)
        return _without_empty(params), _without_empty(stats)

    def layer_table(self) -> list[tuple[str, tuple[int, ...], int, int]]:
        """(layer, output shape of one image, parameters, multiply-adds) in order of computation.

        Multiply-adds of the matrix products and convolutions alone, the last attention block for
        every token, as the literature counts them; `apply` computes that block for CLS only.
        """
        return list(_layer_table(self.config))

    def _merge(self, name: str, params: dict, stats: dict) -> nnx.Module:
        """A module that holds the given plain arrays."""
        return nnx.merge(self._graphs[name], nnx.State(_module_state(params, stats)))

    def apply(
        self,
        params: dict,
        stats: dict,
        images_BHWC: Array,
        *,
        train: bool = False,
        dropout_key: Array | None = None,
        example_ids_B: Array | None = None,
        run_groups: RunGroups = sum_groups,
        batch_axes: tuple[str, ...] = (),
    ) -> tuple[Array, dict]:
        """Logits (B, K), at least float32, and the statistics after this batch.

        images (B, H, W, C) float, normalised. train: use the batch's statistics and update them.
        dropout_key: a jax key for this step; None for no dropout. example_ids (B,) int32: identity
        of each example, so that a mask is a function of (key, example, group) alone; the position
        in the batch when left out. batch_axes: mesh axes over which the batch is split by hand.
        """
        if images_BHWC.shape[1:] != (*self.config.image_size, self.config.image_channels):
            raise ValueError(
                f"images of shape {images_BHWC.shape[1:]} given to a network built for "
                f"{(*self.config.image_size, self.config.image_channels)} (rows, columns, channels)"
            )
        if example_ids_B is None:
            example_ids_B = jnp.arange(images_BHWC.shape[0])
        words = None
        if dropout_key is not None and self.config.dropout:
            bits = jax.random.bits(dropout_key, (2,), jnp.uint32)
            words = (bits[0], bits[1])
        dtype = self.dtype if self.dtype != jnp.float32 else images_BHWC.dtype
        trunk = self._merge("trunk", params.get("trunk", {}), stats.get("trunk", {}))
        z_BCD = trunk(
            images_BHWC.astype(dtype),
            train=train,
            dropout_words=words,
            example_ids_B=example_ids_B,
            batch_axes=batch_axes,
        )
        new_stats = _without_empty({"trunk": _plain(trunk, nnx.BatchStat)})
        if self.groups:
            batch, tokens, d = z_BCD.shape
            z_BGTD = z_BCD.reshape(batch, self.groups, tokens // self.groups, d)

            def encode(p: dict, z: Array, examples: Array, groups: Array) -> Array:
                return self._merge("groups", p, {})(
                    z, dropout_words=words, example_ids_B=examples, group_ids_G=groups
                )

            group_ids_G = jnp.arange(self.groups)
            total_BD = run_groups(encode, params["groups"], z_BGTD, example_ids_B, group_ids_G)
            cls_BD = total_BD / self.groups
        else:
            cls_BD = z_BCD.mean(1)
        logits_BK = self._merge("head", params["head"], {})(cls_BD)
        return logits_BK.astype(jnp.promote_types(logits_BK.dtype, jnp.float32)), new_stats


def _layer_table(c: HSViTConfig) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
    """The rows of `HSViT.layer_table`, in the order of computation."""
    (rows, columns), c_in, d = c.image_size, c.image_channels, c.embed_dim
    if c.convolution:
        for i, (c_out, kernel, stride) in enumerate(
            zip(c.conv_channels, c.conv_kernels, c.pool_strides, strict=True)
        ):
            for j, size in enumerate((kernel, 3)):
                weights = size * size * c_in * c_out
                name = f"block {i}: {size}×{size} convolution {j}, BatchNorm, ReLU"
                yield name, (rows, columns, c_out), weights + 2 * c_out, rows * columns * weights
                c_in = c_out
            if stride > 1:
                rows, columns = rows // stride, columns // stride
                name = f"block {i}: {kernel}×{kernel} max pool, stride {stride}"
                yield name, (rows, columns, c_out), 0, 0
        pixels = rows * columns
        yield "linear, ReLU, dropout", (c_in, d), (pixels + 1) * d, c_in * pixels * d
    else:
        yield "colour planes as tokens", (c.conv_channels[-1], d), 0, 0
    if c.groups:
        g, t = c.groups, c.tokens
        yield "groups: CLS and positions", (g, t, d), g * (t + 1) * d, 0
        for i in range(c.depth):
            parts = (
                ("LayerNorm", 2 * d, 0),
                ("queries, keys, values", 3 * d * (d + 1), 3 * t * d * d),
            )
            parts += (("attention", 0, 2 * t * t * d), ("output, residual", d * (d + 1), t * d * d))
            for name, params, macs in parts:
                yield f"groups, layer {i}: {name}", (g, t, d), g * params, g * macs
    yield "head: mean, LayerNorm", (d,), 2 * d, 0
    yield "head: linear", (c.num_classes,), (d + 1) * c.num_classes, d * c.num_classes


def _without_empty(tree: dict) -> dict:
    """Drops parts that hold nothing, so that a tree has one shape however it was made."""
    return {k: v for k, v in tree.items() if v}


def _plain(module: nnx.Module, kind: type) -> dict:
    """One kind of a module's variables as nested dicts; list positions become '0', '1', …"""

    def named(tree: dict) -> dict:
        return {str(k): named(v) if isinstance(v, dict) else v for k, v in tree.items()}

    return named(nnx.to_pure_dict(nnx.state(module, kind)))


def _module_state(params: dict, stats: dict) -> dict:
    """The way back: parameters and statistics in one tree, list positions as integers again."""
    out = {}
    for key in (*params, *(k for k in stats if k not in params)):
        child, stat = params.get(key, {}), stats.get(key, {})
        leaf = (
            child if not isinstance(child, dict) else stat if not isinstance(stat, dict) else None
        )
        place = int(key) if key.isdigit() else key
        out[place] = _module_state(child, stat) if leaf is None else leaf
    return out


def default_strides(variant: str, image_size: tuple[int, int]) -> tuple[int, ...]:
    """Pool strides of a named variant for an image size.

    The paper's for 28, 32, 64 and 128 pixels square; for other sizes those of the table that divide
    both sides and leave a map nearest to 8×8. Raises ValueError when none does.
    """
    if variant not in VARIANTS:
        raise ValueError(f"unknown model.variant {variant!r}; choose one of {sorted(VARIANTS)}")
    table = VARIANTS[variant]["strides"]
    rows, columns = image_size
    if rows == columns and rows in table:
        return table[rows]
    fitting = [s for s in table.values() if rows % prod(s) == 0 and columns % prod(s) == 0]
    if not fitting:
        smallest = min(prod(s) for s in table.values())
        raise ValueError(
            f"no pool strides of {variant} fit an image of {rows}×{columns} pixels: both must "
            f"be divisible by {smallest}; change data.image_size, or set model.pool_strides"
        )
    return min(fitting, key=lambda s: abs(log(rows * columns / prod(s) ** 2 / 64)))


def from_settings(
    settings: Mapping[str, Any],
    *,
    image_size: tuple[int, int],
    channels: int,
    num_classes: int,
    dtype: jnp.dtype = jnp.float32,
) -> HSViT:
    """The network of a configuration's `model` section.

    An empty `pool_strides` means the variant's own for this image size. `ablation` is 'none',
    'conv_only' (no attention) or 'attention_only' (no convolution; images of embed_dim pixels).
    """
    kernels = tuple(settings["conv_kernels"])
    groups, ablation = settings["groups"], settings["ablation"]
    strides = tuple(settings["pool_strides"])
    if ablation == "attention_only":
        kernels = (*kernels[:-1], 0)
        strides = strides or (1,) * len(kernels)
    elif ablation == "conv_only":
        groups = 0
    elif ablation != "none":
        raise ValueError(
            f"unknown model.ablation {ablation!r}; choose none, conv_only or attention_only"
        )
    return HSViT(
        HSViTConfig(
            image_size=image_size,
            image_channels=channels,
            num_classes=num_classes,
            conv_channels=tuple(settings["conv_channels"]),
            conv_kernels=kernels,
            pool_strides=strides or default_strides(settings["variant"], image_size),
            groups=groups,
            depth=settings["depth"],
            embed_dim=settings["embed_dim"],
            heads=settings["heads"],
            dropout=settings["dropout"],
        ),
        dtype,
    )
