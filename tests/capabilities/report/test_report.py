"""The page of a run: whole after every entry, without a network, and drawn by its own code."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import time
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from limits import HUNG_S
from typer.testing import CliRunner

from allocation import compile as compile_plan
from allocation.views.svg import plan_svg
from areal_like import __main__ as commands
from areal_like.capabilities.report.page import TEMPLATE, Report
from areal_like.capabilities.report.run_page import RunPage
from areal_like.capabilities.report.write import write_report
from areal_like.core.types import FinishReason, Trajectory
from areal_like.metrics.console import View
from areal_like.metrics.record import Record
from areal_like.metrics.sinks.scalars import Scalars

STEPS = 12
HOSTILE = "</script><img src=x onerror=alert(1)><!--\u2028"
ABOUT = {
    "steps": STEPS,
    "layout": "rollout sglang:d2, actor megatron:d2",
    "staleness": 1,
    "max_logprob_diff": 1e-3,
    "plan": '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 9 9"><text>a plan</text></svg>',
    "findings": ["warning[RUN-UNUSED] a <finding>"],
}


def trajectory(number: int, reward: float | None) -> Trajectory:
    tokens = np.array([72, 73, number, 65], np.int32)
    versions = np.array([-1, -1, 3, 4], np.int32)
    logprobs = np.zeros(4, np.float32)
    return Trajectory(number, number, tokens, logprobs, versions, FinishReason.STOP, reward, {"form": 0.5})


def decode(tokens: list[int]) -> str:
    return HOSTILE + str(tokens)


def record_run(directory: Path, seed: int = 0, title: str = "a title", end: str | None = "finished") -> Path:
    """What a run of 12 steps leaves, of which every third is evaluated; `end` None: it was killed."""
    directory.mkdir(parents=True)
    sinks = [Scalars(directory / "metrics.jsonl")]
    about = ABOUT | {"config": f"seed: {seed}\nactor: {{}}"}
    record = Record(
        directory, title, View(False), sinks, about=about, listeners=[RunPage(directory)], decode=decode, n_shown=2
    )
    clock = time.time()
    for step in range(1, STEPS + 1):
        for lane, start, seconds in (("actor 0", 0.1, 0.5), ("actor 1", 0.1, 0.6), ("server 0", 0.0, 1.0)):
            record._log.note(
                lane, "training" if "actor" in lane else "generating", clock + start, clock + start + seconds
            )
        record._log.note("controller", "training", clock + 0.1, clock + 0.7, step=step)
        record._log.note("groups", "group", clock, clock + 1, group=step)
        clock += 1
        stats = {"reward": step / STEPS, "loss": 0.1 / step, "kl": 1e-4 * step, "entropy": 2.0 / step, "grad_norm": 1.0}
        stats |= {"staleness_mean": 0.5, "staleness_max": 1.0, "logprob_diff": 1e-6, "response_length": 5.0 + step}
        stats |= {"reward_missing": 0.0, "skipped_batches": 0.0, "truncated_share": 0.25, "own": float("nan")}
        asyncio.run(record.samples(step, [trajectory(step, 1.0), trajectory(0, None), trajectory(1, 0.0)]))
        if step % 3 == 0:
            record.held_out(step, {"valid_dataset": {"mean@2": step / 20, "pass@1": step / 20, "pass@2": step / 12}})
        record.step(step, stats, 100 * step)
    if end:
        record.end(end)
        record.close()
    record._writer.wait()
    return directory


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_run(tmp_path_factory.mktemp("runs") / "run")


class Page(HTMLParser):
    """What a browser makes of the file: its scripts, and everything that it would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts: list[str] = []
        self.loads: list[str] = []
        self._in_script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self._in_script = tag == "script"
        self.loads += [str(value) for name, value in attributes if name in ("src", "href")]
        assert tag != "img"
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False

    def handle_data(self, data: str) -> None:
        if self._in_script:
            self.scripts[-1] += data


def test_the_page_loads_nothing_and_text_of_a_model_stays_text(finished: Path) -> None:
    page = Page((finished / "report.html").read_text())
    assert page.loads == []
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", TEMPLATE.read_text())
    entries = page.scripts[1:]
    assert len(entries) > 3 * STEPS
    assert all(entry.startswith('add(0,"') for entry in entries)
    assert any(r"\u003c/script>\u003cimg" in entry for entry in entries)


def test_the_page_of_a_run_that_was_killed_is_as_whole_as_its_last_entry(tmp_path: Path) -> None:
    page = Page((record_run(tmp_path / "run", end=None) / "report.html").read_text())
    scalars = [json.loads(entry[len('add(0,"scalars",') : -1]) for entry in page.scripts if '"scalars"' in entry[:20]]
    assert scalars[-1][0] == STEPS
    assert scalars[-1][1]["own" if "own" in scalars[-1][1] else "train/own"] is None  # nan is not JSON


def test_idle_shares_are_of_the_lanes_of_a_role(finished: Path) -> None:
    rows = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert {"idle/trainer", "idle/servers"} <= {name for row in rows for name in row}


DRAW = """
const vm = require("vm"), fs = require("fs");
const elements = {}, document = {title: "", getElementById: (id) => elements[id] ??= {value: "0", selectedIndex: 0}};
let load;
const context = vm.createContext({document, addEventListener: (_, f) => { load = f; }});
for (const script of JSON.parse(fs.readFileSync(0, "utf8"))) vm.runInContext(script, context);
load();
const written = Object.fromEntries(Object.entries(elements).map(([id, e]) => [id, e.innerHTML ?? ""]));
console.log(JSON.stringify({title: document.title, ...written}));
"""


def drawn(page: Path) -> dict[str, str]:
    """What the page's code writes into each element, by Node with a stand-in for the document."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs Node")
    scripts = json.dumps(Page(page.read_text()).scripts)
    result = subprocess.run([node, "-e", DRAW], input=scripts, capture_output=True, text=True, timeout=HUNG_S)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def pictures(html: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg .*?</svg>", html, re.DOTALL)]


def test_pictures_samples_and_health_are_drawn(finished: Path) -> None:
    page = drawn(finished / "report.html")
    assert page["title"] == "a title"
    headings = re.findall(r"<h3>(.*?)</h3>", page["page"])
    assert headings[:4] == ["Reward", "Loss", "KL to the behaviour policy", "Entropy"]
    assert {"Staleness (versions)", "Response length (tokens)", "Evaluation: valid_dataset", "Seconds per phase"} <= {
        *headings
    }
    assert len(pictures(page["page"])) >= 12
    (timeline,) = pictures(page["time0"])
    texts = [text.text for text in timeline.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[:4] == ["controller", "actor 0", "actor 1", "server 0"] or set(texts[:4]) == {
        *("controller", "actor 0", "actor 1", "server 0")
    }
    assert page["samples0"].count("<tr>") == 4  # the head and three, one without a reward
    assert "<img" not in page["samples0"] + page["page"]
    assert "finished" in page["page"] and "step 12 of 12" in page["page"]
    assert '<div class="card good">Staleness<b>at most 1</b>' in page["page"]


@pytest.mark.parametrize(("end", "said"), [("failed: a < b", "failed: a &#60; b"), (None, "has not ended")])
def test_the_page_says_how_a_run_ended(tmp_path: Path, end: str | None, said: str) -> None:
    assert said in drawn(record_run(tmp_path / "run", end=end) / "report.html")["page"]


def test_the_page_tells_of_the_last_attempt(tmp_path: Path) -> None:
    directory = record_run(tmp_path / "run", end="failed: a rank died")
    again = Record(
        directory,
        "a title",
        View(False),
        about=ABOUT | {"started": time.time() + STEPS},
        listeners=[RunPage(directory)],
    )
    again._writer.wait()
    page = drawn(directory / "report.html")["page"]
    assert "failed: a rank died" not in page and "has not ended" in page
    again.end("finished")
    again.close()
    assert '<span class="good">finished</span>' in drawn(directory / "report.html")["page"]


@pytest.mark.parametrize("end", ["failed: a rank died", None])
def test_a_step_that_was_made_again_begins_where_that_began(tmp_path: Path, end: str | None) -> None:
    directory = record_run(tmp_path / "run", end=end)
    began = time.time() + 3600.0
    again = Record(directory, "a title", View(False), about=ABOUT | {"started": began}, listeners=[RunPage(directory)])
    for step in (12, 13) if end else (11, 12):
        again._log.note("controller", "training", began + step, began + step + 1, step=step)
    again.start()
    again.close()
    page = directory / "report.html"
    last_two = 'document.getElementById("width0").value = "2"; document.getElementById("place0").value = "1"'
    page.write_text(f"{page.read_text()}<script>{last_two}</script>")
    assert ">2 s</text>" in drawn(page)["time0"]


def test_the_page_made_from_the_files_is_the_one_written_by_the_run(finished: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.html"
    write_report([finished], again)
    old, new = drawn(finished / "report.html"), drawn(again)
    assert new == old


def test_runs_are_compared(finished: Path, tmp_path: Path) -> None:
    other = record_run(tmp_path / "other", seed=1, title="another title")
    result = CliRunner().invoke(
        commands.app, ["report", str(finished), str(other), "--output", str(tmp_path / "both.html")]
    )
    assert result.exit_code == 0, result.output
    page = drawn(tmp_path / "both.html")
    assert page["title"] == "a title and another title"
    assert "<pre>seed: 0</pre>" in page["page"] and "<pre>seed: 1</pre>" in page["page"]


def test_a_trace_has_every_event_in_its_lane(finished: Path, tmp_path: Path) -> None:
    command = ["report", str(finished), "--output", str(tmp_path / "r.html"), "--trace", str(tmp_path / "t.json")]
    assert CliRunner().invoke(commands.app, command).exit_code == 0
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    spans = [event for event in events if event["ph"] == "X"]
    assert {names[event["tid"]] for event in spans} == {"controller", "actor 0", "actor 1", "server 0", "groups", "run"}
    assert [event["dur"] for event in spans if names[event["tid"]] == "actor 0"] == pytest.approx(
        [5e5] * STEPS, rel=1e-3
    )


def files(directory: Path) -> dict[str, bytes]:
    return {str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*") if file.is_file()}


@pytest.mark.parametrize(
    ("file", "contents", "commands_that_read_it"),
    [
        ("run.json", None, ["report", "samples"]),
        ("run.json", '{"title": "a ti', ["report"]),
        ("run.json", "[]", ["report"]),
        ("run.json", "{}", ["report"]),
        ("run.json", '{"title": "a", "plan": 3}', ["report"]),
        ("metrics.jsonl", '{"step": "two", "loss": 1}\n', ["report"]),
        ("metrics.jsonl", '{"step": 1, "loss": [1]}\n', ["report"]),
        ("metrics.jsonl", "[1]\n", ["report"]),
        ("metrics.jsonl", "\0\xff\n\0\n\0\n", ["report"]),
        ("events.jsonl", '{"lane": "actor 0", "name": "training", "start": "now", "end": 1, "ids": {}}\n', ["report"]),
        ("events.jsonl", '{"lane": "actor 0"}\n', ["report"]),
        ("samples/step-000012.jsonl", "{}\n", ["report", "samples"]),
        ("samples/step-000012.jsonl", '{"step": 12, "reward": "good"}\n', ["report", "samples"]),
        (".", None, ["report", "samples"]),
    ],
)
def test_a_directory_that_no_run_left_is_one_message_and_nothing_is_written(
    finished: Path, tmp_path: Path, file: str, contents: str | None, commands_that_read_it: list[str]
) -> None:
    run, trace = tmp_path / "run", tmp_path / "trace.json"
    shutil.copytree(finished, run)
    if contents is not None:
        (run / file).write_text(contents)
    elif file == ".":
        shutil.rmtree(run)
    else:
        (run / file).unlink()
    before = files(tmp_path)
    for command in commands_that_read_it:
        options = ["--trace", str(trace)] if command == "report" else []
        result = CliRunner().invoke(commands.app, [command, str(run), *options])
        assert (result.exit_code, result.stdout) == (commands.UNREADABLE, ""), result.output
        assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
        assert str(run / file) in result.stderr
    assert files(tmp_path) == before


def test_lines_that_a_kill_cut_off_are_left_out(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    for file in ("metrics.jsonl", "events.jsonl", "samples/step-000012.jsonl"):
        with (run / file).open("a") as opened:
            opened.write('{"step": 13, "lo')
    assert CliRunner().invoke(commands.app, ["report", str(run)]).exit_code == 0
    assert drawn(run / "report.html") == drawn(finished / "report.html")
    assert CliRunner().invoke(commands.app, ["samples", str(run)]).stdout.startswith("step 12: 3 samples")


@pytest.mark.parametrize("option", ["--output", "--trace"])
@pytest.mark.parametrize("place", ["none/file", "folder"])
def test_a_file_that_cannot_be_written_is_told_before_another_is(
    finished: Path, tmp_path: Path, option: str, place: str
) -> None:
    (tmp_path / "folder").mkdir()
    before = files(finished)
    result = CliRunner().invoke(commands.app, ["report", str(finished), option, str(tmp_path / place)])
    assert result.exit_code == commands.UNREADABLE
    assert f"{tmp_path / place} cannot be written" in result.stderr
    assert files(finished) == before and files(tmp_path) == {}


def test_samples_are_shown_from_the_worst(finished: Path) -> None:
    shown = CliRunner().invoke(commands.app, ["samples", str(finished), "--step", "4", "--worst", "1"]).stdout
    assert shown.startswith(
        "step 4: 3 samples, mean reward 0.500, 1 without a reward\n\n--- reward 0 · form 0.5 · group 1 · 2 tokens · stop"
    )
    assert "versions 3, 4" in shown
    assert r"\u2028" in shown
    rows = CliRunner().invoke(commands.app, ["samples", str(finished), "--best", "1", "--json"]).stdout.splitlines()
    assert [json.loads(row)["reward"] for row in rows] == [1.0]
    for order in ("--worst", "--best"):  # what no verifier has judged comes last, and is not hidden
        shown = CliRunner().invoke(commands.app, ["samples", str(finished), "--step", "4", order, "3"]).stdout
        assert re.findall(r"--- (reward \w+)", shown)[-1] == "reward missing"
    result = CliRunner().invoke(commands.app, ["samples", str(finished), "--step", "40"])
    assert result.exit_code == commands.UNREADABLE
    assert "holds no samples of step 40; it has 1, 2, 3" in result.stderr


def test_a_long_run_keeps_the_samples_of_some_steps(tmp_path: Path) -> None:
    report = Report(tmp_path / "report.html")
    for step in range(1, 2001):
        report.samples(step, None, [])
    report.close()
    assert len(Page((tmp_path / "report.html").read_text()).scripts) - 1 == 99 + 90 + 11


@pytest.mark.parametrize(
    "plan",
    [
        "<svg><script>alert(1)</script></svg>",
        '<svg onload="alert(1)"></svg>',
        '<svg><rect x="1"onclick="alert(1)"/></svg>',
        "<svg><text>a</text><img src=x></svg>",
        '<svg><a href="javascript:alert(1)"><text>a</text></a></svg>',
        '<svg style="position:fixed"></svg>',
        "<svg",
    ],
)
def test_a_layout_that_is_more_than_a_picture_is_shown_as_text(tmp_path: Path, plan: str) -> None:
    Record(tmp_path, "a title", View(False), about=ABOUT | {"plan": plan}, listeners=[RunPage(tmp_path)]).close()
    shown = drawn(tmp_path / "report.html")["page"]
    assert plan not in shown
    assert plan.partition(" ")[0].replace("<", "&#60;").partition(">")[0] in shown


def test_the_picture_of_a_plan_is_drawn(tmp_path: Path) -> None:
    plan = plan_svg(compile_plan("sglang:d2+megatron:d2"))
    Record(tmp_path, "a title", View(False), about=ABOUT | {"plan": plan}, listeners=[RunPage(tmp_path)]).close()
    assert plan in drawn(tmp_path / "report.html")["page"]
