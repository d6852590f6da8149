"""A run on a CPU of a family whose server needs the kernels of `tests/support`."""

from __future__ import annotations

from areal_like.backends.sglang import process
from areal_like.preflight import served_layout
from areal_like.run import start


class FamilyServer(process.SGLangServer):
    """A server with the launcher of the tests; other families do not notice it."""

    async def start(self) -> str:
        """Start the process and wait until it serves."""
        process.LAUNCHER = "support.family_launcher"
        return await super().start()


if __name__ == "__main__":
    start.SGLangServer = FamilyServer
    served_layout.ON_GPUS_ALONE = frozenset()
    from areal_like.cli import app

    app()
