"""State dicts and constructors of the convolutional transformers.

CvT, MobileViT, SwiftFormer and EfficientFormer have the `transformers` library's names,
EfficientViT and FastViT timm's, and SMT its authors'.
"""

from collections.abc import Collection
from itertools import accumulate

from hsvit_jax.models.conv_transformers.smt import SMTConfig
from hsvit_jax.models.conv_transformers.stages import StagedConfig
from hsvit_jax.weights.torch.base import Given, Table, Tensors, TorchWeights, field, names, only

#: A convolution and its BatchNorm in the `transformers` library and in timm.
_HF, _TIMM = "conv=convolution norm=normalization", "conv norm=bn"
#: The `transformers` library's pre-norm layer, but for queries, keys and values.
_LAYER = (
    "norm1=layernorm_before norm2=layernorm_after mixer/out=attention.output.dense"
    " feed_forward/up=intermediate.dense feed_forward/down=output.dense"
)
_QKV = "{query,key,value}"
#: Numbers that follow from the size of a map or a window.
_OFFSETS = r".*\.attention_bias_idxs$"

# --- CvT -----------------------------------------------------------------------------------------


def _cvt_more(tensors: Tensors, given: Given, model: Given) -> Given:
    stages = len(model["depths"])
    only(given, "cls_token", (*(False,) * (stages - 1), True))
    only(given, "stride_q", (1,) * stages)
    only(given, "qkv_projection_method", ("dw_bn",) * stages)
    return {}


_CVT_STAGE = "cvt.encoder.stages.{s}"
_CVT_EMBEDDING = f"{_CVT_STAGE}.embedding.convolution_embeddings"
_CVT: Table = {
    **names("stage{s}", _CVT_EMBEDDING, "conv=projection norm=normalization"),
    "stage{s}/cls": f"{_CVT_STAGE}.cls_token[1,1,:]",
    **names(
        "stage{s}/blocks/{i}/mixer/local/{q}",
        _CVT_STAGE + ".layers.{i}.attention.attention.convolution_projection_{q}",
        "=convolution_projection",
        _HF,
    ),
    **names(
        "stage{s}/blocks/{i}",
        _CVT_STAGE + ".layers.{i}",
        f"{_LAYER} mixer/qkv=attention.attention.projection_{_QKV}",
    ),
    **names("", "", "norm=layernorm head=classifier"),
}
CVT = TorchWeights(
    (f"{_CVT_EMBEDDING.format(s=0)}.projection.weight",),
    "patches=patch_sizes strides=patch_stride paddings=patch_padding widths=embed_dim"
    " heads=num_heads depths=depth mlp_ratios=mlp_ratio qkv_bias kernels=kernel_qkv"
    " query_paddings=padding_q key_paddings=padding_kv key_strides=stride_kv dropouts=drop_rate"
    " attention_dropouts=attention_drop_rate drop_paths=drop_path_rate",
    _CVT,
    _cvt_more,
)

# --- MobileViT -----------------------------------------------------------------------------------

_MOBILE = "mobilevit.encoder.layer.{l}"
_RESIDUAL = "expand=expand_1x1 depthwise=conv_3x3 reduce=reduce_1x1"
_MOBILEVIT: Table = {
    **names("", "mobilevit", "stem=conv_stem last=conv_1x1_exp", _HF),
    **names("layer{l}/blocks/{i}", _MOBILE + ".layer.{i}", _RESIDUAL, _HF),
    **names("layer{l}/down", f"{_MOBILE}.downsampling_layer", _RESIDUAL, _HF),
    **names("layer{l}", _MOBILE, "local=conv_kxk back=conv_projection fuse=fusion", _HF),
    **names("layer{l}", _MOBILE, "project=conv_1x1.convolution norm=layernorm"),
    **names(
        "layer{l}/blocks/{i}",
        _MOBILE + ".transformer.layer.{i}",
        f"{_LAYER} mixer/qkv=attention.attention.{_QKV}",
    ),
    "head": "classifier",
}
MOBILEVIT = TorchWeights(
    ("mobilevit.conv_stem.convolution.weight",),
    "mlp_ratio expand_ratio output_stride qkv_bias channels=neck_hidden_sizes widths=hidden_sizes"
    " eps=layer_norm_eps heads=num_attention_heads kernel=conv_kernel_size patch=patch_size"
    " activation=hidden_act dropout=hidden_dropout_prob head_dropout=classifier_dropout_prob"
    " attention_dropout=attention_probs_dropout_prob",
    _MOBILEVIT,
)

# --- SwiftFormer and EfficientFormer -------------------------------------------------------------


def _staged_more(given: Given, stages: int) -> Given:
    """Returns the downsamplings between stages, and the initial LayerScale, 0 for none."""
    scaled = field(given, "use_layer_scale", True)
    return {
        "downsamples": field(given, "downsamples", (True,) * stages)[: stages - 1],
        "layer_scale": field(given, "layer_scale_init_value", 1e-5) if scaled else 0.0,
    }


def _places(c: StagedConfig) -> list[int]:
    """Returns the number of each stage among stages and the convolutions behind them."""
    stages = range(len(c.depths) - 1)
    return list(accumulate((1 + c.follows(stage) for stage in stages), initial=0))


def _swiftformer_more(tensors: Tensors, given: Given, model: Given) -> Given:
    return _staged_more(given, len(model["depths"]))


def _swiftformer(c: StagedConfig, keys: Collection[str]) -> Table:
    network, stem = "swiftformer.encoder.network", "swiftformer.patch_embed.patch_embedding"
    table = {
        **names("stem/convs/0", stem, "conv=0 norm=1"),
        **names("stem/convs/1", stem, "conv=3 norm=4"),
        **names("", "", "norm head/own=head head/teacher=dist_head"),
    }
    conv_block = (
        "depthwise/conv=depth_wise_conv depthwise/norm=norm up=point_wise_conv1[:,:,1,1]"
        " down=point_wise_conv2[:,:,1,1] scale=layer_scale[:,1,1]"
    )
    words = (
        "attention/score=attn.w_g[:,1] attention/query=attn.to_query attention/key=attn.to_key"
        " attention/mix=attn.proj attention/out=attn.final norm=linear.norm1"
        " feed_forward/up=linear.fc1[:,:,1,1] feed_forward/down=linear.fc2[:,:,1,1]"
        " scales/scales/0=layer_scale_1[:,1,1] scales/scales/1=layer_scale_2[:,1,1]"
    )
    for stage, place in enumerate(_places(c)):
        ours, theirs = f"stage{stage}/blocks/{{i}}", f"{network}.{place}.blocks.{{i}}"
        table |= names(f"stage{stage}/down", f"{network}.{place + 1}", "conv=proj norm")
        table |= names(ours, theirs, f"{conv_block} {words}")
        table |= names(f"{ours}/local", f"{theirs}.local_representation", conv_block)
    return table


SWIFTFORMER = TorchWeights(
    ("swiftformer.patch_embed.patch_embedding.0.weight",),
    "depths widths=embed_dims mlp_ratio down_kernel=down_patch_size down_stride"
    " down_padding=down_pad drop_path=drop_path_rate eps=batch_norm_eps dropout=drop_mlp_rate"
    " conv_drop_path=drop_conv_encoder_rate activation=hidden_act",
    _swiftformer,
    _swiftformer_more,
    known={"queries": ("equal",)},
)


def _efficientformer_more(tensors: Tensors, given: Given, model: Given) -> Given:
    """Adds also the image's size, 32·resolution where no image and no option has it."""
    for name in ("dim", "hidden_size"):
        only(given, name, model["widths"][-1])
    # The reference's rate is that of the second block; ours is that of the last.
    rate = field(given, "drop_path_rate", 0.0)
    return {
        **_staged_more(given, len(model["depths"])),
        "drop_path": rate * max(sum(model["depths"]) - 1, 1),
        "image_size": given["image_size"] or 32 * field(given, "resolution", 7),
    }


def _efficientformer(c: StagedConfig, keys: Collection[str]) -> Table:
    encoder = "efficientformer.encoder"
    # The two convolutions with BatchNorm of a stem or a pooling block.
    first = "conv=convolution1 norm=batchnorm_before"
    second = "conv=convolution2 norm=batchnorm_after"
    table = {
        **names("stem/convs/0", "efficientformer.patch_embed", first),
        **names("stem/convs/1", "efficientformer.patch_embed", second),
        "norm": "efficientformer.layernorm",
        **names("head", "", "own=classifier teacher=distillation_classifier"),
    }
    scales = "scales/scales/0=layer_scale_1 scales/scales/1=layer_scale_2"
    words = (
        "attention/offset_bias=token_mixer.attention_biases attention/qkv=token_mixer.qkv"
        " attention/out=token_mixer.projection norm1=layernorm1 norm2=layernorm2"
        " feed_forward/up=mlp.linear_in feed_forward/down=mlp.linear_out"
    )
    for stage, place in enumerate(_places(c)):
        down = f"{encoder}.intermediate_stages.{place + 1}"
        table |= names(f"stage{stage}/down", down, "conv=projection norm")
        last = stage == len(c.depths) - 1
        key = f"{encoder}.last_stage" if last else f"{encoder}.intermediate_stages.{place}"
        ours, theirs = f"stage{stage}/pool_blocks/{{i}}", f"{key}.meta4D_layers.blocks.{{i}}"
        table |= names(ours, theirs, scales)
        table |= names(f"{ours}/up", f"{theirs}.mlp", first)
        table |= names(f"{ours}/down", f"{theirs}.mlp", second)
        ours, theirs = f"stage{stage}/attention_blocks/{{i}}", f"{key}.meta3D_layers.blocks.{{i}}"
        table |= names(ours, theirs, f"{words} {scales}")
    return table


EFFICIENTFORMER = TorchWeights(
    ("efficientformer.patch_embed.convolution1.weight",),
    "depths key_dim attention_ratio widths=hidden_sizes attention_blocks=num_meta3d_blocks"
    " heads=num_attention_heads mlp_ratio=mlp_expansion_ratio down_kernel=downsample_patch_size"
    " down_stride=downsample_stride down_padding=downsample_pad pool_window=pool_size"
    " activation=hidden_act dropout=hidden_dropout_prob eps=layer_norm_eps norm_eps=batch_norm_eps",
    _efficientformer,
    _efficientformer_more,
    ignored=_OFFSETS,
)

# --- EfficientViT --------------------------------------------------------------------------------


def _efficientvit_more(tensors: Tensors, given: Given, model: Given) -> Given:
    downs = given.get("down_ops") or [["subsample" * down, 1 + down] for down in (0, 1, 1)]
    for down in downs:
        only({"down_ops": list(down)}, "down_ops", ("subsample", 2), ("", 1))
    model = {**model, "downsamples": tuple(bool(name) for name, _ in downs)}
    stages = len(model["widths"])  # the reference reads one entry for each
    return {name: model[name][:stages] for name in ("key_dims", "windows", "downsamples")}


_SQUEEZE = "squeeze/reduce=se.fc1[:,:,1,1] squeeze/expand=se.fc2[:,:,1,1]"


def _local_mix(ours: str, theirs: str, local: str, feed: str) -> Table:
    return names(ours, theirs, f"local={local}.m up={feed}.m.pw1 down={feed}.m.pw2", _TIMM)


_VIT_DOWN, _VIT_BLOCK = "stages.{s}.downsample", "stages.{s}.blocks.{i}"
_VIT_MERGE = ("stage{s}/down/merge", f"{_VIT_DOWN}.patchmerge")
_VIT_ATTENTION = ("stage{s}/blocks/{i}/attention", f"{_VIT_BLOCK}.mixer.m.attn")
_EFFICIENTVIT: Table = {
    **names("stem/convs", "patch_embed", "0=conv1 1=conv2 2=conv3 3=conv4", _TIMM),
    **_local_mix("stage{s}/down/before", _VIT_DOWN, "res1.0", "res1.1"),
    **_local_mix("stage{s}/down/after", _VIT_DOWN, "res2.0", "res2.1"),
    **_local_mix("stage{s}/blocks/{i}/before", _VIT_BLOCK, "dw0", "ffn0"),
    **_local_mix("stage{s}/blocks/{i}/after", _VIT_BLOCK, "dw1", "ffn1"),
    **names(*_VIT_MERGE, _SQUEEZE),
    **names(*_VIT_MERGE, "expand=conv1 local=conv2 project=conv3", _TIMM),
    **names(*_VIT_ATTENTION, "offset_bias=attention_biases"),
    **names(*_VIT_ATTENTION, "qkv/{n}=qkvs.{n} local/{n}=dws.{n} out=proj.1", _TIMM),
    **names("", "head", "norm=bn head=linear"),
}
EFFICIENTVIT = TorchWeights(
    ("patch_embed.conv1.conv.weight",),
    "depths=depth widths=embed_dim heads=num_heads key_dims=key_dim windows=window_size kernels"
    " head_dropout=drop_rate",
    _EFFICIENTVIT,
    _efficientvit_more,
    like="m0",
    only={"global_pool": ("avg",)},
    ignored=_OFFSETS,
)

# --- FastViT -------------------------------------------------------------------------------------

_FAST_STEM, _FAST_FUSED = "stem.0.conv_kxk.0.conv.weight", "stem.0.reparam_conv.weight"


def _first(model: Given, stages: int) -> dict:
    """Cuts lists to as many entries as there are stages, as the reference reads them."""
    return {k: v[:stages] if isinstance(v, tuple) else v for k, v in model.items()}


def _fastvit_more(tensors: Tensors, given: Given, model: Given) -> Given:
    stages = len(model["depths"])
    kernels = [kernel or 0 for kernel in given.get("pos_embs") or (None,) * stages]
    scaled = given.get("layer_scale_init_value", 1e-5) is not None
    return _first(model, stages) | {
        "layer_scale": model["layer_scale"] if scaled else 0.0,
        "down_activation": "gelu" if field(given, "lkc_use_act", False) else "none",
        "position_kernels": field({"pos_embs": kernels}, "pos_embs", (7,))[:stages],
        "fused": _FAST_FUSED in tensors,
    }


def _fast_branches(ours: str, theirs: str) -> Table:
    branches = names(ours, theirs, "convs/0=conv_kxk.0 convs/1=conv_scale", _TIMM)
    return branches | names(ours, theirs, "identity fused=reparam_conv")


def _fast_unit(ours: str, theirs: str) -> Table:
    return {**_fast_branches(f"{ours}/sum", theirs), **names(ours, theirs, _SQUEEZE)}


_FAST_LARGE = ("stage{s}/down/large", "stages.{s}.downsample.proj.0")
_FAST_BLOCK = ("stage{s}/blocks/{i}", "stages.{s}.blocks.{i}")
_FASTVIT: Table = {
    **_fast_unit("stem/units/{i}", "stem.{i}"),
    **_fast_unit("stage{s}/down/unit", "stages.{s}.downsample.proj.1"),
    **names(*_FAST_LARGE, f"{_SQUEEZE} sum/fused=reparam_conv"),
    **names(*_FAST_LARGE, "sum/convs/0=large_conv sum/convs/1=small_conv", _TIMM),
    **names("stage{s}/positions", "stages.{s}.pos_emb", "conv=pos_enc fused=reparam_conv"),
    **_fast_branches("stage{s}/blocks/{i}/mixer", "stages.{s}.blocks.{i}.token_mixer.mixer"),
    **names(*_FAST_BLOCK, "feed_forward/local=mlp.conv", _TIMM),
    **names(
        *_FAST_BLOCK,
        "mixer/fused=token_mixer.reparam_conv mixer/norm=token_mixer.norm.identity"
        " mixer/qkv=token_mixer.qkv mixer/out=token_mixer.proj norm"
        " mixer/scale/scales/0=token_mixer.layer_scale.gamma[:,1,1]"
        " feed_forward/feed/up=mlp.fc1[:,:,1,1] feed_forward/feed/down=mlp.fc2[:,:,1,1]"
        " scale/scales/0=layer_scale.gamma[:,1,1]"
        " scales/scales/0=layer_scale_1.gamma[:,1,1] scales/scales/1=layer_scale_2.gamma[:,1,1]",
    ),
    **_fast_unit("top", "final_conv"),
    "head": "head.fc",
}
FASTVIT = TorchWeights(
    (_FAST_STEM, _FAST_FUSED),
    "depths=layers widths=embed_dims mlp_ratios mixers=token_mixers downsamples"
    " squeezes=se_downsamples kernel=repmixer_kernel_size down_kernel=down_patch_size down_stride"
    " top_ratio=cls_ratio dropout=proj_drop_rate head_dropout=drop_rate drop_path=drop_path_rate"
    " layer_scale=layer_scale_init_value",
    _FASTVIT,
    _fastvit_more,
    like="s12",
    only={"stem_use_scale_branch": (True,), "global_pool": ("avg",)},
    known={"down_activation": ("none", "linear", "", "gelu", "gelu_python")},
)

# --- SMT -----------------------------------------------------------------------------------------


def _smt_more(tensors: Tensors, given: Given, model: Given) -> Given:
    """Stages without heads of a kind have -1 in the authors' arguments."""
    heads = {n: tuple(max(x, 0) for x in model[n]) for n in ("modulation_heads", "heads")}
    kinds = field(given, "ca_attentions", (1, 1, 1, 0))
    model = {**model, **heads, "modulated": tuple(kind == 1 for kind in kinds)}
    scaled = field(given, "use_layerscale", False)
    scale = field(given, "layerscale_value", 1e-4) if scaled else 0.0
    return _first(model, field(given, "num_stages", 4)) | {"layer_scale": scale}


def _smt(c: SMTConfig, keys: Collection[str]) -> Table:
    stem = "first/conv=conv.0 first/norm=conv.1 second=conv.3"
    table = {"head": "head", **names("stage0/embed", "patch_embed1", stem)}
    words = (
        "mixer/v=attn.v mixer/s=attn.s mixer/q=attn.q mixer/kv=attn.kv mixer/back=attn.proj1"
        " mixer/out=attn.proj mixer/mix/conv=attn.proj0 mixer/mix/norm=attn.bn"
        " mixer/local=attn.local_conv feed_forward/local=mlp.dwconv.dwconv"
        " feed_forward/up=mlp.fc1 feed_forward/down=mlp.fc2 norm1 norm2"
        " scales/scales/0=gamma_1 scales/scales/1=gamma_2"
    )
    for stage, heads in enumerate(c.modulation_heads):
        block = f"block{stage + 1}.{{i}}"
        convs = "".join(f" mixer/local/{n}=attn.local_conv_{n + 1}" for n in range(heads))
        table |= names(f"stage{stage}/embed", f"patch_embed{stage + 1}", "conv=proj norm")
        table |= names(f"stage{stage}/blocks/{{i}}", block, words + convs)
        table[f"stage{stage}/norm"] = f"norm{stage + 1}"
    return table


SMT = TorchWeights(
    ("patch_embed1.conv.0.weight",),
    "depths widths=embed_dims mlp_ratios modulation_heads=ca_num_heads heads=sa_num_heads"
    " expand_ratio qkv_bias stem_kernel=head_conv dropout=drop_rate"
    " attention_dropout=attn_drop_rate drop_path=drop_path_rate",
    _smt,
    _smt_more,
    usual={"mlp_ratios": (8.0, 6.0, 4.0, 2.0), "qkv_bias": False, "drop_path": 0.0},
    only={"qk_scale": (None,)},
)
