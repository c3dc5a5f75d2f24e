"""The files in configs/: what they claim is what they build."""

import re
from pathlib import Path

import jax
import pytest

from hsvit_jax import config as config_lib
from hsvit_jax import configfile, data, models, train

FOLDER = Path(__file__).resolve().parents[1] / "configs"
FILES = {path.stem: path for path in sorted(FOLDER.glob("*.py"))}

# Network → parameters at 32 px, 3 channels, 10 classes, and at 64 px, 200 classes.
COUNTS = {
    "c2a2": (812_298, 824_648),
    "c3a4": (2_242_826, 2_255_176),
    "c4a8": (6_873_354, 6_885_704),
}


def count(config, **shape):
    size = {"image_size": (32, 32), "channels": 3, "num_classes": 10} | shape
    model = models.build(config.model.to_dict(), **size)
    params, _ = jax.eval_shape(model.init, jax.random.key(0))
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def test_every_named_network_has_a_file():
    assert set(FILES) == {variant for _, variant in models.VARIANTS} == set(COUNTS)


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_its_named_network(name):
    for argument in ("digits", "cifar100,paper,bf16", "cifar10,tiny"):
        from_file = configfile.get_config(f"{FILES[name]}:{argument}")
        assert from_file == configfile.get_config(f"{name}:{argument}")
    assert from_file.model.variant == name


@pytest.mark.parametrize("name", FILES)
def test_the_docstring_claims_the_true_counts(name):
    text = FILES[name].read_text().split('"""')[1]
    config = configfile.get_config(str(FILES[name]))
    found = re.findall(r"([\d,]+)\s+(?:parameters )?at (\d+) px and (\d+)", text)
    claims = [tuple(int(n.replace(",", "")) for n in claim) for claim in found]
    assert [claim[1:] for claim in claims] == [(32, 10), (64, 200)]
    for claimed, side, classes in claims:
        assert count(config, image_size=(side, side), num_classes=classes) == claimed
    assert tuple(claim[0] for claim in claims) == COUNTS[name]
    assert f"configs/{name}.py:folder=" in text  # the commands it shows are about itself
    assert not set(re.findall(r"c\da\d", text)) - {name}


@pytest.mark.parametrize("recipe", config_lib.RECIPES)
@pytest.mark.parametrize("data_set", config_lib.DATA_SETS)
@pytest.mark.parametrize("name", FILES)
def test_every_network_fits_every_data_set(name, data_set, recipe):
    config = configfile.get_config(f"{FILES[name]}:{data_set},{recipe}")
    info = data.describe(data_set)
    config = config_lib.resolve(config, info)
    model = train.build_model(config)
    size = (2, *config.data.image_size, config.data.channels)
    params, stats = jax.eval_shape(model.init, jax.random.key(0))
    logits, _ = jax.eval_shape(
        model.apply, params, stats, jax.ShapeDtypeStruct(size, jax.numpy.float32)
    )
    assert logits.shape == (2, info.num_classes)


@pytest.mark.parametrize("switch", config_lib.SWITCHES)
@pytest.mark.parametrize("name", FILES)
def test_every_switch_builds(name, switch):
    config = configfile.get_config(f"{FILES[name]}:digits,{switch}")
    model = train.build_model(config_lib.resolve(config, data.describe("digits")))
    assert jax.eval_shape(model.init, jax.random.key(0))[0]


def test_strides_follow_the_image_size():
    at = {}
    for side in (32, 64, 128):
        config = configfile.get_config("c4a8:digits", f"data.image_size={side}")
        config = config_lib.resolve(config, data.describe("digits"))
        at[side] = train.build_model(config).config.pool_strides
    assert at == {32: (2, 1, 2, 1), 64: (2, 2, 2, 1), 128: (2, 2, 2, 2)}
