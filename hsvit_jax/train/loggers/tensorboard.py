"""Events for TensorBoard, in the run's folder."""

import errno
import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class TensorBoard:
    """A new file of events.

    tensorboardX's own writer blocks its caller for ever once its thread has died of a full disk.
    """

    def __init__(self, workdir: Path, start_step: int, config: Mapping[str, Any]) -> None:
        folder = workdir / "tensorboard"
        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / f"{name}.{time.monotonic_ns()}").open("xb", buffering=0)
        self._write(_record(0, {}, file_version="brain.Event:2"))
        # TensorBoard hides what a run that was killed had written from this step on.
        self._write(_record(start_step + 1, {}, session_log={"status": 1}))

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Appends an event."""
        self._write(_record(step, scalars))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _write(self, record: bytes) -> None:
        """Appends a record; half a record is the last one."""
        if self._file.write(record) < len(record):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _record(step: int, scalars: Mapping[str, float], **fields: Any) -> bytes:
    """An event as TensorBoard stores it: the data's length and the data, each with its checksum."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    values = [{"tag": tag, "simple_value": value} for tag, value in scalars.items()]
    event = Event(wall_time=time.time(), step=step, summary={"value": values}, **fields)
    data = event.SerializeToString()
    parts = struct.pack("<Q", len(data)), data
    return b"".join(part + struct.pack("<I", masked_crc32c(part)) for part in parts)
