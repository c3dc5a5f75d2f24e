"""Stride-1 convolutions, fused with the normalisation and ReLU before them and the moments after.

An accelerator's XLA fuses these with its own convolution, which is also the reference in the tests.
On a CPU it does neither well, and a feature map is larger than the caches: so slices of a few
images are read once, normalised, convolved by the first formula that fits (`conv_im2col`,
`conv_winograd`, `conv_direct`) and averaged.

Measured with jax 0.10.2 on two cores with 256-bit vectors: a C2A2 training step is 1.30–1.47 times
as fast with Winograd's formula and the loop over slices (docs/performance.md). The loop can go when
XLA for CPU fuses elementwise operations and reductions into its convolutions.
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

_FORMULAS = (conv_im2col, conv_winograd, conv_direct)

_KINDS = ("dense", "depthwise", "attention")
_PLAIN: contextvars.ContextVar[Collection[str]] = contextvars.ContextVar("plain", default=())
_PLATFORM: contextvars.ContextVar[str] = contextvars.ContextVar("platform", default="")


@contextlib.contextmanager
def as_on_accelerators(kinds: Collection[str] = _KINDS) -> Iterator[None]:
    """Traces XLA's own convolutions, and attention of all groups at once, as accelerators run them.

    Their FLOPs are those that the literature counts, and their batch may be symbolic.

    Args:
        kinds: convolutions, 'dense' and 'depthwise', and 'attention'.
    """
    token = _PLAIN.set(kinds)
    try:
        yield
    finally:
        _PLAIN.reset(token)


@contextlib.contextmanager
def traced_for(platform: str) -> Iterator[None]:
    """Traces programs for devices of a platform, such as 'tpu', that this process does not have."""
    token = _PLATFORM.set(platform)
    try:
        yield
    finally:
        _PLATFORM.reset(token)


def platform() -> str:
    """The platform that programs are traced for: that of jax's devices, or of `traced_for`."""
    return _PLATFORM.get() or jax.default_backend()


def use_cpu_formulas(kind: str = "dense") -> bool:
    """Whether convolutions of this kind, or attention, are computed by the CPU's formulas."""
    return platform() == "cpu" and kind not in _PLAIN.get()


def conv2d(x_BHWC: Array, kernel_HWIO: Array) -> Array:
    """Stride-1 convolution with symmetric zero padding k//2, no bias.

    Args:
        kernel_HWIO: odd and square, (k, k, I, O).

    Returns:
        (B, H, W, O), in the images' dtype.
    """
    return rectified_conv2d(x_BHWC, (), kernel_HWIO, moments=False)[0]


def rectified(x_BHWC: Array, *affine: Array) -> Array:
    """relu(x·factor + shift), for `affine` the two, each (C,); without them x itself."""
    return jax.nn.relu(scale_shift(x_BHWC, *affine)) if affine else x_BHWC


def rectified_conv2d(
    x_BHWC: Array, affine: tuple[Array, ...], kernel_HWIO: Array, *, moments: bool
) -> tuple[Array, tuple[Array, ...]]:
    """`conv2d` of `rectified(x, *affine)`, of which only x is kept for the gradient.

    Args:
        affine: see `rectified`.
        kernel_HWIO: odd and square, (k, k, I, O).
        moments: return those of the output, where the CPU's formulas compute them.

    Returns:
        (B, H, W, O), and for `BatchNorm.affine` the mean and variance of each channel in S equal
        parts of the batch, both (S, O), or ().
    """
    x_BHWC, kernel_HWIO, *affine = vary_alike(x_BHWC, kernel_HWIO.astype(x_BHWC.dtype), *affine)
    if not use_cpu_formulas():

        def plain(x: Array, kernel: Array, *affine: Array) -> Array:
            return conv_direct.conv2d_xla(rectified(x, *affine), kernel)

        run = partial(recomputed, plain) if affine else plain
        return run(x_BHWC, kernel_HWIO, *affine), ()
    formula = next(f for f in _FORMULAS if f.fits(x_BHWC.shape, kernel_HWIO.shape))
    y_BHWO, *output_moments = _convolve(formula, moments, x_BHWC, kernel_HWIO, tuple(affine))
    return y_BHWO, tuple(output_moments)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _convolve(
    formula: ModuleType, moments: bool, x_BHWC: Array, kernel_HWIO: Array, affine: tuple[Array, ...]
) -> tuple[Array, ...]:
    weights = formula.weights(kernel_HWIO)

    def one(x: Array) -> tuple[Array, ...]:
        y = tiling.join_planes(formula.product(rectified(x, *affine), weights))
        if not moments:
            return (y,)
        wide = y.astype(moments_dtype(y))
        mean = wide.mean((0, 1, 2))
        return y, mean, jnp.square(wide - mean[None, None, None]).mean((0, 1, 2))

    slices = tiling.cut_batch(x_BHWC, formula.SLICE, kernel_HWIO.shape[3])
    parts, *output_moments = lax.map(one, slices)
    return tiling.join_batch(parts), *output_moments


def _convolve_fwd(
    formula: ModuleType, moments: bool, x_BHWC: Array, kernel_HWIO: Array, affine: tuple[Array, ...]
) -> tuple[tuple[Array, ...], Any]:
    out = _convolve(formula, moments, x_BHWC, kernel_HWIO, affine)
    return out, (x_BHWC, kernel_HWIO, affine, out[:2] if moments else ())


def _convolve_bwd(
    formula: ModuleType, moments: bool, residuals: Any, grads: tuple[Array, ...]
) -> tuple[Array, Array, tuple[Array, ...]]:
    """The gradients of x, the kernel and the affine map, in one pass over x, y and y's gradient."""
    x_BHWC, kernel_HWIO, affine, output = residuals
    size, _, _, c_out = kernel_HWIO.shape
    rotated = formula.weights(kernel_HWIO[::-1, ::-1].swapaxes(2, 3))

    def rectified_planes(x: Array, *affine: Array) -> list[list[Array]]:
        return [
            [rectified(p, *affine) for p in row] for row in tiling.cut_planes(x, formula.STRIDE)
        ]

    def one(total: Any, part: Any) -> tuple[Any, Array]:
        x, grad, of_moments = part
        if moments:
            grad = grad + _through_moments(*of_moments)
        _, back = jax.vjp(rectified_planes, x, *affine)
        terms = formula.kernel_terms(rectified(x, *affine), grad, size)
        grad_x, *grad_affine = back(formula.product(grad, rotated))
        total = jax.tree.map(lambda t, new: t + new.astype(t.dtype), total, (terms, grad_affine))
        return total, grad_x

    def cut(x: Array) -> Array:
        return tiling.split(x, parts)

    x_parts = tiling.cut_batch(x_BHWC, formula.SLICE, c_out)
    parts = len(x_parts)
    of_moments = (cut(output[0]), output[1], *grads[1:]) if moments else ()
    xs = (x_parts, cut(grads[0]), of_moments)
    first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), (xs[0], xs[1]))
    terms = jax.eval_shape(lambda x, g: formula.kernel_terms(x, g, size), *first)
    zeros = jax.tree.map(
        lambda a: vary_alike(jnp.zeros(a.shape, moments_dtype(a)), x_BHWC)[0], (terms, list(affine))
    )
    (terms, grad_affine), grad_x = lax.scan(one, zeros, xs)
    grad_kernel = formula.kernel_gradient(terms, kernel_HWIO.shape).astype(kernel_HWIO.dtype)
    return tiling.join_batch(grad_x), grad_kernel, tuple(grad_affine)


def _through_moments(y: Array, mean: Array, grad_mean: Array, grad_var: Array) -> Array:
    """The part of y's gradient that comes from its mean and variance over all axes but the last."""
    count = y.size // y.shape[3]
    mean, grad_mean, grad_var = (v[None, None, None] for v in (mean, grad_mean, grad_var))
    return ((grad_mean + 2 * grad_var * (y - mean)) / count).astype(y.dtype)


_convolve.defvjp(_convolve_fwd, _convolve_bwd)
