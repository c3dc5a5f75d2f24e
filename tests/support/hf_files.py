"""Goldens and small state dicts of the `transformers` baselines, and checks that all share."""

import jax
import numpy as np
from support import torch_files

from hsvit_jax import models


def small_file(family, given, shapes=(), image=(3, 8, 8)):
    """Random tensors of the shapes that `given` asks for, as a golden holds them.

    shapes: those of the tensors that tell channels and classes, by key.
    """
    tensors = {key: np.zeros(shape, np.float32) for key, shape in dict(shapes).items()}
    tensors["input"] = np.zeros((1, *image), np.float32)
    model, data = torch_files.settings(family, tensors, given)
    network = torch_files.build(model, data)
    assert set(model) == {"family", "variant", *models.FAMILIES[family].defaults}
    rng = np.random.default_rng(0)
    for entry in torch_files.listing(family, network):
        tensors[entry.key] = rng.random(entry.shape, np.float32)
    return network, tensors, model


def check_every_tensor_has_its_place(family, *case, **image):
    """Shapes and names of what is converted are those of the network; no two share a place."""
    network, tensors, model = small_file(family, *case, **image)
    params, stats = torch_files.load(family, tensors, network)
    ours = network.init_shapes()
    shapes = jax.tree.map(np.shape, (params, stats))
    assert shapes == jax.tree.map(np.shape, ours)
    theirs = sum(int(np.prod(entry.shape)) for entry in torch_files.listing(family, network))
    assert theirs == sum(np.size(leaf) for leaf in jax.tree.leaves((params, stats)))
    return network, model


def network(family, variant="", size=(64, 64), classes=10, **changes):
    """A network of a family's variant with changed settings."""
    module = models.FAMILIES[family]
    settings = {"family": family, "dtype": "float32", **module.defaults}
    settings |= {**module.variants.get(variant, {}), **changes}
    return models.build(settings, image_size=size, channels=3, num_classes=classes)
