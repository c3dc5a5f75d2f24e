"""LeViX: a convolutional stem and blocks without pre-normalisation, any mixer (LeViT, LeViP, …).

Blocks x + mix(x), x + FF(x); a linear classifier on the mean over all tokens. No CLS token, no
positions. With softmax the attention is LeViT's: BatchNorm after each projection and a GELU before
the last. With the other mixers the network has no normalisation at all.

Source: the ViX paper, tables 3 and 4, and the authors' notebooks; for the attention the LeViT
paper, without its position biases.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from hsvit_jax.models import conv_layers, layers, settings
from hsvit_jax.models.layers import BatchNorm, Linear
from hsvit_jax.models.network import BoundModules, ForwardContext, Network
from hsvit_jax.models.vix import mixer_config, mixers, stems
from hsvit_jax.ops.activations import gelu

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class LeViXConfig(stems.StemSizes):
    """Sizes of a LeViX."""

    stem_channels: tuple[int, ...] = settings.width(
        (32, 64), "channels of the stem's convolutions but the last"
    )


class LeViTAttention(nnx.Module):
    """Softmax attention with BatchNorm on queries, keys, values and output, GELU before the last.

    The output's BatchNorm has an initial scale of 0: the branch is 0 at first.
    """

    def __init__(self, c: LeViXConfig, key: Array) -> None:
        self.heads, self.rate, dim = c.heads, c.dropout, c.embed_dim
        *keys, out_key = jax.random.split(key, 4)
        self.query, self.key, self.value = (Linear(dim, c.inner, k, bias=False) for k in keys)
        self.query_norm, self.key_norm, self.value_norm = (BatchNorm(c.inner) for _ in keys)
        self.out, self.out_norm = Linear(c.inner, dim, out_key), BatchNorm(dim)
        self.out_norm.scale = nnx.Param(jnp.zeros(dim))

    def __call__(self, x_BTD: Array, context: ForwardContext, stream: int) -> Array:
        """(B, T, D) → (B, T, D)."""
        how = {"train": context.train, "batch_axes": context.batch_axes}

        def project(linear: Linear, norm: BatchNorm) -> Array:
            return layers.split_heads(norm(linear(x_BTD), **how), self.heads)

        q, k = project(self.query, self.query_norm), project(self.key, self.key_norm)
        v = project(self.value, self.value_norm)
        o_BNTE = layers.attend(q, k, v, 0.0, context, stream)
        y_BTD = self.out(gelu(layers.merge_heads(o_BNTE)))
        return layers.dropout(self.out_norm(y_BTD, **how), self.rate, context, stream)


def _block(c: LeViXConfig, key: Array) -> layers.Block:
    mixer_key, ff_key = jax.random.split(key)
    if c.mixer == "softmax":
        mixer = LeViTAttention(c, mixer_key)
    else:
        mixer = mixers.build(c, c.tokens, c.embed_dim, mixer_key)
    feed_forward = layers.FeedForward(c.embed_dim, c.mlp_dim, ff_key, dropout=c.dropout)
    return layers.Block(c.embed_dim, mixer, feed_forward, norm=lambda dim, eps: lambda x: x)


class LeViX(Network):
    """Parameters: {'stem', 'encoder' (blocks), 'head'}."""

    modules: ClassVar = {
        "stem": stems.ConvStem,
        "encoder": lambda c, key: layers.Encoder(
            _block(c, k) for k in jax.random.split(key, c.depth)
        ),
        "head": lambda c, key: Linear(c.embed_dim, c.num_classes, key),
    }

    def logits(self, bound: BoundModules, images_BHWC: Array, context: ForwardContext) -> Array:
        x_BTD = bound["encoder"](conv_layers.flatten(bound["stem"](images_BHWC)), context)
        return bound["head"](x_BTD.mean(1))


FAMILY = mixer_config.family(
    LeViXConfig,
    name="levix",
    variants={  # ViX paper, tables 3 and 4
        "levit": {"mixer": "softmax"},
        "levip": {"mixer": "performer"},
        "levil": {"mixer": "linformer"},
        "levin": {"mixer": "nystrom"},
    },
    default_variant="levip",
    network=LeViX,
    automatic={"stem_strides": stems.strides_for("stem_channels", 1)},
)
