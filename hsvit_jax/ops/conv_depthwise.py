"""Depthwise convolution: each channel with its own kernel, the cheap half of a separable one.

XLA for CPU runs grouped convolutions channel by channel. Measured with jax 0.10.2 on two cores, for
64×32×32×64 values and 3×3 kernels: 161 ms forward and 257 ms for both gradients; as shifted
multiply-adds, the kernel's gradient image by image, 6 and 36 ms. When XLA for CPU vectorises over
the channels of a grouped convolution, `conv2d_xla` alone can stay.
"""

import jax
import jax.numpy as jnp
from jax import lax

from hsvit_jax.ops.conv import use_cpu_formulas
from hsvit_jax.ops.conv_direct import Pads, conv2d_xla
from hsvit_jax.ops.normalise import moments_dtype
from hsvit_jax.ops.varying import vary_like

Array = jax.Array

#: From this size of a kernel on, its gradient is summed row by row in a loop: a step of FastViT or
#: SMT compiles in 0.8 of the time, and runs in 1.05 of it.
_LOOPED = 7


def depthwise_conv2d(
    x_BHWC: Array, kernel_HW1C: Array, stride: int = 1, pads: Pads | None = None, dilation: int = 1
) -> Array:
    """Depthwise convolution with square kernels, no bias.

    Args:
        kernel_HW1C: a k×k kernel for each channel, or as many for each, one after another.
        pads: zeros (before, after) rows and columns; defaults to k//2 everywhere.

    Returns:
        (B, H', W', C), of the kernel's channels, in the images' dtype.
    """
    kernel = vary_like(jnp.asarray(kernel_HW1C, x_BHWC.dtype), x_BHWC)
    if not use_cpu_formulas("depthwise"):
        return conv2d_xla(x_BHWC, kernel, stride, pads, dilation)
    if kernel.shape[3] != x_BHWC.shape[3]:
        x_BHWC = jnp.repeat(x_BHWC, kernel.shape[3] // x_BHWC.shape[3], axis=3)
    size = kernel.shape[0]
    usual = ((size // 2, size // 2),) * 2
    if dilation == size % 2 == 1 and pads in (None, usual) and (stride == 1 or size >= _LOOPED):
        return _shifted(x_BHWC, kernel)[:, ::stride, ::stride]
    return _strided(x_BHWC, kernel, stride, usual if pads is None else pads, dilation)


def _strided(x_BHWC: Array, kernel_HW1C: Array, stride: int, pads: Pads, dilation: int) -> Array:
    """Generalises `_shifted` to any stride, padding and dilation; sums in at least float32."""
    wide = kernel_HW1C.astype(moments_dtype(kernel_HW1C))
    size, padded = kernel_HW1C.shape[0], jnp.pad(x_BHWC, ((0, 0), *pads, (0, 0)))
    reach = (size - 1) * dilation
    rows, columns = ((n - reach - 1) // stride * stride + 1 for n in padded.shape[1:3])
    total = sum(
        padded[:, top : top + rows : stride, left : left + columns : stride]
        * wide[i, j][None, None]
        for i, j in _offsets(size)
        for top, left in [(i * dilation, j * dilation)]
    )
    return total.astype(x_BHWC.dtype)


def _offsets(size: int) -> list[tuple[int, int]]:
    return [(i, j) for i in range(size) for j in range(size)]


def _padded(x_BHWC: Array, size: int) -> Array:
    return jnp.pad(x_BHWC, ((0, 0), (size // 2,) * 2, (size // 2,) * 2, (0, 0)))


@jax.custom_vjp
def _shifted(x_BHWC: Array, kernel_HW1C: Array) -> Array:
    """The sum over the kernel's offsets of the shifted image times the weight there."""
    size, (_, rows, columns, _) = kernel_HW1C.shape[0], x_BHWC.shape
    padded = _padded(x_BHWC, size)
    return sum(
        padded[:, i : i + rows, j : j + columns] * kernel_HW1C[i, j][None, None]
        for i, j in _offsets(size)
    )


def _shifted_fwd(x_BHWC: Array, kernel_HW1C: Array) -> tuple[Array, tuple[Array, Array]]:
    return _shifted(x_BHWC, kernel_HW1C), (x_BHWC, kernel_HW1C)


def _shifted_bwd(residuals: tuple[Array, Array], grad_BHWC: Array) -> tuple[Array, Array]:
    """The kernel's gradient, one image at a time so that its shifted copies stay in the cache.

    It is summed in at least float32.
    """
    x_BHWC, kernel_HW1C = residuals
    size, (_, rows, columns, channels) = kernel_HW1C.shape[0], x_BHWC.shape
    grad_x = _shifted(grad_BHWC, kernel_HW1C[::-1, ::-1])

    def accumulate(total: Array, pair: tuple[Array, Array]) -> tuple[Array, None]:
        padded, grad = pair

        def row(i: Array) -> Array:
            band = lax.dynamic_slice_in_dim(padded, i, rows, 0)
            products = [band[:, j : j + columns] * grad for j in range(size)]
            return jnp.stack([product.sum((0, 1), dtype=total.dtype) for product in products])

        if size >= _LOOPED:
            return total + lax.map(row, jnp.arange(size)).reshape(total.shape), None
        parts = [
            (padded[i : i + rows, j : j + columns] * grad).sum((0, 1), dtype=total.dtype)
            for i, j in _offsets(size)
        ]
        return total + jnp.stack(parts), None

    dtype = moments_dtype(kernel_HW1C)
    zeros = vary_like(jnp.zeros((size * size, channels), dtype), grad_BHWC)
    total, _ = lax.scan(accumulate, zeros, (_padded(x_BHWC, size), grad_BHWC))
    return grad_x, total.reshape(kernel_HW1C.shape).astype(kernel_HW1C.dtype)


_shifted.defvjp(_shifted_fwd, _shifted_bwd)
