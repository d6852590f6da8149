"""Measure the CPU demo with servers that download their weights over a slow link, relative to downloads without it.

    python -m benchmarks.far_servers [--steps 40] [--rounds 2]

Each run has `weight_update.mode=disk` with deltas and `rollout.max_head_offpolicyness=2`, in bfloat16 and with a
learning rate at which deltas are as small as in RL of large models (`benchmarks.weight_deltas`). Servers download the
files from Python's web server (`weight_update.url`): directly, or through a proxy with a delay of 50 ms in each
direction and 20 MB/s (`tests/slow_link.py`). Only downloads cross the link: requests for tokens go to the servers
directly. Rounds alternate the order of the two runs because machines drift. `ratio` is the rate of steps over the link
÷ directly; steps before `FIRST` do not count.
"""

from __future__ import annotations

import asyncio
import os
import re
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from areal_like.metrics.event_file import read_events
from areal_like.metrics.lines import read_rows
from areal_like.metrics.names import METRICS_FILE
from benchmarks.demo import CONFIG, SCRIPT
from benchmarks.report import ROOT, save

sys.path.append(str(ROOT / "tests"))
from slow_link import slow_link

MEANS = ("seconds/step", "seconds/weight_update", "seconds/wait_for_rollouts", "staleness/max")
DELAY_S, BYTES_PER_S = 0.05, 20e6
FIRST = 6  # the steps before it fill the queues
SETTINGS = (
    *("actor.dtype=bfloat16", "actor.optimizer.lr=1e-5"),
    *("weight_update.mode=disk", "rollout.max_head_offpolicyness=2"),
    *("evaluator.freq_steps=null", "evaluator.at_start=false", "evaluator.at_end=false"),
)


def main(
    steps: Annotated[int, typer.Option(help="training steps of each run")] = 40,
    rounds: Annotated[int, typer.Option(help="runs of each kind")] = 2,
) -> None:
    """Run all rounds and write the figures."""
    asyncio.run(measure_all(steps, rounds))


async def measure_all(steps: int, rounds: int) -> None:
    """Alternate between both kinds of runs; write the figures after each round."""
    done: list[dict[str, Any]] = []
    for number in range(rounds):
        order = [False, True] if number % 2 == 0 else [True, False]
        figures = {slow: await measure(steps, slow=slow) for slow in order}
        done.append({"order": ["link" if slow else "direct" for slow in order]})
        done[-1] |= {"direct": figures[False], "link": figures[True]}
        done[-1]["ratio"] = figures[True]["steps_per_second"] / figures[False]["steps_per_second"]
        both = [sum(1 / each[kind]["steps_per_second"] for each in done) for kind in ("direct", "link")]
        link = {"delay_s": DELAY_S, "bytes_per_s": BYTES_PER_S}
        save("far_servers_cpu", {"link": link, "settings": SETTINGS, "ratio": both[0] / both[1], "rounds": done})


async def measure(steps: int, *, slow: bool) -> dict[str, Any]:
    """Run the demo once; return its rate of steps and what went over the link."""
    with tempfile.TemporaryDirectory() as folder:
        async with web_server(folder) as url:
            if not slow:
                return await run_demo(folder, steps, url)
            async with slow_link(url, delay_s=DELAY_S, bytes_per_s=BYTES_PER_S) as (slow_url, link):
                figures = await run_demo(folder, steps, slow_url)
                return figures | {"bytes_sent": link.sent, "downloads": link.connections}


@asynccontextmanager
async def web_server(folder: str) -> AsyncIterator[str]:
    """Serve a folder with Python's own web server; yield its URL."""
    command = [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory", folder]
    pipe, nothing = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=nothing)
    try:
        assert process.stdout
        line = (await process.stdout.readline()).decode()
        yield re.findall(r"http://[^\s/)]+", line)[0]
    finally:
        process.kill()
        await process.wait()


async def run_demo(folder: str, steps: int, url: str) -> dict[str, Any]:
    """Run the demo to its end; return steps per second, and medians of what each step took."""
    where = [f"cluster.fileroot={folder}", "experiment_name=demo", "trial_name=run", f"weight_update.url={url}"]
    settings = [*where, f"total_train_steps={steps}", f"weight_update.full_every={steps + 2}", *SETTINGS]
    command = [sys.executable, str(SCRIPT), "--config", str(CONFIG), *settings]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT)
    if await process.wait():
        raise SystemExit("the run failed")
    directory = Path(folder) / "demo/run"
    lines = read_rows(directory / METRICS_FILE, dict[str, int | float | None])
    rows = [row for row in lines if (row.get("step") or 0) >= FIRST and "seconds/step" in row]
    means = {name: sum(row.get(name) or 0 for row in rows) / len(rows) for name in MEANS}
    files = [event.ids for event in read_events(directory) if event.name == "file" and event.ids["version"] >= FIRST]
    shares = [file["bytes"] / file["weights"] for file in files]
    return {
        "steps": len(rows),
        "steps_per_second": 1 / means["seconds/step"],
        "means": means,
        "bytes_of_weights": files[0]["weights"],
        "median_share_of_a_delta": statistics.median(shares),
        "load_average": os.getloadavg()[0],
    }


if __name__ == "__main__":
    typer.run(main)
