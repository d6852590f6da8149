"""Where a run works: `cluster` and `scheduler`."""

from ipaddress import ip_network
from typing import Annotated, Literal

from pydantic import Field, field_validator

from areal_like.core.config.ignored import ignored_if
from areal_like.core.config.section import PATH, Section


class ClusterConfig(Section):
    """Machines of a run, and the directory of its files."""

    n_nodes: int = Field(1, ge=1)
    """Number of nodes."""
    n_gpus_per_node: int = Field(8, ge=1)
    """GPUs per node; process slots per node on CPU machines."""
    fileroot: Annotated[str, PATH] = "runs"
    """Directory of all runs; a run uses `fileroot/experiment_name/trial_name`."""
    ports: str | None = Field(None, pattern=r"^[0-9]+-[0-9]+$")
    """Range of ports, such as `20000-20999`, from which every node takes the free ports that the run itself opens
    ([ports](clusters.md#ports)). null: any."""
    interface: Annotated[str | None, ignored_if("scheduler.type", "local")] = Field(None, min_length=1)
    """Network interface, by its name or by its network such as `10.0.0.0/16`, at whose address the run's processes on
    every node listen ([interfaces](clusters.md#interfaces)). null: the address that Ray uses."""
    host_timeout_s: Annotated[float, ignored_if("scheduler.type", "local")] = Field(10.0, gt=0)
    """Seconds without an answer after which a host of servers counts as lost: their requests continue on other servers,
    and they restart elsewhere."""

    @field_validator("ports")
    @classmethod
    def _check_ports(cls, ports: str | None) -> str | None:
        if ports is not None:
            first, last = map(int, ports.split("-"))
            if not 1024 <= first <= last <= 65535:
                raise ValueError("FIRST-LAST with 1024 <= FIRST <= LAST <= 65535")
        return ports

    @field_validator("interface")
    @classmethod
    def _check_interface(cls, interface: str | None) -> str | None:
        if interface and "/" in interface:
            ip_network(interface, strict=False)
        return interface


class SchedulerConfig(Section):
    """The Ray cluster that starts and places the workers."""

    type: Literal["local", "ray"] = "local"
    """`local`: a private Ray cluster on loopback that stops with the run; `ray`: an existing one."""
    address: Annotated[str, ignored_if("scheduler.type", "local")] = "auto"
    """Address of the existing cluster (`type: ray`); `auto`: RAY_ADDRESS, then this host."""
    startup_timeout_s: float = Field(300.0, gt=0)
    """Maximum seconds until Ray grants the resources, and then until every worker process has started."""
    cache_dir: str | None = "~/.cache/areal_like"
    """Directory on every host in which trainer ranks and servers keep compiled kernels between runs: torch, Triton,
    FlashInfer, DeepGEMM and CUDA. Variables that are already set, such as `TRITON_CACHE_DIR`, take precedence. null:
    the defaults of each library."""
