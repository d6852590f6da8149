"""A user's workflow: what it may look like, how it fails, and that nothing of that ends or holds up a run."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playing import ASK, Pool, score
from scripted import tokenizer

from areal_like.capabilities.agents import forms
from areal_like.capabilities.agents.forms import WorkflowError, level_of
from areal_like.capabilities.agents.make import Workflows
from areal_like.capabilities.agents.workers.processes import UserProcesses
from areal_like.core.config.load import load
from areal_like.core.errors import RunError, ServerError
from areal_like.core.rollout.http import Unavailable
from areal_like.core.rollout.pool import Sampling
from areal_like.core.types import TURN_REWARDS, TURN_STATES, Prompt
from areal_like.core.user_code import register

ROOT = Path(__file__).parents[3]
ROW = {"question": "1 + 1?", "answer": "2", "chosen": "ab", "rejected": "b"}


@pytest.fixture
def play(write: Callable[..., Path], tmp_path: Path, processes: UserProcesses) -> Callable[..., Any]:
    """Runs a workflow's source for some groups; gives their trajectories, what was said, and the counts of outcomes."""

    def play(
        source: str,
        *overrides: str,
        groups: int = 1,
        pool: Pool | None = None,
        n: int = 2,
        seed: int | None = None,
        row: dict[str, Any] = ROW,
        tokens: Sequence[int] = (7,),
    ) -> Any:
        file = tmp_path / f"workflow_{time.monotonic_ns()}.py"
        file.write_text("import asyncio, sys, time\n" + source)
        config = load(write(), [f"workflow={file}:run", *overrides]).config
        said: list[str] = []
        own = tokenizer("plain")

        async def main() -> Any:
            async with Workflows(config, pool or Pool(), score, own, said.append, 1000, processes) as workflows:  # type: ignore[arg-type]
                workflow = workflows.train(Sampling(8, stop_token_ids=own.eos_token_ids), n, seed)
                prompts = [Prompt(group, tokens, row=row) for group in range(groups)]
                results = await asyncio.gather(*(workflow(prompt, 10 + i) for i, prompt in enumerate(prompts)))
                ended = {
                    name.removeprefix("episodes/"): n for name, n in workflows.counts().items() if "turns/" not in name
                }
                return results, said, ended

        return asyncio.run(main())

    return play


def test_an_episode_is_a_coroutine_with_a_row_and_a_client(play):
    pool = Pool()
    (group,), said, counts = play(f"async def run(row, client):\n    await {ASK}\n    return 0.5", pool=pool)
    assert [(t.group_id, t.sample_id, t.sample, t.reward) for t in group] == [(10, 0, 0, 0.5), (10, 0, 1, 0.5)]
    assert set(pool.sessions) == {10}  # a group's episodes share a server, and the prompt in its cache
    assert pool.prefilled == [] and pool.asked[0] == pool.asked[1]  # too few tokens to wait for
    assert (said, counts) == ([], {"done": 2})


def test_turns_have_rewards_of_their_own(play):
    """The second conversation, as of another agent, has the third answer."""
    source = f"""
async def run(row, client):
    first = await {ASK}
    answer = {{"role": "assistant", "content": first.choices[0].message.content}}
    asked = [{{"role": "user", "content": row["question"]}}, answer, {{"role": "user", "content": "Sure?"}}]
    await client.chat.completions.create(model="policy", messages=asked)
    await client.chat.completions.create(model="policy", messages=[{{"role": "user", "content": "judge"}}])
    return {{"reward": 1, "turns": [0.5, 0.25, -1], "tools": 2}}
"""
    (group,), said, counts = play(source, "episode.max_tokens=200", n=1)
    assert (said, counts) == ([], {"done": 1})
    talk, judge = group
    assert talk.reward == judge.reward == 1 and talk.reward_parts == {"tools": 2, "turns": -0.25}
    ends = np.flatnonzero(talk.generated & ~np.append(talk.generated[1:], False))
    assert (
        talk.columns[TURN_REWARDS][ends].tolist() == [0.5, 0.25] and np.count_nonzero(talk.columns[TURN_REWARDS]) == 2
    )
    assert judge.columns[TURN_REWARDS][-1] == -1 and np.count_nonzero(judge.columns[TURN_REWARDS]) == 1


def test_turns_have_states_where_they_start(play):
    """Equal names are equal states in every sample; a text is another state than the number of the same digits."""
    source = f"async def run(row, client):\n    await {ASK}\n    return {{'reward': 1, 'states': [NAME]}}"
    numbers = []
    for name in ("'door'", "'door'", "'1'", "1"):
        (group,), said, counts = play(source.replace("NAME", name))
        assert (said, counts) == ([], {"done": 2}) and all(
            np.count_nonzero(item.columns[TURN_STATES]) == 1 for item in group
        )
        numbers.append({int(item.columns[TURN_STATES][-1]) for item in group})
    assert [len(each) for each in numbers] == [1, 1, 1, 1] and numbers[0] == numbers[1]
    assert len(set.union(*numbers)) == 3 and max(set.union(*numbers)) <= 2**48
    for states, words in (("['a', 'b']", "2 states under 'states' for 1 answers"), ("[0.5]", "0.5, neither a text")):
        _, (said,), counts = play(source.replace("[NAME]", states))
        assert counts == {"not_a_reward": 2} and words in said


@pytest.mark.parametrize(
    ("turns", "words"),
    [("[1, 2]", "2 rewards under 'turns' for 1 answers"), ("[None]", "None"), ("['a']", "'a'")],
)
def test_rewards_of_turns_are_one_number_for_each_answer(play, turns, words):
    source = f"async def run(row, client):\n    await {ASK}\n    return {{'reward': 1, 'turns': {turns}}}"
    (group,), (said,), counts = play(source)
    assert counts == {"not_a_reward": 2} and words in said
    assert [item.reward for item in group] == [None, None]


def test_a_group_has_no_rewards_of_turns(play):
    source = """
async def run(prompt, n, rollout):
    response = await rollout.sample(prompt.tokens)
    return [rollout.trajectory([prompt.tokens, response], {"reward": 1, "turns": [1]})]
"""
    _, (said,), counts = play(source)
    assert counts == {"not_a_reward": 2} and "which only an episode can have" in said


@pytest.mark.parametrize(
    ("body", "limit", "cause"),
    [
        ("await asyncio.sleep(99999)", "episode.timeout_s=2", "time_limit"),
        (f"await {ASK}", "episode.max_turns=1", "limit_of_turns"),
    ],
)
def test_an_episode_that_meets_a_limit_is_graded_by_its_last_answer_where_asked(play, body, limit, cause):
    """The score of these tests is the number of tokens."""
    source = f"async def run(row, client):\n    await {ASK}\n    {body}"
    (group,), said, counts = play(source, limit, "episode.on_timeout=grade", "episode.max_failed_share=0")
    assert [item.reward for item in group] == [float(item.generated.sum()) for item in group]
    assert (said, counts) == ([], {f"graded_{cause}": 2})


@pytest.mark.parametrize("body", ["raise OSError('the database is away')", "import os; os._exit(3)"])
def test_what_fails_otherwise_is_missing_and_never_graded(play, body):
    source = f"async def run(row, client):\n    await {ASK}\n    {body}"
    (group,), _, counts = play(source, "episode.on_timeout=grade")
    assert [item.reward for item in group] == [None] * len(group) and not [name for name in counts if "graded" in name]


def test_a_long_opening_is_prefilled_once_for_a_group(play):
    pool, long = Pool(), ASK.replace('row["question"]', 'row["question"] * 20')
    play(f"async def run(row, client):\n    await {long}\n    return 0.5", "episode.max_tokens=500", pool=pool)
    assert pool.prefilled == [pool.asked[0]] == [pool.asked[1]]
    assert len(pool.cancelled) == 1  # its token is nobody's: tokens/unfinished would keep one for each group


GROUP = """
async def run(prompt, n, rollout):
    opening = rollout.tokenizer.encode_chat([{"role": "user", "content": prompt.row["question"]}])
    responses = [await rollout.sample(opening, max_new_tokens=2) for _ in range(n)]
    rewards = await rollout.score([response.tokens for response in responses])
    result = [rollout.trajectory([opening, r, [5, 6]], reward) for r, reward in zip(responses, rewards)]
    async with rollout.record() as agent:
        await agent.client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "x"}])
        return result + agent.trajectories(-1.0)
"""


@pytest.mark.parametrize(
    "source",
    [
        "async def run(prompt, n, rollout):\n    await rollout.sample([1, 2])\n    await asyncio.sleep(60)",
        f"async def run(row, client):\n    await {ASK}\n    await asyncio.sleep(60)",
    ],
)
def test_what_was_generated_for_a_group_that_is_broken_off_counts_as_cancelled(source, write, tmp_path, processes):
    (file := tmp_path / "workflow.py").write_text(f"import asyncio\n{source}\n")
    own, pool = tokenizer("plain"), Pool()

    async def main() -> None:
        config = load(write(), [f"workflow={file}:run"]).config
        async with Workflows(config, pool, score, own, print, None, processes) as workflows:  # type: ignore[arg-type]
            workflow = workflows.train(Sampling(8, stop_token_ids=own.eos_token_ids), 1)
            group = asyncio.create_task(workflow(Prompt(0, [], row=ROW), 10))
            while not pool.asked:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            group.cancel()
            await asyncio.gather(group, return_exceptions=True)

    asyncio.run(main())
    assert [len(response.tokens) > 1 for response in pool.cancelled] == [True]


def test_a_group_is_a_coroutine_that_returns_trajectories(play):
    (group,), said, counts = play(GROUP, n=3)
    assert [t.reward for t in group] == [2, 2, 2, -1]
    assert [t.sample for t in group] == [0, 1, 2, 3] and {t.group_id for t in group} == {10}
    generated = group[0].generated.tolist()
    assert generated[-4:] == [True, True, False, False] and not any(generated[:-4])
    assert (said, counts) == ([], {"done": 3})


@pytest.mark.parametrize(
    "source", [GROUP, f"async def run(row, client):\n    await {ASK}\n    await {ASK}\n    return 1.0"]
)
def test_every_request_of_a_seeded_group_has_a_seed_of_its_own_and_again_the_same(play, source):
    """SGLang hashes seed and position alone: equal prompts of equal seeds have equal responses, which teach nothing."""
    first, again, other = Pool(), Pool(), Pool()
    for pool, seed in ((first, 17), (again, 17), (other, 18)):
        play(source, groups=2, pool=pool, n=4, seed=seed)
    assert len(set(first.seeds)) == len(first.seeds) >= 10 and None not in first.seeds
    assert set(first.seeds) == set(again.seeds) and not set(first.seeds) & set(other.seeds)


@pytest.mark.parametrize(("example", "given"), [("preferences", [("ab", 1.0), ("b", 0.0)]), ("answers", [("2", 1.0)])])
def test_responses_of_a_dataset_are_trajectories_with_unknown_log_probs(play, example, given):
    pool = Pool()
    (group,), said, counts = play((ROOT / f"examples/offline/{example}.py").read_text(), pool=pool, n=len(given))
    own = tokenizer("plain")
    assert [(own.decode(t.tokens[t.generated].tolist()), t.reward) for t in group] == given
    for item in group:
        assert item.tokens[-1] == own.eos_token_ids[0] and set(item.versions[item.generated]) == {3}
        assert np.isnan(item.logprobs[item.generated]).all() and not item.logprobs[~item.generated].any()
    assert pool.asked == [] and (said, counts) == ([], {"done": len(given)})


@pytest.mark.parametrize(
    ("body", "cause", "words"),
    [
        ("raise KeyError('answer')", "raised", r"line 5: KeyError: 'answer'"),
        ("sys.exit(3)", "raised", "line 5: SystemExit: 3"),
        ("raise KeyboardInterrupt", "raised", "line 5: KeyboardInterrupt"),
        (
            "raise type('Failed', (BaseException,), {})('as of pytest.fail')",
            "raised",
            "line 5: Failed: as of pytest.fail",
        ),
        ("await asyncio.sleep(99999)", "time_limit", "2 s .episode.timeout_s"),
        ("return 'good'", "not_a_reward", "'good', not a number"),
        ("return float('nan')", "not_a_reward", "nan"),
        ("return [1.0]", "not_a_reward", r"\[1.0\]"),
        ("return Reward(1.0, {'note': 'x'})", "not_a_reward", "'x', not a number under 'note'"),
        ("return Reward(1.0, None)", "not_a_reward", "parts"),
        (f"return {ASK[:0]}await asyncio.wait_for(asyncio.sleep(9), 0.01)", "raised", "TimeoutError"),
        (f"await {ASK}", "limit_of_turns", "episode.max_turns"),
    ],
)
def test_an_episode_that_fails_is_counted_and_its_samples_have_no_reward(play, body, cause, words):
    source = f"from areal_like.core.types import Reward\nasync def run(row, client):\n    await {ASK}\n    {body}"
    limits = [f"episode.timeout_s={2 if cause == 'time_limit' else 600}", "episode.max_turns=1"]
    (group,), (said,), counts = play(source, *limits)
    assert [t.reward for t in group] == [None, None] and all(t.generated.any() for t in group)
    assert counts == {cause: 2}
    assert re.search(words, said), said


@pytest.mark.parametrize("leaving", ["sys.exit(3)", "raise KeyboardInterrupt"])
def test_a_task_of_a_workflow_that_exits_ends_nothing_else(play, leaving):
    source = f"""
async def leave():
    {leaving}
async def run(row, client):
    task = asyncio.create_task(leave())
    await asyncio.wait([task])
    await {ASK}
    return 1.0
"""
    (group,), _, counts = play(source, n=3)
    assert [t.reward for t in group] == [1.0] * 3 and counts == {"done": 3}


@pytest.mark.parametrize(
    "source",
    [
        """
async def run(row, client):
    for _ in range(2):
        completion = await client.chat.completions.create(model="policy", messages=row["prompt"])
        row["prompt"] += [completion.choices[0].message, {"role": "user", "content": "again"}]
    return len(row["prompt"])
""",
        """
async def run(prompt, n, rollout):
    messages = prompt.row["prompt"]
    messages += [{"role": "user", "content": "again"}] * 4
    tokens = prompt.tokens
    tokens += rollout.tokenizer.encode_chat(messages)
    response = await rollout.sample(tokens)
    return [rollout.trajectory([tokens, response], len(messages))]
""",
    ],
)
def test_a_workflow_may_change_its_row(play, source):
    """As whoever appends to the row's messages does: the row of other episodes, and of later epochs, stays as it is."""
    row = {"prompt": [{"role": "user", "content": "x"}]}
    groups, _, _ = play(source, "episode.max_tokens=900", n=3, groups=2, row=row, tokens=(tokens := [7]))
    assert {t.reward for group in groups for t in group} == {5.0}
    assert row == {"prompt": [{"role": "user", "content": "x"}]} and tokens == [7]


def test_an_episode_without_a_completion_gives_no_trajectory(play):
    (group,), _, counts = play("async def run(row, client):\n    return 1.0")
    assert (group, counts) == ([], {"nothing_generated": 2})


def test_a_workflow_may_heed_a_limit_itself(play):
    source = f"""
import openai
async def run(row, client):
    try:
        while True:
            await {ASK}
    except openai.BadRequestError:
        return 0.25
"""
    (group,), _, counts = play(source)
    assert {t.reward for t in group} == {0.25} and counts == {"done": 2}


def test_a_group_that_fails_counts_for_all_its_samples(play):
    for body, cause in (
        ("return 3", "not_trajectories"),
        ("raise ValueError", "raised"),
        ("return [3]", "not_trajectories"),
    ):
        (group,), _, counts = play(f"async def run(prompt, n, rollout):\n    {body}", n=4)
        assert (group, counts) == ([], {cause: 4})


def test_too_many_failures_of_a_batch_end_the_run(play):
    """A batch of the run has 4 prompts with 2 samples."""
    source = f"async def run(row, client):\n    await {ASK}\n    raise KeyError('x')"
    play(source, groups=3)
    with pytest.raises(RunError, match=r"8 of the last 8 .* \(8 raised\).*max_failed_share.*KeyError: 'x'"):
        play(source, groups=4)
    play(source, "episode.max_failed_share=1", groups=4)


@pytest.mark.parametrize(("form", "asking"), [("row, client", ASK), ("prompt, n, rollout", "rollout.sample([1, 2])")])
def test_what_the_servers_fail_of_ends_the_run_whatever_the_workflow_makes_of_it(play, form, asking):
    source = f"async def run({form}):\n    try:\n        await {asking}\n    except Exception:\n        return 0.0"
    with pytest.raises(ServerError, match="no server is left"):
        play(source, pool=Pool(ServerError("no server is left")))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("def run(row, client): ...", "not asynchronous: write `async def run"),
        ("async def run(row): ...", r"takes 1 parameters \(row\)"),
        ("async def run(): ...", r"takes 0 parameters \(none\)"),
        ("run = 5", "it is int, not a function"),
    ],
)
def test_what_is_no_workflow_is_refused_with_what_would_be_one(function, words):
    names: dict[str, Any] = {}
    exec(function, names)
    with pytest.raises(WorkflowError, match=words):
        level_of(names["run"])


def test_forms_are_told_by_their_parameters():
    async def episode(row: Any, client: Any, tries: int = 3) -> float:
        return 0.0

    async def group(prompt: Any, n: int, rollout: Any) -> list[Any]:
        return []

    class Player:
        async def __call__(self, row: Any, client: Any) -> float:
            return 0.0

    assert [level_of(each) for each in (episode, group, Player())] == ["episode", "group", "episode"]
    assert set(forms.FORMS) == {"episode", "group"}


@pytest.mark.parametrize("form", ["row, client", "prompt, n, rollout"])
def test_an_episode_that_is_cancelled_from_within_has_failed(play, form):
    (_,), _, counts = play(
        f"""
async def run({form}):
    inner = asyncio.create_task(asyncio.sleep(9))
    inner.cancel()
    await inner
"""
    )
    assert counts == {"raised": 2}


def test_what_a_group_samples_fits_the_servers_context(play):
    """SGLang refuses a request that could outgrow it, and what the servers fail of is the run's."""
    pool, source = Pool(), "async def run(prompt, n, rollout):\n    await rollout.sample([5] * {})\n    return []"
    (group,), said, counts = play(source.format(29), "episode.max_tokens=30", pool=pool)
    assert (group, said, counts) == ([], [], {"done": 2})
    assert len(pool.prefilled) == 1  # the room for one token
    (group,), (said,), counts = play(source.format(30), "episode.max_tokens=30")
    assert (group, counts) == ([], {"limit_of_tokens": 2}) and "30 tokens leaves no room among 30 (episode.max" in said
    for wrong in ("[]", "[-1, 2]", "[1000]"):
        (group,), (said,), counts = play(f"async def run(prompt, n, rollout):\n    await rollout.sample({wrong})")
        assert (group, counts) == (
            [],
            {"raised": 2},
        ) and "at least one token id, each at least 0 and below 1000" in said


def test_a_groups_rewards_are_numbers_and_its_trajectories_fit_a_micro_batch(play):
    def returned(reward: str, *limits: str) -> Any:
        return play(
            GROUP.replace("return result + agent.trajectories(-1.0)", f"return agent.trajectories({reward})"), *limits
        )

    (group,), _, counts = returned("dict(reward=True, turns=2)")
    assert (type(group[0].reward), dict(group[0].reward_parts)) == (float, {"turns": 2.0}) and counts == {"done": 2}
    for reward in ("float('nan')", "'good'"):
        (group,), _, counts = returned(reward)
        assert (group, counts) == ([], {"not_a_reward": 2})
    long = "return [rollout.trajectory([[5] * 9999, responses[0]], 1.0)]"
    (group,), (said,), counts = play(GROUP.replace("return result + agent.trajectories(-1.0)", long))
    assert (group, counts) == ([], {"limit_of_tokens": 2}) and "episode.max_tokens" in said


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ("logprobs=np.zeros(2, np.float32), versions=np.array([0, 0])", r"shapes \(3,\), \(2,\) and \(2,\)"),
        ("tokens=np.zeros((3, 1), int)", r"shapes \(3, 1\)"),
        ("tokens=[1, 2, 10**6]", "token id 1000000; the model has ids 0 to 999"),
        ("tokens=[1, 2, -5]", "token id -5"),
        ("tokens=np.array([1, 2, 10**12])", "token id 1000000000000"),
        ("tokens=[1.5, 2, 3]", "trajectory 0 is invalid"),
        ("tokens='abc'", "trajectory 0 is invalid"),
        ("versions=None", "trajectory 0 is invalid"),
        ("versions=np.zeros(3, int)", "trajectory 0 begins with a generated token, not with the prompt"),
        ("logprobs=[0, 'x', 0]", "trajectory 0 is invalid"),
        ("finish_reason='tired'", "'tired' is not a valid FinishReason"),
        ("reward_parts=None", "trajectory 0 is invalid"),
    ],
)
def test_a_trajectory_made_by_hand_is_one_or_its_group_has_failed(play, changes, words):
    (group,), said, counts = play(BY_HAND.format(changes=changes))
    assert (group, counts) == ([], {"not_trajectories": 2})
    assert re.search(words, said[0]), said


def test_lists_of_a_trajectory_made_by_hand_become_arrays(play):
    (group,), said, counts = play(BY_HAND.format(changes="sample_id=77"))
    assert (said, counts) == ([], {"done": 2}) and group[0].sample_id == 0
    assert [each.dtype for each in (group[0].tokens, group[0].logprobs, group[0].versions)] == ["i4", "f4", "i4"]
    assert group[0].generated.tolist() == [False, True, True]


BY_HAND = """
import numpy as np
from dataclasses import replace
from areal_like.core.types import Trajectory


async def run(prompt, n, rollout):
    r = await rollout.sample([1], max_new_tokens=2)
    tokens, logprobs, versions = ([first, *own.tolist()] for first, own in ((1, r.tokens), (0.0, r.logprobs), (-1, r.versions)))
    made = Trajectory(0, 0, tokens, logprobs, versions, "stop", 1.0)
    return [replace(made, {changes})]
"""


TWO = """
import numpy as np
from dataclasses import replace

kept = []


async def run(prompt, n, rollout):
    r, other = [await rollout.sample([1], max_new_tokens=2) for _ in range(2)]
    whole = rollout.trajectory([[1], r, other, [4], [5]], 1.0)
    {body}
"""


@pytest.mark.parametrize(
    "body",
    [
        "return [replace(whole, versions=np.where(whole.generated, 999999, -1))]",
        "return [replace(whole, versions=np.where(whole.generated, 0, -1))]",
        "return [replace(whole, logprobs=whole.logprobs / 2)]",
        "return [replace(whole, tokens=np.where(whole.generated, 7, 1))]",
        "return [replace(whole, versions=np.where(np.arange(len(whole.tokens)) == 0, -1, 3))]",
        "kept.append(whole); return [kept[0]]",  # later groups have the first one's of their process
    ],
)
def test_generated_tokens_of_a_group_are_those_that_the_servers_recorded(play, body):
    """Staleness would have no bound otherwise, nor log-probs a meaning."""
    groups = 9 if "kept" in body else 1  # beyond one for each process
    (*_, group), (said,), counts = play(TWO.format(body=body), "episode.max_failed_share=1", groups=groups)
    assert group == [] and counts["not_trajectories"] >= 2
    assert re.search(
        r"trajectory 0: its generated tokens \d+ to \d+ are not a response to this group: .*rollout.sample", said
    )


@pytest.mark.parametrize(
    "body",
    [
        "return [whole, whole]",
        "return [whole, rollout.trajectory([[1], other], 1.0)]",
        "return [rollout.trajectory([[1], r, [4], r], 1.0)]",
    ],
)
def test_a_response_is_trained_on_once(play, body):
    (group,), (said,), counts = play(TWO.format(body=body))
    assert (group, counts) == ([], {"not_trajectories": 2})
    assert re.search(r"trajectory \d: the response at token \d is already in the group's trajectories", said)


def test_conversations_of_one_recorded_client_are_one_sample(play):
    source = """
async def run(prompt, n, rollout):
    async with rollout.record() as one, rollout.record() as other:
        for agent, text in ((one, "x"), (other, "x"), (one, "y")):
            await agent.client.chat.completions.create(model="policy", messages=[{"role": "user", "content": text}])
        response = await rollout.sample([1, 2])
        return [*one.trajectories(1.0), *other.trajectories(0.0), rollout.trajectory([[1, 2], response], 1.0)]
"""
    (group,), said, counts = play(source)
    assert (said, counts) == ([], {"done": 2}) and [t.sample for t in group] == [0, 0, 1, 2]


def test_a_group_may_train_on_parts_of_its_responses_and_leave_others_out(play):
    body = """
    cut = replace(whole, **{name: getattr(whole, name)[:4] for name in ("tokens", "logprobs", "versions")})
    third = await rollout.sample([1], max_new_tokens=2)
    return [cut]
"""
    (group,), said, counts = play(TWO.format(body=body))
    assert (said, counts) == ([], {"done": 2}) and group[0].generated.tolist() == [False, True, True, True]


@pytest.mark.parametrize(
    ("source", "unused"),
    [
        (TWO.format(body="return [rollout.trajectory([[1], r], 1.0)]"), 2),
        (TWO.format(body="return [whole]"), 0),
        (TWO.format(body="raise ValueError"), 4),
        (f"async def run(row, client):\n    await {ASK}\n    return 1.0", 0),
        (f"async def run(row, client):\n    await {ASK[:-1]}, stop=['ab'])\n    return 1.0", 2),  # both end tokens
        (f"async def run(row, client):\n    await {ASK}\n    raise ValueError", 0),  # it has trajectories
    ],
)
def test_what_a_workflow_leaves_out_is_counted(play, source, unused):
    pool = Pool()
    play(source, pool=pool)
    assert pool.aside == {"orphaned": 0, "unused": unused}


def test_data_of_a_group_has_the_version_of_its_weights(play):
    body = "return [replace(rollout.wrap_response([1], [2, 3], 1.0), versions=[-1, 999999, 999999])]"
    (group,), _, counts = play(TWO.format(body=body))
    assert counts == {"done": 2} and group[0].versions.tolist() == [-1, 3, 3]


class Parser:
    """A server that reads tool calls, or fails of it."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure = failure

    async def parse_tools(
        self, text: str, tools: Any, parser: str, timeout_s: float
    ) -> tuple[str, list[tuple[str, str]]]:
        if self.failure:
            raise self.failure
        return "", [("add", "{}")]


@pytest.mark.parametrize(
    ("servers", "called", "cause"),
    [
        ([Parser(Unavailable("down")), Parser()], True, "done"),
        ([Parser(Unavailable("its parser fails of this text"))], False, "done"),
        ([Parser(ServerError("422: these are no tools"))], False, "raised"),
    ],
)
def test_a_text_that_no_parser_reads_never_ends_the_run(play, servers, called, cause):
    pool = Pool()
    pool.servers = servers
    tools = "tools=[{'type': 'function', 'function': {'name': 'add'}}]"
    source = f"async def run(row, client):\n    c = await {ASK[:-1]}, {tools})\n    return bool(c.choices[0].message.tool_calls)"
    (group,), _, counts = play(source, "episode.tool_call_parser=qwen25", pool=pool)
    assert counts == {cause: 2} and {t.reward for t in group} == ({float(called)} if cause == "done" else set())


def test_a_set_is_evaluated_with_its_own_workflow(write, tmp_path, processes):
    for name, reward in (("train", 1.0), ("held_out", 0.25)):
        (tmp_path / f"{name}.py").write_text(f"async def run(row, client):\n    await {ASK}\n    return {reward}")
    own, prompt = tokenizer("plain"), Prompt(0, [5], row=ROW)
    overrides = [
        f"workflow={tmp_path}/train.py:run",
        f"valid_dataset.workflow={tmp_path}/held_out.py:run",
        "evaluator.datasets.same.path=arithmetic",
        "evaluator.datasets.plain.path=arithmetic",
        "evaluator.datasets.plain.workflow=single_turn",
    ]
    config = load(write(), overrides).config

    class Servers(Pool):
        async def generate(self, prompts: Any, sampling: Sampling, *_: Any) -> Any:
            return [await self.sample(tokens, sampling, session=None) for tokens in prompts]

    async def main() -> dict[str, float | None]:
        async with Workflows(config, Servers(), score, own, print, None, processes) as workflows:  # type: ignore[arg-type]
            sampling = Sampling(8, stop_token_ids=own.eos_token_ids)
            made = {name: workflows.evaluate(data, sampling, 1) for name, data in config.evaluations.items()}
            made["train"] = workflows.train(sampling, 1)
            return {name: (await workflow(prompt, 7))[0].reward for name, workflow in made.items()}

    assert asyncio.run(main()) == {"valid_dataset": 0.25, "same": 1.0, "plain": 2.0, "train": 1.0}


class Counting:
    """A workflow that is an object with a state."""

    def __init__(self) -> None:
        self.played = 0

    async def __call__(self, row: Any, client: Any) -> float:
        await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": row["question"]}])
        self.played += 1
        return float(self.played)


def test_an_object_given_from_python_is_one_in_each_process(write, processes):
    """It travels by value; its state is that of a process."""
    Counting.__module__ = "__main__"  # as in a notebook
    own = tokenizer("plain")

    async def main(name: str) -> list[float | None]:
        config = load(write(), [f"workflow={name}"]).config
        async with Workflows(config, Pool(), score, own, print, None, processes) as workflows:  # type: ignore[arg-type]
            workflow = workflows.train(Sampling(8, stop_token_ids=own.eos_token_ids), 9)
            return [item.reward for item in await workflow(Prompt(0, [7], row=ROW), 1)]

    with register({"workflow": Counting()}) as references:
        rewards = asyncio.run(main(references["workflow"]))
    assert len(rewards) == 9 and 9 / 2 <= max(value or 0 for value in rewards) <= 9


def test_an_error_without_a_text_is_not_a_cancellation(play):
    source = f"""
class Odd(Exception):
    def __str__(self): raise RuntimeError("no text")
async def run(row, client):
    await {ASK}
    raise Odd
"""
    _, said, counts = play(source, "episode.max_failed_share=1")
    assert counts == {"raised": 2} and "Odd" in said[0], said


def test_an_episode_that_cancels_all_tasks_of_its_loop_ends_alone(play):
    source = f"""
async def run(row, client):
    await {ASK}
    if row["question"] == "1 + 1?" and not globals().get("done"):
        globals()["done"] = True
        await asyncio.sleep(0.3)
        for task in asyncio.all_tasks(): task.cancel()
        await asyncio.sleep(1)
    await asyncio.sleep(0.5)
    return 1.0
"""
    _, said, counts = play(source, "episode.max_failed_share=1", n=12)
    assert counts["raised"] <= 2 and counts["done"] == 12 - counts["raised"], (counts, said)  # one in each process
