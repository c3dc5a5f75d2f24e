"""DeiT: the cost of a schedule of retained tokens, and PoWER's schedule for its FLOPs."""

import pytest
from support import hf_files

from hsvit_jax.models import costs
from hsvit_jax.models.vit import deit


@pytest.mark.parametrize("variant", ["ti-nocls", "s-power"])
def test_the_formula_of_a_schedule_s_cost(variant):
    """And the share of PoWER's is the paper's, table 1, to its two digits."""
    model = hf_files.network("deit", variant, (224, 224), 1000)
    macs = costs.multiply_adds(model)
    retained = model.config.retained or (model.config.tokens,) * model.config.depth
    assert deit.multiply_adds(model.config, retained) == macs
    assert variant != "s-power" or round(macs / 1e9, 2) == 2.70


def test_the_schedule_follows_the_image():
    tokens = hf_files.network("deit", "s-power", (224, 224)).config.retained
    assert len(tokens) == 12 and tokens[0] < 197 and list(tokens) == sorted(tokens)[::-1]
    small = hf_files.network("deit", "s-power", (32, 32), patch=4).config
    assert small.tokens == 65 and 1 <= small.retained[-1] < small.retained[0] < 65
    assert (
        hf_files.network("deit", "s", (32, 32), patch=4, retained=(9,) * 12).config.retained
        == (9,) * 12
    )
    assert hf_files.network("deit", "s", (32, 32), patch=4).config.retained == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"retained": (9,) * 12, "flops_share": 0.5}, r"retained=\(9, .*flops_share=0.5 both"),
        ({"retained": (9, 8)}, r"depth=12 blocks; got 2: \(9, 8\)"),
        ({"retained": (66,) * 12}, r"retained\[0\]=66 must be from 1 to 65"),
        ({"retained": (9, 10) + (1,) * 10}, r"retained\[1\]=10 must be from 1 to 9"),
        ({"flops_share": 0.01}, r"flops_share=0.01 cannot be reached.*the least is 0\.\d+"),
        ({"patch": 5}, "32×32 pixels cannot be cut into patches of patch=5"),
    ],
)
def test_settings_that_do_not_fit_say_so(changes, message):
    with pytest.raises(ValueError, match=message):
        hf_files.network("deit", "s", (32, 32), **{"patch": 4, **changes})
