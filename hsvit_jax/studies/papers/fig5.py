"""HSViT paper, figure 5: accuracy against convolution kernels, by attention groups.

The paper prints a plot without numbers, so C2A2 with this grid is our choice. The authors' script
has 16 to 256 kernels, 1 to 8 groups, one or two blocks of each kind, and a single convolution block
with a stride of 2. The paper does not name the ones in the plot.
"""

from hsvit_jax.studies.study import Cell, Study


def get_study() -> Study:
    cells = [
        Cell(n, groups, "c2a2", (f"model.conv_channels={n // 2},{n}", f"model.groups={groups}"))
        for groups in (1, 2, 4, 8)
        for n in (16, 32, 64, 128)
    ]
    title = "HSViT paper, figure 5: convolution kernels and attention groups"
    return Study(title, "convolution kernels", "attention groups", cells)
