"""HSViT paper, table 4: without attention, without convolutions, with both.

For its other data set: --data=cifar100,paper. There the authors' script trains convolution alone,
too, on images of 8×8 pixels, whose last maps are 2×2: the paper's 37.92, 42.83 and 43.51 % may be
those of conv_only with data.image_size=8,8, not of this grid.
"""

from hsvit_jax.studies.study import Cell, Study


def get_study() -> Study:
    kept = {"attention": "attention_only", "convolution": "conv_only", "both": ""}
    return Study(
        title="HSViT paper, table 4: layers that are kept",
        x="layers",
        line="network",
        cells=[
            Cell(layers, network, f"{network}:{switch}")
            for network in ("c2a2", "c3a4", "c4a8")
            for layers, switch in kept.items()
        ],
    )
