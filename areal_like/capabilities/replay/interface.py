"""The Python interface of recorded runs."""

from areal_like.capabilities.replay.reader import open_run

INTERFACE = {"open_run": open_run}
