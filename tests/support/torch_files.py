"""PyTorch files of a family by its name: settings, tensors, and the trees made of them."""

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
