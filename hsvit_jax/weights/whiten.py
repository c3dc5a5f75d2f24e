"""An HSViT's first convolution as a whitening of image patches.

Source: Jordan, 94 % on CIFAR-10 in 3.29 seconds (arXiv 2404.00498), section 3.2; here the kernel is
trained with the rest.
"""

from collections.abc import Iterable

import numpy as np

_STRIDE = 3  # of the patches, both ways
_EPSILON = 0.01  # added to a direction's variance, so that noise is not enlarged


def first_convolution(body: dict, batches: Iterable[np.ndarray]) -> None:
    """Puts whitening filters in the place of the first convolution's.

    They are the principal directions of the images' patches divided by their standard deviation, as
    many as there is room for with both signs; the filters left over stay as they are.

    Args:
      body: `Network.body` of the parameters, which are changed; all towers get the same filters.
      batches: images (B, H, W, C), normalised; of a few at a time, as their patches take many times
        their memory.
    """
    kernels = body["trunk"]["blocks"]["0"]["kernels"]
    kernel = np.array(kernels["0"])  # (size, size, C, filters), of towers with an axis before
    total_PP, count = 0.0, 0
    for images_BHWC in batches:
        patches_NP = patches(images_BHWC, kernel.shape[-4]).astype(np.float64)
        total_PP, count = total_PP + patches_NP.T @ patches_NP, count + len(patches_NP)
    directions = whitening(total_PP / count)
    count = min(directions.shape[1], kernel.shape[-1] // 2)
    filters = directions[:, :count].reshape(*kernel.shape[-4:-1], count)
    kernel[..., :count], kernel[..., count : 2 * count] = filters, -filters
    kernels["0"] = kernel


def patches(images_BHWC: np.ndarray, size: int) -> np.ndarray:
    """Every third patch of size × size pixels along both sides, (N, size · size · C)."""
    windows = np.lib.stride_tricks.sliding_window_view(images_BHWC, (size, size), axis=(1, 2))
    windows = np.moveaxis(windows[:, ::_STRIDE, ::_STRIDE], 3, -1)
    return windows.reshape(-1, size * size * images_BHWC.shape[-1])


def whitening(covariance_PP: np.ndarray) -> np.ndarray:
    """Directions that whiten patches, as columns (P, P), those of largest variance first."""
    variances_P, directions_PP = np.linalg.eigh(covariance_PP)
    largest_P = np.abs(directions_PP).argmax(0)
    directions_PP *= np.sign(directions_PP[largest_P, range(len(largest_P))])
    return (directions_PP / np.sqrt(variances_P + _EPSILON))[:, ::-1]
