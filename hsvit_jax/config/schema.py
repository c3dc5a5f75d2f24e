"""The table of configuration keys: meaning, type, range and default of each.

The default configuration, validation, the parsing of `--config.KEY=VALUE`, `--help` and the tables
in docs/ derive from it. A value outside its key's range is refused before anything is loaded or
built; a conflict with data, devices or other sizes is refused where these are known.
"""

import dataclasses
import math
import reprlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import ml_collections

MOST_STEPS = 2**31 - 1  # the step is counted in 32 bits
_MOST_VALUES = 256
_MOST_TEXT = 4096

_TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


@dataclasses.dataclass(frozen=True)
class Key:
    """The meaning, the range and the default of a key.

    Attributes:
      meaning: a phrase, without a full stop.
      low, high: the range of a number, its ends included.
      kind: int, float, bool or str.
      above, below: the range of a number, its ends left out.
      besides: special values outside the range.
      choices: all values of an enumeration; () for other keys.
      several: whether the value is a tuple of such values.
      default: what the recipes start from, where it is not the one that `initial` falls back on.
    """

    meaning: str
    low: float = -math.inf
    high: float = math.inf
    kind: type = float
    above: float = -math.inf
    below: float = math.inf
    besides: tuple[float, ...] = ()
    choices: tuple[Any, ...] = ()
    several: bool = False
    default: Any = None

    @property
    def initial(self) -> Any:
        """The value that recipes start from: the default, or the lowest, first or empty one."""
        if self.default is not None or self.several:
            return () if self.default is None else self.default
        if self.choices:
            return self.choices[0]
        return self.kind(self.low) if self.kind in (int, float) else self.kind()

    @property
    def expected(self) -> str:
        """The range as text, for messages and help."""
        if self.several:
            one = dataclasses.replace(self, several=False).expected
            return f"values with commas between them (or none), each {one}"
        if self.choices:
            return f"one of {', '.join(map(repr, self.choices))}"
        if self.kind in (bool, str):
            return "true or false" if self.kind is bool else f"text, at most {_MOST_TEXT} letters"
        span = f"from {self.low:.10g} to {self.high:.10g}"
        if math.isfinite(self.above):
            span = f"above {self.above:g}, at most {self.high:g}"
        elif math.isfinite(self.below):
            span = f"from {self.low:g}, below {self.below:g}"
        also = "".join(f", or {value:g}" for value in self.besides)
        return f"{'a whole number' if self.kind is int else 'a number'} {span}{also}"

    def fits(self, value: Any) -> bool:
        """Whether a value is of the type and in the range."""
        if self.several:
            one = dataclasses.replace(self, several=False)
            listed = isinstance(value, tuple | list) and len(value) <= _MOST_VALUES
            return listed and all(map(one.fits, value))
        if isinstance(value, bool) != (self.kind is bool):
            return False
        if not isinstance(value, (int, float) if self.kind is float else self.kind):
            return False
        if self.choices:
            return value in self.choices
        if self.kind is str:
            return len(value) <= _MOST_TEXT and "\0" not in value
        if self.kind is bool or value in self.besides:
            return True
        return self.low <= value <= self.high and self.above < value < self.below  # NaN is neither

    def parse(self, text: str) -> Any:
        """Parses a value: integers also as '1e3', tuples as '64,32' or '(64,)'.

        Raises ValueError for a text of another type.
        """
        if self.several:
            one = dataclasses.replace(self, several=False)
            parts = text.strip().strip("()[]").split(",")
            return tuple(one.parse(part) for part in parts if part.strip())
        if self.kind is bool:
            if text.strip().lower() not in _TRUTH:
                raise ValueError("neither true nor false")
            return _TRUTH[text.strip().lower()]
        if self.kind is int:
            try:
                return int(text)
            except ValueError:
                number = float(text)
                if not number.is_integer():
                    raise
                return int(number)
        return self.kind(text)


#: Keys that follow from --config and are not set alone.
LABELS = ("recipe", "model.family", "model.variant", "model.backbone")

#: Keys that people change first, which --help shows; --helpfull has all.
FIRST = (
    *("train.epochs", "train.batch", "train.patience", "train.eval_every", "train.select_on"),
    *("optim.learning_rate", "optim.weight_decay", "data.image_size", "data.val_fraction"),
    *("data.balance", "data.on_bad_image", "augment.flip", "augment.mixup", "augment.cutmix"),
    *("model.dropout", "eval.tta", "init.from", "init.freeze", "data.fit", "seed"),
)

_whole = partial(Key, kind=int)
_number = partial(Key, kind=float)
_positive = partial(Key, kind=float, above=0.0)
_rate = partial(Key, kind=float, low=0.0, below=1.0)
_flag = partial(Key, kind=bool)
_text = partial(Key, kind=str)
_width = partial(_whole, low=1, high=2**16)
_depth = partial(_whole, low=1, high=256)
_kernel = partial(_whole, low=1, high=255)
_stride = partial(_whole, low=1, high=256)
_ratio = partial(_positive, high=64.0)


def _choice(meaning: str, *choices: Any, default: Any = None) -> Key:
    return Key(meaning, kind=type(choices[0]), choices=choices, default=default)


def _each(key: Key, default: Any = None) -> Key:
    return dataclasses.replace(key, several=True, default=default)


#: Keys outside `model`, with what the recipes start from: most of the strong one.
KEYS: Mapping[str, Key] = {
    "seed": _whole("seed of every random number of the run", 0, 2**32 - 1),
    "recipe": _choice(
        "recipe of training and augmentation, named after the colon",
        *("strong", "fast", "paper", "small", "finetune"),
    ),
    "data.name": _text(
        "data set: a name, folder=PATH, csv=PATH, hf=NAME or tfds=NAME", default="cifar10"
    ),
    "data.dir": _text("directory of data sets; empty: $HSVIT_DATA_DIR, or the user's cache"),
    "data.fit": _choice(
        "fitting of photos: cropped, padded with black, or stretched to the image size",
        *("crop", "pad", "stretch"),
    ),
    "data.image_size": _each(
        _whole("image height and width in pixels, such as 32,48; empty: the data set's", 1, 2**13)
    ),
    "data.channels": _whole(
        "image channels; 0: the data set's, else 1 or 3 (of a converted network others)", 0, 1024
    ),
    "data.num_classes": _whole("number of classes; 0: the data set's", 0, 2**16),
    "data.mean": _each(
        _number("mean of each channel, pixels in [0, 1]; empty: the data set's", 0.0, 1.0)
    ),
    "data.std": _each(
        _positive("standard deviation of each channel; empty: the data set's", high=1.0)
    ),
    "data.val_fraction": _number(
        "fraction of the training images held out for validation", 0.0, 0.8, default=0.1
    ),
    "data.fraction": _positive(
        "fraction of each class's training and validation images that is used; smaller ones lie "
        "within larger ones",
        high=1.0,
        default=1.0,
    ),
    "data.balance": _choice(
        "for uneven (imbalanced) classes: weights in the loss, or equally many draws of each",
        *("none", "weights", "sample"),
    ),
    "data.repeats": _whole(
        "repeated augmentation: how often an epoch shows an image, of 1/n of the images", 1, 64
    ),
    "data.on_bad_image": _choice("reaction to an unreadable image", "error", "skip"),
    "augment.crop_padding": _whole("padding in pixels before a random crop", 0, 4096, default=4),
    "augment.random_resized_crop": _each(
        _positive("smallest and largest area of a random resized crop; empty: none", high=1)
    ),
    "augment.flip": _flag("random horizontal flips", default=True),
    "augment.rand_augment_ops": _whole(
        "RandAugment operations per image; 0: none", 0, 64, default=2
    ),
    "augment.rand_augment_magnitude": _whole("RandAugment magnitude", 0, 30, default=9),
    "augment.rand_augment_kind": _choice(
        "ops and ranges of RandAugment; timm: as its m9-mstd0.5-inc1", *("torchvision", "timm")
    ),
    "augment.trivial_augment": _flag("TrivialAugment in place of RandAugment"),
    "augment.erasing": _number("probability of random erasing", 0.0, 1.0, default=0.25),
    "augment.erasing_noise": _flag("erased boxes are filled with noise, not the mean"),
    "augment.mixup": _number("alpha of MixUp; 0: none", 0.0, 1000.0, default=0.8),
    "augment.cutmix": _number("alpha of CutMix; 0: none", 0.0, 1000.0, default=1.0),
    "augment.mix_probability": _number("probability that a batch is mixed", 0.0, 1.0, default=0.5),
    "augment.mix_until": _positive(
        "share of the run after which no batch is mixed", high=1.0, default=1.0
    ),
    "augment.label_smoothing": _rate("label smoothing", default=0.1),
    "train.batch": _whole("global batch size of training", 1, 2**20, default=128),
    "train.epochs": _number(
        "length of the run in epochs, where train.steps is 0", 0.0, 1e6, default=100.0
    ),
    "train.steps": _whole("length of the run in steps, where train.epochs is 0", 0, MOST_STEPS),
    "train.accumulate": _whole(
        "parts of a batch whose gradients are computed one after another and averaged", 1, 2**16
    ),
    "train.log_every": _whole("steps between lines of metrics", 1, MOST_STEPS, default=10),
    "train.loggers": _each(
        _choice("services that show the metrics", "tensorboard", "wandb", "mlflow"),
        default=("tensorboard",),
    ),
    "train.eval_every": _whole("epochs between evaluations", 1, MOST_STEPS),
    "train.ema_decay": _rate(
        "decay of the exponential moving average of the weights; 0: none", default=0.999
    ),
    "train.bad_steps_limit": _whole(
        "consecutive non-finite steps that end the run", 1, MOST_STEPS, default=3
    ),
    "train.select_on": _choice(
        "what selects the best checkpoint: accuracy on a split, macro-averaged F1 on val, or "
        "nothing: the last is taken",
        *("val", "test", "macro_f1", "last"),
    ),
    "train.patience": _whole(
        "evaluations without a better one that end the run (early stopping); 0: none", 0, MOST_STEPS
    ),
    "eval.batch": _whole("batch size of evaluation; 0: train.batch / train.accumulate", 0, 2**20),
    "eval.tta": _choice(
        "test-time augmentation, mean logits: flip: of an image and its mirror image; shift: of "
        "both, moved by one pixel each way too",
        *("none", "flip", "shift"),
    ),
    "optim.name": _choice(
        "optimizer, with decoupled weight decay; muon: on kernels, Adam on other parameters",
        *("adamw", "nadamw", "sgd", "lamb", "lion", "muon"),
    ),
    "optim.learning_rate": _positive("peak learning rate", high=1e3, default=1e-3),
    "optim.weight_decay": _number("decoupled weight decay", 0.0, 1e3, default=0.05),
    "optim.decay_all": _flag("weight decay on biases, norms and positions too"),
    "optim.warmup_epochs": _number(
        "epochs of linear warm-up; -1: the recipe's, at most a tenth of the run",
        0.0,
        1e6,
        besides=(-1.0,),
        default=-1.0,
    ),
    "optim.schedule": _choice(
        "decay of the rate to zero after warm-up (a constant rate: optim.cosine_per=never)",
        *("cosine", "linear"),
    ),
    "optim.cosine_per": _choice(
        "granularity of the schedule; never: a constant rate",
        *("epoch", "step", "never"),
        default="step",
    ),
    "optim.layer_decay": _positive(
        "factor of the learning rate from a block to the one before it; 1: none",
        high=1.0,
        default=1.0,
    ),
    "optim.clip_norm": _number(
        "largest global norm of the gradient; 0: no clipping", 0.0, 1e9, default=1.0
    ),
    "optim.beta1": _rate(
        "decay rate of the first moment; momentum of sgd; muon has 0.95 on kernels", default=0.9
    ),
    "optim.beta2": _rate("decay rate of the second moment", default=0.999),
    "init.from": _text(
        "run, file, zoo:NAME or hub:OWNER/NAME to start from; empty: random weights"
    ),
    "init.classifier": _choice(
        "classifier of init.from: matched by class name and new for other classes, kept as it is, "
        "new, or without a first background class",
        *("match", "keep", "new", "drop_first"),
    ),
    "init.stem": _choice(
        "first layer of init.from: as it is, or refitted to other image channels", "keep", "refit"
    ),
    "init.positions": _choice(
        "positions of init.from: as they are, or resized to the image", "keep", "resize"
    ),
    "init.whiten": _flag("random weights whose first convolution whitens image patches (HSViT)"),
    "init.freeze": _text("frozen parts of the network, separated by commas"),
    "init.cache": _text("folder of cached features of the frozen parts; empty: no cache"),
    "mesh.group": _whole(
        "devices on the group axis; -1: the remaining ones", 1, 2**20, besides=(-1,)
    ),
    "mesh.data": _whole(
        "devices on the data axis; -1: the remaining ones", 1, 2**20, besides=(-1,), default=-1
    ),
    "mesh.aggregate": _choice(
        "sum of the groups' CLS tokens: by one all-reduce, in the groups' order, or in bfloat16",
        *("psum", "ordered", "bf16"),
    ),
    "mesh.gradients": _choice("format of gradients sent between devices", "float32", "bf16"),
    "checkpoint.every": _whole(
        "epochs between checkpoints; an evaluation that may be the best writes one too",
        *(1, MOST_STEPS),
    ),
    "checkpoint.keep_latest": _whole("number of latest checkpoints kept", 1, 10_000, default=2),
    "checkpoint.keep_best": _whole("number of best checkpoints kept", 1, 10_000),
}

#: Keys of `model` by name; 'family.name' where a family means something else by it.
MODEL_KEYS: Mapping[str, Key] = {
    "family": _text("family of the network"),
    "variant": _text("variant of the family"),
    "dtype": _choice("dtype of the computation; parameters are float32", "float32", "bfloat16"),
    # HSViT
    "ablation": _choice("ablation of the HSViT paper", "none", "conv_only", "attention_only"),
    "convolution": _choice("kind of the trunk's convolutions", "dense", "separable"),
    "conv_channels": _each(_width("channels of each convolution block")),
    "conv_kernels": _each(_kernel("kernel size of each convolution block", low=0)),
    "pool_strides": _each(_stride("stride of each block's pool; empty: by the image size")),
    "groups": _width("attention groups; 0: none", low=0),
    "towers": _width("independent towers"),
    "tiles": _each(
        _whole("rows and columns of image tiles, each seen by its own towers", 1, 2**13)
    ),
    "trunk": _choice(
        "trunk on every device, or sharded by output channel", "replicated", "sharded"
    ),
    "votes": _choice("weights of the groups' CLS tokens", "equal", "learned"),
    "group_dropout": _rate("probability of dropping a group's CLS token in training"),
    # Transformers
    "depth": _depth("attention or transformer blocks", low=0),
    "depths": _each(_depth("blocks of each stage")),
    "embed_dim": _width("token width; 0 on a backbone: by the size of its last map", low=0),
    "widths": _each(_width("token width of each stage")),
    "heads": _whole("attention heads", 1, 1024),
    **dict.fromkeys(
        ("cvt.heads", "swin.heads", "efficientvit.heads"),
        _each(_whole("attention heads of each stage", 1, 1024)),
    ),
    "token_layer": _choice("attention of the layers that make tokens", "performer", "softmax"),
    "token_dim": _width("token width in the layers that make tokens"),
    "token_dropout": _rate("dropout rate in the layers that make tokens"),
    "qk_scale": _number("factor of attention scores; 0: by the head's width", 0.0, 1.0),
    "windows": _each(_width("side of each stage's attention windows")),
    "smt.heads": _each(_whole("self-attention heads of each stage; 0: none", 0, 1024)),
    "modulated": _each(_flag("scale-aware modulation in each stage, in the third in turn")),
    "modulation_heads": _each(_whole("modulation heads of each stage; 0: none", 0, 128)),
    "head_dim": _whole("width of an attention head; of a ccx 0: width / heads", 0, 2**16),
    "key_dim": _width("width of a head's queries and keys"),
    "key_dims": _each(_width("width of a head's queries and keys, by stage")),
    "mlp_dim": _width("hidden width of the feed-forward"),
    "mlp_ratio": _ratio("hidden width of the feed-forward over the token's width"),
    "mlp_ratios": _each(_ratio("hidden width of each stage's feed-forward over its tokens' width")),
    "attention_ratio": _ratio("width of values over that of keys"),
    "attention_blocks": _depth("attention blocks of the last stage", low=0),
    "qkv_bias": _flag("biases of queries, keys and values"),
    "cvt.qkv_bias": _each(_flag("biases of queries, keys and values, by stage")),
    "patch": _whole(
        "patch size in pixels; 0, where it is the default: by the image size", 0, 2**13
    ),
    "patches": _each(_whole("patch size of each stage", 1, 2**13)),
    "strides": _each(_stride("stride of each stage")),
    "paddings": _each(_kernel("padding of each stage", low=0)),
    "head_pool": _choice("what is classified: the CLS token or the tokens' mean", "cls", "mean"),
    "cls": _flag("classify a CLS token rather than the tokens' mean"),
    "positions": _choice("positional encoding", "learned", "rope"),
    **dict.fromkeys(("dhvt.positions", "ccx.positions"), _flag("learned positions")),
    "representation": _width("width of a tanh layer before the classifier; 0: none", low=0),
    "activation": _text("name of the activation"),
    "eps": _positive("epsilon of normalisation", high=1.0),
    "norm_eps": _positive("epsilon of batch normalisation", high=1.0),
    "layer_scale": _number("initial layer scale; 0: none", 0.0, 1e3),
    "dropout": _rate("dropout rate"),
    "dropouts": _each(_rate("dropout rate of each stage")),
    "attention_dropout": _rate("dropout rate of attention weights"),
    "attention_dropouts": _each(_rate("dropout rate of attention weights, by stage")),
    "embed_dropout": _rate("dropout rate of the embedded tokens"),
    "head_dropout": _rate("dropout rate before the classifier"),
    "drop_path": _rate("stochastic depth rate of the last block, linear from 0 at the first"),
    "drop_paths": _each(_rate("stochastic depth rate of each stage")),
    "drop_path_of": _choice(
        "unit of stochastic depth: each token or the whole branch", "tokens", "branch"
    ),
    "conv_drop_path": _rate("stochastic depth rate of convolution branches"),
    # ViX and its siblings
    "mixer": _choice(
        "token mixer", "softmax", "performer", "linformer", "nystrom", "fnet", "mlp_mixer"
    ),
    "projections": _width("Linformer's projected length"),
    "one_kv_head": _flag("one key and value head in Linformer"),
    "landmarks": _width("number of Nyström landmarks"),
    "residual_kernel": _whole("kernel size of Nyström's residual convolution", 1, 2**16 - 1),
    "features": _width("number of Performer's random features; 0: by the head's width", low=0),
    "batch_coupling": _flag(
        "stabilising maximum of Performer and Nyström over the batch, as the authors', rather "
        "than over each image"
    ),
    "expansion": _ratio("expansion ratio of MLP-Mixer"),
    "stem_channels": _each(_width("channels of the stem's convolutions but the last")),
    "stem_strides": _each(_stride("stride of the stem's convolutions; empty: by the image size")),
    "conv_strides": _each(_stride("stride of each convolution; empty: by the image size")),
    "stage_strides": _each(_stride("stride of each stage; empty: by the image size")),
    "conv_kernel": _kernel("kernel size of the tokenizer's convolutions"),
    "conv_padding": _kernel("padding of the tokenizer's convolutions; -1: half the kernel", low=-1),
    # HVT, DeiT, DHVT
    "pool": _choice("kind of token pooling", "max", "average", "conv"),
    "pool_dims": _choice("pooling of tokens as a sequence (1) or a map (2)", 1, 2),
    "pool_window": _kernel("window of a pool"),
    "pool_stride": _stride("stride of a pool"),
    "pool_padding": _kernel("padding of a pool; -1: half the window", low=-1),
    "stage_depth": _depth("blocks between pools; 0: no pools", low=0),
    "retained": _each(_whole("tokens kept by each block; empty: all", 1, 2**26)),
    "flops_share": _positive("fraction of the FLOPs that a token-pruning schedule keeps", high=1.0),
    "head_tokens": _flag("head tokens in attention"),
    "sope": _flag("patch embedding by several convolutions (SOPE)"),
    "affine": _flag("affine maps around the patch embedding"),
    "sope_norm": _choice("normalisation in the patch embedding", "batch", "layer"),
    "daff_norm": _choice("normalisation in the feed-forward (DAFF)", "batch", "layer"),
    "feed_forward": _text("kind of the feed-forward"),
    # Convolutional networks and what is built on them
    "backbone": _text("convolutional backbone"),
    "block": _choice("kind of residual block", "basic", "bottleneck"),
    "channels": _each(_width("channels of each stage")),
    "in_channels": _each(_width("channels into each stage, before scaling")),
    "out_channels": _each(_width("channels out of each stage, before scaling")),
    "resnet.stem_channels": _width("channels of the first convolution"),
    "resnext.stem_channels": _width("channels of the first convolution"),
    "resnext.groups": _width("groups of a bottleneck's 3×3 convolution"),
    "base_width": _width("channels of a group where a stage's bottlenecks would have 64"),
    "width": _ratio("width multiplier"),
    "efficientnet.depth": _ratio("depth multiplier"),
    "divisor": _whole("divisor of every width", 1, 1024),
    "least_channels": _width("smallest width"),
    "repeats": _each(_depth("blocks of each stage, before scaling")),
    "kernel": _kernel("kernel size"),
    "kernels": _each(_kernel("kernel size of each stage")),
    "efficientvit.kernels": _each(_kernel("kernel size of each head's queries")),
    "query_paddings": _each(_kernel("padding of each stage's queries", low=0)),
    "key_paddings": _each(_kernel("padding of each stage's keys", low=0)),
    "key_strides": _each(_stride("stride of each stage's keys and values")),
    "expand": _each(_whole("expansion ratio of each stage's blocks", 1, 64)),
    "mobilenet_v2.expand": _ratio("expansion ratio of a block"),
    "expand_ratio": _ratio("expansion ratio of an inverted residual"),
    "smt.expand_ratio": _whole("expansion ratio of a modulation's convolutions", 1, 64),
    "stem_kernel": _kernel("kernel size of the first convolution"),
    "squeeze": _number("squeeze-and-excitation ratio; 0: none", 0.0, 16.0),
    "padding": _choice("padding of convolutions", "native", "same", "symmetric"),
    "symmetric_blocks": _each(_whole("blocks with symmetric padding", 0, 10_000)),
    "pooling": _choice("pooling of the last map", "mean", "max"),
    "drop_rate": _rate("stochastic depth rate, growing with depth"),
    "drop": _choice("unit of dropping in a residual branch", "values", "paths"),
    "output_stride": _whole("stride of the last map; further strides become dilation", 1, 1024),
    "stem_expansion": _flag("expansion in the first block"),
    "full_top": _flag("full width of the last convolution in narrow networks"),
    "stride_in_first_stage": _flag("stride in the first stage"),
    "stride_in_first_conv": _flag("stride in a bottleneck's first convolution"),
    "bn_eps": _positive("epsilon of batch normalisation", high=1.0),
    "bn_momentum": _number("momentum of batch normalisation: weight of the old averages", 0.0, 1.0),
    "expand_bn_momentum": _number("the same, of a block's expansion", 0.0, 1.0),
    "downsamples": _each(_flag("downsampling after each stage")),
    **dict.fromkeys(
        ("efficientvit.downsamples", "fastvit.downsamples"),
        _each(_flag("downsampling before each stage")),
    ),
    "down_activation": _text("name of the activation behind a large downsampling kernel"),
    "squeezes": _each(_flag("squeeze-and-excitation in the downsampling before each stage")),
    "mixers": _each(_choice("token mixer of each stage", "repmixer", "attention")),
    "position_kernels": _each(_kernel("positional convolution before each stage; 0: none", low=0)),
    "top_ratio": _ratio("channels before the classifier over the last stage's width"),
    "fused": _flag("each sum of branches as one convolution, for inference"),
    "down_kernel": _kernel("kernel size of downsampling convolutions"),
    "down_stride": _stride("stride of downsampling convolutions"),
    "down_padding": _kernel("padding of downsampling convolutions", low=0),
    "queries": _choice("pooling of queries", "equal", "weighted"),
}
_BACKBONES = ("resnet", "efficientnet", "mobilenet_v2")


def all_keys() -> list[str]:
    """Every key by its sections and name, those of all networks among them."""
    of_model = dict.fromkeys(f"model.{name.rpartition('.')[2]}" for name in MODEL_KEYS)
    return [key for key in (*KEYS, *of_model) if key not in LABELS]


def leaves(config: ml_collections.ConfigDict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every setting as ('section.key', value)."""
    for key in sorted(config.keys()):
        value = config[key]
        if isinstance(value, ml_collections.ConfigDict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def of(path: str, model: Mapping[str, Any]) -> Key:
    """Looks up the entry of a key such as 'train.batch' or 'model.depth'.

    Args:
      path: sections and name, joined by points.
      model: the `model` section, whose family decides what some of its keys mean.

    Raises:
      ValueError: there is no such key.
    """
    section, _, name = path.rpartition(".")
    family = model.get("family", "")
    if section == "model.backbone_settings":
        backbone = str(model.get("backbone", ""))
        family = next((name for name in _BACKBONES if backbone.startswith(name)), "")
    if section.split(".")[0] != "model":
        entry = KEYS.get(path)
    else:
        entry = MODEL_KEYS.get(f"{family}.{name}") or MODEL_KEYS.get(name)
        own = _registered(family)
        if name in own and not (entry and entry.fits(own[name])):
            entry = _of_default(own[name])
    if entry is None:
        raise ValueError(f"unknown configuration key {path!r}")
    return entry


def _registered(family: str) -> Mapping[str, Any]:
    """The settings of a family that a file registered; none of this package's own."""
    from hsvit_jax import models

    own = family in models.FAMILIES and not models.is_built_in(family)
    return models.FAMILIES[family].defaults if own else {}


def _of_default(value: Any) -> Key:
    """The entry of a registered network's setting, by the type of its default."""
    several = isinstance(value, tuple | list)
    kind = type((*value, 0.0)[0] if several else value)
    low = -(2**31) if kind is int else -math.inf
    return Key("setting of the registered network", low, 2**31, kind, several=several)


def check(config: ml_collections.ConfigDict) -> None:
    """Raises ValueError for the first value that is outside its key's range."""
    for path, value in leaves(config):
        key = of(path, config.model)
        if not key.fits(value):
            raise ValueError(f"{path} must be {key.expected}; got {reprlib.repr(value)}")


def shown(value: Any) -> str:
    """Formats a value as it is written on the command line."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def describe(config: ml_collections.ConfigDict, reads: Callable[[str], bool]) -> str:
    """Lists settings as the flags that set them, with meaning and range, for --help.

    Args:
      reads: whether a key is listed; those of `LABELS` are not.
    """
    lines = []
    for key, value in leaves(config):
        if key in LABELS or not reads(key):
            continue
        entry = of(key, config.model)
        lines += [f"  --config.{key}={shown(value)}", f"      {entry.meaning}; {entry.expected}"]
    return "\n".join(lines)
