"""The families' records, and the table of tensors that each has: for all families alike."""

import math

import jax
import numpy as np
import pytest
from support import state_dicts, torch_files

from hsvit_jax import models
from hsvit_jax.models.vit import dhvt

IMAGES = {"image_size": (32, 32), "channels": 3, "num_classes": 5}


def small(family, **changes):
    """A network of the family's default variant at a smoke run's sizes."""
    settings = family.settings()
    for key, value in family.tiny(settings).items():
        section, _, name = key.rpartition(".")
        if section:
            settings[section] = {**settings[section], name: value}
        else:
            settings[key] = value
    return family.build({**settings, **changes}, **IMAGES)


@pytest.mark.parametrize("name", models.FAMILIES)
def test_every_tensor_has_its_place(name):
    """Names differ, shapes are those of the network's arrays, and each array is filled once."""
    family = models.FAMILIES[name]
    network = small(family)
    entries = torch_files.listing(name, network)
    tensors = state_dicts.drawn({entry.key: entry.shape for entry in entries})
    assert len(tensors) == len(entries)
    trees = torch_files.load(name, tensors, network)
    wanted = jax.eval_shape(network.init, jax.random.key(0))
    assert network.init_shapes() == wanted
    assert jax.tree.map(np.shape, trees) == jax.tree.map(np.shape, wanted)
    ours = np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(trees)])
    theirs = np.concatenate([tensor.ravel() for tensor in tensors.values()])
    np.testing.assert_array_equal(np.sort(ours), np.sort(theirs))


def test_settings_of_every_variant_have_its_name():
    for name, variant in models.VARIANTS:
        family = models.FAMILIES[name]
        settings = family.settings(variant)
        found = family.variant_of(settings, (224, 224))
        same = family.settings(found) | {"variant": variant}
        assert found == variant or same == settings
    assert family.variant_of({**settings, "backbone": "resnet"}, (224, 224)) == "custom"


def test_what_the_reference_does_not_know_is_told():
    network = small(dhvt.FAMILY, feed_forward="ffn", sope=False)
    with pytest.raises(ValueError, match=r"the reference's network has no \w+\.[\w.]+: choose"):
        torch_files.listing("dhvt", network)


def test_a_table_s_notation():
    """Taken-over words, parts of one array, axes of length 1, and a kernel's reversed axes."""
    network = small(models.FAMILIES["vit"])
    shapes = {entry.key: entry.shape for entry in torch_files.listing("vit", network)}
    assert shapes["vit.encoder.layer.1.attention.attention.key.weight"] == (16, 16)
    assert shapes["vit.encoder.layer.0.intermediate.dense.weight"] == (32, 16)
    assert shapes["vit.embeddings.cls_token"] == (1, 1, 16)
    assert math.prod(shapes["vit.embeddings.patch_embeddings.projection.weight"]) == 16 * 48
