"""HSViT paper, figure 7: accuracy against attention depth, by groups, at 64 kernels.

The paper prints a plot without numbers: the grid beside the text's 64 kernels is chosen here.
The authors' script has one and two attention blocks, and 16 to 256 kernels (see fig5).
"""

from hsvit_jax.studies.study import Cell, Study


def get_study() -> Study:
    return Study(
        title="HSViT paper, figure 7: attention depth and attention groups, 64 kernels",
        x="attention blocks",
        line="attention groups",
        cells=[
            Cell(
                depth,
                groups,
                "c2a2",
                ("model.conv_channels=32,64", f"model.groups={groups}", f"model.depth={depth}"),
            )
            for groups in (1, 2, 4)
            for depth in (1, 2, 3, 4)
        ],
    )
