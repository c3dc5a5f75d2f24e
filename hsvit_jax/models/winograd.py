"""3×3 convolutions on a CPU by Winograd's minimal filtering F(2, 3) along the rows.

Two output rows are made of four products instead of six: with d the four input rows they see and g
the kernel's three rows,

    m = (d0 − d2)·g0, (d1 + d2)·(g0 + g1 + g2)/2, (d2 − d1)·(g0 − g1 + g2)/2, (d1 − d3)·g2
    y = m0 + m1 + m2, m1 − m2 − m3

and each product is a matrix product over the three columns and all input channels. The sums are of
two or three numbers and halves are exact, so the rounding error is that of the direct convolution
(measured: 1e-6 of the largest output for both). Everything runs in slices of a few images, whose
intermediate rows stay in cache. Source: Winograd (1980); Lavin and Gray (2016), section 4.1.
"""

import contextlib
import contextvars
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array

#: Numbers of an input slice, by which the images of a slice are chosen: its transformed rows are
#: six times as many, and stay within a CPU's second- and third-level caches (measured).
_SLICE = 1 << 18


_DIRECT = contextvars.ContextVar("direct", default=False)


@contextlib.contextmanager
def not_at_all() -> Iterator[None]:
    """What is traced meanwhile has direct convolutions: as accelerators compute them, and as the
    literature counts their FLOPs."""
    token = _DIRECT.set(True)
    try:
        yield
    finally:
        _DIRECT.reset(token)


def fits(x_shape: tuple[int, ...], kernel_shape: tuple[int, ...]) -> bool:
    """Whether images (B, H, W, I) and a kernel (k, k, I, O) are better convolved here.

    A single image is not (measured): what its products save, the sums of its rows cost.
    """
    whole = kernel_shape[:2] == (3, 3) and x_shape[1] % 2 == 0 and x_shape[0] > 1
    return whole and not _DIRECT.get()


def convolve(x_BHWC: Array, kernel_HWIO: Array) -> Array:
    """The stride-1 convolution with one row and column of zeros around: (B, H, W, O)."""
    weights_KIO = _weights(kernel_HWIO)
    parts = _slices(x_BHWC)
    return _whole(lax.map(lambda part: _product(part, weights_KIO), parts))


def gradients(x_BHWC: Array, kernel_HWIO: Array, grad_BHWO: Array, zero: Array) -> tuple:
    """Gradients of `convolve` to the images and to the kernel.

    zero: a scalar 0 that varies along the mesh axes that the gradients vary along.
    """
    c_in, c_out = kernel_HWIO.shape[2:]
    grad_x = convolve(grad_BHWO, kernel_HWIO[::-1, ::-1].swapaxes(2, 3))

    def accumulate(total: Array, part: tuple[Array, Array]) -> tuple[Array, None]:
        rows = _rows(part[0]).reshape(4, -1, 3 * c_in)
        grad = _spread(part[1]).reshape(4, -1, c_out)
        return total + jnp.einsum("kpi,kpo->kio", rows, grad), None

    total = jnp.zeros((4, 3 * c_in, c_out), kernel_HWIO.dtype) + zero
    total, _ = lax.scan(accumulate, total, (_slices(x_BHWC), _slices(grad_BHWO, c_in)))
    k0, k1, k2, k3 = total.reshape(4, 3, c_in, c_out)
    half, difference = (k1 + k2) / 2, (k1 - k2) / 2
    return grad_x, jnp.stack([k0 + half, difference, half + k3])


def _weights(kernel_HWIO: Array) -> Array:
    """The kernel's rows as the four products need them: (4, 3·I, O)."""
    g0, g1, g2 = kernel_HWIO
    outer, inner = (g0 + g2) / 2, g1 / 2
    stacked = jnp.stack([g0, outer + inner, outer - inner, g2])
    return stacked.reshape(4, -1, kernel_HWIO.shape[3])


def _product(x_BHWC: Array, weights_KIO: Array) -> Array:
    m0, m1, m2, m3 = jnp.einsum("kbhwi,kio->kbhwo", _rows(x_BHWC), weights_KIO)
    y = jnp.stack([m0 + m1 + m2, m1 - m2 - m3], 2)
    return y.reshape(*x_BHWC.shape[:3], -1)


def _rows(x_BHWC: Array) -> Array:
    """Sums of the four rows that a pair of output rows sees, with both neighbours: (4, B, H/2, W,
    3·C)."""
    batch, height, width, channels = x_BHWC.shape
    padded = jnp.pad(x_BHWC, ((0, 0), (1, 1), (1, 1), (0, 0)))
    pairs = padded.reshape(batch, height // 2 + 1, 2, width + 2, channels)
    even, odd = pairs[:, :, 0], pairs[:, :, 1]
    d0, d1, d2, d3 = even[:, :-1], odd[:, :-1], even[:, 1:], odd[:, 1:]
    sums = jnp.stack([d0 - d2, d1 + d2, d2 - d1, d1 - d3])
    return jnp.concatenate([sums[:, :, :, j : j + width] for j in range(3)], axis=-1)


def _spread(grad_BHWO: Array) -> Array:
    """What a pair of output rows' gradient is to the four products: (4, B, H/2, W, O)."""
    batch, height, width, channels = grad_BHWO.shape
    pairs = grad_BHWO.reshape(batch, height // 2, 2, width, channels)
    upper, lower = pairs[:, :, 0], pairs[:, :, 1]
    return jnp.stack([upper, upper + lower, upper - lower, -lower])


def _slices(x_BHWC: Array, channels: int = 0) -> Array:
    """Whole images in slices: (slices, images of one, H, W, C). channels: that decide how many."""
    batch, *image = x_BHWC.shape
    size = image[0] * image[1] * (channels or image[2])
    images = max(
        n for n in range(1, batch + 1) if batch % n == 0 and (n == 1 or n * size <= _SLICE)
    )
    return x_BHWC.reshape(batch // images, images, *image)


def _whole(parts: Array) -> Array:
    return parts.reshape(-1, *parts.shape[2:])
