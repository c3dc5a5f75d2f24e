"""ViX paper, table 1 and figure 4: token mixers with and without a convolutional stem.

Table 2 of the paper: --data=tiny_imagenet,paper. Memory and size: `hsvit compare`.
"""

from hsvit_jax.studies.study import Cell, Study


def get_study() -> Study:
    mixers = ("vit", "vip", "vil", "vin", "fnet", "mlp_mixer")
    cells = [Cell(mixer, "patches", f"vix:{mixer}") for mixer in mixers]
    cells += [Cell(mixer, "convolutions", f"vix:{mixer},hybrid") for mixer in mixers]
    title = "ViX paper, table 1: token mixers, patches and a convolutional stem"
    return Study(title, "mixer", "embedding", cells)
