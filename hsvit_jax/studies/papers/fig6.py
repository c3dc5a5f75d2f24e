"""HSViT paper, figure 6: accuracy against kernels of an attention group, by groups.

The paper prints a plot without numbers, so C2A2 with this grid is our choice. The authors' script
has one convolution block with a stride of 2, one attention block, and up to 256 kernels a group.
"""

from hsvit_jax.studies.study import Cell, Study


def get_study() -> Study:
    cells = []
    for groups in (1, 2, 4):
        for share in (16, 32, 64, 128):
            channels = f"model.conv_channels={share * groups // 2},{share * groups}"
            cells.append(Cell(share, groups, "c2a2", (channels, f"model.groups={groups}")))
    title = "HSViT paper, figure 6: kernels of each attention group"
    return Study(title, "kernels per attention group", "attention groups", cells)
