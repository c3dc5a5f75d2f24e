"""Convolutions by XLA's own, for some images at a time; the functions are those of `winograd`.

Only the kernel's gradient is written down: as products xᵀ·(shifted gradients), because XLA's is a
convolution with a kernel as large as the image, which leaves the vector units idle on a CPU.
"""

import jax
import jax.numpy as jnp
from jax import lax

from hsvit_jax.ops.conv_im2col import shifts

Array = jax.Array

#: Numbers of an input slice, by which the images of a slice are chosen: the shifted copies of one
#: then stay in the second-level cache (measured).
SLICE = 1 << 17

#: A product comes whole.
STRIDE = 1


def fits(x_shape: tuple[int, ...], kernel_shape: tuple[int, ...]) -> bool:
    """Everything does."""
    del x_shape, kernel_shape
    return True


def weights(kernel_HWIO: Array) -> Array:
    """The kernel as `product` takes it: as it is."""
    return kernel_HWIO


def product(x_BHWC: Array, kernel_HWIO: Array) -> list[list[Array]]:
    """The stride-1 convolution with k//2 rows and columns of zeros around, as the only plane."""
    return [[conv2d_xla(x_BHWC, kernel_HWIO)]]


def conv2d_xla(x_BHWC: Array, kernel_HWIO: Array) -> Array:
    """The same by itself, (B, H, W, O): what accelerators run, and the reference in tests."""
    pad = kernel_HWIO.shape[0] // 2
    return lax.conv_general_dilated(
        x_BHWC,
        kernel_HWIO,
        (1, 1),
        ((pad, pad), (pad, pad)),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


def kernel_terms(x_BHWC: Array, grad_BHWO: Array, size: int) -> Array:
    """What these images add to the kernel's gradient, (I, k·k·O)."""
    shifted = jnp.concatenate(shifts(grad_BHWO, size), axis=-1)
    return x_BHWC.reshape(-1, x_BHWC.shape[3]).T @ shifted.reshape(-1, shifted.shape[3])


def kernel_gradient(terms: Array, kernel_shape: tuple[int, ...]) -> Array:
    """The kernel's gradient (k, k, I, O), of the sum of all images' terms."""
    size, _, c_in, c_out = kernel_shape
    # Shifting the gradient one way is shifting the image the other: the offsets come out reversed.
    return terms.reshape(c_in, size, size, c_out).transpose(1, 2, 0, 3)[::-1, ::-1]
