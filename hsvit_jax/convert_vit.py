"""ViT's state dicts of the `transformers` library, in the names of version 4 and of version 5."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from hsvit_jax import convert_hf as hf
from hsvit_jax.convert_hvt import patches, rows
from hsvit_jax.convert_tensors import Entry, Tensors, assemble, linear, linears, norm
from hsvit_jax.models.vit import hvt, vit


class _Names(NamedTuple):
    """What a version calls the parts of block {i}."""

    block: str
    qkv: tuple[str, str, str]
    out: str
    up: str
    down: str


_VERSION_4 = _Names(
    "vit.encoder.layer.{}",
    ("attention.attention.query", "attention.attention.key", "attention.attention.value"),
    "attention.output.dense",
    "intermediate.dense",
    "output.dense",
)
_VERSION_5 = _Names(
    "vit.layers.{}",
    ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    "attention.o_proj",
    "mlp.fc1",
    "mlp.fc2",
)


def settings(tensors: Tensors, given: dict[str, Any]) -> tuple[dict, dict]:
    """Sections `model` and `data` of a configuration, from the fields of a `ViTConfig`.

    Raises ValueError for a field of the wrong type, or a network we have not.
    """
    dim, heads = hf.field(given, "hidden_size", 768), hf.field(given, "num_attention_heads", 12)
    if heads < 1 or dim % heads:
        raise ValueError(f"num_attention_heads={heads} do not divide hidden_size={dim}")
    model = {
        "family": "vit",
        "patch": hf.field(given, "patch_size", 16),
        "heads": heads,
        "head_dim": dim // heads,
        "depth": hf.field(given, "num_hidden_layers", 12),
        "mlp_dim": hf.field(given, "intermediate_size", 3072),
        "qkv_bias": hf.field(given, "qkv_bias", True),
        "eps": hf.field(given, "layer_norm_eps", 1e-12),
        "activation": hf.act(given, "hidden_act", "gelu"),
        "dropout": hf.field(given, "hidden_dropout_prob", 0.0),
        "attention_dropout": hf.field(given, "attention_probs_dropout_prob", 0.0),
        "drop_path": 0.0,
    }
    model["variant"] = hf.named(model, vit)
    first = "vit.embeddings.patch_embeddings.projection.weight"
    return model, hf.data(tensors, given, first, "classifier.weight")


def params_from_torch(tensors: Tensors, config: hvt.HVTConfig) -> tuple[dict, dict]:
    """The reference's state dict as (params, stats); see `convert_tensors.assemble`."""
    new = any(key.startswith("vit.layers.") for key in tensors)
    return assemble(tensors, listing(config, _VERSION_5 if new else _VERSION_4))


def listing(c: hvt.HVTConfig, names: _Names = _VERSION_4) -> Iterator[Entry]:
    """Every tensor the reference saves for these sizes."""
    d, at = c.dim, "vit.embeddings"
    yield from patches(f"{at}.patch_embeddings.projection", c.patch, c.image_channels, d)
    yield rows(f"{at}.cls_token", (d,), ("embedding", "cls"))
    yield rows(f"{at}.position_embeddings", (c.tokens, d), ("embedding", "position"))
    for i in range(c.depth):
        key, path = names.block.format(i), ("encoder", "blocks", str(i))
        mixer, feed = (*path, "mixer"), (*path, "feed_forward")
        yield from norm(f"{key}.layernorm_before", d, (*path, "norm1"))
        yield from norm(f"{key}.layernorm_after", d, (*path, "norm2"))
        qkv = [f"{key}.{name}" for name in names.qkv]
        yield from linears(qkv, d, d, (*mixer, "qkv"), bias=c.qkv_bias)
        yield from linear(f"{key}.{names.out}", d, d, (*mixer, "out"))
        yield from linear(f"{key}.{names.up}", d, c.hidden, (*feed, "up"))
        yield from linear(f"{key}.{names.down}", c.hidden, d, (*feed, "down"))
    yield from norm("vit.layernorm", d, ("head", "norm"))
    yield from linear("classifier", d, c.num_classes, ("head", "linear"))
