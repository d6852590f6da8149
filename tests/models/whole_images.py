"""Prompts with images whose tokens attend to later ones: what servers and transformers make of them, in bfloat16.

Where the mask or the activation of the vision tower is wrong, `models` name the mistake.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_servers import Post
from transformers import AutoImageProcessor, AutoModelForImageTextToText
from transformers.activations import ACT2FN
from vision_models import picture, write_vlm

from areal_like.data.images import decode

SIDE = 448  # an image takes 256 tokens, as a published gemma3's does
WINDOW = 64  # shorter than an image
TEXT = {
    "hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 4, "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "max_position_embeddings": 4096,
    "query_pre_attn_scalar": 64, "initializer_range": 0.08,
}  # fmt: skip
BLOCKS = (64, 128)  # queries that a kernel of SGLang computes together
NEW = 24
IMAGES = [picture(300 + 40 * number, 260, number) for number in range(5)]


@dataclass(frozen=True)
class Request:
    """A prompt with the numbers of its images; the server scores it from token `start` on, and continues it."""

    name: str
    tokens: list[int]
    images: Sequence[int]
    start: int = 0


def write_model(path: Path, seed: int = 0) -> torch.nn.Module:
    """Write a gemma3 in bfloat16 that has windows shorter than its images; return it."""
    network = write_vlm("gemma3", path, seed, SIDE, **TEXT)
    with torch.no_grad():
        for name, tensor in network.named_parameters():
            if ".fc1.weight" in name or ".fc2.weight" in name:
                tensor.normal_(0, 0.3)  # so that the activation between them makes a difference
    network.to(torch.bfloat16)
    save_model(network, path)
    return network


def save_model(network: torch.nn.Module, path: Path) -> None:
    """Write the weights of a model under their published names."""
    from vision_models import rewrite_as_published

    network.save_pretrained(path)
    rewrite_as_published("gemma3", path)


def make_requests(config: Any) -> tuple[list[Request], list[Request]]:
    """Return prompts, and prompts that begin like the first, which the server has then computed."""
    rng = np.random.default_rng(0)
    special = [config.boi_token_index, config.eoi_token_index, config.image_token_index]
    image = [special[0], *[special[2]] * config.mm_tokens_per_image, special[1]]
    words = np.setdiff1d(np.arange(5, 200), special)

    def prompt(*parts: int | str) -> list[int]:
        made = (image if part == "image" else rng.choice(words, part).tolist() for part in parts)
        return [token for part in made for token in part]

    first = prompt(30, "image", 20, "image", 40)
    second = 30 + len(image) + 20 + 1  # the first token of its second image
    new = [
        Request("two images", first, [0, 1]),
        Request("one image", prompt(10, "image", 60), [2]),
        Request("no image", prompt(90), []),
    ]
    further = [
        Request("one image more", [*first[:-20], *prompt(15, "image", 30)], [0, 1, 2], len(first) - 20),
        Request("from within an image", [*first, *prompt(10)], [0, 1], second + 100),
        Request("the same", first, [0, 1], len(first) - 1),
        Request("another second image", first, [0, 3], second - 10),
        Request("five images", prompt(5, *["image"] * 5, 30), range(5)),
    ]
    return new, further


def ask(post: Post, requests: Sequence[Request]) -> Iterator[tuple[Request, list[int], np.ndarray, int]]:
    """Return each request with its tokens and their log-probs, NaN where there is none, and how many were cached."""
    body = {
        "input_ids": [request.tokens for request in requests],
        "image_data": [[base64.b64encode(IMAGES[i]).decode() for i in request.images] for request in requests],
        "sampling_params": {"max_new_tokens": NEW, "temperature": 1.0, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": [request.start for request in requests],
    }
    for request, answer in zip(requests, post("/generate", body), strict=True):
        info, tokens = answer["meta_info"], [*request.tokens, *answer["output_ids"]]
        pairs = [pair for part in ("input", "output") for pair in info[f"{part}_token_logprobs"]]
        found = np.full(len(tokens), np.nan)
        found[len(tokens) - len(pairs) :] = np.array([first for first, *_ in pairs], np.float32)
        yield request, tokens, found, info["cached_tokens"]


class Transformers:
    """A model as transformers computes it, right or with a mistake."""

    def __init__(self, path: Path, dtype: torch.dtype, device: str) -> None:
        torch.backends.cudnn.allow_tf32 = False
        network = AutoModelForImageTextToText.from_pretrained(path, dtype=dtype, attn_implementation="eager")
        self.network, self.dtype, self.device = network.to(device).eval(), dtype, device
        processor = AutoImageProcessor.from_pretrained(path)
        self.pixels = processor(images=[decode(image) for image in IMAGES], return_tensors="pt")["pixel_values"]

    def __call__(self, tokens: list[int], images: Sequence[int], mistake: str = "") -> np.ndarray:
        """Return the log-prob of each token, NaN for the first."""
        ids = torch.tensor([tokens], device=self.device)
        given: dict[str, Any] = {"token_type_ids": (ids == self.network.config.image_token_index).int()}
        if images:
            given["pixel_values"] = self.pixels[list(images)].to(self.device, self.dtype)
        if mistake == "causal":
            given["token_type_ids"] = torch.zeros_like(ids)
        elif mistake in MASKS:
            given["attention_mask"] = self._masks(given["token_type_ids"][0] == 1, MASKS[mistake])
        with torch.no_grad(), self._activation("quick_gelu" if mistake == "activation" else None):
            logits = self.network(input_ids=ids, use_cache=False, **given).logits[0].float()
        found = logits[:-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        return np.concatenate([[np.nan], found.cpu().numpy()])

    def _masks(self, shown: torch.Tensor, mistaken: Callable[..., torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the masks that are added to scores, of a mistake: [1, 1, query, key]."""
        place = torch.arange(len(shown), device=self.device)
        query, key = place[:, None], place
        number = torch.where(shown, (~shown).cumsum(0), -1)
        own = (number[:, None] == number) & shown
        causal, near = key <= query, (key <= query) & (query - key < WINDOW)
        masks = {
            "full_attention": mistaken(causal, own, query, key),
            "sliding_attention": mistaken(near, own, query, key, window=True),
        }
        least = torch.finfo(self.dtype).min
        return {kind: torch.where(mask, 0.0, least).to(self.dtype)[None, None] for kind, mask in masks.items()}

    @contextmanager
    def _activation(self, name: str | None) -> Iterator[None]:
        """Have the vision tower compute another activation."""
        layers = [module for module in self.network.modules() if hasattr(module, "activation_fn")]
        before = [layer.activation_fn for layer in layers]
        for layer in layers if name else ():
            layer.activation_fn = ACT2FN[name]
        try:
            yield
        finally:
            for layer, activation in zip(layers, before, strict=True):
                layer.activation_fn = activation


def _in_blocks(size: int) -> Callable[..., torch.Tensor]:
    return lambda seen, own, query, key, window=False: seen | (own & (key // size <= query // size))


def _in_windows(seen: torch.Tensor, own: torch.Tensor, query: torch.Tensor, key: torch.Tensor, window: bool = False):
    return seen | (own & (query - key < WINDOW)) if window else seen | own


MASKS: dict[str, Callable[..., torch.Tensor]] = {
    **{f"cut at {size}": _in_blocks(size) for size in BLOCKS},
    "cut by windows": _in_windows,
}
MISTAKES = ("causal", "activation", *MASKS)


class Judge:
    """Distances of log-probs from those of transformers in float32."""

    def __init__(self, path: Path, device: str) -> None:
        self.exact, self.rounded = (Transformers(path, dtype, device) for dtype in (torch.float32, torch.bfloat16))
        self.image = self.exact.network.config.image_token_index

    def compared(self, request: Request, tokens: list[int], found: np.ndarray) -> tuple[list[int], np.ndarray]:
        """Return the tokens up to an image token that was sampled, and which of them are compared."""
        end = next((at for at in range(len(request.tokens), len(tokens)) if tokens[at] == self.image), len(tokens))
        words = np.array(tokens[:end]) != self.image
        return tokens[:end], words & ~np.isnan(found[:end])

    def errors(self, request: Request, tokens: list[int], found: np.ndarray) -> dict[str, np.ndarray]:
        """Return the differences from float32 of the server, of rounding, and of each mistake."""
        kept, chosen = self.compared(request, tokens, found)
        exact = self.exact(kept, request.images)
        others = {
            "server": found[: len(kept)],
            "bfloat16": self.rounded(kept, request.images),
            **{mistake: self.exact(kept, request.images, mistake) for mistake in MISTAKES},
        }
        return {name: (other - exact)[chosen] for name, other in others.items()}


def compare(name: str, post: Post, judge: Judge) -> list[str]:
    """Print how far a server is from float32, and return what rounding does not explain."""
    wrong, all_errors = [], []
    for requests in make_requests(judge.exact.network.config):
        for request, tokens, found, cached in ask(post, requests):
            errors = judge.errors(request, tokens, found)
            all_errors.append(errors)
            server, rounding = (float(np.abs(errors[side]).mean()) for side in ("server", "bfloat16"))
            told = (
                f"{name}, {request.name}: {server:.2g} nats from float32, transformers {rounding:.2g}; {cached} cached"
            )
            print(told, flush=True)
            if not server < TIMES_OF_ONE * rounding or (
                cached < CACHED.get(request.name, 0) and name != "deterministic"
            ):
                wrong.append(told)
    joined = {side: np.concatenate([errors[side] for errors in all_errors]) for side in all_errors[0]}
    shares = {mistake: share(joined["server"], joined[mistake]) for mistake in MISTAKES}
    server, rounding = (float(np.abs(joined[side]).mean()) for side in ("server", "bfloat16"))
    told = (
        f"{name}, all: {server:.2g} nats from float32, transformers {rounding:.2g}; shares of mistakes: "
        + ", ".join(f"{mistake} {part:.2f}" for mistake, part in shares.items())
    )
    print(told, flush=True)
    agrees = server < TIMES * rounding and max(shares.values()) < SHARE
    return wrong if agrees else [*wrong, told]


def share(errors: np.ndarray, mistake: np.ndarray) -> float:
    """Return how much of a mistake is in the errors: 1 where they are those of the mistake, about 0 without it."""
    return float(errors @ mistake / (mistake @ mistake))


SHARE = 0.5
TIMES, TIMES_OF_ONE = 1.5, 3  # transformers' own distance from float32, and that of one request with few numbers
CACHED = {"one image more": 500, "from within an image": 350, "the same": 500, "another second image": 280}
# Servers: with CUDA graphs of decoding steps, with the kernel of deterministic inference, and with pages, at whose ends
# the prefixes in the cache end. Not every build of SGLang has the vision tower's usual attention, FlashAttention-3.
SHARED = (
    *("sglang.context_length=2048", "sglang.extra_args.max_total_tokens=16384"),
    "sglang.extra_args.mm_attention_backend=triton_attn",
)
SERVERS: dict[str, tuple[str, ...]] = {
    "graphs": (*SHARED, "sglang.extra_args.disable_cuda_graph=false"),
    "deterministic": (*SHARED, "sglang.deterministic=true"),
    "pages": (*SHARED, "sglang.extra_args.page_size=16"),
}
