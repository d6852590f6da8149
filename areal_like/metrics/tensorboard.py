"""Scalars as TensorBoard events, written without torch."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path


class TensorBoard:
    """Event files in one directory; `tensorboard --logdir DIRECTORY` shows them."""

    def __init__(self, directory: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter  # only runs that want it need it

        self._writer = EventFileWriter(str(directory))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add one value per name at `step`."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def close(self) -> None:
        """Write out what is buffered."""
        self._writer.close()
