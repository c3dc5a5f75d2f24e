"""State dicts of the ViX paper's families for any constructor, written as a golden is written."""

import json

import numpy as np
import vix_numpy

from hsvit_jax import config as configs
from hsvit_jax import convert, models


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
    known = {k: v for k, v in sizes.items() if k in module.DEFAULTS}
    return {**module.DEFAULTS, **known, "family": family, "dtype": "float32", **changes}


def state(converter, config, *, rope=False):
    """A random state dict of these sizes, with what else the reference saves."""
    tensors = vix_numpy.random_state({e.key: e.shape for e in converter.listing(config)})
    counts = {k.replace("running_var", "num_batches_tracked"): np.array(3) for k in tensors}
    tensors |= {k: v for k, v in counts.items() if k.endswith("num_batches_tracked")}
    if rope:
        shape = (config.tokens, config.mixing.head_dim)
        tensors["layer_pos_emb.emb"] = np.zeros(shape, np.float32)
    return tensors


def check_conversion(path, family, converter, settings, image, constructor, numpy_sizes, method):
    """Writes a file with the NumPy network's logits, converts it, and compares everything."""
    channels, *image_size = image
    model = models.build(settings, image_size=tuple(image_size), channels=channels, num_classes=7)
    rope = settings.get("positions") == "rope"
    tensors = state(converter, model.config, rope=rope)
    images = np.random.default_rng(1).normal(size=(2, *image)).astype(np.float32)
    network = vix_numpy.Network(tensors, rope=rope, **numpy_sizes)
    logits = getattr(network, method)(images.astype(np.float64))
    description = json.dumps({"family": family, "constructor": constructor})
    entries = {"input": images, "logits": logits.astype(np.float32), "config": description}
    np.savez(path, **tensors, **entries)
    report = convert.convert_file(path)
    assert report["max_abs_error"] <= 1e-5 * report["max_abs_logit"]
    buffers = ("running_mean", "running_var", "tracked", "projection_matrix", "_emb.emb")
    trained = [t.size for k, t in tensors.items() if not k.endswith(buffers)]
    assert report["parameters"] == sum(trained)
    written = configs.from_json((path.with_name(f"{path.stem}-jax") / "config.json").read_text())
    expected = {**settings, "batch_coupling": True, "variant": "custom"}
    expected.pop("features", None)
    ours = {k: v for k, v in written.model.to_dict().items() if k != "features"}
    assert ours == expected
    assert written.data.image_size == tuple(image_size) and written.data.channels == channels


def check_variants_are_recognised(family, converter, given):
    """Every named variant is known by its tensors' names and shapes, and what `given` adds."""
    module = models.FAMILIES[family]
    for variant, changes in module.VARIANTS.items():
        settings = {**module.DEFAULTS, **changes, "family": family, "dtype": "float32"}
        model = models.build(settings, image_size=(32, 32), channels=3, num_classes=10)
        zero = np.zeros((), np.float32)
        tensors = {e.key: np.broadcast_to(zero, e.shape) for e in converter.listing(model.config)}
        if settings.get("positions") == "rope":
            tensors["layer_pos_emb.emb"] = np.broadcast_to(zero, (1025, 32))
        found, data = converter.settings(tensors, given)
        assert found["variant"] == variant
        assert data == {"image_size": (32, 32), "channels": 3, "num_classes": 10}
