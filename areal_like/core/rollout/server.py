"""The protocol of an inference server, as pool, router, weight transports and capabilities use it.

A backend is a folder of `areal_like/backends/` with a `backend.py` (`backends.py`); its name is the
name of the backend in an allocation.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol

from areal_like.core.columns import Form, Values
from areal_like.core.errors import ServerError
from areal_like.core.transfer import Chain, FileSource, Layout
from areal_like.core.types import Floats, Images, Ints, Piece

NO_COLUMNS: Mapping[str, Form] = MappingProxyType({})
OF_ALL = -1  # the place of a part that is about all of a request's inputs


type Part = tuple[int, Piece | ServerError]  # of a request's input number so and so


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


@dataclass(frozen=True)
class Generation:
    """A request of one response per input, each with an id of its own, for `Server.abort`.

    `params` are sampling parameters (`Sample.params`). `columns` are fields that request values per token
    (`Column.request`). `images` are the images of each input, and `adapters` the names of their adapters.
    """

    rids: Sequence[str]
    inputs: Sequence[Ints]
    params: Sequence[Mapping[str, Any]]
    columns: Mapping[str, Any] = field(default_factory=dict)
    images: Sequence[Images] = ()
    adapters: Sequence[str | None] = ()


@dataclass(frozen=True)
class ServerSpec:
    """Everything about a server that is known before it has a host.

    `arguments` are the backend's own, without host, port and token. A server that `classifies` does not generate.
    """

    name: str
    arguments: tuple[str, ...]
    log_file: Path
    token: str
    port: int | None
    startup_timeout_s: float
    classifies: bool = False


class ServerActor(Protocol):
    """The process of a server, as a Ray actor beside its GPUs, made from a ServerSpec and a host."""

    async def start(self) -> str:
        """Start the process and wait until it serves; return its URL."""

    async def watch(self) -> None:
        """Return never; raise when the process ends."""

    async def end(self) -> None:
        """End the process."""


class Server(Protocol):
    """One server; errors call it `name`.

    `rank` is its place in the layout, if it has one. `group` is the process group that its ranks have joined, or tried
    to join. Methods raise Unavailable where a repetition may help, and ServerError for an invalid request. A backend
    without one of the weight transports raises ServerError in its methods.
    """

    name: str
    url: str
    rank: int | None
    group: str | None

    @property
    def left(self) -> asyncio.Future[str]:
        """Why the server left the run, once it has left."""

    def leave(self, why: str) -> None:
        """End all pending requests, except streams, as Unavailable."""

    # Generation

    def generate(self, request: Generation) -> AsyncGenerator[list[bytes]]:
        """Send a request and yield the events of its answer as they come."""

    def part_of(self, event: bytes) -> Part:
        """Return the content of an event, or an error at the place OF_ALL if it does not concern one input."""

    async def abort(self, rid: str, timeout_s: float) -> None:
        """Abort a request by its id."""

    async def most_running(self, timeout_s: float) -> int:
        """Return the number of sequences that the server decodes at once, at least 1."""

    async def work_done(self, timeout_s: float) -> Any:
        """Return counts that change with every few generated tokens and with nothing else, even from a busy server."""

    async def current_load(self, timeout_s: float) -> Load:
        """Return the load of the server."""

    # Between two versions of the weights

    async def pause(self, timeout_s: float, *, retract: bool = False) -> None:
        """Pause generation between two passes; with `retract`, running requests give up their KV cache."""

    async def resume(self, timeout_s: float) -> None:
        """Resume generation."""

    async def release_memory(self, timeout_s: float) -> None:
        """Release the GPU memory of KV cache and weights."""

    async def resume_memory(self, part: Literal["kv_cache", "weights"], timeout_s: float) -> None:
        """Allocate released GPU memory again; the weights are empty until the next update."""

    async def weight_version(self, timeout_s: float) -> str:
        """Return the version of the server's weights."""

    # Weights

    async def load(self, path: str, version: int | str, timeout_s: float) -> None:
        """Load a Hugging Face checkpoint as `version`."""

    async def join_group(self, group: WeightGroup, first_rank: int, timeout_s: float) -> None:
        """Make the server's ranks join a group, the first of them as rank `first_rank`."""

    async def leave_group(self, name: str, timeout_s: float) -> None:
        """Make the server's ranks leave a group."""

    async def give_up_group(self, name: str, timeout_s: float) -> None:
        """Stop the server's ranks from waiting for a broadcast in a group; its update fails."""

    async def receive(self, group: str, buckets: Sequence[Layout], version: int, timeout_s: float) -> None:
        """Receive all buckets of an update by broadcast in a group."""

    async def open_exported(self, handles: Mapping[str, str], version: int | None, timeout_s: float) -> None:
        """Load a bucket by its IPC handles, one per device; the last bucket of an update names the `version`."""

    async def load_files(self, chain: Chain, version: int, timeout_s: float) -> None:
        """Load the weights after a chain of files as `version`; the server reads only new ones."""

    async def download(self, source: FileSource, chain: Chain, state: str | None, timeout_s: float) -> None:
        """Download the files that a server in a state of the chain lacks, while it generates."""

    async def load_adapters(self, paths: Mapping[str, str], version: int, timeout_s: float) -> None:
        """Replace adapters, by name, by the files in directories; the server then has `version`."""

    async def watch_checksums(self, timeout_s: float) -> None:
        """Start computing checksums of all tensors that the server loads."""

    async def compare_checksums(self, expected: str, timeout_s: float) -> None:
        """Compare the server's checksums with `expected`, a JSON object by tensor; raise ServerError if one differs."""

    async def note_weights(self, timeout_s: float) -> None:
        """Store the checksums of the server's weights on the server."""

    async def compare_noted(self, timeout_s: float) -> None:
        """Raise ServerError, which names the tensors, if the weights have changed since `note_weights`."""

    async def command(self, name: str, text: str, timeout_s: float, version: int | None = None) -> None:
        """Let all ranks carry out a command; the last one of an update names the `version`."""

    # Scores

    async def classify(self, tokens: Sequence[int], timeout_s: float) -> float:
        """Return the one logit of a sequence classifier for these tokens."""

    async def token_logprobs(
        self, tokens: Ints, timeout_s: float, *, start: int = 0, cache: str | None = None
    ) -> Floats:
        """Return the log-prob of each token after those before it, `[tokens]`; 0 up to token `start`.

        Tokens up to `start` may come from the server's prefix cache; with `cache`, only from other requests of this
        name.
        """

    async def top_ids(
        self, tokens: Ints, k: int, timeout_s: float, *, start: int = 0, cache: str | None = None
    ) -> tuple[Floats, Ints, Floats]:
        """Return the log-probs of `token_logprobs`, and ids and log-probs of the `k` likeliest tokens in each place.

        They are 0 up to `start`.
        """

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

    async def parse_tools(
        self, text: str, tools: Sequence[Mapping[str, Any]], parser: str, timeout_s: float
    ) -> tuple[str, list[tuple[str, str]]]:
        """Parse tool calls with a model family's parser; return the remaining text, and name and arguments per call."""
