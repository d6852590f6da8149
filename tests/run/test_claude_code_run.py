"""A whole run that trains an agent in a process of its own, which sends all fields of Claude Code."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from running import ROOT, run

AGENT = Path(__file__).with_name("claude_code_agent.py")
PLAYED = (
    f"workflow={ROOT / 'examples/adapters/command.py'}:run",
    *("episode.endpoint=true", "episode.max_tokens=12000", "episode.models=[claude-*]"),
    *("episode.tool_call_parser=qwen25", "episode.ignored_fields=[thinking,context_management]"),
    *("actor.init_model.tokenizer=bytes", "actor.init_model.max_position_embeddings=12288"),
    *("actor.init_model.num_hidden_layers=1", "actor.init_model.hidden_size=64"),
    *("train_dataset.batch_size=2", "gconfig.n_samples=2", "total_train_steps=2", "warm_start=null"),
    *("evaluator.at_start=false", "evaluator.at_end=false", "train_dataset.max_prompt_length=80"),
)


@pytest.mark.long
@pytest.mark.covers("agents")
def test_an_agent_that_sends_all_fields_of_claude_code_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENT_COMMAND", f"{sys.executable} {AGENT}")
    with run(tmp_path, *PLAYED) as started:
        assert started.end() == 0, started.output + started.errors
        assert started.steps() == [1, 2]
    rows = [json.loads(line) for line in (started.directory / "metrics.jsonl").read_text().splitlines()]
    counts = {name: sum(row.get(name, 0) for row in rows) for name in rows[-1] | rows[0] | rows[1]}
    assert counts["episodes/done"] >= 8 and not any(counts.get(f"episodes/{bad}") for bad in ("raised", "not_a_reward"))
    assert counts["turns/first"] == counts["episodes/done"] and not counts.get("turns/branch")
    assert all(row["train/grad_norm"] >= 0 for row in rows if "train/grad_norm" in row)
