"""Scalars as TensorBoard events, written without torch."""

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal_like.core.errors import writing


class TensorBoard:
    """One event file in a directory; `tensorboard --logdir DIRECTORY` shows it.

    Every step is on disk when `log` returns. TensorBoard's own EventFileWriter writes in a thread, up to two minutes
    late, and its errors appear between two steps. Raises RecordError if the file cannot be written.
    """

    def __init__(self, directory: Path, void_from: int | None = None) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter  # only runs with TensorBoard need it

        name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}"
        self._path = directory / name
        with writing(self._path):
            directory.mkdir(parents=True, exist_ok=True)
            self._records = RecordWriter(self._path.open("ab"))
        self._append(file_version="brain.Event:2")
        if void_from is not None:
            self._void_from(void_from)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._append(step=step, summary=Summary(value=values))

    def _void_from(self, step: int) -> None:
        """Make readers discard values of `step` and later steps in earlier files (an event SessionLog.START)."""
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self._append(step=step, session_log=SessionLog(status=SessionLog.START))

    def close(self) -> None:
        with writing(self._path):
            self._records.close()

    def _append(self, **event: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        with writing(self._path):
            self._records.write(Event(wall_time=time.time(), **event).SerializeToString())
            self._records.flush()
