"""A Ray cluster to run on: a private one on loopback (`scheduler.type: local`) or an existing one (`ray`)."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from areal_like.backends.ray.address import address_problem, resolve_address
from areal_like.backends.ray.head import head_url
from areal_like.backends.ray.lifetime import ignore_interrupts
from areal_like.backends.ray.ray_processes import ray_processes_watched
from areal_like.backends.ray.ray_thread import RayThread
from areal_like.core.errors import ClusterError, private
from areal_like.core.signals import renew_handlers

if TYPE_CHECKING:  # every worker imports this module
    from areal_like.core.config.schema import SchedulerConfig

LOOPBACK = "127.0.0.1"
DISCONNECT_LIMIT_S = 5.0
NODE_LIMIT_S = 120.0  # limit of the start of a private cluster's node; Ray's own limit is 30 s
NODE_POLL_S = 0.2
POLL_S = 0.05  # between two looks at the thread that starts Ray
KEPT_LOG_BYTES = 1 << 20  # of each log of a Ray that did not start
# Ray reads these on import, once per process.
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": "A worker died or was killed",  # WorkerError reports it
}
_LOCAL_SETTINGS = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # as on macOS: the node's address is loopback, and Ray listens on it alone
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_worker_niceness": "0",  # the default 15 would put ranks and servers last on a busy machine
    "RAY_enable_metrics_collection": "0",
    "RAY_task_events_report_interval_ms": "0",  # else its head keeps 100,000 calls, for a dashboard that does not run
    "RAY_gcs_server_port_wait_time_s": "300",  # on a busy machine
    "RAY_raylet_start_wait_time_s": "300",
}
_EXISTING_SETTINGS = {"RAY_NUM_REDIS_GET_RETRIES": "2"}  # the default tries for 20 minutes


@contextmanager
def ray_cluster(
    scheduler: SchedulerConfig, *, n_slots: int, uses_gpus: bool, directory: Path, log_dir: Path | None = None
) -> Iterator[None]:
    """Connect to Ray inside the block; a private cluster ends with the block.

    A private cluster has `n_slots` CPUs on any machine, all of its GPUs if `uses_gpus`, and keeps its files
    in `directory`; if it does not start, its logs are copied to `log_dir`. Raises ClusterError if Ray cannot be started
    or reached within `scheduler.startup_timeout_s`.
    """
    with _connecting(scheduler, n_slots, uses_gpus, directory, log_dir) as thread:
        with _explain_failures(scheduler, directory, log_dir):
            while not thread.ready(POLL_S):
                pass
        yield


@asynccontextmanager
async def ray_cluster_of_run(
    scheduler: SchedulerConfig, *, n_slots: int, uses_gpus: bool, directory: Path, log_dir: Path
) -> AsyncIterator[None]:
    """Do as `ray_cluster`, in an event loop that stays responsive during the start, so that signals cancel it."""
    local = scheduler.type == "local"
    watched = ray_processes_watched(partial(_keep_logs, directory, log_dir / "ray")) if local else nullcontext()
    with _connecting(scheduler, n_slots, uses_gpus, directory, log_dir) as thread:
        async with watched:
            with _explain_failures(scheduler, directory, log_dir):
                while not thread.ready():
                    await asyncio.sleep(POLL_S)
                    renew_handlers()
            renew_handlers()
            yield


@contextmanager
def _connecting(
    scheduler: SchedulerConfig, n_slots: int, uses_gpus: bool, directory: Path, log_dir: Path | None
) -> Iterator[RayThread]:
    """Start Ray in a thread, and stop it at the end of the block."""
    local = scheduler.type == "local"
    _configure(_SETTINGS | (_LOCAL_SETTINGS if local else _EXISTING_SETTINGS))
    if not local and (problem := address_problem(scheduler.address)):
        raise ClusterError(f"scheduler.address: {'; '.join(problem)}")
    import ray

    def start() -> None:
        if local:
            _start_private(n_slots, uses_gpus, directory)
        else:
            ray.init(resolve_address(scheduler.address)[0], log_to_driver=False, logging_level=logging.ERROR)

    thread = RayThread(start, ray.shutdown if local else _disconnect, scheduler.startup_timeout_s)
    try:
        yield thread
    finally:
        with ignore_interrupts():
            thread.end(DISCONNECT_LIMIT_S if local else 3 * DISCONNECT_LIMIT_S)


@contextmanager
def _explain_failures(scheduler: SchedulerConfig, directory: Path, log_dir: Path | None) -> Iterator[None]:
    """Raise failures to start Ray as ClusterErrors that name its logs."""
    local = scheduler.type == "local"
    place = "the private Ray cluster" if local else f"the Ray cluster at {scheduler.address} (scheduler.address)"
    try:
        yield
    except Exception as error:  # Ray raises Exception itself if its node is not up in time
        limit = f"it was not ready within {scheduler.startup_timeout_s:g} s (scheduler.startup_timeout_s)"
        reason = limit if isinstance(error, TimeoutError) else _reason(error)
        logs = _keep_logs(directory, log_dir / "ray") if local and log_dir else None
        where = f"\n  its output: {logs}" if logs else ""
        raise ClusterError(f"{place} did not accept this run: {reason}{where}") from error


def _keep_logs(directory: Path, target: Path) -> Path | None:
    """Copy the last lines of Ray's logs, which are removed with the run; return their directory, None without any."""
    kept = None
    for file in sorted((directory / "ray").glob("session_2*/logs/*")):
        with suppress(OSError):
            if file.is_file() and (size := file.stat().st_size):
                target.mkdir(parents=True, exist_ok=True)
                with file.open("rb") as opened:
                    opened.seek(max(0, size - KEPT_LOG_BYTES))
                    with open(target / file.name, "wb", opener=private) as copy:
                        copy.write(opened.read(KEPT_LOG_BYTES))
                kept = target
    return kept


def _start_private(n_slots: int, uses_gpus: bool, directory: Path) -> None:
    """Start the private cluster, and connect to it."""
    import ray

    with _slow_start():
        ray.init(
            "local",
            num_cpus=n_slots,
            num_gpus=None if uses_gpus else 0,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=str(directory / "ray"),
        )


@contextmanager
def _slow_start() -> Iterator[None]:
    """Give a node NODE_LIMIT_S to start inside the block.

    Ray 2.60 asks for its new node again and again, for 30 s (`_private/node.py`, `start`), which no setting changes.
    Here each question waits for the node instead. A second start would compete with the processes of the first.
    """
    from ray._private import services

    look, end = services.get_node, time.monotonic() + NODE_LIMIT_S

    def wait(*arguments: Any) -> Any:
        while True:
            try:
                return look(*arguments)
            except RuntimeError:  # the node is not registered yet
                if time.monotonic() > end:
                    raise
                time.sleep(NODE_POLL_S)

    services.get_node = wait
    try:
        yield
    finally:
        services.get_node = look


def _disconnect() -> None:
    """Disconnect from an existing cluster; if its head is cut off, leave that to the end of this process.

    Ray 2.60 then waits for the head without a limit (`_private/worker.py`, `disconnect`), and again when Python exits.
    """
    import ray

    head = urlsplit(head_url())
    disconnecting = threading.Thread(target=ray.shutdown, daemon=True)
    disconnecting.start()
    disconnecting.join(DISCONNECT_LIMIT_S)
    if disconnecting.is_alive():
        try:
            socket.create_connection((head.hostname, head.port), DISCONNECT_LIMIT_S).close()
        except OSError:
            atexit.register(_exit)
            return
    disconnecting.join()


def _exit() -> None:
    """End this process as failed, without Ray's own clean-up."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _configure(settings: dict[str, str]) -> None:
    if "ray" in sys.modules and any(os.environ.get(name) != value for name, value in settings.items()):
        raise ClusterError("ray was imported before the run's cluster was started; import it later or not at all")
    os.environ.update(settings)


def _reason(error: BaseException) -> str:
    """Return the first cause that a user can act on."""
    text = f"{error} {error.__cause__ or ''}"
    if "InvalidAuthToken" in text or "authentication token" in text:
        return (
            "its authentication token is not this process's; set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN (or "
            "RAY_AUTH_TOKEN_PATH) to the cluster's"
        )
    if "Could not find any running Ray instance" in text:
        return "RAY_ADDRESS is not set and no Ray cluster runs on this host; start one with `ray start --head`"
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
