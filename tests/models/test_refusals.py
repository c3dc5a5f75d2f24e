"""Settings that do not fit each other: one table of all families, and the key that is named.

The range of a single setting is the schema's (tests/config).
"""

import pytest
from support import vix_files

from hsvit_jax import models

NYSTROM = {"mixer": "nystrom", "landmarks": 8}
#: Image sides, family, changes of its settings, and the words that the error must have.
CASES = (
    # The trunk, the groups and their towers
    (32, "hsvit", {"pool_strides": (2,)}, "pool_strides"),
    (32, "hsvit", {"conv_channels": (), "conv_kernels": (), "pool_strides": (1,)}, "one entry"),
    (32, "hsvit", {"conv_kernels": (3, 4)}, "conv_kernels"),
    (32, "hsvit", {"conv_kernels": (0, 3)}, "conv_kernels"),
    (32, "hsvit", {"ablation": "attention_only"}, "embed_dim=64"),
    (8, "hsvit", {"ablation": "attention_only", "convolution": "separable"}, "separable"),
    (32, "hsvit", {"groups": 5}, r"groups=5.* 1, 2, 4, 8"),
    (32, "hsvit", {"depth": 0}, "depth"),
    (32, "hsvit", {"heads": 3}, r"embed_dim=64.*heads=3.*1, 2, 4, 8"),
    (16, "hsvit", {"towers": 8, "tiles": (3, 2)}, r"16 rows .*tiles=\(3, 2\)"),
    (16, "hsvit", {"towers": 8, "tiles": (2, 5)}, "16 columns .* 1, 2, 4, 8, 16"),
    (16, "hsvit", {"towers": 2, "tiles": (2, 2)}, "towers=2.* multiple of 4"),
    (16, "hsvit", {"tiles": (2, 2)}, "towers=1"),
    (16, "hsvit", {"tiles": (2,)}, "tiles"),
    (64, "hsvit_backbone", {"groups": 48}, "groups=48"),
    (64, "hsvit_backbone", {"embed_dim": 12}, "embed_dim=12.*heads=8"),
    (64, "hsvit_backbone", {"backbone": "vgg16"}, "'vgg16'.*resnet, efficientnet"),
    (64, "hsvit_backbone", {"backbone": "efficientnet_b0"}, "model.backbone_settings"),
    ((16, 64), "hsvit_backbone", {}, "16×64 pixels"),
    # Patches, stems and tokens
    ((6, 9), "vix", {"patch": 4}, "patch=4"),
    ((6, 9), "vix", {"patch": 3, **NYSTROM}, "landmarks=8.*7"),
    ((6, 9), "vix", {"patch": 3, "mixer": "mlp_mixer", "expansion": 0.12}, "ratio of 0.12"),
    ((6, 9), "vix", {"stem_channels": (4,), "stem_strides": (1,), "patch": 3}, "stem"),
    ((6, 9), "vix", {"stem_channels": (4,), "patch": 3}, r"patch=3 and stem_channels=\(4,\)"),
    ((6, 9), "vix", {"stem_strides": (1, 2), "patch": 3}, "stem_strides"),
    ((6, 9), "vix", {"patch": 3, "mixer": "performer", "head_dim": 1}, "head_dim=1"),
    ((6, 9), "vix", {"patch": 3, "mixer": "fnet", "positions": "rope"}, "mixer='fnet'"),
    ((6, 9), "vix", {"patch": 3, "head_dim": 3, "positions": "rope"}, "head_dim=3"),
    ((6, 9), "vix", {"patch": 3, "mixer": "linformer", "positions": "rope"}, "one_kv_head"),
    ((6, 9), "levix", {"stem_channels": (5,), "stem_strides": (1,)}, "stem_strides"),
    ((6, 9), "levix", {"stem_channels": (5,), **NYSTROM, "landmarks": 55}, "landmarks=55.*54"),
    ((4, 5), "ccx", {"heads": 3, "head_dim": 0}, "embed_dim=10.*heads=3"),
    ((4, 5), "ccx", {"heads": 2, "pool_padding": 2}, "pool_padding=2.*pool_window=3"),
    ((4, 5), "ccx", {"heads": 2, "conv_padding": 0}, "map of .* too small"),
    ((4, 5), "ccx", {"heads": 2, "conv_strides": (1, 1, 1)}, "conv_strides"),
    ((4, 5), "cvx", {"stage_strides": (1,)}, "stage_strides"),
    ((4, 5), "cvx", {**NYSTROM, "stage_strides": (1, 2)}, "6"),
    ((4, 5), "pix", {"depths": ()}, "depths"),
    ((4, 5), "pix", {"mixer": "mlp_mixer"}, "CLS"),
    ((4, 5), "pix", NYSTROM, "landmarks=8.*7"),
    ((4, 5), "pix", {"patch": 3}, "patch=3"),
    (32, "vit", {"patch": 5}, "32×32 pixels.*patch=5"),
    ((12, 20), "hvt", {"patch": 8}, "12×20 pixels.*patch=8"),
    (8, "hvt", {"patch": 4, "stage_depth": 1}, "pool_window=3.*model.stage_depth"),
    (32, "hvt", {"pool_dims": 2, "pool_window": 2}, "pool_window"),
    (32, "deit", {"patch": 4, "retained": (9,) * 12, "flops_share": 0.5}, "retained.*flops_share"),
    (32, "deit", {"patch": 4, "retained": (9, 8)}, "depth=12"),
    (32, "deit", {"patch": 4, "retained": (66,) * 12}, r"retained\[0\]=66"),
    (32, "deit", {"patch": 4, "retained": (9, 10) + (1,) * 10}, r"retained\[1\]=10"),
    (32, "deit", {"patch": 4, "flops_share": 0.01}, "flops_share=0.01"),
    (32, "deit", {"patch": 4, "flops_share": 1.5}, "flops_share"),
    ((8, 12), "dhvt", {"patch": 3}, "patch=3"),
    (12, "dhvt", {"patch": 6}, "patch=6"),
    (32, "dhvt", {"heads": 5}, "heads=5"),
    (32, "dhvt", {"embed_dim": 4, "heads": 2, "patch": 16}, "embed_dim=4"),
    # Maps
    (16, "efficientformer", {}, "1×1"),
    (64, "efficientformer", {"activation": "gleu"}, "'gleu'"),
    (8, "swiftformer", {}, "1×1.*data.image_size"),
    (16, "mobilevit", {}, "1×1"),
    (3, "cvt", {}, "1×1"),
    ((33, 40), "resnet", {"depths": (1, 2)}, "depth"),
    ((33, 40), "resnet", {"activation": "prelu"}, "'prelu'"),
    ((33, 40), "resnet", {"channels": (2, 4, 8, 16)}, "channels in and 0 out"),
    ((64, 16), "resnet", {}, "64×16 pixels"),
    ((64, 31), "efficientnet", {}, "64×31 pixels"),
    ((64, 16), "mobilenet_v2", {}, "64×16 pixels"),
    ((33, 40), "efficientnet", {"strides": (1, 3, 2, 2, 1, 2, 1)}, "strides"),
    ((33, 40), "efficientnet", {"kernels": (3, 3, 4, 3, 5, 5, 3)}, "kernels"),
    ((33, 40), "efficientnet", {"in_channels": (32, 16, 24, 40, 80, 100, 192)}, "112; got 100"),
    ((33, 40), "efficientnet", {"repeats": (1, 1)}, "one entry"),
)


@pytest.mark.parametrize(("size", "family", "changes", "named"), CASES)
def test_settings_that_do_not_fit_are_named(size, family, changes, named):
    own = models.FAMILIES[family].settings()
    if "mixer" in own and family != "t2t":
        own |= vix_files.small(family)
    size = (size, size) if isinstance(size, int) else size
    with pytest.raises(ValueError, match=named):
        models.build(
            {**own, "dtype": "float32", **changes}, image_size=size, channels=3, num_classes=10
        )


@pytest.mark.parametrize("changes", [{"family": "vgg"}, {"dtype": "float16"}], ids=str)
def test_unknown_names_are_told(changes):
    settings = {**models.DEFAULT.settings(), "dtype": "float32", **changes}
    with pytest.raises(ValueError, match="unknown model.*{!r}".format(*changes.values())):
        models.build(settings, image_size=(32, 32), channels=3, num_classes=10)


@pytest.mark.parametrize(
    ("family", "side"), [("resnet", 17), ("efficientnet", 32), ("mobilenet_v2", 17)]
)
def test_the_smallest_image_of_a_convolutional_network_fits(family, side):
    record = models.FAMILIES[family]
    sizes = record.sizes(record.settings(), image_size=(side, 64), channels=3, num_classes=10)
    assert sizes.map_size == (1, 2)
