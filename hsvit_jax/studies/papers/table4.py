"""HSViT paper, table 4: without attention, without convolutions, with both.

For its other data set: --data=cifar100,paper. There the authors' script also trains convolution
alone on images of 8×8 pixels with last maps of 2×2. The paper's 37.92, 42.83 and 43.51 % may be
those of conv_only with data.image_size=8,8, not of this grid.
"""

from hsvit_jax.studies.study import Cell, Study


def get_study() -> Study:
    kept = {"attention": "attention_only", "convolution": "conv_only", "both": ""}
    networks = ("c2a2", "c3a4", "c4a8")
    cells = [Cell(layers, n, f"{n}:{switch}") for n in networks for layers, switch in kept.items()]
    return Study("HSViT paper, table 4: layers that are kept", "layers", "network", cells)
