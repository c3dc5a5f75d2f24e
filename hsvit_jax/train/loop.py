"""The loop over steps: data in, metrics out, evaluation and checkpoints at epoch ends."""

import collections
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import ml_collections
import numpy as np
from jax.sharding import Mesh

from hsvit_jax import checkpoint, data
from hsvit_jax import config as config_lib
from hsvit_jax import mesh as mesh_lib
from hsvit_jax.runtime import coordination, signals
from hsvit_jax.runtime import watchdog as watchdog_lib
from hsvit_jax.runtime.signals import Diverged
from hsvit_jax.train import evaluate as evaluate_lib
from hsvit_jax.train import memory, metrics, optim
from hsvit_jax.train import step as step_lib

# Steps in flight: enough to keep the devices busy, few enough for CPU collectives not to starve.
_WINDOW = 4


def _start_together(step: Any, config: ml_collections.ConfigDict, seconds: float) -> Callable:
    """A jitted step, compiled for its first arguments and refused where its memory is not there;
    no process runs it before all are there.

    Gloo gives up when the first collective of some processes is 30 s ahead of the others'. seconds:
    how long the others are waited for.
    """
    compiled: list[Callable] = []

    def run(*args: Any) -> Any:
        if not compiled:
            program = step.lower(*args).compile()
            memory.check_step(program, config)
            compiled.append(program)
            coordination.barrier("compiled", seconds)
        return compiled[0](*args)

    return run


@dataclasses.dataclass
class Run:
    """Everything that stands before the first step, built once: shared by training and tests."""

    config: ml_collections.ConfigDict
    dataset: data.Dataset
    model: Any
    mesh: Mesh
    steps_per_epoch: int
    total_steps: int
    make_state: Callable[..., dict]

    @property
    def meta(self) -> dict:
        """Metadata of a checkpoint, for a resumed run to agree with and for eval and predict."""
        shapes = jax.eval_shape(self.make_state)
        return {
            "config": self.config.to_dict(),
            "class_names": list(self.dataset.info.class_names),
            "fingerprint": self.dataset.fingerprint,
            "shapes": _shapes({"params": shapes["params"], "stats": shapes["stats"]}),
        }


def _shapes(tree: dict) -> dict[str, list[int]]:
    """'params.head.linear.kernel' → its shape, for a readable difference."""
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {".".join(str(k.key) for k in path): list(leaf.shape) for path, leaf in flat}


class Loop:
    """The loop over steps: data in, metrics out, evaluation and checkpoints at epoch ends."""

    wait_for_others = 3600.0  # seconds, once a process has compiled the step

    def __init__(
        self,
        run: Run,
        checkpoints: checkpoint.Checkpoints,
        log: metrics.MetricLog,
        bar: metrics.Progress,
        stop: signals.StopRequests,
        watchdog: watchdog_lib.Watchdog,
    ) -> None:
        self.r, self.checkpoints, self.log, self.bar, self.stop = run, checkpoints, log, bar, stop
        self.watchdog = watchdog
        config = run.config
        schedule = optim.schedule(config.optim, run.total_steps, run.steps_per_epoch)
        self.schedule = jax.jit(schedule)  # one program, not one for each of its operations
        self.meta = run.meta
        self.evaluator = self.make_evaluator()
        self.remarks: dict[str, Any] = {}  # said in every line of the metrics
        self.pending: collections.deque = collections.deque()
        self.marks: tuple[float, int] = (0.0, 0)

    def make_evaluator(self) -> Callable[..., evaluate_lib.Evaluation]:
        """The evaluation of this run's network on its mesh."""
        run, config = self.r, self.r.config
        return evaluate_lib.make_evaluator(
            run.model,
            run.mesh,
            mean=tuple(config.data.mean),
            std=tuple(config.data.std),
            num_classes=config.data.num_classes,
            aggregate=config.mesh.aggregate,
        )

    def run(self, state: dict) -> dict:
        """Takes the remaining steps."""
        run = self.r
        number = int(state["step"])
        take = self.taker(state)
        self.marks, first = (time.monotonic(), number), number + 1
        if number == run.total_steps == 0 and not self.checkpoints.steps():
            self.end_epoch(state, number)  # no step was asked for: the fresh network is the result
        while True:
            signum = self.stop.due()
            if signum is not None:
                self.drain()
                self.save(state, number, None, wait=True)
                raise signals.Interrupted(signum, number)
            if number >= run.total_steps:
                return state
            state, values = take(state, number)
            number += 1
            self.pending.append((number, values))
            if len(self.pending) > _WINDOW or number == first:
                self._settle()
            if number == first:  # what follows is not slowed down by compiling
                self.marks = (time.monotonic(), number)
            if number == run.total_steps or number % run.steps_per_epoch == 0:
                self.drain()
                self.end_epoch(state, number)

    def taker(self, state: dict, *, donate: bool = True) -> Callable:
        """(state, number) → (state, values): the jitted step, with the batch of that number."""
        run, config = self.r, self.r.config
        tx = optim.build(config.optim, run.total_steps, run.steps_per_epoch)
        pure = step_lib.make_train_step(
            run.model,
            tx,
            step_lib.augment_settings(config),
            run.mesh,
            seed=config.seed,
            steps_per_epoch=run.steps_per_epoch,
            log_every=config.train.log_every,
            ema_decay=config.train.ema_decay,
            aggregate=config.mesh.aggregate,
            gradients=config.mesh.gradients,
        )
        jitted = step_lib.jit_step(pure, state, run.mesh, run.model, donate=donate)
        train_step = _start_together(jitted, config, self.wait_for_others)
        batch_of = self._resident() if run.dataset.resident else self._streamed(int(state["step"]))
        return lambda state, number: train_step(state, batch_of(number))

    def _resident(self) -> Callable[[int], step_lib.Batch]:
        """Step number → its batch, of a data set that lies whole on every device."""
        run = self.r
        gather = step_lib.make_gather(run.mesh, run.config.train.batch)
        images = mesh_lib.put_replicated(run.mesh, run.dataset.train.images)
        labels = mesh_lib.put_replicated(run.mesh, run.dataset.train.labels)
        order_of = step_lib.make_epoch_order(len(run.dataset.train), run.config.seed)
        orders: dict[int, jax.Array] = {}

        def batch_of(number: int) -> step_lib.Batch:
            epoch, place = divmod(number, run.steps_per_epoch)
            if epoch not in orders:
                orders.clear()
                orders[epoch] = mesh_lib.put_replicated(run.mesh, np.asarray(order_of(epoch)))
            return gather(images, labels, orders[epoch], place * run.config.train.batch)

        return batch_of

    def _streamed(self, first: int) -> Callable[[int], step_lib.Batch]:
        """Step number, from `first` on and in turn → its batch, decoded on the host."""
        from hsvit_jax.data import stream

        run = self.r
        order_of = step_lib.make_epoch_order(len(run.dataset.train), run.config.seed)
        size = run.config.train.batch
        here = mesh_lib.local_rows(run.mesh, size)  # other rows are other processes' to read

        def batches() -> Iterator[np.ndarray]:
            epoch, order = -1, np.empty(0, np.int32)
            for number in range(first, run.total_steps):
                now, place = divmod(number, run.steps_per_epoch)
                if now != epoch:
                    epoch, order = now, np.asarray(order_of(now))
                yield order[place * size : (place + 1) * size][here]

        source = iter(stream.stream_batches(run.dataset.train, batches()))

        return lambda _: tuple(mesh_lib.put_rows(run.mesh, a, size) for a in next(source))

    def _settle(self) -> None:
        """Waits for the oldest step in flight and looks at it."""
        number, values = self.pending.popleft()
        train = self.r.config.train
        bad = int(values["bad"])
        self.watchdog.heartbeat(f"step {number}")
        if bad >= train.bad_steps_limit:
            self.checkpoints.wait()
            kept = max(self.checkpoints.steps(), default=None)
            saved = "nothing was saved before" if kept is None else f"step {kept} is kept"
            raise Diverged(
                f"loss or gradient was not finite for {bad} steps in a row, up to step {number}; "
                f"none of them was applied, and {saved}. A lower optim.learning_rate, a smaller "
                "optim.clip_norm or float32 may help."
            )
        if number % train.log_every and number != self.r.total_steps:
            return
        got = jax.device_get(values)
        now, (since, before) = time.monotonic(), self.marks
        self.marks = (now, number)
        pace = (number - before) / max(now - since, 1e-9)
        epoch = (number - 1) // self.r.steps_per_epoch
        line = {
            "epoch": epoch,
            "loss": float(got["loss"]),
            "accuracy": float(got["accuracy"]),
            # A skipped step does not move the schedule on.
            "learning_rate": float(self.schedule(max(number - 1 - int(got["skipped"]), 0))),
            "grad_norm": float(got["grad_norm"]),
            "images_per_second": pace * train.batch,
            "skipped_steps": int(got["skipped"]),
        }
        self.log.write(number, line | self.remarks)
        left = (self.r.total_steps - number) / max(pace, 1e-9)
        self.bar.update(number, epoch, {**line, "seconds_left": left})

    def drain(self) -> None:
        """Looks at every step in flight."""
        while self.pending:
            self._settle()

    def end_epoch(self, state: dict, number: int) -> None:
        """Evaluates and saves where the configuration asks for it, and always at the very end."""
        train, last = self.r.config.train, number == self.r.total_steps
        epochs = number // self.r.steps_per_epoch
        metric = None
        split = train.select_on
        if (last or epochs % train.eval_every == 0) and len(getattr(self.r.dataset, split)):
            result = self.evaluate(state, split)
            self.log_eval(number, split, result)
            metric = result.accuracy if math.isfinite(result.loss) else math.nan
        if last or epochs % self.r.config.checkpoint.every == 0 or metric is not None:
            self.save(state, number, metric, wait=last)
        self.marks = (time.monotonic(), number)

    def evaluate(
        self, state: dict, split: str, before_batch: Callable[[], None] = lambda: None
    ) -> evaluate_lib.Evaluation:
        """Evaluates a split of the run's data."""
        params, stats = step_lib.averaged(state)
        part = getattr(self.r.dataset, split)
        batch = config_lib.eval_batch(self.r.config)
        seen = itertools.count()

        def before() -> None:
            self.watchdog.heartbeat(f"a batch of the {split} split", slow=next(seen) == 0)
            before_batch()

        result = self.evaluator(params, stats, part, batch, before)
        self.watchdog.heartbeat(f"the evaluation on the {split} split")
        return result

    def log_eval(self, step: int, split: str, result: evaluate_lib.Evaluation) -> None:
        """Writes an evaluation's line to the metrics, and says it."""
        values = {"split": split, "loss": result.loss, "accuracy": result.accuracy}
        values |= {"top5": result.top5, "examples": result.examples}
        self.log.write(step, values | self.remarks)
        self.bar.say(
            f"step {step:,}  {split} accuracy {result.accuracy:.2%}  loss {result.loss:.4f}"
        )

    def give_up(self) -> None:
        """Ends the evaluations after the last step when asked to: everything is saved by then."""
        signum = self.stop.due()
        if signum is not None:
            raise signals.Interrupted(signum, self.r.total_steps)

    def save(self, state: dict, number: int, metric: float | None, *, wait: bool) -> None:
        """Saves the state as step `number`."""
        self.watchdog.heartbeat(f"the start of saving step {number}")
        plain = step_lib.to_plain(state)
        self.checkpoints.save(number, plain, self.meta, metric=metric, wait=wait)
        self.watchdog.heartbeat(f"saving step {number}")
