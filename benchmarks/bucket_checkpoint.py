"""Measures a checkpoint in an object store: bytes, requests, and seconds until disk and store.

    python benchmarks/bucket_checkpoint.py gs://BUCKET/PREFIX c4a8 vit:l-patch16

For each network (32×32 pixels, recipe `strong`) it saves the state of a run twice
and prints a row of a Markdown table. The emulator of tests/support/hosts.py serves where
STORAGE_EMULATOR_HOST names it.
"""

import sys
import time
from typing import Any

import jax
import numpy as np

import hsvit_jax
from hsvit_jax import checkpoint, storage
from hsvit_jax.train import optim


def counted(store: Any) -> list[str]:
    """Returns the list to which a file system of gcsfs or s3fs adds each request from now on."""
    name = "_request" if hasattr(store, "_request") else "_call_s3"
    inner, seen = getattr(store, name), []

    async def request(*args: Any, **kwargs: Any) -> Any:
        seen.append(str(args[0]))
        return await inner(*args, **kwargs)

    setattr(store, name, request)
    return seen


def state_of(words: str) -> dict:
    """Draws arrays of the shapes of a run's parameters, statistics and moments."""
    settings = hsvit_jax.get_config("c4a8:cifar10,strong").optim
    model = hsvit_jax.build_model(words, image_size=32, channels=3, num_classes=10)
    params, stats = model.init_shapes()
    moments = jax.eval_shape(optim.build(settings, lambda step: 0.0, model).init, params)
    leaves = {str(i): leaf for i, leaf in enumerate(jax.tree.leaves(moments))}
    draw = np.random.default_rng(0)
    shapes = {"params": params, "stats": stats, "opt": leaves}
    return jax.tree.map(lambda x: draw.standard_normal(x.shape, np.float32), shapes)


def main() -> None:
    url, *networks = sys.argv[1:]
    print("| network | bytes | requests | s until disk | s until the store |")
    print("|---|---:|---:|---:|---:|")
    for number, words in enumerate(networks):
        state = state_of(words)
        size = sum(x.nbytes for x in jax.tree.leaves(state))
        mirror = storage.Mirror(f"{url}/{number}")
        seen = counted(mirror._store)
        with mirror.owned():
            saves = checkpoint.Checkpoints(mirror.folder / "checkpoints", keep_latest=1)
            for step in (1, 2):
                before, begun = len(seen), time.monotonic()
                saves.save(step, state, {})
                saves._finish()
                on_disk = time.monotonic() - begun
                saves.wait()
                in_store = time.monotonic() - begun
            saves.close()
        print(
            f"| {words} | {size / 1e6:,.0f} MB | {len(seen) - before} | {on_disk:.1f} "
            f"| {in_store:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
