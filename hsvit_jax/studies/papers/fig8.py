"""HSViT paper, figure 8: accuracy against attention depth, by convolution blocks and kernels.

The first block has half as many kernels as those after it. The paper prints a plot without
numbers, so the grid is our choice. The last map has a quarter of the image's side, as that of C2A2
and C3A4 at 32 pixels. The authors' script has one and two blocks of each kind, and a single
convolution block with a stride of 2 (see fig5).
"""

from hsvit_jax.studies.study import Cell, Study

STRIDES = {1: "4", 2: "2,2", 3: "2,1,2"}  # by the number of blocks


def get_study() -> Study:
    cells = []
    for blocks, strides in STRIDES.items():
        for kernels in (16, 64):
            channels = [kernels // 2, *[kernels] * (blocks - 1)] if blocks > 1 else [kernels]
            settings = (
                "model.conv_channels=" + ",".join(map(str, channels)),
                "model.conv_kernels=" + ",".join(["3"] * blocks),
                f"model.pool_strides={strides}",
            )
            for depth in (1, 2, 3):
                own = (*settings, f"model.depth={depth}", "model.groups=4")
                cells.append(Cell(depth, f"{blocks} × {kernels}", "c2a2", own))
    title = "HSViT paper, figure 8: convolution depth and attention depth, 4 attention groups"
    return Study(title, "attention blocks", "convolution blocks × kernels", cells)
