"""A user's reward is tried before the start, in a process that can be killed."""

import time

import pytest

from areal_like.core.config.load import load
from areal_like.preflight import preflight


def found(write, tmp_path, code: str, *overrides: str) -> list[str]:
    (tmp_path / "own.py").write_text(code)
    checked = preflight(load(write(), [f"reward.function={tmp_path}/own.py:score", *overrides]))
    return [str(finding) for finding in checked.findings if finding.code.startswith("RUN-REWARD-")]


def test_a_good_reward_sees_a_row_with_all_of_its_columns(write, tmp_path):
    code = "def score(response, row):\n    assert response == row['answer'] and row['question']\n    return 1\n"
    assert found(write, tmp_path, code) == []


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import nowhere\n", ["own.py cannot be imported: line 1: ModuleNotFoundError", "reward.function"]),
        ("def score(response, row):\n    return row['x']\n", ["row 1", "own.py:score, line 2: KeyError: 'x'"]),
        ("def score(responses, row):\n    return [1]\n", ["row 1", "1 values for 2 responses"]),
        (
            "import time\ndef score(response, row):\n    time.sleep(99)\n",
            ["row 1", "more than 1 s", "raise reward.timeout_s"],
        ),
        ("import os\ndef score(response, row):\n    os._exit(7)\n", ["row 1", "its process died (exit code 7)"]),
    ],
)
def test_what_is_wrong_is_one_finding(write, tmp_path, code, words):
    start = time.monotonic()
    (finding,) = found(write, tmp_path, code, "reward.timeout_s=1")
    assert all(word in finding for word in words), finding
    assert time.monotonic() - start < 200


def test_a_reward_that_compares_is_tried_with_the_responses_of_an_evaluation_too(write, tmp_path):
    code = "import statistics\ndef score(responses, row):\n    return [statistics.stdev(map(len, responses))] * len(responses)\n"
    (finding,) = found(write, tmp_path, code)
    assert "row 1, 1 of its responses: " in finding and "StatisticsError" in finding
    assert found(write, tmp_path, code, "valid_dataset=null") == []
    assert found(write, tmp_path, code, "evaluator={at_start: false, at_end: false}") == []
    assert found(write, tmp_path, code, "evaluator={n_samples: 3, temperature: 1.0}") == []


def test_own_rewards_need_no_answers(write, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "How many?", "level": 3}\n' * 4)
    more = (f"train_dataset.path={rows}", "valid_dataset=null")
    assert found(write, tmp_path, "def score(response, row):\n    return row['level']\n", *more) == []


@pytest.mark.parametrize("run", ["single_turn", "own.py:run"])
def test_a_held_out_set_that_the_verifier_judges_needs_answers_whatever_plays_the_run(write, tmp_path, run):
    (tmp_path / "own.py").write_text("async def run(row, client):\n    return 1.0\n")
    (tmp_path / "rows.jsonl").write_text('{"question": "1?"}\n')
    overrides = [f"workflow={run.replace('own.py', f'{tmp_path}/own.py')}", f"valid_dataset.path={tmp_path}/rows.jsonl"]
    unknown = "actor.init_model={tokenizer: bytes, max_position_embeddings: 512}", "train_dataset.max_prompt_length=99"

    def refused(*more: str) -> list[str | None]:
        checked = preflight(load(write(), [*overrides, *unknown, *more]))
        return [finding.key for finding in checked.findings if str(finding.severity) == "error"]

    assert refused("valid_dataset.workflow=single_turn") == ["valid_dataset.answer_field"]
    assert refused() == (["valid_dataset.answer_field"] if run == "single_turn" else [])


def test_a_warm_start_needs_no_answers_of_a_set_that_it_does_not_imitate(write, tmp_path):
    (tmp_path / "rows.jsonl").write_text(
        '{"question": "Tom has 1 apples and buys 2 more. How many apples does Tom have now?"}\n'
    )
    more = "warm_start.steps=1", f"evaluator.datasets.other={{path: {tmp_path}/rows.jsonl, max_prompt_length: 32}}"
    (tmp_path / "own.py").write_text("def score(response, row):\n    return 1\n")
    checked = preflight(load(write(), [f"reward.function={tmp_path}/own.py:score", *more]))
    assert checked.ok, list(map(str, checked.findings))


@pytest.mark.parametrize("value", ["lambda: 1", "threading.Lock()"])
def test_a_row_that_cannot_be_sent_to_a_worker_is_a_finding(write, tmp_path, value):
    rows = f"import threading\n\nrows = [{{'question': '1?', 'answer': '1', 'more': {value}}}] * 4\n"
    (tmp_path / "rows.py").write_text(rows)
    more = (f"train_dataset.path={tmp_path}/rows.py:rows", "valid_dataset=null")
    (finding,) = found(write, tmp_path, "def score(response, row):\n    return 1\n", *more)
    assert "row 1: cannot be sent to or from a worker process" in finding
