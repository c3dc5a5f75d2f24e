"""A run that survives a lost process with the remaining attention groups or towers.

A network's answer is an average of votes, and everything else is whole on every device. So nothing
has to be fetched from anywhere: survivors relabel what they hold as a smaller network on a smaller
mesh, and train on.

Limits. It rests on jax's experimental `live_devices`, and process 0 must live. All devices are on
the group axis (mesh.data=1), and the trunk is replicated or there are towers. Each step waits for
all processes to agree that it was taken, and keeps the state before it, so a step costs a round
trip and a second copy of the state. A checkpoint written after a loss has the lost groups fresh, as
at the start of training: once all processes are back, a new start continues with all groups.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator

import jax
import numpy as np
from jax.experimental import multihost_utils

from hsvit_jax import checkpoint
from hsvit_jax import mesh as mesh_lib
from hsvit_jax.runtime import coordination
from hsvit_jax.text import few
from hsvit_jax.train import resume
from hsvit_jax.train import step as step_lib
from hsvit_jax.train.loop import Loop
from hsvit_jax.train.run_spec import Run


def check(run: Run) -> None:
    """Raises ValueError for a run that could not continue without one of its processes."""
    if run.mesh.shape[mesh_lib.DATA] > 1:
        raise ValueError(
            f"--recoverable needs all devices on the group axis, but mesh.data is "
            f"{run.mesh.shape[mesh_lib.DATA]}: set mesh.data=1 and mesh.group=-1"
        )
    if run.model.group_axis_limit < 2:
        raise ValueError("--recoverable needs at least two attention groups or towers to lose one")
    if run.config.train.patience:
        raise ValueError(
            "--recoverable does not go with train.patience, for which all processes must agree: "
            "set train.patience=0"
        )
    if run.config.init.teacher:
        raise ValueError(
            "--recoverable does not go with init.teacher, which lies on all devices: remove one"
        )
    run.model.without([0])  # says itself what cannot be lost


def shrink(run: Run, lost: Collection[jax.Device]) -> Run:
    """Returns the run on the devices that are left, with a network without the others' parts."""
    devices = list(run.mesh.devices.flat)
    parts = np.split(np.asarray(run.model.surviving()), len(devices))
    gone = [n for device, own in zip(devices, parts, strict=True) if device in lost for n in own]
    left = [device for device in devices if device not in lost]
    model = run.model.without([int(number) for number in gone])
    mesh = mesh_lib.make(len(left), 1, groups=model.group_axis_limit, devices=left)
    return dataclasses.replace(run, model=model, mesh=mesh)


class RecoverableLoop(Loop):
    """The loop over steps, each taken by all processes that are left, or by none of them."""

    donate, in_flight = False, 0  # a step that is not taken leaves the state before it
    wait_for_others = 60.0  # jax's barrier waits for a lost process too, as it might come back
    callbacks_act = False  # to agree, processes would wait for a lost one

    def ask(self, factor: float, stop: bool) -> None:
        """Refuses what a callback asks for: processes that disagree would train apart."""
        raise ValueError("callbacks cannot stop or change a run with recoverable=True: remove it")

    @contextlib.contextmanager
    def agreement(self) -> Iterator[None]:
        """Raises ProcessFailureError on every process that is left once one is lost."""
        with multihost_utils.live_devices(self.all_devices):
            try:
                yield
            except jax.errors.JaxRuntimeError:
                coordination.drop_peers()
                raise

    def take_steps(self, state: dict) -> dict:
        """Runs `Loop.take_steps` with the remaining processes."""
        self.complete_run, self.all_devices = self.run, list(self.run.mesh.devices.flat)
        while True:
            try:
                return super().take_steps(state)
            except multihost_utils.ProcessFailureError as failure:
                state = self._without(self.state, failure.failed_devices)

    def conclude(self, state: dict, evaluate_test: bool = True) -> tuple:
        """Runs `Loop.conclude` with the remaining processes."""
        while True:
            try:
                with self.agreement():
                    return super().conclude(state, evaluate_test)
            except multihost_utils.ProcessFailureError as failure:
                state = self._without(self.state, failure.failed_devices)

    def compile(self, batch: step_lib.Batch) -> Callable[..., tuple[dict, dict]]:
        """Runs `Loop.compile`; a step is done when it returns, so a lost process shows in it."""
        compiled = super().compile(batch)
        return lambda state, batch: jax.block_until_ready(compiled(state, batch))

    def _without(self, state: dict, lost_devices: set[jax.Device]) -> dict:
        """Shrinks the run, and its state, to the devices that are left."""
        before, self.run = self.run.model.lost, shrink(self.run, lost_devices)
        model, mesh = self.run.model, self.run.mesh
        self.evaluator = self.make_evaluator()
        coordination.go_on_with({device.process_index for device in mesh.devices.flat})
        self.remarks = {"lost_groups": sorted(model.lost)}
        processes = sorted({device.process_index for device in lost_devices})
        self.bar.say(
            f"lost process {few(processes)} and with it groups or towers "
            f"{few(sorted({*model.lost} - {*before}))}: going on after step {int(state['step'])} "
            f"with the {model.group_axis_limit} that are left"
        )
        return mesh_lib.relabel(mesh, state, model)

    def save(self, number: int, metric: float | None, *, wait: bool) -> None:
        """Saves to disk before it returns: process 0 saves for all and waits for none."""
        self.log.check()
        self.watchdog.heartbeat(f"the start of saving step {number}")
        plain = mesh_lib.fetch(self.run.mesh, step_lib.to_plain(self.state))
        if coordination.is_lead():
            plain = self._with_fresh_groups(plain) if self.run.model.lost else plain
            meta = self.meta | self.remarks
            with checkpoint.alone():
                self.checkpoints.save(number, plain, meta, metric=metric, wait=True)
        self.watchdog.heartbeat(f"saving step {number}")

    def _with_fresh_groups(self, fetched: dict) -> dict:
        """The complete network's state as NumPy arrays: lost groups as they were at the start."""
        run = self.complete_run
        init = jax.jit(
            lambda start: step_lib.to_plain(
                step_lib.init_state(run.model, run.tx, run.config, start)
            )
        )
        surviving = np.asarray(self.run.model.surviving())

        def fill(path: tuple, fresh: jax.Array, kept: np.ndarray) -> np.ndarray:
            if not mesh_lib.is_spread(path, self.run.model):
                return kept
            filled = np.array(fresh)
            filled[surviving] = kept  # groups and towers lie along the first axis
            return filled

        try:
            start, _ = resume.start(run, verbose=False)
        except ValueError:  # the weights of init.from are gone, and the state must be saved
            start = None
        return jax.tree_util.tree_map_with_path(fill, init(start), fetched)
