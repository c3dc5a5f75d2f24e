"""The ViX paper's families: what follows from an image's size, and what is refused."""

import pytest
from support import vix_files

from hsvit_jax import models
from hsvit_jax.models import conv_layers
from hsvit_jax.models.vix import stems

#: Image size and settings of each family's small network.
SMALL = {
    "vix": ((6, 9), {"patch": 3}),
    "levix": ((6, 9), {"stem_channels": (5,)}),
    "ccx": ((4, 5), {"heads": 2}),
    "cvx": ((4, 5), {}),
    "pix": ((4, 5), {}),
}


def test_default_patches_leave_32_rows_and_columns():
    sides = {(8, 8): 1, (32, 32): 1, (64, 64): 2, (33, 33): 3, (224, 224): 7}
    sides |= {(16, 64): 1, (48, 64): 2, (35, 35): 5, (4, 4): 1}
    assert {size: stems.default_patch(size) for size in sides} == sides
    for size in ((37, 37), (74, 74), (148, 148), (64, 63)):
        with pytest.raises(ValueError, match=f"no patch divides {size[0]}×.*set model.patch"):
            stems.default_patch(size)


def test_default_strides_leave_32_rows_and_columns():
    strides = {(32, 32): (1, 1, 1), (28, 28): (1, 1, 1), (64, 64): (2, 1, 1)}
    strides |= {(65, 63): (2, 2, 1), (128, 128): (2, 2, 1), (512, 512): (2, 2, 2)}
    assert {size: stems.default_strides(size, 3) for size in strides} == strides
    assert conv_layers.map_size((7, 8), (2, 1, 2)) == (2, 2)
    assert conv_layers.map_size((7, 8), ()) == (7, 8)


def test_stages_of_pix_halve_the_map_and_double_the_width():
    settings = vix_files.small("pix", depths=(1, 2, 1), patch=1)
    network = models.build(settings, image_size=(5, 8), channels=3, num_classes=10)
    assert [(s.depth, s.map_size, s.tokens, s.dim) for s in network.config.stages] == [
        (1, (5, 8), 41, 10),
        (2, (3, 4), 13, 20),
        (1, (2, 2), 5, 40),
    ]


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("vix", {"patch": 4}, "6×9 pixels cannot be cut into patches of patch=4"),
        ("vix", {"mixer": "nystrom", "landmarks": 8}, "landmarks=8.*there are 7"),
        ("vix", {"mixer": "mlp_mixer", "expansion": 0.12}, "ratio of 0.12 to a width of 6"),
        ("vix", {"stem_channels": (4,), "stem_strides": (1,)}, r"widths \(4, 10\).*strides=\(1,\)"),
        ("vix", {"stem_channels": (4,)}, r"patch=3 and stem_channels=\(4,\)"),
        ("vix", {"stem_strides": (1, 2)}, r"stem_strides=\(1, 2\) are of a stem, and there is non"),
        ("vix", {"mixer": "performer", "head_dim": 1}, "head_dim=1 gives performer features=0"),
        ("vix", {"mixer": "fnet", "positions": "rope"}, "mixer='fnet' has none"),
        ("vix", {"head_dim": 3, "positions": "rope"}, "odd head_dim=3"),
        ("vix", {"mixer": "linformer", "positions": "rope"}, "set model.one_kv_head=False"),
        ("vix", {"mixer": "mlp_mixer", "head_pool": "mean"}, "in any case: leave out model.he"),
        ("levix", {"stem_strides": (1,)}, r"widths \(5, 10\).*stem_strides=\(1,\)"),
        ("levix", {"mixer": "nystrom", "landmarks": 55}, "landmarks=55.*there are 54"),
        ("ccx", {"heads": 3, "head_dim": 0}, "embed_dim=10 is not divisible by heads=3"),
        ("ccx", {"pool_padding": 2}, "pool_padding=2 is more than half of pool_window=3"),
        ("ccx", {"conv_padding": 0}, "an image of 4×5 is too small for the tokenizer's windows"),
        ("ccx", {"conv_strides": (1, 1, 1)}, r"widths \(7, 10\).*conv_strides=\(1, 1, 1\)"),
        ("cvx", {"stage_strides": (1,)}, r"depths=\(1, 2\).*need stage_strides=\(1,\)"),
        ("cvx", {"mixer": "nystrom", "landmarks": 8, "stage_strides": (1, 2)}, "there are 6"),
        ("pix", {"depths": ()}, r"every stage needs a block; got depths=\(\)"),
        ("pix", {"mixer": "mlp_mixer"}, "no CLS token, which PiX classifies"),
        ("pix", {"mixer": "nystrom", "landmarks": 8}, "landmarks=8.*there are 7"),
        ("pix", {"patch": 3}, "4×5 pixels cannot be cut into patches of patch=3"),
    ],
)
def test_settings_that_do_not_fit_say_so(family, changes, message):
    size, own = SMALL[family]
    settings = vix_files.small(family, **{**own, **changes})
    with pytest.raises(ValueError, match=message):
        models.FAMILIES[family].sizes(settings, image_size=size, channels=3, num_classes=10)
