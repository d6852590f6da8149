"""Two client processes read 64 answers, and one is killed: `killed_client.py LOG_DIR` prints what came, and waits."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web
from fake_server import Body, FakeServer, event, output, serving
from limits import HUNG_S

import allocation
from areal_like.cluster.janitor import members
from areal_like.cluster.run import Cluster, run_cluster
from areal_like.config.schema import SchedulerConfig
from areal_like.experimental.client_processes import Clients
from areal_like.rollout.pool import Sampling, ServerPool
from areal_like.rollout.sglang.http import Deadline
from areal_like.run.start import start_client

TOKENS, PIECE = 1024, 64


async def generate(server: FakeServer, body: Body) -> Any:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        left = [params["max_new_tokens"] for params in body["sampling_params"]]
        while any(left):
            for place, more in enumerate(left):
                if more:
                    left[place] -= (now := min(more, PIECE))
                    await response.write(event(place, output([1] * now, reason=None if left[place] else "length")))
            await asyncio.sleep(0.05)
        return response

    return answer


def processes(cluster: Cluster) -> list[int]:
    """The client processes; the run has no other actors."""
    return [process.pid for process in members(cluster.run_id) if "ray::AsyncWorker" in " ".join(process.cmdline())]


async def main(log_dir: Path) -> None:
    plan = allocation.compile("sglang:d1")
    async with run_cluster(
        SchedulerConfig(), plan, uses_gpus=False, log_dir=log_dir, shared_dir=log_dir / "shared"
    ) as cluster:
        start = partial(start_client, cluster, plan.engine("rollout"))
        async with (
            serving(FakeServer(generate)) as urls,
            Clients(2, start, partial(print, file=sys.stderr, flush=True), HUNG_S) as clients,
            ServerPool(urls, cluster.token, HUNG_S, read_answer=clients.read) as pool,
        ):
            async with pool.interrupt(0, Deadline(HUNG_S)):
                pass
            before = processes(cluster)
            asking = asyncio.gather(*(pool.sample([number], Sampling(TOKENS)) for number in range(64)))
            while pool.tokens_generated < 64 * TOKENS / 4:
                await asyncio.sleep(0.01)
            os.kill(next(iter(before)), signal.SIGKILL)
            responses = await asking
            async with asyncio.timeout(HUNG_S):  # one that is not replaced is on standard error
                while len(after := processes(cluster)) < 2:
                    await asyncio.sleep(0.1)
            facts = {
                "lengths": [len(response.tokens) for response in responses],
                "generated": pool.tokens_generated,
                "delivered": pool.tokens["delivered"],
                "faults": pool.statistics().get("server_faults/client", 0),
                "torch": [pid for pid in after if "libtorch" in Path(f"/proc/{pid}/maps").read_text()],
                "before": before,
                "after": after,
            }
            print(json.dumps(facts), flush=True)
            await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
