"""Compare the allocation compiler with other parsers, measured in the same run: `python -m benchmarks.allocation`.

AReaL's parser needs its own environment, because its pins differ from this project's:

    uv venv areal && uv pip install --python areal areal==1.0.4
    python -m benchmarks.allocation --areal-python areal/bin/python

Without AReaL and without megatron-core, only the compiler is measured. Every figure is the best of several, which
excludes other load, with the median beside it, which includes it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[0] = str(ROOT)  # run as a file, this one would otherwise be found as `allocation`

import allocation  # noqa: E402
from benchmarks.report import save  # noqa: E402

PUBLISHED = "megatron:(attn:d1p4t2c2|ffn:d1p4t1e4)"
LARGE = "megatron:(attn:d64p16t8c2|ffn:e64)"  # 16,384 GPUs
IMPORT = "import time; start = time.perf_counter(); import {}; print(time.perf_counter() - start)"
AREAL_VERSION = "from importlib.metadata import version; print(version('areal'))"
AREAL_PARSE = f"""
import json, time
from areal.api.alloc_mode import ModelAllocation
seconds = []
for _ in range(100):
    start = time.perf_counter()
    found = ModelAllocation.from_str({PUBLISHED!r}, name="actor")
    seconds.append(time.perf_counter() - start)
assert found.world_size == 16
print(json.dumps(seconds))
"""


def timed(work: Callable[[], Any], times: int) -> list[float]:
    """Seconds of each of `times` calls."""
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return seconds


def child(python: str, code: str) -> Any:
    """What `code` prints last, read as JSON."""
    result = subprocess.run([python, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(result.stdout.splitlines()[-1])


def parse_and_plan(areal_python: str | None) -> dict[str, list[float]]:
    """Seconds to parse, check and plan the published string, with every rule; AReaL's to parse it."""
    arguments: dict[str, Any] = {
        "cluster": allocation.Cluster(2, 8),
        "model": allocation.load_model("qwen3-30b-a3b"),
        "batch": allocation.BatchSpec(256, 4, max_length=2048, max_tokens_per_mb=10240),
    }
    figures = {"ours": timed(lambda: allocation.compile(PUBLISHED, **arguments), 1000)}
    if areal_python:
        figures["AReaL's parser"] = child(areal_python, AREAL_PARSE)
    return figures


def rank_groups() -> dict[str, list[float]]:
    """Seconds for all rank groups of 16,384 GPUs, dense and expert."""
    engine = allocation.compile(LARGE).engine("actor")
    figures = {"ours": timed(engine.all_groups, 20)}
    try:
        from megatron.core.parallel_state import RankGenerator
    except ImportError:
        return figures
    s = engine.sizes

    def theirs() -> None:
        from allocation.plan import DENSE_GROUPS, EXPERT_GROUPS

        dense = RankGenerator(tp=s.tp, ep=1, dp=s.dp, pp=s.pp, cp=s.cp, order=engine.order)
        expert = RankGenerator(tp=s.etp, ep=s.ep, dp=s.edp, pp=s.pp, cp=1, order=engine.order)
        for generator, groups in ((dense, DENSE_GROUPS), (expert, EXPERT_GROUPS)):
            for axes in groups.values():
                generator.get_ranks("-".join(axes))

    return {**figures, "megatron-core's generator": timed(theirs, 3)}


def import_time(areal_python: str | None) -> dict[str, list[float]]:
    """Seconds that the import takes inside a fresh process."""
    figures = {"ours": [child(sys.executable, IMPORT.format("allocation")) for _ in range(20)]}
    if areal_python:
        figures["AReaL's parser module"] = [
            child(areal_python, IMPORT.format("areal.api.alloc_mode")) for _ in range(3)
        ]
    return figures


def whole_process() -> dict[str, list[float]]:
    """Seconds from start to end of `allocation count`, and of a Python that does nothing, taken in turns."""
    commands = {"ours": ["-m", "allocation", "count", PUBLISHED], "python -c pass": ["-c", "pass"]}
    figures: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(20):
        for name, command in commands.items():
            words = [sys.executable, *command]
            figures[name] += timed(
                lambda words=words: subprocess.run(words, cwd=ROOT, capture_output=True, check=True), 1
            )
    return figures


def show(
    title: str, figures: dict[str, list[float]], unit: float, name: str, goal: str, difference: bool = False
) -> None:
    """One figure: ours, the yardstick's, and the ratio (or the difference) of the best."""
    print(f"{title}; goal: {goal}")
    for who, seconds in figures.items():
        print(f"  {who:26} best {min(seconds) * unit:10,.2f} {name}, median {statistics.median(seconds) * unit:10,.2f}")
    ours, *others = (min(seconds) for seconds in figures.values())
    if not others:
        print("  no yardstick here")
    elif difference:
        print(f"  {ours - others[0]:.3f} s more")
    else:
        print(f"  {others[0] / ours:,.0f} times faster")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--areal-python", help="Python of an environment with AReaL 1.0.4")
    areal = parser.parse_args().areal_python
    version = None
    if areal:
        version = subprocess.run(
            [areal, "-c", AREAL_VERSION], capture_output=True, text=True, check=True
        ).stdout.strip()
        print(f"AReaL {version}")
    figures = {
        "parse_check_plan_s": parse_and_plan(areal),
        "rank_groups_16384_s": rank_groups(),
        "import_s": import_time(areal),
        "process_s": whole_process(),
    }
    show("parse, check and plan", figures["parse_check_plan_s"], 1e6, "µs", "40 times faster than AReaL's parser alone")
    show("all rank groups of 16,384 GPUs", figures["rank_groups_16384_s"], 1e3, "ms", "at most 10 ms")
    show("import", figures["import_s"], 1, "s", "under 0.2 s")
    show("allocation count", figures["process_s"], 1, "s", "at most 0.25 s more than Python alone", difference=True)
    command = "python -m benchmarks.allocation" + (" --areal-python areal/bin/python" if areal else "")
    save("allocation", {"command": command, "areal": version, "figures": figures})


if __name__ == "__main__":
    main()
