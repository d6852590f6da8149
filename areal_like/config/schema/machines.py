"""Where a run works: `cluster` and `scheduler`."""

from typing import Annotated, Literal

from pydantic import Field

from areal_like.config.schema.section import PATH, Section


class ClusterConfig(Section):
    """The machines a run may use and where its files go."""

    n_nodes: int = Field(1, ge=1, description="Number of nodes.")
    n_gpus_per_node: int = Field(8, ge=1, description="GPUs per node; on a CPU machine, process slots per node.")
    fileroot: Annotated[str, PATH] = Field(
        "runs", description="Directory that holds all runs: `fileroot/experiment_name/trial_name` is this one's."
    )


class SchedulerConfig(Section):
    """Which Ray cluster starts and places the workers."""

    type: Literal["local", "ray"] = Field(
        "local",
        description="`local`: a private Ray cluster on loopback that ends with the run; `ray`: an existing one.",
    )
    address: str = Field(
        "auto", description="Address of the existing cluster (`type: ray`); `auto` asks RAY_ADDRESS, then this host."
    )
    startup_timeout_s: float = Field(
        300.0, gt=0, description="Longest wait for Ray's grant, then for every worker's process, in seconds."
    )
    cache_dir: str | None = Field(
        "~/.cache/areal_like",
        description="Directory of every host where trainer ranks and servers keep compiled kernels from run to run: those of "
        "torch, Triton, FlashInfer, DeepGEMM and CUDA. Variables that are set already, such as `TRITON_CACHE_DIR`, count "
        "more. null: each library's own place, of which torch's ends with the run.",
    )
