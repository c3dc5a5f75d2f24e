"""Convolutions of images with few channels, as one product with the pixels around each one.

Three input channels leave the vector units idle in XLA's convolution on a CPU; k²·3 do not. For
some images at a time; the functions are those of `winograd`.
"""

import jax
import jax.numpy as jnp

Array = jax.Array

#: Numbers of an input slice, by which the images of a slice are chosen: the patches are k² times as
#: many, the output up to 64 times (measured).
SLICE = 1 << 17

#: A product comes whole.
STRIDE = 1


def fits(x_shape: tuple[int, ...], kernel_shape: tuple[int, ...]) -> bool:
    """Whether images (B, H, W, I) and a kernel (k, k, I, O) are better convolved here."""
    del kernel_shape
    return x_shape[3] <= 4


def weights(kernel_HWIO: Array) -> Array:
    """The kernel as `product` takes it: as it is."""
    return kernel_HWIO


def product(x_BHWC: Array, kernel_HWIO: Array) -> list[list[Array]]:
    """The stride-1 convolution with k//2 rows and columns of zeros around, as the only plane."""
    patches = jnp.concatenate(shifts(x_BHWC, len(kernel_HWIO)), axis=-1)
    return [[patches @ kernel_HWIO.reshape(-1, kernel_HWIO.shape[3])]]


def kernel_terms(x_BHWC: Array, grad_BHWO: Array, size: int) -> Array:
    """What these images add to the kernel's gradient, (k·k·I, O)."""
    patches = jnp.concatenate(shifts(x_BHWC, size), axis=-1)
    # The gradient stays as it lies in memory: XLA would transpose it, the larger factor.
    grad_BHWO = jax.lax.optimization_barrier(grad_BHWO)
    return patches.reshape(-1, patches.shape[3]).T @ grad_BHWO.reshape(-1, grad_BHWO.shape[3])


def kernel_gradient(terms: Array, kernel_shape: tuple[int, ...]) -> Array:
    """The kernel's gradient (k, k, I, O), of the sum of all images' terms."""
    return terms.reshape(kernel_shape)


def shifts(x_BHWC: Array, size: int) -> list[Array]:
    """The image moved by every offset of a size×size kernel, row by row, zeros coming in."""
    _, rows, columns, _ = x_BHWC.shape
    pad = size // 2
    padded = jnp.pad(x_BHWC, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    return [padded[:, i : i + rows, j : j + columns] for i in range(size) for j in range(size)]
