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
