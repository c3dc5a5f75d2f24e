"""The start of an HSViT whose first convolution whitens patches of the training images.

Source: Jordan, 94 % on CIFAR-10 in 3.29 seconds (arXiv 2404.00498), section 3.2; here the kernel is
trained with the rest.
"""

import numpy as np

from hsvit_jax import augment
from hsvit_jax.train import step as step_lib
from hsvit_jax.train.run_spec import Run

_IMAGES, _STRIDE = 2000, 3  # enough for a covariance, and few enough to be instant
_EPSILON = 0.01  # of a patch's variance, so that noise is not enlarged


def start(run: Run) -> tuple[dict, dict]:
    """Fresh (params, stats) in which whitening filters replace the first convolution's.

    They are the principal directions of patches, divided by their standard deviation, as many as
    there is room for with both signs; the filters that are left over stay random.
    """
    params, stats = run.model.init(step_lib.initial_key(run.config.seed))
    kernels = params.get("towers", params)["trunk"]["blocks"]["0"]["kernels"]
    kernel = np.array(kernels["0"])  # (size, size, C, filters), of towers with an axis before
    split, data = run.dataset.train, run.config.data
    chosen = np.linspace(0, len(split) - 1, min(len(split), _IMAGES)).astype(np.int64)
    images = np.asarray(augment.normalise(split.gather(chosen), data.mean, data.std))
    directions = whitening(patches(images, kernel.shape[-4]))
    count = min(directions.shape[1], kernel.shape[-1] // 2)
    directions = directions[:, :count].reshape(*kernel.shape[-4:-1], count)
    kernel[..., :count], kernel[..., count : 2 * count] = directions, -directions
    kernels["0"] = kernel
    return params, stats


def patches(images_BHWC: np.ndarray, size: int) -> np.ndarray:
    """Every third patch of size × size pixels along both sides, (N, size · size · C)."""
    windows = np.lib.stride_tricks.sliding_window_view(images_BHWC, (size, size), axis=(1, 2))
    windows = np.moveaxis(windows[:, ::_STRIDE, ::_STRIDE], 3, -1)
    return windows.reshape(-1, size * size * images_BHWC.shape[-1])


def whitening(patches_NP: np.ndarray) -> np.ndarray:
    """Directions that whiten the patches, as columns (P, P), those of largest variance first."""
    covariance_PP = patches_NP.T.astype(np.float64) @ patches_NP / len(patches_NP)
    variances_P, directions_PP = np.linalg.eigh(covariance_PP)
    directions_PP *= np.sign(
        directions_PP[np.abs(directions_PP).argmax(0), range(len(variances_P))]
    )
    return (directions_PP / np.sqrt(variances_P + _EPSILON))[:, ::-1]
