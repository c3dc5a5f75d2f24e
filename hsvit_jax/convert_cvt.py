"""CvT's state dicts of the `transformers` library."""

from collections.abc import Iterator
from typing import Any

from hsvit_jax import convert_hf as hf
from hsvit_jax.convert_hvt import rows
from hsvit_jax.convert_tensors import (
    Entry,
    Tensors,
    assemble,
    conv,
    conv_norm,
    linear,
    linears,
    norm,
)
from hsvit_jax.models.conv_transformers import cvt
from hsvit_jax.models.conv_transformers.cvt import CvTConfig

#: Fields of a `CvtConfig` that are a list with an entry for each stage.
_FIELDS = {
    "patches": "patch_sizes",
    "strides": "patch_stride",
    "paddings": "patch_padding",
    "widths": "embed_dim",
    "heads": "num_heads",
    "depths": "depth",
    "mlp_ratios": "mlp_ratio",
    "qkv_bias": "qkv_bias",
    "kernels": "kernel_qkv",
    "query_paddings": "padding_q",
    "key_paddings": "padding_kv",
    "key_strides": "stride_kv",
    "dropouts": "drop_rate",
    "attention_dropouts": "attention_drop_rate",
    "drop_paths": "drop_path_rate",
}


def settings(tensors: Tensors, given: dict[str, Any]) -> tuple[dict, dict]:
    """Sections `model` and `data` of a configuration, from the fields of a `CvtConfig`.

    Raises ValueError for a field of the wrong type, or a network we have not.
    """
    model = {ours: hf.fields(given, name, cvt.DEFAULTS[ours]) for ours, name in _FIELDS.items()}
    stages = len(model["depths"])
    hf.only(given, "cls_token", (*(False,) * (stages - 1), True))
    hf.only(given, "stride_q", (1,) * stages)
    hf.only(given, "qkv_projection_method", ("dw_bn",) * stages)
    model |= {"family": "cvt", "drop_path_of": "tokens"}
    model["variant"] = hf.named(model, cvt)
    first = "cvt.encoder.stages.0.embedding.convolution_embeddings.projection.weight"
    return model, hf.data(tensors, given, first, "classifier.weight")


def params_from_torch(tensors: Tensors, config: CvTConfig) -> tuple[dict, dict]:
    """The reference's state dict as (params, stats); see `convert_tensors.assemble`."""
    return assemble(tensors, listing(config))


def listing(c: CvTConfig) -> Iterator[Entry]:
    """Every tensor the reference saves for these sizes."""
    channels = c.image_channels
    for stage, depth in enumerate(c.depths):
        key, path, d = f"cvt.encoder.stages.{stage}", (f"stage{stage}",), c.widths[stage]
        embedding = f"{key}.embedding.convolution_embeddings"
        patch = c.patches[stage]
        yield from conv(f"{embedding}.projection", channels, d, patch, (*path, "conv"))
        yield from norm(f"{embedding}.normalization", d, (*path, "norm"))
        if c.has_cls(stage):
            yield rows(f"{key}.cls_token", (d,), (*path, "cls"))
        for i in range(depth):
            yield from _block(c, stage, f"{key}.layers.{i}", (*path, "blocks", str(i)))
        channels = d
    yield from norm("layernorm", channels, ("norm",))
    yield from linear("classifier", channels, c.num_classes, ("head",))


def _block(c: CvTConfig, stage: int, key: str, path: tuple[str, ...]) -> Iterator[Entry]:
    d, hidden, mixer = c.widths[stage], c.hidden(stage), (*path, "mixer")
    attention, names = f"{key}.attention.attention", ("query", "key", "value")
    for name in names:
        own = f"{attention}.convolution_projection_{name}.convolution_projection"
        yield from conv_norm(own, d, d, c.kernels[stage], (*mixer, "local", name), groups=d)
    keys = [f"{attention}.projection_{name}" for name in names]
    yield from linears(keys, d, d, (*mixer, "qkv"), bias=c.qkv_bias[stage])
    yield from linear(f"{key}.attention.output.dense", d, d, (*mixer, "out"))
    yield from norm(f"{key}.layernorm_before", d, (*path, "norm1"))
    yield from norm(f"{key}.layernorm_after", d, (*path, "norm2"))
    yield from linear(f"{key}.intermediate.dense", d, hidden, (*path, "feed_forward", "up"))
    yield from linear(f"{key}.output.dense", hidden, d, (*path, "feed_forward", "down"))
