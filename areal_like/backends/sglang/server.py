"""The requests that SGLang 0.5.17 serves, as methods of a Server; no other folder names its endpoints."""

import asyncio
import base64
import json
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal

import aiohttp
import numpy as np

from areal_like.backends.http import Connection, encode
from areal_like.backends.sglang import COMMAND, DOWNLOAD, GIVE_UP
from areal_like.backends.sglang.answers import part_of
from areal_like.backends.sglang.served import read_served, request_served
from areal_like.core.columns import Form, Values
from areal_like.core.rollout.sample import Sampling
from areal_like.core.rollout.server import NO_COLUMNS, Generation, Load, Part, WeightGroup
from areal_like.core.transfer import Chain, FileSource, Layout
from areal_like.core.types import Floats, Images, Ints

GENERATE, CLASSIFY = "/generate", "/classify"
MODEL_INFO, SERVER_INFO, LOADS = "/model_info", "/server_info", "/v1/loads"
RECEIVE, LOAD, OPEN_EXPORTED = (
    "/update_weights_from_distributed",
    "/update_weights_from_disk",
    "/update_weights_from_ipc",
)
SERVER_SHARE = 0.9  # of the time of a download; then the server itself reports the failure

type Body = dict[str, Any]


class SGLangClient:
    """One SGLang server; errors call it `name`.

    `rank` is its place in the layout, if it has one. `left` holds the reason why it left the run. `turn`, `aftermath_s`
    and `host_timeout_s` are described at Connection. Every method raises Unavailable, or ServerError for an invalid
    request.
    """

    def __init__(
        self,
        name: str,
        url: str,
        session: aiohttp.ClientSession,
        rank: int | None = None,
        turn: Callable[[], Awaitable[None]] | None = None,
        aftermath_s: float | None = None,
        host_timeout_s: float = 0.0,
    ) -> None:
        self.name = name
        self.url = url
        self.rank = rank
        self.group: str | None = None  # the process group that its ranks have joined, or tried to join
        self.connection = Connection(name, url, session, turn, aftermath_s, host_timeout_s)

    @property
    def left(self) -> asyncio.Future[str]:
        return self.connection.left

    def leave(self, why: str) -> None:
        self.connection.leave(why)

    def generate(self, request: Generation) -> AsyncGenerator[list[bytes]]:
        return self.connection.stream(GENERATE, _encode(request))

    def part_of(self, event: bytes) -> Part:
        return part_of(event, self.name)

    async def abort(self, rid: str, timeout_s: float) -> None:
        await self.connection.post("/abort_request", {"rid": rid}, timeout_s)

    async def pause(self, timeout_s: float, *, retract: bool = False) -> None:
        await self.connection.post("/pause_generation", {"mode": "retract" if retract else "in_place"}, timeout_s)

    async def resume(self, timeout_s: float) -> None:
        await self.connection.post("/continue_generation", {"torch_empty_cache": False}, timeout_s)

    async def release_memory(self, timeout_s: float) -> None:
        await self.connection.post("/release_memory_occupation", {"tags": ["kv_cache", "weights"]}, timeout_s)

    async def resume_memory(self, part: Literal["kv_cache", "weights"], timeout_s: float) -> None:
        await self.connection.post("/resume_memory_occupation", {"tags": [part]}, timeout_s)

    async def join_group(self, group: WeightGroup, first_rank: int, timeout_s: float) -> None:
        body = {
            "master_address": group.address,
            "master_port": group.port,
            "world_size": group.world_size,
            "group_name": group.name,
            "backend": group.backend,
            "rank_offset": first_rank,
        }
        self.group = group.name
        await self.connection.update("/init_weights_update_group", body, timeout_s)

    async def leave_group(self, name: str, timeout_s: float) -> None:
        self.group = None
        await self.connection.update("/destroy_weights_update_group", {"group_name": name}, timeout_s)

    async def give_up_group(self, name: str, timeout_s: float) -> None:
        await self.connection.update(GIVE_UP, {"group_name": name}, timeout_s)

    async def receive(self, group: str, buckets: Sequence[Layout], version: int, timeout_s: float) -> None:
        tensors = [tensor for bucket in buckets for tensor in bucket]
        body = {
            "names": [name for name, _, _ in tensors],
            "dtypes": [dtype for _, dtype, _ in tensors],
            "shapes": [list(shape) for _, _, shape in tensors],
            "group_name": group,
            "load_format": json.dumps([len(bucket) for bucket in buckets]),  # as `receive_broadcast` reads it
            "flush_cache": False,  # versions separate prefixes; with running requests a flush would end the server
            "weight_version": str(version),
        }
        await self.connection.update(RECEIVE, body, timeout_s)

    async def load(self, path: str, version: int | str, timeout_s: float) -> None:
        body = {
            "model_path": path,
            "load_format": "auto",  # the default is the server's at its start, which may be without weights
            "weight_version": str(version),
            "flush_cache": False,
        }
        await self.connection.update(LOAD, body, timeout_s)

    async def open_exported(self, handles: Mapping[str, str], version: int | None, timeout_s: float) -> None:
        weight_version = None if version is None else str(version)
        body = {"zmq_handles": handles, "flush_cache": False, "weight_version": weight_version}
        await self.connection.update(OPEN_EXPORTED, body, timeout_s)

    async def command(self, name: str, text: str, timeout_s: float, version: int | None = None) -> None:
        """Let all ranks carry out a command of a patch; the last one of an update names the `version`."""
        weight_version = None if version is None else str(version)
        body = {"name": name, "text": text, "weight_version": weight_version}
        await self.connection.update(COMMAND, body, timeout_s)

    async def load_files(self, chain: Chain, version: int, timeout_s: float) -> None:
        await self.command("files", chain.to_json(secrets.token_hex(8)), timeout_s, version)

    async def download(self, source: FileSource, chain: Chain, state: str | None, timeout_s: float) -> None:
        files = [tuple(file) for file in chain.files_after(state)]
        body = {"url": source.url, "token": source.token, "files": files, "keep": chain.paths}
        await self.connection.update(DOWNLOAD, body | {"timeout_s": SERVER_SHARE * timeout_s}, timeout_s)

    async def load_adapters(self, paths: Mapping[str, str], version: int, timeout_s: float) -> None:
        await self.command("adapters", json.dumps(paths), timeout_s, version)

    async def watch_checksums(self, timeout_s: float) -> None:
        await self.command("watch", "", timeout_s)

    async def compare_checksums(self, expected: str, timeout_s: float) -> None:
        await self.command("compare", expected, timeout_s)

    async def note_weights(self, timeout_s: float) -> None:
        await self.command("note", "", timeout_s)

    async def compare_noted(self, timeout_s: float) -> None:
        await self.command("compare noted", "", timeout_s)

    async def weight_version(self, timeout_s: float) -> str:
        answer = await self.connection.get(MODEL_INFO, timeout_s)
        with self.connection.reading(MODEL_INFO):
            return str(answer["weight_version"])

    async def most_running(self, timeout_s: float) -> int:
        answer = await self.connection.get(SERVER_INFO, timeout_s)
        with self.connection.reading(SERVER_INFO):
            most = sum(state["effective_max_running_requests_per_dp"] for state in answer["internal_states"])
            if most < 1:
                raise ValueError(f"{most} sequences at once")
            return int(most)

    async def work_done(self, timeout_s: float) -> Any:
        """Return counts that change with every few generated tokens and with nothing else.

        The server answers without its scheduler, so it answers even if the scheduler hangs.
        """
        answer = await self.connection.get(_CORE_LOADS, timeout_s)
        counts = ("num_running_reqs", "num_waiting_reqs", "num_total_tokens", "total_prefill_uncached_tokens")
        with self.connection.reading(LOADS):
            return [[load[count] for count in counts] for load in answer["loads"]]

    async def current_load(self, timeout_s: float) -> Load:
        """Return the load of the server, from its scheduler's last report, which costs the scheduler nothing."""
        answer = await self.connection.get(_CORE_LOADS, timeout_s)
        with self.connection.reading(LOADS):
            loads = answer["loads"]
            running, waiting = (
                sum(int(load[f"num_{state}_reqs"]) for load in loads) for state in ("running", "waiting")
            )
            return Load(running, waiting, max(float(load["token_usage"]) for load in loads))

    async def classify(self, tokens: Sequence[int], timeout_s: float) -> float:
        answer = await self.connection.post(CLASSIFY, {"input_ids": tokens}, timeout_s)
        with self.connection.reading(CLASSIFY):
            (value,) = answer["embedding"]
            return float(value)

    async def token_logprobs(
        self, tokens: Ints, timeout_s: float, *, start: int = 0, cache: str | None = None
    ) -> Floats:
        return (await self.token_scores(tokens, timeout_s, start=start, cache=cache))[0]

    async def top_ids(
        self, tokens: Ints, k: int, timeout_s: float, *, start: int = 0, cache: str | None = None
    ) -> tuple[Floats, Ints, Floats]:
        """Return the log-probs of `token_logprobs`, and ids and log-probs of the `k` likeliest tokens in each place.

        They are 0 up to `start`.


        Source: SGLang 0.5.17, `return_flat_raw_top_logprobs` in `io_struct.py`.
        """
        flat = {"top_logprobs_num": k, "return_flat_raw_top_logprobs": True, "return_flat_raw_top_logprobs_b64": True}
        info = await self._score(tokens, timeout_s, start, flat, cache)
        with self.connection.reading(GENERATE):
            ids: Ints = np.zeros((len(tokens), k), np.int32)
            likeliest: Floats = np.zeros((len(tokens), k), np.float32)
            for name, rows in (("idx", ids), ("val", likeliest)):
                data = base64.b64decode(info[f"input_top_logprobs_{name}_flat_b64"], validate=True)
                rows[start + 1 :] = np.frombuffer(data, rows.dtype).reshape(len(tokens) - start - 1, k)
            return _logprobs_of(info, tokens, start), ids, likeliest

    async def token_scores(
        self,
        tokens: Ints,
        timeout_s: float,
        *,
        start: int = 0,
        cache: str | None = None,
        columns: Mapping[str, Form] = NO_COLUMNS,
        images: Images = (),
        adapter: str | None = None,
    ) -> tuple[Floats, dict[str, Values]]:
        sampling = Sampling(1, columns=columns)
        more: Body = request_served(sampling)
        if adapter is not None:
            more["lora_path"] = adapter
        if images:
            more["image_data"] = _as_base64(images)
        info = await self._score(tokens, timeout_s, start, more, cache)
        with self.connection.reading(GENERATE):
            return _logprobs_of(info, tokens, start), read_served(info, len(tokens), sampling)

    async def _score(self, tokens: Ints, timeout_s: float, start: int, more: Body, cache: str | None) -> Any:
        more = more if cache is None else more | {"extra_key": cache}
        sampling = {"max_new_tokens": 1, "temperature": 1.0}  # of the token that follows, which nothing uses
        body = {"input_ids": tokens, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": start}
        answer = await self.connection.post(GENERATE, body | more, timeout_s)
        with self.connection.reading(GENERATE):
            return answer["meta_info"]

    async def parse_tools(
        self, text: str, tools: Sequence[Mapping[str, Any]], parser: str, timeout_s: float
    ) -> tuple[str, list[tuple[str, str]]]:
        path = "/parse_function_call"
        body = {"text": text, "tools": tools, "tool_call_parser": parser}
        answer = await self.connection.post(path, body, timeout_s)
        with self.connection.reading(path):
            return answer["normal_text"], [(call["name"], call["parameters"]) for call in answer["calls"]]


def _logprobs_of(info: Mapping[str, Any], tokens: Ints, start: int) -> Floats:
    scored = info["input_token_logprobs"]
    named = [token for _, token, *_ in scored]  # the vocabulary's last token as 0, as SGLang 0.5.17 has it
    sent = tokens[start:]
    if len(named) != len(sent) or any(own not in (0, one) for own, one in zip(named, sent, strict=True)):
        raise ValueError("the returned log-probs belong to tokens that were not sent")
    return np.array([0.0] * (start + 1) + [logprob for logprob, *_ in scored[1:]], np.float32)


_CORE_LOADS = f"{LOADS}?include=core"


def _encode(request: Generation) -> bytes:
    body: Body = {"rid": request.rids, "input_ids": request.inputs, "sampling_params": request.params}
    body |= {"return_logprob": True, "stream": True, **request.columns}
    if any(request.images):
        body["image_data"] = [_as_base64(own) for own in request.images]
    if any(request.adapters):
        body["lora_path"] = request.adapters
    return encode(body)


def _as_base64(images: Images) -> list[str]:
    return [base64.b64encode(image).decode() for image in images]
