"""A teacher scores the sampled tokens at the policy's temperature; what it cannot score is not trained."""

from __future__ import annotations

import asyncio
import base64
import os
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from limits import HUNG_S
from tolerance import assert_close

from allocation import ParallelSizes
from areal_like.cluster.lifetime import run_lifetime
from areal_like.config.load import load
from areal_like.config.schema import InitModelConfig, TeacherConfig
from areal_like.demo.init_model import write_init_model
from areal_like.errors import RunError
from areal_like.rollout.http import session
from areal_like.rollout.server import ServerSpec
from areal_like.rollout.sglang.options import teacher_arguments
from areal_like.rollout.sglang.patch import SCORE, split_flags
from areal_like.rollout.sglang.process import SGLangServer
from areal_like.rollout.sglang.server import SGLangClient
from areal_like.rollout.teacher import Teacher
from areal_like.types import TEACHER_IDS, TEACHER_LOGPROBS, TEACHER_TOP, FinishReason, Prompt, Trajectory

pytestmark = pytest.mark.covers("distillation")

PROMPT = Prompt(0, [7, 8])
ITEM = Trajectory(
    sample_id=0,
    group_id=0,
    tokens=np.array([7, 8, 1, 2, 9, 3], np.int32),  # a tool's output is between two turns
    logprobs=np.array([0, 0, -1, -1, 0, -1], np.float32),
    versions=np.array([-1, -1, 0, 0, -1, 0], np.int32),
    finish_reason=FinishReason.STOP,
    reward=1.0,
)


async def workflow(prompt: Prompt, group_id: int) -> list[Trajectory]:
    return [ITEM]


def by_token(tokens: list[int], start: int = 0) -> list[list[Any]]:
    """Log-probs from a token on that tell which token they are of; SGLang gives none for the first one."""
    return [[None if not place else -token / 10, token, None] for place, token in enumerate(tokens[start:])]


def scored(body: Any) -> dict[str, Any]:
    return {"input_token_logprobs": by_token(body["input_ids"], body["logprob_start_len"])}


async def taught(
    handler: Callable[[web.Request], Any],
    config: TeacherConfig | None = None,
    hint: Callable[[Prompt], list[int]] | None = None,
    said: Callable[[str], None] = print,
) -> tuple[Trajectory, dict[str, float]]:
    """The trajectory with what `handler` answers for the teacher's server."""
    app = web.Application()
    app.router.add_post("/{path:.*}", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with Teacher(config or TeacherConfig(path="model"), [url], "token", hint, said) as teacher:
            (item,) = await teacher.with_scores(workflow)(PROMPT, 0)
            return item, teacher.statistics()
    finally:
        await runner.cleanup()


def test_each_generated_token_has_the_teachers_log_prob() -> None:
    bodies: list[Any] = []

    async def handler(request: web.Request) -> web.Response:
        bodies.append(body := await request.json())
        return web.json_response({"meta_info": scored(body)})

    item, missing = asyncio.run(taught(handler))
    np.testing.assert_allclose(item.columns[TEACHER_LOGPROBS], [0, 0, -0.1, -0.2, 0, -0.3])
    assert item.reward == 1 and not missing
    assert bodies[0]["input_ids"] == ITEM.tokens.tolist() and bodies[0]["sampling_params"]["temperature"] == 1


def test_the_last_token_of_the_vocabulary_is_scored() -> None:
    """SGLang 0.5.17 names it 0 (`_process_input_token_logprobs`)."""

    async def handler(request: web.Request) -> web.Response:
        info = scored(await request.json())
        info["input_token_logprobs"][-1][1] = 0
        return web.json_response({"meta_info": info})

    item, missing = asyncio.run(taught(handler))
    assert item.reward == 1 and not missing


def test_a_hint_is_read_by_the_teacher_alone() -> None:
    bodies: list[Any] = []

    async def handler(request: web.Request) -> web.Response:
        bodies.append(body := await request.json())
        return web.json_response({"meta_info": scored(body)})

    item, _ = asyncio.run(taught(handler, hint=lambda prompt: [7, 5, 5, 8]))
    assert bodies[0]["input_ids"] == [7, 5, 5, 8, 1, 2, 9, 3]
    np.testing.assert_allclose(item.columns[TEACHER_LOGPROBS], [0, 0, -0.1, -0.2, 0, -0.3])
    assert item.tokens.tolist() == ITEM.tokens.tolist()


def flat(ids: np.ndarray, logprobs: np.ndarray) -> dict[str, str]:
    """Likeliest ids and their log-probs as SGLang sends them."""
    rows = {"idx": ids.astype(np.int32), "val": logprobs.astype(np.float32)}
    return {
        f"input_top_logprobs_{name}_flat_b64": base64.b64encode(each.tobytes()).decode() for name, each in rows.items()
    }


def test_the_likeliest_tokens_are_those_of_generated_tokens() -> None:
    bodies: list[Any] = []

    async def handler(request: web.Request) -> web.Response:
        bodies.append(body := await request.json())
        places = np.arange(body["logprob_start_len"] + 1, len(body["input_ids"]))[:, None]
        top = flat(places * [[1, 10]], places * [[-0.1, -0.2]])
        return web.json_response({"meta_info": {**scored(body), **top}})

    config = TeacherConfig(path="model", top_k=2)
    item, _ = asyncio.run(taught(handler, config))
    assert bodies[0]["top_logprobs_num"] == 2
    assert item.columns[TEACHER_IDS].tolist() == [[0, 0], [0, 0], [2, 20], [3, 30], [0, 0], [5, 50]]
    assert_close(item.columns[TEACHER_TOP][:, 1], [0, 0, -0.4, -0.6, 0, -1.0])
    np.testing.assert_allclose(item.columns[TEACHER_LOGPROBS], [0, 0, -0.1, -0.2, 0, -0.3])
    item, _ = asyncio.run(taught(handler, config, hint=lambda prompt: [7, 5, 5, 8]))
    assert item.columns[TEACHER_IDS].tolist() == [[0, 0], [0, 0], [4, 40], [5, 50], [0, 0], [7, 70]]


def test_likeliest_tokens_of_another_shape_are_an_error() -> None:
    async def handler(request: web.Request) -> web.Response:
        top = flat(np.ones((2, 2)), np.ones((2, 2)))
        return web.json_response({"meta_info": {**scored(await request.json()), **top}})

    item, missing = asyncio.run(taught(handler, TeacherConfig(path="model", top_k=2)))
    assert item.reward is None and sum(missing.values()) == 1


def test_an_openai_server_echoes_the_prompt_with_log_probs() -> None:
    bodies: list[Any] = []

    async def handler(request: web.Request) -> web.Response:
        bodies.append((request.path, body := await request.json()))
        scored = [logprob for logprob, *_ in by_token(body["prompt"])]
        return web.json_response({"choices": [{"logprobs": {"token_logprobs": [*scored, -5.0]}}]})

    config = TeacherConfig(url="http://unused", api="openai", model="big")
    item, _ = asyncio.run(taught(handler, config))
    np.testing.assert_allclose(item.columns[TEACHER_LOGPROBS], [0, 0, -0.1, -0.2, 0, -0.3])
    path, body = bodies[-1]
    assert path == "/v1/completions"
    assert [body["prompt"] for _, body in bodies] == [[0, 1], ITEM.tokens.tolist()]
    assert body == {
        "model": "big",
        "prompt": ITEM.tokens.tolist(),
        "max_tokens": 1,
        "echo": True,
        "logprobs": 1,
        "temperature": 1,
    }


@pytest.mark.parametrize(
    ("answer", "fault", "words"),
    [
        (web.Response(status=400, text="too long"), "refused", "answered 400: too long"),
        ({"meta_info": {"input_token_logprobs": by_token([7, 8, 1, 2, 9, 4])}}, "unusable", "unusable answer"),
        (None, "late", "did not answer within 0.5 s"),
    ],
)
def test_a_response_that_cannot_be_scored_is_not_trained(
    monkeypatch: pytest.MonkeyPatch, answer: Any, fault: str, words: str
) -> None:
    monkeypatch.setattr("areal_like.rollout.teacher.PAUSE_S", 0.01)
    said: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        if answer is None:
            await asyncio.sleep(5)
        if isinstance(answer, web.Response):
            return web.Response(status=answer.status, text=answer.text)
        return web.json_response(answer)

    config = TeacherConfig(path="model", timeout_s=HUNG_S if answer is not None else 0.5)
    item, missing = asyncio.run(taught(handler, config, said=said.append))
    assert item.reward is None and missing == {f"teacher/missing/{fault}": 1}
    assert len(said) == 1 and words in said[0]


def test_a_server_that_fails_once_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal_like.rollout.teacher.PAUSE_S", 0.01)
    statuses = iter([503, 503, 200])

    async def handler(request: web.Request) -> web.Response:
        if (status := next(statuses)) != 200:
            return web.Response(status=status)
        body = await request.json()
        return web.json_response({"meta_info": scored(body)})

    item, missing = asyncio.run(taught(handler))
    assert item.reward == 1 and not missing


def test_the_launcher_takes_the_temperature_out_of_sglangs_arguments() -> None:
    assert split_flags(["--model-path", "a"], cuda=False).own == {}
    launch = split_flags(["--a", SCORE, "0.7", "--b"], cuda=False)
    assert (launch.arguments, launch.own) == (["--a", "--b"], {SCORE: "0.7"})


@pytest.mark.long
def test_a_real_server_scores_as_transformers_does_at_the_policys_temperature(
    tmp_path: Path, write: Callable[..., Path]
) -> None:
    directory = tmp_path / "model"
    write_init_model(InitModelConfig(tokenizer="bytes", hidden_size=64), directory, seed=0, dtype="float32")
    overrides = [f"teacher.path={directory}", "teacher.dtype=float32", "algorithm=distill", "gconfig.temperature=0.7"]
    overrides.append("teacher.top_k=4")
    config = load(write(), overrides).config
    assert config.teacher
    arguments = teacher_arguments(config, config.teacher, directory, ParallelSizes(), "cpu")

    async def run() -> Trajectory:
        async with AsyncExitStack() as stack:
            stack.enter_context(run_lifetime(secrets.token_hex(6)))
            spec = ServerSpec("teacher", arguments, tmp_path / "log", "token", None, 600)
            server = SGLangServer(spec, "127.0.0.1")
            url = await server.start()
            stack.push_async_callback(server.end)
            async with Teacher(config.teacher, [url], "token") as teacher:
                (item,) = await teacher.with_scores(workflow)(PROMPT, 0)
                return item

    item = asyncio.run(run())
    assert_close(item.columns[TEACHER_LOGPROBS], expected(directory, 0.7))
    likeliest, logprobs = expected_top(directory, 0.7, 4)
    np.testing.assert_array_equal(item.columns[TEACHER_IDS][item.generated], likeliest[item.generated])
    assert_close(item.columns[TEACHER_TOP][item.generated], logprobs[item.generated])
    assert not np.allclose(item.columns[TEACHER_LOGPROBS], expected(directory, 1.0), atol=1e-3)


def expected(directory: Path, temperature: float) -> np.ndarray:
    """What transformers gives the generated tokens."""
    import torch

    own = of_places(directory, temperature).gather(-1, torch.tensor(ITEM.tokens[1:, None].astype(np.int64)))[:, 0]
    return np.where(ITEM.generated, np.concatenate([[0], own.numpy()]), 0)


def expected_top(directory: Path, temperature: float, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The likeliest tokens of transformers at each token's place, and their log-probs."""
    logprobs, ids = of_places(directory, temperature).topk(k)
    return np.pad(ids.numpy(), ((1, 0), (0, 0))), np.pad(logprobs.numpy(), ((1, 0), (0, 0)))


def of_places(directory: Path, temperature: float) -> Any:
    """Log-probs of all words, from the second token's place on."""
    os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokens = torch.tensor(ITEM.tokens[None].astype(np.int64))
    with torch.no_grad():
        return (model(tokens).logits[0, :-1] / temperature).log_softmax(-1)


@pytest.mark.parametrize("api", ["sglang", "openai"])
def test_a_server_elsewhere_that_does_not_score_ends_the_run_at_the_start(api: Any) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.json_response({"message": "no model is called big"}, status=404)

    config = TeacherConfig(url="http://unused", api=api, model="big")
    with pytest.raises(RunError, match=r"teacher\.url=http://unused .*no model is called big") as error:
        asyncio.run(taught(handler, config))
    assert "teacher.model or teacher.token_variable" in str(error.value)


def test_a_server_elsewhere_scores_two_tokens_at_the_start() -> None:
    asked: list[int] = []

    async def handler(request: web.Request) -> web.Response:
        body = await request.json()
        asked.append(len(body["input_ids"]))
        return web.json_response({"meta_info": scored(body)})

    asyncio.run(taught(handler, TeacherConfig(url="http://unused")))
    assert asked == [2, len(ITEM.tokens)]


@asynccontextmanager
async def server(handler: Callable[[web.Request], Any]) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/{path:.*}", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@dataclass
class Pool:
    """The policy's servers, none of which holds its weights at first."""

    serving: list[SGLangClient]
    version: int = 3


def test_the_policy_scores_with_a_hint_and_the_weights_of_the_moment() -> None:
    bodies: list[Any] = []

    async def handler(request: web.Request) -> web.Response:
        bodies.append(body := await request.json())
        return web.json_response({"meta_info": scored(body)})

    async def run() -> tuple[Trajectory, Trajectory]:
        config = TeacherConfig(from_policy=True, hint_field="answer")
        pool = Pool([])
        async with server(handler) as url, session("token") as http:
            teacher = Teacher(config, [], "token", lambda prompt: [7, 5, 5, 8], policy=pool)  # type: ignore[arg-type]
            async with teacher:
                asking = asyncio.create_task(teacher.with_scores(workflow)(PROMPT, 0))
                await asyncio.sleep(0.1)
                assert not bodies
                pool.serving.append(SGLangClient("server 0", url, http))
                (first,) = await asking
                pool.version = 4
                (second,) = await teacher.with_scores(workflow)(PROMPT, 1)
                return first, second

    for item in asyncio.run(run()):
        np.testing.assert_allclose(item.columns[TEACHER_LOGPROBS], [0, 0, -0.1, -0.2, 0, -0.3])
    assert [body["extra_key"] for body in bodies] == ["teacher 3", "teacher 4"]
    assert [body["input_ids"] for body in bodies] == [[7, 5, 5, 8, 1, 2, 9, 3]] * 2
    assert [body["logprob_start_len"] for body in bodies] == [3, 3]


def test_a_teacher_with_other_weights_does_not_score_from_its_cache(tmp_path: Path) -> None:
    asked: list[tuple[str, Any]] = []

    async def handler(request: web.Request) -> web.Response:
        asked.append((request.path, body := await request.json()))
        if request.path != "/generate":
            return web.json_response({"success": True, "message": ""})
        return web.json_response({"meta_info": scored(body)})

    async def run() -> None:
        config = TeacherConfig(path="model")
        async with server(handler) as url, Teacher(config, [url, url], "token") as teacher:
            await teacher.with_scores(workflow)(PROMPT, 0)
            await teacher.load(tmp_path, HUNG_S)
            await teacher.with_scores(workflow)(PROMPT, 1)

    asyncio.run(run())
    assert [path for path, _ in asked] == ["/generate", *["/update_weights_from_disk"] * 2, "/generate"]
    assert [asked[place][1].get("extra_key") for place in (0, 3)] == [None, "teacher 1"]
