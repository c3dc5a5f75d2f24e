"""DHVT supplement, tables 2 to 4: feed-forward networks and attention heads."""

from hsvit_jax.studies.study import Cell, Study

TABLES = {
    "2: FFN of ViT": ("vit-t", "vit-t-split", "vit-t-split-aggregate", "vit-t-split-average"),
    "3: DAFF": ("t-patch4", "t-aggregate-all", "t-no-shortcut"),
    "4: heads": ("vit-t", "t-heads3", "t-patch4", "s-heads4", "s-heads6", "s-patch4"),
}


def get_study() -> Study:
    cells = [Cell("vit-t, 3 heads", "4: heads", "dhvt:vit-t", ("model.heads=3",))]
    cells += [Cell(v, table, f"dhvt:{v}") for table in TABLES for v in TABLES[table]]
    title = "DHVT supplement, tables 2 to 4"
    return Study(title, "variant", "table", cells, data="cifar100,paper")
