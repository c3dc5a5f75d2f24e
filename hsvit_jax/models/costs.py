"""Costs of a network: its layers, parameters, FLOPs, and the memory of compiled programs.

The table counts as the literature does; what a compiled program really computes and holds is asked
of XLA, for the back end at hand. Nothing is computed or allocated: shapes alone are enough.
"""

from typing import Any

import jax
import jax.numpy as jnp


def rows(model: Any) -> list[tuple[str, str, str, str]]:
    """The layer table as text: (layer, output shape of one image, parameters, FLOPs as 2·MAC)."""
    return [
        (name, "×".join(map(str, shape)), f"{params:,}", f"{2 * macs:,}")
        for name, shape, params, macs in model.layer_table()
    ]


def parameters(model: Any) -> int:
    """Exact number of trained values, by `eval_shape`."""
    params, _ = jax.eval_shape(model.init, jax.random.key(0))
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def flops(model: Any) -> int:
    """FLOPs of one image forward: 2 for each multiply-add of a matrix product or convolution."""
    return 2 * sum(macs for *_, macs in model.layer_table())


def compiled_flops(model: Any) -> float:
    """FLOPs of the compiled evaluation forward of one image, as XLA counts them here.

    Normalisation and softmax are counted too; HSViT's last attention block has one query, its CLS.
    """
    return float(forward_program(model, 1).cost_analysis()["flops"])


def forward_program(model: Any, batch: int) -> Any:
    """The compiled evaluation forward of `batch` images: its `cost_analysis` and `peak_bytes`."""
    forward = jax.jit(lambda p, s, x: model.apply(p, s, x)[0])
    return forward.lower(*_shapes(model, batch)).compile()


def forward_bytes(model: Any, batch: int) -> int:
    """Peak bytes of the compiled evaluation forward of `batch` images, its arguments included."""
    return peak_bytes(forward_program(model, batch))


def training_bytes(model: Any, batch: int) -> int:
    """Peak bytes of a compiled forward and backward pass of `batch` images.

    Parameters, images and gradients included; the optimizer's moments are not part of it.
    """
    return peak_bytes(training_program(model, batch))


def training_program(model: Any, batch: int) -> Any:
    """The compiled forward and backward pass of `batch` images, without augmentation."""

    def loss(params: dict, stats: dict, images: jax.Array, labels: jax.Array, key: jax.Array):
        logits, stats = model.apply(params, stats, images, train=True, dropout_key=key)
        scores = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)
        return -scores.mean(), stats

    step = jax.jit(jax.grad(loss, has_aux=True))
    labels = jax.ShapeDtypeStruct((batch,), jnp.int32)
    lowered = step.lower(*_shapes(model, batch), labels, jax.eval_shape(jax.random.key, 0))
    return lowered.compile()


def peak_bytes(program: Any) -> int:
    """Arguments, results and what is held between them: no back end reports less than it uses."""
    memory = program.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return int(held + memory.temp_size_in_bytes - memory.alias_size_in_bytes)


def _shapes(model: Any, batch: int) -> tuple[dict, dict, jax.ShapeDtypeStruct]:
    params, stats = jax.eval_shape(model.init, jax.random.key(0))
    size = (batch, *model.config.image_size, model.config.image_channels)
    return params, stats, jax.ShapeDtypeStruct(size, jnp.float32)
