"""How costs grow with the tokens of a network and the sizes of an HSViT."""

import pytest
import sequence_length

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
