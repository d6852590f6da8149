"""The planner's order of layouts against step times that were measured on GPUs."""

import json

import pytest

from benchmarks.planner import MEASURED, measured, predicted, settings, throughputs


def test_the_order_of_layouts_is_the_measured_one():
    shapes = measured(MEASURED)
    assert shapes.keys() == {"dense", "experts"}
    for found in shapes.values():
        assert len(found["layouts"]) >= 8
        assert found["rank_correlation"] >= 0.8


def test_measured_steps_are_predicted():
    rows = [one for found in measured(MEASURED).values() for one in found["layouts"]] + throughputs() + settings()
    assert len(rows) >= 37
    for one in rows:
        assert one["predicted_s"] == pytest.approx(one["measured_s"], rel=0.15), one


def training(case) -> float:
    """Seconds without log-probs: three of four parts of what the GPU does, two of three of what the host does."""
    parts = predicted(case)
    once = parts.pop("optimizer") + parts.pop("dp")
    host, device = parts.pop("host"), sum(parts.values())
    if "num_experts" in case["shape"]:
        return once + 0.75 * device + 2 / 3 * host
    return once + max(0.75 * device, 2 / 3 * (device + host) if host else 0.0)


@pytest.mark.parametrize("file", ["memory_h200.json", "memory_h200x2.json"])
def test_training_elsewhere_takes_about_as_long_as_predicted(file):
    """Figures that the constants are not fitted to, of training alone."""
    cases = json.loads(MEASURED.with_name(file).read_text())["cases"]
    whole = [case for case in cases if "failed" not in case and not case.get("lora_rank")]
    assert len(whole) >= 3
    for case in whole:
        assert training(case) == pytest.approx(case["step_seconds"], rel=0.3), case["name"]
