"""The whitening start: patches through the first convolution are white, in the trunk and towers."""

import jax
import numpy as np
import pytest
from support.small_runs import made_up_values, small_config, small_dataset

from hsvit_jax import train
from hsvit_jax.train import resume
from hsvit_jax.weights import whiten

DATASET = small_dataset()


def test_directions_whiten_correlated_patches():
    rng = np.random.default_rng(0)
    mixed = rng.normal(size=(6, 6)) + 4 * np.eye(6)
    patches = (rng.normal(size=(50_000, 6)) @ mixed).astype(np.float32)
    white = patches @ whiten.whitening(patches.T @ patches / len(patches))
    np.testing.assert_allclose(np.cov(white.T, bias=True), np.eye(6), atol=0.1)


def test_patches_are_what_a_convolution_sees():
    images = np.random.default_rng(1).normal(size=(2, 8, 9, 3)).astype(np.float32)
    kernel = np.random.default_rng(2).normal(size=(3, 3, 3, 5)).astype(np.float32)
    seen = whiten.patches(images, 3) @ kernel.reshape(-1, 5)
    maps = jax.lax.conv_general_dilated(
        images, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    np.testing.assert_allclose(seen, maps[:, ::3, ::3].reshape(-1, 5), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("towers", [1, 2])
def test_filters_come_in_pairs_of_both_signs(towers, monkeypatch):
    run = train.prepare(small_config(init__whiten=True, model__towers=towers), dataset=DATASET)
    fresh = made_up_values(run.model)
    monkeypatch.setattr(run.model, "init", lambda key: jax.tree.map(np.copy, fresh))
    (params, _), (fresh, _) = resume.whitened(run), fresh
    trunk, drawn = (tree.get("towers", tree)["trunk"]["blocks"]["0"] for tree in (params, fresh))
    kernel, half = trunk["kernels"]["0"], 4 // towers // 2
    np.testing.assert_array_equal(kernel[..., :half], -kernel[..., half : 2 * half])
    assert not np.allclose(kernel, drawn["kernels"]["0"])
    np.testing.assert_array_equal(trunk["kernels"]["1"], drawn["kernels"]["1"])


def test_a_family_without_such_a_convolution_is_refused():
    with pytest.raises(ValueError, match=r"init\.whiten needs an HSViT.* set it to false"):
        train.prepare(
            small_config(init__whiten=True, model__ablation="attention_only"), dataset=DATASET
        )


def test_a_kernel_larger_than_the_image_is_refused():
    settings = {"model__conv_kernels": (9, 3)}
    train.prepare(small_config(**settings), dataset=DATASET)
    with pytest.raises(ValueError, match=r"conv_kernels=9, .*\(8, 8\) is smaller: set it"):
        train.prepare(small_config(init__whiten=True, **settings), dataset=DATASET)
