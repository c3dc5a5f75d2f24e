"""Networks of inverted residual blocks: MobileNetV2 and EfficientNet, described by a `Plan`.

A block expands the channels by a 1×1 convolution, filters each by a depthwise one, may weight them
by squeeze-and-excitation, and projects them by another 1×1 convolution.

Source: Sandler et al., "MobileNetV2: Inverted Residuals and Linear Bottlenecks", figure 3; Hu et
al., "Squeeze-and-Excitation Networks", section 3; Tan and Le, "EfficientNet", section 4.
"""

import abc
import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from hsvit_jax.models import layers
from hsvit_jax.models.conv_layers import SqueezeExcite
from hsvit_jax.models.convnets.convnet import Conv, ConvNetConfig, ConvNorm
from hsvit_jax.models.network import UNSHARDED, ForwardContext, GroupShard

Array = jax.Array


class Inverted(NamedTuple):
    """The description of a block.

    Attributes:
        squeeze: channels inside squeeze-and-excitation, 0 for none.
        residual: whether the block's input is added.
        rate: of stochastic depth.
        drop: single 'values', or 'paths', an example's whole residual branch.
    """

    expand: Conv | None
    depthwise: Conv
    project: Conv
    squeeze: int = 0
    residual: bool = False
    rate: float = 0.0
    drop: str = "paths"

    def convs(self) -> tuple[Conv, ...]:
        """In order of computation."""
        first = () if self.expand is None else (self.expand,)
        return (*first, self.depthwise, self.project)


class Plan(NamedTuple):
    """The first convolution, the blocks, and the last convolution, which is 1×1."""

    stem: Conv
    blocks: tuple[Inverted, ...]
    top: Conv


@dataclasses.dataclass(frozen=True)
class InvertedConfig(ConvNetConfig):
    """Sizes of a network that a `Plan` describes."""

    @abc.abstractmethod
    def plan(self) -> Plan:
        """All convolutions."""

    @abc.abstractmethod
    def places(self) -> list[tuple[int, int]]:
        """The stage of each block, and its number there."""

    def conv(self, c_in: int, c_out: int, size: int, **more: Any) -> Conv:
        """A convolution with the network's activation and BatchNorm, unless `more` has others."""
        usual = {"activation": self.activation, "momentum": self.bn_momentum, "eps": self.bn_eps}
        return Conv(c_in, c_out, size, **{**usual, **more})

    def convs(self) -> Iterator[Conv]:
        plan = self.plan()
        yield plan.stem
        for block in plan.blocks:
            yield from block.convs()
        yield plan.top

    def features(self, key: Array) -> nnx.Module:
        return Features(self.plan(), key)


class Block(nnx.Module):
    """The module of an `Inverted`."""

    def __init__(self, block: Inverted, key: Array) -> None:
        self.residual, self.rate, self.drop = block.residual, block.rate, block.drop
        expand_key, depthwise_key, squeeze_key, project_key = jax.random.split(key, 4)
        self.expand = None if block.expand is None else ConvNorm(block.expand, expand_key)
        self.depthwise = ConvNorm(block.depthwise, depthwise_key)
        spec, inner = block.depthwise, block.squeeze
        gate = SqueezeExcite(spec.c_out, inner, spec.activation, squeeze_key) if inner else None
        self.squeeze = gate
        self.project = ConvNorm(block.project, project_key)

    def __call__(
        self, x_BHWC: Array, context: ForwardContext, kernels: GroupShard, index: int
    ) -> Array:
        """(B, H, W, C) → (B, H', W', C'), this device's channels; index keys the masks."""
        y_BHWC = x_BHWC if self.expand is None else self.expand(x_BHWC, context, kernels)
        y_BHWC = self.depthwise(y_BHWC, context, kernels)
        if self.squeeze is not None:
            y_BHWC = self.squeeze(y_BHWC, kernels)
        y_BHWC = self.project(y_BHWC, context, kernels)
        if not self.residual:
            return y_BHWC
        return x_BHWC + self._dropped(y_BHWC, context, kernels, index * layers.STREAMS_PER_BLOCK)

    def _dropped(
        self, y_BHWC: Array, context: ForwardContext, kernels: GroupShard, stream: int
    ) -> Array:
        """y after stochastic depth; a value's mask does not depend on the channels' sharding."""
        if self.drop == "paths":
            return layers.drop_path(y_BHWC, self.rate, context, stream)
        if not self.rate or context.key_words is None:
            return y_BHWC
        ones = jnp.ones((*y_BHWC.shape[:3], self.project.spec.c_out), y_BHWC.dtype)
        return y_BHWC * kernels.slice(layers.dropout(ones, self.rate, context, stream), 3)


class Features(nnx.Module):
    """The backbone: images to the last map."""

    def __init__(self, plan: Plan, key: Array) -> None:
        stem_key, top_key, *keys = jax.random.split(key, len(plan.blocks) + 2)
        self.stem = ConvNorm(plan.stem, stem_key)
        self.blocks = nnx.List(Block(b, k) for b, k in zip(plan.blocks, keys, strict=True))
        self.top = ConvNorm(plan.top, top_key)

    def __call__(
        self, images_BHWC: Array, context: ForwardContext, kernels: GroupShard = UNSHARDED
    ) -> Array:
        """(B, H, W, C) → (B, h, w, C'), this device's channels."""
        x_BHWC = self.stem(images_BHWC, context, kernels)
        for i, block in enumerate(self.blocks):
            x_BHWC = block(x_BHWC, context, kernels, i)
        return self.top(x_BHWC, context, kernels)
