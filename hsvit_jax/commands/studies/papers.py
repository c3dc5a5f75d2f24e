"""The papers' tables and figures as grids of networks, by the names that `hsvit study` takes."""

import dataclasses
from collections.abc import Mapping, Sequence

from hsvit_jax.commands.studies import grid


@dataclasses.dataclass(frozen=True)
class Cell:
    """A network of a study and its place on the axes.

    Attributes:
      x, line: values of the axes, as printed.
      network: as --config takes it, without data set and recipe, such as 'vix:vin,hybrid'.
      settings: KEY=VALUE texts.
    """

    x: str | int
    line: str | int
    network: str
    settings: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class Study(grid.Labels):
    """A table or figure of a paper as a grid of runs.

    Attributes:
      title, x, line: of `grid.Labels`; the title names the source.
      cells: the networks, in the table's order.
      data: the data set and recipe of the paper, as after the colon of --config.
    """

    cells: Sequence[Cell]
    data: str = "cifar10,paper"


def _tables(family: str, variants: Mapping[str, str]) -> list[Cell]:
    """The variants that each table compares."""
    return [Cell(v, table, f"{family}:{v}") for table in variants for v in variants[table].split()]


def _c2a2(kernels: int, groups: int, *more: str) -> tuple[str, ...]:
    """Settings of a C2A2: kernels of its last convolution, attention groups, and more."""
    return f"model.conv_channels={kernels // 2},{kernels}", f"model.groups={groups}", *more


def _convolutions(blocks: int, kernels: int) -> tuple[str, ...]:
    """Settings of the last map at a quarter of the image's side, as C2A2 and C3A4 have it at 32
    pixels; the first of several blocks has half as many kernels as those after it."""
    channels = [kernels // 2, *[kernels] * (blocks - 1)] if blocks > 1 else [kernels]
    return (
        f"model.conv_channels={','.join(map(str, channels))}",
        f"model.conv_kernels={','.join(['3'] * blocks)}",
        f"model.pool_strides={('4', '2,2', '2,1,2')[blocks - 1]}",
    )


_DHVT = {
    "2: FFN of ViT": "vit-t vit-t-split vit-t-split-aggregate vit-t-split-average",
    "3: DAFF": "t-patch4 t-aggregate-all t-no-shortcut",
    "4: heads": "t-heads3 t-patch4 s-heads4 s-heads6 s-patch4",
}
_NORMS = {"BN-BN": "t-patch4", "BN-LN": "t-bn-ln", "LN-BN": "t-ln-bn", "LN-LN": "t-ln-ln"}
#: Table 9 (pooling in two dimensions) compares s-0 with s-2-2d, table 2 DeiT with and without CLS.
_HVT = {
    "3: downsampling": "s-4-conv s-4-average s-4",
    "4: pooling stages": "s-0 s-1 s-2 s-3 s-4",
    "5: blocks": "s-4 s-4-depth16 s-4-depth20 s-4-depth24",
    "6: heads": "ti-4 ti-4-heads6 ti-4-heads12 ti-4-heads16",
    "8: patch": "s-4-patch8 s-4 s-4-patch32",
    "9: 2-D pooling": "s-0 s-2-2d",
}
_SIZES = (160, 224, 320, 384)
_KEPT = {"attention": "attention_only", "convolution": "conv_only", "both": ""}
_EMBEDDINGS = {"patches": "", "convolutions": ",hybrid"}
_MIXERS = ("vit", "vip", "vil", "vin", "fnet", "mlp_mixer")

#: Figures 5 to 8 of the HSViT paper are plots without numbers: C2A2 with these grids is chosen,
#: but for the 64 kernels of figure 7, which the text names.
STUDIES: Mapping[str, Study] = {
    "dhvt_ablations": Study(
        "DHVT supplement, tables 2 to 4",
        *("variant", "table"),
        _tables("dhvt", _DHVT),
        "cifar100,paper",
    ),
    "dhvt_table5": Study(
        "DHVT supplement, table 5: normalisation in SOPE and DAFF",
        *("batch", "SOPE-DAFF"),
        [
            Cell(batch, name, f"dhvt:{variant}", [f"train.batch={batch}"])
            for name, variant in _NORMS.items()
            for batch in (128, 256, 512)
        ],
        "cifar100,paper",
    ),
    "fig5": Study(
        "HSViT paper, figure 5: convolution kernels and attention groups",
        *("convolution kernels", "attention groups"),
        [Cell(n, g, "c2a2", _c2a2(n, g)) for g in (1, 2, 4, 8) for n in (16, 32, 64, 128)],
    ),
    "fig6": Study(
        "HSViT paper, figure 6: kernels of each attention group",
        *("kernels per attention group", "attention groups"),
        [Cell(n, g, "c2a2", _c2a2(n * g, g)) for g in (1, 2, 4) for n in (16, 32, 64, 128)],
    ),
    "fig7": Study(
        "HSViT paper, figure 7: attention depth and attention groups, 64 kernels",
        *("attention blocks", "attention groups"),
        [
            Cell(depth, g, "c2a2", _c2a2(64, g, f"model.depth={depth}"))
            for g in (1, 2, 4)
            for depth in (1, 2, 3, 4)
        ],
    ),
    "fig8": Study(
        "HSViT paper, figure 8: convolution depth and attention depth, 4 attention groups",
        *("attention blocks", "convolution blocks × kernels"),
        [
            Cell(
                *(depth, f"{blocks} × {kernels}", "c2a2"),
                (*_convolutions(blocks, kernels), f"model.depth={depth}", "model.groups=4"),
            )
            for blocks in (1, 2, 3)
            for kernels in (16, 64)
            for depth in (1, 2, 3)
        ],
    ),
    "hvt_ablations": Study(
        "HVT paper, tables 3 to 9",
        *("variant", "table"),
        _tables("hvt", _HVT)
        + [Cell(f"{n} px", "7: image", "hvt:s-4", [f"data.image_size={n},{n}"]) for n in _SIZES],
        "cifar100,paper",
    ),
    # The paper's other data set: --data=cifar100,paper.
    "table4": Study(
        "HSViT paper, table 4: layers that are kept",
        *("layers", "network"),
        [Cell(k, net, f"{net}:{_KEPT[k]}") for net in ("c2a2", "c3a4", "c4a8") for k in _KEPT],
    ),
    # And figure 4; table 2: --data=tiny_imagenet,paper. Memory and size: `hsvit compare`.
    "vix_table1": Study(
        "ViX paper, table 1: token mixers, patches and a convolutional stem",
        *("mixer", "embedding"),
        [Cell(m, name, f"vix:{m}{more}") for name, more in _EMBEDDINGS.items() for m in _MIXERS],
    ),
}
