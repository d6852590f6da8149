"""The page of a run in a real browser: nothing is complained of, everything is drawn, and its controls work."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import ask
from test_report import ABOUT, STEPS, record_run

import allocation
from allocation.views import svg
from areal_like.capabilities.report.write import write_report

LOOK = """(drawn) => {
  const all = (selector) => [...document.querySelectorAll(selector)], get = (id) => document.getElementById(id);
  const shown = (svg) => drawn(svg) && [...svg.querySelectorAll("polyline, rect, text")].some(drawn);
  all("details").forEach((one) => { one.open = true; });
  const answer = {title: document.title, charts: all(".grid svg").length, plans: all("#plan svg").length};
  answer.hidden = all("svg").filter((svg) => !shown(svg)).map((svg) => svg.outerHTML.slice(0, 300));
  answer.timelines = all("[id^=time] svg").length;
  answer.scrollsSideways = document.documentElement.scrollWidth > innerWidth;
  const before = get("time0").innerHTML, width = get("width0");
  width.value = "0"; width.dispatchEvent(new Event("change"));
  answer.timelineChanged = get("time0").innerHTML !== before;
  const place = get("place0"); width.value = "1"; width.dispatchEvent(new Event("change"));
  const end = get("time0").innerHTML; place.value = "0"; place.dispatchEvent(new Event("input"));
  answer.timelineMoved = get("time0").innerHTML !== end;
  const which = get("which0"), last = get("samples0").innerText;
  which.selectedIndex = 0; which.dispatchEvent(new Event("change"));
  answer.samples = [get("samples0").innerText, last];
  answer.images = all("img, iframe, link").length;
  return answer;
}"""
PLAN = svg.plan_svg(allocation.compile("sglang:d2+megatron:d2t2"))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(ABOUT, "plan", PLAN)
    return record_run(tmp_path / "run")


def test_the_page_of_a_run_is_drawn_and_its_controls_work(run: Path, tmp_path: Path) -> None:
    found = ask(run / "report.html", LOOK, tmp_path / "profile")
    assert found["title"] == "a title"
    assert found["hidden"] == []
    assert found["charts"] >= 14 and found["timelines"] == 1 and found["plans"] == 1
    assert found["timelineChanged"] and found["timelineMoved"] and not found["scrollsSideways"]
    first, last = found["samples"]
    assert "[1, 65]" in first and f"[{STEPS}, 65]" in last and "<img src=x onerror=alert(1)>" in last
    assert found["images"] == 0


def test_the_page_of_compared_runs_is_drawn(run: Path, tmp_path: Path) -> None:
    write_report([run, record_run(tmp_path / "other", seed=1, title="another", end=None)], tmp_path / "both.html")
    found = ask(tmp_path / "both.html", LOOK, tmp_path / "profile")
    assert found["title"] == "a title and another"
    assert found["hidden"] == [] and found["timelines"] == 2 and found["plans"] == 2


AXES = """(drawn) => {
  const all = (selector) => [...document.querySelectorAll(selector)];
  const at = (low, high) => ticks(low, high, 4), before = all("#curves polyline").length;
  const answer = {ticks: [at(0.498, 0.998), at(-0.03, 0.05), at(1.8e-7, 2.2e-7), at(0, 12345)]};
  answer.one = (chart([{label: "x", points: [[3, 2e-7]], colour: "red"}]).match(/text-anchor="end"/g) ?? []).length;
  answer.smoothed = smoothed([[1, 4], [2, 4], [3, 4]], 0.9).map((point) => point[1]);
  const share = document.getElementById("share"); share.value = "0.5"; share.dispatchEvent(new Event("change"));
  answer.faint = all('#curves polyline[opacity="0.3"]').length > 0 && all("#curves polyline").length > before;
  answer.tables = all(".compared table").length; answer.cards = all(".health .card").length;
  answer.columns = all(".compared tr:first-child th").length; answer.dashed = all(".legend i.dashed").length > 0;
  answer.keys = all("#curves > .grid .legend").some((one) => /reward\\/|train\\//.test(one.innerText));
  return answer;
}"""


@pytest.mark.long
def test_axes_have_round_numbers_and_runs_are_compared_in_one_table(run: Path, tmp_path: Path) -> None:
    write_report([run, record_run(tmp_path / "other", seed=1, title="another")], tmp_path / "both.html")
    found = ask(tmp_path / "both.html", AXES, tmp_path / "profile")
    assert found["ticks"][0] == [0.4, 0.6, 0.8, 1] and found["ticks"][1] == [-0.04, -0.02, 0, 0.02, 0.04, 0.06]
    assert found["ticks"][2] == [1.8e-7, 1.9e-7, 2e-7, 2.1e-7, 2.2e-7] and found["ticks"][3] == [0, 5000, 10000, 15000]
    assert found["one"] == 1 and found["smoothed"] == pytest.approx([4, 4, 4]) and found["faint"]
    assert (found["tables"], found["cards"], found["columns"]) == (1, 0, 3) and found["dashed"] and not found["keys"]


def test_a_page_that_was_cut_off_in_the_middle_of_an_entry_is_drawn(run: Path, tmp_path: Path) -> None:
    page = tmp_path / "cut.html"
    text = (run / "report.html").read_text()
    page.write_text(text[: text.rindex('add(0,"samples"') - len("<script>")])
    found = ask(page, LOOK, tmp_path / "profile")
    assert found["hidden"] == [] and found["timelines"] == 1


@pytest.mark.long
def test_a_problem_would_be_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("<html><head></head><body></body><script>throw Error('broken')</script></html>")
    with pytest.raises(AssertionError, match="broken"):
        ask(page, "() => 1", tmp_path / "profile")
    page.write_text("<html><head></head><body><img src='http://127.0.0.1:9/x'></body></html>")
    with pytest.raises(AssertionError, match=r"127\.0\.0\.1"):
        ask(page, "() => 1", tmp_path / "profile")
