"""The loop over steps: data in, metrics out, evaluation and checkpoints at epoch ends."""

import collections
import contextlib
import dataclasses
import datetime
import functools
import itertools
import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from hsvit_jax import checkpoint, tasks
from hsvit_jax import config as config_lib
from hsvit_jax.config import recipes
from hsvit_jax.models import costs
from hsvit_jax.runtime import compile_cache, coordination, memory, signals
from hsvit_jax.runtime import watchdog as watchdog_lib
from hsvit_jax.train import batches, metrics, resume
from hsvit_jax.train import evaluate as evaluate_lib
from hsvit_jax.train import step as step_lib
from hsvit_jax.train.run_spec import Run
from hsvit_jax.weights.stored import averaged

# Seconds of a run on a CPU from which cheaper ways are printed.
_LONG = 1800.0
# Views of an image by eval.tta.
_VIEWS = {"none": 1, "flip": 2, "shift": 10}


class Callback:
    """Receives a run's figures and may act; a subclass overrides the methods that it needs.

    What it asks for happens at the end of the epoch, on all processes, and is saved: a resumed run
    has the same bits, if the callback's own counts allow it.
    """

    _loop: "Loop"

    def on_step(self, step: int, figures: dict[str, float]) -> dict[str, float] | None:
        """Runs after each training step, with its grad_norm, and the means of loss and accuracy
        (label_accuracy, mae) since the last logged step (train.log_every). Returns values for the
        log's line of this step, if there is one."""

    def on_evaluation(
        self, step: int, split: str, result: evaluate_lib.Evaluation
    ) -> dict[str, float] | None:
        """Runs after each evaluation of a split. Returns values for its line in the log."""

    def on_end(self, result: Any) -> None:
        """Runs after the run, with its `Result`, before `fit` writes the report."""

    def stop(self) -> None:
        """Ends the run after this epoch, evaluated and saved."""
        self._loop.ask(1.0, True)

    def scale_rate(self, factor: float) -> None:
        """Multiplies the learning rate by a factor after this epoch; the step compiles anew."""
        self._loop.ask(factor, False)


class Loop:
    """Takes a run's steps; logs metrics, evaluates and saves at epoch ends."""

    donate = True  # whether the step reuses the state's buffers
    in_flight = 4  # steps: enough to keep devices busy, few enough not to starve CPU collectives
    wait_for_others = 3600.0  # seconds after a process has compiled the step
    agreement = contextlib.nullcontext  # the context of each step and of each epoch's end
    callbacks_act = True  # process 0 decides for all
    after_first: Callable[[], None] | None = None  # draws the first batch, once it is trained on

    def __init__(
        self,
        run: Run,
        checkpoints: checkpoint.Checkpoints,
        log: metrics.MetricLog,
        bar: metrics.Progress,
        stop: signals.StopRequests,
        watchdog: watchdog_lib.Watchdog,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.run, self.checkpoints, self.log, self.bar, self.stop = run, checkpoints, log, bar, stop
        self.watchdog, self.callbacks = watchdog, callbacks
        self.schedule = jax.jit(run.schedule)  # one program rather than one per operation
        self.selects_on, self.figure = config_lib.selection(run.config)
        self.task = tasks.of(run.config)
        self.meta, self.asked = run.meta, run.asked
        if self.callbacks_act:  # only process 0 has them
            self.callbacks_act = bool(coordination.from_lead("yes" if callbacks else ""))
        for callback in callbacks:
            callback._loop = self
        self.evaluator = self.make_evaluator()
        self.evaluated: set[str] = set()  # splits with a compiled program
        self.state: dict = {}
        self.remarks: dict[str, Any] = {}  # added to every line of the metrics
        self.pending: collections.deque = collections.deque()  # [step, figures, time of its end]
        self.since, self.timed = (0.0, 0), False  # (time, step) that the pace counts from
        self.first = 0  # first step of this start
        self.closed: int | None = None  # last step whose epoch has ended

    def make_evaluator(self, lost: Sequence[int] = ()) -> Callable[..., evaluate_lib.Evaluation]:
        """Builds the evaluation on this mesh, without the votes of `lost` groups or towers."""
        run, config, votes_G = self.run, self.run.config, None
        if lost:
            votes_G = np.zeros(run.model.config.groups, np.float32)
            votes_G[run.model.without(lost).group_ids()] = 1
        network = (run.model, run.mesh, config, config.mesh.aggregate)
        return evaluate_lib.make_evaluator(*network, votes_G)

    def take_steps(self, state: dict) -> dict:
        """Takes the remaining steps and returns the last state."""
        run, number, train_step = self.run, int(state["step"]), None
        source, self.first = batches.source(run, number), number + 1
        self.state = state
        self.mark(number)
        if self.closed is None:
            fresh = not run.total_steps and not self.checkpoints.steps()
            self.closed = -1 if fresh else number  # a run of no steps evaluates the fresh network
        while True:
            epoch_ends = run.position(number) % run.steps_per_epoch == 0
            epoch_ends = epoch_ends or number == run.total_steps
            if epoch_ends and number > self.closed:
                self.drain()
                with self.agreement():
                    self.end_epoch(number)
            if epoch_ends and (self.asked[1] or self.out_of_patience(number)):
                return self.state
            self.checkpoints.check()
            signum = self.stop.due()
            if signum is not None:
                self.drain()
                with self.agreement():
                    self.save(number, None, wait=True)
                raise signals.Interrupted(signum, number)
            if number >= run.total_steps:
                return self.state
            self.unfreeze(number)
            if self.run is not run:  # another rate, or other frozen parts
                run, train_step = self.run, None
            with self.agreement():
                batch = next(source)
                if train_step is None:
                    train_step = self.compile(batch)
                    self.mark(number)
                state, values = train_step(self.state, batch, *self.run.lessons)
            self.state, number = state, number + 1
            self.pending.append([number, values, None])
            for step in self.pending:
                if step[2] is None and step[1]["loss"].is_ready():
                    step[2] = time.monotonic()
            if len(self.pending) > self.in_flight or number == self.first:
                self.process_oldest_step()
            if number == self.first:  # the first step is slower than the others
                if self.after_first:
                    self.after_first()
                self.mark(number)

    def unfreeze(self, number: int) -> None:
        """Makes frozen parts train from epoch init.unfreeze_after on, all with fresh moments."""
        run, epochs = self.run, self.run.config.init.unfreeze_after
        begins = epochs * run.steps_per_epoch
        if epochs and run.model.frozen and run.position(number) >= begins:
            self.run = dataclasses.replace(run, model=run.model.unfrozen())
            if run.position(number) == begins:
                self.state = step_lib.restarted(self.run, self.state)
            self.bar.say(f"all parts train from step {number + 1:,} on")

    def ask(self, factor: float, stop: bool) -> None:
        """Notes what a callback asks for, until the end of the epoch."""
        before, stopped = self.asked
        self._follow(self.run.rate, before * factor, stopped or stop)

    def _follow(self, rate: float, factor: float, stop: bool) -> None:
        self.asked, self.meta["callbacks"] = (factor, stop), [rate, factor, stop]
        if rate != self.run.rate:
            self.run = dataclasses.replace(self.run, rate=rate).shifted(self.run.offset)
            self.schedule = jax.jit(self.run.schedule)

    def obey(self) -> None:
        """Takes up what the callbacks of process 0 asked for, on all processes."""
        factor, stop = self.asked
        if self.callbacks_act:
            factor, stop = json.loads(coordination.from_lead(json.dumps(self.asked)))
        self._follow(self.run.rate * factor, 1.0, stop)

    def compile(self, batch: step_lib.Batch) -> Callable[..., tuple[dict, dict]]:
        """Compiles the train step; returns once all processes have.

        Gloo aborts if some processes reach a collective 30 s before the others.
        """
        self.bar.phase("the training step", compiling=True)
        self.watchdog.heartbeat("the start of compiling the training step", slow=True)
        begun, jitted = time.monotonic(), step_lib.jit_step(self.run, donate=self.donate)
        with compile_cache.quiet():
            compiled = jitted.lower(self.state, batch, *self.run.lessons).compile()
        seconds = time.monotonic() - begun
        self.bar.say(f"compiled in {seconds:.0f} s" if seconds >= 1 else "compiled in under 1 s")
        memory.check_step(compiled, self.run.config, len(self.run.mesh.local_devices))
        coordination.barrier("compiled", self.wait_for_others)
        return compiled

    def process_oldest_step(self) -> None:
        """Waits for the oldest step in flight, checks it, and logs it if a line is due."""
        number, values, done = self.pending.popleft()
        train = self.run.config.train
        bad = int(values["bad"])  # waits for the step
        done = done or time.monotonic()
        self.watchdog.heartbeat(f"step {number}")
        self.bar.advance(number)
        if bad >= train.bad_steps_limit:
            self.checkpoints.wait()
            kept = max(self.checkpoints.steps(), default=None)
            saved = "nothing was saved before" if kept is None else f"step {kept} is kept"
            raise signals.Diverged(
                f"loss or gradient was not finite for {bad} steps in a row, up to step {number}; "
                f"none of them was applied, and {saved}: lower optim.learning_rate or "
                "optim.clip_norm, or use float32"
            )
        own, names = dict[str, Any](), ("loss", self.task.step_figure, "grad_norm")
        for callback in self.callbacks:
            own |= callback.on_step(number, {name: float(values[name]) for name in names}) or {}
        since, before = self.since
        pace = (number - before) / max(done - since, 1e-9)
        if not self.timed and (number >= self.first + 3 or done - since > 10):
            self.report_time(self.run.total_steps - number, 1 / pace)
        if number % train.log_every and number != self.run.total_steps:
            return
        values = jax.device_get(values)
        epoch = self.run.position(number - 1) // self.run.steps_per_epoch
        line = {
            "epoch": epoch,
            "loss": float(values["loss"]),
            self.task.step_figure: float(values[self.task.step_figure]),
            # A skipped step does not advance the schedule.
            "learning_rate": float(self.schedule(max(number - 1 - int(values["skipped"]), 0))),
            "grad_norm": float(values["grad_norm"]),
            "images_per_second": pace * train.batch,
            "skipped_steps": int(values["skipped"]),
        }
        self.log.write(number, line | self.remarks | own)
        left = (self.run.total_steps - number) / max(pace, 1e-9)
        self.bar.update(number, {**line, "seconds_left": left})

    def mark(self, number: int) -> None:
        """Starts the clock of the pace after step `number`."""
        self.since = time.monotonic(), number

    def report_time(self, steps: int, seconds_each: float) -> None:
        """Prints how long the run will take, and cheaper ways if that is long on a CPU."""
        run, self.timed = self.run, True
        evaluated = len(getattr(run.dataset, self.selects_on))
        epochs = 1 + steps / (run.steps_per_epoch * run.config.train.eval_every)
        # An image's forward pass is a third of its training.
        steps_more = epochs * evaluated * _VIEWS[run.config.eval.tta] / (3 * run.config.train.batch)
        about = datetime.timedelta(seconds=round((steps + steps_more) * seconds_each))
        self.bar.say(f"about {about} for the {steps:,} steps to go, with their evaluations")
        slow = about.total_seconds() > _LONG and jax.default_backend() == "cpu"
        if slow and (ways := _cheaper(run)):
            self.bar.say(f"cheaper: {'; '.join(ways)}")

    def drain(self) -> None:
        """Processes every step in flight."""
        while self.pending:
            self.process_oldest_step()

    def end_epoch(self, number: int) -> None:
        """Evaluates and saves in the configured epochs, and at the very end."""
        self.obey()
        run, metric = self.run, None
        last = number == run.total_steps or self.asked[1]
        epochs, split = run.position(number) // run.steps_per_epoch, self.selects_on
        due = last or epochs % run.config.train.eval_every == 0
        if due and len(getattr(run.dataset, split)):
            result = self.evaluate(self.state, split)
            self.log_eval(number, split, result)
            if self.figure:
                metric = result.figures[self.figure] if math.isfinite(result.loss) else math.nan
        self.obey()
        last = last or self.asked[1]
        if last or epochs % run.config.checkpoint.every == 0 or metric is not None:
            self.save(number, metric, wait=last)
        self.closed = number
        self.mark(number)

    def out_of_patience(self, number: int) -> bool:
        """Whether none of the last train.patience evaluations beat an earlier one."""
        patience = self.run.config.train.patience
        if not patience or number >= self.run.total_steps:
            return False
        found = self.log.evaluations(self.selects_on, self.figure)
        best = coordination.from_lead(metrics.best_before_patience_ended(found, patience))
        if best:
            self.bar.say(
                f"ended after step {number:,}: none of the last {patience} evaluations was "
                f"better than that of step {int(best):,} (train.patience)"
            )
        return bool(best)

    def evaluate(
        self, state: dict, split: str, before_batch: Callable[[], None] = lambda: None
    ) -> evaluate_lib.Evaluation:
        """Evaluates a split of the run's data."""
        params, stats = averaged(state)
        part = getattr(self.run.dataset, split)
        batch = config_lib.eval_batch(self.run.config)
        seen, fresh = itertools.count(), split not in self.evaluated
        self.bar.phase(f"evaluation on {split}", compiling=fresh)
        self.evaluated.add(split)

        def before() -> None:
            self.watchdog.heartbeat(f"a batch of the {split} split", slow=next(seen) == 0)
            before_batch()

        with compile_cache.quiet() if fresh else contextlib.nullcontext():
            result = self.evaluator(params, stats, part, batch, before)
        self.watchdog.heartbeat(f"the evaluation on the {split} split")
        return result

    def log_eval(self, step: int, split: str, result: evaluate_lib.Evaluation) -> None:
        """Writes an evaluation's line to the metrics, and prints it."""
        own: dict[str, Any] = {}
        for callback in self.callbacks:
            own |= callback.on_evaluation(step, split, result) or {}
        self.log.write(step, {"split": split, **result.figures, **self.remarks, **own})
        if self.figure and split == self.selects_on and math.isfinite(result.loss):
            best = -math.inf if self.bar.best is None else self.bar.best
            self.bar.best = max(result.figures[self.figure], best)
        self.bar.say(f"step {step:,}  {split} {result}  loss {result.loss:.4f}")

    def conclude(
        self, state: dict, evaluate_test: bool = True
    ) -> tuple[int, dict, evaluate_lib.Evaluation | None, evaluate_lib.Evaluation | None]:
        """Returns the best step, its state, and its evaluations on the validation and test splits.

        A request to stop ends this at once, as everything is saved.
        """
        best_step = int(state["step"])
        if not self.run.model.lost:  # with losses the best checkpoint is another network's
            best_step, state, lost = resume.best(self.run, self.checkpoints, state)
            if lost:
                names = ", ".join(map(str, lost))
                self.bar.say(f"step {best_step} is evaluated without the lost groups {names}")
                self.evaluator, self.remarks = self.make_evaluator(lost), {"lost_groups": lost}
        give_up = functools.partial(self.stop.check, int(self.state["step"]))
        has_val = len(self.run.dataset.val)
        validation = self.evaluate(state, "val", give_up) if has_val else None
        test = None
        if evaluate_test:
            test = self.evaluate(state, "test", give_up)
            self.log_eval(best_step, "test", test)
        return best_step, state, validation, test

    def save(self, number: int, metric: float | None, *, wait: bool) -> None:
        """Saves the state as step `number`."""
        self.log.check()
        self.watchdog.heartbeat(f"the start of saving step {number}")
        plain = step_lib.to_plain(self.state)
        self.checkpoints.save(number, plain, self.meta, metric=metric, wait=wait)
        self.watchdog.heartbeat(f"saving step {number}")


def _cheaper(run: Run) -> list[str]:
    """Lists what shortens a run, with its factor: smaller images, a shorter recipe."""
    config, ways = run.config, []
    size = tuple(side // 2 for side in config.data.image_size)
    if not config.init["from"] and min(size) >= 32:
        smaller = config.copy_and_resolve_references().unlock()
        smaller.data.image_size = size
        with contextlib.suppress(ValueError):  # the network may not fit such images
            other = costs.multiply_adds(config_lib.build_model(smaller))
            factor = costs.multiply_adds(run.model) / other
            value = ",".join(map(str, size))
            ways.append(f"--config.data.image_size={value} ({factor:.2g} times fewer FLOPs)")
    fast = recipes.values("fast", config.model, config.data.name)["train.epochs"]
    factor = run.total_steps / run.steps_per_epoch / fast
    if factor > 1.5:
        ways.append(f"the recipe fast, after the colon ({factor:.2g} times fewer epochs)")
    return ways
