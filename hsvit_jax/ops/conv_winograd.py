"""3×3 convolutions by Winograd's minimal filtering F(2×2, 3×3).

Four output pixels take 16 products instead of 36. Along one axis, with d the four input pixels of a
pair of outputs and g the kernel's three,

    m = (d0 − d2)·g0, (d1 + d2)·(g0 + g1 + g2)/2, (d2 − d1)·(g0 − g1 + g2)/2, (d1 − d3)·g2
    y = m0 + m1 + m2, m1 − m2 − m3

and the same along the other; each product is a matrix product over all input channels. The sums are
of two to nine numbers and quarters are exact, so the rounding error is that of the direct
convolution (measured: 1e-6 of the largest output for both). Sources: Winograd (1980); Lavin and
Gray (2016), section 4.1.

Measured with jax 0.10.2 on two cores with 256-bit vectors, forward: 64 channels 64 → 45 ms, 64 to
128 29 → 25, 128 58 → 42. It can go when XLA for CPU has a Winograd convolution of its own.
"""

import jax
import jax.numpy as jnp
import numpy as np

from hsvit_jax.ops import tiling

Array = jax.Array

#: Most numbers in an input slice (measured): the transformed pixels are four times as many, and so
#: are their products.
SLICE = 1 << 19

#: The coefficients of the kernel's three numbers along an axis in each of the four products.
_SUMS = ((1, 0, 0), (0.5, 0.5, 0.5), (0.5, -0.5, 0.5), (0, 0, 1))

#: `product` returns planes of every second row and column.
STRIDE = 2


def fits(x_shape: tuple[int, ...], kernel_shape: tuple[int, ...]) -> bool:
    """Whether this formula is the faster one for images (B, H, W, I) and a kernel (k, k, I, O).

    It is not for a single image (measured), and few channels are assumed to lose in the sums of
    pixels what the products save.
    """
    enough = min(kernel_shape[2:]) >= 32 and min(x_shape[1:3]) >= 4 and x_shape[0] > 1
    return kernel_shape[:2] == (3, 3) and enough


def weights(kernel_HWIO: Array) -> list[Array]:
    """The transformed kernel: (I, O) for each of the 16 products."""
    sums = (jnp.asarray(np.outer(i, j), kernel_HWIO.dtype) for i in _SUMS for j in _SUMS)
    return [jnp.einsum("hw,hwio->io", s, kernel_HWIO) for s in sums]


def product(x_BHWC: Array, weights_IO: list[Array]) -> list[list[Array]]:
    """The stride-1 convolution with zero padding 1, in 2×2 planes."""
    m = [x @ w for x, w in zip(_tiles(x_BHWC), weights_IO, strict=True)]
    rows = zip(*(_outputs(*m[j::4]) for j in range(4)), strict=True)
    return tiling.crop_planes([list(_outputs(*row)) for row in rows], *x_BHWC.shape[1:3])


def kernel_terms(x_BHWC: Array, grad_BHWO: Array, size: int) -> list[Array]:
    """These images' terms (I, O) of the 16 sums that `kernel_gradient` takes."""
    del size
    c_in, c_out = x_BHWC.shape[3], grad_BHWO.shape[3]
    return [
        x.reshape(-1, c_in).T @ g.reshape(-1, c_out)
        for x, g in zip(_tiles(x_BHWC), _spread(grad_BHWO), strict=True)
    ]


def kernel_gradient(terms: list[Array], kernel_shape: tuple[int, ...]) -> Array:
    """The kernel's gradient (3, 3, I, O) from the sums of all images' terms."""

    def along(k: Array) -> Array:
        half, difference = (k[1] + k[2]) / 2, (k[1] - k[2]) / 2
        return jnp.stack([k[0] + half, difference, half + k[3]])

    by_row = along(jnp.stack(terms).reshape(4, 4, *kernel_shape[2:]))
    return along(by_row.swapaxes(0, 1)).swapaxes(0, 1)


def _sums(d0: Array, d1: Array, d2: Array, d3: Array) -> tuple[Array, ...]:
    return d0 - d2, d1 + d2, d2 - d1, d1 - d3


def _outputs(m0: Array, m1: Array, m2: Array, m3: Array) -> tuple[Array, Array]:
    return m0 + m1 + m2, m1 - m2 - m3


def _pixels(x_BHWC: Array) -> list[list[Array]]:
    """The 4×4 input pixels of each 2×2 outputs, each (B, ⌈H/2⌉, ⌈W/2⌉, C).

    All are views of one padded copy, so that XLA computes x once.
    """
    batch, height, width, channels = x_BHWC.shape
    rows, columns = -(-height // 2), -(-width // 2)
    ends = (1, 2 * rows - height + 1), (1, 2 * columns - width + 1)
    padded = jnp.pad(x_BHWC, ((0, 0), *ends, (0, 0)))
    pairs = padded.reshape(batch, rows + 1, 2, columns + 1, 2, channels)

    def pixel(i: int, j: int) -> Array:
        top, left = i // 2, j // 2
        return pairs[:, top : top + rows, i % 2, left : left + columns, j % 2]

    return [[pixel(i, j) for j in range(4)] for i in range(4)]


def _tiles(x_BHWC: Array) -> list[Array]:
    """The transformed pixels of each 2×2 outputs, one array for each of the 16 products."""
    by_row = zip(*(_sums(*column) for column in zip(*_pixels(x_BHWC), strict=True)), strict=True)
    return [x for row in by_row for x in _sums(*row)]


def _spread(grad_BHWO: Array) -> list[Array]:
    """The gradients of the 16 products, from those of 2×2 outputs."""

    def four(first: Array, second: Array) -> tuple[Array, ...]:
        return first, first + second, first - second, -second

    _, upper, lower, _ = _pixels(grad_BHWO)
    by_row = zip(*(four(upper[j], lower[j]) for j in (1, 2)), strict=True)
    return [x for row in by_row for x in four(*row)]
