"""Times the parts of an HSViT's training step, each alone, on one device.

python benchmarks/step_parts.py c2a2:cifar10 train.batch=128
"""

import argparse
import functools
import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax

from hsvit_jax import artifacts
from hsvit_jax import config as config_lib
from hsvit_jax.benchmark import jobs, machine
from hsvit_jax.models.network import GroupShard
from hsvit_jax.ops.max_pool import max_pool
from hsvit_jax.train import batches, step


def measure_parts(
    config: ml_collections.ConfigDict, *, steps: int = 10, warmup: int = 2
) -> dict[str, Any]:
    """Times the parts of a training step, each as a program of its own, on one device.

    They do not add up exactly: alone, a part is not fused with its neighbours, and it reads from
    memory what the step would have had in cache.

    Args:
        config: as a config file returns it; its train.batch is the batch.
        steps, warmup: runs of each part that are timed, and those before them.

    Returns:
        the fields of the JSON line.

    Raises:
        ValueError: the configuration cannot be trained, is not HSViT's, or has towers or a sharded
            trunk.
    """
    config = config.copy_and_resolve_references()
    config.mesh.group = config.mesh.data = 1
    sizes = config.model
    if sizes.family != "hsvit":
        raise ValueError(f"the parts are those of an hsvit, not of {sizes.family}")
    if sizes.get("towers", 1) > 1 or sizes.get("trunk", "replicated") != "replicated":
        raise ValueError(
            "one trunk that all groups share is cut: set model.towers=1 and "
            "model.trunk='replicated'"
        )
    run = jobs.prepare(config, False, jax.devices()[:1])
    parts = {"whole step": jobs.train_job(run, True).take, **_part_functions(run)}
    record = {}
    for name, take in parts.items():
        jobs.timed(take, warmup)
        times = [1000 * seconds for seconds in jobs.timed(take, steps)]
        record[name] = jobs.summary("milliseconds", times, "spread")
    return {
        "batch": config.train.batch,
        "steps": steps,
        "parts": record,
        "note": "each part timed alone, as its own program: parts do not add up exactly",
        "variant": config.model.variant,
        "dtype": config.model.dtype,
        **machine.description(),
    }


def _part_functions(run: Any) -> dict[str, Callable[[], Any]]:
    """Builds the functions that run one part each, by the part's name."""
    model, batch = run.model, run.config.train.batch
    state = step.first_state(run)
    params, key = state["params"], jax.random.key(0)
    size = (batch, *model.config.image_size, model.config.image_channels)
    images, ids = _normal(size), jnp.arange(batch)
    rest = (params, state["stats"], images, key, ids)

    def logits(part: dict, cut: GroupShard, rest: tuple[Any, ...]) -> Any:
        params, stats, images, key, ids = rest
        return model.apply(
            {**params, **part},
            stats,
            images,
            train=True,
            dropout_key=key,
            example_ids_B=ids,
            shard=cut,
        )[0]

    class Cut(GroupShard):
        """Records and replaces tokens and CLS sums, so a part's neighbours are dead code."""

        def __init__(self, tokens: Any = None, total: Callable[[Any, Any], Any] | None = None):
            self.tokens, self.total = tokens, total

        def slice(self, x: Any, axis: int) -> Any:
            if axis == 0:
                return x
            shapes["tokens"] = self.recorded = x
            return x if self.tokens is None else self.tokens

        def sum(self, x_GBD: Any) -> Any:
            shapes["cls"] = x_GBD.sum(0)
            cls = shapes["cls"]
            return cls if self.total is None else self.total(self.recorded, cls)

    shapes = {}
    jax.eval_shape(lambda rest: logits({}, Cut(), rest), rest)
    given = {name: _normal(x.shape, x.dtype) for name, x in shapes.items()}

    def trunk(inputs: tuple[dict], *rest: Any) -> Any:
        return logits(*inputs, Cut(total=lambda tokens, _: tokens.sum((1, 2))), rest)

    def groups(inputs: tuple[dict, Any], *rest: Any) -> Any:
        return logits(inputs[0], Cut(tokens=inputs[1]), rest)

    def head(inputs: tuple[dict, Any], *rest: Any) -> Any:
        return logits(inputs[0], Cut(total=lambda *_: inputs[1]), rest)

    def pooling(maps: list, *_: Any) -> list:
        return [max_pool(x, *pool) for x, pool in zip(maps, pools, strict=True)]

    maps, pools = _pooled_maps(model, batch)
    pieces = {}
    if "trunk" in params:
        pieces["trunk"] = (trunk, ({"trunk": params["trunk"]},))
    if maps:
        pieces["pooling"] = (pooling, maps)
    if given:
        pieces["attention groups"] = (groups, ({"groups": params["groups"]}, given["tokens"]))
        pieces["head"] = (head, ({"head": params["head"]}, given["cls"]))
    parts: dict[str, Callable[[], Any]] = {}
    for name, (function, inputs) in pieces.items():
        both = jax.jit(jax.value_and_grad(functools.partial(_mean_square, function)))
        parts[f"{name}, forward"] = functools.partial(jax.jit(function), inputs, *rest)
        parts[f"{name}, forward and backward"] = functools.partial(both, inputs, *rest)
    parts["augmentation"] = jobs.input_job(run, True).take

    def update(trained: tuple[Any, Any], gradient: Any) -> tuple[Any, Any]:
        updates, moments = run.tx.update(gradient, trained[1], trained[0])
        return optax.apply_updates(trained[0], updates), moments

    def nothing(state: dict, *_: Any) -> dict:
        return jax.lax.optimization_barrier(state)  # or jax would not even call the program

    parts["optimizer"] = _carrying(update, (params, state["opt"]), params)
    parts["dispatch of an empty step"] = _carrying(nothing, state, next(batches.resident(run, 0)))
    return parts


def _mean_square(function: Callable[..., Any], *args: Any) -> Any:
    """Returns a number to differentiate that depends on all outputs of a part."""
    outputs = jax.tree.leaves(function(*args))
    return sum(jnp.square(x.astype(jnp.float32)).mean() for x in outputs)


def _normal(shape: tuple[int, ...], dtype: Any = "float32") -> Any:
    """Returns random values without compiling a program."""
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape, np.float32), dtype)


def _pooled_maps(model: Any, batch: int) -> tuple[list, list[tuple[int, int]]]:
    """Returns random maps of the pooled sizes, each with its (window, stride)."""
    sizes = model.config
    (rows, columns), maps, pools = sizes.image_size, [], []
    if sizes.convolves:
        blocks = (sizes.conv_channels, sizes.conv_kernels, sizes.pool_strides)
        for channels, window, stride in zip(*blocks, strict=True):
            if stride > 1:
                shape = (batch, rows, columns, channels)
                maps.append(_normal(shape, model.dtype))
                pools.append((window, stride))
            rows, columns = -(-rows // stride), -(-columns // stride)
    return maps, pools


def _carrying(function: Callable[..., Any], carried: Any, *args: Any) -> Callable[[], Any]:
    """Builds a step `carried = function(carried, *args)` that donates its own copy of `carried`."""
    jitted = jax.jit(function, donate_argnums=0, keep_unused=True)
    carried = jax.tree.map(lambda x: x.copy(), carried)

    def take() -> Any:
        nonlocal carried
        carried = jitted(carried, *args)
        return carried

    return take


def table(record: dict) -> str:
    """Formats the parts as text, each with its share of the whole step."""
    times = {name: part["milliseconds"] for name, part in record["parts"].items()}
    columns = {
        "part": str,
        "median, ms": lambda name: f"{times[name]:.2f}",
        "share": lambda name: f"{times[name] / times['whole step']:.1%}",
    }
    return "\n".join([*artifacts.aligned(artifacts.table(columns, times)), record["note"]])


def main() -> None:
    """Prints the record as JSON, and the table on standard error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("spec", help="a configuration, as --config takes it")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=2)
    given = parser.parse_args()
    config = config_lib.get_config(given.spec, *given.settings)
    record = measure_parts(config, steps=given.steps, warmup=given.warmup)
    print(table(record), file=sys.stderr)
    print(json.dumps(record))


if __name__ == "__main__":
    main()
