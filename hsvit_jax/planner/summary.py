"""A network's modules, parameters, FLOPs and memory, as text.

The table counts FLOPs as the literature does; memory is XLA's, for the back end in use. Nothing is
computed: the programs are compiled for shapes.
"""

from typing import Any

import jax
import ml_collections

from hsvit_jax import config as config_lib
from hsvit_jax.artifacts import aligned, byte_text
from hsvit_jax.models import costs


def summarise(config: ml_collections.ConfigDict, model: Any, moments: int) -> str:
    """Formats the modules and the totals of a network; compiles three programs.

    Args:
      config: the resolved configuration.
      moments: bytes that the optimizer keeps.
    """
    count, batch, rows = costs.parameters(model), config.train.batch, costs.modules(model)
    at_once = config_lib.eval_batch(config)
    state = moments + (4 * count if config.train.ema_decay else 0)
    optimizer = {"adamw": "AdamW", "muon": "Muon"}.get(config.optim.name, config.optim.name)
    image = "×".join(map(str, (*model.config.image_size, model.config.image_channels)))
    macs = sum(row[2] for row in rows)
    paper = model.paper_flops(macs)
    computed = costs.computed_flops(model)
    fewer = (
        f", of which {computed / 1e9:.4f} G are computed (no logit depends on the rest)"
        if computed < 2 * macs
        else ""
    )
    ema = f" + {byte_text(4 * count)} moving average" if config.train.ema_decay else ""
    lines = [
        f"{config.model.variant} ({config.model.family}), images {image}, "
        f"{model.config.num_classes} classes",
        "",
        *aligned(
            [("module", "parameters", "FLOPs")]
            + [(path, f"{values:,}", f"{2 * n:,}") for path, values, n in rows]
        ),
        "",
        f"parameters {count:,}",
        f"FLOPs {2 * macs / 1e9:.4f} G (forward, 2·MAC, one image; convolutions and "
        f"matrix products){fewer}",
        *([f"FLOPs as the paper counts {paper[0] / 1e9:.4f} G ({paper[1]})"] if paper else []),
        f"bytes {byte_text(4 * count)} parameters + {byte_text(moments)} {optimizer} moments{ema}, "
        "float32",
        f"memory {byte_text(costs.training_bytes(model, batch) + state)} training step of {batch} "
        "images (forward, backward, optimizer's state), "
        f"{byte_text(costs.forward_bytes(model, at_once))} evaluation of {at_once} (peaks of the "
        f"compiled programs, {model.dtype}, {jax.default_backend()}, one device)",
    ]
    return "\n".join(lines)
