"""Token mixers: softmax, performer, linformer, nystrom, fnet and mlp_mixer.

Each maps `(x_BTD, context, stream)` to (B, T, D). The cost of performer, linformer and nystrom is
linear in the tokens, fnet's nearly. Softmax is quadratic, and mlp_mixer in its parameters too.
Where the ViX authors' code differs from the mixers' papers, this follows the code.

N heads, E width of a head, S keys, R random features, P projected positions, M landmarks.
"""

from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from hsvit_jax.models import layers
from hsvit_jax.models.family import scaled
from hsvit_jax.models.layers import Linear
from hsvit_jax.models.network import ForwardContext
from hsvit_jax.models.vix.mixer_config import PINV_STEPS, Mixing
from hsvit_jax.ops import remat
from hsvit_jax.ops.normalise import moments_dtype, wide

Array = jax.Array


def rotate(x_BNTE: Array) -> Array:
    """Rotates the pair (2j, 2j + 1) of token t by t·10000^(−2j/E): rotary positions.

    The first token, CLS, has t = 0. Source: Su et al., "RoFormer", section 3.2; ViX paper, table 6.
    """
    *_, tokens, width = x_BNTE.shape
    rates = np.float32(1) / np.float32(10000) ** (np.arange(0, width, 2, dtype=np.float32) / width)
    angles = np.arange(tokens, dtype=np.float32)[:, None] * rates[None]
    dtype = moments_dtype(x_BNTE)
    cos, sin = (jnp.asarray(f(angles), dtype)[None, None] for f in (np.cos, np.sin))
    pairs = x_BNTE.astype(dtype).reshape(*x_BNTE.shape[:-1], width // 2, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    turned = jnp.stack([even * cos - odd * sin, odd * cos + even * sin], -1)
    return turned.reshape(x_BNTE.shape).astype(x_BNTE.dtype)


def _softmax(scores: Array, like: Array) -> Array:
    return jax.nn.softmax(wide(scores), axis=-1).astype(like.dtype)


def _maximum(x_B: Array, context: ForwardContext, coupled: bool) -> Array:
    """Returns the maximum of each example, or of the batch if `coupled`; all axes stay."""
    if not coupled:
        return x_B.max(tuple(range(1, x_B.ndim)), keepdims=True)
    largest = x_B.max(keepdims=True)
    return lax.all_gather(largest, context.batch_axes).max(0) if context.batch_axes else largest


class Softmax(layers.MultiHeadAttention):
    """Scaled dot-product attention; queries, keys and values without bias."""

    def __init__(self, m: Mixing, tokens: int, dim: int, key: Array) -> None:
        super().__init__(
            dim,
            m.heads,
            key,
            dim_head=m.head_dim,
            bias=False,
            project=m.project_one or m.heads > 1 or m.head_dim != dim,
            dropout=m.mixer_dropout,
            attention_dropout=m.attention_dropout,
            init=m.init,
        )
        self.rope = m.rope

    def project(self, x_BTD: Array) -> tuple[Array, Array, Array]:
        q, k, v = super().project(x_BTD)
        return (rotate(q), rotate(k), v) if self.rope else (q, k, v)


class Performer(nnx.Module):
    """FAVOR+: the softmax kernel by positive orthogonal random features; its maps have biases.

    The features are statistics: drawn once, saved and never trained. The local window and the ReLU
    kernel that the ViX paper names are unused in its code. Source: Choromanski et al., "Rethinking
    Attention with Performers", section 2.
    """

    def __init__(self, m: Mixing, tokens: int, dim: int, key: Array) -> None:
        self.m = m
        *keys, out_key, feature_key = jax.random.split(key, 5)
        self.query, self.key, self.value = (Linear(dim, m.inner, k, init=m.init) for k in keys)
        self.out = Linear(m.inner, dim, out_key, init=m.init)
        self.features = nnx.BatchStat(orthogonal_features(feature_key, m.feature_count, m.head_dim))

    def _positive(self, x_BNTE: Array, shift: Callable[[Array], Array]) -> Array:
        """Returns exp(u − |x|²/2 − shift(u)) + 1e-4, up to a factor that cancels: (B, N, T, R)."""
        # The stabilising shift has a gradient, as in the authors' code: the 1e-4 is not shifted.
        u, norm = feature_exponents(x_BNTE, self.features[...], x_BNTE.shape[-1] ** -0.25)
        return jnp.exp(u - norm - shift(u)) + 1e-4

    def __call__(self, x_BTD: Array, context: ForwardContext, stream: int) -> Array:
        """(B, T, D) → (B, T, D), O(T·R·E) per head."""
        m, maps = self.m, (self.query, self.key, self.value)
        q, k, v = (layers.split_heads(f(x_BTD), m.heads) for f in maps)
        o_BNTE = remat.recomputed(lambda *qkv: self._attend(*qkv, context), q, k, v)
        y_BTD = self.out(layers.merge_heads(o_BNTE))
        return layers.dropout(y_BTD, m.mixer_dropout, context, stream)

    def _attend(self, q: Array, k: Array, v: Array, context: ForwardContext) -> Array:
        if self.m.rope:
            q, k = rotate(q), rotate(k)
        q_BNTR = self._positive(q, lambda u: u.max(-1, keepdims=True))
        k_BNTR = self._positive(k, lambda u: _maximum(u, context, self.m.batch_coupling))
        values_BNRE = jnp.einsum("bntr,bnte->bnre", k_BNTR.astype(v.dtype), v)
        norm = jnp.einsum("bntr,bnr->bnt", q_BNTR, k_BNTR.sum(2))[..., None]
        o_BNTE = jnp.einsum("bntr,bnre->bnte", q_BNTR.astype(v.dtype), values_BNRE)
        return (wide(o_BNTE) / norm).astype(v.dtype)


def feature_exponents(x: Array, features_RE: Array, scale: float = 1.0) -> tuple[Array, Array]:
    """Returns x·w of each random feature w, and |x|²/2, of x times `scale`: (…, R) and (…, 1).

    Products of the features exp(x·w − |x|²/2) estimate the softmax kernel.
    """
    x = wide(x)
    u = (x * scale) @ features_RE.astype(x.dtype).T
    return u, 0.5 * scale**2 * jnp.square(x).sum(-1, keepdims=True)


def orthogonal_rows(keys: Iterable[Array], rows: int, width: int) -> Array:
    """Draws (rows, width) of length 1, orthogonal in blocks of `width`, each with a key."""
    squares = [jnp.linalg.qr(layers.normal(k, (width, width)))[0].T for k in keys]
    return jnp.concatenate(squares)[:rows]


def orthogonal_features(key: Array, rows: int, width: int) -> Array:
    """Draws (rows, width): orthogonal in blocks of `width`, with the norms of Gaussian rows."""
    length_key, *keys = jax.random.split(key, -(-rows // width) + 1)
    lengths = jnp.linalg.norm(layers.normal(length_key, (rows, width)), axis=1, keepdims=True)
    return orthogonal_rows(keys, rows, width) * lengths


class Linformer(nnx.Module):
    """Attention to keys, also the values, that are projected along the sequence to P positions.

    Rotary positions rotate the keys before the projection, not the values. Source: Wang et al.,
    "Linformer", section 4.
    """

    def __init__(self, m: Mixing, tokens: int, dim: int, key: Array) -> None:
        self.m = m
        q_key, k_key, p_key, out_key = jax.random.split(key, 4)
        self.query = Linear(dim, m.inner, q_key, bias=False, init=m.init)
        keys_width = m.head_dim if m.one_kv_head else m.inner
        self.key = Linear(dim, keys_width, k_key, bias=False, init=m.init)
        start = layers.uniform(p_key, (tokens, m.projections), m.projections**-0.5)
        self.sequence_kernel = nnx.Param(start)
        self.out = Linear(m.inner, dim, out_key, init=m.init)

    def __call__(self, x_BTD: Array, context: ForwardContext, stream: int) -> Array:
        """(B, T, D) → (B, T, D), O(T·P·E) per head."""
        m = self.m
        q_BNTE = layers.split_heads(self.query(x_BTD), m.heads)
        values = layers.split_heads(self.key(x_BTD), 1 if m.one_kv_head else m.heads)
        sequence_TP = self.sequence_kernel[...].astype(x_BTD.dtype)

        def project(x_BNTE: Array) -> Array:
            x_BNPE = jnp.einsum("bnte,tp->bnpe", x_BNTE, sequence_TP)
            return jnp.broadcast_to(x_BNPE, (x_BNPE.shape[0], m.heads, *x_BNPE.shape[2:]))

        v_BNPE = project(values)
        k_BNPE = project(rotate(values)) if m.rope else v_BNPE
        q_BNTE = rotate(q_BNTE) if m.rope else q_BNTE

        def attend(q_BNTE: Array, k_BNPE: Array, v_BNPE: Array) -> Array:
            scores_BNTP = jnp.einsum("bnte,bnpe->bntp", q_BNTE, k_BNPE) * m.head_dim**-0.5
            weights_BNTP = _softmax(scores_BNTP, q_BNTE)
            weights_BNTP = layers.dropout(weights_BNTP, m.mixer_dropout, context, stream)
            return jnp.einsum("bntp,bnpe->bnte", weights_BNTP, v_BNPE)

        return self.out(layers.merge_heads(remat.recomputed(attend, q_BNTE, k_BNPE, v_BNPE)))


class Nystrom(nnx.Module):
    """The softmax matrix by M landmarks, means of segments, and an iterative pseudo-inverse.

    Zero tokens at the front pad the sequence to a multiple of M; they are keys, and part of the
    landmarks. A convolution of the values along the sequence is added. Source: Xiong et al.,
    "Nyströmformer", section 3.
    """

    def __init__(self, m: Mixing, tokens: int, dim: int, key: Array) -> None:
        self.m = m
        qkv_key, out_key, conv_key = jax.random.split(key, 3)
        self.qkv = Linear(dim, 3 * m.inner, qkv_key, bias=False, init=m.init)
        self.out = Linear(m.inner, dim, out_key, init=m.init)
        taps = m.residual_kernel
        self.residual_kernel = nnx.Param(layers.uniform(conv_key, (m.heads, taps), taps**-0.5))

    def __call__(self, x_BTD: Array, context: ForwardContext, stream: int) -> Array:
        """(B, T, D) → (B, T, D), O(T·M·E) per head."""
        m, tokens = self.m, x_BTD.shape[1]
        segment = -(-tokens // m.landmarks)
        front = segment * m.landmarks - tokens
        padded = jnp.pad(x_BTD, ((0, 0), (front, 0), (0, 0)))
        q, k, v = (
            layers.split_heads(part, m.heads) for part in jnp.split(self.qkv(padded), 3, axis=-1)
        )
        o_BNTE = remat.recomputed(lambda *qkv: self._attend(*qkv, front, context), q, k, v)
        y_BTD = self.out(layers.merge_heads(o_BNTE))
        return layers.dropout(y_BTD, m.mixer_dropout, context, stream)

    def _attend(self, q: Array, k: Array, v: Array, front: int, context: ForwardContext) -> Array:
        m = self.m
        if m.rope:
            q, k = rotate(q), rotate(k)
        q = q * m.head_dim**-0.5

        def landmarks(x_BNSE: Array) -> Array:
            batch, heads, _, width = x_BNSE.shape
            return x_BNSE.reshape(batch, heads, m.landmarks, -1, width).mean(3)

        def kernel(q_BNTE: Array, k_BNSE: Array) -> Array:
            return _softmax(jnp.einsum("bnte,bnse->bnts", q_BNTE, k_BNSE), v)

        q_BNME, k_BNME = landmarks(q), landmarks(k)
        inverse_BNMM = self._inverse(wide(kernel(q_BNME, k_BNME)), context).astype(v.dtype)
        landmark_values_BNME = inverse_BNMM @ (kernel(q_BNME, k) @ v)
        o_BNTE = kernel(q[:, :, front:], k_BNME) @ landmark_values_BNME
        return o_BNTE + along_sequence(v, self.residual_kernel[...].astype(v.dtype))[:, :, front:]

    def _inverse(self, a_BNMM: Array, context: ForwardContext) -> Array:
        """Returns the pseudo-inverse of non-negative matrices, by steps from Aᵀ/(‖A‖₁·‖A‖∞)."""
        coupled = self.m.batch_coupling
        rows = _maximum(a_BNMM.sum(-1, keepdims=True), context, coupled)
        columns = _maximum(a_BNMM.sum(-2, keepdims=True), context, coupled)
        one = jnp.eye(a_BNMM.shape[-1], dtype=a_BNMM.dtype)[None, None]
        z = a_BNMM.swapaxes(-1, -2) / (rows * columns)
        for _ in range(PINV_STEPS):
            az = a_BNMM @ z
            z = 0.25 * z @ (13 * one - az @ (15 * one - az @ (7 * one - az)))
        return z


def along_sequence(x_BNTE: Array, kernel_NK: Array) -> Array:
    """Convolves each head's sequence, zero-padded, with its filter of odd length K: (B, N, T, E).

    Products with a banded matrix over windows that overlap by K − 1 take twice the filter's
    multiply-adds, at the speed of a matrix product, and are linear in T.
    """
    batch, heads, tokens, width = x_BNTE.shape
    taps = kernel_NK.shape[1]
    piece = max(taps - 1, 16)
    count = -(-tokens // piece)
    back = (count + 1) * piece - tokens - taps // 2
    padded = jnp.pad(x_BNTE, ((0, 0), (0, 0), (taps // 2, back), (0, 0)))
    pieces = padded.reshape(batch, heads, count + 1, piece, width)
    windows = jnp.concatenate([pieces[:, :, :-1], pieces[:, :, 1:]], axis=3)
    offset = np.arange(2 * piece)[:, None] - np.arange(piece)[None]
    inside = (offset >= 0) & (offset < taps)
    band_NSL = kernel_NK[:, np.clip(offset, 0, taps - 1)] * jnp.asarray(inside, x_BNTE.dtype)[None]
    out = jnp.einsum("bncse,nsl->bncle", windows, band_NSL)
    return out.reshape(batch, heads, count * piece, width)[:, :, :tokens]


class FNet(nnx.Module):
    """The real part of the Fourier transform over channels and tokens (CLS included)."""

    def __init__(self, m: Mixing, tokens: int, dim: int, key: Array) -> None:
        """Has no parameters."""

    def __call__(self, x_BTD: Array, context: ForwardContext, stream: int) -> Array:
        """(B, T, D) → (B, T, D), without dropout."""
        return jnp.fft.fftn(wide(x_BTD), axes=(1, 2)).real.astype(x_BTD.dtype)


class TokenMLP(layers.FeedForward):
    """MLP-Mixer's token mixing: a feed-forward over the tokens of each channel."""

    def __init__(self, m: Mixing, tokens: int, dim: int, key: Array) -> None:
        hidden = scaled(tokens, m.expansion)
        super().__init__(tokens, hidden, key, dropout=m.mixer_dropout, init=m.init)

    def __call__(self, x_BTD: Array, context: ForwardContext, stream: int) -> Array:
        """(B, T, D) → (B, T, D)."""
        return super().__call__(x_BTD.swapaxes(1, 2), context, stream).swapaxes(1, 2)


_MIXERS: dict[str, type[nnx.Module]] = {
    "softmax": Softmax,
    "performer": Performer,
    "linformer": Linformer,
    "nystrom": Nystrom,
    "fnet": FNet,
    "mlp_mixer": TokenMLP,
}


def build(m: Mixing, tokens: int, dim: int, key: Array) -> nnx.Module:
    """Returns the mixer of `m` for sequences of `tokens` vectors of width `dim`, drawn by `key`."""
    return _MIXERS[m.mixer](m, tokens, dim, key)
