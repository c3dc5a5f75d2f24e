"""Settings and state dicts of small networks of the ViX paper's families."""

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
