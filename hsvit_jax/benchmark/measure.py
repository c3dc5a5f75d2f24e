"""Measures speed and memory: the fields of the JSON line of `hsvit benchmark`.

It times what a run executes, as the trainer and the evaluation compile it.
"""

import statistics
from pathlib import Path
from typing import Any

import jax
import ml_collections

from hsvit_jax import artifacts
from hsvit_jax import config as config_lib
from hsvit_jax.benchmark import jobs, machine
from hsvit_jax.models import costs


def measure(
    config: ml_collections.ConfigDict,
    work: str,
    *,
    steps: int = 10,
    warmup: int = 2,
    augmented: bool = True,
    real_data: bool = False,
    trace: str | None = None,
    devices: list | None = None,
) -> dict:
    """Times steps of one kind of work.

    Args:
        config: as a config file returns it; its train.batch is the batch.
        work: a key of `jobs.JOBS`.
        augmented: False only normalises the images.
        real_data: load the configuration's data set; else random images of its shape.
        trace: folder for a profile of up to three more steps.
        devices: all of jax's when left out.

    Returns:
        the fields of the JSON line.

    Raises:
        ValueError: configuration, data and devices do not fit together.
    """
    if trace:  # before the work, as it may fail
        artifacts.make_folder(Path(trace))
    run = jobs.prepare(config, real_data, devices)
    job = jobs.JOBS[work](run, augmented)
    first = jobs.timed(job.take, max(warmup, 1))[0]
    rates = [job.images / seconds for seconds in jobs.timed(job.take, steps)]
    memory = machine.peak_memory()  # of these steps: the machine's peak is measured below
    device_memory = machine.device_memory(run.mesh.devices.flat)
    if trace:
        with jax.profiler.trace(trace):
            jobs.timed(job.take, min(steps, 3))
    rate = statistics.median(rates)
    compile_seconds = job.compile_seconds
    if compile_seconds is None:  # compiled within its first step
        compile_seconds = max(first - job.images / rate, 0.0)
    return {
        "work": work,
        "batch": config_lib.eval_batch(run.config) if work == "eval" else run.config.train.batch,
        **jobs.summary("images_per_second", rates),
        "steps": steps,
        "images_per_step": job.images,
        "compile_seconds": compile_seconds,
        **_performance(run, work, rate),
        "peak_memory_bytes": memory,
        "device_peak_memory_bytes": device_memory,
        **machine.program_record(job.compiled),
        "mesh": dict(run.mesh.shape),
        "variant": run.config.model.variant,
        "dtype": run.config.model.dtype,
        "image_size": list(run.config.data.image_size),
        "data": run.config.data.name if real_data else "random",
        "augmented": augmented if work in ("train", "input") else None,
        "trace": trace,
        **machine.description(),
    }


def _performance(run: Any, work: str, rate: float) -> dict:
    """FLOPs of one image, and the share of the machine's peak that the rate amounts to."""
    names = ("flops_per_image", "flops_counted_on", "flops_per_second", "share_of_peak", "peak")
    if work == "input":
        return dict.fromkeys(names)
    if work == "train":
        flops = costs.training_flops(run.model)
        program = "forward and backward of one image"
    else:
        views = jobs.views_of_an_image(run.config)
        flops = views * costs.computed_flops(run.model)
        program = "forward of one image"
        program += f", for each of {views} views (eval.tta)" if views > 1 else ""
    peak = machine.measure_peak(run.config.model.dtype)
    # Several CPU devices are slices of the same cores; accelerators add up.
    count = 1 if jax.default_backend() == "cpu" else run.mesh.size
    share = rate * flops / (count * peak["flops_per_second"])
    return dict(zip(names, (flops, program, rate * flops, share, peak), strict=True))
