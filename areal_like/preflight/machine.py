"""The machine of a run: packages, GPUs, ports, the run's directory, the Ray cluster. Starts nothing."""

import importlib.util
import os
import socket
import tempfile
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Literal

from allocation.diagnostics import Finding, Severity
from allocation.plan import Plan
from areal_like.backends.ray.bundles import bundles, names_gpus
from areal_like.backends.ray.resources import check_existing
from areal_like.core.checkpoint.store import DIRECTORY
from areal_like.core.config.findings import finding, missing_package
from areal_like.core.config.schema import RunConfig
from areal_like.core.types import Device

CONFIG_FILE = "config.yaml"  # of a run's directory: the resolved configuration, written first
FAILED_FILE = "config.failed.yaml"  # the same of a run without recovery that failed before its first step
LARGEST_PORT = 65535


def device_of(device: Literal["auto", "cpu", "cuda"]) -> Device:
    """Return the device for `device: auto`: CUDA if this host has an NVIDIA GPU."""
    if device == "auto":
        return "cuda" if gpu_count() else "cpu"
    return device


def check_machine(config: RunConfig, device: Device, plan: Plan | None, *, dry_run: bool) -> Iterator[Finding]:
    """Check this host and an existing cluster."""
    yield from _packages(config, device)
    yield from _directory(config)
    if config.scheduler.type == "ray":
        yield from _existing(config, device, plan, dry_run=dry_run)
    else:
        yield from _private(config, device, plan)
    yield from _ports(config, plan)


def gpu_count() -> int:
    """Return the NVIDIA GPUs that a process of this host sees; CUDA reads its list up to the first invalid entry."""
    present = len(list(Path("/dev").glob("nvidia[0-9]*")))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    named = takewhile(lambda entry: entry and entry[0] != "-", map(str.strip, visible.split(",")))
    return min(present, len(list(named)))


def _packages(config: RunConfig, device: Device) -> Iterator[Finding]:
    """Check that the packages that this run imports are installed."""
    bridges = {role: section.megatron.bridge_type for role, section in config.further_roles.items() if section.megatron}
    bridges["actor"] = config.actor.megatron.bridge_type
    needed = [
        ("scheduler.type", "ray", "ray"),
        ("actor.backend", "torch", "torch"),
        ("actor.backend", "megatron.core", "megatron-core"),
        *((f"{role}.megatron.bridge_type", name.replace("-", "."), name) for role, name in bridges.items()),
        ("rollout.backend", "sglang", "sglang"),
        ("reward.type", "math_verify", "math-verify"),
        ("stats_logger", "matplotlib", "matplotlib"),
    ]
    stats = config.stats_logger
    wanted = {"wandb": stats.wandb.mode, "swanlab": stats.swanlab.mode, "mlflow": stats.mlflow.tracking_uri}
    needed += [(f"stats_logger.{name}", name, name) for name, how in wanted.items() if how not in (None, "disabled")]
    if config.stats_logger.tensorboard:
        needed.append(("stats_logger.tensorboard", "tensorboard", "tensorboard"))
    if device == "cuda" and gpu_count():  # a controller without GPUs has no need of it
        needed.append(("device", "transformer_engine", "transformer-engine"))
    for key, module, package in needed:
        if not _is_installed(module):
            yield missing_package(key, package)


def _is_installed(module: str) -> bool:
    parent = module.rpartition(".")[0]
    return (not parent or _is_installed(parent)) and importlib.util.find_spec(module) is not None


def _directory(config: RunConfig) -> Iterator[Finding]:
    """Check that the run's directory can be created, and does not hold the files of others."""
    directory = config.run_dir
    above = next(parent for parent in (directory, *directory.parents) if os.path.lexists(parent))
    if problem := _unusable(above):
        message = f"{directory} cannot be used: {above} {problem}"
        yield finding("RUN-DIRECTORY", "cluster.fileroot", message, "choose another fileroot")
        return
    if above != directory:
        return
    if (directory / CONFIG_FILE).exists():
        if config.recover.mode != "off":
            return  # check_resume's
        message = f"{directory} holds the results of another run"
    elif (directory / FAILED_FILE).exists():
        return
    elif any(path.name != DIRECTORY and path.name[0] != "." for path in directory.iterdir()):
        message = f"{directory} is not empty and was not created by a run"
    else:
        return
    yield finding("RUN-DIRECTORY", "trial_name", message, "choose another trial_name")


def _unusable(directory: Path) -> str | None:
    """Return why nothing can be created in an existing path, None if a new file can.

    Access rights alone do not show a read-only mount, a full disk, or a path of /proc. A file without a name leaves
    nothing behind.
    """
    if not directory.is_dir():
        return "is not a directory, or is a link to a missing one"
    if not os.access(directory, os.W_OK | os.X_OK):
        return "is not writable"
    try:
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        return f"cannot hold files: {error.strerror or error}"
    return None


def _ports(config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
    """Check that the ports are free on this host; the servers of other nodes find out when they start."""
    first = config.sglang.port
    if first is None or plan is None:
        return
    help = "choose another port, or write sglang.port=null for free ones"
    servers = plan.engine("rollout").sizes.dp
    if (last := first + servers - 1) > LARGEST_PORT:
        message = f"port {last} cannot be used: the largest is {LARGEST_PORT}"
        yield finding("RUN-PORT", "sglang.port", message, help)
    elif config.scheduler.type == "local":
        for port in range(first, last + 1):
            if problem := _port_problem(port):
                yield finding("RUN-PORT", "sglang.port", f"port {port} cannot be used here: {problem}", help)


def _port_problem(port: int) -> str | None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was closed a moment ago is free
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return error.strerror
    return None


def _existing(config: RunConfig, device: Device, plan: Plan | None, *, dry_run: bool) -> Iterator[Finding]:
    """Check that an existing cluster answers and holds the plan."""
    guessed = config.device == "auto"
    for key, message, help in check_existing(config.scheduler, plan, uses_gpus=device == "cuda", guessed=guessed):
        elsewhere = dry_run and key == "scheduler.address" and config.scheduler.address == "auto"
        severity = Severity.WARNING if elsewhere else Severity.ERROR
        yield finding("RUN-MACHINE-RAY", key, message, help, severity=severity)


def _cpu_fixes(config: RunConfig) -> Iterator[str]:
    """Return all settings that a run with servers for GPUs needs on CPU."""
    yield "device=cpu"
    if config.sglang.attention_backend not in (None, "torch_native"):
        yield "sglang.attention_backend=torch_native"
    if config.sglang.deterministic:
        yield "sglang.deterministic=false"


def _private(config: RunConfig, device: Device, plan: Plan | None) -> Iterator[Finding]:
    """Check that the layout fits a private cluster, which is this host alone."""
    if config.cluster.n_nodes > 1:
        message = f"a private cluster (scheduler.type=local) has one node, not {config.cluster.n_nodes}"
        help = "write scheduler.type=ray, or cluster.n_nodes=1"
        yield finding("RUN-MACHINE", "cluster.n_nodes", message, help)
    elif device == "cuda" and plan is not None:
        asked, present = max(int(bundle["GPU"]) for bundle in bundles(plan, uses_gpus=True)), gpu_count()
        if asked <= present:
            return
        named = ["actor", "rollout", *(role for role, section in config.further_roles.items() if section.backend)]
        fields = " + ".join(f"{role}.backend" for role in named)
        key = "allocation_mode" if config.allocation_mode else fields
        counted, lower = (", by the numbers after `@`", ", or lower numbers") if names_gpus(plan) else ("", "")
        message = f"the layout needs {asked} GPU{'s' * (asked > 1)}{counted}; this host has {present}"
        help = f"use a smaller layout{lower}" if present else f"write {' '.join(_cpu_fixes(config))}"
        yield finding("RUN-MACHINE", key, message, help)
