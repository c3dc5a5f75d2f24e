"""XLA's own convolution, with a kernel gradient of its own; the functions are `conv_winograd`'s.

The kernel's gradient is computed as products xᵀ·(shifted gradients), because XLA's is a convolution
with a kernel as large as the image, which leaves the vector units of a CPU idle. Measured with jax
0.10.2 on two cores: 140–163 → 37–85 ms. The gradient can go when XLA for CPU computes it as a
product; `conv2d_xla` stays.
"""

import jax
import jax.numpy as jnp
from jax import lax

from hsvit_jax.ops.conv_im2col import shifts

Array = jax.Array
Pads = tuple[tuple[int, int], tuple[int, int]]

#: Most numbers in an input slice, so that the shifted copies of one image stay in the second-level
#: cache (measured).
SLICE = 1 << 17

#: `product` returns a single plane.
STRIDE = 1


def fits(x_shape: tuple[int, ...], kernel_shape: tuple[int, ...]) -> bool:
    """True: this formula fits all shapes."""
    del x_shape, kernel_shape
    return True


def weights(kernel_HWIO: Array) -> Array:
    """The kernel for `product`: unchanged."""
    return kernel_HWIO


def product(x_BHWC: Array, kernel_HWIO: Array) -> list[list[Array]]:
    """The stride-1 convolution with zero padding k//2, as a single plane."""
    return [[conv2d_xla(x_BHWC, kernel_HWIO)]]


def conv2d_xla(
    x_BHWC: Array, kernel_HWIO: Array, stride: int = 1, pads: Pads | None = None, dilation: int = 1
) -> Array:
    """XLA's convolution, (B, H', W', O): accelerators run it, tests compare with it.

    Args:
        kernel_HWIO: (k, k, I/groups, O); its third axis gives the number of groups.
        pads: zeros (before, after) rows and columns; defaults to k//2 everywhere.
    """
    pad = kernel_HWIO.shape[0] // 2
    return lax.conv_general_dilated(
        x_BHWC,
        kernel_HWIO,
        (stride, stride),
        ((pad, pad), (pad, pad)) if pads is None else pads,
        rhs_dilation=(dilation, dilation),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=x_BHWC.shape[3] // kernel_HWIO.shape[2],
    )


def kernel_terms(x_BHWC: Array, grad_BHWO: Array, size: int) -> Array:
    """These images' term of the kernel's gradient, (I, k·k·O)."""
    shifted = jnp.concatenate(shifts(grad_BHWO, size), axis=-1)
    return x_BHWC.reshape(-1, x_BHWC.shape[3]).T @ shifted.reshape(-1, shifted.shape[3])


def kernel_gradient(terms: Array, kernel_shape: tuple[int, ...]) -> Array:
    """The kernel's gradient (k, k, I, O) from the sum of all images' terms."""
    size, _, c_in, c_out = kernel_shape
    # Shifting the gradient one way is shifting the image the other: the offsets come out reversed.
    return terms.reshape(c_in, size, size, c_out).transpose(1, 2, 0, 3)[::-1, ::-1]
