"""HVT paper, tables 3 to 9: downsampling, pooling stages, depth, width, image and patch size, and
pooling in two dimensions. Table 2, DeiT with and without CLS, is not among them.
"""

from hsvit_jax.studies.study import Cell, Study

TABLES = {
    "3: downsampling": ("s-4-conv", "s-4-average", "s-4"),
    "4: pooling stages": ("s-0", "s-1", "s-2", "s-3", "s-4"),
    "5: blocks": ("s-4", "s-4-depth16", "s-4-depth20", "s-4-depth24"),
    "6: heads": ("ti-4", "ti-4-heads6", "ti-4-heads12", "ti-4-heads16"),
    "8: patch": ("s-4-patch8", "s-4", "s-4-patch32"),
    "9: 2-D pooling": ("s-0", "s-2-2d"),
}


def get_study() -> Study:
    cells = [Cell(v, table, f"hvt:{v}") for table in TABLES for v in TABLES[table]]
    for n in (160, 224, 320, 384):
        cells.append(Cell(f"{n} px", "7: image", "hvt:s-4", (f"data.image_size={n},{n}",)))
    return Study("HVT paper, tables 3 to 9", "variant", "table", cells, data="cifar100,paper")
