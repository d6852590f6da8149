"""How long the planner takes, in CPU seconds of this process.

python -m benchmarks.planner
"""

from __future__ import annotations

import time

import allocation
from allocation import BatchSpec, Cluster
from allocation.planner import Task, plan_layouts
from benchmarks.report import save

CASES = (("qwen3-8b", "1x8"), ("qwen3-30b-a3b", "4x8"), ("qwen3-30b-a3b", "128x8"), ("qwen3-235b-a22b", "128x8"))


def main() -> None:
    results = []
    for name, cluster in CASES:
        task = Task(
            allocation.load_model(name), Cluster.parse(cluster), batch=BatchSpec(256, 8, max_tokens_per_mb=16384)
        )
        start = time.process_time()
        choices = plan_layouts(task)
        seconds = time.process_time() - start
        best = choices[0].allocation if choices else None
        results.append({"model": name, "cluster": cluster, "seconds": round(seconds, 3), "best": best})
        print(results[-1])
    save("planner", {"unit": "CPU seconds", "cases": results})


if __name__ == "__main__":
    main()
