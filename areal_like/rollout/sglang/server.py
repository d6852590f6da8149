"""The requests that SGLang 0.5.17 serves, as methods; no other folder names its endpoints."""

import asyncio
import base64
import json
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import aiohttp
import numpy as np

from areal_like.columns import Form, Values
from areal_like.images import Images
from areal_like.rollout.sampling import Sampling
from areal_like.rollout.sglang import ADAPTERS, COMPARE, COMPARE_NOTED, FILES, NOTE, WATCH, Layout
from areal_like.rollout.sglang.giving_up import GIVE_UP
from areal_like.rollout.sglang.http import Connection, encode
from areal_like.rollout.sglang.served import read_served, request_served
from areal_like.rollout.sglang.weight_files import DOWNLOAD, Chain, FileSource
from areal_like.types import Floats, Ints

GENERATE, CLASSIFY = "/generate", "/classify"
MODEL_INFO, SERVER_INFO, LOADS = "/model_info", "/server_info", "/v1/loads"
RECEIVE, LOAD, OPEN_EXPORTED = (
    "/update_weights_from_distributed",
    "/update_weights_from_disk",
    "/update_weights_from_ipc",
)
SERVER_SHARE = 0.9  # of the time of a download; then the server itself reports the failure

type Body = dict[str, Any]
NO_COLUMNS: Mapping[str, Form] = MappingProxyType({})


@dataclass(frozen=True)
class Load:
    """Numbers of running and waiting requests of a server; `kv_use` is the used share of its KV cache."""

    running: int
    waiting: int
    kv_use: float


@dataclass(frozen=True)
class WeightGroup:
    """A process group of trainer rank 0 and every server rank, which meet at `address` and `port`."""

    name: str
    address: str
    port: int
    world_size: int
    backend: str


class Server:
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
        """Why the server left the run, once it has left."""
        return self.connection.left

    def leave(self, why: str) -> None:
        """End all pending requests, except streams, as Unavailable."""
        self.connection.leave(why)

    def generate(self, request: bytes) -> AsyncGenerator[list[bytes]]:
        """Send a `generation_request` and yield the events of its answer as they come."""
        return self.connection.stream(GENERATE, request)

    async def abort(self, rid: str, timeout_s: float) -> None:
        """Abort a request by its id."""
        await self.connection.post("/abort_request", {"rid": rid}, timeout_s)

    async def pause(self, timeout_s: float, *, retract: bool = False) -> None:
        """Pause generation between two passes; with `retract`, running requests give up their KV cache."""
        await self.connection.post("/pause_generation", {"mode": "retract" if retract else "in_place"}, timeout_s)

    async def resume(self, timeout_s: float) -> None:
        """Resume generation."""
        await self.connection.post("/continue_generation", {"torch_empty_cache": False}, timeout_s)

    async def release_memory(self, timeout_s: float) -> None:
        """Release the GPU memory of KV cache and weights."""
        await self.connection.post("/release_memory_occupation", {"tags": ["kv_cache", "weights"]}, timeout_s)

    async def resume_memory(self, part: Literal["kv_cache", "weights"], timeout_s: float) -> None:
        """Allocate released GPU memory again; the weights are empty until the next update."""
        await self.connection.post("/resume_memory_occupation", {"tags": [part]}, timeout_s)

    async def join_group(self, group: WeightGroup, first_rank: int, timeout_s: float) -> None:
        """Make the server's ranks join a group, the first of them as rank `first_rank`."""
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
        """Make the server's ranks leave a group."""
        self.group = None
        await self.connection.update("/destroy_weights_update_group", {"group_name": name}, timeout_s)

    async def give_up_group(self, name: str, timeout_s: float) -> None:
        """Stop the server's ranks from waiting for a broadcast in a group; its update fails."""
        await self.connection.update(GIVE_UP, {"group_name": name}, timeout_s)

    async def receive(self, request: Body, timeout_s: float) -> None:
        """Receive all buckets of a `broadcast_request`."""
        await self.connection.update(RECEIVE, request, timeout_s)

    async def load(self, path: str, version: int | str, timeout_s: float) -> None:
        """Load a Hugging Face checkpoint as `version`."""
        body = {
            "model_path": path,
            "load_format": "auto",  # the default is the server's at its start, which may be without weights
            "weight_version": str(version),
            "flush_cache": False,
        }
        await self.connection.update(LOAD, body, timeout_s)

    async def open_exported(self, handles: Mapping[str, str], version: int | None, timeout_s: float) -> None:
        """Load a bucket by its IPC handles, one per device; the last bucket of an update names the `version`."""
        weight_version = None if version is None else str(version)
        body = {"zmq_handles": handles, "flush_cache": False, "weight_version": weight_version}
        await self.connection.update(OPEN_EXPORTED, body, timeout_s)

    async def load_files(self, chain: Chain, version: int, timeout_s: float) -> None:
        """Load the weights after a chain of files as `version`; the server reads only new ones."""
        await self.open_exported({FILES: chain.to_json(secrets.token_hex(8))}, version, timeout_s)

    async def download(self, source: FileSource, chain: Chain, state: str | None, timeout_s: float) -> None:
        """Download the files that a server in a state of the chain lacks, while it generates."""
        files = [tuple(file) for file in chain.files_after(state)]
        body = {"url": source.url, "token": source.token, "files": files, "keep": chain.paths}
        await self.connection.update(DOWNLOAD, body | {"timeout_s": SERVER_SHARE * timeout_s}, timeout_s)

    async def load_adapters(self, paths: Mapping[str, str], version: int, timeout_s: float) -> None:
        """Replace adapters, by name, by the files in directories; the server then has `version`."""
        await self.open_exported({ADAPTERS: json.dumps(paths)}, version, timeout_s)

    async def watch_checksums(self, timeout_s: float) -> None:
        """Start computing checksums of all tensors that the server loads."""
        await self.connection.update(OPEN_EXPORTED, {"zmq_handles": {WATCH: ""}, "flush_cache": False}, timeout_s)

    async def compare_checksums(self, expected: str, timeout_s: float) -> None:
        """Compare the server's checksums with `expected`, a JSON object by tensor; raise ServerError if one differs."""
        body = {"zmq_handles": {COMPARE: expected}, "flush_cache": False}
        await self.connection.update(OPEN_EXPORTED, body, timeout_s)

    async def note_weights(self, timeout_s: float) -> None:
        """Store the checksums of the server's weights on the server."""
        await self.connection.update(OPEN_EXPORTED, {"zmq_handles": {NOTE: ""}, "flush_cache": False}, timeout_s)

    async def compare_noted(self, timeout_s: float) -> None:
        """Raise ServerError, which names the tensors, if the weights have changed since `note_weights`."""
        body = {"zmq_handles": {COMPARE_NOTED: ""}, "flush_cache": False}
        await self.connection.update(OPEN_EXPORTED, body, timeout_s)

    async def weight_version(self, timeout_s: float) -> str:
        """Return the version of the server's weights."""
        answer = await self.connection.get(MODEL_INFO, timeout_s)
        with self.connection.reading(MODEL_INFO):
            return str(answer["weight_version"])

    async def most_running(self, timeout_s: float) -> int:
        """Return the number of sequences that the server decodes at once, at least 1."""
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
        """Return the one logit of a sequence classifier for these tokens."""
        answer = await self.connection.post(CLASSIFY, {"input_ids": tokens}, timeout_s)
        with self.connection.reading(CLASSIFY):
            (value,) = answer["embedding"]
            return float(value)

    async def token_logprobs(
        self, tokens: Ints, timeout_s: float, *, start: int = 0, cache: str | None = None
    ) -> Floats:
        """Return the log-prob of each token after those before it, `[tokens]`; 0 up to token `start`.

        Tokens up to `start` may come from the server's prefix cache; with `cache`, only from other requests of this
        name.
        """
        return (await self.token_scores(tokens, timeout_s, start=start, cache=cache))[0]

    async def top_ids(
        self, tokens: Ints, k: int, timeout_s: float, *, start: int = 0, cache: str | None = None
    ) -> tuple[Floats, Ints, Floats]:
        """Return what `token_logprobs` does, and ids and log-probs of the `k` likeliest tokens in each place.

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
        """Return the log-probs of `token_logprobs`, and `columns` of these forms about the pass that computed them.

        `images` belong to the tokens up to `start`. `adapter` is the name of one of several that the server has.
        """
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
        """Parse tool calls with a model family's parser; return the remaining text, and name and arguments per call."""
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


def generation_request(
    rids: Sequence[str],
    inputs: Sequence[Ints],
    params: Sequence[Mapping[str, Any]],
    columns: Mapping[str, Any] = MappingProxyType({}),
    images: Sequence[Images] = (),
    adapters: Sequence[str | None] = (),
) -> bytes:
    """Return a request that generates one response per input; each has an id of its own, for `Server.abort`.

    `columns` are fields that request values per token (`Column.request`). `images` are those of each input, and
    `adapters` the names of theirs.
    """
    body = {"rid": rids, "input_ids": inputs, "sampling_params": params, "return_logprob": True, "stream": True}
    body |= columns
    if any(images):
        body["image_data"] = [_as_base64(own) for own in images]
    if any(adapters):
        body["lora_path"] = adapters
    return encode(body)


def _as_base64(images: Images) -> list[str]:
    return [base64.b64encode(image).decode() for image in images]


def broadcast_request(group: str, buckets: Sequence[Layout], version: int) -> Body:
    """Return the request that announces all buckets of an update to the servers of a group."""
    tensors = [tensor for bucket in buckets for tensor in bucket]
    return {
        "names": [name for name, _, _ in tensors],
        "dtypes": [dtype for _, dtype, _ in tensors],
        "shapes": [list(shape) for _, _, shape in tensors],
        "group_name": group,
        "load_format": json.dumps([len(bucket) for bucket in buckets]),  # as `receive_broadcast` reads it
        "flush_cache": False,  # versions separate prefixes; with running requests a flush would end the server
        "weight_version": str(version),
    }
