"""Speed and memory, measured: `python -m hsvit_jax.benchmark`, one JSON line on standard output.

What is timed is what a run executes: the training step as the trainer compiles it, the evaluation
forward, the evaluator, the batch of a step, decoding it from files. Every step is waited for before
the next is given.
`--vs` alternates with another program, `--parts` times the parts of a step, `--peak` the machine.
"""

import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from hsvit_jax import host

if __name__ == "__main__":
    host.use_huge_pages()
host.prepare()  # before anything imports jax

import ml_collections  # noqa: E402
from absl import flags  # noqa: E402

from hsvit_jax import configfile  # noqa: E402

WORKS = ("train", "infer", "input", "eval")

USAGE = """usage: python -m hsvit_jax.benchmark --config=FILE[:DATA,RECIPE,SWITCHES] [--work=WORK]

  python -m hsvit_jax.benchmark --config=configs/c2a2.py --batch=128 --work=train
  python -m hsvit_jax.benchmark --config=configs/c2a2.py --vs='COMMAND THAT PRINTS A JSON LINE'
  python -m hsvit_jax.benchmark --config=configs/c2a2.py --batch=128 --parts
  python -m hsvit_jax.benchmark --config=configs/backbone.py:folder=PATH,paper --work=decode
  python -m hsvit_jax.benchmark --peak
All flags: python -m hsvit_jax.benchmark --help"""

# Sides of the square product and batches of the convolution that show a machine's peak.
_PEAK_SIZES = {"cpu": (2048, 32)}
_PEAK_SIZES_ACCELERATOR = (8192, 512)

# The unit of `ru_maxrss`, in bytes.
_RSS_UNIT = 1 if sys.platform == "darwin" else 1024


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns its exit code; user mistakes are told in one line."""
    argv = list(sys.argv if argv is None else argv)
    values = _flags()
    if "--help" in argv:
        print(f"{USAGE}\n{values.get_help()}")
        return 0
    settings = [w.removeprefix("--config.") for w in argv if w.startswith("--config.")]
    try:
        rest = values([w for w in argv if not w.startswith("--config.")])[1:]
    except flags.Error as error:
        return _fail(str(error), 2)
    modes = [name for name in ("vs", "parts", "peak") if values[name].value]
    if rest or len(modes) > 1 or (values.config is None and modes != ["peak"]):
        return _fail(
            f"unexpected words {rest}: flags are --name=value"
            if rest
            else f"choose one of {', '.join('--' + m for m in modes)}"
            if len(modes) > 1
            else USAGE,
            2,
        )
    if values.trace and modes not in ([], ["vs"]):
        return _fail(f"--trace follows the steps of --work; leave out --{modes[0]}", 2)
    if values.work == "decode" and (values.trace or values.parts):
        return _fail("--work=decode runs no program: leave out --trace and --parts", 2)
    try:
        record = _record(values, settings, argv, modes)
    except Mistake as error:
        return _fail(str(error), 1)
    print(json.dumps(record), flush=True)
    return 0


class Mistake(ValueError):
    """A request that cannot be measured, told to the user in one line."""


def _fail(text: str, code: int) -> int:
    print(text, file=sys.stderr, flush=True)
    return code


def _flags() -> flags.FlagValues:
    """Flags of their own, so that importing this module beside the command line is harmless."""
    values = flags.FlagValues()
    own = {"flag_values": values}
    flags.DEFINE_string("config", None, "Configuration, FILE[:DATA,...]; also --config.KEY.", **own)
    flags.DEFINE_enum("work", "train", (*WORKS, "decode"), "What to time.", **own)
    flags.DEFINE_integer("batch", None, "Images per step.", lower_bound=1, **own)
    flags.DEFINE_integer("steps", 10, "Steps that are timed.", lower_bound=1, **own)
    flags.DEFINE_integer("warmup", 2, "Steps before them.", lower_bound=1, **own)
    flags.DEFINE_bool("no_augment", False, "train, input: only normalise the images.", **own)
    flags.DEFINE_bool("data", False, "The config's data set, not random images.", **own)
    flags.DEFINE_string("trace", None, "Write a profile of a few more steps here.", **own)
    flags.DEFINE_bool("parts", False, "Time the parts of a training step.", **own)
    flags.DEFINE_bool("peak", False, "Time a large product and convolution, no more.", **own)
    flags.DEFINE_string("vs", None, "Shell command to alternate with.", **own)
    flags.DEFINE_integer("rounds", 5, "--vs: runs of each.", lower_bound=1, **own)
    return values


def _record(
    values: flags.FlagValues, settings: list[str], argv: list[str], modes: list[str]
) -> dict:
    if modes == ["vs"]:  # an empty --vs after the first one makes the command an ordinary run
        ours = [sys.executable, "-m", "hsvit_jax.benchmark", *argv[1:], "--vs="]
        return compare(ours, values.vs, values.rounds)
    if modes == ["peak"]:
        return {"peak": measure_peak("float32"), **_machine()}
    if values.batch:
        settings = [*settings, f"train.batch={values.batch}"]
    try:
        config = configfile.get_config(values.config, *settings)
    except ValueError as error:
        raise Mistake(str(error)) from error
    timing = {"steps": values.steps, "warmup": values.warmup}
    if modes == ["parts"]:
        record = measure_parts(config, **timing)
        print(_table(record), file=sys.stderr, flush=True)
    elif values.work == "decode":
        record = measure_decoding(config, **timing)
    else:
        record = measure(
            config,
            values.work,
            augmented=not values.no_augment,
            real_data=values.data,
            trace=values.trace,
            **timing,
        )
    return {"config": values.config, **record}


# --- One kind of work ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Job:
    """One step of some work, ready to be taken again and again."""

    take: Callable[[], Any]
    images: int  # per step
    compiled: Any = None  # the program, where there is one that can be had
    compile_seconds: float | None = None


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
    """Times `steps` steps of one of `WORKS` and returns what the JSON line holds.

    config: as a config file returns it; its train.batch is the batch. augmented: False only
    normalises. real_data: load the configuration's data set; else random images of its shape.
    trace: folder for a profile of up to three more steps. devices: all of jax's when left out.

    Raises `Mistake` (a ValueError) for a configuration, data and devices that do not fit together.
    """
    import jax

    if work not in WORKS:
        raise Mistake(f"unknown work {work!r}; choose one of {', '.join(WORKS)}")
    run = prepare(config, real_data, devices)
    job = _JOBS[work](run, augmented)
    started = time.perf_counter()
    jax.block_until_ready(job.take())
    first = time.perf_counter() - started
    for _ in range(warmup - 1):
        jax.block_until_ready(job.take())
    rates = [job.images / seconds for seconds in _seconds(job.take, steps)]
    memory = _peak_memory()
    if trace:
        with jax.profiler.trace(trace):
            _seconds(job.take, min(steps, 3))
    rate, shape = statistics.median(rates), dict(run.mesh.shape)
    compile_seconds = job.compile_seconds
    if compile_seconds is None:  # compiled within its first step
        compile_seconds = max(first - job.images / rate, 0.0)
    record = {
        "work": work,
        "batch": run.config.train.batch,
        "images_per_second": rate,
        "images_per_second_spread": _spread(rates),
        "steps": steps,
        "images_per_step": job.images,
        "compile_seconds": compile_seconds,
        **_performance(run, work, rate),
        "peak_memory_bytes": memory,
        "device_peak_memory_bytes": _device_memory(run.mesh.devices.flat),
        **_program(job.compiled),
        "mesh": shape,
        "variant": run.config.model.variant,
        "dtype": run.config.model.dtype,
        "image_size": list(run.config.data.image_size),
        "data": run.config.data.name if real_data else "random",
        "augmented": augmented if work in ("train", "input") else None,
        "trace": trace,
    }
    return {**record, **_machine()}


def measure_decoding(
    config: ml_collections.ConfigDict, *, steps: int = 10, warmup: int = 2
) -> dict[str, Any]:
    """Times how image files become batches on the host: see `decode_speed.measure`.

    Raises `Mistake` for a data set that has no files to decode.
    """
    from hsvit_jax import decode_speed

    try:
        speed = decode_speed.measure(config, steps=steps, warmup=warmup)
    except ValueError as error:
        raise Mistake(str(error)) from error
    return {
        "work": "decode",
        "batch": config.train.batch,
        "images_per_second": statistics.median(speed.images_per_second),
        "images_per_second_spread": _spread(speed.images_per_second),
        "images_per_cpu_second": speed.images_per_cpu_second,
        "steps": steps,
        "peak_memory_bytes": _peak_memory(),
        "image_size": list(speed.image_size),
        "data": config.data.name,
        **_machine(),
    }


def prepare(config: ml_collections.ConfigDict, real_data: bool, devices: list | None) -> Any:
    """Everything before the first step, by the trainer's own hands: its `Run`.

    real_data: the configuration's, rather than random images of its shape. Raises `Mistake` for
    what cannot be trained, or does not fit in memory.
    """
    from hsvit_jax import train

    try:
        dataset = train.load_data(config) if real_data else _random_dataset(config)
        run = train.prepare(config, dataset=dataset, devices=devices)
    except ValueError as error:
        raise Mistake(str(error)) from error
    if not run.dataset.resident:
        raise Mistake(
            f"{run.config.data.name} does not fit in memory, and reading it from disk is not what "
            "is timed here: leave out --data for random images of its shape"
        )
    return run


def _random_dataset(config: ml_collections.ConfigDict) -> Any:
    """Eight batches of random images with the shape and classes of the configuration's data."""
    import numpy as np

    from hsvit_jax import config as config_lib
    from hsvit_jax import data

    info = data.describe(config.data.name, config.data.dir or None)
    resolved = config_lib.resolve(config, info)
    shape = (8 * resolved.train.batch, *resolved.data.image_size, resolved.data.channels)
    rng = np.random.default_rng(0)
    split = data.Split(
        rng.integers(info.num_classes, size=shape[0], dtype=np.int32),
        rng.integers(256, size=shape, dtype=np.uint8),
        None,
    )
    info = info.with_shape(shape[1:3], shape[3])
    return data.Dataset(info, split, split, split, fingerprint="random")


def _compile(function: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    """A jitted function, compiled for these arguments, and the seconds that took."""
    with host.compiling():
        started = time.perf_counter()
        compiled = function.lower(*args).compile()
        seconds = time.perf_counter() - started
    return compiled, seconds


def _settings(run: Any, augmented: bool) -> Any:
    from hsvit_jax import augment, step

    full = step.augment_settings(run.config)
    return full if augmented else augment.Augment(full.mean, full.std, full.num_classes)


def _batches(run: Any) -> tuple[tuple[Any, ...], Callable[[], Any]]:
    """(images, labels, order) on the devices, and a function that says where the next batch is."""
    import itertools

    import jax.numpy as jnp
    import numpy as np

    from hsvit_jax import mesh, step

    split = run.dataset.train
    order = np.asarray(step.make_epoch_order(len(split), run.config.seed)(0))
    resident = tuple(mesh.put_replicated(run.mesh, a) for a in (split.images, split.labels, order))
    places = itertools.cycle(range(run.steps_per_epoch))
    return resident, lambda: jnp.int32(next(places) * run.config.train.batch)


def train_job(run: Any, augmented: bool) -> Job:
    """The trainer's step, its batch taken from a data set on the devices."""
    from hsvit_jax import optim, step

    config = run.config
    pure = step.make_train_step(
        run.model,
        optim.build(config.optim, run.total_steps, run.steps_per_epoch),
        _settings(run, augmented),
        run.mesh,
        seed=config.seed,
        steps_per_epoch=run.steps_per_epoch,
        log_every=config.train.log_every,
        ema_decay=config.train.ema_decay,
        aggregate=config.mesh.aggregate,
        gradients=config.mesh.gradients,
    )
    state = step.place_state(run.make_state, run.mesh, run.model)
    resident, place = _batches(run)
    jitted, _ = step.compile_step(pure, state, run.mesh, config.train.batch, run.model)
    compiled, seconds = _compile(jitted, state, *resident, place())

    def take() -> Any:
        nonlocal state
        state, values = compiled(state, *resident, place())
        return state, values

    return Job(take, config.train.batch, compiled, seconds)


def _input_job(run: Any, augmented: bool) -> Job:
    """A step's batch alone: gathered from the data on the devices, and augmented."""
    import jax

    from hsvit_jax import augment, mesh, step

    settings, batch = _settings(run, augmented), run.config.train.batch
    over_data = mesh.batch_sharding(run.mesh)

    @jax.jit
    def draw(images: Any, labels: Any, order: Any, place: Any, key: Any) -> Any:
        ids_B = jax.lax.dynamic_slice(order, (place,), (batch,))
        ids_B = jax.lax.with_sharding_constraint(ids_B, over_data)
        keys = jax.random.split(jax.random.fold_in(key, place))
        return augment.train_batch(settings, *keys, images[ids_B], labels[ids_B], ids_B)

    key = step.run_key(run.config.seed, 0)
    resident, place = _batches(run)
    compiled, seconds = _compile(draw, *resident, place(), key)
    return Job(lambda: compiled(*resident, place(), key), batch, compiled, seconds)


def _infer_job(run: Any, _: bool) -> Job:
    """The evaluation forward, on a batch that lies on the devices."""
    from hsvit_jax import evaluate, mesh, step

    data, batch = run.config.data, run.config.train.batch
    forward = evaluate.make_forward(run.model, run.mesh, tuple(data.mean), tuple(data.std))
    params, stats = step.averaged(step.place_state(run.make_state, run.mesh, run.model))
    images = mesh.put_batch(run.mesh, run.dataset.train.images[:batch])
    compiled, seconds = _compile(forward, params, stats, images)
    return Job(lambda: compiled(params, stats, images), batch, compiled, seconds)


def _eval_job(run: Any, _: bool) -> Job:
    """A whole evaluation of the test split, from host arrays to counts."""
    from hsvit_jax import evaluate, step

    data = run.config.data
    evaluator = evaluate.make_evaluator(
        run.model,
        run.mesh,
        mean=tuple(data.mean),
        std=tuple(data.std),
        num_classes=data.num_classes,
    )
    params, stats = step.averaged(step.place_state(run.make_state, run.mesh, run.model))
    split, batch = run.dataset.test, run.config.train.batch
    return Job(lambda: evaluator(params, stats, split, batch).loss, len(split))


_JOBS = {"train": train_job, "infer": _infer_job, "input": _input_job, "eval": _eval_job}


def _seconds(take: Callable[[], Any], steps: int) -> list[float]:
    """Wall-clock seconds of each step, waited for."""
    import jax

    times = []
    for _ in range(steps):
        started = time.perf_counter()
        jax.block_until_ready(take())
        times.append(time.perf_counter() - started)
    return times


def _spread(values: list[float]) -> dict[str, float]:
    quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values
    return {
        "min": min(values),
        "quartile1": quartiles[0],
        "quartile3": quartiles[-1],
        "max": max(values),
    }


# --- Arithmetic and memory -----------------------------------------------------------------------


def _performance(run: Any, work: str, rate: float) -> dict:
    """FLOPs of one image, and the share of the machine's peak that the rate amounts to."""
    import jax

    from hsvit_jax import summary

    names = ("flops_per_image", "flops_counted_on", "flops_per_second", "share_of_peak", "peak")
    if work == "input":
        return dict.fromkeys(names)
    if work == "train":
        flops = training_flops(run.model)
        program = "forward and backward of one image, compiled for one device"
    else:
        flops = summary.compiled_flops(run.model)
        program = "forward of one image, compiled for one device"
    peak = measure_peak(run.config.model.dtype)
    # Several CPU devices are slices of the same cores; accelerators add up.
    count = 1 if jax.default_backend() == "cpu" else run.mesh.size
    share = rate * flops / (count * peak["flops_per_second"])
    return dict(zip(names, (flops, program, rate * flops, share, peak), strict=True))


def training_flops(model: Any) -> float:
    """FLOPs of one image forward and backward, as XLA counts them for the back end at hand.

    Counted on a program for one image: XLA counts the body of a loop once however often it runs,
    and with one image the loop of the kernels' gradient runs once. No augmentation or optimizer.
    """
    import jax
    import jax.numpy as jnp

    from hsvit_jax import mesh as mesh_lib

    def loss(params: dict, stats: dict, images: Any, key: Any) -> tuple[Any, dict]:
        logits, stats = model.apply(params, stats, images, train=True, dropout_key=key)
        return -jax.nn.log_softmax(logits)[:, 0].mean(), stats

    params, stats = jax.eval_shape(model.init, jax.random.key(0))
    size = (1, *model.config.image_size, model.config.image_channels)
    images = jax.ShapeDtypeStruct(size, jnp.float32)
    once = mesh_lib.compiler_options(runs=False)
    step = jax.jit(jax.grad(loss, has_aux=True), compiler_options=once)
    compiled, _ = _compile(step, params, stats, images, jax.eval_shape(jax.random.key, 0))
    return float(compiled.cost_analysis()["flops"])


def measure_peak(dtype: str, repeats: int = 5) -> dict:
    """The most FLOP/s that one device does here: a square product, and a 3×3 convolution.

    dtype: 'float32' or 'bfloat16'; the best of `repeats` runs of each, at jax's default precision.
    """
    import jax
    import jax.numpy as jnp

    from hsvit_jax.models import direct

    side, batch = _PEAK_SIZES.get(jax.default_backend(), _PEAK_SIZES_ACCELERATOR)
    square = jnp.ones((side, side), dtype)
    maps, kernel = jnp.ones((batch, 32, 32, 128), dtype), jnp.ones((3, 3, 128, 128), dtype)
    best = {}
    for name, function, args, flops in (
        ("matmul", jnp.matmul, (square, square), 2 * side**3),
        ("convolution", direct.conv2d_xla, (maps, kernel), 2 * maps.size * kernel.size // 128),
    ):
        take = functools.partial(jax.jit(function), *args)
        jax.block_until_ready(take())
        best[f"{name}_flops_per_second"] = flops / min(_seconds(take, repeats))
    return {"flops_per_second": max(best.values()), **best, "dtype": dtype}


def _program(compiled: Any) -> dict:
    """What XLA says of the program that was timed, per device; a loop's body is counted once."""
    if compiled is None:
        return {"program": None}
    cost, memory = compiled.cost_analysis(), compiled.memory_analysis()
    return {
        "program": {
            "flops": cost.get("flops"),
            "bytes_accessed": cost.get("bytes accessed"),
            "temp_bytes": memory.temp_size_in_bytes,
            "argument_bytes": memory.argument_size_in_bytes,
        }
    }


def _peak_memory() -> int:
    """Most bytes of memory this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT


def _device_memory(devices: Any) -> int | None:
    """Most bytes held on any of the accelerators; None for CPUs."""
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in devices]
    return None if None in peaks else max(peaks)


def _machine() -> dict:
    import jax

    version = importlib.metadata.version
    return {
        "devices": [d.device_kind for d in jax.devices()],
        "backend": jax.default_backend(),
        "cpu_cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "versions": {
            "jax": version("jax"),
            "jaxlib": version("jaxlib"),
            "python": platform.python_version(),
        },
    }


# --- Parts of a step -----------------------------------------------------------------------------


def measure_parts(
    config: ml_collections.ConfigDict, *, steps: int = 10, warmup: int = 2
) -> dict[str, Any]:
    """Times the parts of a training step, each as a program of its own, on one device.

    They do not add up exactly: alone, a part is not fused with its neighbours, and it reads from
    memory what the step would have had in cache. Raises `Mistake` as `measure` does.
    """
    import jax

    config = config.copy_and_resolve_references()
    config.mesh.group = config.mesh.data = 1
    if config.model.family != "hsvit":
        raise Mistake(f"--parts cuts hsvit apart, not {config.model.family}: leave it out")
    run = prepare(config, False, jax.devices()[:1])
    parts = {"whole step": train_job(run, True).take, **_part_functions(run)}
    record = {}
    for name, take in parts.items():
        for _ in range(warmup):
            jax.block_until_ready(take())
        times = [1000 * seconds for seconds in _seconds(take, steps)]
        record[name] = {"milliseconds": statistics.median(times), "spread": _spread(times)}
    return {
        "batch": config.train.batch,
        "steps": steps,
        "parts": record,
        "note": "each part timed alone, as its own program: parts do not add up exactly",
        "variant": config.model.variant,
        "dtype": config.model.dtype,
        **_machine(),
    }


def _part_functions(run: Any) -> dict[str, Callable[[], Any]]:
    """Name → a function that runs that part once.

    Trunk, groups and head are cut apart by a `Share`, which stands between them: what a part does
    not need is dead code to the compiler. A part's own arguments, the ones that its gradient is
    taken for, are the first: its parameters, and the activations it is given.
    """
    import jax
    import jax.numpy as jnp
    import optax

    from hsvit_jax import optim, step
    from hsvit_jax.models.network import Share
    from hsvit_jax.models.pooling import max_pool

    model, batch = run.model, run.config.train.batch
    state = step.place_state(run.make_state, run.mesh, run.model)
    params, key = state["params"], jax.random.key(0)
    size = (batch, *model.config.image_size, model.config.image_channels)
    images, ids = _normal(size), jnp.arange(batch)
    rest = (params, state["stats"], images, key, ids)

    def logits(own: dict, cut: Share, rest: tuple[Any, ...]) -> Any:
        params, stats, images, key, ids = rest
        return model.apply(
            {**params, **own},
            stats,
            images,
            train=True,
            dropout_key=key,
            example_ids_B=ids,
            share=cut,
        )[0]

    class Cut(Share):
        """Notes what passes; gives tokens or CLS sums other than those that come."""

        def __init__(self, tokens: Any = None, total: Callable[[Any, Any], Any] | None = None):
            self.tokens, self.sum = tokens, total

        def take(self, x: Any, axis: int) -> Any:
            if axis == 0:
                return x
            shapes["tokens"] = self.seen = x
            return x if self.tokens is None else self.tokens

        def total(self, x_GBD: Any) -> Any:
            shapes["cls"] = x_GBD.sum(0)
            return shapes["cls"] if self.sum is None else self.sum(self.seen, shapes["cls"])

    shapes = {}
    jax.eval_shape(lambda rest: logits({}, Cut(), rest), rest)
    given = {name: _normal(x.shape, x.dtype) for name, x in shapes.items()}

    def trunk(own: tuple[dict], *rest: Any) -> Any:
        return logits(*own, Cut(total=lambda tokens, _: tokens.sum((1, 2))), rest)

    def groups(own: tuple[dict, Any], *rest: Any) -> Any:
        return logits(own[0], Cut(tokens=own[1]), rest)

    def head(own: tuple[dict, Any], *rest: Any) -> Any:
        return logits(own[0], Cut(total=lambda *_: own[1]), rest)

    def pooling(maps: list, *_: Any) -> list:
        return [max_pool(x, *pool) for x, pool in zip(maps, pools, strict=True)]

    maps, pools = _pooled_maps(model, batch)
    timed = {}
    if "trunk" in params:
        timed["trunk"] = (trunk, ({"trunk": params["trunk"]},))
    if maps:
        timed["pooling"] = (pooling, maps)
    if given:
        timed["attention groups"] = (groups, ({"groups": params["groups"]}, given["tokens"]))
        timed["head"] = (head, ({"head": params["head"]}, given["cls"]))
    parts: dict[str, Callable[[], Any]] = {}
    for name, (function, own) in timed.items():
        both = jax.jit(jax.value_and_grad(functools.partial(_mean_square, function)))
        parts[f"{name}, forward"] = functools.partial(jax.jit(function), own, *rest)
        parts[f"{name}, forward and backward"] = functools.partial(both, own, *rest)
    parts["augmentation"] = _input_job(run, True).take

    tx = optim.build(run.config.optim, run.total_steps, run.steps_per_epoch)

    def update(trained: tuple[Any, Any], gradient: Any) -> tuple[Any, Any]:
        updates, moments = tx.update(gradient, trained[1], trained[0])
        return optax.apply_updates(trained[0], updates), moments

    def nothing(state: dict, *_: Any) -> dict:
        return jax.lax.optimization_barrier(state)  # or jax would not even call the program

    parts["optimizer"] = _carrying(update, (params, state["opt"]), params)
    parts["dispatch of an empty step"] = _carrying(nothing, state, *_batches(run)[0])
    return parts


def _mean_square(function: Callable[..., Any], *args: Any) -> Any:
    """A number to take the gradient of, that depends on everything a part computes."""
    import jax
    import jax.numpy as jnp

    outputs = jax.tree.leaves(function(*args))
    return sum(jnp.square(x.astype(jnp.float32)).mean() for x in outputs)


def _normal(shape: tuple[int, ...], dtype: Any = "float32") -> Any:
    """Random values that no program had to be compiled for."""
    import jax.numpy as jnp
    import numpy as np

    return jnp.asarray(np.random.default_rng(0).standard_normal(shape, np.float32), dtype)


def _pooled_maps(model: Any, batch: int) -> tuple[list, list[tuple[int, int]]]:
    """The feature maps that are pooled, at random, and each one's (window, stride)."""
    sizes = model.config
    (rows, columns), maps, pools = sizes.image_size, [], []
    if sizes.convolution:
        blocks = (sizes.conv_channels, sizes.conv_kernels, sizes.pool_strides)
        for channels, window, stride in zip(*blocks, strict=True):
            if stride > 1:
                shape = (batch, rows, columns, channels)
                maps.append(_normal(shape, model.dtype))
                pools.append((window, stride))
            rows, columns = rows // stride, columns // stride
    return maps, pools


def _carrying(function: Callable[..., Any], carried: Any, *args: Any) -> Callable[[], Any]:
    """Runs function(carried, *args) → carried again and again, its own copy of it donated."""
    import jax

    jitted = jax.jit(function, donate_argnums=0, keep_unused=True)
    carried = jax.tree.map(lambda x: x.copy(), carried)

    def take() -> Any:
        nonlocal carried
        carried = jitted(carried, *args)
        return carried

    return take


def _table(record: dict) -> str:
    """The parts as text, each with its share of the whole step."""
    parts = record["parts"]
    whole, width = parts["whole step"]["milliseconds"], max(map(len, parts))
    lines = [
        f"{name:<{width}}  {part['milliseconds']:>10.2f}  {part['milliseconds'] / whole:>6.1%}"
        for name, part in parts.items()
    ]
    head = f"{'part':<{width}}  {'median, ms':>10}  {'share':>6}"
    return "\n".join([head, "-" * len(head), *lines, record["note"]])


# --- Against another program ---------------------------------------------------------------------


def compare(ours: list[str], theirs: str, rounds: int) -> dict:
    """Runs the words `ours` and the shell command `theirs` in turn, and pairs their results.

    Each run is a process of its own that prints a JSON line with `images_per_second`. `ratio` is
    the median over rounds of ours/theirs, each pair measured one after the other. Raises `Mistake`
    with the end of its standard error for a command that fails or prints no such line.
    """
    runs: dict[str, list[dict]] = {"ours": [], "theirs": []}
    for _ in range(rounds):
        runs["ours"].append(_run(ours, "our own run"))
        runs["theirs"].append(_run(theirs, "the command of --vs"))
    rates = {who: [r["images_per_second"] for r in records] for who, records in runs.items()}
    ratios = [a / b for a, b in zip(rates["ours"], rates["theirs"], strict=True)]
    memory = {who: max(r["peak_memory_bytes"] for r in records) for who, records in runs.items()}
    return {
        "ratio": statistics.median(ratios),
        "ratio_spread": _spread(ratios),
        "ratios": ratios,
        "memory_ratio": memory["ours"] / memory["theirs"],
        "rounds": rounds,
        "vs": theirs,
        **{
            who: {
                "images_per_second": statistics.median(rates[who]),
                "images_per_second_spread": _spread(rates[who]),
                "peak_memory_bytes": memory[who],
                "runs": rates[who],
                "last": runs[who][-1],
            }
            for who in runs
        },
    }


def _run(command: list[str] | str, what: str) -> dict:
    """The JSON line that a command prints, with `peak_memory_bytes` of its largest process.

    A command that knows its own memory, as ours does, is believed: it can leave out what came after
    the timed steps. Output goes through files, because `wait4` must be the one to reap the process.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        shell = isinstance(command, str)
        process = subprocess.Popen(command, shell=shell, stdout=out, stderr=err)
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            process.kill()
            raise
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        printed, said = (stream.read().decode("utf-8", "replace") for stream in (out, err))
    record = next(filter(None, map(_parse, reversed(printed.splitlines()))), None)
    if process.returncode or record is None:
        why = (
            f"failed with code {process.returncode}"
            if process.returncode
            else ("printed no JSON line with a positive images_per_second")
        )
        tail = "\n".join(said.strip().splitlines()[-10:]) or "(nothing on standard error)"
        raise Mistake(f"{what} {why}; its last words:\n{tail}")
    return {"peak_memory_bytes": usage.ru_maxrss * _RSS_UNIT, **record}


def _parse(line: str) -> dict | None:
    """A JSON object with a positive `images_per_second`, or None."""
    with contextlib.suppress(ValueError):
        record = json.loads(line)
        rate = record.get("images_per_second") if isinstance(record, dict) else None
        if type(rate) in (int, float) and 0 < rate < float("inf"):
            return record
    return None


if __name__ == "__main__":
    sys.exit(main())
