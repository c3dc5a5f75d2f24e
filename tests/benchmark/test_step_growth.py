"""How a step grows: what is measured, what is written, and mistakes."""

import csv

import pytest
from PIL import Image

from hsvit_jax import main, report
from hsvit_jax.benchmark import step_growth

SPEC = "c2a2:digits,tiny"


@pytest.fixture(scope="module")
def rows():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(step_growth.SERIES, "depth", [("model.depth", "3")])
        return step_growth.measure(SPEC, 8, rounds=1, series=["depth"])


@pytest.mark.slow
def test_ratios_are_to_the_unchanged_step(rows):
    base, deeper = rows
    assert (base.series, base.seconds_ratio, base.flops_ratio) == ("as it is", 1, 1)
    assert (deeper.series, deeper.value, deeper.batch) == ("depth", "3", 8)
    assert deeper.flops_ratio == deeper.flops / base.flops > 1
    assert deeper.workspace > base.workspace
    assert deeper.seconds_ratio == pytest.approx(deeper.seconds / base.seconds)


@pytest.mark.slow
def test_files_hold_every_row(rows, tmp_path):
    table, plot = step_growth.write(rows, tmp_path / "new")
    with table.open(newline="", encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    assert [row["series"] for row in found] == ["as it is", "depth"]
    assert float(found[1]["flops"]) == rows[1].flops
    with Image.open(plot) as picture:
        assert picture.size[0] > 800
    text = report.markdown(report.table(step_growth.COLUMNS, rows))
    assert f"| {rows[1].flops_ratio:.2f}× |" in text and len(text.splitlines()) == 2 + len(rows)


def test_mistakes_say_so(capsys, tmp_path):
    for words, code, message in (
        ([], 2, "step-growth needs --config=FILE"),
        (["word"], 2, "unexpected words"),
        ([f"--config={SPEC}", "--series=height"], 2, "unknown --series ['height']"),
        ([f"--config={SPEC}", "--batch=0"], 2, "batch"),
        (["--config=nowhere.py"], 2, "nowhere.py"),
        ([f"--config={SPEC}", "--config.model.dept=2"], 2, "dept"),
    ):
        assert main.main(["hsvit", "step-growth", *words, f"--out={tmp_path}"]) == code
        assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
