"""ViT: patches, a CLS token, learned positions, pre-norm blocks; the normalised CLS is classified.

The same network as `deit.py`'s DeiT, with the sizes, the epsilon of the norms and the places of
dropout of the `transformers` library. The HSViT paper's "ViT-B/16" has patches of 4 pixels at 64
pixels (table 2); ImageNet's have 16.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

from hsvit_jax.models.vit import hvt

#: What a variant leaves as it is: the `model` section of ViT-B with patches of 4 pixels.
DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "patch": 4,
        "heads": 12,
        "head_dim": 64,
        "depth": 12,
        "mlp_dim": 3072,
        "qkv_bias": True,
        "eps": 1e-12,
        "activation": "gelu",
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "drop_path": 0.0,
    }
)

_LARGE = {"heads": 16, "depth": 24, "mlp_dim": 4096}

#: Named variants, as they differ from `DEFAULTS`.
VARIANTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "b-patch4": {},
        "b-patch16": {"patch": 16},
        "l-patch16": {**_LARGE, "patch": 16},
    }
)


class ViT(hvt.HVT):
    """Parameters: {'embedding', 'encoder', 'head'}."""

    def paper_flops(self, multiply_adds: int) -> None:
        """The HSViT paper counts 2 for a multiply-add, as everywhere here."""


def from_settings(
    settings: Mapping[str, Any],
    *,
    image_size: tuple[int, int],
    channels: int,
    num_classes: int,
    dtype: jnp.dtype = jnp.float32,
) -> ViT:
    """The network of a configuration's `model` section, which has the keys of `DEFAULTS`.

    Raises ValueError for an image that the patch does not divide, and other sizes that do not fit.
    """
    sizes = {key: settings[key] for key in DEFAULTS if key != "mlp_dim"}
    width = max(sizes["heads"] * sizes["head_dim"], 1)
    config = hvt.HVTConfig(
        image_size=image_size,
        image_channels=channels,
        num_classes=num_classes,
        stage_depth=0,
        cls=True,
        mlp_ratio=settings["mlp_dim"] / width,
        patch_init="normal",
        **sizes,
    )
    return ViT(config, dtype)
