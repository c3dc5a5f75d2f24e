"""Settings and state dicts of small networks of the ViX paper's families."""

import numpy as np
from support import state_dicts, torch_files

from hsvit_jax import models


def small(family, **changes):
    """Settings of a small network of the family whose sizes differ wherever they can."""
    module = models.FAMILIES[family]
    sizes = {
        "embed_dim": 10,
        "depth": 2,
        "depths": (1, 2),
        "mlp_dim": 14,
        "heads": 3,
        "head_dim": 4,
        "projections": 5,
        "landmarks": 4,
        "residual_kernel": 5,
        "stem_channels": (),
        "conv_channels": (7,),
    }
    known = {k: v for k, v in sizes.items() if k in module.defaults}
    return {**module.defaults, **known, "family": family, "dtype": "float32", **changes}


def state(family, network):
    """A random state dict of these sizes."""
    return state_dicts.drawn({e.key: e.shape for e in torch_files.listing(family, network)})


def check_variants_are_recognised(family, given):
    """Every named variant is known by its tensors' names and shapes, and what `given` adds."""
    module = models.FAMILIES[family]
    for variant, changes in module.variants.items():
        settings = {**module.defaults, **changes, "family": family, "dtype": "float32"}
        model = models.build(settings, image_size=(32, 32), channels=3, num_classes=10)
        zero = np.zeros((), np.float32)
        tensors = {
            e.key: np.broadcast_to(zero, e.shape) for e in torch_files.listing(family, model)
        }
        if settings.get("positions") == "rope":
            tensors["layer_pos_emb.emb"] = np.broadcast_to(zero, (1025, 32))
        found, data = torch_files.settings(family, tensors, given)
        assert found["variant"] == variant
        assert data == {"image_size": (32, 32), "channels": 3, "num_classes": 10}
