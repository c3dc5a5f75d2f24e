"""HSViT paper, figure 8: accuracy against attention depth, by convolution blocks and kernels.

The first block has half as many kernels as those after it. The paper prints a plot without
numbers: the grid is chosen here. The last map has a quarter of the image's side, as that of C2A2
and C3A4 at 32 pixels. The authors' script has one and two blocks of each kind, a single convolution
block with a stride of 2 (see fig5).
"""

from hsvit_jax.studies.study import Cell, Study

STRIDES = {1: "4", 2: "2,2", 3: "2,1,2"}  # of a network of so many blocks


def get_study() -> Study:
    return Study(
        title="HSViT paper, figure 8: convolution depth and attention depth, 4 attention groups",
        x="attention blocks",
        line="convolution blocks × kernels",
        cells=[
            Cell(
                depth,
                f"{blocks} × {kernels}",
                "c2a2",
                (
                    "model.conv_channels=" + ",".join(map(str, channels)),
                    "model.conv_kernels=" + ",".join(["3"] * blocks),
                    f"model.pool_strides={STRIDES[blocks]}",
                    f"model.depth={depth}",
                    "model.groups=4",
                ),
            )
            for blocks in STRIDES
            for kernels in (16, 64)
            for channels in [[kernels // 2, *[kernels] * (blocks - 1)] if blocks > 1 else [kernels]]
            for depth in (1, 2, 3)
        ],
    )
