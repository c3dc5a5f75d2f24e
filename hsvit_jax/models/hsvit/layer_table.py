"""An HSViT layer by layer: shapes, parameters and multiply-adds, as the literature counts them."""

from collections.abc import Iterator
from typing import Any

from hsvit_jax.models.hsvit.sizes import HSViTConfig
from hsvit_jax.models.layers import Row


def layer_table(c: HSViTConfig) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
    """The rows of `HSViT.layer_table`, in the order of computation."""
    (rows, columns), c_in, d = c.image_size, c.image_channels, c.embed_dim
    if c.convolution:
        for i, (c_out, kernel, stride) in enumerate(
            zip(c.conv_channels, c.conv_kernels, c.pool_strides, strict=True)
        ):
            for j, size in enumerate((kernel, 3)):
                apart = c.separable and (i or j)
                weights = size * size * c_in * (1 if apart else c_out)
                weights += c_in * c_out if apart else 0
                kind = "depthwise, 1×1 convolution" if apart else "convolution"
                name = f"block {i}: {size}×{size} {kind} {j}, BatchNorm, ReLU"
                yield name, (rows, columns, c_out), weights + 2 * c_out, rows * columns * weights
                c_in = c_out
            if stride > 1:
                rows, columns = rows // stride, columns // stride
                name = f"block {i}: {kernel}×{kernel} max pool, stride {stride}"
                yield name, (rows, columns, c_out), 0, 0
        yield projection_row((rows, columns), c_in, d)
    else:
        yield "colour planes as tokens", (c.conv_channels[-1], d), 0, 0
    yield from attention_rows(c)


def projection_row(map_size: tuple[int, int], channels: int, d: int) -> Row:
    """Each channel's map to a token."""
    pixels = map_size[0] * map_size[1]
    return "linear, ReLU, dropout", (channels, d), (pixels + 1) * d, channels * pixels * d


def attention_rows(c: Any) -> Iterator[Row]:
    """Groups and head; c: sizes named as `HSViTConfig`'s."""
    d = c.embed_dim
    if c.groups:
        g, t = c.groups, c.tokens
        yield "groups: CLS and positions", (g, t, d), g * (t + 1) * d, 0
        if c.votes == "learned":
            yield "groups: votes", (g,), g, 0
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
