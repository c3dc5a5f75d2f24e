"""Large images cut into tiles that towers share: who sees what, and small objects found."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from support import small_runs

from hsvit_jax import mesh as mesh_lib
from hsvit_jax.models import costs as model_costs
from hsvit_jax.models.hsvit import hsvit
from hsvit_jax.planner import costs

TILES, SIDE = (2, 2), 8
CONFIG = hsvit.HSViTConfig(
    image_size=(16, 16),
    image_channels=1,
    num_classes=3,
    conv_channels=(32, 32),
    conv_kernels=(3, 3),
    pool_strides=(2, 1),
    groups=8,
    depth=1,
    embed_dim=8,
    heads=2,
    dropout=0.0,
    towers=8,
    tiles=TILES,
)

SMALL = dataclasses.replace(CONFIG, conv_channels=(16, 16), groups=4, towers=4)


class Keep(hsvit.GroupShard):
    """Sees the CLS outputs before they are averaged."""

    def sum(self, x_GBD):
        self.cls = x_GBD
        return x_GBD.sum(0)


def cls_of(network, values, images):
    keep = Keep()
    network.apply(*values, images, shard=keep)
    return keep.cls


def test_a_tile_reaches_only_its_towers():
    """Tower k sees tile k mod 4, counted row by row."""
    network = hsvit.TowerHSViT(CONFIG)
    values = small_runs.made_up_values(network)
    images = np.random.default_rng(0).normal(size=(2, 16, 16, 1)).astype(np.float32)
    run = jax.jit(lambda images: cls_of(network, values, images))
    before = run(images)
    for tile in range(4):
        row, column = np.array(divmod(tile, 2)) * SIDE
        changed = images.copy()
        changed[:, row : row + SIDE, column : column + SIDE] += 1
        moved = np.abs(run(changed) - before).max((1, 2)) > 0
        assert moved.tolist() == [k % 4 == tile for k in range(8)]


def objects(count, seed):
    """Dark noise with one bright 4×4 figure somewhere in one random tile; its kind is the label."""
    rng = np.random.default_rng(seed)
    figures = np.zeros((3, 4, 4))
    figures[0, 1:3], figures[1, :, 1:3], figures[2, range(4), range(4)] = 1, 1, 1
    labels, tiles = rng.integers(0, 3, count), rng.integers(0, 4, count)
    images = rng.normal(0, 0.1, (count, 16, 16, 1))
    for image, label, tile in zip(images, labels, tiles, strict=True):
        row, column = np.array(divmod(tile, 2)) * SIDE + rng.integers(0, SIDE - 3, 2)
        image[row : row + 4, column : column + 4, 0] += 2 * figures[label]
    return images.astype(np.float32), labels, tiles


def train(devices, steps=100):
    """Losses, and accuracy on images not trained on, by tile."""
    network = hsvit.TowerHSViT(SMALL)
    mesh = mesh_lib.make(devices, 1, groups=4, devices=jax.devices()[:devices])
    apply = mesh_lib.spread(network, mesh)
    params, stats = small_runs.made_up_values(network)
    where = (mesh_lib.state_shardings(mesh, t, network) for t in (params, stats))
    params, stats = jax.device_put((params, stats), tuple(where))
    tx = optax.adam(3e-3)

    def loss(params, stats, images, labels):
        logits, stats = apply(params, stats, images, train=True)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), stats

    @jax.jit
    def step(params, stats, opt, images, labels):
        (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(
            params, stats, images, labels
        )
        updates, opt = tx.update(grads, opt)
        return optax.apply_updates(params, updates), stats, opt, value

    opt, losses = jax.jit(tx.init)(params), []
    for number in range(steps):
        images, labels, _ = objects(64, number)
        arrays = (mesh_lib.put_batch(mesh, a) for a in (images, labels))
        params, stats, opt, value = step(params, stats, opt, *arrays)
        losses.append(float(value))
    images, labels, tiles = objects(256, 10_000)
    logits = jax.jit(apply)(params, stats, mesh_lib.put_batch(mesh, images))[0]
    right = np.asarray(logits).argmax(1) == labels
    return np.array(losses), [right[tiles == t].mean() for t in range(4)]


@pytest.fixture(scope="module")
def on_four_devices():
    return train(4)


@pytest.mark.slow
def test_a_small_object_in_one_tile_is_found(on_four_devices):
    """Chance is a third; each tile's tower learns it, though three in four see nothing."""
    _, accuracy = on_four_devices
    assert np.mean(accuracy) > 0.8 and min(accuracy) > 0.6


@pytest.mark.slow
def test_one_device_learns_the_same(on_four_devices):
    (four, _), (one, accuracy) = on_four_devices, train(1)
    np.testing.assert_allclose(four[:8], one[:8], rtol=1e-3)
    assert np.mean(accuracy) > 0.8 and min(accuracy) > 0.6


def test_costs_are_of_a_tile():
    network = hsvit.TowerHSViT(CONFIG)
    rows = {path: numbers for path, *numbers in model_costs.modules(network)}
    weights = 9 * 4 + 9 * 4 * 4
    assert rows["towers.trunk.blocks.0"] == [  # each tower sees 64 of the 256 pixels
        8 * (weights + 2 * 8),
        8 * 64 * weights,
    ]
    assert sum(count for count, _ in rows.values()) == model_costs.parameters(network)
    whole = hsvit.TowerHSViT(dataclasses.replace(CONFIG, tiles=(1, 1)))
    tiled, dense = (
        costs.Cost("towers", n, data=1, group=8, batch=1).forward_flops for n in (network, whole)
    )
    assert tiled < 0.4 * dense


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tiles": (3, 2)}, r"16 rows of pixels cannot be cut into tiles=\(3, 2\), 3 rows"),
        ({"tiles": (2, 5)}, r"16 columns of pixels .* choose a divisor of 16: 1, 2, 4, 8, 16"),
        ({"towers": 2}, r"towers=2 cannot see the 4 tiles .* multiple of 4"),
        ({"towers": 1}, "towers=1 cannot see the 4 tiles"),
        ({"tiles": (2,)}, "a number of rows and one of columns"),
        ({"tiles": (0, 2)}, "a number of rows and one of columns"),
    ],
)
def test_tiles_that_do_not_fit_say_so(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changes)
