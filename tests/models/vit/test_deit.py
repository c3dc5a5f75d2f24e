"""DeiT: exact sizes and costs, with and without CLS, and a schedule of PoWER for its FLOPs."""

import jax
import pytest

from hsvit_jax import models
from hsvit_jax.models import costs
from hsvit_jax.models.vit import deit

#: (variant, classes) at 224 pixels → trained values, 10⁻⁹ multiply-adds (HVT paper, tables 1, 2,
#: 9; of PoWER, whose schedule is ours, to the paper's two digits).
COSTS = {
    ("ti", 1000): (5_717_416, 1.2537),
    ("ti", 100): (5_543_716, 1.2535),
    ("s", 1000): (22_050_664, 4.5989),
    ("s", 100): (21_704_164, 4.5985),
    ("ti-nocls", 1000): (5_717_032, 1.2466),
    ("ti-nocls", 100): (5_543_332, 1.2464),
    ("s-nocls", 100): (21_703_396, 4.5737),
    ("ti-power", 1000): (5_717_416, 0.80),
    ("s-power", 1000): (22_050_664, 2.70),
}


def built(variant, size, classes, **changes):
    settings = {"family": "deit", "dtype": "float32", **deit.DEFAULTS, **deit.VARIANTS[variant]}
    return models.build(
        {**settings, **changes}, image_size=(size, size), channels=3, num_classes=classes
    )


@pytest.mark.parametrize("case", COSTS, ids=str)
def test_parameters_and_multiply_adds(case):
    variant, classes = case
    model = built(variant, 224, classes)
    params, _ = jax.eval_shape(model.init, jax.random.key(0))
    macs, digits = costs.multiply_adds(model), 2 if "power" in variant else 4
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert count == COSTS[case][0]
    assert round(macs / 1e9, digits) == COSTS[case][1]
    retained = model.config.retained or (model.config.tokens,) * model.config.depth
    assert deit.multiply_adds(model.config, retained) == macs


def test_every_named_variant_has_a_count():
    assert set(deit.VARIANTS) == {variant for variant, _ in COSTS}
    assert {("deit", variant) for variant in deit.VARIANTS} <= set(models.VARIANTS)


def test_the_schedule_follows_the_image():
    tokens = built("s-power", 224, 10).config.retained
    assert len(tokens) == 12 and tokens[0] < 197 and list(tokens) == sorted(tokens)[::-1]
    small = built("s-power", 32, 10, patch=4).config
    assert small.tokens == 65 and 1 <= small.retained[-1] < small.retained[0] < 65
    assert built("s", 32, 10, patch=4, retained=(9,) * 12).config.retained == (9,) * 12
    assert built("s", 32, 10, patch=4).config.retained == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"retained": (9,) * 12, "flops_share": 0.5}, r"retained=\(9, .*flops_share=0.5 both"),
        ({"retained": (9, 8)}, r"depth=12 blocks; got 2: \(9, 8\)"),
        ({"retained": (66,) * 12}, r"retained\[0\]=66 must be from 1 to 65"),
        ({"retained": (9, 10) + (1,) * 10}, r"retained\[1\]=10 must be from 1 to 9"),
        ({"flops_share": 0.01}, r"flops_share=0.01 cannot be reached.*the least is 0\.\d+"),
        ({"flops_share": 1.5}, r"flops_share must be in \(0, 1\]; got 1.5"),
        ({"patch": 5}, "32×32 pixels cannot be cut into patches of patch=5"),
    ],
)
def test_settings_that_do_not_fit_say_so(changes, message):
    with pytest.raises(ValueError, match=message):
        built("s", 32, 10, **{"patch": 4, **changes})
