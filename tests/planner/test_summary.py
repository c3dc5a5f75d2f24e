"""Parameters and FLOPs of the summary, against the exact table of the networks."""

import re

import pytest

from hsvit_jax import config as configs
from hsvit_jax import models, train
from hsvit_jax.models import costs
from hsvit_jax.planner import summary
from hsvit_jax.train import optim

SMALL = {
    **models.FAMILIES["hsvit"].settings("c2a2"),
    **{"conv_channels": (8, 16), "groups": 4, "depth": 2, "embed_dim": 16, "heads": 2},
}


def network(variant, pixels, channels, classes, argument=None):
    if variant == "small":
        config = configs.base(argument, SMALL)
    else:
        config = configs.get_config(":".join(filter(None, (variant, argument))))
    with config.unlocked():
        config.data.update(image_size=(pixels, pixels), channels=channels, num_classes=classes)
    return config, train.build_model(config)


def summarise(config, model):
    return summary.summarise(config, model, optim.moment_bytes(config.optim, model))


@pytest.mark.parametrize("argument", [None, "conv_only", "attention_only"])
def test_the_table_holds_every_parameter(argument):
    _, model = network("c3a4", 8, 3, 7, argument)  # attention alone: a token of 64 pixels
    assert sum(row[1] for row in costs.modules(model)) == costs.parameters(model)


@pytest.fixture
def uncompiled(monkeypatch):
    """XLA's own figures without the seconds that they take."""
    monkeypatch.setattr(costs, "training_bytes", lambda model, batch: batch << 20)
    monkeypatch.setattr(costs, "forward_bytes", lambda model, batch: batch << 10)


def test_the_text(uncompiled):
    config, model = network("small", 64, 3, 200)
    text = summarise(config, model)
    assert re.search(r"^parameters 18,160$", text, re.M)
    assert re.search(r"^FLOPs 0\.0084 G \(forward, 2·MAC, .*\), of which 0\.0\d+ G are", text, re.M)
    lines = text.splitlines()
    table = lines[4 : lines.index("", 4)]
    assert len(table) == len(costs.modules(model))
    assert len({len(line) for line in lines[2 : 4 + len(table)]}) == 1
    printed = [int(line.split()[-2].replace(",", "")) for line in table]
    assert sum(printed) == costs.parameters(model)
    assert "70.94 KiB parameters + 76.79 KiB Muon moments, float32" in text
    memory = r"^memory 128\.1 MiB training step of 128 images .*, 128 KiB evaluation of 128 \("
    assert re.search(memory, text, re.M)
    with config.unlocked():
        config.optim.name, config.train.ema_decay = "adamw", 0.9
    text = summarise(config, model)
    assert "70.94 KiB parameters + 141.9 KiB AdamW moments + 70.94 KiB moving average" in text


def test_the_memory_of_compiled_programs():
    """And an evaluation by default needs no more memory than the training step."""
    config, model = network("small", 32, 3, 10, "conv_only")
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


def test_a_paper_s_own_count_stands_beside_ours(uncompiled):
    config, model = network("dhvt", 32, 3, 10, "tiny")
    flops, how = model.paper_flops(costs.multiply_adds(model))
    paper = f"FLOPs as the paper counts {flops / 1e9:.4f} G ({how})"
    assert paper in summarise(config, model)
    assert "as the paper counts" not in summarise(*network("small", 16, 3, 10))
