"""Memory of one process that others borrow, one after the other, as restarted servers do; needs one GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from areal_like.backends.transports.ipc.handles import export_handle

pytestmark = pytest.mark.gpu

BORROWER = """
import sys, torch
from areal_like.backends.transports.ipc.handles import open_handle
torch.zeros(1, device="cuda")
for line in sys.stdin:
    try:
        print(int(open_handle(line, torch.device("cuda", 0)).long().sum()), flush=True)
    except RuntimeError as error:
        print(str(error).splitlines()[0], flush=True)
"""
MIB = 1 << 20


class Borrower:
    def __init__(self) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([sys.executable, "-c", BORROWER], stdin=pipe, stdout=pipe, text=True)

    def sum(self, flat: torch.Tensor) -> str:
        self.process.stdin.write(export_handle(flat, Path("unused")) + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def ones(mib: int) -> torch.Tensor:
    return torch.ones(mib * MIB, dtype=torch.uint8, device="cuda")


def test_who_comes_later_borrows_too() -> None:
    told: dict[str, str] = {}
    kept, expected = ones(16), str(16 * MIB)
    for number in range(3):
        borrower = Borrower()
        told[f"{number}: kept memory"] = borrower.sum(kept)
        told[f"{number}: the same again"] = borrower.sum(kept)
        told[f"{number}: memory as it comes"] = borrower.sum(ones(16))
        torch.cuda.ipc_collect()
        told[f"{number}: after a collection"] = borrower.sum(ones(16))
        large = ones(256)
        del large
        told[f"{number}: a part of a large segment"] = borrower.sum(ones(16))
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()
        told[f"{number}: memory that is new to the device"] = borrower.sum(ones(16))
        borrower.end()
    print(*told.items(), sep="\n")
    assert set(told.values()) == {expected}
