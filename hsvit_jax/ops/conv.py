"""Stride-1 convolutions, with what surrounds them in a network: before, a normalisation and a ReLU;
after, the moments that the next normalisation wants.

On an accelerator XLA fuses all that with its own convolution. On a CPU it does neither well, and a
feature map is larger than the caches: so everything runs in slices of a few images, which are read
once, and each slice is convolved by the formula that is quickest for its shape (`winograd`,
`patches`, `direct`). XLA's convolution is the reference in the tests.
"""

import contextlib
import contextvars
from collections.abc import Collection, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from hsvit_jax.ops import conv_direct, conv_im2col, conv_winograd, tiling
from hsvit_jax.ops.normalise import moments_dtype, scale_shift
from hsvit_jax.ops.remat import recomputed
from hsvit_jax.ops.varying import vary_alike

Array = jax.Array

#: The first that fits is taken.
_FORMULAS = (conv_im2col, conv_winograd, conv_direct)

_KINDS = ("dense", "depthwise")
_PLAIN: contextvars.ContextVar[Collection[str]] = contextvars.ContextVar("plain", default=())


@contextlib.contextmanager
def as_on_accelerators(kinds: Collection[str] = _KINDS) -> Iterator[None]:
    """What is traced meanwhile has XLA's own convolutions on a CPU too, and whole: FLOPs are then
    those that accelerators compute, and the literature counts.

    Args:
        kinds: of the convolutions, 'dense', 'depthwise' or both.
    """
    token = _PLAIN.set(kinds)
    try:
        yield
    finally:
        _PLAIN.reset(token)


def in_slices(kind: str = "dense") -> bool:
    """Whether the back end is one that had better work on a few images at a time."""
    return jax.default_backend() == "cpu" and kind not in _PLAIN.get()


def conv2d(x_BHWC: Array, kernel_HWIO: Array) -> Array:
    """Stride-1 convolution with symmetric zero padding k//2, odd square kernels, no bias.

    Takes images (B, H, W, I) and kernels (k, k, I, O), returns (B, H, W, O) in the images' dtype.
    """
    return rectified_conv2d(x_BHWC, (), kernel_HWIO, moments=False)[0]


def rectified(x_BHWC: Array, *line: Array) -> Array:
    """relu(x·factor + shift), for `line` the two, each (C,); x itself without a line."""
    return jax.nn.relu(scale_shift(x_BHWC, *line)) if line else x_BHWC


def rectified_conv2d(
    x_BHWC: Array, line: tuple[Array, ...], kernel_HWIO: Array, *, moments: bool
) -> tuple[Array, tuple[Array, ...]]:
    """`conv2d` of `rectified(x, *line)`, of which only x is kept for the gradient.

    Returns (B, H, W, O) and, if `moments` are wanted and at hand, for `BatchNorm.affine` the mean
    and variance of each channel in each of S equal parts of the batch, both (S, O); otherwise ().
    """
    x_BHWC, kernel_HWIO, *line = vary_alike(x_BHWC, kernel_HWIO.astype(x_BHWC.dtype), *line)
    if not in_slices():

        def plain(x: Array, kernel: Array, *line: Array) -> Array:
            return conv_direct.conv2d_xla(rectified(x, *line), kernel)

        run = partial(recomputed, plain) if line else plain
        return run(x_BHWC, kernel_HWIO, *line), ()
    formula = next(f for f in _FORMULAS if f.fits(x_BHWC.shape, kernel_HWIO.shape))
    y_BHWO, *found = _convolve(formula, moments, x_BHWC, kernel_HWIO, tuple(line))
    return y_BHWO, tuple(found)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _convolve(
    formula: ModuleType, moments: bool, x_BHWC: Array, kernel_HWIO: Array, line: tuple[Array, ...]
) -> tuple[Array, ...]:
    weights = formula.weights(kernel_HWIO)

    def one(x: Array) -> tuple[Array, ...]:
        y = tiling.join_planes(formula.product(rectified(x, *line), weights))
        if not moments:
            return (y,)
        wide = y.astype(moments_dtype(y))
        mean = wide.mean((0, 1, 2))
        return y, mean, jnp.square(wide - mean[None, None, None]).mean((0, 1, 2))

    parts, *found = lax.map(one, tiling.cut_batch(x_BHWC, formula.SLICE, kernel_HWIO.shape[3]))
    return tiling.join_batch(parts), *found


def _convolve_fwd(
    formula: ModuleType, moments: bool, x_BHWC: Array, kernel_HWIO: Array, line: tuple[Array, ...]
) -> tuple[tuple[Array, ...], Any]:
    out = _convolve(formula, moments, x_BHWC, kernel_HWIO, line)
    return out, (x_BHWC, kernel_HWIO, line, out[:2] if moments else ())


def _convolve_bwd(
    formula: ModuleType, moments: bool, kept: Any, grads: tuple[Array, ...]
) -> tuple[Array, Array, tuple[Array, ...]]:
    """In one pass over x, y and y's gradient: the gradients of x, of the kernel and of the line."""
    x_BHWC, kernel_HWIO, line, made = kept
    size, _, _, c_out = kernel_HWIO.shape
    turned = formula.weights(kernel_HWIO[::-1, ::-1].swapaxes(2, 3))

    def rectified_planes(x: Array, *line: Array) -> list[list[Array]]:
        return [[rectified(p, *line) for p in row] for row in tiling.cut_planes(x, formula.STRIDE)]

    def one(total: Any, part: Any) -> tuple[Any, Array]:
        x, grad, of_moments = part
        if moments:
            grad = grad + _through_moments(*of_moments)
        _, back = jax.vjp(rectified_planes, x, *line)
        terms = formula.kernel_terms(rectified(x, *line), grad, size)
        grad_x, *grad_line = back(formula.product(grad, turned))
        total = jax.tree.map(lambda t, new: t + new.astype(t.dtype), total, (terms, grad_line))
        return total, grad_x

    def cut(x: Array) -> Array:
        return tiling.split(x, parts)

    x_parts = tiling.cut_batch(x_BHWC, formula.SLICE, c_out)
    parts = len(x_parts)
    of_moments = (cut(made[0]), made[1], *grads[1:]) if moments else ()
    xs = (x_parts, cut(grads[0]), of_moments)
    first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), (xs[0], xs[1]))
    terms = jax.eval_shape(lambda x, g: formula.kernel_terms(x, g, size), *first)
    zeros = jax.tree.map(
        lambda a: vary_alike(jnp.zeros(a.shape, moments_dtype(a)), x_BHWC)[0], (terms, list(line))
    )
    (terms, grad_line), grad_x = lax.scan(one, zeros, xs)
    grad_kernel = formula.kernel_gradient(terms, kernel_HWIO.shape).astype(kernel_HWIO.dtype)
    return tiling.join_batch(grad_x), grad_kernel, tuple(grad_line)


def _through_moments(y: Array, mean: Array, grad_mean: Array, grad_var: Array) -> Array:
    """y's gradient by way of its mean and variance over all axes but the last."""
    count = y.size // y.shape[3]
    mean, grad_mean, grad_var = (v[None, None, None] for v in (mean, grad_mean, grad_var))
    return ((grad_mean + 2 * grad_var * (y - mean)) / count).astype(y.dtype)


_convolve.defvjp(_convolve_fwd, _convolve_bwd)
