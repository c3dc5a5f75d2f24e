"""Measures speed and memory: the fields of the JSON line of `hsvit benchmark`."""

import statistics
from pathlib import Path
from typing import Any

import jax
import ml_collections

from hsvit_jax import artifacts
from hsvit_jax import config as config_lib
from hsvit_jax.benchmark import jobs, machine
from hsvit_jax.models import costs
from hsvit_jax.train import evaluate


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
    """Returns the fields of the JSON line, from timed steps of one kind of work.

    Args:
        config: the configuration; its train.batch is the batch.
        work: a key of `jobs.JOBS`.
        augmented: False only normalises the images.
        real_data: whether to load the configuration's data set; else images are random.
        trace: folder for a profile of up to three more steps.
        devices: defaults to all of jax's.

    Raises:
        ValueError: configuration, data and devices do not fit together.
    """
    if trace:  # first, as it may fail
        artifacts.make_folder(Path(trace))
    run = jobs.prepare(config, real_data, devices)
    job = jobs.JOBS[work](run, augmented)
    first = jobs.timed(job.take, max(warmup, 1))[0]
    rates = [job.images / seconds for seconds in jobs.timed(job.take, steps)]
    memory = machine.peak_memory()  # before `_performance` adds its own
    device_memory = machine.device_memory(run.mesh.devices.flat)
    if trace:
        with jax.profiler.trace(trace):
            jobs.timed(job.take, min(steps, 3))
    rate = statistics.median(rates)
    seconds = job.compile_seconds
    if seconds is None:  # compiled within its first step
        seconds = max(first - job.images / rate, 0.0)
    return {
        "work": work,
        "batch": config_lib.eval_batch(run.config) if work == "eval" else run.config.train.batch,
        **jobs.summary("images_per_second", rates),
        "steps": steps,
        "images_per_step": job.images,
        "compile_seconds": seconds,
        **_performance(run, work, rate),
        "peak_memory_bytes": memory,
        "device_peak_memory_bytes": device_memory,
        "program": machine.program_record(job.compiled) if job.compiled else None,
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
    """FLOPs of one image, and the rate as a share of the machine's peak."""
    names = ("flops_per_image", "flops_counted_on", "flops_per_second", "share_of_peak", "peak")
    if work == "input":
        return dict.fromkeys(names)
    if work == "train":
        flops = costs.training_flops(run.model)
        program = "forward and backward of one image"
    else:
        image = jax.ShapeDtypeStruct((1, 2, 2, 1), "float32")
        shown = jax.eval_shape(lambda x: evaluate.tta_views(x, run.config.eval.tta), image)
        views = shown.shape[0]
        flops = views * costs.computed_flops(run.model)
        program = "forward of one image"
        program += f", for each of {views} views (eval.tta)" if views > 1 else ""
    peak = machine.measure_peak(run.config.model.dtype)
    # Several CPU devices are slices of the same cores; accelerators add up.
    count = 1 if jax.default_backend() == "cpu" else run.mesh.size
    share = rate * flops / (count * peak["flops_per_second"])
    return dict(zip(names, (flops, program, rate * flops, share, peak), strict=True))
