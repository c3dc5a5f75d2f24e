"""HSViT paper, figure 6: accuracy against kernels of an attention group, by groups.

The paper prints a plot without numbers: C2A2 with this grid is chosen here. The authors' script has
one convolution block with a stride of 2 and one attention block, groups of up to 256 kernels.
"""

from hsvit_jax.studies.study import Cell, Study


def get_study() -> Study:
    return Study(
        title="HSViT paper, figure 6: kernels of each attention group",
        x="kernels per attention group",
        line="attention groups",
        cells=[
            Cell(
                share,
                groups,
                "c2a2",
                (
                    f"model.conv_channels={share * groups // 2},{share * groups}",
                    f"model.groups={groups}",
                ),
            )
            for groups in (1, 2, 4)
            for share in (16, 32, 64, 128)
        ],
    )
