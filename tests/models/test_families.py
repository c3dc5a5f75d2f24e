"""Every family alike, as its record has it: published sizes and costs, training over devices, masks
of dropout, and a table of tensors.
"""

import csv
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util
from support import small_runs, state_dicts, torch_files

from hsvit_jax import mesh, models
from hsvit_jax.models import costs

SIZE = (32, 48)
#: Of another one's parts; run by the longer suite.
SLOW_MASKS = {"deit", "mobilevit", "pix", "cvx", "levix", "mobilenet_v2", "swin", "hsvit_backbone"}
SLOW_MASKS |= {"efficientvit", "fastvit", "smt", "t2t", "efficientformer", "swiftformer", "cvt"}
FAST_BFLOAT16 = {"vix", "hvt", "dhvt", "swin"}
FAST_DEVICES = {"vix", "hvt", "resnet"}


def small(name, **changes):
    """A network of the family's default variant at a smoke run's sizes, with every dropout."""
    family = models.FAMILIES[name]
    settings = {**family.settings(), "dtype": "float32"}
    for key, value in family.tiny(settings).items():
        section, _, key = key.rpartition(".")
        if section:
            settings[section] = {**settings[section], key: value}
        else:
            settings[key] = value
    for key, value in settings.items():
        if "drop" in key and isinstance(value, float | tuple):
            settings[key] = (0.25,) * len(value) if isinstance(value, tuple) else 0.25
    return models.build({**settings, **changes}, image_size=SIZE, channels=3, num_classes=5)


def of_families(fast, *without):
    """All families but some as parameters, those that are not `fast` for the longer suite."""
    names = [name for name in models.FAMILIES if name not in without]
    return [pytest.param(n, marks=[pytest.mark.slow] * (n not in fast)) for n in names]


def published(golden_dir):
    """Family → rows of the table of published counts: HSViT's paper (tables 2 and 3), ViX's (1 to
    6), HVT's (1 to 9), DHVT's supplement, DeiT's, and the references' code."""
    rows = list(csv.DictReader((golden_dir / "counts.csv").read_text().splitlines()))
    return {name: [row for row in rows if row["family"] == name] for name in models.FAMILIES}


@pytest.mark.parametrize("slow", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", models.FAMILIES)
def test_parameters_and_costs_are_the_published_ones(golden_dir, family, slow):
    """Of every variant, but for backbones that table 3 has not. A cost is right to its last digit,
    rounded or cut off. All but the default variant, other sizes of it, and costs from 224 px on are
    the longer suite's."""
    rows = published(golden_dir)[family]
    uncounted = set(models.FAMILIES[family].variants) - {row["variant"] for row in rows}
    assert not uncounted or family == "hsvit_backbone"
    if not slow:
        first = {row["variant"]: row for row in reversed(rows)}
        rows = [first.get(models.FAMILIES[family].default_variant, rows[-1])]
    for row in rows:
        settings = models.FAMILIES[family].settings(row["variant"])
        network = models.build(
            {**settings, "dtype": "float32"},
            image_size=(int(row["pixels"]),) * 2,
            channels=3,
            num_classes=int(row["classes"]),
        )
        assert costs.parameters(network) == int(row["parameters"]), row
        if row["cost"] and (slow or int(row["pixels"]) < 224):
            number, unit = row["cost"].split()
            giga = {"GMAC": costs.multiply_adds, "GFLOP": costs.flops}[unit](network) / 1e9
            digits = len(number.partition(".")[2])
            assert abs(giga - float(number)) <= 0.6 * 10**-digits, (row, giga)


@pytest.mark.cpu
@pytest.mark.parametrize("name", of_families(FAST_DEVICES))
def test_training_over_devices(name):
    """Logits, gradients and statistics of a batch on two devices are those on one, with the same
    masks; in float64, because small batches' norms amplify rounding."""
    network = small(name)
    values = small_runs.made_up_values(network)
    with jax.enable_x64(True):
        params, stats = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), values)
    size = (4, *network.config.image_size, 3)
    images = np.random.default_rng(1).normal(size=size)

    def results(apply):
        def loss(p):
            options = {"train": True, "dropout_key": jax.random.key(3)}
            logits, after = apply(p, stats, images, **options)
            return (logits**2).mean(), (logits, after)

        return jax.jit(jax.grad(loss, has_aux=True))(params)

    with jax.enable_x64(True):
        one, many = (
            results(apply)
            for apply in (
                network.apply,
                mesh.spread(network, mesh.make(1, 2, groups=network.group_axis_limit)),
            )
        )
    one, many, stats = jax.device_get((one, many, stats))
    largest = max(np.abs(x).max() for x in jax.tree.leaves(one))
    assert np.isfinite(largest)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-9 * largest), many, one)
    changed = jax.tree.map(lambda a, b: np.abs(a - b).max() > 0, one[1][1], stats)
    flat = traverse_util.flatten_dict(changed)  # a Performer's random features stay
    assert all(moved != (path[-1] == "features") for path, moved in flat.items())


@pytest.mark.parametrize("name", of_families({*models.FAMILIES} - SLOW_MASKS, "resnet", "resnext"))
def test_masks_follow_key_and_example(name):
    network = small(name)
    params, stats = small_runs.made_up_values(network)
    size = (4, *network.config.image_size, 3)
    images = np.random.default_rng(2).normal(size=size).astype(np.float32)

    @jax.jit
    def run(images, ids, key):
        return network.apply(params, stats, images, dropout_key=key, example_ids_B=ids)[0]

    ids = np.array([5, 9, 2, 7])
    first = run(images, ids, jax.random.key(3))
    turned = run(images[::-1], ids[::-1], jax.random.key(3))
    np.testing.assert_allclose(turned[::-1], first, rtol=1e-4, atol=1e-4)
    assert np.abs(first - run(images, ids, jax.random.key(4))).max() > 1e-3
    assert np.abs(first - run(images, ids + 1, jax.random.key(3))).max() > 1e-3


@pytest.mark.parametrize("name", of_families(FAST_BFLOAT16))
def test_bfloat16_computes_narrow(name):
    """Every product is of bfloat16 numbers, but those of Performers and Nyström."""
    mixer = {"mixer": "softmax"} if "mixer" in models.FAMILIES[name].defaults else {}
    network = small(name, **mixer)
    trees = network.init_shapes()
    images = jax.ShapeDtypeStruct((2, *network.config.image_size, 3), jnp.float32)
    narrow = type(network)(network.config, jnp.bfloat16)
    program = jax.jit(lambda *args: narrow.apply(*args)[0]).lower(*trees, images)
    assert program.out_info.dtype == jnp.float32
    product = re.compile(r"stablehlo\.(dot_general|convolution)\b")
    lines = [line for line in program.as_text().splitlines() if product.search(line)]
    assert lines and (name == "t2t" or all("xbf16>" in line for line in lines))


@pytest.mark.parametrize("name", models.FAMILIES)
def test_every_tensor_has_its_place(name):
    """Names differ, shapes are those of the network's arrays, and each array is filled once."""
    network = small(name)
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
    network = small("dhvt", feed_forward="ffn", sope=False)
    with pytest.raises(ValueError, match=r"the reference's network has no \w+\.[\w.]+: choose"):
        torch_files.listing("dhvt", network)


def test_a_table_s_notation():
    """Taken-over words, parts of one array, axes of length 1, and a kernel's reversed axes."""
    network = small("vit")
    shapes = {entry.key: entry.shape for entry in torch_files.listing("vit", network)}
    assert shapes["vit.encoder.layer.1.attention.attention.key.weight"] == (16, 16)
    assert shapes["vit.encoder.layer.0.intermediate.dense.weight"] == (32, 16)
    assert shapes["vit.embeddings.cls_token"] == (1, 1, 16)
    assert math.prod(shapes["vit.embeddings.patch_embeddings.projection.weight"]) == 16 * 48
