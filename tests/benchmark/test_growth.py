"""How costs grow with a network's sizes: what is measured and written."""

import csv

import pytest
import sequence_length
import step_growth
from PIL import Image

from hsvit_jax import artifacts

SMALL = {"heads": 2, "head_dim": 16, "embed_dim": 16, "mlp_dim": 16, "depth": 1}
SMALL |= {"landmarks": 16, "projections": 16, "features": 24}
COSTS = ("forward_flops", "training_flops", "forward_bytes", "training_bytes")
SPEC = "c2a2:digits,tiny"


@pytest.fixture(scope="module")
def mixers():
    """Every mixer at 512 and 1,024 tokens, eight images."""
    return {
        (mixer, tokens): sequence_length.measure(mixer, tokens, 8, **SMALL)
        for mixer in sequence_length.mixer_config.NAMES
        for tokens in (512, 1024)
    }


@pytest.fixture(scope="module")
def steps():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(step_growth.SERIES, "depth", [("model.depth", "3")])
        return step_growth.measure(SPEC, 8, rounds=1, series=["depth"])


@pytest.mark.slow
def test_linear_mixers_are_linear_and_the_others_are_not(mixers):
    def growth(mixer, cost):
        return getattr(mixers[mixer, 1024], cost) / getattr(mixers[mixer, 512], cost)

    for mixer in ("performer", "linformer", "nystrom", "fnet"):
        for cost in COSTS:
            assert 1.5 < growth(mixer, cost) <= 2.2, (mixer, cost)
    # Not the forward's memory: a back end may fuse its products and never hold the weights.
    for cost in ("forward_flops", "training_flops", "training_bytes"):
        assert growth("softmax", cost) > 3, cost
    assert min(growth("mlp_mixer", cost) for cost in ("training_flops", "parameters")) > 3
    for mixer in ("performer", "linformer", "nystrom"):
        softmax = mixers["softmax", 1024].training_bytes
        assert mixers[mixer, 1024].training_bytes < softmax / 3, mixer


@pytest.mark.slow
def test_ratios_are_to_the_unchanged_step(steps):
    base, deeper = steps
    assert (base.series, base.seconds_ratio, base.flops_ratio) == ("as it is", 1, 1)
    assert (deeper.series, deeper.value, deeper.batch) == ("depth", "3", 8)
    assert deeper.flops_ratio == deeper.flops / base.flops > 1
    assert deeper.workspace > base.workspace
    assert deeper.seconds_ratio == pytest.approx(deeper.seconds / base.seconds)


@pytest.mark.slow
def test_files_and_tables_hold_every_row(mixers, steps, tmp_path):
    share = mixers["nystrom", 1024].training_bytes / mixers["softmax", 1024].training_bytes
    for module, rows, table, cell in (
        (sequence_length, [*mixers.values()], sequence_length.table, f"{share:.2f}"),
        (
            *(step_growth, steps, lambda rows: artifacts.table(step_growth.COLUMNS, rows)),
            f"{steps[1].flops_ratio:.2f}×",
        ),
    ):
        names, plot = module.write(rows, tmp_path / "new")
        with names.open(newline="", encoding="utf-8") as file:
            found = list(csv.DictReader(file))
        assert found == [{k: str(v) for k, v in vars(row).items()} for row in rows]
        with Image.open(plot) as picture:
            assert picture.size[0] > 800
        text = artifacts.markdown(table(rows))
        assert f"| {cell} |" in text and len(text.splitlines()) == 2 + len(rows)
