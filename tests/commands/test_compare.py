"""The comparison: one row for each system, equal conditions, and what it writes."""

import csv

import pytest

from hsvit_jax import config as config_lib
from hsvit_jax import main
from hsvit_jax.commands import compare
from hsvit_jax.commands.studies.systems import System, _Images, name_of

ROWS = [
    compare.Row(
        *("a b", "x:a,b", 2.0, 1000, 0.004, 5_000_000, 64, 2**20, 2**22, 1234.5, 100, 0.95),
        (0.5, 0.7),
    ),
    compare.Row(
        *("c", "y", 2.0, 2_000_000, 8.0, 7_000_000, 64, 2**21, 2**23, 88.0, 100, None), (0.9, 0.9)
    ),
]
SPECS = ["c2a2:digits,tiny"]
SYSTEMS = [System.parse(spec) for spec in SPECS]
SETTINGS = [
    "train.steps=1",
    "train.ema_decay=0.0",
    "model.depth=1",
    "model.embed_dim=8",
    "mesh.data=1",
]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A small system, trained for a step with a seed."""
    out = tmp_path_factory.mktemp("comparison")
    rows = compare.compare(SYSTEMS, out, settings=SETTINGS, seeds=(1,), batch=8, verbose=False)
    return out, rows


def test_a_row_for_each_system(made):
    out, (row,) = made
    assert row.name == "c2a2 tiny" and row.spec == SPECS[0]
    assert len(row.accuracies) == 1 and all(0 <= a <= 1 for a in row.accuracies)
    assert 0 < row.parameters < 20_000 and row.images_per_second > 0
    assert 4 * row.parameters < row.forward_bytes < row.training_bytes
    assert len([p for p in out.iterdir() if (p / "checkpoints").is_dir()]) == 1


def test_what_is_trained_is_not_trained_again(made):
    out, rows = made
    logs = sorted(out.glob("*/metrics.jsonl"))
    before = [log.read_bytes() for log in logs]
    again = compare.compare(SYSTEMS, out, settings=SETTINGS, seeds=(1,), batch=8, verbose=False)
    assert again == rows
    assert [log.read_bytes() for log in logs] == before


def test_the_table():
    lines = compare.table(ROWS).splitlines()
    assert lines[0].count("|") == len(compare.COLUMNS) + 1
    accuracy = "60.00% ± 14.14 (95% interval 50.2–69.1)"
    cells = f"1,000 | 0.00 | 0.005 G | 1 MiB | 4 MiB | 1,234 | {accuracy} | 95.00%"
    assert lines[2] == f"| a b | {cells} |"
    assert lines[3].endswith("| 90.00% ± 0.00 (95% interval 82.6–94.5) | – |")


def test_what_is_written(tmp_path):
    markdown, table, plot = compare.write(ROWS, tmp_path, "hsvit compare x:a,b y")
    text = markdown.read_text()
    assert compare.table(ROWS) in text
    assert "    hsvit compare x:a,b y\n" in text
    assert "2 epochs, 2 seeds, ± one standard deviation" in text
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == ["a b", "c"]
    assert float(rows[0]["accuracy"]) == pytest.approx(0.6)
    assert rows[0]["accuracies"] == "0.5 0.7"
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("specs", "settings", "seeds", "said"),
    [
        (["c2a2:digits", "c2a2:digits"], [], [0], "named twice"),
        (["c2a2:digits", "c3a4:cifar10"], [], [0], "the same data, but of data.name c2a2 has"),
        (["c2a2:digits", "c3a4:digits,paper"], [], [0], "equal training, but train.epochs"),
        (["c2a2:digits"], [], [0, 0], "different whole numbers"),
        (["c2a2:digits"], ["model.groups=5"], [0], "c2a2: .*groups=5"),
        (["c2a2:digits model.groups=5"], [], [0], "c2a2 groups=5: .*groups=5"),
        (["c9a9:digits"], [], [0], "unknown network"),
    ],
)
def test_what_cannot_be_compared(tmp_path, specs, settings, seeds, said):
    with pytest.raises(ValueError, match=said):
        systems = [System.parse(spec) for spec in specs]
        compare.compare(systems, tmp_path, settings=settings, seeds=seeds, verbose=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("configs/c2a2.py:digits", "c2a2"),
        ("configs/vix.py:vin, hybrid,cifar10,paper", "vix vin hybrid"),
        ("c3a4:folder=my_images,conv_only", "c3a4 conv_only"),
    ],
)
def test_names(spec, name):
    assert name_of(spec) == name


def test_settings_of_one_system():
    system = System.parse("c2a2:digits,tiny model.depth=1  optim.name=sgd")
    assert system.spec == "c2a2:digits,tiny"
    assert system.settings == ("model.depth=1", "optim.name=sgd")
    assert system.name == "c2a2 tiny depth=1 name=sgd"
    assert System.parse("c2a2:digits augment.mixup=0.1").name == "c2a2 mixup=0.1"


def test_every_system_reads_its_own_images():
    images = _Images()
    found = []
    for settings in ([], ["data.image_size=16,16"], ["data.fit=stretch"], ["data.repeats=2"]):
        found.append(images.of(config_lib.get_config("c2a2:digits,tiny", *settings)))
    assert [one.info.image_size for one in found] == [(32, 32), (16, 16), (32, 32), (32, 32)]
    assert found[0] is found[3] and found[0] is not found[2]


@pytest.mark.slow
def test_equal_compute_on_shares_of_the_images(tmp_path):
    wide = System.parse("c2a2:digits,tiny model.conv_channels=32,64")
    settings = [*SETTINGS, "train.epochs=0", "train.batch=8", "train.steps=6"]
    points = compare.learning_curves(
        [wide, SYSTEMS[0]], tmp_path, [0.05, 0.1], settings=settings, verbose=False
    )
    assert [p.line for p in points] == [wide.name, SYSTEMS[0].name] * 2
    assert points[0].training_images < points[2].training_images < 200
    for dear, cheap in (points[:2], points[2:]):
        assert (dear.steps, dear.x) == (6, cheap.x)
        assert cheap.steps == round(6 * dear.flops / cheap.flops) > 6


def test_mistakes_on_the_command_line(capsys):
    assert main.main(["hsvit", "compare"]) == 2
    assert "compare --help" in capsys.readouterr().err
    assert main.main(["hsvit", "compare", "c2a2:digits", "--seeds=x"]) == 2
    assert "whole numbers; got x" in capsys.readouterr().err
    assert main.main(["hsvit", "compare", "c2a2:digits", "--fractions=0.1,2"]) == 2
    assert "above 0, at most 1; got 0.1,2" in capsys.readouterr().err
    assert main.main(["hsvit", "compare", "c2a2:digits", "--sedes=1"]) == 2
    assert "sedes" in capsys.readouterr().err
    assert main.main(["hsvit", "compare", "c2a2:digitz"]) == 2
    assert "Did you mean digits?" in capsys.readouterr().err
