"""ViT: patch embedding, a CLS token, learned positions, pre-norm blocks, a classifier on CLS.

The network of `deit`, with the sizes, the norms' epsilon and the dropout layers of the
`transformers` library. The HSViT paper's "ViT-B/16" has patches of 4 pixels on images of 64 (table
2); ImageNet's have 16. Source: Dosovitskiy et al., "An Image is Worth 16×16 Words", section 3.1.
"""

from collections.abc import Mapping
from typing import Any

from hsvit_jax.models import settings
from hsvit_jax.models.family import Family
from hsvit_jax.models.vit import hvt

#: The settings of ViT-B with patches of 4 pixels, which variants change.
KEYS: Mapping[str, settings.Key] = {
    **settings.keys_of(
        hvt.HVTConfig,
        without=(
            *("stage_depth", "pool", "pool_dims", "pool_window", "cls", "retained"),
            *("mlp_ratio", "patch_init"),
        ),
        **{"patch": 4, "heads": 12, "eps": 1e-12, "drop_path": 0.0},
    ),
    "mlp_dim": settings.Key(
        "hidden width of the feed-forward", low=1, high=2**16, kind=int, default=3072
    ),
}

_LARGE = {"heads": 16, "depth": 24, "mlp_dim": 4096}

#: Named variants, as they differ from the defaults.
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "b-patch4": {},
    "b-patch16": {"patch": 16},
    "l-patch16": {**_LARGE, "patch": 16},
}


class ViT(hvt.HVT):
    """Parameters: {'embedding', 'encoder', 'head'}."""

    def paper_flops(self, multiply_adds: int) -> None:
        """None: the HSViT paper, table 2, counts 2 for a multiply-add."""


def _config(*, heads: int, head_dim: int, mlp_dim: int, **values: Any) -> hvt.HVTConfig:
    return hvt.HVTConfig(
        heads=heads,
        head_dim=head_dim,
        stage_depth=0,
        cls=True,
        mlp_ratio=mlp_dim / max(heads * head_dim, 1),
        patch_init="normal",
        **values,
    )


FAMILY = Family(
    name="vit",
    keys=KEYS,
    variants=VARIANTS,
    default_variant="b-patch4",
    config=_config,
    network=ViT,
    paper_recipe="hsvit_vit",
    tiny=lambda settings: {"heads": 2, "head_dim": 8, "depth": 2, "mlp_dim": 32, "patch": 4},
)
