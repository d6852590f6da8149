"""Images in the requests of agents: each API's parts, turns that add images, and what is refused."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from scripted import Model, answer, session
from vision_models import picture, write_files

from areal_like.capabilities.agents.session import Limits, Session
from areal_like.core.rollout.pool import Response, Sampling
from areal_like.core.types import Images, Prompt, Reward
from areal_like.data.images import as_data_url
from areal_like.data.tokenizer import Tokenizer

ONE, TWO = picture(60, 40), picture(40, 90, 1, "JPEG")


class Seeing(Model):
    """A model that also remembers the images it was shown."""

    def __init__(self, tokenizer: Tokenizer, *texts: str) -> None:
        ends = tokenizer.eos_token_ids[0]
        super().__init__(lambda n: [*tokenizer.encode_text(texts[n]), ends])
        self.shown: list[Images] = []

    async def sample(self, tokens: Sequence[int], sampling: Sampling, *, images: Images = (), **_: object) -> Response:
        self.shown.append(images)
        return await super().sample(tokens, sampling)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer.load(str(write_files("qwen3_vl", tmp_path)))


def opened(tokenizer: Tokenizer, *texts: str) -> tuple[Session, Seeing]:
    model = Seeing(tokenizer, *texts)
    sampling = Sampling(100, stop_token_ids=tokenizer.eos_token_ids)
    return Session(tokenizer, model.sample, sampling, Limits(9, 10**5)), model


def shown(image: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": as_data_url(image)}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def ask(own: Session, messages: list[Any], path: str = "/v1/chat/completions", **fields: Any) -> Any:
    body = {"messages": messages, **fields} if "input" not in fields else fields
    reply = asyncio.run(answer(own, "POST", path, orjson.dumps(body)))
    return reply.status, orjson.loads(reply.content)


def test_turns_that_add_images(tokenizer):
    own, model = opened(tokenizer, "ab", "<|image_pad|>c", "d")
    messages: list[Any] = [{"role": "user", "content": [shown(ONE), text("first?")]}]
    for question in ([text("and "), shown(TWO), shown(ONE), text("?")], "without an image"):
        status, content = ask(own, messages)
        assert status == 200, content
        messages += [content["choices"][0]["message"], {"role": "user", "content": question}]
    assert ask(own, messages)[0] == 200
    assert model.shown == [(ONE,), (ONE, TWO, ONE), (ONE, TWO, ONE)]
    (item,) = own.trajectories(Prompt(0, [], images=(TWO,)), 0, Reward(1.0))
    assert item.images == (ONE, TWO, ONE)
    last = model.answered[-1]
    assert item.tokens.tolist() == [*model.asked[-1], *last.tokens.tolist()]
    token = tokenizer.backend.token_to_id("<|image_pad|>")
    assert [int(np.count_nonzero(np.array(asked) == token)) for asked in model.asked] == [2, 7, 8]
    assert not item.generated[item.tokens == token][:2].any()


def test_a_conversation_is_the_templates_tokens(tokenizer):
    own, model = opened(tokenizer, "ab", "c")
    messages: list[Any] = [{"role": "user", "content": [shown(ONE), text("first?")]}]
    content = ask(own, messages)[1]
    messages += [content["choices"][0]["message"], {"role": "user", "content": [shown(TWO), text("?")]}]
    ask(own, messages)
    assert model.asked[-1] == tokenizer.encode_chat(messages)


def test_branches_have_their_own_images(tokenizer):
    own, _ = opened(tokenizer, "a", "b")
    for image in (ONE, TWO):
        ask(own, [{"role": "user", "content": [shown(image), text("?")]}])
    assert [item.images for item in own.trajectories(Prompt(0, []), 0, Reward(1.0))] == [(ONE,), (TWO,)]


def test_the_other_apis(tokenizer):
    own, model = opened(tokenizer, "a", "b", "c")
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(ONE).decode()}
    block = {"type": "image", "source": source}
    assert ask(own, [{"role": "user", "content": [block, text("?")]}], "/v1/messages", max_tokens=5)[0] == 200
    result = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "look", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [block]}]},
    ]
    assert ask(own, result, "/v1/messages", max_tokens=5)[0] == 200
    given = [{"role": "user", "content": [{"type": "input_image", "image_url": as_data_url(TWO)}]}]
    assert ask(own, [], "/v1/responses", input=given)[0] == 200
    assert model.shown == [(ONE,), (ONE,), (TWO,)]


def huge() -> bytes:
    from io import BytesIO

    from PIL import Image

    file = BytesIO()
    Image.new("1", (20_000, 20_000)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("https://example.org/1.png", "is not a data URL with base64"),
        ("http://127.0.0.1:1/1.png", "is not a data URL"),
        ("file:///etc/passwd", "is not a data URL"),
        ("/etc/passwd", "is not a data URL"),
        ("data:image/png;base64,###", "is not base64"),
        ("data:image/png;base64,", "are not an image"),
        ("data:image/png;base64," + base64.b64encode(ONE[: len(ONE) // 2]).decode(), "is damaged"),
        ("data:text/plain;base64,eA==", "is not a data URL"),
        ("data:image/png;base64," + "A" * (3 * 2**24), "more than 33,554,432 bytes"),
        (None, "Input should be a valid string"),
    ],
)
def test_another_url_is_refused(tokenizer, url, words):
    own, model = opened(tokenizer, "a")
    part = {"type": "image_url", "image_url": {"url": url}}
    status, content = ask(own, [{"role": "user", "content": [part, text("?")]}])
    assert status == 400 and words in content["error"]["message"]
    assert content["error"]["message"].startswith("messages[0].content[0].image_url")
    assert not model.asked
    assert ask(own, [{"role": "user", "content": "x"}])[0] == 200


def test_a_picture_of_400_million_pixels_is_refused(tokenizer):
    own, _ = opened(tokenizer, "a")
    status, content = ask(own, [{"role": "user", "content": [shown(huge())]}])
    assert status == 400 and "67,108,864 pixels" in content["error"]["message"]


def test_images_of_other_roles_are_refused(tokenizer):
    own, _ = opened(tokenizer, "a")
    status, content = ask(own, [{"role": "system", "content": [shown(ONE)]}])
    assert status == 400 and "only users and tools" in content["error"]["message"]


def test_a_placeholder_in_a_text_is_refused(tokenizer):
    own, _ = opened(tokenizer, "a")
    status, content = ask(own, [{"role": "user", "content": [shown(ONE), text("<|image_pad|>")]}])
    assert status == 400 and "2 places for images" in content["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_a_model_of_text_takes_no_images(path):
    own, _ = session("plain", lambda n: [1])
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(ONE).decode()}
    part = {
        "/v1/chat/completions": shown(ONE),
        "/v1/messages": {"type": "image", "source": source},
        "/v1/responses": {"type": "input_image", "image_url": as_data_url(ONE)},
    }[path]
    messages = [{"role": "user", "content": [part]}]
    status, content = ask(own, [], path, input=messages) if "responses" in path else ask(own, messages, path)
    assert status == 400 and "the run generates from text alone" in content["error"]["message"]
