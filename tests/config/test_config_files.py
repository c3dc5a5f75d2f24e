"""The files in configs/: what they claim is what they build."""

import csv
import itertools
import operator
import re
from pathlib import Path

import jax
import pytest
from support.small_runs import sizes_of

from hsvit_jax import config as config_lib
from hsvit_jax import data, models, train
from hsvit_jax.config import variants

FOLDER = Path(__file__).resolve().parents[2] / "configs"
FILES = {path.stem: path for path in sorted(FOLDER.glob("*.py"))}
FILES |= {family: FILES.pop(name) for name, family in variants.OF_FILE.items()}

NAMED = tuple(models.FAMILIES["hsvit"].variants)
SIBLINGS = tuple(variants.siblings())


def count(config, **shape):
    size = {"image_size": (32, 32), "channels": 3, "num_classes": 10} | shape
    model = models.build(config.model.to_dict(), **size)
    params, _ = model.init_shapes()
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def test_every_named_network_has_a_file():
    assert set(FILES) == {*NAMED, *SIBLINGS}


@pytest.mark.parametrize("name", [*NAMED, *SIBLINGS])
def test_a_file_is_its_named_network(name):
    for argument in ("", "digits", "imagenet,paper,bf16", "cifar10,tiny"):
        from_file = config_lib.get_config(f"{FILES[name]}:{argument}")
        assert from_file == config_lib.get_config(f"{name}:{argument}")
    for variant in models.FAMILIES[name].variants if name in SIBLINGS else ():
        assert config_lib.get_config(f"{name}:{variant}").model.variant == variant


@pytest.fixture(scope="module")
def counted(golden_dir):
    """(family, variant, pixels, classes) → parameters, as test_families counts them."""
    rows = csv.DictReader((golden_dir / "counts.csv").read_text().splitlines())
    columns = operator.itemgetter("family", "variant", "pixels", "classes")
    return {columns(row): int(row["parameters"]) for row in rows}


@pytest.mark.parametrize("slow", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", SIBLINGS)
def test_a_family_s_docstring_claims_the_true_counts(family, slow, counted):
    """In the fast suite those that test_families counts, and the first and last of all."""
    text = " ".join(FILES[family].read_text().split('"""')[1].split("\n"))
    shapes = [(int(a), int(b)) for a, b in re.findall(r"(\d+) px and (\d+) classes", text)]
    lines = re.findall(r"^ {4}(\S+) +([\d,]+) +([\d,]+)$", FILES[family].read_text(), re.M)
    assert len(shapes) == 2 and len(lines) >= min(4, len(models.FAMILIES[family].variants))
    for number, (variant, *claims) in enumerate(lines):
        config = config_lib.get_config(f"{family}:{variant}")
        for shape, claim in zip(shapes, claims, strict=True):
            side, classes = shape
            true = counted.get((family, variant, str(side), str(classes)))
            ends = (0, shapes[0]), (len(lines) - 1, shapes[1])
            if not true and (slow or (number, shape) in ends):
                true = count(config, image_size=(side, side), num_classes=classes)
            assert not true or f"{true:,}" == claim, variant


@pytest.mark.parametrize("family", SIBLINGS)
def test_a_family_s_docstring_names_its_variants_and_default(family):
    text = FILES[family].read_text()
    assert variants.siblings()[family].default_variant in text
    assert ("`model.batch_coupling=False`" in text) == (
        "batch_coupling" in models.FAMILIES[family].defaults
    )
    commands = re.findall(r"--config=(\S+)", text)
    assert len(commands) == 3
    for command in commands:
        assert command.startswith(f"configs/{FILES[family].name}:")
        assert config_lib.get_config(f"{FOLDER.parent}/{command}").model.family == family


@pytest.mark.parametrize("name", [*NAMED, *SIBLINGS])
def test_every_network_fits_every_data_set(name):
    """What differs in its classes or its rates of dropout alone is one network; the one of the
    smallest images is built too. Each recipe has some of the data sets."""
    networks, recipes = {}, itertools.cycle(config_lib.RECIPES)
    for data_set in (name for name in config_lib.DATA_SETS if "/" not in name):
        config = config_lib.get_config(f"{name}:{data_set},{next(recipes)}")
        config = config_lib.resolve(config, data.describe(data_set))
        sizes = str({k: v for k, v in config.model.items() if "drop" not in k})
        networks[sizes, *config.data.image_size, config.data.channels] = config
    smallest, *rest = sorted(networks.values(), key=lambda config: config.data.image_size)
    assert train.build_model(smallest).config.image_size == smallest.data.image_size
    for config in rest:
        assert sizes_of(config).image_size == config.data.image_size


@pytest.mark.parametrize("name", [*NAMED, *SIBLINGS])
def test_a_small_network_classifies(name):
    """Shapes alone: logits of the right size, in float32 though computed in bfloat16."""
    config = config_lib.get_config(f"{name}:digits,tiny,bf16")
    model = train.build_model(config_lib.resolve(config, data.describe("digits")))
    params, stats = model.init_shapes()
    images = jax.ShapeDtypeStruct((2, 32, 32, 1), jax.numpy.float32)
    logits, _ = jax.eval_shape(model.apply, params, stats, images)
    assert (logits.shape, logits.dtype) == ((2, 10), jax.numpy.float32)


@pytest.mark.parametrize("name", NAMED)
def test_the_docstring_claims_the_true_counts(name):
    text = FILES[name].read_text().split('"""')[1]
    config = config_lib.get_config(str(FILES[name]))
    found = re.findall(r"([\d,]+)\s+(?:parameters )?at (\d+) px and (\d+)", text)
    claims = [tuple(int(n.replace(",", "")) for n in claim) for claim in found]
    assert [claim[1:] for claim in claims] == [(32, 10), (64, 200)]
    for claimed, side, classes in claims:
        assert count(config, image_size=(side, side), num_classes=classes) == claimed
    assert f"configs/{name}.py:folder=" in text  # the commands it shows are about itself
    assert not set(re.findall(r"c\da\d", text)) - {name}
