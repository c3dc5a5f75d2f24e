"""Events for TensorBoard, in the run's folder."""

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class TensorBoard:
    """A new file of events.

    tensorboardX's SummaryWriter blocks its caller for ever once its thread has died of a full disk.
    """

    def __init__(self, workdir: Path, start_step: int, anew: bool, config: Mapping) -> None:
        from tensorboardX.record_writer import RecordWriter

        folder = workdir / "tensorboard"
        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self._file = RecordWriter(str(folder / f"{name}.{time.monotonic_ns()}"))
        self._write(0, {}, file_version="brain.Event:2")
        # TensorBoard hides what a run that was killed had written from this step on.
        self._write(start_step + 1, {}, session_log={"status": 1})

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Appends an event."""
        self._write(step, scalars)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _write(self, step: int, scalars: Mapping[str, float], **fields: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        values = [{"tag": tag, "simple_value": value} for tag, value in scalars.items()]
        event = Event(wall_time=time.time(), step=step, summary={"value": values}, **fields)
        self._file.write(event.SerializeToString())
        self._file.flush()
