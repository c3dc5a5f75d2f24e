"""im2col: convolutions of images with few channels, as one product with the patch of each pixel.

Three input channels leave the vector units idle in XLA's convolution on a CPU; k²·3 do not. A
formula of `conv`, with the functions of `conv_winograd`. Measured with jax 0.10.2 on two cores, for
the first convolution: 5–35 → 33–200 GFLOP/s. It can go, but for `shifts`, when XLA for CPU
vectorises convolutions of three channels.
"""

import jax
import jax.numpy as jnp

Array = jax.Array

#: Most numbers in an input slice (measured): the patches are k² times as many, the output up to 64
#: times.
SLICE = 1 << 17

#: `product` returns a single plane.
STRIDE = 1


def fits(x_shape: tuple[int, ...], kernel_shape: tuple[int, ...]) -> bool:
    """Whether this formula is the faster one for images (B, H, W, I) and a kernel (k, k, I, O)."""
    del kernel_shape
    return x_shape[3] <= 4


def weights(kernel_HWIO: Array) -> Array:
    """The kernel for `product`: unchanged."""
    return kernel_HWIO


def product(x_BHWC: Array, kernel_HWIO: Array) -> list[list[Array]]:
    """The stride-1 convolution with zero padding k//2, as a single plane."""
    patches = jnp.concatenate(shifts(x_BHWC, len(kernel_HWIO)), axis=-1)
    return [[patches @ kernel_HWIO.reshape(-1, kernel_HWIO.shape[3])]]


def kernel_terms(x_BHWC: Array, grad_BHWO: Array, size: int) -> Array:
    """These images' term of the kernel's gradient, (k·k·I, O)."""
    patches = jnp.concatenate(shifts(x_BHWC, size), axis=-1)
    # The barrier keeps XLA from transposing the gradient, the larger factor.
    grad_BHWO = jax.lax.optimization_barrier(grad_BHWO)
    return patches.reshape(-1, patches.shape[3]).T @ grad_BHWO.reshape(-1, grad_BHWO.shape[3])


def kernel_gradient(terms: Array, kernel_shape: tuple[int, ...]) -> Array:
    """The kernel's gradient (k, k, I, O) from the sum of all images' terms."""
    return terms.reshape(kernel_shape)


def shifts(x_BHWC: Array, size: int) -> list[Array]:
    """The zero-padded image shifted by every offset of a size×size kernel, row by row."""
    _, rows, columns, _ = x_BHWC.shape
    pad = size // 2
    padded = jnp.pad(x_BHWC, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    return [padded[:, i : i + rows, j : j + columns] for i in range(size) for j in range(size)]
