"""Compiles a step for absent TPUs: memory, traffic, estimated cycles.

    JAX_PLATFORMS=cpu PYTHONPATH=tests python benchmarks/tpu_step.py v5e:2x2 c4a8 train.batch=512

libtpu (the extra `tpu`) compiles for any topology without one. What it says is an estimate of its
own scheduler; it has not been compared with a TPU's clock.
"""

import argparse
import importlib.metadata
import json
import os
from typing import Any

import jax
import ml_collections
import numpy as np
from jax.experimental import topologies
from support import hlo

from hsvit_jax import config as config_lib
from hsvit_jax import mesh as mesh_lib
from hsvit_jax.benchmark import jobs
from hsvit_jax.ops import conv
from hsvit_jax.train import evaluate, step
from hsvit_jax.weights.stored import averaged


def devices(topology: str) -> list:
    """Returns the devices of a topology such as 'v5e:2x2', to compile for.

    Raises:
        ValueError: libtpu is not installed, or does not know the topology.
    """
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no metadata server to ask
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # no chip is used
    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)
    except Exception as error:  # jax and libtpu raise several kinds
        raise ValueError(
            f"cannot compile for {topology!r}: {' '.join(str(error).split())}. Expected a topology "
            "such as v5e:2x2, v4:2x2x1 or v6e:4x4, and libtpu: pip install 'hsvit_jax[tpu]'"
        ) from error


def measure(
    config: ml_collections.ConfigDict, work: str, topology: str, *, augmented: bool = True
) -> dict[str, Any]:
    """Compiles a step for a slice of TPUs; nothing runs.

    Args:
        config: as a config file returns it; its train.batch is the batch of all chips.
        work: 'train', the training step, or 'infer', the evaluation forward.
        topology: see `devices`.
        augmented: False only normalises the images.

    Returns:
        the fields of the JSON line; memory, traffic and cycles are those of one device.

    Raises:
        ValueError: another work, or configuration and topology do not fit together.
    """
    if work not in ("train", "infer"):
        raise ValueError(f"work={work!r} is not one program: choose train or infer for a topology")
    with conv.traced_for("tpu"):
        run = jobs.prepare(config, False, devices(topology))
        settings, mesh = run.config, run.mesh
        rows = mesh_lib.batch_sharding(mesh)
        shape = (settings.train.batch, *run.dataset.train.images.shape[1:])
        images = jax.ShapeDtypeStruct(shape, np.uint8, sharding=rows)
        state = step.from_plain(step.state_template(run), run.state_shape)
        if work == "train":
            number = jax.ShapeDtypeStruct(shape[:1], np.int32, sharding=rows)
            function = step.jit_step(run, jobs.augmentation(run, augmented))
            arguments = state, (images, number, number)
        else:
            function = evaluate.make_forward(run.model, mesh, settings, settings.mesh.aggregate)
            arguments = *averaged(state), images
        compiled, seconds = jobs.compile(function, *arguments)
    text, memory = compiled.as_text(), compiled.memory_analysis()
    transfers = hlo.count(text, mesh.shape[mesh_lib.GROUP])[1]
    return {
        "topology": topology,
        "work": work,
        "batch": settings.train.batch,
        "mesh": dict(mesh.shape),
        "estimated_cycles": hlo.cycles(text),
        "argument_bytes": memory.argument_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "code_bytes": memory.generated_code_size_in_bytes,
        "transfers": {f"{axis} {kind}": size for (axis, kind), size in sorted(transfers.items())},
        "compile_seconds": seconds,
        "variant": settings.model.variant,
        "dtype": settings.model.dtype,
        "image_size": list(settings.data.image_size),
        "augmented": augmented if work == "train" else None,
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "libtpu")},
    }


def main() -> None:
    """Prints the record as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("topology", help="such as v5e:2x2")
    parser.add_argument("spec", help="a configuration, as --config takes it")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--work", choices=("train", "infer"), default="train")
    given = parser.parse_args()
    config = config_lib.get_config(given.spec, *given.settings)
    print(json.dumps(measure(config, given.work, given.topology)))


if __name__ == "__main__":
    main()
