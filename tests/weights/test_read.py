"""Weights of other files: found, refitted and refused as a whole, and nothing in them is run."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy
from support import convnet_files, small_runs, state_dicts

from hsvit_jax import checkpoint, models, train
from hsvit_jax import config as config_lib
from hsvit_jax.models.hsvit import backbone
from hsvit_jax.train import init_from
from hsvit_jax.weights import files, read, torch
from hsvit_jax.weights.convert import convert
from hsvit_jax.weights.torch import layouts

MODEL = {
    "family": "deit",
    "variant": "custom",
    "dtype": "float32",
    "patch": 2,
    "heads": 2,
    "head_dim": 3,
    "depth": 1,
    "mlp_ratio": 2.0,
    "qkv_bias": True,
    "eps": 1e-6,
    "cls": True,
    "drop_path": 0.1,
    "retained": (),
    "flops_share": 1.0,
}


def tensors_of(name="pretrained"):
    """A DeiT's state dict, as timm names it."""
    return state_dicts.tensors(name)


def prepared(place, changes=None, **init):
    """(config, network) of a small DeiT that starts from `place`."""
    config = small_runs.small_config(train__steps=0)
    with config.unlocked():
        del config["model"]
        config.model = {**MODEL, **(changes or {})}
        config.init.update({"from": str(place), **init})
    run = train.prepare(config, dataset=small_runs.small_dataset())
    return run.config, run.model


def load(place, changes=None, **init):
    return init_from.load(*prepared(place, changes, **init))


def write(path, tensors):
    if path.suffix == ".npz":
        np.savez(path, **tensors)
    else:
        safetensors.numpy.save_file(tensors, path)
    return path


@pytest.mark.parametrize(
    ("name", "before"), [("w.safetensors", ""), ("w.npz", "module."), ("w.safetensors", "a.b.")]
)
def test_a_file_s_logits_are_the_network_s(tmp_path, name, before):
    tensors = tensors_of()
    start = load(write(tmp_path / name, {before + k: v for k, v in tensors.items()}))
    network = models.build(MODEL, image_size=(8, 8), channels=1, num_classes=7)
    x = state_dicts.images("pretrained").transpose(0, 2, 3, 1)
    found = jax.jit(network.apply)(start.params, start.stats, x)[0]
    expected = state_dicts.CASES["pretrained"]["logits"]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert start.notes[0].startswith(f"20 of 20 tensors are from {name}")


def test_other_sizes_are_found_and_refitted_when_asked(tmp_path):
    """A folder as timm has it on the hub, of 11 classes, RGB, 12×12 pixels."""
    tensors = tensors_of("pretrained, other sizes")
    write(tmp_path / "model.safetensors", tensors)
    about = {"architecture": "deit_tiny", "pretrained_cfg": {"input_size": [3, 12, 12]}}
    (tmp_path / "config.json").write_text(json.dumps(about))
    asked = {"classifier": "new", "stem": "refit", "positions": "resize"}
    start = load(tmp_path, **asked)
    assert start.params["embedding"]["position"].shape == (17, 6)
    np.testing.assert_array_equal(
        start.params["embedding"]["position"][0], tensors["pos_embed"][0, 0]
    )
    patches = tensors["patch_embed.proj.weight"].sum(1)  # (D, rows, columns)
    np.testing.assert_allclose(
        start.params["embedding"]["patches"]["linear"]["kernel"].reshape(2, 2, 6),
        patches.transpose(1, 2, 0),
        rtol=1e-5,
        atol=1e-6,
    )
    assert start.params["head"]["linear"]["kernel"].shape == (6, 7)
    assert start.notes[0].startswith("18 of 20 tensors") and len(start.notes) == 4
    with pytest.raises(ValueError, match=r"it has 3, this configuration 1; init\.stem=refit"):
        load(tmp_path, **{**asked, "stem": "keep"})


def test_a_file_that_does_not_tell_its_image_size(tmp_path):
    place = write(tmp_path / "w.safetensors", tensors_of("pretrained, other sizes"))
    with pytest.raises(ValueError, match=r"misshapen pos_embed: \(1, 37, 6\), expected"):
        load(place, classifier="new", stem="refit", positions="resize")


def test_a_file_without_a_classifier(tmp_path):
    tensors = {k: v for k, v in tensors_of().items() if not k.startswith("head.")}
    place = write(tmp_path / "w.safetensors", tensors)
    with pytest.raises(ValueError, match=r"(?s)missing head\.weight.*init\.classifier=new"):
        load(place)
    start = load(place, classifier="new")
    assert np.ptp(start.params["head"]["linear"]["kernel"]) > 0
    with pytest.raises(ValueError, match="freeze=head would keep fresh random weights"):
        load(place, classifier="new", freeze="head")


@pytest.mark.parametrize("before", ["", "model."])
def test_names_that_follow_from_the_file_s_own_have_a_wrapper_too(golden_dir, before):
    """Of a ViT of version 5 of its library, whose blocks are called otherwise."""
    tensors, described = files.read(golden_dir / "hf-vit-p4-v5keys.npz")
    record = models.FAMILIES["vit"]
    sections, sizes = torch.sections(record, tensors, described["constructor"])
    network = models.build({"dtype": "float32", **sections}, **sizes)
    own = {key: x for key, x in tensors.items() if key.startswith(("vit.", "classifier."))}
    wrapped = {before + key: tensor for key, tensor in own.items()}
    found = read.read(Path("w"), wrapped, {}, network, "vit")
    expected = torch.table("vit").load(tensors, network)
    jax.tree.map(np.testing.assert_array_equal, found[:2], expected)


def test_every_misfit_is_listed_in_the_file_s_words(tmp_path):
    tensors = {f"module.{k}": v for k, v in tensors_of().items()}
    del tensors["module.norm.bias"]
    tensors["module.more"] = np.zeros(3, np.float32)
    tensors["module.blocks.0.mlp.fc1.bias"] = np.zeros(5, np.float32)
    place = write(tmp_path / "w.safetensors", tensors)
    with pytest.raises(ValueError, match="3 tensors") as told:
        load(place)
    text = str(told.value)
    assert "missing module.norm.bias (6,)" in text and "extra module.more (3,)" in text
    assert "misshapen module.blocks.0.mlp.fc1.bias: (5,), expected (12,)" in text
    assert str(place) in text and "nothing was loaded" in text


@pytest.mark.parametrize("beside", [False, True])
def test_what_a_file_is_said_to_be_counts(golden_dir, tmp_path, beside):
    """In its own description, or in the library's beside it: heads show in no tensor's shape."""
    path = golden_dir / "hf-vit-p4.npz"
    tensors, description = files.read(path)
    record = torch.family_of(description)
    settings, data = torch.sections(record, tensors, description["constructor"])
    if beside:
        state = {name: tensor for name, tensor in tensors.items() if "." in name}
        path = write(tmp_path / "model.safetensors", state).parent
        (path / "config.json").write_text(json.dumps(description["constructor"]))
    config = small_runs.small_config().unlock()
    config.model = config_lib.base("cifar10", settings).model
    config.data.update(data)
    config.init["from"] = str(path)
    assert init_from.load(config, train.build_model(config)).notes[0].startswith("32 of 32")
    config.model.update(heads=2, head_dim=10, activation="relu")
    with pytest.raises(ValueError, match="heads: checkpoint 4, config 2") as caught:
        init_from.load(config, train.build_model(config))
    assert "activation: checkpoint gelu, config relu" in str(caught.value)
    if beside:
        (path / "config.json").write_text('{"model_type": "vit", "num_attention_heads": "x"}')
        with pytest.raises(ValueError, match="gives no network"):
            init_from.load(config, train.build_model(config))
        (path / "config.json").write_text('{"architecture": "vit_tiny"}')  # timm's
        note = init_from.load(config, train.build_model(config)).notes[0]
        assert note.endswith("published as vit_tiny")


def test_another_architecture_is_named(tmp_path):
    tensors = {"layer1.0.conv1.weight": np.zeros((4, 3, 3, 3), np.float32)}
    place = write(tmp_path / "w.safetensors", tensors)
    with pytest.raises(
        ValueError, match="another architecture: of the 20 tensors that this deit network needs, 0"
    ):
        load(place)
    with pytest.raises(ValueError, match=r"missing blocks\.1\.mlp\.fc2\.weight"):
        load(write(tmp_path / "d.safetensors", tensors_of()), changes={"depth": 2})


@pytest.mark.slow
def test_a_run_of_no_steps_evaluates_the_file(tmp_path):
    """The weights are in the checkpoint, whole; what was done is said."""
    place = write(tmp_path / "w.safetensors", tensors_of())
    config, _ = prepared(place)
    train.train(config, tmp_path / "run", dataset=small_runs.small_dataset(), verbose=False)
    _, state, _ = checkpoint.load_tree(tmp_path / "run")
    expected = init_from.load(*prepared(place)).params
    jax.tree.map(np.testing.assert_array_equal, state["params"], expected)


# --- Convolutional networks, by other libraries' names -------------------------------------------

GOLDENS = {
    "resnet": "hf-resnet-basic.npz",
    "mobilenet_v2": "hf-mobilenetv2-train.npz",
    "efficientnet": "hf-efficientnet-train.npz",
}


@pytest.mark.parametrize("family", GOLDENS)
def test_every_layout_gives_the_same_trees(family, golden_dir):
    """transformers' own, torchvision's and timm's, told apart by the names alone.

    Where a library's networks compute otherwise, the tensors would fit and the network be another.
    """
    tensors, golden, params, stats, reader, _ = convnet_files.read(golden_dir / GOLDENS[family])
    for layout in layouts.known(family):
        network = golden.resized(**layout.settings(golden.config))
        rename = layout.rename(network.config)
        own = {rename(e.key): tensors[e.key] for e in torch.table(reader.name).entries(network)}
        own |= {"bn.num_batches_tracked": np.array(3)}
        found = read.read(Path("w"), own, {}, network, family)
        assert layout.library in found.source and found.network is network
        jax.tree.map(np.testing.assert_array_equal, found[:2], (params, stats))
        if family == "mobilenet_v2" and layout.library == "torchvision":
            fix = r"--config\.model\.padding=symmetric --config\.model\.bn_eps=1e-05"
            with pytest.raises(ValueError, match=fix):
                read.read(Path("w"), own, {}, network.resized(padding="same", bn_eps=1e-3), family)


# --- HSViT on a backbone -------------------------------------------------------------------------


def on_backbone(base, **init):
    """(config, network) of an HSViT of 3 classes on the backbone of a ResNet, which is frozen."""
    c = base.config
    own = backbone.BackboneHSViTConfig(
        c.image_size, c.image_channels, 3, backbone=c, groups=2, depth=1, heads=2
    )
    config = small_runs.small_config()
    with config.unlocked():
        config.model.family = "hsvit_backbone"
        config.init.update({"freeze": "backbone", **init})
    return config, backbone.BackboneHSViT(own).with_frozen({"backbone"})


@pytest.mark.parametrize("before", ["", pytest.param("resnet.", marks=pytest.mark.slow)])
def test_a_backbone_s_file_fills_the_backbone_alone(golden_dir, tmp_path, before):
    """With its classifier or without, and of other classes; the rest is fresh, and it is said."""
    tensors, base, params, stats, *_ = convnet_files.read(golden_dir / GOLDENS["resnet"])
    own = {k: v for k, v in tensors.items() if k.startswith("resnet.")}
    if before:
        own |= {k: v for k, v in tensors.items() if k.startswith("classifier")}
    else:
        own = {k.removeprefix("resnet."): v for k, v in own.items()}
    place = write(tmp_path / "w.safetensors", own)
    config, network = on_backbone(base, **{"from": str(place)})
    start = init_from.load(config, network)
    jax.tree.map(np.testing.assert_array_equal, start.params["backbone"], params["backbone"])
    jax.tree.map(np.testing.assert_array_equal, start.stats["backbone"], stats["backbone"])
    shapes = network.init_shapes()
    assert jax.tree.map(lambda x: x.shape, start[:2]) == jax.tree.map(lambda x: x.shape, shapes)
    assert start.notes[-1] == "fresh: groups, head, trunk"


def test_a_whole_network_s_file_fills_it_all(golden_dir):
    source = golden_dir / "hsvithet-resnet-bottleneck-ds.npz"
    _, network, params, stats, *_ = convnet_files.read(source)
    config = small_runs.small_config(init__from=str(source))
    with config.unlocked():
        config.model.family = "hsvit_backbone"
    start = init_from.load(config, network)
    jax.tree.map(np.testing.assert_array_equal, start[:2], (params, stats))


def test_our_own_checkpoint_of_the_backbone(golden_dir, tmp_path):
    convert(golden_dir / GOLDENS["resnet"], tmp_path / "ours")
    _, base, params, *_ = convnet_files.read(golden_dir / GOLDENS["resnet"])
    config, network = on_backbone(base, **{"from": str(tmp_path / "ours")})
    start = init_from.load(config, network)
    jax.tree.map(np.testing.assert_array_equal, start.params["backbone"], params["backbone"])
