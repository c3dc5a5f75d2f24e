"""Every key of a configuration in one table: its meaning, its type and the values it may have.

Checks, the reading of `--config.KEY=VALUE` and `--help` derive from it. A value outside its key's
range is refused before anything is loaded or built. What only shows together with data, devices or
other sizes is refused where these meet.
"""

import dataclasses
import difflib
import math
import reprlib
from collections.abc import Iterator, Mapping
from typing import Any

import ml_collections

MOST_STEPS = 2**31 - 1  # the step is counted in 32 bits
_MOST_VALUES = 256
_MOST_TEXT = 4096

_TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


@dataclasses.dataclass(frozen=True)
class Key:
    """What a key means and which values it takes.

    Attributes:
      meaning: a sentence's worth, without a full stop.
      kind: int, float, bool or str.
      low, high: the range of a number, its ends included.
      above, below: the range of a number, its ends left out.
      besides: numbers outside the range that have a meaning of their own.
      choices: all values there are; () for no such list.
      several: whether the value is a tuple of such values.
    """

    meaning: str
    kind: type
    low: float = -math.inf
    high: float = math.inf
    above: float = -math.inf
    below: float = math.inf
    besides: tuple[float, ...] = ()
    choices: tuple[Any, ...] = ()
    several: bool = False

    @property
    def expected(self) -> str:
        """The values that fit, as they are told to a user."""
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
        """Whether the key may have this value."""
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
        """The value that `text` says: whole numbers also as '1e3', tuples as '64,32' or '(64,)'.

        Raises ValueError for a text that says none of this kind.
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


def _whole(meaning: str, low: int, high: int, *besides: int) -> Key:
    return Key(meaning, int, low=low, high=high, besides=besides)


def _number(meaning: str, low: float, high: float, *besides: float) -> Key:
    return Key(meaning, float, low=low, high=high, besides=besides)


def _positive(meaning: str, high: float) -> Key:
    return Key(meaning, float, above=0.0, high=high)


def _rate(meaning: str) -> Key:
    return Key(meaning, float, low=0.0, below=1.0)


def _flag(meaning: str) -> Key:
    return Key(meaning, bool)


def _text(meaning: str) -> Key:
    return Key(meaning, str)


def _choice(meaning: str, *choices: Any) -> Key:
    return Key(meaning, type(choices[0]), choices=choices)


def _each(key: Key) -> Key:
    return dataclasses.replace(key, several=True)


def _width(meaning: str, low: int = 1) -> Key:
    return _whole(meaning, low, 2**16)


def _depth(meaning: str, low: int = 1) -> Key:
    return _whole(meaning, low, 256)


def _kernel(meaning: str, low: int = 1) -> Key:
    return _whole(meaning, low, 255)


def _stride(meaning: str) -> Key:
    return _whole(meaning, 1, 256)


def _ratio(meaning: str) -> Key:
    return _positive(meaning, 64.0)


#: Keys outside `model`.
KEYS: Mapping[str, Key] = {
    "seed": _whole("what all random numbers of the run follow from", 0, 2**32 - 1),
    "recipe": _choice("the recipe that the words after the colon named", "strong", "paper"),
    "data.name": _text("the data set: a name, folder=PATH or tfds=NAME"),
    "data.dir": _text("where data sets are kept; empty: $HSVIT_DATA_DIR, or the user's cache"),
    "data.image_size": _each(
        _whole("rows and columns of pixels; empty: the data set's own", 1, 2**13)
    ),
    "data.channels": _whole("colour channels; 0: the data set's own", 0, 1024),
    "data.num_classes": _whole("classes; 0: the data set's own", 0, 2**16),
    "data.mean": _each(_number("mean of each channel, of pixels scaled to [0, 1]", 0.0, 1.0)),
    "data.std": _each(_positive("deviation of each channel, of pixels scaled to [0, 1]", 1.0)),
    "data.val_fraction": _number(
        "share of the training images that is held out for validation", 0.0, 0.8
    ),
    "data.on_bad_image": _choice("what an unreadable image does", "error", "skip"),
    "augment.crop_padding": _whole("black pixels around an image before it is cropped", 0, 4096),
    "augment.random_resized_crop": _each(
        _positive("least and largest share of the area of a crop that is enlarged; empty: none", 1)
    ),
    "augment.flip": _flag("whether half of the images are mirrored"),
    "augment.rand_augment_ops": _whole("RandAugment's operations on an image; 0: none", 0, 64),
    "augment.rand_augment_magnitude": _whole("RandAugment's strength", 0, 30),
    "augment.trivial_augment": _flag("whether TrivialAugment takes RandAugment's place"),
    "augment.erasing": _number("probability that a box of an image is erased", 0.0, 1.0),
    "augment.mixup": _number("alpha of MixUp; 0: none", 0.0, 1000.0),
    "augment.cutmix": _number("alpha of CutMix; 0: none", 0.0, 1000.0),
    "augment.mix_probability": _number("share of the batches that are mixed", 0.0, 1.0),
    "augment.label_smoothing": _number("share of a target that all classes divide", 0.0, 1.0),
    "train.batch": _whole("images of a training step, over all devices", 1, 2**20),
    "train.epochs": _number("length of the run, where train.steps is 0", 0.0, 1e6),
    "train.steps": _whole("length of the run, where train.epochs is 0", 0, MOST_STEPS),
    "train.log_every": _whole("steps from one line of metrics to the next", 1, MOST_STEPS),
    "train.eval_every": _whole("epochs from one evaluation to the next", 1, MOST_STEPS),
    "train.ema_decay": _rate("decay of the moving average of the weights; 0: none"),
    "train.bad_steps_limit": _whole("non-finite steps in a row that end the run", 1, MOST_STEPS),
    "train.select_on": _choice("the split that chooses the best checkpoint", "val", "test"),
    "eval.batch": _whole("images of a batch of an evaluation; 0: train.batch", 0, 2**20),
    "optim.learning_rate": _positive("AdamW's learning rate at its peak", 1e3),
    "optim.weight_decay": _number("AdamW's decoupled weight decay", 0.0, 1e3),
    "optim.decay_all": _flag("whether biases, norms and positions decay as kernels do"),
    "optim.warmup_epochs": _number(
        "epochs of linear warm-up; -1: the recipe's, but at most a tenth of the run", 0.0, 1e6, -1.0
    ),
    "optim.cosine_per": _choice(
        "how often the cosine moves; never: the rate is constant", "epoch", "step", "never"
    ),
    "optim.clip_norm": _number("the gradient's largest global norm; 0: any", 0.0, 1e9),
    "optim.beta1": _rate("AdamW's decay of the gradient's mean"),
    "optim.beta2": _rate("AdamW's decay of the gradient's square"),
    "init.from": _text("a run's folder or a file of weights that training starts from"),
    "init.classifier": _choice(
        "the classifier of init.from: as it is, new for other classes, or without a first class "
        "for the background",
        *("keep", "new", "drop_first"),
    ),
    "init.stem": _choice("whether the first layer is refitted to other channels", "keep", "refit"),
    "init.positions": _choice(
        "whether positions are resized to another image size", "keep", "resize"
    ),
    "init.freeze": _text("parts of the network that are not trained, with commas between them"),
    "init.cache": _text("a folder for what the frozen parts make of each image, computed once"),
    "mesh.group": _whole(
        "devices that attention groups are spread over; -1: the rest", 1, 2**20, -1
    ),
    "mesh.data": _whole("devices that a batch is spread over; -1: the rest", 1, 2**20, -1),
    "mesh.aggregate": _choice(
        "how the groups' CLS tokens are summed: by the back end, in the groups' order, in bfloat16",
        *("psum", "ordered", "bf16"),
    ),
    "mesh.gradients": _choice("what gradients travel in between devices", "float32", "bf16"),
    "checkpoint.every": _whole("epochs from one checkpoint to the next", 1, MOST_STEPS),
    "checkpoint.keep_latest": _whole("latest checkpoints that are kept", 1, 10_000),
    "checkpoint.keep_best": _whole("best checkpoints that are kept", 1, 10_000),
}

#: Keys of `model` by name; 'family.name' where a family means something else by it.
MODEL_KEYS: Mapping[str, Key] = {
    "family": _text("the network's family"),
    "variant": _text("the name of the network within its family"),
    "dtype": _choice("what the network computes in", "float32", "bfloat16"),
    # HSViT
    "ablation": _choice("what is left out", "none", "conv_only", "attention_only"),
    "convolution": _choice("the kind of the trunk's convolutions", "dense", "separable"),
    "conv_channels": _each(_width("channels of each convolution block")),
    "conv_kernels": _each(_kernel("kernel size of each convolution block", 0)),
    "pool_strides": _each(_stride("stride of each block's pool; empty: by the image size")),
    "groups": _width("attention groups; 0: none", 0),
    "towers": _width("parts of the network that see an image independently"),
    "tiles": _each(_whole("rows and columns of tiles, each seen by towers of its own", 1, 2**13)),
    "trunk": _choice("whether devices repeat or share the trunk", "replicated", "sharded"),
    "votes": _choice("weights of the groups' CLS tokens", "equal", "learned"),
    "group_dropout": _rate("probability that a group's vote is left out in training"),
    # Transformers
    "depth": _depth("attention or transformer blocks", 0),
    "depths": _each(_depth("blocks of each stage")),
    "embed_dim": _width("width of a token; of a backbone's 0: by the size of its last map", 0),
    "widths": _each(_width("width of a token in each stage")),
    "heads": _whole("attention heads", 1, 1024),
    "cvt.heads": _each(_whole("attention heads of each stage", 1, 1024)),
    "head_dim": _width("width of a head"),
    "key_dim": _width("width of a head's queries and keys"),
    "mlp_dim": _width("hidden width of a feed-forward"),
    "mlp_ratio": _ratio("hidden width of a feed-forward, as a multiple of the token's"),
    "mlp_ratios": _each(_ratio("hidden width of each stage's feed-forward, as a multiple")),
    "attention_ratio": _ratio("width of values, as a multiple of the keys'"),
    "attention_blocks": _depth("blocks of the last stage that attend", 0),
    "qkv_bias": _flag("whether queries, keys and values have a bias"),
    "cvt.qkv_bias": _each(_flag("whether each stage's queries, keys and values have a bias")),
    "patch": _whole("side of a patch in pixels; 0: by the image size", 0, 2**13),
    "patches": _each(_whole("side of each stage's patches", 1, 2**13)),
    "strides": _each(_stride("stride of each stage")),
    "paddings": _each(_kernel("zeros around each stage's map", 0)),
    "cls": _flag("whether a CLS token is classified rather than the tokens' mean"),
    "positions": _choice("how tokens know their place", "learned", "rope"),
    "dhvt.positions": _flag("whether tokens have learned positions"),
    "activation": _text("the name of the activation"),
    "eps": _positive("what normalisation adds to the variance", 1.0),
    "norm_eps": _positive("what normalisation over a batch adds to the variance", 1.0),
    "layer_scale": _number("what a branch's learned factors start from; 0: no factors", 0.0, 1e3),
    "dropout": _rate("rate of dropout"),
    "dropouts": _each(_rate("rate of dropout in each stage")),
    "attention_dropout": _rate("rate of dropout of attention weights"),
    "attention_dropouts": _each(_rate("rate of dropout of attention weights in each stage")),
    "embed_dropout": _rate("rate of dropout of the tokens that enter the first block"),
    "head_dropout": _rate("rate of dropout before the classifier"),
    "drop_path": _rate("rate at which a block's branch is left out, growing with depth"),
    "drop_paths": _each(_rate("rate at which a block's branch is left out, in each stage")),
    "drop_path_of": _choice("what a dropped path leaves out", "tokens", "branch"),
    "conv_drop_path": _rate("rate at which a convolution's branch is left out"),
    # ViX and its siblings
    "mixer": _choice(
        "what mixes tokens", "softmax", "performer", "linformer", "nystrom", "fnet", "mlp_mixer"
    ),
    "projections": _width("Linformer's projected positions"),
    "one_kv_head": _flag("whether Linformer's heads share keys and values"),
    "landmarks": _width("Nystrom's landmarks"),
    "residual_kernel": _whole("kernel size of Nystrom's convolution of values", 1, 2**16 - 1),
    "features": _width("Performer's random features; 0: by the width of a head", 0),
    "batch_coupling": _flag(
        "whether Performer and Nystrom take their scale over the batch, as the authors', rather "
        "than over an image"
    ),
    "expansion": _ratio("MLP-Mixer's hidden widths, as a multiple"),
    "stem_channels": _each(_width("channels of each convolution before the last of the stem")),
    "stem_strides": _each(_stride("stride of each convolution of the stem; empty: by image size")),
    "conv_strides": _each(_stride("stride of each convolution; empty: by the image size")),
    "stage_strides": _each(_stride("stride of each stage; empty: by the image size")),
    "conv_kernel": _kernel("kernel size of the tokenizer's convolutions"),
    # HVT, DeiT, DHVT
    "pool": _choice("how tokens are pooled", "max", "average", "conv"),
    "pool_dims": _choice("whether tokens are pooled as a sequence or a map", 1, 2),
    "pool_window": _kernel("side of a pool's window"),
    "pool_stride": _stride("stride of a pool"),
    "stage_depth": _depth("blocks from one pool to the next; 0: no pools", 0),
    "retained": _each(_whole("tokens that each block keeps; empty: all", 1, 2**26)),
    "flops_share": _positive("share of the FLOPs that a schedule of kept tokens costs", 1.0),
    "head_tokens": _flag("whether attention has a token for each head"),
    "sope": _flag("whether patches are embedded by several convolutions"),
    "affine": _flag("whether the embedding's input and output have learned factors"),
    "sope_norm": _choice("norm of the embedding's convolutions", "batch", "layer"),
    "daff_norm": _choice("norm of the feed-forward's convolutions", "batch", "layer"),
    "feed_forward": _text("the name of the feed-forward"),
    # Convolutional networks and what is built on them
    "backbone": _text("the convolutional network whose last map is read"),
    "block": _choice("the kind of a residual block", "basic", "bottleneck"),
    "channels": _each(_width("channels of each stage")),
    "in_channels": _each(_width("channels into each stage, before scaling")),
    "out_channels": _each(_width("channels out of each stage, before scaling")),
    "resnet.stem_channels": _width("channels of the first convolution"),
    "width": _ratio("factor of every width"),
    "efficientnet.depth": _ratio("factor of every stage's blocks"),
    "divisor": _whole("what every width is a multiple of", 1, 1024),
    "least_channels": _width("smallest width"),
    "repeats": _each(_depth("blocks of each stage, before scaling")),
    "kernel": _kernel("kernel size"),
    "kernels": _each(_kernel("kernel size of each stage")),
    "query_paddings": _each(_kernel("zeros around each stage's map of queries", 0)),
    "key_paddings": _each(_kernel("zeros around each stage's map of keys", 0)),
    "key_strides": _each(_stride("stride of each stage's keys and values")),
    "expand": _each(_whole("hidden width of each stage's blocks, as a multiple", 1, 64)),
    "mobilenet_v2.expand": _ratio("hidden width of a block, as a multiple"),
    "expand_ratio": _ratio("hidden width of an inverted residual, as a multiple"),
    "squeeze": _number("width of squeeze and excitation, as a share; 0: none", 0.0, 16.0),
    "padding": _choice("zeros around a map", "native", "same", "symmetric"),
    "symmetric_blocks": _each(_whole("blocks with zeros on both sides of a map", 0, 10_000)),
    "pooling": _choice("how the last map is pooled", "mean", "max"),
    "drop_rate": _rate("rate at which a residual branch is dropped, growing with depth"),
    "drop": _choice("what of a residual branch is dropped", "values", "paths"),
    "output_stride": _whole("the last map's stride; dilation takes the place of more", 1, 1024),
    "stem_expansion": _flag("whether the first block has an expansion"),
    "full_top": _flag("whether the last convolution keeps its width in a narrow network"),
    "stride_in_first_stage": _flag("whether the first stage has a stride"),
    "stride_in_first_conv": _flag("whether a bottleneck's first convolution has the stride"),
    "bn_eps": _positive("what batch normalisation adds to the variance", 1.0),
    "bn_momentum": _number("share of the new statistics in the moving ones", 0.0, 1.0),
    "expand_bn_momentum": _number("the same, of a block's expansion", 0.0, 1.0),
    "downsamples": _each(_flag("whether the map shrinks after each stage")),
    "down_kernel": _kernel("kernel size of a convolution that shrinks the map"),
    "down_stride": _stride("stride of a convolution that shrinks the map"),
    "down_padding": _kernel("zeros around a map that is shrunk", 0),
    "queries": _choice("how queries are summed", "equal", "weighted"),
}
_BACKBONES = ("resnet", "efficientnet", "mobilenet_v2")


def leaves(config: ml_collections.ConfigDict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting as ('section.key', value)."""
    for key in sorted(config.keys()):
        value = config[key]
        if isinstance(value, ml_collections.ConfigDict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def of(path: str, model: Mapping[str, Any]) -> Key:
    """The entry of a key such as 'train.batch' or 'model.depth'.

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
        found = KEYS.get(path)
    else:
        found = MODEL_KEYS.get(f"{family}.{name}") or MODEL_KEYS.get(name)
    if found is None:
        raise ValueError(f"unknown configuration key {path!r}")
    return found


def check(config: ml_collections.ConfigDict) -> None:
    """Raises ValueError naming the first key whose value is outside its range, and the range."""
    for path, value in leaves(config):
        key = of(path, config.model)
        if not key.fits(value):
            raise ValueError(f"{path} must be {key.expected}; got {reprlib.repr(value)}")


def nearest(word: str, known: tuple[str, ...] | list[str]) -> str:
    """' Did you mean …?' for the closest known word, or nothing."""
    close = difflib.get_close_matches(word, known, 1, 0.5)
    return f" Did you mean {close[0]}?" if close else ""


def shown(value: Any) -> str:
    """A value as it is written on the command line."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def describe(config: ml_collections.ConfigDict) -> str:
    """Every setting as the flag that sets it, with its meaning and values, for --help."""
    lines = []
    for key, value in leaves(config):
        entry = of(key, config.model)
        lines += [f"  --config.{key}={shown(value)}", f"      {entry.meaning}; {entry.expected}"]
    return "\n".join(lines)
