"""ViT: exact sizes and costs, its start, and masks that follow the example."""

import jax
import numpy as np
import pytest
from support import hf_files

SMALL = {"patch": 4, "heads": 2, "head_dim": 4, "depth": 1, "mlp_dim": 12}


def test_the_start():
    params, _ = hf_files.network("vit", size=(8, 8), **{**SMALL, "mlp_dim": 900}).init(
        jax.random.key(0)
    )
    kernels = [leaf for leaf in jax.tree.leaves(params) if leaf.size > 1000]
    kernels.append(params["embedding"]["patches"]["linear"]["kernel"])
    assert len(kernels) == 3
    for kernel in kernels:
        assert np.std(kernel) == pytest.approx(0.02, rel=0.15)
    assert not np.any(params["encoder"]["blocks"]["0"]["mixer"]["out"]["bias"])


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"dropout": 0.3}, {"attention_dropout": 0.6}])
def test_masks_of_each_rate(change):
    hf_files.check_masks(hf_files.network("vit", size=(8, 8), **SMALL, **change))


def test_an_image_that_the_patch_does_not_divide():
    with pytest.raises(ValueError, match="32×30 pixels cannot be cut into patches of patch=4"):
        hf_files.network("vit", size=(32, 30))
