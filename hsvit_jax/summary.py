"""What a network is made of, and what it costs: `--mode=summary`.

The table counts as the literature does; what a compiled program really computes and holds is asked
of XLA, for the back end at hand. Nothing is computed or allocated: shapes alone are enough.
"""

from typing import Any

import jax
import jax.numpy as jnp
import ml_collections

from hsvit_jax import config as config_lib


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


def summarise(config: ml_collections.ConfigDict, model: Any) -> str:
    """The layer table and the totals of `model` as text, for the training that `config` describes.

    config: resolved (`hsvit_jax.config.resolve`); of it, the batches, `train.ema_decay` and the
    names in `model` are read. Compiles three programs, which takes seconds for a large network.
    """
    count, batch, at_once = parameters(model), config.train.batch, config_lib.eval_batch(config)
    state = 8 * count + (4 * count if config.train.ema_decay else 0)
    image = "×".join(map(str, (*model.config.image_size, model.config.image_channels)))
    paper = model.paper_flops()
    every, cls_only = "", ""
    if model.groups:  # HSViT's last block is computed for less than the literature counts
        every, cls_only = ", every token of the last block", ", the last block for its CLS only"
    ema = f" + {byte_text(4 * count)} moving average" if config.train.ema_decay else ""
    lines = [
        f"{config.model.variant} ({config.model.family}), images {image}, "
        f"{model.config.num_classes} classes",
        "",
        *aligned([("layer", "output shape", "parameters", "FLOPs"), *rows(model)]),
        "",
        f"parameters {count:,}",
        f"FLOPs {flops(model) / 1e9:.4f} G (forward, 2·MAC, one image; convolutions and matrix "
        f"products{every})",
        *([f"FLOPs as the paper counts {paper[0] / 1e9:.4f} G ({paper[1]})"] if paper else []),
        f"compiled FLOPs {compiled_flops(model) / 1e9:.4f} G (forward, one image; XLA's count on "
        f"{jax.default_backend()}{cls_only})",
        f"bytes {byte_text(4 * count)} parameters + {byte_text(8 * count)} AdamW moments{ema}, "
        "float32",
        f"memory {byte_text(training_bytes(model, batch) + state)} training step of {batch} images "
        f"(forward, backward, optimizer's state), {byte_text(forward_bytes(model, at_once))} "
        f"evaluation of {at_once} (peaks of the compiled programs, {model.dtype}, "
        f"{jax.default_backend()}, one device)",
    ]
    return "\n".join(lines)


def aligned(table: list[tuple[str, ...]]) -> list[str]:
    """Columns of equal width: the first to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    rule = "-" * (sum(widths) + 2 * len(widths) - 2)
    lines = [
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in table
    ]
    return [lines[0], rule, *lines[1:]]


def byte_text(count: int) -> str:
    """Binary units, four figures."""
    power = max(p for p in range(5) if p == 0 or count >= 1024**p)
    return f"{count / 1024**power:.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
