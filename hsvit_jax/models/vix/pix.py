"""PiX: ViX in stages, with a pooling between them that doubles the width (PiT, PiP, PiN).

Each pooling halves rows and columns by a strided depthwise convolution, and maps the CLS token
linearly. No positions are added after it.

Source: the ViX paper, table 5; blocks as in `vix`.
"""

import dataclasses
from math import prod
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from hsvit_jax.models import conv_layers, settings
from hsvit_jax.models.conv_layers import Conv
from hsvit_jax.models.layers import Linear
from hsvit_jax.models.network import ForwardContext
from hsvit_jax.models.vix import mixer_config, stems, vix

Array = jax.Array


class Stage(NamedTuple):
    """A stage's blocks, the size of its token map, its tokens (CLS included) and their width."""

    depth: int
    map_size: tuple[int, int]
    tokens: int
    dim: int


@dataclasses.dataclass(frozen=True)
class PiXConfig(vix.ViXConfig):
    """Sizes of a PiX: a ViX's, with the blocks of each stage in depths rather than depth.

    embed_dim is the first stage's; mixer and mlp_dim are the same in all.
    """

    depths: tuple[int, ...] = settings.depths((2, 2))

    def __post_init__(self) -> None:
        if not self.cls:
            raise ValueError("mixer='mlp_mixer' has no CLS token, which PiX classifies")
        super().__post_init__()
        for stage in self.stages:
            self.check_tokens(stage.tokens)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Each stage's sizes."""
        sizes = [conv_layers.map_size(self.map_size, (2,) * i) for i in range(len(self.depths))]
        return tuple(
            Stage(depth, size, prod(size) + 1, self.embed_dim * 2**i)
            for i, (depth, size) in enumerate(zip(self.depths, sizes, strict=True))
        )

    @property
    def dim_out(self) -> int:
        """Width of a token before the classifier."""
        return self.stages[-1].dim


class Pool(nnx.Module):
    """A 3×3 convolution of stride 2, two outputs per channel, then linear; CLS: linear alone."""

    def __init__(self, stage: Stage, key: Array) -> None:
        conv_key, mix_key, cls_key = jax.random.split(key, 3)
        self.map_size, d = stage.map_size, stage.dim
        self.conv = Conv(d, 2 * d, 3, conv_key, stride=2, groups=d)
        self.mix = Linear(2 * d, 2 * d, mix_key)
        self.cls = Linear(d, 2 * d, cls_key)

    def __call__(self, x_BTD: Array) -> Array:
        """(B, T, D) with CLS first → (B, about T/4, 2·D)."""
        batch, _, d = x_BTD.shape
        x_BHWD = x_BTD[:, 1:].reshape(batch, *self.map_size, d)
        tokens = conv_layers.flatten(self.mix(self.conv(x_BHWD)))
        return jnp.concatenate([self.cls(x_BTD[:, :1]), tokens], axis=1)


class Encoder(vix.Encoder):
    """The CLS token, positions, and stages of blocks with pools between them."""

    def __init__(self, c: PiXConfig, key: Array) -> None:
        cls_key, position_key, *keys = jax.random.split(key, 2 + 2 * len(c.depths))
        self.prepare(c, cls_key, position_key)
        self.stages, self.pools = nnx.List(), nnx.List()
        for i, stage in enumerate(c.stages):
            block_keys = jax.random.split(keys[2 * i], stage.depth)
            self.stages.append(nnx.List(vix.mixer_blocks(c, stage.tokens, stage.dim, block_keys)))
            if i + 1 < len(c.depths):
                self.pools.append(Pool(stage, keys[2 * i + 1]))

    def __call__(self, x_BTD: Array, context: ForwardContext) -> Array:
        """(B, T, D) → the last stage's tokens, CLS first."""
        x_BTD, index = self.embed(x_BTD, context), 0
        for i, stage in enumerate(self.stages):
            x_BTD = self.pools[i - 1](x_BTD) if i else x_BTD
            for block in stage:
                x_BTD = block(x_BTD, context, index)
                index += 1
        return x_BTD


class PiX(vix.ViX):
    """Parameters: {'patches', 'encoder' (cls, position, stages, pools), 'head'}."""

    modules: ClassVar = {**vix.ViX.modules, "encoder": Encoder}


_MIXERS = {"pit": {"mixer": "softmax"}, "pip": {"mixer": "performer"}, "pin": {"mixer": "nystrom"}}
_VIX_ALONE = ("depth", "head_pool", "positions", "expansion")

FAMILY = mixer_config.family(
    PiXConfig,
    settings.keys_of(PiXConfig, without=_VIX_ALONE, patch=0),
    name="pix",
    variants={  # ViX paper, table 5
        **_MIXERS,
        **{f"hybrid_{name}": {**v, "stem_channels": (32, 64)} for name, v in _MIXERS.items()},
    },
    default_variant="hybrid_pin",
    network=PiX,
    automatic=stems.AUTOMATIC,
)
