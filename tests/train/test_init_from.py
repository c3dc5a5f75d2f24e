"""What a run starts from: a trained network as it is or grown, and never instead of its own."""

import dataclasses
import shlex
import shutil

import jax
import numpy as np
import pytest
from PIL import Image
from support import small_runs

from hsvit_jax import checkpoint, main, train
from hsvit_jax import config as config_lib
from hsvit_jax.classifier import load
from hsvit_jax.train import evaluate, init_from, resume


def prepared(**settings):
    """A run of no steps for the small data set."""
    config = small_runs.small_config(train__steps=0, **settings)
    return config, train.prepare(config, dataset=small_runs.small_dataset())


def save(folder, run, values, meta=None):
    """A checkpoint of a run with these (params, stats)."""
    state = {"params": values[0], "stats": values[1]}
    with checkpoint.Checkpoints(folder / "checkpoints") as checkpoints:
        checkpoints.save(0, state, meta or run.meta, metric=0.5, wait=True)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The folder of a small network."""
    folder = tmp_path_factory.mktemp("source")
    _, run = prepared(train__ema_decay=0.0)
    values = small_runs.made_up_values(run.model)
    save(folder, run, values)
    return folder, values


def from_source(folder, **settings):
    return prepared(init__from=str(folder), **settings)


@pytest.mark.filterwarnings("default:step 0 was saved after")
@pytest.mark.parametrize(
    ("towers", "lost", "groups"), [(1, [2, 3], [2, 3]), (2, [1], [4, 5, 6, 7])]
)
def test_groups_that_a_run_lost_do_not_vote(tmp_path, capsys, towers, lost, groups):
    """Answers, parts, and the exported network are those without them."""
    _, run = prepared(train__ema_decay=0.0, model__towers=towers)
    values = small_runs.made_up_values(run.model)
    save(tmp_path, run, values, run.meta | {"lost_groups": lost})
    device = jax.devices()[:1]
    with pytest.warns(UserWarning, match=f"towers {', '.join(map(str, lost))} were lost: "):
        found = load(tmp_path, devices=device)
    votes_G = np.array([float(g not in groups) for g in range(8)], np.float32)
    forward = evaluate.make_forward(run.model, found.mesh, run.config, votes_G=votes_G)
    images = small_runs.small_dataset().test.images[:5]
    wanted = np.asarray(forward(*values, images))
    np.testing.assert_allclose(found.logits(images), wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found.voters_G, votes_G)
    cuts, head = found.cut(2)
    answers = [cut(images) for cut in cuts]
    logits, _ = head(*(sum(terms) for terms in zip(*answers, strict=True)))
    np.testing.assert_allclose(logits, wanted, rtol=1e-5, atol=1e-6)
    assert sum(cut.voters for cut in cuts) == 8 - len(groups)
    words = ["hsvit", "export", str(tmp_path), f"{tmp_path}/a.safetensors"]
    assert main.main(words) == 0 and "were lost: " in capsys.readouterr().err
    assert main.main([*words, "--format=reference"]) == 1  # the authors' average is of all groups
    assert "vote" in capsys.readouterr().err
    again = load(tmp_path / "a.safetensors", devices=device)
    np.testing.assert_allclose(again.logits(images), wanted, rtol=1e-5, atol=1e-6)
    _, later = from_source(tmp_path, model__towers=towers)
    notes = init_from.load(later.config, later.model).notes
    assert "were lost in training and start afresh" in notes[0]


def test_a_run_s_folder_may_be_called_as_a_file_is(source, tmp_path):
    folder = shutil.copytree(source[0], tmp_path / "a.pt")
    _, run = from_source(folder)
    assert f"step 0 of {folder} (" in init_from.load(run.config, run.model).notes[0]


def test_a_run_goes_on_when_what_it_started_from_is_gone(tmp_path):
    def started(config):
        return config_lib.resolve(config, weights=init_from.of_weights(config, tmp_path))

    gone = f"init.from={tmp_path}/gone.safetensors"
    config = config_lib.get_config("resnet:18,cifar10", gone)
    with pytest.raises(ValueError, match="gone"):
        init_from.of_weights(config)
    saved = config_lib.override(
        config, ["data.image_size=64,64", "data.mean=0.1", "data.std=0.2", "data.channels=3"]
    )
    (tmp_path / "config.json").write_text(config_lib.to_json(saved))
    (tmp_path / "checkpoints").mkdir()
    found = started(config)
    assert [found.data[key] for key in ("image_size", "mean", "std")] == [(64, 64), (0.1,), (0.2,)]
    own = config_lib.get_config("resnet:18,cifar10", gone, "data.mean=0.3")
    assert started(own).data.mean == (0.3,)
    for damaged in ("", "[]", "{}", '{"init": {"from": 5}, "data": 7}', '{"user": 3}'):
        (tmp_path / "config.json").write_text(damaged)
        with pytest.raises(ValueError, match="gone"):
            started(config)
    commit = "hub:a/b@" + "0" * 40
    saved.init["from"] = commit
    (tmp_path / "config.json").write_text(config_lib.to_json(saved))
    config = config_lib.get_config("resnet:18,cifar10", "init.from=hub:a/b")
    found = started(config)
    assert found.init["from"] == commit  # without a look at the hub


def test_data_that_changed_since_are_told(source):
    _, run = from_source(source[0])
    told = [
        "held out now" in init_from.load(run.config, run.model, name).notes[0]
        for name in (run.dataset.fingerprint, "other")
    ]
    assert told == [False, True]


def test_another_normalisation_is_told(source):
    _, run = from_source(source[0])
    assert "normalised" not in init_from.load(run.config, run.model).notes[0]
    with run.config.unlocked():
        run.config.data.mean = (0.5,)
    (note,) = init_from.load(run.config, run.model).notes
    assert note.endswith("saw pixels normalised by data.mean=(0.3,) and data.std=(0.2,)")


def with_classes(run, names):
    """The run on data with these class names, and a network for as many."""
    dataset = run.dataset.info
    info = dataclasses.replace(dataset, class_names=tuple(names))
    with run.config.unlocked():
        run.config.data.num_classes = len(names)
    dataset = dataclasses.replace(run.dataset, info=info)
    return dataclasses.replace(
        run, dataset=dataset, model=run.model.resized(num_classes=len(names))
    )


@pytest.mark.parametrize("order", [range(7)[::-1], (3, 0, 6)])
@pytest.mark.parametrize("under", ["our names", "the authors' names"])
def test_classes_are_matched_by_name(source, tmp_path, order, under):
    """The same in another order, or some of them: each is scored as it was."""
    folder, values = source
    _, run = from_source(folder)
    if under != "our names":
        folder = tmp_path / "a.safetensors"
        assert (
            main.main(["hsvit", "export", str(source[0]), str(folder), "--format=reference"]) == 0
        )
    x = np.random.default_rng(0).normal(size=(5, 8, 8, 1)).astype(np.float32)
    expected = run.model.apply(*values, x)[0]
    names = run.dataset.info.class_names
    run = with_classes(run, [names[row] for row in order])
    with run.config.unlocked():
        run.config.init["from"] = str(folder)
    start, _ = resume.start(run, verbose=False)
    found = run.model.apply(*start, x)[0]
    np.testing.assert_allclose(found, expected[:, list(order)], rtol=1e-5, atol=1e-6)


def test_other_classes_have_a_new_classifier(source, capsys):
    """As many others may be the same ones: that is for the user to say."""
    folder, (params, _) = source
    _, run = from_source(folder)
    names = run.dataset.info.class_names
    start, _ = resume.start(with_classes(run, ["ant", "bee", names[0]]), verbose=True)
    assert start[0]["head"]["linear"]["kernel"].shape[1] == 3
    said = capsys.readouterr().out
    assert "whose classes are row 0, row 1, row 2, row 3, row 4 and 2 more" in said
    assert "fresh for 3 classes: head.linear" in said
    run = with_classes(run, [*names[:-1], "ant"])
    message = r"is for row 0, .* as many other .*=keep fits .*: add --config\.init\.classifier=new$"
    with pytest.raises(ValueError, match=message):
        resume.start(run, verbose=False)
    with run.config.unlocked():
        run.config.init.classifier = "keep"
    start, _ = resume.start(run, verbose=False)
    np.testing.assert_array_equal(*(x["head"]["linear"]["kernel"] for x in (start[0], params)))


def test_a_file_under_the_authors_names_tells_as_much(source, tmp_path):
    file = tmp_path / "a.safetensors"
    assert main.main(["hsvit", "export", str(source[0]), str(file), "--format=reference"]) == 0
    _, run = from_source(file)
    names = run.dataset.info.class_names
    (note,) = init_from.load(run.config, run.model, class_names=names).notes
    assert "which saw" not in note
    with run.config.unlocked():
        run.config.data.mean = (0.5,)
    (note,) = init_from.load(run.config, run.model, class_names=names).notes
    assert note.endswith("saw pixels normalised by data.mean=(0.3,) and data.std=(0.2,)")
    _, run = from_source(file, model__heads=4)  # which show in no tensor's shape
    with pytest.raises(ValueError, match="heads: checkpoint 2, config 4"):
        init_from.load(run.config, run.model)
    _, run = from_source(file)  # nor does the grid on which the positions lie
    rows, columns = run.model.config.image_size
    with pytest.raises(ValueError, match=r"image size: .* would mean other places"):
        init_from.load(run.config, run.model.resized(image_size=(rows // 2, 2 * columns)))


def test_settings_of_another_start_are_refused():
    trained = "init.from=zoo:c2a2-digits"
    message = r"init\.classifier=new would need trained weights: name them with"
    with pytest.raises(ValueError, match=message):
        init_from.refuse_random(config_lib.get_config("c2a2:digits", "init.classifier=new"))
    init_from.refuse_random(config_lib.get_config("c2a2:digits,fast", trained))  # whitens else


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{}, {"model__conv_channels": (4, 32), "model__groups": 16, "model__votes": "learned"}],
)
def test_a_run_starts_from_it(source, tmp_path, settings):
    """At step 0, with the average there too: the answers are those of the network named."""
    folder, values = source
    config, run = from_source(folder, **settings)
    result = train.train(config, tmp_path, dataset=run.dataset, verbose=False)
    assert result.step == 0
    _, state, _ = checkpoint.load_tree(tmp_path)
    _, small = prepared()
    x = np.random.default_rng(0).normal(size=(5, 8, 8, 1)).astype(np.float32)
    expected = jax.jit(small.model.apply)(*values, x)[0]
    for tree in (state, state["ema"]):
        found = jax.jit(run.model.apply)(tree["params"], tree["stats"], x)[0]
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * np.abs(expected).max())


def test_a_run_s_own_checkpoint_wins(source, tmp_path):
    """What it started from may be gone, but it cannot be something else."""
    folder = shutil.copytree(source[0], tmp_path / "source")
    config, run = from_source(folder)
    train.train(config, tmp_path / "run", dataset=run.dataset, verbose=False)
    before = small_runs.digest(tmp_path / "run")
    shutil.rmtree(folder)
    save(folder, run, (source[1][0], jax.tree.map(lambda x: x + 1, source[1][1])))
    with pytest.raises(ValueError, match="holds another network than when the run in "):
        train.train(config, tmp_path / "run", dataset=run.dataset, verbose=False)
    shutil.rmtree(folder)
    train.train(config, tmp_path / "run", dataset=run.dataset, verbose=False)
    assert small_runs.digest(tmp_path / "run") == before
    with config.unlocked():
        config.init["from"] = str(source[0])
    with pytest.raises(ValueError, match=r"run in this folder has init\.from=.*started with it"):
        train.train(config, tmp_path / "run", dataset=run.dataset, verbose=False)
    with config.unlocked():
        config.init["from"], config.train.select_on = str(folder), "macro_f1"
    with pytest.raises(ValueError, match=r"has train\.select_on='val', now it is 'macro_f1'"):
        train.train(config, tmp_path / "run", dataset=run.dataset, verbose=False)


def test_growth_is_told(source):
    larger = {"model__conv_channels": (4, 32), "model__groups": 16, "model__votes": "learned"}
    for settings, expected in ((larger, ["grown: "]), ({"model__dropout": 0.3}, [])):
        _, run = from_source(source[0], **settings)
        notes = init_from.load(run.config, run.model).notes[1:]
        assert [note[: len("grown: ")] for note in notes] == expected


def test_no_new_kernels_in_a_frozen_part(source):
    """A larger trunk would keep those that are drawn."""
    larger = {"model__conv_channels": (4, 32), "model__groups": 16, "model__votes": "learned"}
    _, run = from_source(source[0], init__freeze="trunk", **larger)
    with pytest.raises(
        ValueError, match=r"would keep fresh random weights .*params\.trunk\.blocks"
    ):
        init_from.load(run.config, run.model)


def test_other_classes_and_another_image_size(source):
    """Only when asked, from our own checkpoints too."""
    folder, (params, stats) = source
    settings = {"model__pool_strides": (2, 2), "data__num_classes": 9, "init__from": str(folder)}
    dataset = small_runs.small_dataset()
    dataset = dataclasses.replace(dataset, info=dataset.info.with_shape((16, 16), 1))
    run = train.prepare(small_runs.small_config(**settings), dataset=dataset)
    with run.config.unlocked():
        run.config.init.classifier = "keep"
    message = r"8×8, this .* 16×16; .* 7, this .* 9; .*: add --config\.init\.positions=resize --con"
    with pytest.raises(ValueError, match=message):
        init_from.load(run.config, run.model)
    with run.config.unlocked():
        run.config.init.positions = "resize"
    with run.config.unlocked():
        run.config.init.classifier = "new"
    start = init_from.load(run.config, run.model)
    assert start.params["head"]["linear"]["kernel"].shape == (8, 9)
    assert start.params["trunk"]["embed"]["kernel"].shape == (16, 8)
    jax.tree.map(np.testing.assert_array_equal, start.stats, stats)
    jax.tree.map(np.testing.assert_array_equal, start.params["groups"], params["groups"])
    assert "resized for images of 16×16: trunk.embed.kernel" in start.notes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "named", "added"),
    [
        (
            ["data.channels=3", "init.freeze=trunk,head", "init.whiten=true"],
            "init.whiten embed_dim conv_channels channels: init.freeze",
            "model.depth=1 init.stem=refit init.freeze=trunk init.whiten=false",
        ),
        # No such network can be built: the file's strides are for other blocks.
        (["model.conv_kernels=3"], "conv_kernels depth", "model.conv_kernels=3,3"),
    ],
)
def test_all_contradictions_come_with_a_command_that_works(
    source, tmp_path, capsys, settings, named, added
):
    """The switch tiny and the user's settings do not fit the network, nor its image size."""
    rng = np.random.default_rng(0)
    for name in ("ant", "bee"):
        (tmp_path / "my photos" / name).mkdir(parents=True)
        for i in range(10):
            pixels = rng.integers(0, 255, (32, 32, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "my photos" / name / f"{i}.png")
    words = [f"--config=c2a2:folder={tmp_path}/my photos,tiny", "--config.model.depth=2"]
    words += [f"--config.init.from={source[0]}", f"--workdir={tmp_path}/a run"]
    words += ["--config.train.steps=1", *(f"--config.{setting}" for setting in settings)]
    assert main.main(["hsvit", "train", *words]) == 1
    problems, command = capsys.readouterr().err.strip().split("\n")[-2:]
    assert all(name in problems for name in named.split()), problems
    assert all(f"--config.{setting} " in command for setting in added.split()), command
    assert main.main(shlex.split(command)) == 0
    assert (tmp_path / "a run" / "report.html").is_file()


def test_mistakes_are_told(source, tmp_path):
    folder, _ = source
    _, run = from_source(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"init\.from=.*nowhere.*does not exist"):
        init_from.load(run.config, run.model)
    (tmp_path / "model.h5").write_bytes(b"PK")
    _, run = from_source(tmp_path / "model.h5")
    with pytest.raises(ValueError, match=r"weights are read from \.npz, \.safetensors, \.ckpt"):
        init_from.load(run.config, run.model)
    _, run = from_source(folder, model__depth=2, model__heads=4)
    with pytest.raises(ValueError, match=r"(?s)depth: checkpoint 1, config 2.*heads: checkpoint 2"):
        init_from.load(run.config, run.model)
