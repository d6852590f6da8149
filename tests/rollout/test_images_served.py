"""Images on a real server: its prompts are the tokens that were sent, and its log-probs are those of transformers.

Also across weight updates of all tensors, of which the embeddings of images must not be kept, and where a request is
interrupted and goes on from its own tokens.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import serving as real
import torch
from cpu_server import RunningServer, server_on_cpu
from limits import HUNG_S
from support.family_launcher import launcher_of
from test_versions import working
from tolerance import rounding
from vision_models import picture, write_vlm

from areal_like.core.config.load import load
from areal_like.core.errors import ServerError
from areal_like.core.rollout.pool import Requests, Response, Sampling, ServerPool
from areal_like.core.types import Images
from areal_like.data.images import as_data_url, decode
from areal_like.data.tokenizer import Tokenizer

DEMO = Path(__file__).parents[2] / "examples/math/gsm8k_grpo_cpu.yaml"
IMAGES = (picture(60, 40), picture(100, 200, 1, "JPEG"))
SEEDS = 2
EXACT = rounding(10.0)
# Of 160 tokens, along which rounding adds up in a qwen3_5_moe; log-probs of other weights are 1 apart
ADDED_UP = 1e-3

pytestmark = [pytest.mark.long, pytest.mark.covers("images in data, agents, servers")]


class Served:
    """A server of a family, the directories of its models by version, and transformers' models."""

    def __init__(self, server: RunningServer, folder: Path, networks: list[Any]) -> None:
        self.server, self.networks = server, networks
        self.models = [folder / str(seed) for seed in range(len(networks))]
        self.tokenizer = Tokenizer.load(str(self.models[0]))
        self.token = networks[0].config.image_token_id

    def prompt(self, *images: bytes, text: str = "what?") -> list[int]:
        """Return the tokens of a message that shows images."""
        parts: list[dict[str, Any]] = [{"type": "text", "text": "a"}]
        parts += [{"type": "image_url", "image_url": {"url": as_data_url(image)}} for image in images]
        return self.tokenizer.encode_chat([{"role": "user", "content": [*parts, {"type": "text", "text": text}]}])

    def expected(self, version: int, tokens: list[int], images: Images, sampled: tuple[int, ...] = ()) -> Any:
        """Return transformers' log-prob of each token but the first.

        Image tokens at the places `sampled` are words.
        """
        from transformers import AutoImageProcessor

        processor = AutoImageProcessor.from_pretrained(self.models[version])
        ids = torch.tensor([tokens])
        kinds = (ids == self.token).int()
        kinds[0, list(sampled)] = 0
        given = dict(processor(images=[decode(image) for image in images], return_tensors="pt")) if images else {}
        network = self.networks[version]
        gemma = network.config.model_type == "gemma3"
        embedded = network.get_input_embeddings()(ids)
        if sampled:  # transformers takes each image token for a part of an image
            find = network.model.get_placeholder_mask
            shown, nothing = (kinds == 1)[..., None].expand_as(embedded), torch.zeros_like(embedded, dtype=torch.bool)
            masks = shown if gemma else (shown, nothing)  # of images, and of videos
            network.model.get_placeholder_mask = lambda *_, **__: masks
        try:
            with torch.no_grad():
                named = "token_type_ids" if gemma else "mm_token_type_ids"
                logits = network(input_ids=ids, **{named: kinds}, **given).logits[0]
        finally:
            if sampled:
                network.model.get_placeholder_mask = find
        return logits[:-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].numpy()


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "gemma3"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp(request.param)
    networks = [write_vlm(request.param, folder / str(seed), seed) for seed in range(SEEDS)]
    config = load(DEMO, ["sglang.context_length=256"]).config
    with server_on_cpu(config, folder / "0", folder, launcher=launcher_of(folder / "0")) as server:
        yield Served(server, folder, networks)


def generate(served: Served, prompt: list[int], images: Images, samples: int = 1, tokens: int = 12) -> list[Response]:
    async def run() -> list[Response]:
        async with real.pool_on(served.server) as pool:
            await real.serve(pool, served.models[0], 0)
            return await pool.generate([prompt] * samples, Sampling(tokens, ignore_eos=True), images=images)

    return asyncio.run(run())


def check(served: Served, prompt: list[int], images: Images, response: Response, limit: float = EXACT) -> None:
    whole = [*prompt, *response.tokens.tolist()]
    generated = range(len(prompt), len(whole))
    sampled = tuple(place for place in generated if whole[place] == served.token)
    for version in set(response.versions.tolist()):
        own = response.versions == version
        expected = served.expected(version, whole, images, sampled)[len(prompt) - 1 :]
        print(f"version {version}: {np.abs(expected - response.logprobs)[own].max():.1e}")
        if version == response.versions[0]:  # tokens of a later version saw keys and values of this one
            assert np.abs(expected - response.logprobs)[own].max() < limit


@pytest.mark.parametrize("shown", [1, 2, 0])
def test_log_probs_are_those_of_transformers(served: Served, shown: int) -> None:
    images = IMAGES[2 - shown :]
    prompt = served.prompt(*images)
    for response in generate(served, prompt, images, samples=4):
        check(served, prompt, images, response)


def test_another_image_gives_other_log_probs(served: Served) -> None:
    prompt = served.prompt(IMAGES[0])
    other = picture(60, 40, 5)
    for image, absent in ((IMAGES[0], other), (other, IMAGES[0]), (IMAGES[0], other)):
        (response,) = generate(served, prompt, (image,))
        check(served, prompt, (image,), response)
        whole = [*prompt, *response.tokens.tolist()]
        sampled = tuple(place for place in range(len(prompt), len(whole)) if whole[place] == served.token)
        apart = served.expected(0, whole, (absent,), sampled)[len(prompt) - 1 :]
        print(f"of another image: {np.abs(apart - response.logprobs).max():.1e}")
        assert np.abs(apart - response.logprobs).max() > 10 * EXACT


def test_a_sampled_image_token_is_a_word(served: Served) -> None:
    first = [*served.prompt(IMAGES[0]), 70, served.token, 71, served.token, served.token, 72]
    sampled = tuple(len(first) - back for back in (5, 3, 2))
    prompt = [*first, *served.prompt(IMAGES[1])]
    (response,) = generate(served, prompt, IMAGES)
    whole = [*prompt, *response.tokens.tolist()]
    again = tuple(place for place in range(len(prompt), len(whole)) if whole[place] == served.token)
    expected = served.expected(0, whole, IMAGES, (*sampled, *again))[len(prompt) - 1 :]
    assert np.abs(expected - response.logprobs).max() < EXACT


@pytest.mark.parametrize("requests", ["in_place", "recompute", "drain"])
def test_updates_change_every_tensor_under_running_requests(served: Served, requests: Requests) -> None:
    prompts = [served.prompt(*IMAGES), served.prompt(IMAGES[1], text="and"), served.prompt(text="without")]
    shown: list[Images] = [IMAGES, IMAGES[1:], ()]

    async def run() -> tuple[list[Response], list[Response]]:
        async with ServerPool([served.server.url], served.server.token, HUNG_S, requests=requests) as pool:
            await real.serve(pool, served.models[0], 0)
            sampling = Sampling(160, ignore_eos=True)  # still running when the update starts, on fast machines too
            asking = asyncio.gather(
                *(pool.generate([prompt], sampling, images=own) for prompt, own in zip(prompts, shown, strict=True))
            )
            await working(pool)
            await real.serve(pool, served.models[1], 1)
            before = [response for (response,) in await asking]
            after = [
                (await pool.generate([prompt], sampling, images=own))[0]
                for prompt, own in zip(prompts, shown, strict=True)
            ]
            return before, after

    before, after = asyncio.run(run())
    for prompt, own, response in zip(prompts, shown, before, strict=True):
        check(served, prompt, own, response, ADDED_UP)
    if requests != "drain":
        assert any(len(set(response.versions.tolist())) > 1 for response in before), "no response was interrupted"
    for prompt, own, response in zip(prompts, shown, after, strict=True):
        assert set(response.versions.tolist()) == {1}
        check(served, prompt, own, response, ADDED_UP)
    if requests == "recompute":  # all keys and values are of the new weights
        for prompt, own, response in zip(prompts, shown, before, strict=True):
            whole, new = [*prompt, *response.tokens.tolist()], response.versions == 1
            sampled = tuple(place for place in range(len(prompt), len(whole)) if whole[place] == served.token)
            expected = served.expected(1, whole, own, sampled)[len(prompt) - 1 :]
            assert not new.any() or np.abs(expected - response.logprobs)[new].max() < ADDED_UP


@pytest.mark.parametrize(
    ("images", "words"),
    [
        (IMAGES[:1], "not those of an image"),
        ((IMAGES[1], IMAGES[0]), "places for 1 images of 2"),
        ((*IMAGES, IMAGES[0]), "places for 2 images of 3"),
        ((IMAGES[0][:200], IMAGES[1]), "is damaged"),
    ],
)
def test_images_that_do_not_fit_the_tokens_are_refused(served: Served, images: Images, words: str) -> None:
    if served.networks[0].config.model_type == "gemma3" and images == IMAGES[::-1]:
        pytest.skip("every image takes as many tokens")
    with pytest.raises(ServerError, match=words):
        generate(served, served.prompt(*IMAGES), images)
    (response,) = generate(served, served.prompt(*IMAGES), IMAGES)
    check(served, served.prompt(*IMAGES), IMAGES, response)


def test_scores_of_a_prompt_with_images(served: Served) -> None:
    prompt = served.prompt(*IMAGES)
    (response,) = generate(served, prompt, IMAGES)
    whole = [*prompt, *response.tokens.tolist()]

    async def score() -> Any:
        async with ServerPool([served.server.url], served.server.token, HUNG_S) as pool:
            server, start = pool.servers[0], len(prompt) - 1
            return (await server.token_scores(np.array(whole, np.int32), HUNG_S, start=start, images=IMAGES))[0]

    scored = asyncio.run(score())[len(prompt) :]
    assert np.abs(scored - response.logprobs).max() < EXACT


def test_pixels_are_computed_once_for_a_group() -> None:
    from areal_like.backends.sglang.patches.images import find_images, image_positions

    assert find_images([9, 5, 5, 5, 5, 1, 5, 2, 5, 5], [4, 2], 5) == [1, 8]
    positions = image_positions(9, [1], [(2, 3)]).tolist()
    assert positions == [[0, 1, 1, 1, 1, 1, 1, 4, 5], [0, 1, 1, 1, 2, 2, 2, 4, 5], [0, 1, 2, 3, 1, 2, 3, 4, 5]]
