"""What a network shows: arrays against their definitions, pictures for files, plain errors."""

import dataclasses
import functools
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image

from hsvit_jax import artifacts, classifier, main, mesh, models, tasks
from hsvit_jax import config as config_lib
from hsvit_jax.classifier import figures
from hsvit_jax.classifier import views as views_lib
from hsvit_jax.models import layers, network
from hsvit_jax.models.vit import dhvt, hvt
from hsvit_jax.models.vix import vix

SIZE, NAMES = (8, 12), tuple(f"class {k}" for k in range(7))
HSVIT = {
    "variant": "c2a2",
    "conv_channels": (4, 12),
    "conv_kernels": (3, 3),
    "pool_strides": (1, 2),
    "groups": 4,
    "depth": 2,
    "embed_dim": 6,
    "heads": 2,
    "dropout": 0.2,
}
FAMILIES = {
    "hsvit": HSVIT,
    "towers": HSVIT | {"towers": 2},
    "voters": HSVIT | {"votes": "learned"},
    "conv_only": HSVIT | {"ablation": "conv_only"},
    "dhvt": dhvt.FAMILY.defaults
    | {"family": "dhvt", "variant": "t", "patch": 2, "heads": 3, "embed_dim": 12, "depth": 2},
    "hvt": hvt.FAMILY.defaults
    | {"family": "hvt", "variant": "s", "patch": 2, "heads": 3, "head_dim": 4}
    | {"depth": 3, "stage_depth": 2},
    "vit": vix.FAMILY.defaults
    | {"family": "vix", "variant": "vit", "patch": 2, "heads": 3, "head_dim": 4}
    | {"embed_dim": 10, "depth": 2, "mlp_dim": 5},
    "swiftformer": models.FAMILIES["swiftformer"].settings()
    | {"depths": (1, 1), "widths": (6, 10), "downsamples": (True,)},
}


IMAGES = np.random.default_rng(1).normal(size=(2, *SIZE, 3)).astype(np.float32)


@functools.cache
def make(name):
    """A classifier with random weights."""
    config = config_lib.base("digits", FAMILIES[name])
    with config.unlocked():
        config.data.update(image_size=SIZE, channels=3, num_classes=len(NAMES))
        config.data.update(mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))
    model = models.build(config.model, image_size=SIZE, channels=3, num_classes=len(NAMES))
    leaves, tree = jax.tree.flatten(model.init_shapes())
    rng = np.random.default_rng(5)
    params, stats = tree.unflatten(rng.normal(0, 0.5, x.shape).astype(x.dtype) for x in leaves)
    stats = jax.tree.map(np.abs, stats)  # variances are positive
    one = mesh.make(1, 1, groups=0, devices=jax.devices()[:1])
    return classifier.Classifier(config, NAMES, model, params, stats, 1, one)


@functools.cache
def views(name):
    """What it shows of `IMAGES`."""
    c = make(name)
    return jax.device_get(jax.jit(c.model.views)(c.params, c.stats, IMAGES))


@pytest.fixture(params=["hsvit", "towers"])
def grouped(request):
    return make(request.param), views(request.param)


# --- Groups of an HSViT --------------------------------------------------------------------------


def test_a_vote_is_what_the_network_says_with_that_group_alone(grouped):
    c, seen = grouped
    apply = jax.jit(lambda votes: c.model.apply(c.params, c.stats, IMAGES, votes_G=votes)[0])
    (votes_GBK,) = seen["votes"]
    groups = c.model.config.groups
    assert votes_GBK.shape == (groups, 2, len(NAMES))
    for g, only in enumerate(np.eye(groups, dtype=np.float32)):
        np.testing.assert_allclose(votes_GBK[g], apply(only), rtol=1e-4, atol=1e-5)
    every = apply(np.ones(groups, np.float32))
    np.testing.assert_allclose(seen["logits"][0], every, rtol=1e-4, atol=1e-5)
    assert np.abs(votes_GBK[0] - every).max() > 0.01


def test_groups_that_were_lost_in_training_have_no_vote():
    c = make("voters")
    image_HWC = np.random.default_rng(2).integers(0, 256, (*SIZE, 3), np.uint8)
    whole = c.explain(image_HWC).votes_GK
    vote = np.asarray(c.params["groups"]["vote"]) * np.array([1, 0, 1, 1], np.float32)
    params = c.params | {"groups": c.params["groups"] | {"vote": vote}}
    shown = dataclasses.replace(c, params=params).explain(image_HWC)
    assert np.isfinite(whole).all() and np.isnan(shown.votes_GK[1]).all()
    np.testing.assert_allclose(shown.votes_GK[[0, 2, 3]], whole[[0, 2, 3]], rtol=1e-5)
    drawn = dict(figures.figures(shown, image_HWC, NAMES, "", tasks.Classify(c.config)))
    axes = drawn["votes"].axes[1]
    assert len(axes.lines) == 4  # a dot for each voter and for the network
    agree = (shown.votes_GK[[0, 2, 3]].argmax(1) == shown.logits_K.argmax()).sum()
    assert axes.get_title() == f"logits of each group's CLS alone: {agree} of 3 agree"


def test_a_group_has_its_own_kernels_maps_and_shares(grouped):
    c, seen = grouped
    groups = views_lib.views_of(c.model, seen, 1).groups
    count = c.model.config.groups
    assert groups.maps_GCHW.shape == (count, 12 // count, 4, 6)
    flat = np.concatenate(seen["maps"], axis=3)[1]
    per_group = groups.maps_GCHW.shape[1]
    np.testing.assert_array_equal(groups.maps_GCHW[2, 1], flat[..., 2 * per_group + 1])
    for weights in seen["group attention"]:
        np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)
    last = np.concatenate(seen["group attention"][1::2])[:, 1, :, 0].mean(1)
    np.testing.assert_allclose(groups.shares_GC, last[:, 1:], rtol=1e-6)
    np.testing.assert_allclose(groups.shares_GC.sum(1) + last[:, 0], 1, rtol=1e-5)


# --- Sequences -----------------------------------------------------------------------------------


def test_attention_of_heads_and_of_cls_to_patches():
    c = make("dhvt")
    seen = views("dhvt")
    assert [w.shape for w in seen["attention"]] == [(2, 3, 1 + 24 + 3, 28)] * 2
    for weights in seen["attention"]:
        np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)
    s = views_lib.views_of(c.model, seen, 1).sequences
    assert s.queries == "CLS" and s.blocks == [1, 2] and s.before == 1
    weights_NTS = seen["attention"][1][1]
    for n in range(3):
        # Patch (2, 5) of 4×6 is number 17, token 18; head n's token is number 25 + n.
        assert s.attention[1][n, 2, 5] == weights_NTS[n, 0, 18]
        assert s.head_tokens[1][n, 2, 5] == weights_NTS[n, 25 + n, 18]
    np.testing.assert_allclose(s.matrices[1], weights_NTS.mean(0), rtol=1e-6)


def test_attention_is_what_the_block_used():
    """Weights times values, through the output's linear map, are the first block's own output."""
    c = make("vit")
    weights_BNTS = views("vit")["attention"][0]
    bound = c.model.bind(c.params, c.stats)
    context = network.ForwardContext(False, None, np.arange(2))

    def first(x):
        encoder = bound["encoder"]
        x_BTD = layers.prepend(encoder.cls[...], bound["patches"](x))
        x_BTD = layers.add_bias(x_BTD, encoder.position[...])
        block = encoder.blocks[0]
        y_BTD = block.norm1(x_BTD)
        return block.mixer.project(y_BTD)[2], block.mixer(y_BTD, context, 0)

    v_BNSE, expected = jax.jit(first)(IMAGES)
    out = c.params["encoder"]["blocks"]["0"]["mixer"]["out"]
    o_BTD = np.einsum("bnts,bnse->btne", weights_BNTS, v_BNSE).reshape(2, 25, 12)
    np.testing.assert_allclose(o_BTD @ out["kernel"] + out["bias"], expected, rtol=1e-3, atol=1e-4)


def test_patches_stand_at_their_places():
    vit = make("vit").model
    x_BTC = np.arange(25, dtype=np.float32).reshape(1, 25, 1)
    np.testing.assert_array_equal(vit.at_places(x_BTC)[0, ..., 0], np.arange(1, 25).reshape(4, 6))
    np.testing.assert_array_equal(vit.at_places(x_BTC[:, 1:]), vit.at_places(x_BTC))
    assert vit.at_places(x_BTC[:, :23]) is None
    assert vit.grid(6) == (0, 2, 3) and vit.grid(7) == (1, 2, 3) and vit.grid(1) is None


def test_a_pooled_sequence_is_interpolated():
    c = make("hvt")
    ramp = np.arange(11, dtype=np.float32)
    places = (np.arange(24) + 0.5) * 11 / 24 - 0.5
    found = c.model.at_places(ramp[None, :, None])
    np.testing.assert_allclose(found.ravel(), np.interp(places, np.arange(11), ramp), atol=1e-5)
    s = views_lib.views_of(c.model, views("hvt"), 0).sequences
    assert s.blocks == [1] and s.feature_blocks == [1, 2, 3]  # attention is among 24, 11, 11 tokens
    assert s.queries == "mean of all tokens" and s.features[2].shape == (4, 6, 12)
    thinned = models.build(
        {
            **models.deit.FAMILY.defaults,
            "family": "deit",
            "dtype": "float32",
            "patch": 2,
            "depth": 2,
        }
        | {"retained": (16, 7)},
        image_size=(8, 8),
        channels=1,
        num_classes=2,
    )
    assert thinned.grid(17) == (1, 4, 4) and thinned.grid(16) is None


def test_the_mean_is_over_all_queries_where_keys_are_fewer():
    """As in a CvT, whose keys are strided."""
    seen = np.random.default_rng(3).random((1, 2, 24, 6), np.float32)
    arrays = {"logits": [np.zeros((1, 7))], "attention": [seen]}
    s = views_lib.views_of(make("vit").model, arrays, 0).sequences
    np.testing.assert_allclose(s.attention[0], seen[0].mean(1).reshape(2, 2, 3), rtol=1e-6)


def test_blocks_are_chosen_evenly():
    assert views_lib.spread_out(list(range(3))) == [0, 1, 2]
    assert views_lib.spread_out(list(range(6))) == [0, 2, 3, 5]
    assert views_lib.spread_out(list(range(12))) == [1, 4, 7, 10]  # the supplement's 2, 5, 8, 11


# --- Pictures ------------------------------------------------------------------------------------


@pytest.fixture
def photos(tmp_path):
    """Two images of one name in two folders."""
    rng = np.random.default_rng(2)
    for folder, name in (("a", "cat.png"), ("b", "Cat.png")):
        (tmp_path / folder).mkdir()
        pixels = rng.integers(0, 256, (*SIZE, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / folder / name)
    return [tmp_path / "a" / "cat.png", tmp_path / "b" / "Cat.png"]  # one name on macOS


def command(*words):
    return main.main(["main", "--mode=visualize", *map(str, words)])


def test_the_command_writes_pictures(photos, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(classifier, "load", lambda *_, **__: make("hsvit"))
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"no image")
    out = tmp_path / "new" / "views"
    assert command("--checkpoint=x", *photos, bad, f"--out={out}") == 1
    said = capsys.readouterr()
    assert "bad.png" in said.err
    kinds = ("votes", "maps", "gradcam")
    names = {f"{stem}-{kind}.png" for stem in ("cat", "Cat-2") for kind in kinds}
    assert {path.name for path in out.iterdir()} == names
    assert {line.rpartition("/")[2] for line in said.out.splitlines()} == names
    with Image.open(out / "cat-votes.png") as picture:
        assert np.asarray(picture).std() > 10 and min(picture.size) > 300


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("dhvt", {"looks", "matrices", "heads", "features"}),
        ("hvt", {"looks", "matrices", "features"}),
        ("conv_only", {"maps", "gradcam"}),
        ("swiftformer", {"gradcam"}),
    ],
)
def test_each_family_shows_what_it_has(name, kinds, photos, tmp_path, monkeypatch):
    """Drawn for one of them: that takes seconds."""
    if name != "dhvt":
        monkeypatch.setattr(artifacts, "save_figure", lambda figure, path: None)
    written, errors = figures.write(make(name), photos[:1], tmp_path / "out")
    assert not errors
    assert {path.stem.removeprefix("cat-") for path in written} == kinds
    assert name != "dhvt" or all(path.stat().st_size > 5000 for path in written)


def test_pictures_do_not_become_images(photos, tmp_path, monkeypatch, capsys):
    """Neither a class of those that the run is trained on, nor over an image."""
    c = make("conv_only")
    config = c.config.copy_and_resolve_references()
    with config.unlocked():
        config.data.name = f"folder={tmp_path}"
    monkeypatch.setattr(classifier, "load", lambda *_, **__: dataclasses.replace(c, config=config))
    kept = tmp_path / "a" / f"{Path(photos[0]).stem}-votes.png"
    shutil.copy(photos[0], kept)
    before = sorted(tmp_path.rglob("*")), kept.read_bytes()
    for images, out in (
        ([photos[0]], tmp_path / "views"),
        ([photos[0], kept], kept.parent),
    ):
        assert command("--checkpoint=x", *images, f"--out={out}") == 1
        assert "--out" in capsys.readouterr().err
        assert (sorted(tmp_path.rglob("*")), kept.read_bytes()) == before
