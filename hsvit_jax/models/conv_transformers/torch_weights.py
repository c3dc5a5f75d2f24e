"""State dicts and configurations of the networks in this folder.

Those of CvT, MobileViT, SwiftFormer and EfficientFormer are the `transformers` library's, those of
EfficientViT and FastViT timm's, those of SMT its authors'.
"""

from collections.abc import Collection
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from hsvit_jax.models.torch_weights import (
    Table,
    Tensors,
    TorchWeights,
    act,
    conv_norm,
    data_section,
    field,
    fields,
    only,
    pair,
    read,
)

if TYPE_CHECKING:
    from hsvit_jax.models.conv_transformers.efficientformer import EfficientFormerConfig
    from hsvit_jax.models.conv_transformers.smt import SMTConfig
    from hsvit_jax.models.conv_transformers.stages import StagedConfig
    from hsvit_jax.models.family import Family

Sections = tuple[dict[str, Any], dict[str, Any]]

_QKV = ("query", "key", "value")


def _layer(ours: str, theirs: str) -> Table:
    """The `transformers` library's pre-norm layer, but for queries, keys and values."""
    return {
        f"{ours}/norm1": f"{theirs}.layernorm_before",
        f"{ours}/norm2": f"{theirs}.layernorm_after",
        f"{ours}/mixer/out": f"{theirs}.attention.output.dense",
        f"{ours}/feed_forward/up": f"{theirs}.intermediate.dense",
        f"{ours}/feed_forward/down": f"{theirs}.output.dense",
    }


def _conv_norms(names: dict[str, str]) -> Table:
    """`ConvNorm`s by the path of each, in timm's names."""
    tables = (conv_norm(ours, theirs, "conv", "bn") for ours, theirs in names.items())
    return {path: name for table in tables for path, name in table.items()}


# --- CvT -----------------------------------------------------------------------------------------

#: Fields of a `CvtConfig` that are a list with an entry for each stage.
_CVT_FIELDS = {
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
_CVT_STAGE = "cvt.encoder.stages.{s}"
_CVT_EMBEDDING = f"{_CVT_STAGE}.embedding.convolution_embeddings"
_CVT_FIRST = f"{_CVT_EMBEDDING.format(s=0)}.projection.weight"
_CVT_LAYER = f"{_CVT_STAGE}.layers.{{i}}"
_CVT_ATTENTION = f"{_CVT_LAYER}.attention.attention"
_CVT_CONV = f"{_CVT_ATTENTION}.convolution_projection_{{q}}.convolution_projection"
_CVT: Table = {
    "stage{s}/conv": f"{_CVT_EMBEDDING}.projection",
    "stage{s}/norm": f"{_CVT_EMBEDDING}.normalization",
    "stage{s}/cls": f"{_CVT_STAGE}.cls_token [1,1,:]",
    **conv_norm("stage{s}/blocks/{i}/mixer/local/{q}", _CVT_CONV),
    "stage{s}/blocks/{i}/mixer/qkv": tuple(f"{_CVT_ATTENTION}.projection_{q}" for q in _QKV),
    **_layer("stage{s}/blocks/{i}", _CVT_LAYER),
    "norm": "layernorm",
    "head": "classifier",
}


def _cvt_settings(family: "Family", tensors: Tensors, given: dict[str, Any]) -> Sections:
    model = read(given, _CVT_FIELDS, family.defaults)
    stages = len(model["depths"])
    only(given, "cls_token", (*(False,) * (stages - 1), True))
    only(given, "stride_q", (1,) * stages)
    only(given, "qkv_projection_method", ("dw_bn",) * stages)
    model["drop_path_of"] = "tokens"
    return model, data_section(tensors, given, _CVT_FIRST, "classifier.weight")


CVT = TorchWeights((_CVT_FIRST,), _cvt_settings, _CVT)

# --- MobileViT -----------------------------------------------------------------------------------

_MOBILE_STEM = "mobilevit.conv_stem.convolution.weight"


def _mobilevit_settings(family: "Family", tensors: Tensors, given: dict[str, Any]) -> Sections:
    names = {key: key for key in ("mlp_ratio", "expand_ratio", "output_stride", "qkv_bias")}
    names |= {"channels": "neck_hidden_sizes", "widths": "hidden_sizes", "eps": "layer_norm_eps"}
    names |= {"heads": "num_attention_heads", "kernel": "conv_kernel_size", "patch": "patch_size"}
    names |= {"dropout": "hidden_dropout_prob", "head_dropout": "classifier_dropout_prob"}
    names |= {"attention_dropout": "attention_probs_dropout_prob"}
    model = read(given, names, family.defaults)
    model["activation"] = act(given, "hidden_act", "silu")
    return model, data_section(tensors, given, _MOBILE_STEM, "classifier.weight")


def _inverted_residual(ours: str, theirs: str) -> Table:
    return {
        **conv_norm(f"{ours}/expand", f"{theirs}.expand_1x1"),
        **conv_norm(f"{ours}/depthwise", f"{theirs}.conv_3x3"),
        **conv_norm(f"{ours}/reduce", f"{theirs}.reduce_1x1"),
    }


_MOBILE_LAYER = "mobilevit.encoder.layer.{l}"
_MOBILE_BLOCK = f"{_MOBILE_LAYER}.transformer.layer.{{i}}"
_MOBILEVIT: Table = {
    **conv_norm("stem", "mobilevit.conv_stem"),
    **_inverted_residual("layer{l}/blocks/{i}", f"{_MOBILE_LAYER}.layer.{{i}}"),
    **_inverted_residual("layer{l}/down", f"{_MOBILE_LAYER}.downsampling_layer"),
    **conv_norm("layer{l}/local", f"{_MOBILE_LAYER}.conv_kxk"),
    "layer{l}/project": f"{_MOBILE_LAYER}.conv_1x1.convolution",
    **_layer("layer{l}/blocks/{i}", _MOBILE_BLOCK),
    "layer{l}/blocks/{i}/mixer/qkv": tuple(
        f"{_MOBILE_BLOCK}.attention.attention.{q}" for q in _QKV
    ),
    "layer{l}/norm": f"{_MOBILE_LAYER}.layernorm",
    **conv_norm("layer{l}/back", f"{_MOBILE_LAYER}.conv_projection"),
    **conv_norm("layer{l}/fuse", f"{_MOBILE_LAYER}.fusion"),
    **conv_norm("last", "mobilevit.conv_1x1_exp"),
    "head": "classifier",
}
MOBILEVIT = TorchWeights((_MOBILE_STEM,), _mobilevit_settings, _MOBILEVIT)

# --- SwiftFormer ---------------------------------------------------------------------------------

_SWIFT_STEM = "swiftformer.patch_embed.patch_embedding"


def _layer_scale(given: dict[str, Any]) -> float:
    """The initial value of the branches' LayerScale, 0 for none."""
    if not field(given, "use_layer_scale", True):
        return 0.0
    scale = field(given, "layer_scale_init_value", 1e-5)
    if not scale:
        raise ValueError("layer_scale_init_value=0 with use_layer_scale is not supported")
    return scale


def _swiftformer_settings(family: "Family", tensors: Tensors, given: dict[str, Any]) -> Sections:
    names = {"depths": "depths", "widths": "embed_dims", "mlp_ratio": "mlp_ratio"}
    names |= {"down_kernel": "down_patch_size", "down_stride": "down_stride"}
    names |= {"down_padding": "down_pad", "drop_path": "drop_path_rate", "eps": "batch_norm_eps"}
    names |= {"dropout": "drop_mlp_rate", "conv_drop_path": "drop_conv_encoder_rate"}
    model = read(given, names, family.defaults)
    downsamples = fields(given, "downsamples", (True,) * 4)[: len(model["depths"]) - 1]
    model |= {"downsamples": downsamples, "queries": "equal", "layer_scale": _layer_scale(given)}
    model["activation"] = act(given, "hidden_act", "gelu")
    return model, data_section(tensors, given, f"{_SWIFT_STEM}.0.weight", "head.weight")


def _places(c: "StagedConfig") -> list[int]:
    """The number of each stage among stages and the convolutions behind them."""
    stages = range(len(c.depths) - 1)
    return list(accumulate((1 + c.follows(stage) for stage in stages), initial=0))


def _swift_conv_block(ours: str, theirs: str) -> Table:
    return {
        **conv_norm(f"{ours}/depthwise", theirs, "depth_wise_conv", "norm"),
        f"{ours}/up": f"{theirs}.point_wise_conv1 [:,:,1,1]",
        f"{ours}/down": f"{theirs}.point_wise_conv2 [:,:,1,1]",
        f"{ours}/scale": f"{theirs}.layer_scale [:,1,1]",
    }


def _swiftformer(c: "StagedConfig", keys: Collection[str]) -> Table:
    table = {
        **conv_norm("stem/convs/0", _SWIFT_STEM, "0", "1"),
        **conv_norm("stem/convs/1", _SWIFT_STEM, "3", "4"),
        "norm": "norm",
        "head/own": "head",
        "head/teacher": "dist_head",
    }
    network = "swiftformer.encoder.network"
    for stage, place in enumerate(_places(c)):
        ours, theirs = f"stage{stage}/blocks/{{i}}", f"{network}.{place}.blocks.{{i}}"
        table |= conv_norm(f"stage{stage}/down", f"{network}.{place + 1}", "proj", "norm")
        table |= _swift_conv_block(ours, theirs)
        table |= _swift_conv_block(f"{ours}/local", f"{theirs}.local_representation")
        table |= {
            f"{ours}/attention/score": f"{theirs}.attn.w_g [:,1]",
            f"{ours}/attention/query": f"{theirs}.attn.to_query",
            f"{ours}/attention/key": f"{theirs}.attn.to_key",
            f"{ours}/attention/mix": f"{theirs}.attn.proj",
            f"{ours}/attention/out": f"{theirs}.attn.final",
            f"{ours}/norm": f"{theirs}.linear.norm1",
            f"{ours}/feed_forward/up": f"{theirs}.linear.fc1 [:,:,1,1]",
            f"{ours}/feed_forward/down": f"{theirs}.linear.fc2 [:,:,1,1]",
            f"{ours}/scales/scales/0": f"{theirs}.layer_scale_1 [:,1,1]",
            f"{ours}/scales/scales/1": f"{theirs}.layer_scale_2 [:,1,1]",
        }
    return table


SWIFTFORMER = TorchWeights(
    (f"{_SWIFT_STEM}.0.weight",),
    _swiftformer_settings,
    _swiftformer,
    known={"queries": ("equal",)},
)

# --- EfficientFormer -----------------------------------------------------------------------------

_EFFICIENT_STEM = "efficientformer.patch_embed"
#: The two convolutions with BatchNorm of a stem or a pooling block.
_FIRST, _SECOND = ("convolution1", "batchnorm_before"), ("convolution2", "batchnorm_after")


def _efficientformer_settings(
    family: "Family", tensors: Tensors, given: dict[str, Any]
) -> Sections:
    """The image's size is 32·resolution where neither an image nor an option tells it."""
    names = {key: key for key in ("depths", "key_dim", "attention_ratio")}
    names |= {"widths": "hidden_sizes", "attention_blocks": "num_meta3d_blocks"}
    names |= {"heads": "num_attention_heads", "mlp_ratio": "mlp_expansion_ratio"}
    names |= {"down_kernel": "downsample_patch_size", "down_stride": "downsample_stride"}
    names |= {"down_padding": "downsample_pad", "pool_window": "pool_size"}
    names |= {"dropout": "hidden_dropout_prob", "eps": "layer_norm_eps"}
    model = read(given, names | {"norm_eps": "batch_norm_eps"}, family.defaults)
    model |= {"activation": act(given, "hidden_act", "gelu"), "layer_scale": _layer_scale(given)}
    stages = len(model["depths"])
    model["downsamples"] = fields(given, "downsamples", (True,) * stages)[: stages - 1]
    # The reference's rate is that of the second block; ours is that of the last.
    rate = field(given, "drop_path_rate", 0.0)
    model["drop_path"] = rate * max(sum(model["depths"]) - 1, 1)
    for name in ("dim", "hidden_size"):
        only({name: model["widths"][-1], **given}, name, model["widths"][-1])
    side = field(given, "resolution", 7)
    sized = {"image_size": 32 * side, **given}
    first = f"{_EFFICIENT_STEM}.convolution1.weight"
    data = data_section(tensors, sized, first, "classifier.weight")
    config = family.sizes(model, **data)
    if config.attention_blocks and config.maps()[-1] != (side, side):
        rows, columns = config.maps()[-1]
        raise ValueError(
            f"resolution={side} needs a last map of {side}×{side}; an image of "
            f"{data['image_size'][0]}×{data['image_size'][1]} leaves {rows}×{columns}"
        )
    return model, data


def _efficientformer(c: "EfficientFormerConfig", keys: Collection[str]) -> Table:
    encoder = "efficientformer.encoder"
    table = {
        **conv_norm("stem/convs/0", _EFFICIENT_STEM, *_FIRST),
        **conv_norm("stem/convs/1", _EFFICIENT_STEM, *_SECOND),
        "norm": "efficientformer.layernorm",
        "head/own": "classifier",
        "head/teacher": "distillation_classifier",
    }
    for stage, place in enumerate(_places(c)):
        down = f"{encoder}.intermediate_stages.{place + 1}"
        table |= conv_norm(f"stage{stage}/down", down, "projection", "norm")
        last = stage == len(c.depths) - 1
        key = f"{encoder}.last_stage" if last else f"{encoder}.intermediate_stages.{place}"
        pool, attention = f"stage{stage}/pool_blocks/{{i}}", f"stage{stage}/attention_blocks/{{i}}"
        pool_key, key = f"{key}.meta4D_layers.blocks.{{i}}", f"{key}.meta3D_layers.blocks.{{i}}"
        table |= {
            **conv_norm(f"{pool}/up", f"{pool_key}.mlp", *_FIRST),
            **conv_norm(f"{pool}/down", f"{pool_key}.mlp", *_SECOND),
            f"{attention}/attention/offset_bias": f"{key}.token_mixer.attention_biases",
            f"{attention}/attention/qkv": f"{key}.token_mixer.qkv",
            f"{attention}/attention/out": f"{key}.token_mixer.projection",
            f"{attention}/norm1": f"{key}.layernorm1",
            f"{attention}/norm2": f"{key}.layernorm2",
            f"{attention}/feed_forward/up": f"{key}.mlp.linear_in",
            f"{attention}/feed_forward/down": f"{key}.mlp.linear_out",
        }
        for ours, theirs in ((pool, pool_key), (attention, key)):
            table |= {f"{ours}/scales/scales/{n}": f"{theirs}.layer_scale_{n + 1}" for n in (0, 1)}
    return table


EFFICIENTFORMER = TorchWeights(
    (f"{_EFFICIENT_STEM}.convolution1.weight",),
    _efficientformer_settings,
    _efficientformer,
    ignored=r".*\.attention_bias_idxs$",  # numbers that follow from the map's size
)

# --- EfficientViT --------------------------------------------------------------------------------

_VIT_STEM = "patch_embed.conv1.conv.weight"


def _efficientvit_settings(family: "Family", tensors: Tensors, given: dict[str, Any]) -> Sections:
    """Of the arguments of timm's `EfficientVitMsra`, whose own defaults are those of M0."""
    usual = family.settings("m0")
    names = {"depths": "depth", "widths": "embed_dim", "heads": "num_heads", "key_dims": "key_dim"}
    names |= {"windows": "window_size", "kernels": "kernels", "head_dropout": "drop_rate"}
    model = read(given, names, usual)
    downs = given.get("down_ops") or [["subsample" * down, 1 + down] for down in (0, 1, 1)]
    for down in downs:
        only({"down_ops": list(down)}, "down_ops", ("subsample", 2), ("", 1))
    model["downsamples"] = tuple(bool(name) for name, _ in downs)
    only(given, "global_pool", "avg")
    data = data_section(tensors, given, _VIT_STEM, "head.linear.weight")
    nominal = min(pair(given.get("img_size", data["image_size"])))
    if nominal // 16 != min(data["image_size"]) // 16:
        raise ValueError(f"img_size={nominal} does not fit an image of {data['image_size']}")
    return model, data


def _local_mix(ours: str, local: str, feed: str) -> Table:
    return _conv_norms(
        {f"{ours}/local": local, f"{ours}/up": f"{feed}.pw1", f"{ours}/down": f"{feed}.pw2"}
    )


_VIT_DOWN = "stages.{s}.downsample"
_VIT_BLOCK = "stages.{s}.blocks.{i}"
_VIT_ATTENTION = f"{_VIT_BLOCK}.mixer.m.attn"
_EFFICIENTVIT: Table = {
    "norm": "head.bn",
    "head": "head.linear",
    "stage{s}/down/merge/squeeze/reduce": f"{_VIT_DOWN}.patchmerge.se.fc1 [:,:,1,1]",
    "stage{s}/down/merge/squeeze/expand": f"{_VIT_DOWN}.patchmerge.se.fc2 [:,:,1,1]",
    "stage{s}/blocks/{i}/attention/offset_bias": f"{_VIT_ATTENTION}.attention_biases",
    **_local_mix("stage{s}/down/before", f"{_VIT_DOWN}.res1.0.m", f"{_VIT_DOWN}.res1.1.m"),
    **_local_mix("stage{s}/down/after", f"{_VIT_DOWN}.res2.0.m", f"{_VIT_DOWN}.res2.1.m"),
    **_local_mix("stage{s}/blocks/{i}/before", f"{_VIT_BLOCK}.dw0.m", f"{_VIT_BLOCK}.ffn0.m"),
    **_local_mix("stage{s}/blocks/{i}/after", f"{_VIT_BLOCK}.dw1.m", f"{_VIT_BLOCK}.ffn1.m"),
    **_conv_norms(
        {
            **{f"stem/convs/{i}": f"patch_embed.conv{i + 1}" for i in range(4)},
            "stage{s}/down/merge/expand": f"{_VIT_DOWN}.patchmerge.conv1",
            "stage{s}/down/merge/local": f"{_VIT_DOWN}.patchmerge.conv2",
            "stage{s}/down/merge/project": f"{_VIT_DOWN}.patchmerge.conv3",
            "stage{s}/blocks/{i}/attention/qkv/{n}": f"{_VIT_ATTENTION}.qkvs.{{n}}",
            "stage{s}/blocks/{i}/attention/local/{n}": f"{_VIT_ATTENTION}.dws.{{n}}",
            "stage{s}/blocks/{i}/attention/out": f"{_VIT_ATTENTION}.proj.1",
        }
    ),
}
EFFICIENTVIT = TorchWeights(
    (_VIT_STEM,),
    _efficientvit_settings,
    _EFFICIENTVIT,
    ignored=r".*\.attention_bias_idxs$",  # numbers that follow from the window's size
)

# --- FastViT -------------------------------------------------------------------------------------

_FAST_STEM, _FAST_FUSED = "stem.0.conv_kxk.0.conv.weight", "stem.0.reparam_conv.weight"


def _fastvit_settings(family: "Family", tensors: Tensors, given: dict[str, Any]) -> Sections:
    """Of the arguments of timm's `FastVit`, whose own defaults are S12's."""
    names = {"depths": "layers", "widths": "embed_dims", "mlp_ratios": "mlp_ratios"}
    names |= {"mixers": "token_mixers", "downsamples": "downsamples", "squeezes": "se_downsamples"}
    names |= {"kernel": "repmixer_kernel_size", "down_kernel": "down_patch_size"}
    names |= {"down_stride": "down_stride", "top_ratio": "cls_ratio", "dropout": "proj_drop_rate"}
    names |= {"head_dropout": "drop_rate", "drop_path": "drop_path_rate"}
    if given.get("layer_scale_init_value", 1e-5) is not None:
        names["layer_scale"] = "layer_scale_init_value"
    model = {"layer_scale": 0.0, **read(given, names, family.settings("s12"))}
    stages = len(model["depths"])
    model["down_activation"] = "gelu" if field(given, "lkc_use_act", False) else "none"
    kernels = given.get("pos_embs") or (None,) * stages
    kernels = [0 if kernel is None else kernel for kernel in kernels]
    model["position_kernels"] = fields({"pos_embs": kernels}, "pos_embs", (7,))
    # The reference reads as many entries as there are stages.
    model = {k: v[:stages] if isinstance(v, tuple) else v for k, v in model.items()}
    model["fused"] = _FAST_FUSED in tensors
    only(given, "stem_use_scale_branch", True)
    only(given, "global_pool", "avg")
    first = _FAST_FUSED if model["fused"] else _FAST_STEM
    return model, data_section(tensors, given, first, "head.fc.weight")


def _fast_branches(ours: str, theirs: str) -> Table:
    return {
        **_conv_norms(
            {f"{ours}/convs/0": f"{theirs}.conv_kxk.0", f"{ours}/convs/1": f"{theirs}.conv_scale"}
        ),
        f"{ours}/identity": f"{theirs}.identity",
        f"{ours}/fused": f"{theirs}.reparam_conv",
    }


def _fast_unit(ours: str, theirs: str) -> Table:
    return {**_fast_branches(f"{ours}/sum", theirs), **_fast_squeeze(ours, theirs)}


def _fast_squeeze(ours: str, theirs: str) -> Table:
    return {
        f"{ours}/squeeze/reduce": f"{theirs}.se.fc1 [:,:,1,1]",
        f"{ours}/squeeze/expand": f"{theirs}.se.fc2 [:,:,1,1]",
    }


_FAST_STAGE, _FAST_LARGE = "stages.{s}", "stages.{s}.downsample.proj.0"
_FAST_BLOCK, _FAST_OURS = "stages.{s}.blocks.{i}", "stage{s}/blocks/{i}"
_FASTVIT: Table = {
    **_fast_unit("stem/units/{i}", "stem.{i}"),
    **_fast_unit("stage{s}/down/unit", "stages.{s}.downsample.proj.1"),
    **_fast_unit("top", "final_conv"),
    **_fast_squeeze("stage{s}/down/large", _FAST_LARGE),
    **_conv_norms(
        {
            "stage{s}/down/large/sum/convs/0": f"{_FAST_LARGE}.large_conv",
            "stage{s}/down/large/sum/convs/1": f"{_FAST_LARGE}.small_conv",
            f"{_FAST_OURS}/feed_forward/local": f"{_FAST_BLOCK}.mlp.conv",
        }
    ),
    "stage{s}/down/large/sum/fused": f"{_FAST_LARGE}.reparam_conv",
    "stage{s}/positions/conv": f"{_FAST_STAGE}.pos_emb.pos_enc",
    "stage{s}/positions/fused": f"{_FAST_STAGE}.pos_emb.reparam_conv",
    **_fast_branches(f"{_FAST_OURS}/mixer", f"{_FAST_BLOCK}.token_mixer.mixer"),
    f"{_FAST_OURS}/mixer/fused": f"{_FAST_BLOCK}.token_mixer.reparam_conv",
    f"{_FAST_OURS}/mixer/norm": f"{_FAST_BLOCK}.token_mixer.norm.identity",
    f"{_FAST_OURS}/mixer/scale/scales/0": f"{_FAST_BLOCK}.token_mixer.layer_scale.gamma [:,1,1]",
    f"{_FAST_OURS}/mixer/qkv": f"{_FAST_BLOCK}.token_mixer.qkv",
    f"{_FAST_OURS}/mixer/out": f"{_FAST_BLOCK}.token_mixer.proj",
    f"{_FAST_OURS}/norm": f"{_FAST_BLOCK}.norm",
    f"{_FAST_OURS}/feed_forward/feed/up": f"{_FAST_BLOCK}.mlp.fc1 [:,:,1,1]",
    f"{_FAST_OURS}/feed_forward/feed/down": f"{_FAST_BLOCK}.mlp.fc2 [:,:,1,1]",
    f"{_FAST_OURS}/scale/scales/0": f"{_FAST_BLOCK}.layer_scale.gamma [:,1,1]",
    f"{_FAST_OURS}/scales/scales/0": f"{_FAST_BLOCK}.layer_scale_1.gamma [:,1,1]",
    f"{_FAST_OURS}/scales/scales/1": f"{_FAST_BLOCK}.layer_scale_2.gamma [:,1,1]",
    "head": "head.fc",
}
FASTVIT = TorchWeights(
    (_FAST_STEM, _FAST_FUSED),
    _fastvit_settings,
    _FASTVIT,
    known={"down_activation": ("none", "linear", "", "gelu", "gelu_python")},
)

# --- SMT -----------------------------------------------------------------------------------------

_SMT_STEM = "patch_embed1.conv.0.weight"


def _smt_settings(family: "Family", tensors: Tensors, given: dict[str, Any]) -> Sections:
    """Of the arguments of the authors' `SMT`, whose own defaults are those of none of its variants.

    Heads of a kind that a stage has not are written -1 there.
    """
    usual = family.settings("t") | {"mlp_ratios": (8.0, 6.0, 4.0, 2.0)}
    usual |= {"qkv_bias": False, "drop_path": 0.0}
    names = {"depths": "depths", "widths": "embed_dims", "mlp_ratios": "mlp_ratios"}
    names |= {"modulation_heads": "ca_num_heads", "heads": "sa_num_heads"}
    names |= {"expand_ratio": "expand_ratio", "qkv_bias": "qkv_bias", "stem_kernel": "head_conv"}
    names |= {"dropout": "drop_rate", "attention_dropout": "attn_drop_rate"}
    model = read(given, names | {"drop_path": "drop_path_rate"}, usual)
    for name in ("modulation_heads", "heads"):
        model[name] = tuple(max(heads, 0) for heads in model[name])
    kinds = fields(given, "ca_attentions", (1, 1, 1, 0))
    model["modulated"] = tuple(kind == 1 for kind in kinds)
    stages = field(given, "num_stages", 4)
    model = {k: v[:stages] if isinstance(v, tuple) else v for k, v in model.items()}
    scaled = field(given, "use_layerscale", False)
    model["layer_scale"] = field(given, "layerscale_value", 1e-4) if scaled else 0.0
    only(given, "qk_scale", None)
    return model, data_section(tensors, given, _SMT_STEM, "head.weight")


def _smt(c: "SMTConfig", keys: Collection[str]) -> Table:
    table: dict[str, str] = {"head": "head"}
    for stage in range(len(c.depths)):
        ours, embed = f"stage{stage}", f"patch_embed{stage + 1}"
        block, theirs = f"{ours}/blocks/{{i}}", f"block{stage + 1}.{{i}}"
        if stage:
            table[f"{ours}/embed/conv"] = f"{embed}.proj"
        else:
            table |= conv_norm(f"{ours}/embed/first", f"{embed}.conv", "0", "1")
            table[f"{ours}/embed/second"] = f"{embed}.conv.3"
        table |= {
            f"{ours}/embed/norm": f"{embed}.norm",
            f"{ours}/norm": f"norm{stage + 1}",
            f"{block}/norm1": f"{theirs}.norm1",
            f"{block}/norm2": f"{theirs}.norm2",
            **conv_norm(f"{block}/mixer/mix", f"{theirs}.attn", "proj0", "bn"),
            f"{block}/mixer/back": f"{theirs}.attn.proj1",
            f"{block}/mixer/local": f"{theirs}.attn.local_conv",
            f"{block}/mixer/out": f"{theirs}.attn.proj",
            f"{block}/feed_forward/up": f"{theirs}.mlp.fc1",
            f"{block}/feed_forward/local": f"{theirs}.mlp.dwconv.dwconv",
            f"{block}/feed_forward/down": f"{theirs}.mlp.fc2",
        }
        table |= {
            f"{block}/mixer/{name}": f"{theirs}.attn.{name}" for name in ("v", "s", "q", "kv")
        }
        table |= {f"{block}/scales/scales/{n}": f"{theirs}.gamma_{n + 1}" for n in (0, 1)}
        for head in range(c.modulation_heads[stage]):
            table[f"{block}/mixer/local/{head}"] = f"{theirs}.attn.local_conv_{head + 1}"
    return table


SMT = TorchWeights((_SMT_STEM,), _smt_settings, _smt)
