"""State dicts and configurations of the networks in this folder.

Those of CvT, MobileViT, SwiftFormer and EfficientFormer are the `transformers` library's, those of
EfficientViT and FastViT timm's, those of SMT its authors'.
"""

from collections.abc import Collection
from itertools import accumulate

from hsvit_jax.models.conv_transformers.smt import SMTConfig
from hsvit_jax.models.conv_transformers.stages import StagedConfig
from hsvit_jax.models.family import Family
from hsvit_jax.weights.torch.base import (
    Given,
    Table,
    Tensors,
    TorchWeights,
    field,
    only,
    read,
)

_QKV = ("query", "key", "value")
#: Names of a convolution and its BatchNorm in transformers and in timm.
_HF, _TIMM = ("convolution", "normalization"), ("conv", "bn")


def _below(ours: str, theirs: str, names: dict[str, str], *conv_norm: str) -> Table:
    """Modules below a path by their names below theirs; conv_norm: where they are `ConvNorm`s, the
    names of the convolution and of the BatchNorm."""
    parts = zip(("conv", "norm"), conv_norm, strict=True) if conv_norm else [("", "")]
    return {
        "/".join(filter(None, (ours, path, part))): ".".join(filter(None, (theirs, name, place)))
        for part, place in parts
        for path, name in names.items()
    }


def _layer(ours: str, theirs: str) -> Table:
    """The `transformers` library's pre-norm layer, but for queries, keys and values."""
    names = {"norm1": "layernorm_before", "norm2": "layernorm_after"}
    names |= {"mixer/out": "attention.output.dense"}
    names |= {"feed_forward/up": "intermediate.dense", "feed_forward/down": "output.dense"}
    return _below(ours, theirs, names)


# --- CvT -----------------------------------------------------------------------------------------

#: Fields of a `CvtConfig` that are a list with an entry for each stage.
_CVT_FIELDS = {
    **{"patches": "patch_sizes", "strides": "patch_stride", "paddings": "patch_padding"},
    **{"widths": "embed_dim", "heads": "num_heads", "depths": "depth", "mlp_ratios": "mlp_ratio"},
    **{"qkv_bias": "qkv_bias", "kernels": "kernel_qkv", "query_paddings": "padding_q"},
    **{"key_paddings": "padding_kv", "key_strides": "stride_kv", "dropouts": "drop_rate"},
    **{"attention_dropouts": "attention_drop_rate", "drop_paths": "drop_path_rate"},
}
_CVT_STAGE = "cvt.encoder.stages.{s}"
_CVT_EMBEDDING = f"{_CVT_STAGE}.embedding.convolution_embeddings"
_CVT_FIRST = f"{_CVT_EMBEDDING.format(s=0)}.projection.weight"
_CVT_LAYER = f"{_CVT_STAGE}.layers.{{i}}"
_CVT_ATTENTION = f"{_CVT_LAYER}.attention.attention"
_CVT_CONV = f"{_CVT_ATTENTION}.convolution_projection_{{q}}.convolution_projection"
_CVT: Table = {
    **_below("stage{s}", _CVT_EMBEDDING, {"conv": "projection", "norm": "normalization"}),
    "stage{s}/cls": f"{_CVT_STAGE}.cls_token [1,1,:]",
    **_below("stage{s}/blocks/{i}/mixer/local/{q}", _CVT_CONV, {"": ""}, *_HF),
    "stage{s}/blocks/{i}/mixer/qkv": tuple(f"{_CVT_ATTENTION}.projection_{q}" for q in _QKV),
    **_layer("stage{s}/blocks/{i}", _CVT_LAYER),
    **{"norm": "layernorm", "head": "classifier"},
}


def _cvt_settings(family: Family, tensors: Tensors, given: Given) -> Given:
    model = read(given, _CVT_FIELDS, family.defaults)
    stages = len(model["depths"])
    only(given, "cls_token", (*(False,) * (stages - 1), True))
    only(given, "stride_q", (1,) * stages)
    only(given, "qkv_projection_method", ("dw_bn",) * stages)
    model["drop_path_of"] = "tokens"
    return model


CVT = TorchWeights((_CVT_FIRST,), _cvt_settings, _CVT)

# --- MobileViT -----------------------------------------------------------------------------------

_MOBILE_STEM = "mobilevit.conv_stem.convolution.weight"


def _mobilevit_settings(family: Family, tensors: Tensors, given: Given) -> Given:
    names = {key: key for key in ("mlp_ratio", "expand_ratio", "output_stride", "qkv_bias")}
    names |= {"channels": "neck_hidden_sizes", "widths": "hidden_sizes", "eps": "layer_norm_eps"}
    names |= {"heads": "num_attention_heads", "kernel": "conv_kernel_size", "patch": "patch_size"}
    names |= {"dropout": "hidden_dropout_prob", "head_dropout": "classifier_dropout_prob"}
    names |= {"attention_dropout": "attention_probs_dropout_prob"}
    model = read(given, names, family.defaults)
    model["activation"] = field(given, "hidden_act", "silu")
    return model


def _inverted_residual(ours: str, theirs: str) -> Table:
    names = {"expand": "expand_1x1", "depthwise": "conv_3x3", "reduce": "reduce_1x1"}
    return _below(ours, theirs, names, *_HF)


_MOBILE_LAYER = "mobilevit.encoder.layer.{l}"
_MOBILE_BLOCK = f"{_MOBILE_LAYER}.transformer.layer.{{i}}"
_MOBILE_CONVS = {"local": "conv_kxk", "back": "conv_projection", "fuse": "fusion"}
_MOBILEVIT: Table = {
    **_below("", "mobilevit", {"stem": "conv_stem", "last": "conv_1x1_exp"}, *_HF),
    **_inverted_residual("layer{l}/blocks/{i}", f"{_MOBILE_LAYER}.layer.{{i}}"),
    **_inverted_residual("layer{l}/down", f"{_MOBILE_LAYER}.downsampling_layer"),
    **_below("layer{l}", _MOBILE_LAYER, _MOBILE_CONVS, *_HF),
    **_below("layer{l}", _MOBILE_LAYER, {"project": "conv_1x1.convolution", "norm": "layernorm"}),
    **_layer("layer{l}/blocks/{i}", _MOBILE_BLOCK),
    "layer{l}/blocks/{i}/mixer/qkv": tuple(
        f"{_MOBILE_BLOCK}.attention.attention.{q}" for q in _QKV
    ),
    "head": "classifier",
}
MOBILEVIT = TorchWeights((_MOBILE_STEM,), _mobilevit_settings, _MOBILEVIT)

# --- SwiftFormer ---------------------------------------------------------------------------------

_SWIFT_STEM = "swiftformer.patch_embed.patch_embedding"


def _layer_scale(given: Given) -> float:
    """The initial value of the branches' LayerScale, 0 for none."""
    if not field(given, "use_layer_scale", True):
        return 0.0
    return field(given, "layer_scale_init_value", 1e-5)


def _swiftformer_settings(family: Family, tensors: Tensors, given: Given) -> Given:
    names = {"depths": "depths", "widths": "embed_dims", "mlp_ratio": "mlp_ratio"}
    names |= {"down_kernel": "down_patch_size", "down_stride": "down_stride"}
    names |= {"down_padding": "down_pad", "drop_path": "drop_path_rate", "eps": "batch_norm_eps"}
    names |= {"dropout": "drop_mlp_rate", "conv_drop_path": "drop_conv_encoder_rate"}
    model = read(given, names, family.defaults)
    downsamples = field(given, "downsamples", (True,) * 4)[: len(model["depths"]) - 1]
    model |= {"downsamples": downsamples, "queries": "equal", "layer_scale": _layer_scale(given)}
    model["activation"] = field(given, "hidden_act", "gelu")
    return model


def _places(c: StagedConfig) -> list[int]:
    """The number of each stage among stages and the convolutions behind them."""
    stages = range(len(c.depths) - 1)
    return list(accumulate((1 + c.follows(stage) for stage in stages), initial=0))


def _swift_conv_block(ours: str, theirs: str) -> Table:
    names = {"up": "point_wise_conv1 [:,:,1,1]", "down": "point_wise_conv2 [:,:,1,1]"}
    return {
        **_below(ours, theirs, {"depthwise": ""}, "depth_wise_conv", "norm"),
        **_below(ours, theirs, names | {"scale": "layer_scale [:,1,1]"}),
    }


def _swiftformer(c: StagedConfig, keys: Collection[str]) -> Table:
    network = "swiftformer.encoder.network"
    table = {
        **_below("stem/convs/0", _SWIFT_STEM, {"": ""}, "0", "1"),
        **_below("stem/convs/1", _SWIFT_STEM, {"": ""}, "3", "4"),
        **{"norm": "norm", "head/own": "head", "head/teacher": "dist_head"},
    }
    names = {"attention/score": "attn.w_g [:,1]", "attention/query": "attn.to_query"}
    names |= {"attention/key": "attn.to_key", "attention/mix": "attn.proj"}
    names |= {"attention/out": "attn.final", "norm": "linear.norm1"}
    names |= {
        f"feed_forward/{ours}": f"linear.fc{n} [:,:,1,1]" for n, ours in ((1, "up"), (2, "down"))
    }
    names |= {f"scales/scales/{n}": f"layer_scale_{n + 1} [:,1,1]" for n in (0, 1)}
    for stage, place in enumerate(_places(c)):
        ours, theirs = f"stage{stage}/blocks/{{i}}", f"{network}.{place}.blocks.{{i}}"
        table |= _below(f"stage{stage}", f"{network}.{place + 1}", {"down": ""}, "proj", "norm")
        table |= _swift_conv_block(ours, theirs)
        table |= _swift_conv_block(f"{ours}/local", f"{theirs}.local_representation")
        table |= _below(ours, theirs, names)
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


def _efficientformer_settings(family: Family, tensors: Tensors, given: Given) -> Given:
    """The image's size is 32·resolution where neither an image nor an option tells it."""
    names = {key: key for key in ("depths", "key_dim", "attention_ratio")}
    names |= {"widths": "hidden_sizes", "attention_blocks": "num_meta3d_blocks"}
    names |= {"heads": "num_attention_heads", "mlp_ratio": "mlp_expansion_ratio"}
    names |= {"down_kernel": "downsample_patch_size", "down_stride": "downsample_stride"}
    names |= {"down_padding": "downsample_pad", "pool_window": "pool_size"}
    names |= {"dropout": "hidden_dropout_prob", "eps": "layer_norm_eps"}
    model = read(given, names | {"norm_eps": "batch_norm_eps"}, family.defaults)
    model |= {"activation": field(given, "hidden_act", "gelu"), "layer_scale": _layer_scale(given)}
    stages = len(model["depths"])
    model["downsamples"] = field(given, "downsamples", (True,) * stages)[: stages - 1]
    # The reference's rate is that of the second block; ours is that of the last.
    rate = field(given, "drop_path_rate", 0.0)
    model["drop_path"] = rate * max(sum(model["depths"]) - 1, 1)
    for name in ("dim", "hidden_size"):
        only({name: model["widths"][-1], **given}, name, model["widths"][-1])
    side = field(given, "resolution", 7)
    return {**model, "image_size": given["image_size"] or 32 * side}


def _efficientformer(c: StagedConfig, keys: Collection[str]) -> Table:
    encoder = "efficientformer.encoder"
    table = {
        **_below("stem/convs/0", _EFFICIENT_STEM, {"": ""}, *_FIRST),
        **_below("stem/convs/1", _EFFICIENT_STEM, {"": ""}, *_SECOND),
        **{"norm": "efficientformer.layernorm", "head/own": "classifier"},
        "head/teacher": "distillation_classifier",
    }
    scales = {f"scales/scales/{n}": f"layer_scale_{n + 1}" for n in (0, 1)}
    names = {"attention/offset_bias": "token_mixer.attention_biases", "norm1": "layernorm1"}
    names |= {"attention/qkv": "token_mixer.qkv", "attention/out": "token_mixer.projection"}
    names |= {"feed_forward/up": "mlp.linear_in", "feed_forward/down": "mlp.linear_out"}
    names |= {"norm2": "layernorm2", **scales}
    for stage, place in enumerate(_places(c)):
        down = f"{encoder}.intermediate_stages.{place + 1}"
        table |= _below(f"stage{stage}/down", down, {"": ""}, "projection", "norm")
        last = stage == len(c.depths) - 1
        key = f"{encoder}.last_stage" if last else f"{encoder}.intermediate_stages.{place}"
        pool, pool_key = f"stage{stage}/pool_blocks/{{i}}", f"{key}.meta4D_layers.blocks.{{i}}"
        table |= _below(pool, pool_key, scales)
        table |= _below(pool, pool_key, {"up": "mlp"}, *_FIRST)
        table |= _below(pool, pool_key, {"down": "mlp"}, *_SECOND)
        key = f"{key}.meta3D_layers.blocks.{{i}}"
        table |= _below(f"stage{stage}/attention_blocks/{{i}}", key, names)
    return table


EFFICIENTFORMER = TorchWeights(
    (f"{_EFFICIENT_STEM}.convolution1.weight",),
    _efficientformer_settings,
    _efficientformer,
    ignored=r".*\.attention_bias_idxs$",  # numbers that follow from the map's size
)

# --- EfficientViT --------------------------------------------------------------------------------

_VIT_STEM = "patch_embed.conv1.conv.weight"


def _efficientvit_settings(family: Family, tensors: Tensors, given: Given) -> Given:
    """Of the arguments of timm's `EfficientVitMsra`, whose own defaults are those of M0."""
    usual = family.settings("m0")
    names = {"depths": "depth", "widths": "embed_dim", "heads": "num_heads", "key_dims": "key_dim"}
    names |= {"windows": "window_size", "kernels": "kernels", "head_dropout": "drop_rate"}
    model = read(given, names, usual)
    downs = given.get("down_ops") or [["subsample" * down, 1 + down] for down in (0, 1, 1)]
    for down in downs:
        only({"down_ops": list(down)}, "down_ops", ("subsample", 2), ("", 1))
    model["downsamples"] = tuple(bool(name) for name, _ in downs)
    for name in ("key_dims", "windows", "downsamples"):  # the reference reads one for each stage
        model[name] = model[name][: len(model["widths"])]
    only(given, "global_pool", "avg")
    return model


def _local_mix(ours: str, theirs: str, local: str, feed: str) -> Table:
    names = {"local": f"{local}.m", "up": f"{feed}.m.pw1", "down": f"{feed}.m.pw2"}
    return _below(ours, theirs, names, *_TIMM)


def _squeeze(ours: str, theirs: str) -> Table:
    names = {"squeeze/reduce": "se.fc1 [:,:,1,1]", "squeeze/expand": "se.fc2 [:,:,1,1]"}
    return _below(ours, theirs, names)


_VIT_DOWN, _VIT_BLOCK = "stages.{s}.downsample", "stages.{s}.blocks.{i}"
_VIT_MERGE = ("stage{s}/down/merge", f"{_VIT_DOWN}.patchmerge")
_VIT_ATTENTION = ("stage{s}/blocks/{i}/attention", f"{_VIT_BLOCK}.mixer.m.attn")
_VIT_HEADS = {"qkv/{n}": "qkvs.{n}", "local/{n}": "dws.{n}", "out": "proj.1"}
_EFFICIENTVIT: Table = {
    **_below("stem/convs", "patch_embed", {f"{i}": f"conv{i + 1}" for i in range(4)}, *_TIMM),
    **_local_mix("stage{s}/down/before", _VIT_DOWN, "res1.0", "res1.1"),
    **_local_mix("stage{s}/down/after", _VIT_DOWN, "res2.0", "res2.1"),
    **_local_mix("stage{s}/blocks/{i}/before", _VIT_BLOCK, "dw0", "ffn0"),
    **_local_mix("stage{s}/blocks/{i}/after", _VIT_BLOCK, "dw1", "ffn1"),
    **_squeeze(*_VIT_MERGE),
    **_below(*_VIT_MERGE, {"expand": "conv1", "local": "conv2", "project": "conv3"}, *_TIMM),
    **_below(*_VIT_ATTENTION, {"offset_bias": "attention_biases"}),
    **_below(*_VIT_ATTENTION, _VIT_HEADS, *_TIMM),
    **{"norm": "head.bn", "head": "head.linear"},
}
EFFICIENTVIT = TorchWeights(
    (_VIT_STEM,),
    _efficientvit_settings,
    _EFFICIENTVIT,
    ignored=r".*\.attention_bias_idxs$",  # numbers that follow from the window's size
)

# --- FastViT -------------------------------------------------------------------------------------

_FAST_STEM, _FAST_FUSED = "stem.0.conv_kxk.0.conv.weight", "stem.0.reparam_conv.weight"


def _fastvit_settings(family: Family, tensors: Tensors, given: Given) -> Given:
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
    model["position_kernels"] = field({"pos_embs": kernels}, "pos_embs", (7,))
    # The reference reads as many entries as there are stages.
    model = {k: v[:stages] if isinstance(v, tuple) else v for k, v in model.items()}
    model["fused"] = _FAST_FUSED in tensors
    only(given, "stem_use_scale_branch", True)
    only(given, "global_pool", "avg")
    return model


def _fast_branches(ours: str, theirs: str) -> Table:
    return {
        **_below(ours, theirs, {"convs/0": "conv_kxk.0", "convs/1": "conv_scale"}, *_TIMM),
        **_below(ours, theirs, {"identity": "identity", "fused": "reparam_conv"}),
    }


def _fast_unit(ours: str, theirs: str) -> Table:
    return {**_fast_branches(f"{ours}/sum", theirs), **_squeeze(ours, theirs)}


_FAST_LARGE = ("stage{s}/down/large", "stages.{s}.downsample.proj.0")
_FAST_BLOCK = ("stage{s}/blocks/{i}", "stages.{s}.blocks.{i}")
_FAST_NAMES = {
    **{"mixer/fused": "token_mixer.reparam_conv", "mixer/norm": "token_mixer.norm.identity"},
    **{"mixer/qkv": "token_mixer.qkv", "mixer/out": "token_mixer.proj", "norm": "norm"},
    "mixer/scale/scales/0": "token_mixer.layer_scale.gamma [:,1,1]",
    **{f"feed_forward/feed/{name}": f"mlp.fc{n} [:,:,1,1]" for n, name in ((1, "up"), (2, "down"))},
    "scale/scales/0": "layer_scale.gamma [:,1,1]",
    **{f"scales/scales/{n}": f"layer_scale_{n + 1}.gamma [:,1,1]" for n in (0, 1)},
}
_FASTVIT: Table = {
    **_fast_unit("stem/units/{i}", "stem.{i}"),
    **_fast_unit("stage{s}/down/unit", "stages.{s}.downsample.proj.1"),
    **_squeeze(*_FAST_LARGE),
    **_below(*_FAST_LARGE, {"sum/convs/0": "large_conv", "sum/convs/1": "small_conv"}, *_TIMM),
    **_below(*_FAST_LARGE, {"sum/fused": "reparam_conv"}),
    "stage{s}/positions/conv": "stages.{s}.pos_emb.pos_enc",
    "stage{s}/positions/fused": "stages.{s}.pos_emb.reparam_conv",
    **_fast_branches("stage{s}/blocks/{i}/mixer", "stages.{s}.blocks.{i}.token_mixer.mixer"),
    **_below(*_FAST_BLOCK, {"feed_forward/local": "mlp.conv"}, *_TIMM),
    **_below(*_FAST_BLOCK, _FAST_NAMES),
    **_fast_unit("top", "final_conv"),
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


def _smt_settings(family: Family, tensors: Tensors, given: Given) -> Given:
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
    kinds = field(given, "ca_attentions", (1, 1, 1, 0))
    model["modulated"] = tuple(kind == 1 for kind in kinds)
    stages = field(given, "num_stages", 4)
    model = {k: v[:stages] if isinstance(v, tuple) else v for k, v in model.items()}
    scaled = field(given, "use_layerscale", False)
    model["layer_scale"] = field(given, "layerscale_value", 1e-4) if scaled else 0.0
    only(given, "qk_scale", None)
    return model


def _smt(c: SMTConfig, keys: Collection[str]) -> Table:
    table = {"head": "head", "stage0/embed/second": "patch_embed1.conv.3"}
    table |= _below("stage0/embed", "patch_embed1", {"first": "conv"}, "0", "1")
    names = {f"mixer/{name}": f"attn.{name}" for name in ("v", "s", "q", "kv")}
    names |= {"mixer/back": "attn.proj1", "mixer/out": "attn.proj", "norm1": "norm1"}
    names |= {"mixer/local": "attn.local_conv", "feed_forward/local": "mlp.dwconv.dwconv"}
    names |= {"feed_forward/up": "mlp.fc1", "feed_forward/down": "mlp.fc2", "norm2": "norm2"}
    names |= {f"scales/scales/{n}": f"gamma_{n + 1}" for n in (0, 1)}
    for stage in range(len(c.depths)):
        ours, theirs = f"stage{stage}/blocks/{{i}}", f"block{stage + 1}.{{i}}"
        heads = range(c.modulation_heads[stage])
        heads = {f"mixer/local/{n}": f"attn.local_conv_{n + 1}" for n in heads}
        embed = {"embed/conv": f"patch_embed{stage + 1}.proj", "norm": f"norm{stage + 1}"}
        table |= _below(f"stage{stage}", "", embed | {"embed/norm": f"patch_embed{stage + 1}.norm"})
        table |= _below(ours, theirs, {"mixer/mix": "attn"}, "proj0", "bn")
        table |= _below(ours, theirs, names | heads)
    return table


SMT = TorchWeights((_SMT_STEM,), _smt_settings, _smt)
