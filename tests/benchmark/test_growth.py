"""How costs grow with the tokens of a network and the sizes of an HSViT."""

import pytest
import sequence_length
import step_growth

from hsvit_jax import artifacts

SMALL = {"heads": 2, "head_dim": 16, "embed_dim": 16, "mlp_dim": 16, "depth": 1}
SMALL |= {"landmarks": 16, "projections": 16, "features": 24}
COSTS = ("forward_flops", "training_flops", "forward_bytes", "training_bytes")


@pytest.mark.slow
def test_linear_mixers_are_linear_and_the_others_are_not(tmp_path):
    mixers = {
        (mixer, tokens): sequence_length.measure(mixer, tokens, 8, **SMALL)
        for mixer in sequence_length.mixer_config.NAMES
        for tokens in (512, 1024)
    }

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
    table, plot = sequence_length.write([*mixers.values()], tmp_path / "new")
    assert len(table.read_text().splitlines()) == 1 + len(mixers) and plot.is_file()


@pytest.mark.slow
def test_ratios_are_to_the_unchanged_step(monkeypatch):
    monkeypatch.setitem(step_growth.SERIES, "depth", [("model.depth", "3")])
    base, deeper = step_growth.measure("c2a2:digits,tiny", 8, rounds=1, series=["depth"])
    assert (base.series, base.seconds_ratio, base.flops_ratio) == ("as it is", 1, 1)
    assert (deeper.series, deeper.value, deeper.batch) == ("depth", "3", 8)
    assert deeper.flops_ratio == deeper.flops / base.flops > 1
    assert deeper.seconds_ratio == pytest.approx(deeper.seconds / base.seconds)
    text = artifacts.markdown(artifacts.table(step_growth.COLUMNS, [base, deeper]))
    assert f"| {deeper.flops_ratio:.2f}× |" in text
