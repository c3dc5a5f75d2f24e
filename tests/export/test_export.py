"""Exported networks: the same network from one file, and the authors' names given back."""

import json
import re
import shutil

import jax
import numpy as np
import pytest
from support import hf_files, small_runs

import hsvit_jax
from hsvit_jax import export, main, models, train
from hsvit_jax.train import init_from
from hsvit_jax.weights import files, sources, torch
from hsvit_jax.weights.stored import Stored, stored_network


@pytest.fixture(scope="module")
def exported(stored_weights, tmp_path_factory):
    """One file and a hub folder of the same run."""
    folder = tmp_path_factory.mktemp("exported")
    (stored_weights / "metrics.jsonl").write_text(
        '{"step": 0, "split": "test", "accuracy": 0.9, "loss": 0.3, "examples": 10}\n'
    )
    for run, *words in (
        (stored_weights, folder / "a.safetensors"),
        (stored_weights / "checkpoints", folder / "hub", "--format=hub"),
    ):
        assert main.main(["main", "--mode=export", str(run), *map(str, words)]) == 0
    return folder


def test_the_file_is_the_network(exported, stored_weights):
    run = stored_network(stored_weights)
    for source in (exported / "a.safetensors", exported / "hub"):
        found = stored_network(source)
        jax.tree.map(np.testing.assert_array_equal, found[3:5], run[3:5])
        assert (found.step, found.class_names) == (run.step, run.class_names)
        assert found.config.data.mean == run.config.data.mean
        assert found.fingerprint == run.fingerprint
        assert found.meta["measured"]["test"]["accuracy"] == 0.9
        with pytest.raises(ValueError, match=f"holds one network, of step {run.step}: remove whi"):
            stored_network(source, run.step + 1)
    weights = sum(x.nbytes for x in jax.tree.leaves(run[3:5]))
    size = (exported / "a.safetensors").stat().st_size
    assert weights < size < weights + 20_000 and hsvit_jax.load(exported / "hub").step == run.step


def test_the_figures_measured_are_those_of_the_run_however_it_is_named(
    exported, stored_weights, tmp_path, monkeypatch
):
    stored, steps = stored_network(stored_weights), stored_weights / "checkpoints"
    monkeypatch.chdir(steps)
    monkeypatch.setenv("HOME", str(stored_weights.parent))
    (tmp_path / "link").symlink_to(steps)
    for source in (".", "..", f"{tmp_path}/link", f"~/{stored_weights.name}/checkpoints"):
        assert export.describe(stored, source)["measured"]["test"]["accuracy"] == 0.9, source
    run = tmp_path / "checkpoints"  # a work folder of that name, and others' figures around it
    shutil.copytree(steps, run / "checkpoints")
    shutil.copy(stored_weights / "metrics.jsonl", tmp_path)
    shutil.copy(exported / "a.safetensors", tmp_path)
    for source in (run, tmp_path / "a.safetensors"):
        assert export.describe(stored, str(source))["measured"] == {}, source


def test_networks_of_the_zoo():
    folder = sources.locate("zoo:c2a2-digits").parent
    for path in folder.glob("*.safetensors"):
        stored = stored_network(f"zoo:{path.stem}")
        assert path.stat().st_size < 4e6 and stored.meta["measured"]["test"]["accuracy"] > 0.8
        assert f"zoo:{path.stem}" in path.with_suffix(".md").read_text()
    with pytest.raises(ValueError, match=r"no network 'c2a3' in the zoo; it has .*c2a2-digits"):
        stored_network("zoo:c2a3")


def test_a_run_starts_from_the_file(exported, stored_weights):
    configs = [
        small_runs.small_config(init__from=str(path))
        for path in (exported / "a.safetensors", stored_weights)
    ]
    run = train.prepare(configs[0], dataset=small_runs.small_dataset())
    ours, theirs = (init_from.load(config, run.model) for config in configs)
    jax.tree.map(np.testing.assert_array_equal, ours[:2], theirs[:2])


def test_the_card(exported):
    head, card = (exported / "hub/README.md").read_text().split("---\n")[1:3]
    lines = dict(line.split(": ", 1) for line in head.splitlines())
    assert json.loads(lines["model-index"])[0]["results"][0]["metrics"][0]["value"] == 0.9
    assert "| test | 10 | 90.00% | 0.3000 |" in card
    assert "selected on `val`, which flatters it" in card
    about = json.loads((exported / "hub/config.json").read_text())
    assert about["model_type"] == "hsvit_jax" and len(about["id2label"]) == small_runs.CLASSES


def test_names_do_not_leave_their_place_in_a_card(stored_weights):
    """Raw HTML would be shown on the hub's page."""
    about = export.describe(stored_network(stored_weights), "")
    odd = ["a`<img src=x>", "``<b>", "x\n\n<script>", "`", "c"]
    about["class_names"] = odd
    about["config"]["data"]["name"] = "folder=<img src=x>`|"
    about["config"]["recipe"] = "`<b>"
    about["measured"] = {"test": {"accuracy": 0.9, "loss": None, "examples": 10}}
    head, card = export.card(about, 1).split("---\n", 2)[1:]
    spans = re.compile(r"(?<![\\`])(`+)(?!`)(.+?)(?<!`)\1(?!`)")
    shown = [span[2].strip() for span in spans.finditer(card)]
    assert [" ".join(name.split()) for name in odd] == shown[: len(odd)]
    assert not re.search(r"(?<!\\)<", head + spans.sub("", card))
    assert "| test | 10 | 90.00% | not finite |" in card


def test_odd_figures_of_a_file_are_left_out(exported, tmp_path):
    tensors, description = files.read(exported / "a.safetensors")
    for measured in ([], "x", {"test": 5}, {"test": {"accuracy": "\x1b", "examples": 3}}):
        description["measured"] = measured
        (tmp_path / "b.safetensors").write_bytes(files.save(tensors, description))
        stored = stored_network(tmp_path / "b.safetensors")
        assert export.describe(stored, str(tmp_path / "b.safetensors"))["measured"] == {}


@pytest.mark.parametrize("edited", [True, False], ids=["an edited card", "another network"])
def test_what_a_folder_holds_is_kept(stored_weights, tmp_path, edited):
    words = ["hsvit", "export", str(stored_weights), str(tmp_path), "--format=hub"]
    if edited:
        assert main.main(words) == main.main(words) == 0
        (tmp_path / "README.md").write_text("license: mit")
    else:
        (tmp_path / "config.json").write_text('{"model_type": "resnet"}')
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert main.main(words) == 1
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_convert_takes_no_file_of_our_own(tmp_path, capsys):
    ours, theirs = sources.locate("zoo:c2a2-digits"), tmp_path / "a.safetensors"
    assert main.main(["hsvit", "convert", str(ours), f"{tmp_path}/run"]) == 1
    assert "is a network of this package already" in capsys.readouterr().err
    words = ["hsvit", "export", str(ours), str(theirs), "--format=reference"]
    assert main.main(words) == 0
    assert main.main(["hsvit", "convert", str(theirs), f"{tmp_path}/run", "--mean=0.25"]) == 0
    ours, back = stored_network(ours), stored_network(tmp_path / "run")
    jax.tree.map(np.testing.assert_array_equal, back[3:5], ours[3:5])
    assert (back.config.model, back.config.data.mean) == (ours.config.model, (0.25,))


def test_ablations_that_the_authors_code_has_not():
    for family, variant, setting in (
        ("hvt", "s-4-average", "pool='average'"),
        ("deit", "ti-power", "retained="),
        ("dhvt", "t-aggregate-all", "feed_forward='daff-aggregate-all'"),
        ("dhvt", "vit-t", "feed_forward='ffn'"),
        ("dhvt", "t-ln-bn", "sope_norm='layer'"),
    ):
        record = models.FAMILIES[family]
        torch.table(record.name).check_known(
            hf_files.network(family, record.default_variant).config
        )
        with pytest.raises(ValueError, match=f"no network with {setting}"):
            torch.table(record.name).check_known(hf_files.network(family, variant).config)


def test_a_backbone_that_the_authors_code_has_not():
    family = models.FAMILIES["hsvit_backbone"]
    settings = family.settings("efficientnet_b0")
    settings["backbone_settings"]["padding"] = "symmetric"
    network = family.build(settings, image_size=(64, 64), channels=3, num_classes=2)
    stored = Stored(0, None, network, {}, {}, (), None, {})
    with pytest.raises(ValueError, match="no network with padding='symmetric'"):
        about = {"family": "hsvit_backbone"}
        export.FORMATS["reference"].contents(stored, about, "a.safetensors")


def test_no_path_of_the_machine_is_given_away(stored_weights):
    """But the names of public data sets, and the figures measured, are."""
    stored = stored_network(stored_weights)
    config = stored.config.copy_and_resolve_references().unlock()
    config.data.dir, config.init["from"] = "/home/ada", "/home/ada/x.safetensors"
    for name, told in (
        ("folder=/home/ada/cats", "folder=cats"),
        ("hf=/home/ada/cats", "hf=cats"),
        (f"hf={stored_weights}", f"hf={stored_weights.name}"),
        ("hf=ylecun/mnist", "hf=ylecun/mnist"),
        ("tfds=robustness/cats:1.0", "tfds=robustness/cats:1.0"),
        ("domainnet/clipart", "domainnet/clipart"),
    ):
        config.data.name = name
        about = export.describe(stored._replace(config=config), str(stored_weights))
        assert "home" not in json.dumps(about) and about["config"]["data"]["name"] == told


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, d: t.popitem(), "missing: "),
        (lambda t, d: d.pop("format"), "without their network"),
        (lambda t, d: t.update({"params.\x1b[2J": np.zeros(1, np.float32)}), r"extra: .*x1b"),
        (lambda t, d: t.update({next(iter(t)): np.zeros(1, np.float32)}), "different: "),
        (lambda t, d: next(iter(t.values())).ravel().__setitem__(0, 7), "SHA-256"),
        (lambda t, d: d.update(version="\x1b[2J"), "version"),
        (lambda t, d: d.update(class_names=[]), "0 class names"),
        (lambda t, d: d.update(config=[]), "JSON object"),
        (lambda t, d: d["config"]["model"].update(depth=10**9), "model.depth"),
        (lambda t, d: d.update(step="\x1b[2J"), "TypeError"),
    ],
)
def test_a_hostile_file_is_refused_in_one_line(change, message, exported, tmp_path, capsys):
    tensors, description = files.read(exported / "a.safetensors")
    change(tensors, description)
    path = tmp_path / "b.safetensors"
    path.write_bytes(files.save(tensors, description))
    assert main.main(["main", "--mode=eval", f"--checkpoint={path}"]) == 1
    error = capsys.readouterr().err
    assert re.search(message, error) and error.count("\n") == 1 and "\x1b" not in error
