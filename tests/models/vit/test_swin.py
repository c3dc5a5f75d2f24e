"""Swin in timm's and its authors' names: a golden's logits and training step, the way back; windows
of any map."""

import itertools

import jax
import numpy as np
import pytest
from support import convnet_files, hf_files, torch_files

from hsvit_jax.models.network import ForwardContext
from hsvit_jax.models.vit import swin
from hsvit_jax.weights import read, torch
from hsvit_jax.weights.convert import convert


def test_shifted_windows_of_a_map_that_they_do_not_divide():
    """Pixel by pixel: who is in the window, and who came to it around the map's edge."""
    rows, columns, side, by, dim = 5, 4, 3, 1, 4
    with jax.enable_x64(True):
        sizes = (dim, 1, (rows, columns), (side, side), (by, by))
        module = swin.WindowAttention(*sizes, jax.random.key(0), bias=True)
        x = np.random.default_rng(0).normal(size=(1, rows * columns, dim))
        context = ForwardContext(False, None, np.arange(1))
        ours = jax.jit(lambda x: module(x, context, 0))(x)[0].reshape(rows, columns, dim)
        qkv = np.asarray(module.qkv(np.concatenate([x[0], np.zeros((1, dim))])))
        table = np.asarray(module.offset_bias[...])[:, 0].reshape(2 * side - 1, 2 * side - 1)
        height, width = (-(-n // side) * side for n in (rows, columns))

        def token(i, j):
            """Of the padded, shifted map; the last is padding."""
            inside = i < rows and j < columns
            return (i + by) % rows * columns + (j + by) % columns if inside else -1

        def region(i, j):
            sides = ((i, height), (j, width))
            return [(n >= size - side) + (n >= size - by) for n, size in sides]

        for i, j in itertools.product(range(rows), range(columns)):
            first = i // side * side, j // side * side
            keys = [(first[0] + a, first[1] + b) for a in range(side) for b in range(side)]
            scores = [
                qkv[token(i, j), :dim] @ qkv[token(*key), dim : 2 * dim] * dim**-0.5
                + table[i - key[0] + side - 1, j - key[1] + side - 1]
                - 100 * (region(i, j) != region(*key))
                for key in keys
            ]
            weights = np.exp(scores) / np.exp(scores).sum()
            mixed = weights @ qkv[[token(*key) for key in keys], 2 * dim :]
            where = divmod(token(i, j), columns)
            np.testing.assert_allclose(ours[where], module.out(mixed), atol=1e-6)


def test_the_authors_names(golden_dir, tmp_path):
    """They merge at the end of a stage, and name the classifier alone; both readers take them."""
    with np.load(golden_dir / "timm-swin-train.npz") as golden:
        tensors = {k: golden[k] for k in golden.files}
    for old, new in (("layers.1.downsample.", "layers.0.downsample."), ("head.fc.", "head.")):
        tensors = {k.replace(old, new): v for k, v in tensors.items()}
    tensors["layers.0.blocks.0.attn.relative_position_index"] = np.zeros((16, 16), np.int64)
    np.savez(tmp_path / "authors.npz", **tensors)
    report = convert(tmp_path / "authors.npz")
    assert report["max_abs_error"] <= 1e-9 * report["max_abs_logit"]
    _, network, *trees, _, _ = convnet_files.read(golden_dir / "timm-swin-train.npz")
    wrapped = {f"module.{k}": v for k, v in tensors.items() if "." in k and "/" not in k}
    found = read.read(tmp_path, wrapped, {}, network, "swin")
    jax.tree.map(np.testing.assert_array_equal, [found.params, found.stats], trees)


def test_window_sizes_of_all_stages_and_of_each(golden_dir):
    """Two integers are rows and columns of all windows, as timm reads them."""
    tensors, _, _, _, family, description = convnet_files.read(golden_dir / "timm-swin-train.npz")
    for size in (4, [4, 4], [[4, 4], [4, 4]]):
        given = description["constructor"] | {"window_size": size}
        settings, _ = torch.sections(family, tensors, given)
        assert settings["windows"] == (4, 4)
    assert torch_files.settings("swin", {}, {"img_size": 224})[0]["variant"] == "t"


def test_windows_are_cut_to_maps():
    """Of merged maps as timm 1.0.31 has them, whose odd sides are rounded up."""
    c = hf_files.network("swin", size=(36, 64), windows=(4, 4, 4, 4)).config
    assert c.maps() == [(9, 16), (5, 8), (3, 4), (2, 2)]
    assert [c.window(s, 1) for s in range(4)] == [
        ((4, 4), (2, 2)),
        ((4, 4), (2, 2)),
        ((3, 4), (0, 0)),
        ((2, 2), (0, 0)),
    ]
    assert hf_files.network("swin", size=(16, 16)).config.window(3, 1) == ((1, 1), (0, 0))


@pytest.mark.parametrize("changes", [{"global_pool": "max"}, {"always_partition": True}], ids=str)
def test_arguments_that_no_tensor_tells_are_refused(changes, golden_dir):
    tensors, _, _, _, family, description = convnet_files.read(golden_dir / "timm-swin-train.npz")
    with pytest.raises(ValueError, match=f"{next(iter(changes))}=.* is not supported"):
        torch.sections(family, tensors, description["constructor"] | changes)
