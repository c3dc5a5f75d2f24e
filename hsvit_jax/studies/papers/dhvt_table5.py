"""DHVT supplement, table 5: batch or layer normalisation in SOPE and DAFF, by batch size.

The authors' script raises the rate with the batch: 1e-3 is for 512 images.
"""

from hsvit_jax.studies.study import Cell, Study


def get_study() -> Study:
    norms = {"BN-BN": "t-patch4", "BN-LN": "t-bn-ln", "LN-BN": "t-ln-bn", "LN-LN": "t-ln-ln"}
    cells = []
    for name, variant in norms.items():
        for batch in (128, 256, 512):
            rate = f"optim.learning_rate={1e-3 * batch / 512}"
            cells.append(Cell(batch, name, f"dhvt:{variant}", (f"train.batch={batch}", rate)))
    title = "DHVT supplement, table 5: normalisation in SOPE and DAFF"
    return Study(title, "batch", "SOPE-DAFF", cells, data="cifar100,paper")
