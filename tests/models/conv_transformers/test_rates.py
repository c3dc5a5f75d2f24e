"""Every rate of dropout and stochastic depth acts, and each mask has a stream of its own."""

import jax
import jax.numpy as jnp
import pytest

from hsvit_jax import config as config_lib
from hsvit_jax import models
from hsvit_jax.models import layers


@pytest.mark.parametrize(
    "family",
    ("cvt", "mobilevit", "swiftformer", "efficientformer", "efficientvit", "fastvit", "smt", "vit"),
)
def test_masks_of_each_rate(family, monkeypatch):
    """As traced: the rates of `layers.dropout_scale` and `layers.attention`, and their streams."""
    settings = config_lib.get_config(f"{family}:digits,tiny").model.to_dict()
    rates, expected = iter(range(1, 20)), []
    for name, value in settings.items():
        if "drop" in name and isinstance(value, float | tuple):
            count = len(settings["depths"]) if isinstance(value, tuple) else 1
            own = [next(rates) / 32 for _ in range(count)]
            settings[name] = tuple(own) if isinstance(value, tuple) else own[0]
            # Of a stage with one block, whose rate begins at 0, nothing is dropped.
            kept = settings["depths"] if name == "drop_paths" else [2] * count
            expected += [rate for rate, blocks in zip(own, kept, strict=True) if blocks > 1]
    if family == "cvt":
        settings["drop_path_of"] = "branch"
    network = models.build(settings, image_size=(64, 64), channels=3, num_classes=5)
    seen, streams, attention = set(), [], layers.attention

    def scale(counters, shape, rate):
        seen.add(rate)
        streams.append(counters[2])
        return jnp.ones(shape)

    def attended(rate, q, k, v, counters):
        if rate:
            scale(counters, (), rate)
        return attention(0.0, q, k, v, ())

    monkeypatch.setattr(layers, "dropout_scale", scale)
    monkeypatch.setattr(layers, "attention", attended)
    params, stats = network.init_shapes()
    images = jax.ShapeDtypeStruct((2, 64, 64, 3), jnp.float32)
    jax.eval_shape(
        lambda p, s, x: network.apply(p, s, x, train=True, dropout_key=jax.random.key(1)),
        *(params, stats, images),
    )
    assert expected and set(expected) <= seen
    assert len(set(streams)) == len(streams)
