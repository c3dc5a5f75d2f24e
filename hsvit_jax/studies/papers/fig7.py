"""HSViT paper, figure 7: accuracy against attention depth, by groups, at 64 kernels.

The paper prints a plot without numbers, so the grid beside its 64 kernels is our choice.
The authors' script has one and two attention blocks, and 16 to 256 kernels (see fig5).
"""

from hsvit_jax.studies.study import Cell, Study


def get_study() -> Study:
    cells = []
    for groups in (1, 2, 4):
        settings = ("model.conv_channels=32,64", f"model.groups={groups}")
        cells += [Cell(n, groups, "c2a2", (*settings, f"model.depth={n}")) for n in (1, 2, 3, 4)]
    title = "HSViT paper, figure 7: attention depth and attention groups, 64 kernels"
    return Study(title, "attention blocks", "attention groups", cells)
