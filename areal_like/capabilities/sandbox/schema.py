"""Sandboxes of episodes: `episode.sandbox`."""

from typing import Annotated

from pydantic import Field

from areal_like.config.ignored import Ignored
from areal_like.config.section import Section

CONTAINER_TOOLS = ("docker", "podman")
_NO_CONTAINER = Ignored("`episode.sandbox.backend` has no images", lambda at: at.section.backend not in CONTAINER_TOOLS)


class SandboxConfig(Section):
    """Isolated process trees in which episodes run commands."""

    backend: str = Field("bubblewrap", min_length=1)
    """`bubblewrap`, `docker`, `podman`, or your own class: `my_sandbox.py:Class` or `package.module:Class` (see
    [sandboxes](workflows.md#sandboxes))."""
    image: Annotated[str | None, _NO_CONTAINER] = Field(None, min_length=1)
    """Image of `docker` or `podman`, which must be present on the host."""
    read_only: list[str] = Field([])
    """Paths of the host that commands may read, at the same place in the sandbox."""
    network: bool = False
    """Give commands the network of the host."""
    timeout_s: float = Field(30.0, gt=0)
    """Maximum seconds of a command that names no limit of its own."""
    memory_mb: int = Field(512, ge=64)
    """Maximum memory of all processes of a command in MB."""
    processes: int = Field(64, ge=1)
    """Maximum processes and threads of a command."""
    disk_mb: int = Field(64, ge=1)
    """Size of the sandbox's `/tmp`, which has the working directory, in MB."""
    output_kb: int = Field(64, ge=1)
    """Maximum standard output, and standard error, of a command in KB; more ends it."""
    warm: int = Field(1, ge=0)
    """Sandboxes that each event loop (`episode.loops`) keeps ready for its next episodes."""


class SandboxKeys(Section):
    """Sandboxes of episodes."""

    sandbox: SandboxConfig | None = None
    """Sandboxes for workflows with a parameter `sandbox`; null: none."""


KEYS = {"episode": SandboxKeys}
