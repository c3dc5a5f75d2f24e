"""Parameters and FLOPs of the summary, against the exact table of the networks."""

import re
from types import SimpleNamespace

import pytest

from configs import c2a2, c3a4, c4a8
from hsvit_jax import config as configs
from hsvit_jax import models, report
from hsvit_jax.commands import summary
from hsvit_jax.models import costs
from hsvit_jax.models.vit import dhvt
from hsvit_jax.train import optim

CONFIGS = {"c2a2": c2a2, "c3a4": c3a4, "c4a8": c4a8}


SMALL = {
    "variant": "c2a2",
    "conv_channels": (8, 16),
    "conv_kernels": (3, 3),
    "groups": 4,
    "depth": 2,
    "embed_dim": 16,
    "heads": 2,
    "dropout": 0.2,
    "trunk": "replicated",
    "towers": 1,
    "group_dropout": 0.0,
    "convolution": "dense",
    "tiles": (1, 1),
    "votes": "equal",
}


def network(variant, pixels, channels, classes, argument=None):
    if variant == "small":
        config = configs.base(argument, SMALL)
    else:
        config = CONFIGS[variant].get_config(argument)
    info = SimpleNamespace(
        flip=True,
        image_size=(pixels, pixels),
        channels=channels,
        num_classes=classes,
        mean=(0.5,) * channels,
        std=(0.5,) * channels,
    )
    config = configs.resolve(config, info)
    data = config.data
    return config, models.build(
        config.model,
        image_size=data.image_size,
        channels=data.channels,
        num_classes=data.num_classes,
    )


@pytest.mark.parametrize("argument", [None, "conv_only", "attention_only"])
def test_the_table_holds_every_parameter(argument):
    _, model = network("c3a4", 32, 3, 7, argument)
    assert sum(row[1] for row in costs.modules(model)) == costs.parameters(model)


def test_the_text():
    config, model = network("small", 64, 3, 200)
    text = summary.summarise(config, model)
    assert re.search(r"^parameters 18,160$", text, re.M)
    assert re.search(r"^FLOPs 0\.0084 G \(forward, 2·MAC, one image; ", text, re.M)
    lines = text.splitlines()
    table = lines[4 : lines.index("", 4)]
    assert len(table) == len(costs.modules(model))
    assert len({len(line) for line in lines[2 : 4 + len(table)]}) == 1
    printed = [int(line.split()[-2].replace(",", "")) for line in table]
    assert sum(printed) == costs.parameters(model)
    assert "70.94 KiB parameters + 141.9 KiB AdamW moments + 70.94 KiB moving average" in text
    memory = r"^memory [\d.]+ MiB training step of 128 images .*, [\d.]+ MiB evaluation of 128 \("
    assert re.search(memory, text, re.M)


def test_muon_keeps_one_moment_of_a_kernel():
    config, model = network("small", 32, 3, 10, "fast")
    count = costs.parameters(model)
    assert 4 * count < optim.moment_bytes(config.optim, model) < 6 * count


def test_what_xla_counts():
    """And an evaluation by default needs no more memory than the training step."""
    config, model = network("small", 32, 3, 10)
    counted = costs.compiled_flops(model)
    assert 0.5 * costs.flops(model) < counted < 2 * costs.flops(model)
    small, large = (costs.training_bytes(model, batch) for batch in (8, 32))
    assert 2 * small < large < 5 * small
    config = config.copy_and_resolve_references()
    config.train.batch = 32
    assert configs.eval_batch(config) == 32
    evaluated = costs.forward_bytes(model, 32)
    images = 4 * 32 * 32 * 32 * 3
    assert 4 * costs.parameters(model) + images < evaluated < large
    config.eval.batch = 3
    assert configs.eval_batch(config) == 3


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (5 * 2**40, "5 TiB")]
)
def test_bytes(count, text):
    assert report.byte_text(count) == text


def test_a_paper_s_own_count_stands_beside_ours(monkeypatch):
    sizes = {
        **dhvt.FAMILY.defaults,
        "family": "dhvt",
        "variant": "custom",
        "depth": 1,
        "embed_dim": 16,
    }
    config = configs.base("cifar10", sizes)
    model = models.build(config.model, image_size=(8, 8), channels=3, num_classes=10)
    for name in ("compiled_flops", "forward_bytes", "training_bytes"):
        monkeypatch.setattr(costs, name, lambda *_: 0)
    text = summary.summarise(config, model)
    flops, how = model.paper_flops(costs.multiply_adds(model))
    assert f"FLOPs as the paper counts {flops / 1e9:.4f} G ({how})" in text
    assert "as the paper counts" not in summary.summarise(*network("small", 16, 3, 10))
