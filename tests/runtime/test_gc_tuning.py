"""The garbage collector looks at what is new in small pieces, and at nothing while modules are imported."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import weakref
from contextlib import suppress
from importlib import import_module

import pytest

from areal_like.core import gc_tuning
from areal_like.core.gc_tuning import TOGETHER, YOUNG_S, gc_tuned, pause_gc, release

MANY = 100_000


def test_what_comes_while_as_much_goes_is_looked_through_before_it_is_many():
    async def run() -> list[int]:
        before, young = gc.get_threshold(), []
        async with gc_tuned():
            old = [[number] for number in range(MANY)]
            gc.collect(1)
            new = []
            for _ in range(10):
                for _ in range(MANY // 10):  # Python counts what is made less what is freed
                    new.append([old.pop()])
                await asyncio.sleep(2 * YOUNG_S)
                young.append(len(gc.get_objects(0)) + len(gc.get_objects(1)))
        assert gc.get_threshold() == before
        assert gc.get_freeze_count() == 0
        return young

    assert max(asyncio.run(run())) < MANY // 20


def test_a_cycle_of_old_objects_is_freed_by_the_clock(monkeypatch):
    """Young collections every 20 ms kept Python's count of collections below that of a full one."""

    class Node:
        def __init__(self) -> None:
            self.itself = self

    async def run() -> int:
        async with gc_tuned():
            nodes = [Node() for _ in range(9)]
            await asyncio.sleep(5 * YOUNG_S)  # they are old now
            left = [weakref.ref(node) for node in nodes]
            nodes.clear()
            await asyncio.sleep(0.6)
            return sum(ref() is not None for ref in left)

    monkeypatch.setattr(gc_tuning, "FULL_S", 0.2)
    assert asyncio.run(run()) == 0


def test_what_is_imported_is_neither_collected_nor_looked_through_later():
    before = gc.get_freeze_count()
    try:
        with pause_gc():
            assert not gc.isenabled()
        assert gc.isenabled()
        assert gc.get_freeze_count() > before
    finally:
        gc.unfreeze()


def test_what_cannot_be_imported_leaves_the_collector_on():
    try:
        with suppress(ModuleNotFoundError), pause_gc():
            import_module("no_such_module")
        assert gc.isenabled()
    finally:
        gc.unfreeze()


def test_a_batch_goes_in_pieces_between_which_the_event_loop_turns():
    left: list[int] = []

    async def run() -> None:
        batch = [[number] for number in range(3 * TOGETHER + 1)]
        going = asyncio.create_task(release(batch))
        while not going.done():
            await asyncio.sleep(0)
            left.append(len(batch))

    asyncio.run(run())
    assert sorted(set(left), reverse=True) == [2 * TOGETHER + 1, TOGETHER + 1, 1, 0]


@pytest.mark.parametrize(("tune", "mapped"), [("bound_heap()", True), ("", False)])
def test_large_blocks_are_mapped_and_returned(tune, mapped):
    """By default glibc moves blocks of a size into the heap once one of them was freed."""
    code = f"""
import ctypes
from areal_like.core.gc_tuning import bound_heap
{tune}
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd a b c d e".split()]
ask = ctypes.CDLL(None).mallinfo2
ask.restype = Info
bytearray(16 << 20)
before = ask().hblkhd
kept = bytearray(8 << 20)
print(ask().hblkhd - before >= 8 << 20)
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert shown.stdout.strip() == str(mapped)
