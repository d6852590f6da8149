"""Generation: `gconfig`, `episode`, `rollout`, `sglang` and `weight_update`."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeInt

from areal_like.config.ignored import Ignored, ignored_if
from areal_like.config.schema.added import takes_keys
from areal_like.config.schema.mcp import McpServerConfig
from areal_like.config.schema.sandbox import SandboxConfig
from areal_like.config.section import LEAST_TEMPERATURE, PATH, Section

SINGLE_TURN = "single_turn"  # the built-in workflow
SERVER_RESERVE = 8  # positions of its context that SGLang does not give to a request (it needs 2 to 6)

_NO_ENDPOINT = ignored_if("episode.endpoint", False)
_TIME_SHARED = Ignored(
    "`rollout.sharing` is `alternate`: a server cannot restart in the trainer's time slice",
    lambda at: at.section.alternates,
)
_TOO_FEW_SERVERS = Ignored(
    "too few servers are left when one fails (`rollout.min_servers`, `rollout.backend`)",
    lambda at: at.plan is not None and len(at.plan.engine("rollout").servers) <= at.section.min_servers,
)
_SYNCHRONOUS = Ignored(
    "`rollout.max_head_offpolicyness` is 0: no request runs during a weight update",
    lambda at: at.run.rollout.max_head_offpolicyness == 0,
)
_PREFETCHED = Ignored(
    "`weight_update.mode` is `ipc` and `prefetch_mb` is larger",
    lambda at: at.section.mode == "ipc" and at.section.bucket_mb <= at.section.prefetch_mb,
)
_NO_FILES = Ignored("`weight_update.mode` is not `disk`", lambda at: at.section.mode != "disk")
OWN_FILES = "auto"  # instead of a URL
_OWN_FILES = Ignored(
    "`weight_update.url` is null or `auto`, which has the run's token", lambda at: at.section.url in (None, OWN_FILES)
)
_CPU_CACHE = Ignored(
    "`device` is `cpu`, where the KV cache is sized by the requests in flight", lambda at: at.device == "cpu"
)
MOST_KEPT = 1024  # ids that a token may be sampled from, where not all: servers return them as JSON


@takes_keys("gconfig")
class GenerationConfig(Section):
    """Sampling of responses during training."""

    n_samples: int = Field(8, ge=1)
    """Responses per prompt; they form the group over which advantages are normalised."""
    max_new_tokens: int = Field(512, ge=1)
    """Maximum response length in tokens."""
    temperature: float = Field(1.0, ge=LEAST_TEMPERATURE)
    """Softmax temperature; the trainer scales its log-probs the same way."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus: share of the probability mass that is sampled from. The trainer computes log-probs over the same ids
    ([sampling masks](concepts.md#sampling-masks)). A value below 1 requires `gconfig.top_k`."""
    top_k: int = Field(
        -1,
        ge=-1,
        description=(
            f"Number of the likeliest ids that are sampled from, 2 to {MOST_KEPT}; -1 or 0: no limit. The trainer computes "
            "log-probs over the same ids."
        ),
    )
    min_p: float = Field(0.0, ge=0, lt=1)
    """Least probability of an id, as a share of the likeliest id's, to be sampled from. The trainer computes log-probs
    over the same ids. A value above 0 requires `gconfig.top_k`."""

    stop_token_ids: list[NonNegativeInt] = Field([])
    """Ids that end a response, in addition to the model's end tokens."""

    @property
    def is_cut(self) -> bool:
        """Whether tokens are sampled from some ids of the vocabulary only."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


_ANSWERED = ("messages", "input", "system", "instructions", "previous_response_id", "tools", "model", "stream")


def _ignorable(name: str) -> str:
    if not name or name in _ANSWERED:
        raise ValueError(f"a field that a request can do without, so none of {', '.join(_ANSWERED)}")
    return name


@takes_keys("episode")
class EpisodeConfig(Section):
    """Limits of an episode of `workflow`."""

    max_turns: int = Field(16, ge=1)
    """Maximum completions of one episode; later requests are refused."""
    max_tokens: int | None = Field(None, ge=1)
    """Maximum trajectory length of an episode in tokens, prompts and tool output included; null: max_prompt_length +
    gconfig.max_new_tokens. Each turn is limited by `gconfig.max_new_tokens`."""
    timeout_s: float = Field(600.0, gt=0)
    """Maximum seconds of one episode; a longer one fails."""
    on_timeout: Literal["leave_out", "grade"] = "leave_out"
    """An episode that exceeds `timeout_s`, `max_turns` or `max_tokens`: `leave_out` its samples from training, or
    `grade` its last answer by the section `reward`."""
    history: Literal["as_generated", "as_deployed"] = "as_generated"
    """Earlier answers in the prompt of a turn. `as_generated`: their tokens as the model generated them. `as_deployed`:
    what the chat template makes of the conversation, such as without thinking; a turn whose prompt differs from the
    generated tokens starts a trajectory."""
    max_failed_share: float = Field(0.5, ge=0, le=1)
    """Share of the latest batch of episodes that may fail for any reason; a larger share ends the run."""
    workers: int = Field(2, ge=1)
    """Worker processes for the user's workflows; a run without such a workflow starts none."""
    loops: int = Field(2, ge=1, le=32)
    """Event loops per worker process; each runs a share of its episodes."""
    blocked_s: float = Field(30.0, gt=0)
    """Maximum seconds that an episode's code may block its event loop, at most `episode.timeout_s`. After that the
    worker process is replaced, the episode fails, and the other episodes of that process start again."""
    memory_mb: int | None = Field(None, ge=256)
    """Maximum memory of a worker process, and of each program that its episodes start, in MB. A larger worker process
    is replaced, a larger program is killed; an allocation far beyond it (1 GiB) fails with MemoryError. null:
    unlimited."""
    endpoint: bool = False
    """Serve an episode's requests on a port too, for agents in processes of their own, which use `client.base_url` and
    `client.api_key`."""
    endpoint_host: Annotated[str | None, _NO_ENDPOINT] = Field(None, min_length=1)
    """Address at which agents reach the endpoint, such as that of a container bridge; `auto`: the one by which other
    hosts reach this one; null: loopback."""
    endpoint_certificate: Annotated[str | None, PATH, _NO_ENDPOINT] = None
    """Certificate chain of the endpoint (PEM) for TLS; null: plain HTTP."""
    endpoint_key: Annotated[str | None, PATH, _NO_ENDPOINT] = None
    """Private key of `endpoint_certificate` (PEM)."""
    endpoint_max_mb: Annotated[int, _NO_ENDPOINT] = Field(32, ge=1, le=1024)
    """Maximum size of a request in MB; a larger one gets status 413."""
    endpoint_max_connections: Annotated[int, _NO_ENDPOINT] = Field(4096, ge=1)
    """Maximum open connections of the endpoint; a request on another one gets status 503."""
    endpoint_rate: Annotated[float | None, _NO_ENDPOINT] = Field(None, gt=0)
    """Maximum requests per second of one episode at the endpoint, averaged over 10 s; more get status 429. null:
    unlimited."""
    models: list[Annotated[str, Field(min_length=1)]] = Field(["policy", "default"], min_length=1)
    """Names that requests may give the model, where `*` stands for any text; another name gets status 404. A request
    without a name is accepted."""
    ignored_fields: list[Annotated[str, AfterValidator(_ignorable)]] = Field([])
    """Fields of requests to ignore instead of rejecting them, such as `thinking`; `a.b` is the field `b` of the object
    `a`. Fields that do not change the answer are always ignored ([both
    lists](workflows.md#supported-request-fields))."""
    tool_call_parser: str | None = None
    """SGLang's name of the model family's tool-call format, such as `qwen25`; null: requests with tools are refused."""
    sandbox: SandboxConfig | None = None
    """Sandboxes for workflows with a parameter `sandbox`; null: none."""
    mcp_servers: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9-]{1,32}$")], McpServerConfig] = Field({})
    """MCP servers by name, each with `command`, `args` and `env`, or `url`, and `timeout_s` (60). A workflow with a
    parameter `tools` is given their tools ([MCP servers](workflows.md#mcp-servers))."""


class BranchConfig(Section):
    """Where the samples of a group leave each other."""

    after: list[Annotated[int, Field(ge=1)]] = Field(min_length=1)
    """Branching points, in ascending order: tokens of a response, or turns of an episode if `workflow` is set."""
    width: int = Field(2, ge=2)
    """Continuations of each sample at a branching point."""

    @property
    def per_root(self) -> int:
        """Number of samples that begin as one."""
        return int(self.width ** len(self.after))


@takes_keys("rollout")
class RolloutConfig(Section):
    """Responses in flight, staleness, and limits of the servers."""

    backend: str | None = None
    """Layout of the servers, such as `sglang:d4t4`: 4 servers of 4 GPUs each."""
    max_head_offpolicyness: int = Field(0, ge=0)
    """Staleness bound η in weight versions, which no trajectory exceeds; 0 is synchronous."""
    sharing: Literal["resident", "alternate"] = "resident"
    """How servers and trainer share GPUs, if the layout puts them on the same ones. `resident`: colocated, both stay on
    the GPUs; `alternate`: time-shared, each has the memory during its time slice (`weight_update.requests` decides
    about running requests)."""
    max_concurrent_rollouts: int | None = Field(None, ge=1)
    """Maximum samples in flight; null: as many as the staleness bound admits."""
    oversampling: float = Field(0.0, ge=0, le=4)
    """Groups beyond what the staleness bound needs, as a share of `train_dataset.batch_size`. A step takes the groups
    that finish first and cancels as many unfinished ones. This avoids waiting for the longest responses but biases
    training towards short ones: prompts with long responses are trained less often. 0: every started prompt is
    trained."""
    prefill_once: bool = True
    """Send the other samples of a group when the first has started, so that they share its prompt; false: send all at
    once, as with prompts of fewer than 64 tokens."""
    branch: BranchConfig | None = None
    """Tree search: samples of a group share their first tokens or turns and branch later
    ([branches](workflows.md#branches)); null: samples share their prompt only."""
    request_timeout_s: float = Field(600.0, gt=0)
    """Maximum seconds without progress of a server that has requests."""
    startup_timeout_s: float = Field(600.0, gt=0)
    """Maximum seconds until every server is ready."""
    max_restarts: Annotated[int, _TIME_SHARED, _TOO_FEW_SERVERS] = Field(3, ge=0)
    """Maximum restarts of each server per hour, after it died, hung or was lost with its node; the next restart waits
    until the hour is over. 0: never."""
    min_servers: int = Field(1, ge=1)
    """The run continues without a failed server while this many others are left, and ends otherwise."""
    router_replay: Literal["auto", "on", "off"] = "auto"
    """Replay of expert routes (R3): the servers return the experts of every token, and the trainer's routers choose
    them again. `auto`: on for models with experts, where the trainer can replay."""
    max_logprob_diff: float | None = Field(None, gt=0)
    """Maximum mean difference between log-probs of trainer and servers for the same responses and weights. A larger one
    ends the run before its first step. null: 0.001 in float32, 0.02 in
    float16, 0.1 in bfloat16, more for servers of another data type."""

    @property
    def alternates(self) -> bool:
        """Whether trainer and servers share GPUs in time slices."""
        return self.sharing == "alternate"


@takes_keys("sglang")
class SGLangConfig(Section):
    """Settings of each SGLang server; device, data type and tensor parallel size come from the run."""

    mem_fraction_static: Annotated[float, _CPU_CACHE] = Field(0.8, gt=0, lt=1)
    """Share of a GPU's memory for weights and KV cache."""
    context_length: int | None = Field(None, ge=1)
    """Context length of a server in tokens; null: as long as the run needs."""
    attention_backend: str | None = None
    """SGLang attention backend, such as `triton`; null: SGLang's default (torch_native on CPU)."""
    max_running_requests: int | None = Field(None, ge=1)
    """Maximum requests that a server decodes at once; null: SGLang's default."""
    deterministic: bool = False
    """Samples depend on `seed` and weights only, not on the rest of their batch; slower, GPUs only."""
    port: int | None = Field(None, ge=1024, le=65535)
    """Port of the first server; the others use the next ones. null: free ports."""
    extra_args: dict[str, bool | int | float | str] = Field({})
    """More `sglang.launch_server` options by name, such as `schedule_policy: lpm`; options that conflict with weight
    updates are refused."""


@takes_keys("weight_update")
class WeightUpdateConfig(Section):
    """Weight updates: how new weights reach the servers."""

    mode: Literal["disk", "collective", "ipc"] = "collective"
    """Weight transport. `disk`: a checkpoint that servers read; `collective`: broadcast (NCCL; gloo on CPU and where
    the trainer's first rank shares its GPU with a server); `ipc`: servers read the memory of the trainer rank on the
    same GPU."""
    requests: Annotated[Literal["in_place", "recompute", "drain"], _SYNCHRONOUS] = "in_place"
    """What happens to running requests. `in_place`: they continue with the new weights on their KV cache; `recompute`:
    their KV cache is recomputed with the new weights; `drain`: the update waits for them."""
    timeout_s: float = Field(300.0, gt=0)
    """Longest time until every server has acknowledged, in seconds. The limit restarts if a server is lost. With
    `drain` it starts after the last response ends; until then it limits the time without a new token."""
    bucket_mb: Annotated[int, ignored_if("weight_update.mode", "disk"), _PREFETCHED] = Field(512, ge=1)
    """Size of one transfer in MiB; with `ipc` the larger of this and `prefetch_mb`."""
    prefetch_mb: Annotated[int, ignored_if("weight_update.mode", "disk")] = Field(4096, ge=0)
    """Maximum MiB of weights that the trainer gathers on its GPU before the servers pause; at least one bucket. The
    rest is gathered during the pause, bucket by bucket, or with `ipc` this much at a time."""
    full_every: Annotated[int, _NO_FILES] = Field(1, ge=1)
    """Versions from one full copy to the next with `disk`. The versions between are lossless deltas: compressed changes
    of each tensor. 1: full copies only ([deltas](weight_updates.md#deltas))."""
    url: Annotated[str | None, _NO_FILES] = Field(None, pattern=rf"^({OWN_FILES}|https?://[^/]+(/.*)?)$")
    """Have servers download the files of `disk` instead of reading them below `cluster.fileroot`. `auto`: from the
    run's controller, with the run's token; a URL: from a web server or object store that serves `cluster.fileroot`
    there ([servers far away](weight_updates.md#servers-far-away))."""
    token_variable: Annotated[str | None, _OWN_FILES] = Field(None, pattern=r"^\w+$")
    """Environment variable with the bearer token for `url`; null: none."""
    checksum: bool = False
    """Compare a checksum of every tensor on each server with the trainer's before the server resumes."""

    adapters: bool = False
    """With `actor.use_lora` and `mode: disk`, send the adapter alone: the servers keep the weights of `actor.path` and
    add the adapter to them ([adapters](lora.md#adapters-on-the-servers))."""

    @property
    def transport(self) -> str:
        """Name of the weight transport: `mode`, or `adapters` or `deltas` where `disk` has any.

        Servers also download full copies alone by `deltas`.
        """
        if self.adapters:
            return "adapters"
        return "deltas" if self.mode == "disk" and (self.full_every > 1 or self.url) else self.mode
