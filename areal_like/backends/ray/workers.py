"""Groups of workers, one process per member, for an asyncio controller; the first failure ends a call."""

from __future__ import annotations

import asyncio
import faulthandler
import functools
import inspect
import math
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_like.backends.ray.lifetime import Caretaker, end_with_run, join_run, local_interface
from areal_like.backends.ray.ray_cluster import LOOPBACK
from areal_like.core.errors import PRIVATE_UMASK, WorkerError, private
from areal_like.core.events import note, now
from areal_like.runtime.logs import shorten_log
from areal_like.runtime.ports import PORTS_VARIABLE

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle


_FOLDERS = {
    "TORCHINDUCTOR_CACHE_DIR": "torchinductor",  # torch/_inductor/runtime/cache_dir_utils.py; below TMPDIR by default
    "TRITON_CACHE_DIR": "triton",  # triton/knobs.py
    "TORCH_EXTENSIONS_DIR": "torch_extensions",  # torch/utils/cpp_extension.py
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",  # flashinfer/jit/env.py
    "TVM_FFI_CACHE_DIR": "tvm_ffi",  # tvm_ffi/cpp/extension.py, of SGLang's own kernels
    "SGLANG_DG_CACHE_DIR": "deep_gemm",  # sglang/srt/environ.py
    "CUDA_CACHE_PATH": "cuda",  # for PTX compiled by the driver
}
_CUDA_CACHE_BYTES = 4 << 30  # the driver's own limit holds the kernels of one of these libraries


def keep_caches(directory: str | None) -> None:
    """Make this process and its children cache compiled kernels below `directory`; None changes nothing.

    Variables set by the user stay.
    """
    if directory is None:
        return
    root = Path(directory).expanduser()
    for name, folder in _FOLDERS.items():
        os.environ.setdefault(name, str(root / folder))
    os.environ.setdefault("CUDA_CACHE_MAXSIZE", str(_CUDA_CACHE_BYTES))


AFTERMATH_S = 1.0  # a dead rank first breaks its neighbours' collectives; wait this long for the cause itself


class WorkerActor:
    """The process around one member: environment and output first, then the object that does the work."""

    def __init__(
        self, run_id: str, host: str, gpus: str, log_file: Path, cache_dir: str | None, ports: str | None = None
    ) -> None:
        self._run_id = run_id
        os.umask(PRIVATE_UMASK)  # Ray on an existing cluster has its own
        join_run(run_id)
        if ports:
            os.environ[PORTS_VARIABLE] = ports
        keep_caches(cache_dir)
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            if host == LOOPBACK or name not in os.environ:  # private processes listen only on loopback
                os.environ[name] = local_interface(host)
        self._log_file = log_file
        log_file.parent.mkdir(parents=True, exist_ok=True)
        with open(log_file, "ab", opener=private) as log:
            for descriptor in (1, 2):
                os.dup2(log.fileno(), descriptor)
        faulthandler.enable()

    def build(self, cls: type, arguments: Mapping[str, Any]) -> None:
        if cls is not Caretaker:  # a caretaker's janitor outlives it
            end_with_run(self._run_id)
        self._target = cls(**arguments)

    def call(self, method: str, *args: Any) -> Any:
        try:
            return getattr(self._target, method)(*args)
        finally:
            sys.stdout.flush()
            shorten_log(self._log_file)


class AsyncWorker(WorkerActor):
    """A worker for objects with coroutine methods, which run concurrently."""

    async def call(self, method: str, *args: Any) -> Any:
        result = getattr(self._target, method)(*args)
        return await result if inspect.isawaitable(result) else result


def is_cancelled() -> bool:
    """Return whether the controller has cancelled the call that this process executes (`call_all` with `cancels`)."""
    import ray

    return ray.is_initialized() and ray.get_runtime_context().is_canceled()


def worker_class(cls: type) -> type[WorkerActor]:
    """Return the kind of worker that the methods of `cls` need."""
    has_coroutines = any(inspect.iscoroutinefunction(member) for _, member in inspect.getmembers(cls))
    return AsyncWorker if has_coroutines else WorkerActor


@dataclass(frozen=True)
class WorkerHandle:
    """One worker of a group, as the controller sees it; `host` is its node's address."""

    rank: int
    host: str
    actor: ActorHandle
    log_file: Path


type Failures = dict[WorkerHandle, BaseException]


class WorkerGroup:
    """The workers of one role, in rank order.

    Every call names its phase for the error message and has a time limit in seconds, by default the group's
    (`math.inf` for none). Calls raise WorkerError for the first member that failed, died or did not answer.
    """

    def __init__(self, role: str, members: Sequence[WorkerHandle], timeout_s: float) -> None:
        self.role = role
        self.members = tuple(members)
        self._timeout_s = timeout_s

    @property
    def meeting_host(self) -> str:
        """Return the address of member 0's rendezvous: loopback, closed to other hosts, if all are on one host."""
        return LOOPBACK if len({member.host for member in self.members}) == 1 else self.members[0].host

    def only(self, rank: int) -> WorkerGroup:
        """Return a group of one of the members, the first one being 0."""
        return WorkerGroup(self.role, self.members[rank : rank + 1], self._timeout_s)

    async def call_all(
        self, method: str, *args: Any, phase: str, timeout: float | None = None, cancels: bool = False
    ) -> list[Any]:
        """Call a method on every member with the same arguments, which are sent once; results in rank order.

        With `cancels` a cancelled call does not start if it waits, and sets `is_cancelled` if it runs.
        """
        import ray

        with self._sending(self.members[0], phase):
            shared = [await asyncio.to_thread(ray.put, argument) for argument in args]  # a batch may take seconds
            calls = {member: member.actor.call.remote(method, *shared) for member in self.members}
        try:
            return await self._results(calls, phase, timeout)
        except asyncio.CancelledError:
            for call in calls.values() if cancels else ():
                ray.cancel(call)
            raise

    async def call_one(self, rank: int, method: str, *args: Any, phase: str, timeout: float | None = None) -> Any:
        """Call a method on one member, the first one being 0."""
        member = self.members[rank]
        with self._sending(member, phase):
            call = member.actor.call.remote(method, *args)
        return (await self._results({member: call}, phase, timeout))[0]

    async def build(self, cls: type, arguments: Sequence[Mapping[str, Any]], timeout: float) -> None:
        """Create every member's object, `cls(**arguments)`, with the member's own arguments."""
        with self._sending(self.members[0], "start-up"):
            calls = {
                member: member.actor.build.remote(cls, its) for member, its in zip(self.members, arguments, strict=True)
            }
        await self._results(calls, "start-up", timeout)

    def kill(self) -> None:
        """Kill every worker process at once."""
        import ray

        for member in self.members:
            ray.kill(member.actor, no_restart=True)

    @contextmanager
    def _sending(self, member: WorkerHandle, phase: str) -> Iterator[None]:
        """Raise WorkerError if a call cannot be sent: large arguments need space in Ray's object store."""
        from ray.exceptions import RayError

        try:
            yield
        except RayError as error:
            cause = str(error).strip() or type(error).__name__
            raise self._error(member, phase, f"the call was not sent: {cause}") from error

    async def _results(self, calls: Mapping[WorkerHandle, ObjectRef], phase: str, timeout: float | None) -> list[Any]:
        limit = self._timeout_s if timeout is None else timeout
        waits = {member: asyncio.ensure_future(call) for member, call in calls.items()}
        if limit != math.inf:
            self._note(waits, phase)
        try:
            await asyncio.wait(waits.values(), timeout=limit, return_when=asyncio.FIRST_EXCEPTION)
            if first := _failures(waits):
                await asyncio.wait(waits.values(), timeout=AFTERMATH_S)
                raise self._explain(first, _failures(waits), phase)
            if late := [member for member, wait in waits.items() if not wait.done()]:
                ranks = ", ".join(str(member.rank) for member in late)
                raise self._error(late[0], phase, f"no answer from rank {ranks} within {limit:g} s")
            return [wait.result() for wait in waits.values()]
        finally:
            for wait in waits.values():
                wait.cancel()

    def _note(self, waits: Mapping[WorkerHandle, asyncio.Future[Any]], phase: str) -> None:
        """Record when each member finishes a call that starts now."""
        start = now()

        def note_end(member: WorkerHandle, _: asyncio.Future[Any]) -> None:
            note(f"{self.role} {member.rank}", phase, start)

        for member, wait in waits.items():
            wait.add_done_callback(functools.partial(note_end, member))

    def _explain(self, first: Failures, later: Failures, phase: str) -> WorkerError:
        """Return the failure that explains the others: the death of a member, else the earliest exception."""
        from ray.exceptions import RayTaskError

        deaths = {member: error for member, error in later.items() if not isinstance(error, RayTaskError)}
        member, error = next(iter((deaths or first).items()))
        if not isinstance(error, RayTaskError):
            return self._error(member, phase, _death(error))
        cause = "".join(traceback.format_exception_only(error.cause)).strip()
        return self._error(member, phase, cause, _ANSI.sub("", str(error)))

    def _error(self, member: WorkerHandle, phase: str, cause: str, remote_traceback: str = "") -> WorkerError:
        return WorkerError(self.role, member.rank, phase, cause, member.log_file, remote_traceback)


def _failures(waits: Mapping[WorkerHandle, asyncio.Future[Any]]) -> Failures:
    failures = {member: wait.exception() for member, wait in waits.items() if wait.done()}
    return {member: error for member, error in failures.items() if error is not None}


_ANSI = re.compile(r"\x1b\[[0-9;]*m")


_RAY_ENDED = re.compile(r"(owner|node|raylet) (has |was )?(died|exited|terminated)", re.IGNORECASE)


def _death(error: BaseException) -> str:
    """Describe the end of a process as Ray reports it, without Ray's advice.

    Ray's raylet ends when its dashboard agent does, and then names the owner of an actor, which users do not know.
    """
    if _RAY_ENDED.search(str(error)):
        return (
            "Ray's own processes on its host have ended (raylet, or the dashboard agent with which raylet ends). They "
            "were killed, or the host has too little memory"
        )
    detail = re.search(r"Worker exit detail: (.*?)(?: Some common causes|$)", str(error), re.DOTALL)
    return f"the process died ({detail[1].strip() if detail else str(error).strip().splitlines()[0]})"
