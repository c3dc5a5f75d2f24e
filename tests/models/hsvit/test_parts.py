"""A network cut into parts: their sums are the whole, and those that came are a degraded answer."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import small_runs

from hsvit_jax import models
from hsvit_jax.models.hsvit import hsvit, parts

SIZES = {"image_size": (8, 12), "image_channels": 3, "conv_channels": (8, 16), "groups": 8}
BASE = dataclasses.replace(small_runs.HSVIT, **SIZES, embed_dim=12)
WAYS = {
    "groups": {},
    "separable": {"convolution": "separable", "votes": "learned"},
    "sharded": {"trunk": "sharded"},
    "no convolution": {"conv_kernels": (3, 0), "embed_dim": 96},
    "towers": {"towers": 4},
    "tiles": {"towers": 4, "tiles": (2, 2), "votes": "learned"},
}


def backbone():
    record = models.FAMILIES["hsvit_backbone"]
    settings = {**record.defaults, "groups": 8, "depth": 1, "heads": 1}
    settings |= {"family": "hsvit_backbone", "dtype": "float32"}
    small = {"stem_channels": 4, "channels": (8, 16), "depths": (1, 1)}
    settings["backbone_settings"] = {**settings["backbone_settings"], **small}
    return models.build(settings, image_size=(32, 32), channels=3, num_classes=5)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "way",
    ["groups", "tiles"]
    + [pytest.param(w, marks=SLOW) for w in (*WAYS, "backbone") if w not in ("groups", "tiles")],
)
def test_parts_are_the_whole(way):
    if way == "backbone":
        network = backbone()
    else:
        config = dataclasses.replace(BASE, **WAYS[way])
        network = (hsvit.TowerHSViT if config.towers > 1 else hsvit.HSViT)(config)
    params, stats = small_runs.made_up_values(network)
    shape = (3, *network.config.image_size, 3)
    images = np.random.default_rng(3).normal(size=shape).astype(np.float32)
    cut, head = parts.cut(network, params, stats, 4)
    assert [part.groups for part in cut] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    lost = jnp.array([1.0, 1, 0, 0, 1, 1, 1, 1])

    @jax.jit
    def both(images):
        totals, weights = zip(*(part(images) for part in cut), strict=True)
        without = [k for k in range(4) if k != 1]
        some = sum(totals[k] for k in without), sum(weights[k] for k in without)
        wholes = [network.apply(params, stats, images, votes_G=v)[0] for v in (None, lost)]
        return [head(sum(totals), sum(weights)), head(*some)], wholes

    for (logits, probabilities), whole in zip(*both(images), strict=True):
        np.testing.assert_allclose(logits, whole, atol=1e-5 * np.abs(whole).max())
        np.testing.assert_allclose(probabilities, jax.nn.softmax(whole), atol=1e-5)


def test_a_part_has_the_trunk_that_it_needs():
    network = hsvit.HSViT(BASE)
    cut, _ = parts.cut(network, *small_runs.made_up_values(network), 4)
    first, last = (cut[0].params["trunk"]["blocks"][i]["kernels"] for i in "01")
    assert [first["1"].shape[3], last["0"].shape[3], last["1"].shape] == [8, 16, (3, 3, 16, 4)]


def test_what_cannot_be_cut_says_so():
    network = hsvit.HSViT(BASE)
    params, stats = small_runs.made_up_values(network)
    with pytest.raises(ValueError, match=r"8 groups cannot split into 3 parts: .*1, 2"):
        parts.cut(network, params, stats, 3)
    with pytest.raises(ValueError, match="this network has none"):
        parts.cut(hsvit.HSViT(dataclasses.replace(BASE, groups=0)), params, stats, 2)
