"""A user's workflow is loaded and looked at before anything starts: one finding says what is wrong, and where."""

import subprocess
import threading
from pathlib import Path

import pytest
from known import found_in
from limits import HUNG_S

from areal_like.config.load import load
from areal_like.runtime.user_code import register

GOOD = "async def run(row, client):\n    return 1.0\n"
EXAMPLES = sorted((Path(__file__).parents[3] / "examples/workflows").glob("*.py"))


@pytest.fixture
def findings(write, tmp_path):
    def findings(source, *overrides):
        (tmp_path / "own.py").write_text(source)
        config = load(write(), [f"workflow={tmp_path}/own.py:run", *overrides]).config
        return [(f.key, f.message, f.nearest) for f in found_in(config)]

    return findings


def test_a_workflow_that_can_be_called_is_fine(findings):
    assert findings(GOOD, "episode.tool_call_parser=qwen25") == []


def test_a_reward_beside_an_episode_s_own_is_said_to_do_nothing(findings):
    ((key, message, _),) = findings(GOOD, "reward.function=own.py:score")
    assert key == "reward" and "the workflow returns the reward" in message


def test_a_group_may_use_the_run_s_reward(findings):
    assert findings(GOOD.replace("row, client", "prompt, n, rollout"), "reward.function=own.py:score") == []


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_shipped_workflows_are_fine(file, write):
    needed = {"terminal": ["episode.sandbox={}"], "mcp_tools": ["episode.mcp_servers={x: {command: y}}"]}
    config = load(write(), [f"workflow={file}:run", *needed.get(file.stem, [])]).config
    assert found_in(config, dry_run=True) == []


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import nothing_of_that_name\n" + GOOD, "own.py cannot be imported: line 1: ModuleNotFoundError"),
        ("async def run(:\n", "own.py cannot be imported: line 1: "),
        ("1 / 0\n", "line 1: ZeroDivisionError"),
        (GOOD.replace("run", "walk"), "own.py has no 'run'; it has walk"),
        (GOOD.replace("async ", ""), "it is not asynchronous: write `async def run(row, client)` or"),
        (GOOD.replace("row, client", "row"), "it takes 1 parameters (row): write"),
        ("run = 3", "it is int, not a function: write"),
    ],
)
def test_what_cannot_be_called_is_one_finding(findings, source, words):
    ((key, message, _),) = findings(source)
    assert key == "workflow" and words in message


def test_an_unknown_parser_is_named_with_the_nearest(findings):
    ((key, message, nearest),) = findings(GOOD, "episode.tool_call_parser=qwen26")
    assert key == "episode.tool_call_parser" and "qwen26" in message and nearest[0].startswith("qwen2")


def test_trajectories_have_to_fit_the_servers_and_micro_batches(write, tmp_path):
    (tmp_path / "own.py").write_text(GOOD)
    config = load(write(), [f"workflow={tmp_path}/own.py:run", "episode.max_tokens=50"]).config
    assert (config.longest_sequence, config.context_length) == (50, 58)
    single = load(write(), ["workflow=single_turn", "episode.max_tokens=20"]).config  # which has no episodes
    assert (single.longest_sequence, single.context_length) == (40, 48)


def test_the_workflow_of_an_evaluation_is_checked_under_its_own_key(findings, tmp_path):
    (tmp_path / "other.py").write_text("run = 3")
    ((key, message, _),) = findings(GOOD, f"valid_dataset.workflow={tmp_path}/other.py:run")
    assert key == "valid_dataset.workflow" and "it is int, not a function" in message
    assert findings(GOOD, "valid_dataset.workflow=single_turn", "reward.function=own.py:score") == []


def test_an_object_that_no_worker_can_be_given_is_refused(write):
    class Player:
        def __init__(self):
            self.lock = threading.Lock()

        async def __call__(self, row, client):
            return 1.0

    with register({"workflow": Player()}) as references:
        (found,) = found_in(load(write(), [f"workflow={references['workflow']}"]).config)
    assert found.key == "workflow" and "cannot be sent to a worker process: " in found.message


def test_the_endpoint_s_address_and_certificate_are_checked(write, tmp_path):
    base = [f"workflow={EXAMPLES[0]}:run", "episode.endpoint=true"]

    def codes(*overrides, dry_run=False):
        return {found.code for found in found_in(load(write(), [*base, *overrides]).config, dry_run=dry_run)}

    assert codes("episode.endpoint_host=192.0.2.1") == {"RUN-ENDPOINT-HOST"}
    assert codes("episode.endpoint_host=192.0.2.1", dry_run=True) == set()
    assert codes("episode.endpoint_host=0.0.0.0") == {"RUN-ENDPOINT-HOST"}
    assert codes("episode.endpoint_host=127.0.0.1") == codes("episode.endpoint_host=auto") == set()
    file = tmp_path / "a.pem"
    file.write_text("no certificate")
    alone = f"episode.endpoint_certificate={file}"
    assert codes(alone) == codes(alone, f"episode.endpoint_key={file}") == {"RUN-ENDPOINT-TLS"}


def test_an_encrypted_key_is_refused_without_a_question(write, tmp_path):
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-passout", "pass:secret", "-subj", "/CN=a"]
    subprocess.run([*make, "-keyout", key, "-out", certificate], check=True, capture_output=True, timeout=HUNG_S)
    keys = [f"episode.endpoint_key={key}", f"episode.endpoint_certificate={certificate}"]
    config = load(write(), [f"workflow={EXAMPLES[0]}:run", "episode.endpoint=true", *keys]).config
    (found,) = found_in(config)
    assert found.code == "RUN-ENDPOINT-TLS" and "not encrypted" in str(found.help)


def test_a_group_s_workflow_is_not_graded_at_the_limit(write):
    found = found_in(load(write(), [f"workflow={EXAMPLES[1]}:run", "episode.on_timeout=grade"]).config)
    assert "episode.on_timeout" in {each.key for each in found if each.code == "RUN-UNUSED"}
