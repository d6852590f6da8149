"""Measure the controller's cost per response token and how long it blocks, with servers that answer at once.

    python -m benchmarks.controller [--in-flight 1000 --in-flight 10000 --in-flight 100000] [--tokens 1024]

A response passes only the engine's own code: admission, the pool's queue and HTTP, groups, and the trainer's batch.
The servers are separate processes that send prepared events to all of their requests in turn, at most `--rate`
tokens per second. The number of concurrent groups corresponds to `in_flight` samples. A batch has half of these
groups with η = 1, or `--batch` groups with the η that so many groups need. For example, `--tokens 16384 --batch 512
--in-flight 10000` is a batch of 512 x 16 x 16k tokens.
Each server and the controller needs its own core.

With `--hosts`, hosts fail every minute of a simulated clock instead (`benchmarks.failing_hosts`):

    python -m benchmarks.controller --hosts 512

Figures for each number in flight:
- response tokens per second of the controller's CPU time (all threads), and of wall time;
- the longest time between two turns of a task that requests one every 5 ms: in wall time; without the time in which the
  event loop's thread waited for a core; and in CPU time of that thread. All calls that are ready at once lie between
  two turns, so this grows with the number of connections;
- the longest single call of the event loop, in CPU time of its thread, in a round of its own: timing every call costs
  a tenth to a fifth of the tokens per second;
- the cost of an event in the bookkeeping alone, with as many groups and samples waiting and 512 servers
  (`benchmarks.bookkeeping`).
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import numpy as np
import orjson
import psutil
import typer
from aiohttp import web

from areal_like.algorithms.batch import join
from areal_like.cluster.lifetime import run_lifetime
from areal_like.data.stream import PromptStream
from areal_like.rollout.admission import Admission
from areal_like.rollout.collector import Collector
from areal_like.rollout.http import Deadline
from areal_like.rollout.pool import Sampling, ServerPool
from areal_like.rollout.sample import CHUNK
from areal_like.rollout.sglang.labels import LABELS
from areal_like.rollout.sglang.patches.columns import with_columns
from areal_like.runtime.gc_tuning import gc_tuned, release
from areal_like.types import Prompt, Reward
from areal_like.workflows.single_turn import SingleTurn
from benchmarks.bookkeeping import bookkeeping
from benchmarks.failing_hosts import Case, compare
from benchmarks.report import save

N_SAMPLES, PROMPT_TOKENS = 16, 32
MANY_SERVERS = 512
RATE = 4e6  # tokens per second that the servers have together, at most
STALL_S = 600  # that a server may do nothing
TICK_S = 0.005
TOKEN = "benchmark"


def main(
    in_flight: Annotated[list[int], typer.Option()] = [1000, 10_000, 100_000],  # noqa: B006
    tokens: Annotated[int, typer.Option(help="response tokens of a sample")] = 1024,
    samples: Annotated[int, typer.Option(help="samples of a measurement, at least; twice what is in flight")] = 10000,
    batch: Annotated[int | None, typer.Option(help="groups of a training step")] = None,
    servers: int = 2,
    rounds: int = 3,
    calls: Annotated[bool, typer.Option(help="time single calls too, in a further round")] = True,
    rate: Annotated[float, typer.Option(help="tokens per second that the servers have together, at most")] = RATE,
    name: Annotated[str, typer.Option(help="of the file of results")] = "controller_cpu",
    hosts: Annotated[int, typer.Option(help="simulated hosts that fail, instead of all of this")] = 0,
    minutes: Annotated[float, typer.Option(help="simulated minutes with --hosts")] = 60.0,
) -> None:
    if hosts:
        save(f"failing_hosts_{hosts}_cpu", compare(Case(hosts, minutes)))
        return
    with run_lifetime(secrets.token_hex(6)), running(servers) as urls:
        cases = [(n, tokens, max(samples, 2 * n), batch, rate) for n in in_flight]
        rows = asyncio.run(_rows(urls, [(*case, False) for case in cases * rounds]))
        watched = asyncio.run(_rows(urls, [(*case, True) for case in cases])) if calls else []
    best = [max((row for row in rows if row["in_flight"] == n), key=_per_cpu_second) for n in in_flight]
    costs = [1 / _per_cpu_second(row) for row in best]
    save(
        name,
        {
            "response_tokens": tokens,
            "samples_per_group": N_SAMPLES,
            "chunk_tokens": CHUNK,
            "best_round": best,
            "bookkeeping": [asyncio.run(bookkeeping(n, MANY_SERVERS)) for n in in_flight],
            "cost_per_token_most_over_least_in_flight": costs[-1] / costs[0],
            "about": "measured beside other work: load_average says how busy the machine was",
            "rounds": rows,
            "longest_call_cpu_ms": {row["in_flight"]: row["longest_call_cpu_ms"] for row in watched},
        },
    )


def _per_cpu_second(row: dict[str, float]) -> float:
    return row["tokens_per_cpu_second"]


async def _rows(urls: Sequence[str], cases: Sequence[tuple[Any, ...]]) -> list[dict[str, float]]:
    return [await measure(urls, *case) for case in cases]


async def measure(
    urls: Sequence[str],
    in_flight: int,
    tokens: int,
    samples: int,
    batch: int | None,
    rate: float,
    calls: bool,
) -> dict[str, float]:
    groups = math.ceil(in_flight / N_SAMPLES)
    size = batch or max(1, groups // 2)
    steps = math.ceil(samples / N_SAMPLES / size)
    prompts = [Prompt(row, np.full(PROMPT_TOKENS, row % 1000).tolist()) for row in range(1000)]
    async with (
        gc_tuned(),
        ServerPool(urls, TOKEN, STALL_S, prefill_once=False) as pool,
        asyncio.TaskGroup() as tasks,
    ):
        async with pool.interrupt(0, Deadline(60)):
            for server in pool.servers:
                await server.connection.post("/pace", in_flight * CHUNK / rate, 60)  # type: ignore[arg-type]
        collector = Collector(
            prompts=PromptStream(prompts, shuffle=True, seed=0),
            groups=steps * size,
            workflow=SingleTurn(pool, no_reward, Sampling(tokens), N_SAMPLES),
            admission=Admission(size, max(1, math.ceil(groups / size))),
            max_groups=groups,
            tasks=tasks,
        )
        watch = Watch(pool)
        watching = asyncio.create_task(watch.look())
        begun, used = time.perf_counter(), cpu_seconds()
        with timed_calls(watch) if calls else nullcontext():
            for version in range(steps):
                collector.publish(version)  # no update: the servers' tokens are all of version 0
                trajectories = await collector.next_batch()
                await asyncio.to_thread(join, trajectories, version)
                await release(trajectories)
        wall_s, cpu_s = time.perf_counter() - begun, {role: s - used[role] for role, s in cpu_seconds().items()}
        watching.cancel()
        total = pool.tokens["delivered"]
    assert total == steps * size * N_SAMPLES * tokens, "tokens were lost"
    row = {
        "in_flight": in_flight,
        "most_in_flight": watch.in_flight,
        "batch_groups": size,
        "steps": steps,
        "response_tokens": total,
        "wall_s": round(wall_s, 3),
        **{f"cpu_s_{role}": round(seconds, 3) for role, seconds in cpu_s.items()},
        "tokens_per_cpu_second": round(total / cpu_s["controller"]),
        "tokens_per_second": round(total / wall_s),
        "longest_block_wall_ms": round(1e3 * watch.wall_s, 1),
        "longest_block_with_a_core_ms": round(1e3 * watch.with_a_core_s, 1),
        "longest_block_cpu_ms": round(1e3 * watch.cpu_s, 1),
    }
    if calls:
        row["longest_call_cpu_ms"] = round(1e3 * watch.call_cpu_s, 1)
    print(row, flush=True)
    return row


def cpu_seconds() -> dict[str, float]:
    """CPU time so far of the controller, and of all servers and Ray's other processes."""
    seconds = {"controller": time.process_time(), "servers": 0.0, "ray": 0.0}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            command, times = " ".join(process.cmdline()), process.cpu_times()
            role = "servers" if "spawn_main" in command else "ray"
            seconds[role] += times.user + times.system
    return seconds


async def no_reward(prompt: Prompt, responses: Sequence[Any]) -> list[Reward]:
    return [Reward(0.0)] * len(responses)


@dataclass(eq=False)
class Watch:
    """How long the event loop was blocked at most, and how many samples were on their way."""

    pool: ServerPool
    wall_s: float = 0.0
    with_a_core_s: float = 0.0
    cpu_s: float = 0.0
    call_cpu_s: float = 0.0
    in_flight: int = 0

    async def look(self) -> None:
        """Look on until cancelled."""
        while True:
            wall, without, cpu = time.perf_counter(), without_a_core_s(), time.thread_time()
            await asyncio.sleep(TICK_S)
            wall, without = time.perf_counter() - wall, without_a_core_s() - without
            self.wall_s = max(self.wall_s, wall - TICK_S)
            self.with_a_core_s = max(self.with_a_core_s, wall - max(TICK_S, without))
            self.cpu_s = max(self.cpu_s, time.thread_time() - cpu)
            self.in_flight = max(self.in_flight, self.pool._router._dispatch.in_flight)


@contextmanager
def timed_calls(watch: Watch) -> Iterator[None]:
    """Note the longest call of the event loop."""
    run = asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        begun = time.thread_time()
        run(handle)
        watch.call_cpu_s = max(watch.call_cpu_s, time.thread_time() - begun)

    with mock.patch.object(asyncio.Handle, "_run", timed):
        yield


def without_a_core_s() -> float:
    """How long this thread was ready to run so far and had no core (Linux: Documentation/scheduler/sched-stats.rst)."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


# The servers.


@contextmanager
def running(servers: int) -> Iterator[list[str]]:
    """Server processes, and their URLs."""
    context = multiprocessing.get_context("spawn")
    processes, urls = [], []
    try:
        for _ in range(servers):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs,), daemon=True)
            process.start()
            processes.append(process)
            urls.append(ours.recv())
        yield urls
    finally:
        for process in processes:
            process.kill()
            process.join()


def serve(pipe: Connection) -> None:
    """Run one server; send its URL through the pipe."""
    asyncio.run(_serve(pipe))


class Chunks:
    """Events about CHUNK tokens, as our SGLang servers write them (`skip_tokenizer_init`), up to the input's place."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        tokens, logprobs = rng.integers(0, 151_000, CHUNK).tolist(), np.log(rng.random(CHUNK, np.float32)).tolist()
        self._scored = [[logprob, token, None] for logprob, token in zip(logprobs, tokens, strict=True)]
        self._tokens = tokens
        self._made: dict[tuple[int, bool], bytes] = {}

    def event(self, place: int, tokens: int, end: bool) -> bytes:
        key = tokens, end
        if key not in self._made:
            info = {
                "id": "12345678-server 0",
                "finish_reason": {"type": "length", "length": tokens} if end else None,
                "prompt_tokens": PROMPT_TOKENS,
                "weight_version": "0",
                "num_retractions": 0,
                "output_token_logprobs": self._scored[:tokens],
                "output_token_logprobs_length": tokens,
                LABELS: ["0"] * tokens,
                "completion_tokens": tokens,
                "cached_tokens": 0,
                "e2e_latency": 1.25,
            }
            answer = {"output_ids": self._tokens[:tokens], "meta_info": info}
            self._made[key] = orjson.dumps(with_columns(answer))[:-1]
        return b'data: %b,"index":%d}\n\n' % (self._made[key], place)


async def _serve(pipe: Connection) -> None:
    chunks, pace_s = Chunks(), 0.0

    async def generate(request: web.Request) -> web.StreamResponse:
        asked = orjson.loads(await request.read())
        left = [params["max_new_tokens"] for params in asked["sampling_params"]]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while any(left):
            for place, more in enumerate(left):
                if more:
                    await response.write(chunks.event(place, min(more, CHUNK), more <= CHUNK))
                    left[place] = max(0, more - CHUNK)
            await asyncio.sleep(pace_s)
        with suppress(ConnectionResetError):  # the engine hangs up when it has all
            await response.write(b"data: [DONE]\n\n")
        return response

    async def pace(request: web.Request) -> web.StreamResponse:
        nonlocal pace_s
        pace_s = float(await request.text())
        return web.json_response({})

    async def other(request: web.Request) -> web.StreamResponse:
        answers: dict[str, Any] = {
            "/model_info": {"weight_version": "0"},
            "/server_info": {"internal_states": [{"effective_max_running_requests_per_dp": 1 << 20}]},
            "/v1/loads": {"loads": []},
        }
        return web.json_response(answers.get(request.path, {"success": True}))

    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/generate", generate)
    app.router.add_post("/pace", pace)
    app.router.add_route("*", "/{path:.*}", other)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    pipe.send(f"http://127.0.0.1:{runner.addresses[0][1]}")
    await asyncio.Event().wait()


if __name__ == "__main__":
    typer.run(main)
