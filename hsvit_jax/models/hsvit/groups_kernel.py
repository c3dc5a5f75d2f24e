"""All blocks of HSViT's attention groups as one fused kernel, forward and backward (Pallas).

A program instance takes one group and a few images through every block: a group's tokens are read
once, only its CLS output is written, and scores, attention weights and dropout masks exist on chip
alone. What a gradient needs beyond the input is each later block's input, which the forward pass
then writes too; the backward kernel computes the rest again. `groups.Groups` without it is the same
function in XLA's words, the reference and what runs unless `model.encoder` says otherwise.

Written for Triton on GPUs (sizes padded to powers of two, products to at least 16) and Mosaic on
TPUs; on CPU Pallas interprets it, slowly, for the tests. Not measured: it lowers for both, and its
numbers are XLA's when interpreted, but no GPU or TPU has run it. JAX 0.11 deprecates Pallas's
Triton back end. cuDNN's attention (`jax.nn.dot_product_attention`) is no way around: it takes
half precision alone, and no dropout.

Beyond the legend of `layers`: L blocks, E width of a head, J queries, keys, values; T, D and E are
padded with zeros inside the kernels, and padded tokens are masked as keys.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from hsvit_jax.ops import varying
from hsvit_jax.ops.dropout import counter_at, drop_below

Array = jax.Array

#: Least size of a side of a product that Triton compiles; rows of a bfloat16 tile on TPU.
_LEAST = 16
#: Images that a program instance takes, at most: their weight gradients are added up in it.
_IMAGES = 16
_QUERY, _KEY, _VALUE = range(3)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Static sizes: tokens, embedding, heads, dropout rate; what compiles the kernel."""

    tokens: int
    width: int
    heads: int
    rate: float
    target: str

    def padded(self, size: int) -> int:
        """The size of an axis on chip."""
        if self.target == "tpu":
            return -(-size // _LEAST) * _LEAST
        return max(_LEAST, pl.next_power_of_2(size))


def runs(z_GBTD: Array) -> bool:
    """Whether the kernel can run on tokens here.

    Pallas's interpreter does not know values that differ between a mesh's devices, so on CPU not
    inside a mesh's region; there a caller takes XLA's version.
    """
    return jax.default_backend() != "cpu" or not jax.typeof(z_GBTD).mat.varying


def encode(
    z_GBTD: Array,
    blocks: Mapping[str, Array],
    base_GBL: Array | None,
    *,
    heads: int,
    rate: float = 0.0,
    target: str | None = None,
) -> Array:
    """Tokens, CLS first and positions added, through all blocks: each group's CLS output (G, B, D).

    z_GBTD: float32 or bfloat16, of which the output has the dtype; sums are float32. blocks: as
    `groups.Block`'s parameters, stacked: norm_scale, norm_bias, out_bias (G, L, D), qkv_kernel
    (G, L, 3, D, D), qkv_bias (G, L, 3, D), out_kernel (G, L, D, D). base_GBL: of
    `layers.counter_base` for every block, group and image, None for no dropout (rate is then
    ignored). target: 'gpu', 'tpu' or 'cpu' (interpreted); by default this process's. Masks, and
    gradients of everything, are those of the XLA version. Raises ValueError for another target.
    """
    target = target or jax.default_backend()
    if target not in ("cpu", "gpu", "tpu"):
        raise ValueError(
            f"the fused encoder is written for gpu and tpu (on cpu interpreted), not {target}: "
            "set model.encoder='xla'"
        )
    g, batch, tokens, width = z_GBTD.shape
    depth = blocks["norm_scale"].shape[1]
    if base_GBL is None:
        rate, base_GBL = 0.0, jnp.zeros((g, batch, depth), jnp.uint32)
    plan = _Plan(tokens, width, heads, rate, target)
    rows, columns = plan.padded(tokens), plan.padded(width)
    z = jnp.pad(z_GBTD, [(0, 0), (0, 0), (0, rows - tokens), (0, columns - width)])
    args = (base_GBL.reshape(g, batch, depth, 1, 1), *_packed(plan, blocks, z.dtype))
    out_GB1D = _encode(plan, z, *(varying.vary_like(x, z) for x in args))
    return out_GB1D[:, :, 0, :width]


def _packed(plan: _Plan, blocks: Mapping[str, Array], dtype: jnp.dtype) -> tuple[Array, ...]:
    """Parameters as the kernels read them: a matrix for each head, whole rows of D, zeros around.

    norm (G, L, 2, 1, D); qkv (G, L, N, 3, E, D), its bias (G, L, N, 3, 1, E); out (G, L, N, E, D),
    its bias (G, L, 1, D). Vectors have the dtype of sums, rounded as the computation's.
    """
    g, depth, _ = blocks["norm_scale"].shape
    n, d = plan.heads, plan.width
    wide = _sums(dtype)

    def pad(x: Array, **sides: int) -> Array:
        """The last two axes made of the sizes given, with zeros."""
        sizes = (sides.get("rows", x.shape[-2]), sides["columns"])
        edges = [(0, to - own) for to, own in zip(sizes, x.shape[-2:], strict=True)]
        return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + edges)

    def vector(x: Array) -> Array:
        return x.astype(dtype).astype(wide)

    columns, head_columns = plan.padded(d), plan.padded(d // n)
    norm = jnp.stack([blocks["norm_scale"], blocks["norm_bias"]], 2)[:, :, :, None].astype(wide)
    qkv = blocks["qkv_kernel"].astype(dtype).reshape(g, depth, 3, d, n, d // n)
    qkv = qkv.transpose(0, 1, 4, 2, 5, 3)
    qkv_bias = vector(blocks["qkv_bias"]).reshape(g, depth, 3, n, d // n).swapaxes(2, 3)
    out = blocks["out_kernel"].astype(dtype).reshape(g, depth, n, d // n, d)
    return (
        pad(norm, columns=columns),
        pad(qkv, rows=head_columns, columns=columns),
        pad(qkv_bias[:, :, :, :, None], columns=head_columns),
        pad(out, rows=head_columns, columns=columns),
        pad(vector(blocks["out_bias"])[:, :, None], columns=columns),
    )


# --- What a block computes for one image ---------------------------------------------------------


def _sums(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype of sums and moments."""
    return jnp.promote_types(dtype, jnp.float32)


def _dot(a: Array, b: Array, axes: tuple[int, int]) -> Array:
    """Product of two matrices over an axis of each; float32 without TF32's shortened mantissas."""
    precision = None if a.dtype == jnp.bfloat16 else lax.Precision.HIGHEST
    return lax.dot_general(
        a,
        b,
        (((axes[0],), (axes[1],)), ((), ())),
        precision=precision,
        preferred_element_type=_sums(a.dtype),
    )


def _within(x: Array, size: int, axis: int) -> Array:
    """Where an axis is not padding."""
    return lax.broadcasted_iota(jnp.int32, x.shape, axis) < size


def _kept(x: Array, size: int, axis: int) -> Array:
    """x with zeros in the padding of an axis."""
    return x if x.shape[axis] == size else jnp.where(_within(x, size, axis), x, 0)


def _first_row(x: Array) -> Array:
    """Row 0, (1, columns); neither compiler cuts a value in registers."""
    return jnp.where(_within(x, 1, 0), x, 0).sum(0, keepdims=True)


def _norm(plan: _Plan, z: Array, refs: Any, block: Any) -> tuple[Array, Array, Array]:
    """Layer norm's output in z's dtype; what was normalised and 1/deviation, in that of sums."""
    wide = z.astype(_sums(z.dtype))
    centred = _kept(wide - wide.sum(1, keepdims=True) / plan.width, plan.width, 1)
    inverse = lax.rsqrt(jnp.square(centred).sum(1, keepdims=True) / plan.width + 1e-5)
    normal = centred * inverse
    y = normal * refs["norm"][0, block, 0] + refs["norm"][0, block, 1]
    return y.astype(z.dtype), normal, inverse


def _queries(x: Array, last: bool) -> Array:
    """Rows that ask: all tokens, or in the last block CLS, as often as a product has rows."""
    if not last:
        return x
    return jnp.broadcast_to(_first_row(x), (_LEAST, x.shape[1]))


def _project(x: Array, refs: Any, block: Any, head: Array, j: int) -> Array:
    """Queries, keys or values of one head, (rows, E)."""
    out = _dot(x, refs["qkv"][0, block, head, j], (1, 1)) + refs["qkv_bias"][0, block, head, j]
    return out.astype(x.dtype)


def _weights(plan: _Plan, q: Array, k: Array, base: Array, head: Array, last: bool) -> tuple:
    """Attention weights (rows, T) over the tokens that are there, and their dropout factors.

    A factor is found by its place among the head's (T, T) weights, (1, T) in the last block, as in
    `layers.attention`.
    """
    scores = _dot(q, k, (1, 1)) * (plan.width // plan.heads) ** -0.5
    scores = jnp.where(_within(scores, plan.tokens, 1), scores, -jnp.inf)
    weights = jnp.exp(scores - scores.max(1, keepdims=True))
    weights = weights / weights.sum(1, keepdims=True)
    if not plan.rate:
        return weights, None
    row = jnp.asarray(head, jnp.int32)
    if not last:
        row = row * plan.tokens + lax.broadcasted_iota(jnp.int32, scores.shape, 0)
    position = row * plan.tokens + lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    bits = counter_at(base, position.astype(jnp.uint32))
    keep = bits >= jnp.uint32(drop_below(plan.rate))
    return weights, jnp.where(keep, jnp.asarray(1 / (1 - plan.rate), weights.dtype), 0)


def _dropped(weights: Array, factors: Array | None) -> Array:
    return weights if factors is None else weights * factors


def _loop(low: int, high: int, body: Callable[[Array, Any], Any], value: Any) -> Any:
    """A loop whose counter is int32 whatever the default; none for no steps."""
    if low >= high:
        return value
    return lax.fori_loop(np.int32(low), np.int32(high), body, value)


# --- Forward -------------------------------------------------------------------------------------


def _block(plan: _Plan, z: Array, refs: Any, image: Array, block: Any, last: bool) -> Array:
    """One block of one image: (T, D) → same, or equal rows of CLS's output for the last."""
    y, _, _ = _norm(plan, z, refs, block)
    asking = _queries(y, last)

    def head(n: Array, total: Array) -> Array:
        q = _project(asking, refs, block, n, _QUERY)
        k = _project(y, refs, block, n, _KEY)
        v = _project(y, refs, block, n, _VALUE)
        weights = _dropped(*_weights(plan, q, k, refs["base"][0, image, block], n, last))
        o = _dot(weights.astype(v.dtype), v, (1, 0)).astype(v.dtype)
        return total + _dot(o, refs["out"][0, block, n], (1, 0))

    start = _queries(z, last)
    total = _loop(0, plan.heads, head, jnp.zeros(start.shape, _sums(z.dtype)))
    return (start.astype(total.dtype) + total + refs["out_bias"][0, block]).astype(z.dtype)


_INPUTS = ("z", "base", "norm", "qkv", "qkv_bias", "out", "out_bias")


def _forward_kernel(plan: _Plan, save: bool, *refs: Any) -> None:
    named = dict(zip((*_INPUTS, "cls", "saved"), refs, strict=False))
    depth = named["norm"].shape[1]

    def image(i: Array, _: None) -> None:
        def block(at: Array, z: Array) -> Array:
            z = _block(plan, z, named, i, at, last=False)
            if save:
                named["saved"][0, i, at] = z
            return z

        z = _loop(0, depth - 1, block, named["z"][0, i])
        named["cls"][0, i] = _first_row(_block(plan, z, named, i, depth - 1, last=True))

    _loop(0, named["z"].shape[1], image, None)


# --- Backward ------------------------------------------------------------------------------------


def _add(ref: Any, at: tuple[Any, ...], value: Array, image: Array) -> None:
    """Adds to what earlier images of this instance left; the first finds nothing sensible there."""
    at = (0, 0, *at)
    ref[at] = jnp.where(image == 0, value, ref[at] + value)


def _block_gradient(
    plan: _Plan, z: Array, grad: Array, refs: Any, image: Array, block: Any, last: bool
) -> Array:
    """The gradient (T, D) of a block's input z from that of its output, and its weights' added up.

    grad, in the dtype of sums: (T, D); for the last block all rows but the first are zero.
    """
    y, normal, inverse = _norm(plan, z, refs, block)
    asking = _queries(y, last)
    near = grad.astype(z.dtype)
    _add(refs["d_out_bias"], (block,), grad.sum(0, keepdims=True), image)

    def head(n: Array, totals: tuple[Array, Array]) -> tuple[Array, Array]:
        asked, told = totals  # gradients of the rows that ask, and of all
        q = _project(asking, refs, block, n, _QUERY)
        k = _project(y, refs, block, n, _KEY)
        v = _project(y, refs, block, n, _VALUE)
        weights, factors = _weights(plan, q, k, refs["base"][0, image, block], n, last)
        dropped = _dropped(weights, factors).astype(v.dtype)
        o = _dot(dropped, v, (1, 0)).astype(v.dtype)
        _add(refs["d_out"], (block, n), _dot(o, near, (0, 0)), image)

        grad_o = _dot(near, refs["out"][0, block, n], (1, 1)).astype(v.dtype)
        grad_weights = _dropped(_dot(grad_o, v, (1, 1)), factors)
        inner = (weights * grad_weights).sum(1, keepdims=True)
        scale = (plan.width // plan.heads) ** -0.5
        grad_scores = (weights * (grad_weights - inner) * scale).astype(v.dtype)
        parts = (
            (_QUERY, asking, _dot(grad_scores, k, (1, 0))),
            (_KEY, y, _dot(grad_scores, q, (0, 0))),
            (_VALUE, y, _dot(dropped, grad_o, (0, 0))),
        )
        for j, x, part in parts:
            _add(refs["d_qkv_bias"], (block, n, j), part.sum(0, keepdims=True), image)
            part = part.astype(v.dtype)
            _add(refs["d_qkv"], (block, n, j), _dot(part, x, (0, 0)), image)
            back = _dot(part, refs["qkv"][0, block, n, j], (1, 0))
            asked, told = (asked + back, told) if j == _QUERY else (asked, told + back)
        return asked, told

    zeros = (jnp.zeros(asking.shape, grad.dtype), jnp.zeros(y.shape, grad.dtype))
    asked, told = _loop(0, plan.heads, head, zeros)

    def at_tokens(x: Array) -> Array:
        """The gradient of the rows that ask, where they came from."""
        if not last:
            return x
        return jnp.where(_within(told, 1, 0), x.sum(0, keepdims=True), 0)

    grad_y = told + at_tokens(asked)
    _add(refs["d_norm"], (block, 0), (grad_y * normal).sum(0, keepdims=True), image)
    _add(refs["d_norm"], (block, 1), grad_y.sum(0, keepdims=True), image)
    grad_normal = grad_y * refs["norm"][0, block, 0]
    mean = grad_normal.sum(1, keepdims=True) / plan.width
    along = (grad_normal * normal).sum(1, keepdims=True) / plan.width
    grad_z = _kept(inverse * (grad_normal - mean - normal * along), plan.width, 1)
    return grad_z + at_tokens(grad)


def _backward_kernel(plan: _Plan, *refs: Any) -> None:
    gradients = ("d_norm", "d_qkv", "d_qkv_bias", "d_out", "d_out_bias")
    depth = refs[_INPUTS.index("norm")].shape[1]
    saved = ("saved",) if depth > 1 else ()
    named = dict(zip((*_INPUTS, *saved, "d_cls", "d_z", *gradients), refs, strict=True))

    def image(i: Array, _: None) -> None:
        def back(at: Any, grad: Array, *, last: bool = False) -> Array:
            first = isinstance(at, int) and at == 0
            z = named["z"][0, i] if first else named["saved"][0, i, at - 1]
            return _block_gradient(plan, z, grad, named, i, at, last)

        grad = named["d_cls"][0, i].astype(_sums(named["z"].dtype))
        grad = jnp.broadcast_to(grad, (_LEAST, grad.shape[1]))
        grad = back(depth - 1, jnp.where(_within(grad, 1, 0), grad, 0), last=True)
        grad = _loop(1, depth - 1, lambda step, grad: back(depth - 1 - step, grad), grad)
        if depth > 1:
            grad = back(0, grad)
        named["d_z"][0, i] = grad.astype(named["z"].dtype)

    _loop(0, named["z"].shape[1], image, None)


# --- Calls ---------------------------------------------------------------------------------------


def _call(plan: _Plan, kernel: Callable[..., None], ins: list, outs: list, name: str) -> list:
    """Runs a kernel over (groups, blocks of images).

    ins: (array, kind); outs: (shape, dtype, kind). Kinds: 'images' have axes G, B, …, of which an
    instance sees one group and its images; 'weights' G, …, of which it sees one group's; 'sums' G,
    blocks of images, …, of which it sees its own.
    """
    z = ins[0][0]
    groups, batch = z.shape[:2]
    images = max(b for b in range(1, min(batch, _IMAGES) + 1) if batch % b == 0)
    instances = batch // images

    def spec(shape: tuple[int, ...], kind: str) -> pl.BlockSpec:
        axes = {"images": (1, images), "weights": (1,), "sums": (1, 1)}[kind]
        rest = (0,) * (len(shape) - len(axes))
        whole = kind == "weights"
        return pl.BlockSpec(
            (*axes, *shape[len(axes) :]), lambda g, b: (g, *rest) if whole else (g, b, *rest)
        )

    shapes = [
        (shape if kind != "sums" else (groups, instances, *shape[1:]), dtype, kind)
        for shape, dtype, kind in outs
    ]
    params = {}
    if plan.target == "gpu":
        from jax.experimental.pallas import triton

        params = {"compiler_params": triton.CompilerParams()}
    return pl.pallas_call(
        kernel,
        out_shape=[
            jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(z).mat)
            for shape, dtype, _ in shapes
        ],
        grid=(groups, instances),
        in_specs=[spec(x.shape, kind) for x, kind in ins],
        out_specs=[spec(shape, kind) for shape, _, kind in shapes],
        interpret=plan.target == "cpu",
        name=name,
        **params,
    )(*(x for x, _ in ins))


def _inputs(z: Array, base: Array, weights: tuple[Array, ...]) -> list:
    return [(z, "images"), (base, "images"), *((w, "weights") for w in weights)]


def _forward(plan: _Plan, save: bool, z: Array, base: Array, *weights: Array) -> list:
    """CLS outputs (G, B, 1, D), and, to save, every later block's input (G, B, L − 1, T, D)."""
    groups, batch, rows, columns = z.shape
    depth = base.shape[2]
    save = save and depth > 1
    outs = [((groups, batch, 1, columns), z.dtype, "images")]
    if save:
        outs.append(((groups, batch, depth - 1, rows, columns), z.dtype, "images"))
    kernel = partial(_forward_kernel, plan, save)
    return _call(plan, kernel, _inputs(z, base, weights), outs, "groups_forward")


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _encode(plan: _Plan, z: Array, base: Array, *weights: Array) -> Array:
    return _forward(plan, False, z, base, *weights)[0]


def _encode_fwd(plan: _Plan, z: Array, base: Array, *weights: Array) -> tuple[Array, tuple]:
    cls, *saved = _forward(plan, True, z, base, *weights)
    return cls, (z, base, weights, saved)


def _encode_bwd(plan: _Plan, residuals: tuple, grad_cls: Array) -> tuple[Array | None, ...]:
    """Instances run in any order, so each writes its own sums for the weights, added up here."""
    z, base, weights, saved = residuals
    ins = [*_inputs(z, base, weights), *((x, "images") for x in (*saved, grad_cls))]
    outs = [(z.shape, z.dtype, "images")]
    outs += [(w.shape, _sums(w.dtype), "sums") for w in weights]
    grad_z, *sums = _call(plan, partial(_backward_kernel, plan), ins, outs, "groups_backward")
    grads = [s.sum(1).astype(w.dtype) for s, w in zip(sums, weights, strict=True)]
    return grad_z, None, *grads


_encode.defvjp(_encode_fwd, _encode_bwd)
