"""A run whose agents hold the GIL, and start processes that never end, takes its steps and leaves nothing."""

from __future__ import annotations

import json

import psutil
import pytest
from running import ENDLESS, run

WORKFLOW = """
import asyncio, os, re, subprocess, time
from concurrent.futures import ProcessPoolExecutor

def once(name):
    try:
        os.close(os.open(f"FOLDER/{name}", os.O_CREAT | os.O_EXCL))
        return True
    except FileExistsError:
        return False

async def run(row, client):
    await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": row["question"]}])
    if once("regex"):
        await asyncio.to_thread(lambda: re.match(r"(a+)+$", "a" * 45 + "b"))
    if once("children"):
        ProcessPoolExecutor(1).submit(time.sleep, 71717)
        subprocess.Popen(["sleep", "71717"], env={"PATH": "/usr/bin:/bin"}, start_new_session=True)
    return float(len(row["answer"]) % 2)
"""


@pytest.mark.long
def test_hostile_agents_neither_stop_a_run_nor_outlive_it(tmp_path):
    (tmp_path / "agents.py").write_text(WORKFLOW.replace("FOLDER", str(tmp_path)))
    overrides = [f"workflow={tmp_path}/agents.py:run", "episode.blocked_s=5"]
    with run(tmp_path, *ENDLESS, *overrides, "total_train_steps=2") as started:
        assert started.end() == 0, started.output + started.errors
        assert started.remains() == []
    assert "it blocked its event loop for more than 5 s" in started.output
    lines = (started.directory / "metrics.jsonl").read_text().splitlines()
    assert sum(json.loads(line).get("episodes/blocked", 0) for line in lines) == 1
    assert not [it for it in psutil.process_iter(["cmdline"]) if "71717" in (it.info["cmdline"] or [])]
