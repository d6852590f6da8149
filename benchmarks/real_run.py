"""Compare rollouts of a real model: SGLang as it is, the engine's server, the engine's client, and a whole run.

    python -m benchmarks.real_run servers --config examples/math/gsm8k_smollm2.yaml [key=value ...]
    python -m benchmarks.real_run run --config examples/math/gsm8k_smollm2.yaml [key=value ...]

`servers` starts SGLang's own `launch_server` and the engine's server with the same options on one GPU, or on a CPU,
where SGLang needs `benchmarks/plain_launcher.py`. It loads one after the other with the prompts of the run. Responses
end naturally and have log-probs. A closed loop keeps a number of requests running: a bare HTTP client for both servers,
then the engine's own client. The processes of the idle server are stopped meanwhile. `run` executes the job and reads
the log of its server. Figures are tokens per second, and milliseconds per decoding pass, by the number of requests.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import re
import secrets
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice, product
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import orjson
import typer

from allocation import ParallelSizes
from areal_like.backends.ray.lifetime import run_lifetime
from areal_like.backends.sglang.options import server_arguments
from areal_like.backends.sglang.process import SGLangServer
from areal_like.core.config.load import load
from areal_like.core.config.schema import RunConfig
from areal_like.core.rollout.http import Deadline
from areal_like.core.rollout.pool import Sampling, ServerPool
from areal_like.core.rollout.server import ServerSpec
from areal_like.job import Job
from areal_like.launch import check
from areal_like.run.model_files import model_directory
from benchmarks.demo import MARK, watched
from benchmarks.report import save

app = typer.Typer(add_completion=False)
LIMIT_S = 600.0
PROMPTS = 2048
BEST = (  # settings of SGLang's own server, in place of the engine's rule for prefills
    *("--enable-prefill-delayer", "--prefill-delayer-queue-min-ratio", "0.1"),
    *("--prefill-delayer-max-delay-passes", "32", "--prefill-delayer-max-delay-ms", "1000"),
)
SETTLE_S = 5.0
CURVE = (
    *("step", "reward/mean", "rollout/response_length", "throughput/rollout_tokens_per_second", "seconds/step"),
    *("idle/trainer", "idle/servers", "rollout/logprob_diff_probe"),
)
DECODE = re.compile(r"Decode batch.*?#running-req: (\d+).*?cuda graph: (\w+).*?gen throughput \(token/s\): ([\d.]+)")
PREFILL = re.compile(r"Prefill batch.*?#new-seq: (\d+), #new-token: (\d+)")
Config = Annotated[Path, typer.Option()]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="key=value ...")]

type Post = Callable[[Sequence[int]], Awaitable[int]]


@app.command()
def servers(
    config: Config, overrides: Overrides = None, running: str = "64,384,1024", rounds: int = 2, seconds: float = 8.0
) -> None:
    """Measure servers and clients without a run."""
    job = check(load(config, overrides or []), dry_run=True)
    with run_lifetime(secrets.token_hex(6)) as folder:
        rows = asyncio.run(_measure(job, folder, [int(each) for each in running.split(",")], rounds, seconds))
    totals: dict[tuple[str, int], list[float]] = defaultdict(list)
    for row in rows:
        totals[row["side"], row["level"]].append(row["tokens_per_s"])
    speed = {side: {} for side, _ in totals}
    for (side, level), values in totals.items():
        speed[side][level] = round(statistics.harmonic_mean(values))
    shares = {
        side: {level: round(value / max(1, speed["unpatched"][level]), 3) for level, value in found.items()}
        for side, found in speed.items()
    }
    print(json.dumps({"tokens_per_s": speed, "share_of_unpatched": shares}))
    figures = {"model": Path(job.config.actor.path or "").name, "tokens_per_s": speed, "share_of_unpatched": shares}
    save(f"real_run_servers_{job.device}", figures | {"rows": rows})


async def _measure(job: Job, folder: Path, levels: Sequence[int], rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Load SGLang's own server, the engine's, and the engine's through its client, in turns."""
    run = job.config
    model, token = await model_directory(run, folder), secrets.token_hex(16)
    prompts = [prompt.tokens for prompt in islice(job.train_prompts, PROMPTS)]
    arguments = server_arguments(run, model, ParallelSizes(), job.device)
    logs = {name: folder / f"{name}.log" for name in ("unpatched", "engine")}
    own = SGLangServer(ServerSpec("engine", arguments, logs["engine"], token, None, LIMIT_S), "127.0.0.1")
    with unpatched(arguments, token, logs["unpatched"], job.device) as (plain, process):
        urls = dict(zip(logs, await asyncio.gather(ready(plain, token), own.start()), strict=True))
        groups = {"unpatched": process.pid, "engine": own._process.pid}
        rows = []
        async with (
            bare_session(token) as session,
            ServerPool([urls["engine"]], token, LIMIT_S, prefill_once=run.rollout.prefill_once) as pool,
        ):
            async with pool.interrupt(0, Deadline(LIMIT_S)):
                await pool.servers[0].load(str(model), 0, LIMIT_S)
            sides = {name: (name, bare_post(session, url, run), 1) for name, url in urls.items()}
            sides["client"] = ("engine", pool_post(pool, run), run.gconfig.n_samples)
            for level, _ in product(levels, range(rounds)):
                for side, (server, post, samples) in sides.items():
                    with only(groups, server):
                        figures = await measured(logs[server], post, prompts, max(1, level // samples), seconds)
                    rows.append({"side": side, "level": level, **figures})
                    print(rows[-1], flush=True)
    return rows


@contextmanager
def only(groups: Mapping[str, int], name: str) -> Iterator[None]:
    """Stop the processes of all servers but one in the body: an idle server keeps a core busy."""
    others = [group for other, group in groups.items() if other != name]
    for group in others:
        os.killpg(group, signal.SIGSTOP)
    try:
        yield
    finally:
        for group in others:
            os.killpg(group, signal.SIGCONT)


@contextmanager
def unpatched(
    arguments: Sequence[str], token: str, log: Path, device: str = "cuda"
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Yield the URL and the process of SGLang's own server with the same options and its best ones."""
    port = random.randrange(20000, 30000)
    module, best = ("sglang.launch_server", BEST) if device == "cuda" else ("benchmarks.plain_launcher", ())
    command = [sys.executable, "-m", module, *arguments, *best, "--host", "127.0.0.1", "--port", str(port)]
    with open(log, "wb") as file:
        process = subprocess.Popen(
            [*command, "--api-key", token], stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            yield f"http://127.0.0.1:{port}", process
        finally:
            os.killpg(process.pid, signal.SIGKILL)


async def ready(url: str, token: str) -> str:
    """Wait until a server generates; return its URL."""
    async with bare_session(token) as session:
        while True:
            try:
                async with session.post(
                    url + "/generate", json={"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}
                ) as answer:
                    if answer.status == 200:
                        return url
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.5)


def bare_session(token: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {token}"},
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=LIMIT_S),
    )


def bare_post(session: aiohttp.ClientSession, url: str, run: RunConfig) -> Post:
    """Return a request with nothing around it."""
    sampling = {"max_new_tokens": run.gconfig.max_new_tokens, "temperature": run.gconfig.temperature}

    async def post(prompt: Sequence[int]) -> int:
        body = {"input_ids": list(prompt), "sampling_params": sampling, "return_logprob": True}
        async with session.post(url + "/generate", json=body) as answer:
            answer.raise_for_status()
            return len(orjson.loads(await answer.read())["meta_info"]["output_token_logprobs"])

    return post


def pool_post(pool: ServerPool, run: RunConfig) -> Post:
    """Return a request for a group through the engine's client."""
    sampling = Sampling(run.gconfig.max_new_tokens, run.gconfig.temperature)

    async def post(prompt: Sequence[int]) -> int:
        responses = await pool.generate([list(prompt)] * run.gconfig.n_samples, sampling)
        return sum(len(response.tokens) for response in responses)

    return post


async def measured(
    log: Path, post: Post, prompts: Sequence[Sequence[int]], loops: int, window_s: float
) -> dict[str, float]:
    """Run `loops` requests at a time; return tokens per second and milliseconds per pass after it has settled."""
    rng, done, stop = random.Random(0), 0, False

    async def loop() -> None:
        nonlocal done
        while not stop:
            tokens = await post(rng.choice(prompts))
            done += tokens  # read after the wait, as others count too

    tasks = [asyncio.create_task(loop()) for _ in range(loops)]
    await asyncio.sleep(SETTLE_S)
    offset, before, start = log.stat().st_size, done, time.monotonic()
    await asyncio.sleep(window_s)
    tokens, seconds = done - before, time.monotonic() - start
    with log.open("rb") as file:
        file.seek(offset)
        lines = file.read().decode(errors="replace")
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(1.0)
    return {"tokens_per_s": round(tokens / seconds), **passes(lines)}


def passes(log: str) -> dict[str, float]:
    """Return the medians of the decoding passes in a server's log."""
    found = [(int(n), graph == "True", float(rate)) for n, graph, rate in DECODE.findall(log) if float(rate) > 0]
    if not found:
        return {}
    prefills = [(int(requests), int(tokens)) for requests, tokens in PREFILL.findall(log)] or [(0, 0)]
    return {
        "running": statistics.median(n for n, _, _ in found),
        "ms_per_pass": round(statistics.median(1000 * n / rate for n, _, rate in found), 2),
        "log_tokens_per_s": round(statistics.median(rate for _, _, rate in found)),
        "graph_share": round(sum(graph for _, graph, _ in found) / len(found), 2),
        "prefills_per_40": round(len(prefills) / len(found), 1),
        "requests_per_prefill": statistics.median(requests for requests, _ in prefills),
        "tokens_per_prefill": statistics.median(tokens for _, tokens in prefills),
    }


@app.command()
def run(
    config: Config,
    overrides: Overrides = None,
    folder: Path = Path("/tmp/real_run"),
    limit: float = 3600.0,
    name: str = "real_run_run",
) -> None:
    """Execute the job for at most `limit` seconds; report its curve, and its servers' passes by running requests."""
    words = ["examples/math/gsm8k_rl.py", "--config", str(config), *(overrides or [])]
    words += [f"cluster.fileroot={folder}", "trial_name=t"]
    environment = {**os.environ, "PYTHONPATH": f"{os.getcwd()}:{os.environ.get('PYTHONPATH', '')}", MARK: str(folder)}
    start = time.time()
    process = subprocess.Popen([sys.executable, *words], env=environment)
    used = watched(process, str(folder), limit)
    code = process.wait()
    figures = {
        "exit_code": code,
        "seconds": round(time.time() - start, 1),
        "cpu_seconds": round(max(used.values(), default=0.0)),  # of all processes
    }
    for file in folder.rglob("metrics.jsonl"):
        examples = _evaluated(load(config, overrides or []).config)
        figures |= curve([json.loads(line) for line in file.read_text().splitlines()], examples)
    figures["passes"] = {
        log.name: passes_by_size(log.read_text(errors="replace")) for log in sorted(folder.rglob("server-*.log"))
    }
    print(json.dumps(figures, indent=1))
    if code and figures["seconds"] < limit:
        sys.exit(code)
    save(name, figures)


def _evaluated(config: RunConfig) -> int | None:
    """Return the number of evaluation prompts of a Parquet file, None for another dataset."""
    import pyarrow.parquet as pq

    path = str(config.valid_dataset.path) if config.valid_dataset else ""
    return pq.read_metadata(path).num_rows if path.endswith(".parquet") else None


def curve(rows: Sequence[Mapping[str, Any]], examples: int | None) -> dict[str, Any]:
    """Return the evaluations of a run with their standard errors, and the rewards and speeds of its steps."""
    held_out = {row["step"]: {"accuracy": row["reward/held_out"]} for row in rows if "reward/held_out" in row}
    for each in held_out.values():
        if examples:
            each["standard_error"] = round(math.sqrt(each["accuracy"] * (1 - each["accuracy"]) / examples), 4)
    steps = [row for row in rows if "seconds/step" in row]
    columns = {name: [row.get(name) for row in steps] for name in CURVE}
    waits = {
        name: round(sum(row.get(name, 0.0) for row in steps) / sum(row["seconds/step"] for row in steps), 3)
        for name in dict.fromkeys(name for row in steps for name in row if name.startswith("seconds/"))
    }
    return {"evaluation_problems": examples, "held_out": held_out, "shares_of_time": waits if steps else {}} | columns


def passes_by_size(log: str) -> dict[str, dict[str, float]]:
    """Return medians of the decoding passes in a server's log by the number of running requests, in powers of two."""
    by_size: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for n, graph, rate in DECODE.findall(log):
        if float(rate) > 0:
            by_size[f"{1 << int(n).bit_length() - 1}+ graph={graph}"].append((int(n), float(rate)))
    return {
        size: {
            "lines": len(rows),
            "tokens_per_s": round(statistics.median(rate for _, rate in rows)),
            "ms_per_pass": round(statistics.median(1000 * n / rate for n, rate in rows), 1),
        }
        for size, rows in sorted(by_size.items())
    }


if __name__ == "__main__":
    app()
