"""PyTorch files of a family by its name: settings, tensors, and the trees made of them."""

import numpy as np

from hsvit_jax import models


def settings(family, tensors, given):
    """Sections `model` and `data` that a file tells."""
    return models.torch_settings(models.FAMILIES[family], tensors, given)


def listing(family, network):
    """Every tensor of such a network's file."""
    return models.FAMILIES[family].torch_weights.entries(network)


def load(family, tensors, network):
    """(params, stats) of a file."""
    return models.FAMILIES[family].torch_weights.load(tensors, network)


def variant_of_shapes(family, variant, side=224):
    """The name that the shapes alone of a variant's file give it."""
    record = models.FAMILIES[family]
    sizes = {"image_size": (side, side), "channels": 3, "num_classes": 1000}
    entries = listing(family, record.build(record.settings(variant), **sizes))
    tensors = {entry.key: np.broadcast_to(np.float32(0), entry.shape) for entry in entries}
    model, data = settings(family, tensors, {"image_size": side})
    assert data == sizes
    return model["variant"]
