"""A request whose last message is the assistant's: continued where that is defined, else refused."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from scripted import END, Model, answer, says, session

from areal_like.capabilities.agents.session import Session
from areal_like.core.types import Prompt, Reward

pytestmark = pytest.mark.covers("agents")

ASKED = {"role": "user", "content": "1?"}
STARTED = {"role": "assistant", "content": "It is"}
NEXT = {"role": "user", "content": "th"}
PROMPT = "<|turn|>user\n1?<|end|>\n<|turn|>assistant\nIt is"


def post(made: Session, path: str, messages: Any, **more: Any) -> tuple[int, Any]:
    body = {"model": "policy", ("input" if path == "responses" else "messages"): messages, **more}
    if path == "messages":
        body["max_tokens"] = 99
    reply = asyncio.run(answer(made, "POST", f"/v1/{path}", json.dumps(body).encode()))
    text = bytes(reply.content).decode()
    return reply.status, text if more.get("stream") else json.loads(text)


def asked(made: Session, model: Model, number: int) -> str:
    return made.tokenizer.decode(model.asked[number], special=True)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("merged", [False, True])
def test_a_message_of_anthropic_is_continued_and_the_conversation_stays_one_trajectory(merged, stream):
    made, model = session("plain", says(" ab", "th"))
    status, reply = post(made, "messages", [ASKED, STARTED], stream=stream)
    assert status == 200 and asked(made, model, 0) == PROMPT
    if stream:
        events = [json.loads(line[6:]) for line in reply.splitlines() if line.startswith("data: ")]
        text = "".join(event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta")
    else:
        (block,) = reply["content"]
        text = block["text"]
    assert text.strip() == "ab"
    answers = [{"role": "assistant", "content": "It is ab"}]
    if not merged:  # as Anthropic combines them
        answers = [STARTED, {"role": "assistant", "content": " ab"}]
    assert post(made, "messages", [ASKED, *answers, NEXT])[0] == 200
    (item,) = made.trajectories(Prompt(0, []), 0, Reward(1.0))
    assert made.tokenizer.decode(item.tokens[item.generated].tolist(), special=True) == f" ab{END}th{END}"
    assert asked(made, model, 1) == f"{PROMPT} ab{END}\n<|turn|>user\nth{END}\n<|turn|>assistant\n"


@pytest.mark.parametrize(
    ("path", "messages"),
    [
        ("chat/completions", [ASKED, STARTED]),
        ("chat/completions", [STARTED]),
        ("responses", [ASKED, {"role": "assistant", "content": "It is"}]),
        ("chat/completions", [ASKED, {**STARTED, "reasoning_content": "x"}]),
        (
            "messages",
            [ASKED, {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "a", "input": {}}]}],
        ),
    ],
)
def test_a_last_message_of_the_assistant_is_refused_where_continuing_is_not_defined(path, messages):
    made, model = session("plain", says("ab"))
    status, reply = post(made, path, messages)
    assert status == 400 and model.asked == [] and "Leave it out" in reply["error"]["message"]


def test_a_chat_completion_is_continued_where_it_asks_for_that():
    made, model = session("plain", says(" ab", "th"))
    status, reply = post(made, "chat/completions", [ASKED, STARTED], continue_final_message=True)
    assert status == 200 and asked(made, model, 0) == PROMPT
    assert reply["choices"][0]["message"]["content"].strip() == "ab"
    assert post(made, "chat/completions", [ASKED], continue_final_message=False)[0] == 200


def test_a_picture_with_transparency_reaches_servers_as_it_is_shown():
    from io import BytesIO

    from PIL import Image

    from areal_like.capabilities.agents.image_parts import _check_image
    from areal_like.data.images import as_data_url, decode, from_data_url

    data = BytesIO()
    Image.new("RGBA", (8, 8), (0, 0, 0, 0)).save(data, "PNG")
    url = _check_image(as_data_url(data.getvalue()))
    assert decode(from_data_url(url)).getpixel((0, 0)) == (255, 255, 255)
