"""Processes that workflows run in, shared by the tests of a session: to start them takes a second."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator

import pytest

from areal_like.capabilities.agents.playing import ENTRY
from areal_like.capabilities.agents.workers.processes import UserProcesses
from areal_like.capabilities.agents.workers.remote import WorkerLimits


@pytest.fixture(scope="session")
def processes() -> Iterator[UserProcesses]:
    """Two processes, which hold no workflow yet."""
    shared = UserProcesses(ENTRY, pickle.dumps([]), WorkerLimits(2, 2, 60.0), print)
    asyncio.run(shared.__aenter__())
    yield shared
    asyncio.run(shared.__aexit__())
