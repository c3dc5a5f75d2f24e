"""What mixing costs as the sequence grows: who is linear, and that the files say it."""

import csv

import pytest
from PIL import Image

from hsvit_jax import main, report
from hsvit_jax.benchmark import sequence_length

SMALL = {"heads": 2, "head_dim": 16, "embed_dim": 16, "mlp_dim": 16, "depth": 1}
SMALL |= {"landmarks": 16, "projections": 16, "features": 24}
COSTS = ("forward_flops", "training_flops", "forward_bytes", "training_bytes")


@pytest.fixture(scope="module")
def rows():
    """Every mixer at 512 and 1,024 tokens, eight images."""
    return {
        (mixer, tokens): sequence_length.measure(mixer, tokens, 8, **SMALL)
        for mixer in sequence_length.mixer_config.NAMES
        for tokens in (512, 1024)
    }


@pytest.mark.slow
@pytest.mark.parametrize("mixer", ["performer", "linformer", "nystrom", "fnet"])
def test_linear_mixers_are_linear(rows, mixer):
    for cost in COSTS:
        growth = getattr(rows[mixer, 1024], cost) / getattr(rows[mixer, 512], cost)
        assert 1.5 < growth <= 2.2, cost


@pytest.mark.slow
def test_softmax_is_not(rows):
    small, large = rows["softmax", 512], rows["softmax", 1024]
    # Not the forward's memory: a back end may fuse its products and never hold the weights.
    for cost in ("forward_flops", "training_flops", "training_bytes"):
        assert getattr(large, cost) / getattr(small, cost) > 3, cost
    mlp = [rows["mlp_mixer", tokens] for tokens in (512, 1024)]
    assert mlp[1].training_flops / mlp[0].training_flops > 3
    assert mlp[1].parameters / mlp[0].parameters > 3


@pytest.mark.slow
@pytest.mark.parametrize("mixer", ["performer", "linformer", "nystrom"])
def test_linear_attention_trains_in_a_third_of_softmaxs_memory(rows, mixer):
    assert rows[mixer, 1024].training_bytes < rows["softmax", 1024].training_bytes / 3


@pytest.mark.slow
def test_files_hold_every_row(rows, tmp_path):
    table, plot = sequence_length.write(list(rows.values()), tmp_path / "new")
    with table.open(newline="", encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    assert len(found) == len(rows)
    assert {(row["mixer"], int(row["tokens"])) for row in found} == set(rows)
    assert int(found[0]["training_bytes"]) == rows["softmax", 512].training_bytes
    with Image.open(plot) as picture:
        assert picture.size[0] > 800
    text = report.markdown(sequence_length.table(list(rows.values())))
    share = rows["nystrom", 1024].training_bytes / rows["softmax", 1024].training_bytes
    assert f"| {share:.2f} |" in text and len(text.splitlines()) == 2 + len(rows)


def test_mistakes_say_so(capsys, tmp_path):
    for words, code, message in (
        (["--tokens=300"], 1, "powers of two"),
        (["--tokens=a"], 2, "whole numbers"),
        (["--mixers=nobody"], 2, "unknown --mixers"),
        (["--mixers=nystrom", "--tokens=16"], 1, "landmarks=64"),
        (["word"], 2, "unexpected words"),
        (["--batch=0"], 2, "batch"),
    ):
        assert main.main(["hsvit", "sequence-length", *words, f"--out={tmp_path}"]) == code
        assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
