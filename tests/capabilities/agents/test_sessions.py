"""Every trained token is one that the server produced, whatever the chat template makes of earlier turns."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import openai
import pytest
from scripted import END, TEMPLATES, Model, says, session, tokenizer

from areal_like.capabilities.agents.conversation import Continuity, TemplateContext
from areal_like.capabilities.agents.openai_api import OpenSessions
from areal_like.capabilities.agents.playing import Clients
from areal_like.capabilities.agents.session import Limits, Session
from areal_like.capabilities.agents.turn import Turn
from areal_like.core.rollout.pool import Response, Sampling
from areal_like.core.types import FinishReason, Prompt, Reward, Trajectory

pytestmark = pytest.mark.covers("agents")

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def talk(recorded: Session, body: Callable[[openai.AsyncOpenAI], Coroutine[Any, Any, Any]]) -> Any:
    """What `body` returns that has a client on the session."""

    async def run() -> Any:
        sessions = OpenSessions()
        with sessions.open(recorded) as key:
            return await body(Clients(sessions.answer).with_key(key))

    return asyncio.run(run())


def trajectories(recorded: Session, reward: float | None = 1.0) -> list[Trajectory]:
    return recorded.trajectories(Prompt(3, []), 7, Reward(reward))


async def ask(client: openai.AsyncOpenAI, messages: list[Any], **more: Any) -> Any:
    answer = await client.chat.completions.create(model="policy", messages=messages, **more)
    return answer.choices[0].message


def assert_exact(recorded: Session, model: Model) -> None:
    """Each generated token is trained on once, with its log-prob and version, and each trajectory is what was asked."""
    sequences = [[*asked, *answer.tokens.tolist()] for asked, answer in zip(model.asked, model.answered, strict=True)]
    trained: list[tuple[int, float, int]] = []
    for item in trajectories(recorded):
        assert item.tokens.tolist() in sequences
        assert item.logprobs[~item.generated].tolist() == [0] * int((~item.generated).sum())
        columns = (item.tokens, item.logprobs, item.versions)
        trained += zip(*(column[item.generated].tolist() for column in columns), strict=True)
    produced = [
        triple
        for answer in model.answered
        for triple in zip(answer.tokens.tolist(), answer.logprobs.tolist(), answer.versions.tolist(), strict=True)
    ]
    assert sorted(trained) == sorted(produced)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 8))])
def test_random_conversations_are_trained_token_for_token(template, seed):
    rng = random.Random(f"{template}/{seed}")
    own = tokenizer(template)
    pieces = ["ab", "a", "b", " ", "\n", "1", "<think>", "</think>", "é", "th", "\ufffd"]

    def answer(n: int) -> list[int]:
        text = [token for _ in range(rng.randint(1, 6)) for token in own.encode_text(rng.choice(pieces))]
        text += [rng.randrange(3, own.vocab_size) for _ in range(rng.randint(0, 3))]  # also what is not UTF-8
        return text + rng.choice([[], [own.eos_token_ids[0]], [own.eos_token_ids[1]]])

    recorded, model = session(template, answer)

    async def converse(client: openai.AsyncOpenAI) -> None:
        messages: list[Any] = [{"role": "user", "content": "ab 1"}]
        for _ in range(rng.randint(2, 5)):
            message = await ask(client, messages)
            content = message.content.strip() if rng.random() < 0.3 else message.content
            messages += [message if rng.random() < 0.5 else {"role": "assistant", "content": content}]
            messages += [{"role": "user", "content": rng.choice(["again", " th at\n", "ab"])}]

    talk(recorded, converse)
    for before, answered, prompt in zip(model.asked, model.answered, model.asked[1:], strict=False):
        assert prompt[: len(before) + len(answered.tokens)] == [*before, *answered.tokens.tolist()]
    assert len(trajectories(recorded)) == 1
    assert_exact(recorded, model)
    assert recorded.continuities[Continuity.BRANCH] == 0


async def two_turns(client: openai.AsyncOpenAI) -> None:
    first = [{"role": "user", "content": "x"}]
    message = await ask(client, first)
    await ask(client, [*first, {"role": "assistant", "content": message.content}, {"role": "user", "content": "y"}])


@pytest.mark.parametrize(
    ("template", "answer", "second", "prompt"),
    [
        ("plain", "ab", Continuity.EXACT, "ab<|end|>\n<|turn|>user\ny<|end|>\n<|turn|>assistant\n"),
        ("plain", "a|b", Continuity.RETOKENISED, "ab<|end|>\n<|turn|>user\ny<|end|>\n<|turn|>assistant\n"),
        ("plain", " th ", Continuity.EXACT, " th <|end|>\n<|turn|>user\ny<|end|>\n<|turn|>assistant\n"),
        (
            "strips_thinking",
            "<think>t</think>1",
            Continuity.REWRITTEN,
            "<think>t</think>1<|end|>\n<|turn|>user\ny<|end|>\n<|turn|>assistant\n",
        ),
        (
            "tight",
            "t</think>1",
            Continuity.REWRITTEN,
            "t</think>1<|end|><|turn|>user:y<|end|><|turn|>assistant:<think>",
        ),
        ("blank_before_end", "1", Continuity.REWRITTEN, "1<|end|>[user] y [/]"),
        ("no_end", "1", Continuity.REWRITTEN, "1<|end|>\nuser: y\nassistant:"),
        ("counts", "1", Continuity.REWRITTEN, "1<|end|>\n<|turn|>user\ny<|end|>\n<|turn|>assistant\n"),
    ],
)
def test_a_second_turn_keeps_the_first_and_says_what_the_template_would_have_done(template, answer, second, prompt):
    recorded, model = session(template, says(answer, "1", template=template))
    talk(recorded, two_turns)
    assert [turn.continuity for turn in recorded.turns] == [Continuity.FIRST, second]
    assert recorded.tokenizer.decode(model.asked[1][len(model.asked[0]) :], special=True) == prompt
    assert_exact(recorded, model)


def test_an_answer_that_was_cut_is_ended_by_the_template():
    own = tokenizer("plain")
    recorded, model = session("plain", lambda n: own.encode_text("ab ab"), sampling=Sampling(3, stop_token_ids=(0,)))
    talk(recorded, two_turns)
    behind = own.decode(model.asked[1][len(model.asked[0]) :], special=True)
    assert behind == f"ab ab{END}\n<|turn|>user\ny{END}\n<|turn|>assistant\n"
    assert recorded.turns[1].continuity is Continuity.EXACT
    assert trajectories(recorded)[0].finish_reason is FinishReason.LENGTH


def test_other_conversations_and_changed_messages_are_other_trajectories():
    recorded, model = session("plain", says(*"abthab"))

    async def converse(client: openai.AsyncOpenAI) -> None:
        await two_turns(client)
        await ask(client, [{"role": "system", "content": "another agent"}, {"role": "user", "content": "x"}])
        await ask(
            client,
            [
                {"role": "user", "content": "x"},
                {"role": "assistant", "content": "edited"},
                {"role": "user", "content": "y"},
            ],
        )

    talk(recorded, converse)
    assert [turn.continuity for turn in recorded.turns[2:]] == [Continuity.BRANCH] * 2
    assert [turn.why.partition(",")[0] for turn in recorded.turns[2:]] == [
        "message 0 differs from earlier requests",
        "message 1 differs from earlier requests",
    ]
    assert [item.tokens.tolist() for item in trajectories(recorded)] == [
        [*model.asked[n], *model.answered[n].tokens.tolist()] for n in (1, 2, 3)
    ]
    assert {(item.sample_id, item.group_id, item.reward) for item in trajectories(recorded)} == {(3, 7, 1.0)}
    assert_exact(recorded, model)


def test_what_several_turns_go_on_from_is_trained_on_once():
    recorded, model = session("plain", says(*"abth"))

    async def converse(client: openai.AsyncOpenAI) -> None:
        first: list[Any] = [{"role": "user", "content": "x"}]
        first.append(await ask(client, first))
        for question in "yz":
            await ask(client, [*first, {"role": "user", "content": question}])
        await ask(client, first[:1])

    talk(recorded, converse)
    one, other, again = trajectories(recorded)
    shared = len(model.asked[0]) + len(model.answered[0].tokens)
    assert one.tokens[:shared].tolist() == other.tokens[:shared].tolist()
    assert one.generated[:shared].any() and not other.generated[:shared].any()
    assert again.tokens[: len(model.asked[0])].tolist() == model.asked[0]
    assert recorded.turns[3].why == "these messages were sent before"
    assert_exact(recorded, model)


def test_tool_calls_are_parsed_and_their_results_never_trained_on():
    async def parse(text: str, tools: Any) -> Any:
        assert tools == TOOLS
        return ("", [("add", {"a": 1}), ("add", "not JSON")]) if "add" in text else (text, [])

    recorded, model = session("strips_thinking", says("<th>add", "3"), parse_tools=parse)

    async def converse(client: openai.AsyncOpenAI) -> tuple[Any, Any]:
        messages: list[Any] = [{"role": "user", "content": "1+2"}]
        message = await ask(client, messages, tools=TOOLS)
        results = [{"role": "tool", "tool_call_id": call.id, "content": "3"} for call in message.tool_calls]
        return message, await ask(client, [*messages, message, *results], tools=TOOLS)

    called, done = talk(recorded, converse)
    assert [call.function.arguments for call in called.tool_calls] == ['{"a":1}', "not JSON"]
    assert (done.content, done.tool_calls) == ("3", None)
    (item,) = trajectories(recorded)
    text = recorded.tokenizer.decode(item.tokens[item.generated].tolist(), special=True)
    assert text == f"<th>add{END}3{END}"
    assert "<|turn|>tool\n3" in recorded.tokenizer.decode(item.tokens.tolist(), special=True)
    assert_exact(recorded, model)


def test_a_conversation_may_be_longer_than_python_calls_itself():
    turn = None
    for number in range(2 * sys.getrecursionlimit()):
        turn = Turn(turn, np.array([number]), Response(), [], TemplateContext(), Continuity.EXACT)
    assert turn.tokens.tolist() == [each.new[0] for each in turn.path] == list(range(2 * sys.getrecursionlimit()))


def test_a_stop_text_ends_the_answer_and_what_is_trained_on():
    recorded, _ = session("plain", says("ab 1\nth 1", "a"))

    async def converse(client: openai.AsyncOpenAI) -> Any:
        first: list[Any] = [{"role": "user", "content": "x"}]
        message = await ask(client, first, stop=["th", "\n"])
        await ask(client, [*first, message, {"role": "user", "content": "y"}])
        return message

    assert talk(recorded, converse).content == "ab 1"
    (item,) = trajectories(recorded)
    assert recorded.tokenizer.decode(item.tokens[item.generated].tolist()) == "ab 1\na"


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_a_stop_text_may_be_a_special_token(tools):
    async def parse(text: str, tools: object) -> tuple[str, list[Any]]:
        return text, []

    own = tokenizer("plain")
    recorded, _ = session("plain", lambda n: own.encode_text("ab<|turn|>th<|end|>"), parse_tools=parse)
    fields = {"stop": ["<|turn|>"]} | ({"tools": tools} if tools else {})
    message = talk(recorded, lambda client: ask(client, [{"role": "user", "content": "x"}], **fields))
    (item,) = trajectories(recorded)
    assert message.content == "ab"
    assert recorded.tokenizer.decode(item.tokens[item.generated].tolist(), special=True) == "ab<|turn|>"


def test_an_answer_can_be_streamed_and_has_logprobs():
    recorded, model = session("plain", says("ab 1"))

    async def converse(client: openai.AsyncOpenAI) -> list[Any]:
        stream = await client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "x"}], stream=True, logprobs=True
        )
        return [chunk async for chunk in stream]

    *texts, last = [chunk.choices[0] for chunk in talk(recorded, converse)]
    assert "".join(choice.delta.content for choice in texts) == "ab 1" and last.finish_reason == "stop"
    assert [part.token for part in last.logprobs.content] == ["ab", " 1", END]
    assert np.allclose([part.logprob for part in last.logprobs.content], model.answered[0].logprobs)


IMAGE = [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "u"}}]}]


@pytest.mark.parametrize(
    ("request_fields", "param", "words"),
    [
        ({"n": 2}, "n", "several requests"),
        ({"temperature": 0.0}, "temperature", "0.0 cannot be trained on: sampling is greedy"),
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"extra_body": {"min_p": 0.1}}, "min_p", "cannot be trained on"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "cannot be trained on"),
        ({"presence_penalty": 1.0}, "presence_penalty", "cannot be trained on"),
        ({"response_format": {"type": "json_object"}}, "response_format", "cannot be trained on"),
        ({"seed": 3}, "seed", "not supported"),
        ({"messages": IMAGE}, r"messages[0].content[1]", "image_url: the run generates from text"),
        ({"messages": [{"role": "judge", "content": "x"}]}, "messages[0].role", "'system', 'developer'"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"tools": TOOLS}, "tools", "episode.tool_call_parser"),
        (
            {"extra_body": {"tools": [{"type": "function", "function": None}]}},
            "tools[0].function",
            "should be an object",
        ),
        ({"tool_choice": "required"}, "tool_choice", "write auto or none"),
        ({"max_tokens": 0}, "max_tokens", "greater than 0"),
        ({"stop": 5}, "stop", "valid list"),
        ({"extra_body": {"top_k": 1}}, "top_k", "sampling is greedy"),
        ({"extra_body": {"top_k": 5000}}, "top_k", "less than or equal to 1024"),
        ({"extra_body": {"best_of": 2}}, "best_of", "leave it out"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_by_name(request_fields, param, words):
    recorded, model = session("plain", says("a"))

    async def converse(client: openai.AsyncOpenAI) -> None:
        await ask(client, **({"messages": [{"role": "user", "content": "x"}]} | request_fields))

    with pytest.raises(openai.BadRequestError, match=words) as refusal:
        talk(recorded, converse)
    assert refusal.value.param == param
    assert not model.asked


def test_in_evaluation_any_temperature_may_be_asked_for():
    recorded, model = session("plain", says("a"), trained=False)
    talk(recorded, lambda client: ask(client, [{"role": "user", "content": "x"}], temperature=0.1, top_p=1))
    assert len(model.asked) == 1


def test_limits_of_turns_and_tokens():
    recorded, model = session("plain", says(*"abth"), limits=Limits(2, 10**6))

    async def converse(client: openai.AsyncOpenAI) -> None:
        for _ in range(3):
            await ask(client, [{"role": "user", "content": "x"}])

    with pytest.raises(openai.BadRequestError, match=r"2 turns \(episode.max_turns\)"):
        talk(recorded, converse)
    assert (len(model.asked), recorded.exceeded) == (2, "turns")
    size = len(model.asked[0])
    recorded, model = session("plain", says("ab 1"), limits=Limits(9, size + 2))
    talk(recorded, lambda client: ask(client, [{"role": "user", "content": "x"}]))
    assert len(trajectories(recorded)[0].tokens) == size + 2
    recorded, model = session("plain", says("ab 1"), limits=Limits(9, size))
    with pytest.raises(openai.BadRequestError, match=r"no room among \d+ \(episode.max_tokens\)") as refusal:
        talk(recorded, lambda client: ask(client, [{"role": "user", "content": "x"}]))
    assert refusal.value.code == "context_length_exceeded" and recorded.exceeded == "tokens"


def test_a_template_that_refuses_says_why():
    recorded, _ = session("plain", says("a"))
    recorded.tokenizer._templates["default"] = "{{ raise_exception('no tools here') }}"
    with pytest.raises(openai.BadRequestError, match="no tools here"):
        talk(recorded, lambda client: ask(client, [{"role": "user", "content": "x"}]))


def test_another_endpoint_is_not_served():
    recorded, _ = session("plain", says("a"))
    with pytest.raises(openai.NotFoundError, match="chat/completions"):
        talk(recorded, lambda client: client.embeddings.create(model="policy", input="x"))
    assert [model.id for model in talk(recorded, lambda client: client.models.list()).data] == ["policy"]


def deployed(template: str, *texts: str) -> tuple[Session, Model]:
    return session(template, says(*texts, template=template), limits=Limits(99, 10**6, as_deployed=True))


async def three_turns(client: openai.AsyncOpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "x"}]
    for _ in range(3):
        messages += [(await ask(client, messages)).to_dict(), {"role": "user", "content": "y"}]


def test_prompts_as_deployed_are_those_of_the_template():
    """Thinking of earlier turns is not in the prompts, and is trained in the turn that has it."""
    recorded, model = deployed("strips_thinking", "<think>a</think>1", "<think>b</think>ab", "1")
    talk(recorded, three_turns)
    own = recorded.tokenizer
    for turn, asked in zip(recorded.turns, model.asked, strict=True):
        assert asked == own.encode_chat(turn.messages[:-1])
    texts = [own.decode(asked, special=True) for asked in model.asked]
    assert "think" not in texts[1] and "think" not in texts[2]
    assert [turn.continuity for turn in recorded.turns] == ["first", "deployed", "deployed"]
    assert recorded.turns[1].why == "the prompt is rewritten (episode.history=as_deployed)"
    assert_exact(recorded, model)
    items = trajectories(recorded)
    assert [item.tokens.tolist() for item in items] == [
        [*asked, *answer.tokens.tolist()] for asked, answer in zip(model.asked, model.answered, strict=True)
    ]
    assert [item.reward for item in items] == [1.0] * 3 and not recorded.orphans


def test_turns_without_thinking_stay_one_trajectory_as_deployed():
    recorded, model = deployed("strips_thinking", "1", "ab", "1")
    talk(recorded, three_turns)
    assert [turn.continuity for turn in recorded.turns] == ["first", "exact", "exact"]
    assert len(trajectories(recorded)) == 1
    assert_exact(recorded, model)


def test_as_deployed_other_tokens_of_the_same_text_are_another_prompt():
    recorded, model = deployed("plain", "a|b", "1", "1")
    talk(recorded, three_turns)
    assert [turn.continuity for turn in recorded.turns] == ["first", "deployed", "exact"]
    assert len(trajectories(recorded)) == 2
    own = recorded.tokenizer
    assert model.asked == [own.encode_chat(turn.messages[:-1]) for turn in recorded.turns]
    assert_exact(recorded, model)


def test_as_generated_is_the_default():
    recorded, model = session("strips_thinking", says("<think>a</think>1", "<think>b</think>ab", "1"))
    talk(recorded, three_turns)
    assert [turn.continuity for turn in recorded.turns] == ["first", "rewritten", "rewritten"]
    (item,) = trajectories(recorded)
    assert "<think>a</think>" in recorded.tokenizer.decode(item.tokens.tolist())
    assert_exact(recorded, model)
