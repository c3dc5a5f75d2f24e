"""Every family alike: published sizes and costs, training over devices, masks of dropout."""

import csv
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import small_runs, vix_files

from hsvit_jax import mesh, models
from hsvit_jax.models import costs

#: Family → image size and settings of a network that compiles quickly, whose sizes differ where
#: they can, with dropout wherever it has any. HSViT's and its backbones' are in tests of their own.
SMALL = {
    "vix": ((6, 9), {"patch": 3, "depth": 1, "dropout": 0.2, "embed_dropout": 0.2}),
    "levix": ((6, 9), {"stem_channels": (5,), "stem_strides": (2, 1), "depth": 1, "dropout": 0.2}),
    "ccx": (
        (4, 5),
        {"heads": 2, "depth": 1, "attention_dropout": 0.2, "dropout": 0.2, "drop_path": 0.5},
    ),
    "cvx": ((6, 7), {"depths": (1,), "stage_strides": (2,), "dropout": 0.2}),
    "pix": ((4, 6), {"depths": (1, 1), "patch": 1, "dropout": 0.2, "embed_dropout": 0.2}),
    "hvt": (
        (12, 20),
        {
            **{"patch": 4, "heads": 2, "head_dim": 3, "depth": 2, "stage_depth": 2},
            **{"mlp_ratio": 2.0, "drop_path": 0.5},
        },
    ),
    "deit": (
        (12, 20),
        {"patch": 4, "heads": 2, "head_dim": 3, "depth": 2, "mlp_ratio": 2.0, "drop_path": 0.5},
    ),
    "dhvt": (
        (8, 12),
        {
            **{"patch": 4, "heads": 2, "embed_dim": 8, "depth": 2, "mlp_ratio": 2.0},
            "drop_path": 0.5,
        },
    ),
    "vit": (
        (8, 8),
        {
            **{"patch": 4, "heads": 2, "head_dim": 4, "depth": 1, "mlp_dim": 12},
            **{"dropout": 0.2, "attention_dropout": 0.3},
        },
    ),
    "mobilevit": (
        (32, 48),
        {
            **{"channels": (4, 4, 4, 4, 4, 4, 5), "widths": (4, 4, 4), "heads": 2},
            **{"expand_ratio": 2.0, "dropout": 0.1, "attention_dropout": 0.2, "head_dropout": 0.1},
        },
    ),
    "swiftformer": (
        (16, 12),
        {
            **{"depths": (1, 2), "widths": (6, 10), "downsamples": (True,)},
            **{"drop_path": 0.3, "dropout": 0.1, "conv_drop_path": 0.3},
        },
    ),
    "cvt": (
        (16, 12),
        {
            **{"patches": (4, 3), "strides": (4, 2), "paddings": (2, 1), "widths": (4, 6)},
            **{"heads": (1, 3), "depths": (1, 2), "mlp_ratios": (2.0, 2.0), "kernels": (3, 3)},
            **{"qkv_bias": (True, False), "query_paddings": (1, 1), "key_paddings": (1, 1)},
            **{"key_strides": (2, 2), "dropouts": (0.1, 0.0), "attention_dropouts": (0.0, 0.2)},
            "drop_paths": (0.0, 0.3),
        },
    ),
    "efficientformer": (
        (16, 12),
        {
            **{"depths": (1, 2), "widths": (6, 10), "downsamples": (True,), "heads": 2},
            **{"key_dim": 3, "attention_ratio": 2.0, "drop_path": 0.3, "dropout": 0.1},
        },
    ),
    "swin": (
        (12, 16),
        {
            **{"patch": 2, "widths": (4, 8), "depths": (2, 1), "heads": (1, 2)},
            **{"windows": (2, 2), "drop_path": 0.5},
        },
    ),
    "t2t": ((32, 48), {"token_dim": 4, "embed_dim": 8, "depth": 1, "heads": 2}),
    "efficientvit": (
        (48, 32),
        {
            **{"depths": (1, 1), "widths": (8, 16), "heads": (1, 2), "key_dims": (3, 4)},
            **{"windows": (7, 7), "downsamples": (False, True), "head_dropout": 0.3},
        },
    ),
    "fastvit": (
        (24, 16),
        {
            **{"depths": (1, 1), "widths": (6, 96), "mlp_ratios": (2.0, 0.5)},
            **{"mixers": ("repmixer", "attention"), "position_kernels": (0, 3)},
            **{"downsamples": (False, True), "squeezes": (False, True), "top_ratio": 1.0},
            **{"drop_path": 0.3, "dropout": 0.1, "head_dropout": 0.1, "layer_scale": 0.5},
        },
    ),
    "smt": (
        (16, 24),
        {
            **{"depths": (1, 1), "widths": (6, 8), "modulated": (True, False), "heads": (0, 2)},
            **{"modulation_heads": (2, 0), "mlp_ratios": (2.0, 2.0), "layer_scale": 0.5},
            **{"drop_path": 0.3, "dropout": 0.1, "attention_dropout": 0.2},
        },
    ),
    "resnet": (
        (17, 20),
        {"block": "basic", "stem_channels": 4, "channels": (4, 6), "depths": (1, 1)},
    ),
    "efficientnet": ((32, 32), {"dropout": 0.3, "drop_rate": 0.3}),
    "mobilenet_v2": ((32, 32), {"dropout": 0.3}),
}
#: Of another one's parts; run by the longer suite.
SLOW_MASKS = {"deit", "mobilevit", "pix", "cvx", "levix", "mobilenet_v2", "swin"}
SLOW_MASKS |= {"efficientvit", "fastvit", "smt"}
FAST_BFLOAT16 = {"vix", "hvt", "dhvt", "swin"}
SLOW_DEVICES = set(SMALL) - {"vix", "hvt", "resnet"}


def small(name, **changes):
    """The small network of a family."""
    size, settings = SMALL[name]
    family = models.FAMILIES[name]
    if name in ("efficientnet", "mobilenet_v2"):
        own = family.settings()
        own |= family.tiny(own)
    else:
        own = vix_files.small(name) if "mixer" in family.defaults else family.settings()
    settings = {**own, **settings, **changes, "dtype": "float32"}
    return models.build(settings, image_size=size, channels=3, num_classes=5)


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
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW_DEVICES)) for n in SMALL]
)
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
            for apply in (network.apply, mesh.spread(network, mesh.make(1, 2, groups=0)))
        )
    one, many, stats = jax.device_get((one, many, stats))
    largest = max(np.abs(x).max() for x in jax.tree.leaves(one))
    assert np.isfinite(largest)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-9 * largest), many, one)
    changed = jax.tree.map(lambda a, b: np.abs(a - b).max() > 0, one[1][1], stats)
    assert all(jax.tree.leaves(changed))


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW_MASKS)) for n in SMALL if n != "resnet"],
)
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


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in FAST_BFLOAT16)) for n in SMALL]
)
def test_bfloat16_computes_narrow(name):
    """Every product is of bfloat16 numbers, but those of a Performer's features."""
    network = small(name)
    trees = network.init_shapes()
    images = jax.ShapeDtypeStruct((2, *network.config.image_size, 3), jnp.float32)
    narrow = type(network)(network.config, jnp.bfloat16)
    program = jax.jit(lambda *args: narrow.apply(*args)[0]).lower(*trees, images)
    assert program.out_info.dtype == jnp.float32
    product = re.compile(r"stablehlo\.(dot_general|convolution)\b")
    lines = [line for line in program.as_text().splitlines() if product.search(line)]
    assert lines and (name == "t2t" or all("xbf16>" in line for line in lines))
