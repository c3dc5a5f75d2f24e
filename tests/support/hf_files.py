"""Goldens and small state dicts of the `transformers` baselines, and checks that all share."""

import json

import jax
import numpy as np
from support import small_runs, torch_files

from hsvit_jax import config as configs
from hsvit_jax import models
from hsvit_jax.commands import convert


def check_golden(source, out, family):
    """The file names its family, is converted, and agrees to 1e-9: the converter's are float64;
    to 1e-6 with rotary positions, whose table is float32."""
    report = convert.convert_file(source, out)
    with np.load(source) as golden:
        assert report["parameters"] == json.loads(golden["config"].item())["n_params"]
    written = configs.from_json((out / "config.json").read_text())
    tolerance = 1e-6 if written.model.get("positions") == "rope" else 1e-9
    assert report["max_abs_error"] <= tolerance * report["max_abs_logit"]
    assert (written.model.family, written.model.variant) == (family, "custom")


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
    ours = jax.eval_shape(network.init, jax.random.key(0))
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


def random_state(model, seed=1):
    """Parameters and statistics of a network that all matter, drawn at random."""
    return small_runs.random_tree(jax.eval_shape(model.init, jax.random.key(seed)))


def check_masks(model):
    """What is dropped in training is a function of key and example; and there is a gradient."""
    params, stats = random_state(model)
    size = (4, *model.config.image_size, model.config.image_channels)
    images = np.random.default_rng(2).normal(size=size).astype(np.float32)

    def loss(p):
        return model.apply(p, stats, images, train=True, dropout_key=jax.random.key(3))[0].sum()

    gradient = jax.eval_shape(jax.grad(loss), params)  # traced, not compiled
    assert jax.tree.map(np.shape, gradient) == jax.tree.map(np.shape, params)

    @jax.jit
    def run(images, ids, key):
        return model.apply(params, stats, images, dropout_key=key, example_ids_B=ids)[0]

    ids = np.array([5, 9, 2, 7])
    first = run(images, ids, jax.random.key(3))
    np.testing.assert_array_equal(first, run(images, ids, jax.random.key(3)))
    turned = run(images[::-1], ids[::-1], jax.random.key(3))
    np.testing.assert_allclose(turned[::-1], first, rtol=1e-4, atol=1e-4)
    assert np.abs(first - run(images, ids, jax.random.key(4))).max() > 1e-3
    assert np.abs(first - run(images, ids + 1, jax.random.key(3))).max() > 1e-3
