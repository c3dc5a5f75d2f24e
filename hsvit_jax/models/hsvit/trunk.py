"""HSViT's trunk: convolution blocks, and each kernel's feature map as an image-level embedding.

Source: HSViT paper, section 3.1 (downsampling by pooling, one token per feature map) and 4.1 (a
block is two convolutions and a max pool). A separable convolution, which section 4.2 proposes for
fewer FLOPs, is a depthwise k×k and then a pointwise 1×1, one BatchNorm and ReLU after the pair
(Xception's paper, section 4.7, finds no activation between them best). The convolution of the image
itself stays dense, as in Xception and MobileNet: depthwise kernels on one or three channels would
leave the network one or three filters.
"""

from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from hsvit_jax.models import conv_layers, layers
from hsvit_jax.models.hsvit.sizes import HSViTConfig
from hsvit_jax.models.network import UNSHARDED, ForwardContext, GroupShard
from hsvit_jax.ops import normalise, varying
from hsvit_jax.ops.conv import rectified, rectified_conv2d
from hsvit_jax.ops.conv_depthwise import depthwise_conv2d
from hsvit_jax.ops.dropout import dropout_scale
from hsvit_jax.ops.max_pool import max_pool
from hsvit_jax.ops.remat import recomputed

Array = jax.Array


class ConvBlock(nnx.Module):
    """Two convolutions, each with BatchNorm and ReLU, then a max pool if the stride is over 1.

    The kernel of a separable convolution is pointwise, (1, 1, I, O), after a depthwise one,
    (k, k, 1, I). Source: HSViT paper, section 4.1.

    Args:
        kernel: k of the first convolution and the window of the pool; the second's is 3.
        stride: of the pool.
        separable: of each convolution.
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
        for key_, size, inputs, split in zip(
            jax.random.split(key), (kernel, 3), (c_in, c_out), separable, strict=True
        ):
            if split:
                key_, depthwise_key = jax.random.split(key_)
                depthwise = layers.uniform(depthwise_key, (size, size, 1, inputs), 1 / size)
                self.depthwise.append(nnx.Param(depthwise))
                size = 1
            bound = (size * size * inputs) ** -0.5
            self.kernels.append(nnx.Param(layers.uniform(key_, (size, size, inputs, c_out), bound)))
        self.norms = nnx.List(layers.BatchNorm(c_out) for _ in range(2))

    def __call__(
        self, x_BHWC: Array, context: ForwardContext, kernels: GroupShard, *, replicated: bool
    ) -> Array:
        """(B, H, W, I) → (B, H/stride, W/stride, O), this device's channels.

        BatchNorm and ReLU of a convolution's output are computed by its consumer, and recomputed
        for the gradient, so that of the two maps one is kept; not where the map is all-gathered,
        which would happen twice.

        Args:
            x_BHWC: this device's channels; all of them if `replicated`.
            kernels: this device's part of the kernels.
            replicated: every device has all channels of x.
        """
        affine: tuple[Array, ...] = ()
        for i, norm in enumerate(self.norms):
            shard = UNSHARDED if replicated and i == 0 else kernels
            x_BHWC, moments = self._convolve(i, x_BHWC, affine, context, shard)
            affine = norm.affine(
                x_BHWC, train=context.train, batch_axes=context.batch_axes, moments=moments
            )
        return recomputed(self._pool, x_BHWC, *affine)

    def _convolve(
        self,
        i: int,
        x_BHWC: Array,
        affine: tuple[Array, ...],
        context: ForwardContext,
        kernels: GroupShard,
    ) -> tuple[Array, tuple[Array, ...]]:
        """The i-th convolution of relu(affine(x)), and the moments of its output where computed.

        A depthwise kernel needs this device's channels alone: the all-gather before the pointwise
        one is as large as for a dense convolution.
        """
        kernel_HWIO, depthwise = self.kernels[i], i - (len(self.kernels) - len(self.depthwise))
        if depthwise < 0:
            if kernels is not UNSHARDED:
                x_BHWC, affine = kernels.all_gather(rectified(x_BHWC, *affine), 3), ()
            return rectified_conv2d(x_BHWC, affine, kernel_HWIO[...], moments=context.train)

        def separable(x: Array, *affine: Array) -> Array:
            x = depthwise_conv2d(rectified(x, *affine), self.depthwise[depthwise][...])
            return kernels.all_gather(x, 3) @ kernel_HWIO[...].astype(x.dtype)[0, 0]

        recompute = affine and kernels is UNSHARDED
        return (partial(recomputed, separable) if recompute else separable)(x_BHWC, *affine), ()

    def _pool(self, x_BHWC: Array, *affine: Array) -> Array:
        """Max-pool before ReLU: the same result (ReLU is monotonic) on fewer values."""
        if self.stride == 1:
            return rectified(x_BHWC, *affine)
        return jax.nn.relu(
            max_pool(normalise.scale_shift(x_BHWC, *affine), self.window, self.stride)
        )


class Projection(nnx.Module):
    """Each channel's map, flattened row by row, through a linear layer, ReLU and dropout.

    Source: HSViT paper, section 3.1, for the flattening; the authors' code for the rest.
    """

    def __init__(self, c: Any, key: Array) -> None:
        self.embed, self.dropout = layers.Linear(prod(c.map_size), c.embed_dim, key), c.dropout

    def __call__(self, x_BHWC: Array, context: ForwardContext, first_token: Array | int) -> Array:
        """(B, H, W, C) → (B, C, D); first_token: the first channel's number, keys its dropout."""
        x_BHWC = context.tap("maps", x_BHWC)
        x_BPC, channels = conv_layers.flatten(x_BHWC), x_BHWC.shape[3]
        # Narrowed last, as in `layers.Linear`.
        kernel_PD = varying.vary_like(self.embed.kernel[...], x_BPC).astype(x_BPC.dtype)
        z_BCD = jnp.einsum("bpc,pd->bcd", x_BPC, kernel_PD)
        z_BCD = jax.nn.relu(layers.add_bias(z_BCD, self.embed.bias[...]))
        if context.key_words is not None and self.dropout:
            tokens = first_token + jnp.arange(channels)
            examples = context.example_ids_B.reshape(-1, 1, 1)
            counters = (*context.key_words, 0, examples, tokens.reshape(1, -1, 1))
            z_BCD *= dropout_scale(counters, z_BCD.shape, self.dropout).astype(z_BCD.dtype)
        return z_BCD


class Trunk(Projection):
    """Images to image-level embeddings, one token for each kernel of the last block."""

    def __init__(self, c: HSViTConfig, key: Array) -> None:
        self.tokens, self.blocks = c.conv_channels[-1], nnx.List()
        if not c.convolves:
            return
        *block_keys, embed_key = jax.random.split(key, len(c.conv_channels) + 1)
        super().__init__(c, embed_key)
        c_in = c.image_channels
        separable = (False, c.separable)
        for block_key, c_out, kernel, stride in zip(
            block_keys, c.conv_channels, c.conv_kernels, c.pool_strides, strict=True
        ):
            self.blocks.append(ConvBlock(c_in, c_out, kernel, stride, block_key, separable))
            c_in, separable = c_out, (c.separable,) * 2

    def __call__(
        self, images_BHWC: Array, context: ForwardContext, kernels: GroupShard, first_token: Array
    ) -> Array:
        """(B, H, W, C) → (B, C', D), a token for each of this device's C' kernels.

        Args:
            kernels: this device's part of the kernels.
            first_token: number of its first among all the network's, which keys its dropout.
        """
        x_BHWC = images_BHWC
        for i, block in enumerate(self.blocks):
            x_BHWC = block(x_BHWC, context, kernels, replicated=i == 0)
        if not self.blocks:  # colour planes, repeated R, G, B, R, … up to the number of tokens
            planes_BCP = conv_layers.flatten(x_BHWC).swapaxes(1, 2)
            repeats = -(-self.tokens // planes_BCP.shape[1])
            return jnp.tile(planes_BCP, (1, repeats, 1))[:, : self.tokens]
        return super().__call__(x_BHWC, context, first_token)
