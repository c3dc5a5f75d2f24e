"""Every family's gradient in training against finite differences, in double precision.

Every family, at a smoke run's sizes, each variant that has a part which none before it has, and
what settings make of HSViT and of coupled batches: whoever registers a family or a part has it
tested here. The functions are those of a CPU run, with its own convolutions, poolings and
recomputed parts.
"""

import re

import jax
import numpy as np
import pytest
from support.small_runs import made_up_values

from hsvit_jax import config as config_lib
from hsvit_jax import models

BATCH, CLASSES = 3, 5
#: What no variant has: (specification, settings).
OTHERS = (
    ("c2a2:digits,tiny,conv_only", ()),
    ("c2a2:digits,tiny,attention_only", ()),
    ("c2a2:digits,tiny", ("model.conv_channels=(32, 32)",)),  # enough for Winograd's products
    ("c2a2:digits,tiny", ("model.convolution=separable",)),
    ("c2a2:digits,tiny", ("model.towers=2", "model.tiles=(1, 2)", "model.votes=learned")),
    ("vix:vip,digits,tiny", ("model.batch_coupling=True",)),
    ("vix:vin,digits,tiny", ("model.batch_coupling=True",)),
    ("vix:hybrid_vin_rope,digits,tiny", ()),
    ("hvt:s-2-2d,digits,tiny", ()),
    ("dhvt:t-patch2,digits,tiny", ()),
    ("dhvt:t-patch16,digits,tiny", ()),
)
#: Dear to compile, and deeper than another, put together of what others have, or with a training
#: step among the reference vectors.
SLOW = re.compile(
    r"c2a2($|:,)|c3a4|c4a8|resnet:|resnext:|swin:t$|t2t:|efficientnet:|mobilenet_v2|swiftformer|cvt:13|mobilevit:xxs"
    r"|hsvit_backbone:(?!resnet18)|dhvt:(t-patch(2|16)|t-(ln|bn)-|t-no-|vit-t-split$)|hvt:ti-[234]"
    r"|efficientvit|fastvit|smt|vix:hybrid_(?!vit$)|vix:vi[lnp]_rope|ccx:cc[lnp]|cvx:cvl"
    r"|levix:levi[nt]|(cvx|pix):((hybrid_)?(cv|pi)[pn]|hybrid)|mobilevit:s|deit:s"
)


def _part(value):
    """A setting without its size: two depths or widths are one part, and none is another."""
    if isinstance(value, dict):
        return tuple((key, _part(inner)) for key, inner in value.items())
    if isinstance(value, tuple | list):
        return tuple(dict.fromkeys(map(_part, value)))
    return bool(value) if isinstance(value, int | float) else value


def _cases():
    """Settings and image size of each network with a part of its own; mixers are all families'."""
    cases, seen = [], set()
    named = [
        f"{variant}:digits,tiny" if family == "hsvit" else f"{family}:{variant},digits,tiny"
        for family, variant in models.VARIANTS
    ]
    for specification, changes in (*((name, None) for name in named), *OTHERS):
        config = config_lib.get_config(specification, *(changes or ()))
        settings, size = config.model.to_dict(), config.data.image_size or (32, 32)
        parts = {
            ("" if key == "mixer" else settings["family"], key, _part(value))
            for key, value in settings.items()
            if key not in ("variant", "backbone") and "drop" not in key
        }
        if changes is None and parts <= seen:
            continue
        seen |= parts
        name = specification.replace("digits,tiny", "").rstrip(":,")
        name = ",".join((name, *(changes or ())))
        slow = [pytest.mark.slow] if SLOW.match(name) else []
        cases.append(pytest.param(settings, size, marks=slow, id=name))
    return cases


CASES = _cases()


@pytest.mark.parametrize(("settings", "size"), CASES)
def test_gradient_equals_finite_differences(settings, size):
    """Within 1e-6 along three random directions.

    A central difference of step h errs by h² times a curvature, by the kinks of ReLUs and maxima
    within the step, and by rounding, 1e-16/h. At 1e-7 all are far below 1e-6, but for a kink now
    and then, and in deep networks whose last maps are a pixel, normalised over three of them; there
    a smaller step decides, whose rounding is still below. A wrong gradient is wrong at every step.
    """
    with jax.enable_x64(True):
        model = models.build(settings, image_size=size, channels=3, num_classes=CLASSES)
        rng = np.random.default_rng(0)
        params, stats = jax.tree.map(np.float64, made_up_values(model))
        # Where attention without a norm before it saturates, a gradient of 1e-90 tests nothing.
        params = jax.tree.map(lambda x: x / 2 if x.ndim > 1 else x, params)
        fixed = {name: params.pop(name) for name in model.frozen}
        images = rng.normal(size=(BATCH, *size, 3))
        weights = rng.normal(size=(BATCH, CLASSES))

        @jax.jit
        def loss_and_gradient(params):
            def loss(params):
                logits, _ = model.apply(params | fixed, stats, images, train=True)
                return (logits * weights).sum()

            return jax.value_and_grad(loss)(params)

        leaves, tree = jax.tree.flatten(params)
        gradient = [np.asarray(g) for g in jax.tree.leaves(loss_and_gradient(params)[1])]
        for _ in range(3):
            direction = [rng.normal(size=x.shape) * np.sqrt(np.mean(x**2)) for x in leaves]
            products = [g * d for g, d in zip(gradient, direction, strict=True)]
            slope = sum(p.sum() for p in products)
            scale = np.sqrt(sum((p**2).sum() for p in products))  # the size a slope usually has

            def error(step, direction=direction, slope=slope):
                ends = (
                    loss_and_gradient(
                        tree.unflatten(x + s * d for x, d in zip(leaves, direction, strict=True))
                    )[0]
                    for s in (step, -step)
                )
                return abs(float(next(ends) - next(ends)) / (2 * step) - slope)

            assert scale > 0
            assert any(error(step) <= 1e-6 * scale for step in (1e-7, 1e-8, 1e-9))


def test_every_ablation_is_among_them():
    cases = " ".join(case.id for case in CASES)
    assert all(switch in cases for switch in set(config_lib.SWITCHES) - {"tiny", "bf16"})
