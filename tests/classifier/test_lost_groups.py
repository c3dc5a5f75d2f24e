"""Votes: which groups are lost together, what every set of voters answers, and what it costs."""

import csv
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import small_runs

from hsvit_jax import build_model, data, main
from hsvit_jax import mesh as mesh_lib
from hsvit_jax.classifier import Classifier, other_data
from hsvit_jax.classifier import lost_groups as votes
from hsvit_jax.commands import trained as commands
from hsvit_jax.models import costs
from hsvit_jax.models.hsvit import hsvit

CONFIG = dataclasses.replace(
    small_runs.HSVIT, image_size=(8, 8), conv_channels=(8, 16), groups=8, towers=4
)
SETTINGS = small_runs.small_config(
    seed=0, data__mean=(0.4,), data__std=(0.3,), eval__batch=8, eval__tta="flip"
)


@pytest.fixture(scope="module")
def trained():
    """A network of towers, untrained, whose answers depend on who votes; and a split."""
    network = hsvit.TowerHSViT(CONFIG)
    params, stats = small_runs.made_up_values(network)
    # The image is to decide, not the CLS and positions.
    groups, embed = (params["towers"][k] for k in ("groups", "trunk"))
    groups["cls"], groups["position"] = groups["cls"] * 0, groups["position"] * 0
    embed["embed"]["kernel"] *= 30
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (21, 8, 8, 1), np.uint8)
    return network, params, stats, data.Split(rng.integers(0, 5, 21).astype(np.int32), images, None)


def placed(trained, group, count):
    network, params, stats, split = trained
    mesh = mesh_lib.make(group, count, groups=4, devices=jax.devices()[: group * count])
    trees = (jax.device_put(t, mesh_lib.state_shardings(mesh, t, network)) for t in (params, stats))
    return Classifier(SETTINGS, (), network, *trees, 0, mesh), split


def test_what_is_lost_as_one():
    """Groups, or towers of them, but not the groups of convolutions."""
    plain, none = (
        hsvit.HSViT(dataclasses.replace(CONFIG, towers=1, groups=count)) for count in (8, 0)
    )
    towers, on_a_backbone = hsvit.TowerHSViT(CONFIG), build_model("backbone:resnet18,tiny")
    np.testing.assert_array_equal(votes.units(plain), np.eye(8))
    assert votes.units(towers).shape == (4, 8)
    np.testing.assert_array_equal(votes.units(towers)[1], [0, 0, 1, 1, 0, 0, 0, 0])
    assert votes.units(on_a_backbone).shape == (on_a_backbone.config.groups,) * 2
    for network in (none, build_model("resnet:tiny")):
        with pytest.raises(ValueError, match="no independent attention"):
            votes.units(network)


def test_subsets_are_all_of_them_or_different_ones_drawn_by_the_seed():
    few = votes.subsets(np.eye(5), 10, 0)
    assert [lost for lost, _ in few] == [0] + [1] * 5 + [2] * 10 + [3] * 10 + [4] * 5
    many = votes.subsets(np.eye(16), 7, 0)
    for lost in range(16):
        sets = {tuple(v) for n, v in many if n == lost}
        assert len(sets) == (1 if lost == 0 else 7)
        assert {sum(v) for v in sets} == {16 - lost}
    again, other = votes.subsets(np.eye(16), 7, 0), votes.subsets(np.eye(16), 7, 1)
    assert all((a[1] == b[1]).all() for a, b in zip(many, again, strict=True))
    assert any((a[1] != b[1]).any() for a, b in zip(many, other, strict=True))


@pytest.mark.parametrize(("group", "count"), [pytest.param(1, 1, marks=pytest.mark.slow), (4, 2)])
def test_every_set_of_voters_is_evaluated_exactly(trained, group, count):
    """21 examples in batches of 8: as an evaluation of each set by itself has it."""
    (network, *trees, split), (classifier, _) = trained, placed(trained, group, count)
    points = votes.curve(classifier, split, most=4)
    assert [(p.lost_groups, p.subsets) for p in points] == [(0, 1), (2, 4), (4, 4), (6, 4)]
    sets = votes.subsets(votes.units(network), 4, 0)

    x = (split.images / 255 - 0.4) / 0.3

    @jax.jit
    def answer(v):
        views = (x.astype(np.float32), x[:, :, ::-1].astype(np.float32))  # as eval.tta=flip
        return sum(network.apply(*trees, view, votes_G=v)[0] for view in views).argmax(1)

    for point in points[:2]:
        expected = [
            (np.asarray(answer(v)) == split.labels).mean()
            for n, v in sets
            if n == point.lost_groups
        ]
        assert point.mean == pytest.approx(np.mean(expected), abs=1e-9)
        assert point.std == pytest.approx(np.std(expected), abs=1e-9)
        assert (point.lowest, point.highest) == (min(expected), max(expected))
    assert points[1].highest > points[1].lowest  # the sets differ


def test_the_trunk_is_computed_once_for_all_sets(trained):
    """Twenty more sets of voters cost twenty heads, and no convolution or attention."""
    c, split = placed(trained, 1, 1)
    counter, valid = votes.make_counter(c), np.ones(21, bool)

    def multiply_adds(sets):
        inputs = split.images, split.labels, valid, jnp.ones((sets, 8))
        run = lambda trees, *inputs: counter(*trees, *inputs)  # noqa: E731
        return costs.by_module(run, (c.params, c.stats), *inputs).total()

    heads = 20 * 21 * 2 * CONFIG.embed_dim * CONFIG.num_classes  # of images and their mirror images
    assert 0 < multiply_adds(22) - multiply_adds(2) <= heads < 0.1 * multiply_adds(2)


def test_the_curve_on_disk(tmp_path):
    points = [votes.Point(0, 1, 0.75, 0.0, 0.75, 0.75), votes.Point(1, 3, 0.5, 0.1, 0.25, 2 / 3)]
    table, plot = votes.write(points, tmp_path / "new" / "curve.png", "costs $5")
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert (table.parent, table.name, plot.name) == (plot.parent, "curve.csv", "curve.png")
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert rows[1] == {
        **{"lost_groups": "1", "subsets": "3", "mean": "0.5", "std": "0.1"},
        **{"lowest": "0.25", "highest": "0.666667"},
    }


def test_a_curve_is_not_written_over_the_table_of_the_data(trained, tmp_path, monkeypatch, capsys):
    config = small_runs.small_config(data__name=f"csv={tmp_path}/./labels.csv")
    images = config, "all", data.Split(np.zeros(1, np.int32), None)
    monkeypatch.setattr(commands, "load_classifier", lambda request: placed(trained, 1, 1)[0])
    monkeypatch.setattr(other_data, "load", lambda *_, **__: images)
    monkeypatch.setattr(votes, "curve", pytest.fail)
    (tmp_path / "link.csv").symlink_to("labels.csv")
    (tmp_path / "folder.csv").mkdir()
    for name, message in (
        ("labels", "labels.csv over the data's table"),
        ("link", "link.csv over the data's table"),
        ("folder", "folder.csv is a link or no regular file"),
    ):
        words = ["eval", "--checkpoint=x", f"--curve={tmp_path}/{name}.png"]
        assert main.main(["hsvit", *words]) == 1
        assert message in capsys.readouterr().err


def test_groups_that_were_lost_in_training_are_lost_already(trained, monkeypatch):
    """Of eight in four towers, one tower: a curve begins at two, and the other six can be named."""
    classifier, split = placed(trained, 1, 1)[0], trained[-1]
    lost = dataclasses.replace(classifier)
    vars(lost)["voters_G"] = np.array([1, 1, 0, 0, 1, 1, 1, 1], np.float32)
    points = votes.curve(lost, split, most=4)
    assert [(p.lost_groups, p.subsets) for p in points] == [(2, 1), (4, 3), (6, 3)]
    given = []
    monkeypatch.setattr(
        votes.evaluate_lib,
        "make_evaluator",
        lambda *_, votes_G: given.append(votes_G) or (lambda *_: None),
    )
    votes.evaluate(lost, split, ["0", " 1", "4"])
    assert given[0].tolist() == [0, 0, 1, 1, 0, 1, 1, 1]
    plain = dataclasses.replace(lost, model=build_model("resnet:tiny"))
    for network, numbers in ((lost, "014567"), (lost, "8"), (lost, "a"), (plain, "0")):
        with pytest.raises(ValueError, match=f"--drop_groups={','.join(numbers)}: .* groups"):
            votes.evaluate(network, split, [*numbers])
