"""The trunk of an HSViT: convolution blocks, and the projection of each channel's map to a token.

A block's convolutions are dense, or separable as in MobileNet and Xception: a depthwise k×k and
then a pointwise 1×1, one BatchNorm and ReLU after the pair (Xception's paper, section 4.7, finds
nothing between them best). The convolution of the image itself stays dense, as in both: with one or
three channels in, a depthwise kernel each would leave the network one or three filters.
"""

from functools import partial
from math import prod

import jax
import jax.numpy as jnp
from flax import nnx

from hsvit_jax.models import layers
from hsvit_jax.models.hsvit.sizes import HSViTConfig
from hsvit_jax.models.network import UNSHARDED, ForwardContext, GroupShard
from hsvit_jax.ops import normalise
from hsvit_jax.ops.conv import rectified, rectified_conv2d
from hsvit_jax.ops.conv_depthwise import depthwise_conv2d
from hsvit_jax.ops.dropout import dropout_scale
from hsvit_jax.ops.max_pool import max_pool
from hsvit_jax.ops.remat import recomputed

Array = jax.Array


class ConvBlock(nnx.Module):
    """Two convolutions, each with BatchNorm and ReLU, then a max pool if the stride is over 1.

    separable: for each convolution; its kernel is then a pointwise one, (1, 1, I, O), after a
    depthwise one, (k, k, 1, I).
    """

    def __init__(
        self,
        c_in: int,
        c_out: int,
        kernel: int,
        stride: int,
        key: Array,
        separable: tuple[bool, bool] = (False, False),
    ) -> None:
        self.window, self.stride = kernel, stride
        self.kernels, self.depthwise = nnx.List(), nnx.List()
        for key_, size, inputs, apart in zip(
            jax.random.split(key), (kernel, 3), (c_in, c_out), separable, strict=True
        ):
            if apart:
                key_, own_key = jax.random.split(key_)
                own = layers.uniform(own_key, (size, size, 1, inputs), 1 / size)
                self.depthwise.append(nnx.Param(own))
                size = 1
            bound = (size * size * inputs) ** -0.5
            self.kernels.append(nnx.Param(layers.uniform(key_, (size, size, inputs, c_out), bound)))
        self.norms = nnx.List(layers.BatchNorm(c_out) for _ in range(2))

    def __call__(
        self, x_BHWC: Array, context: ForwardContext, kernels: GroupShard, *, whole: bool
    ) -> Array:
        """This device's share of the channels in (all of them if `whole`) and out.

        What a convolution makes is normalised and rectified by what reads it, and again in the
        gradient: of the two maps only one is kept. Not where it is gathered, which would be twice.
        """

        line: tuple[Array, ...] = ()
        for i, norm in enumerate(self.norms):
            here = whole and i == 0
            x_BHWC, moments = self._convolve(
                i, x_BHWC, line, context, UNSHARDED if here else kernels
            )
            line = norm.affine(
                x_BHWC, train=context.train, batch_axes=context.batch_axes, moments=moments
            )
        return recomputed(self._pool, x_BHWC, *line)

    def _convolve(
        self,
        i: int,
        x_BHWC: Array,
        line: tuple[Array, ...],
        context: ForwardContext,
        kernels: GroupShard,
    ) -> tuple[Array, tuple[Array, ...]]:
        """The i-th convolution of what the line before makes of x, and the moments of its output,
        where they come with it.

        A depthwise kernel works on the channels that are here, so what is gathered for the
        pointwise one is as large as for a dense convolution.
        """
        kernel_HWIO, apart = self.kernels[i], i - (len(self.kernels) - len(self.depthwise))
        if apart < 0:
            if kernels is not UNSHARDED:
                x_BHWC, line = kernels.all_gather(rectified(x_BHWC, *line), 3), ()
            return rectified_conv2d(x_BHWC, line, kernel_HWIO[...], moments=context.train)

        def separable(x: Array, *line: Array) -> Array:
            x = depthwise_conv2d(rectified(x, *line), self.depthwise[apart][...])
            return kernels.all_gather(x, 3) @ kernel_HWIO[...].astype(x.dtype)[0, 0]

        again = line and kernels is UNSHARDED
        return (partial(recomputed, separable) if again else separable)(x_BHWC, *line), ()

    def _pool(self, x_BHWC: Array, *line: Array) -> Array:
        """The largest is rectified: that is what the rectified ones' largest is, and smaller."""
        if self.stride == 1:
            return rectified(x_BHWC, *line)
        return jax.nn.relu(max_pool(normalise.scale_shift(x_BHWC, *line), self.window, self.stride))


class Trunk(nnx.Module):
    """Images to one token per channel of the last block."""

    def __init__(self, c: HSViTConfig, key: Array) -> None:
        self.tokens = c.conv_channels[-1]
        self.blocks, self.embed, self.dropout = nnx.List(), nnx.Dict(), c.dropout
        if not c.convolution:
            return
        *block_keys, embed_key = jax.random.split(key, len(c.conv_channels) + 1)
        c_in = c.image_channels
        apart = (False, c.separable)
        for block_key, c_out, kernel, stride in zip(
            block_keys, c.conv_channels, c.conv_kernels, c.pool_strides, strict=True
        ):
            self.blocks.append(ConvBlock(c_in, c_out, kernel, stride, block_key, apart))
            c_in, apart = c_out, (c.separable,) * 2
        self.embed = nnx.Dict(layers.torch_linear(embed_key, (), prod(c.map_size), c.embed_dim))

    def __call__(
        self, images_BHWC: Array, context: ForwardContext, kernels: GroupShard, first_token: Array
    ) -> Array:
        """(B, H, W, C) → (B, channel tokens, D), for the kernels that are here.

        first_token: number of the first of them among all the network's, which keys its dropout.
        """
        x_BHWC = images_BHWC
        for i, block in enumerate(self.blocks):
            x_BHWC = block(x_BHWC, context, kernels, whole=i == 0)
        if not self.blocks:  # colour planes, repeated R, G, B, R, … up to the number of tokens
            batch, rows, columns, channels = x_BHWC.shape
            x_BPC = x_BHWC.reshape(batch, rows * columns, channels)
            repeats = -(-self.tokens // channels)
            return jnp.tile(x_BPC.swapaxes(1, 2), (1, repeats, 1))[:, : self.tokens]
        return channel_tokens(self.embed, x_BHWC, self.dropout, context, first_token)


def channel_tokens(
    embed: nnx.Dict,
    x_BHWC: Array,
    dropout: float,
    context: ForwardContext,
    first_token: Array | int,
) -> Array:
    """Each channel's map (row by row) through a linear layer, ReLU and dropout: (B, C, D).

    first_token: number of the first channel that is here, which keys its dropout.
    """
    batch, rows, columns, channels = x_BHWC.shape
    x_BPC = x_BHWC.reshape(batch, rows * columns, channels)
    context.call_hook("maps", lambda: x_BHWC)
    kernel_PD = embed["kernel"][...].astype(x_BPC.dtype)
    bias_D = embed["bias"][...].astype(x_BPC.dtype)
    z_BCD = jax.nn.relu(jnp.einsum("bpc,pd->bcd", x_BPC, kernel_PD) + bias_D[None, None])
    if context.key_words is not None and dropout:
        tokens = first_token + jnp.arange(channels)
        examples = context.example_ids_B.reshape(-1, 1, 1)
        words = (*context.key_words, 0, examples, tokens.reshape(1, -1, 1))
        z_BCD *= dropout_scale(words, z_BCD.shape, dropout).astype(z_BCD.dtype)
    return z_BCD
