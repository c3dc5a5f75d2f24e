"""HSViT's attention groups: independent transformers, batched over a leading G axis.

Source: HSViT paper, section 3.1: each group adds a CLS token to its N image-level embeddings and
attends within its 1 + N tokens; 4.1: a block is one multi-head self-attention. The positions, the
pre-normalisation and dropout are those of the authors' code.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from hsvit_jax.models import layers
from hsvit_jax.models.hsvit.sizes import HSViTConfig
from hsvit_jax.models.network import ForwardContext
from hsvit_jax.ops import normalise, varying
from hsvit_jax.ops.attention import attention, attention_weights

Array = jax.Array


class Block(nnx.Module):
    """One attention block of all groups: z + MHSA(LN(z)), without a feed-forward."""

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
        self,
        z_GBTD: Array,
        counters: tuple[Array | int, ...] | None,
        context: ForwardContext,
        *,
        cls_only: bool,
    ) -> Array:
        """The block's output, (G, B, T, D), or of the CLS token alone, (G, B, 1, D).

        Args:
            z_GBTD: each group's tokens, its CLS token first.
            counters: of the attention weights' dropout (`dropout.counter_bits`); None for none.
            cls_only: compute the CLS token's output alone.
        """
        g, batch, _, d = z_GBTD.shape
        y_GBTD = normalise.layer_norm(
            z_GBTD, self.norm_scale[...][:, None, None], self.norm_bias[...][:, None, None]
        )
        kernel_GJDD = self.qkv_kernel[...].astype(z_GBTD.dtype)
        bias_GJD = self.qkv_bias[...]

        def project(y: Array, first: int, last: int) -> list[Array]:
            """Queries, keys and values from first to last, each (G, B, N, T, D/N).

            Split, not indexed: the gradient of a split is one concatenation.
            """
            count = last - first
            kernel = kernel_GJDD[:, first:last].swapaxes(1, 2).reshape(g, d, count * d)
            out = jnp.einsum("gbtd,gde->gbte", y, kernel)
            out = layers.add_bias(out, bias_GJD[:, first:last].reshape(g, 1, 1, count * d))
            out = out.reshape(g, batch, -1, count, self.heads, d // self.heads)
            return [x.squeeze(3).swapaxes(2, 3) for x in jax.lax.split(out, (1,) * count, axis=3)]

        z_in = z_GBTD[:, :, :1] if cls_only else z_GBTD
        if cls_only:
            (q_GBNTE,), (k_GBNSE, v_GBNSE) = project(y_GBTD[:, :, :1], 0, 1), project(y_GBTD, 1, 3)
        else:
            q_GBNTE, k_GBNSE, v_GBNSE = project(y_GBTD, 0, 3)
        context.call_hook("group attention", lambda: attention_weights(q_GBNTE, k_GBNSE))
        rate = self.rate if counters is not None else 0.0
        o_GBNTE = attention(rate, q_GBNTE, k_GBNSE, v_GBNSE, counters or ())
        o_GBTD = o_GBNTE.swapaxes(2, 3).reshape(z_in.shape)
        out = jnp.einsum("gbtd,gde->gbte", o_GBTD, self.out_kernel[...].astype(z_GBTD.dtype))
        return layers.add_bias(z_in + out, self.out_bias[...][:, None, None])


class Groups(nnx.Module):
    """The encoders of all attention groups; every parameter has a leading G axis.

    Attributes:
        count: groups of the network, also those of other devices.
    """

    def __init__(self, c: HSViTConfig, key: Array) -> None:
        cls_key, position_key, *block_keys = jax.random.split(key, c.depth + 2)
        self.count = c.groups
        self.cls = nnx.Param(layers.normal(cls_key, (c.groups, c.embed_dim)))
        self.position = nnx.Param(layers.normal(position_key, (c.groups, c.tokens, c.embed_dim)))
        self.blocks = nnx.List(Block(c, k) for k in block_keys)
        if c.votes == "learned":
            self.vote = nnx.Param(jnp.full(c.groups, 1 / c.groups, jnp.float32))

    def __call__(self, z_BGTD: Array, context: ForwardContext, group_ids_G: Array) -> Array:
        """The encoders' output at the CLS tokens, (G, B, D).

        Args:
            z_BGTD: image-level embeddings, T − 1 of each group.
            group_ids_G: numbers of these groups among the network's, which key their dropout.
        """
        z_GBTD = self.embed(z_BGTD)
        for i in range(len(self.blocks)):
            z_GBTD = self.attend(i, z_GBTD, context, group_ids_G)
        return z_GBTD[:, :, 0]

    def embed(self, z_BGTD: Array) -> Array:
        """Each group's tokens behind its CLS token, with positions: (G, B, T, D)."""
        batch, g, _, d = z_BGTD.shape
        cls_GD = varying.vary_like(self.cls[...], z_BGTD)
        # Narrowed last, as in `layers.prepend`.
        cls_GBTD = jnp.broadcast_to(cls_GD[:, None, None], (g, batch, 1, d)).astype(z_BGTD.dtype)
        z_GBTD = jnp.concatenate([cls_GBTD, z_BGTD.swapaxes(0, 1)], axis=2)
        return layers.add_bias(z_GBTD, self.position[...][:, None])

    def attend(self, i: int, z_GBTD: Array, context: ForwardContext, group_ids_G: Array) -> Array:
        """Block i: (G, B, T, D) → (G, B, T, D), of the last block (G, B, 1, D), the CLS tokens."""
        counters = None
        if context.key_words is not None:
            group, examples = group_ids_G, context.example_ids_B
            counters = (*context.key_words, i + 1, group.reshape(-1, 1, 1, 1, 1))
            counters += (examples.reshape(1, -1, 1, 1, 1),)
        last = i == len(self.blocks) - 1
        return self.blocks[i](z_GBTD, counters, context, cls_only=last)
