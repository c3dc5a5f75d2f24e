"""HSViT paper, figure 5: accuracy against convolution kernels, by attention groups.

The paper prints a plot without numbers: C2A2 with this grid is chosen here. The authors' script has
16 to 256 kernels, 1 to 8 groups, and one or two blocks of each kind, a single convolution block
with a stride of 2; which of these the plot shows is not said.
"""

from hsvit_jax.studies.study import Cell, Study


def get_study() -> Study:
    return Study(
        title="HSViT paper, figure 5: convolution kernels and attention groups",
        x="convolution kernels",
        line="attention groups",
        cells=[
            Cell(
                kernels,
                groups,
                "c2a2",
                (f"model.conv_channels={kernels // 2},{kernels}", f"model.groups={groups}"),
            )
            for groups in (1, 2, 4, 8)
            for kernels in (16, 32, 64, 128)
        ],
    )
