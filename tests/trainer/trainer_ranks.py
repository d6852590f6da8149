"""Processes that play the ranks of one engine after another; started once, as Megatron takes long to import."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import torch
from limits import HUNG_S

from areal_like.core.trainer.engine import Rendezvous
from areal_like.runtime.ports import listen


class Ranks:
    """`run(job, n, ...)` calls `job(rendezvous, listener, ...)` in n processes at once and returns their results."""

    def __init__(self) -> None:
        self._known: dict[str, list[Any]] = {}
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        if torch.cuda.is_available():  # CUDA does not survive a fork
            self._context: Any = multiprocessing.get_context("spawn")
        else:
            self._context = multiprocessing.get_context("forkserver")
            self._context.set_forkserver_preload(["trainer_preload"])

    def run(self, job: Callable[..., Any], n: int, *args: Any) -> list[Any]:
        """Raises AssertionError with the ranks' tracebacks when one fails or does not answer."""
        port = self._ask([(_listen, ())])[0]
        rendezvous = [Rendezvous(rank, n, "127.0.0.1", port, timeout_s=HUNG_S) for rank in range(n)]
        return self._ask([(_with_listener, (job, r, *args)) for r in rendezvous])

    def once(self, job: Callable[..., Any], n: int, *args: Any) -> list[Any]:
        """`run` of a job whose results follow from its arguments alone: asked again, it answers what it did before."""
        asked = repr((job.__qualname__, n, args))
        if asked not in self._known:
            self._known[asked] = self.run(job, n, *args)
        return self._known[asked]

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []

    def _start(self, size: int) -> None:
        """Has at least so many processes."""
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = seen.split(",") if seen else [str(gpu) for gpu in range(torch.cuda.device_count())]
        # the fork server looks for what it preloads on PYTHONPATH alone
        with mock.patch.dict(os.environ, {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": "ignore"}):
            for rank in range(len(self._processes), size):
                if gpus:  # each sees one, as Ray has it
                    os.environ["CUDA_VISIBLE_DEVICES"] = gpus[rank % len(gpus)]
                ours, theirs = self._context.Pipe()
                process = self._context.Process(target=_serve, args=(theirs,))
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(ours)

    def _ask(self, calls: list[tuple[Callable, tuple]]) -> list[Any]:
        self._start(len(calls))
        pipes = self._pipes[: len(calls)]
        for pipe, call in zip(pipes, calls, strict=True):
            pipe.send(call)
        answers = [_answer(pipe) for pipe in pipes]
        failures = [f"rank {rank}: {answer}" for rank, (good, answer) in enumerate(answers) if not good]
        if failures:  # whatever the failure left in the processes must not reach the next test
            self.close()
        assert not failures, "\n".join(failures)
        return [answer for _, answer in answers]


def _answer(pipe: Connection) -> tuple[bool, Any]:
    try:
        return pipe.recv() if pipe.poll(HUNG_S) else (False, "no answer")
    except EOFError:
        return False, "the process ended"


_listener: socket.socket | None = None


def _listen() -> int:
    global _listener
    _listener = listen("127.0.0.1")
    return _listener.getsockname()[1]


def _with_listener(job: Callable[..., Any], rendezvous: Rendezvous, *args: Any) -> Any:
    return job(rendezvous, _listener if rendezvous.rank == 0 else None, *args)


def _serve(pipe: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(*args)))
        except BaseException:  # noqa: BLE001  # whatever it is, the test that asked must hear of it
            pipe.send((False, traceback.format_exc()))
