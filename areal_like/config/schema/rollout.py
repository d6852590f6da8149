"""Generation: `gconfig`, `episode`, `rollout`, `sglang` and `weight_update`."""

from typing import Literal

from pydantic import Field

from areal_like.config.schema.section import LEAST_TEMPERATURE, Section

SINGLE_TURN = "single_turn"  # the built-in workflow
SERVER_RESERVE = 8  # positions of its context that SGLang does not give to a request (it needs 2 to 6)


class GenerationConfig(Section):
    """How responses are sampled during training."""

    n_samples: int = Field(8, ge=1, description="Responses per prompt: the group that advantages are normalised over.")
    max_new_tokens: int = Field(512, ge=1, description="Longest response, in tokens.")
    temperature: float = Field(
        1.0, ge=LEAST_TEMPERATURE, description="Softmax temperature; the trainer scales its log-probs the same way."
    )
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Nucleus: share of the probability mass that is sampled from; only 1, or log-probs would be wrong.",
    )


class EpisodeConfig(Section):
    """The limits of one episode of `workflow`, and how many may fail."""

    max_turns: int = Field(16, ge=1, description="Most completions of one episode; a further one is refused.")
    max_tokens: int | None = Field(
        None,
        ge=1,
        description="Longest trajectory of an episode, in tokens, with prompts and tool output; null: max_prompt_length "
        "+ gconfig.max_new_tokens, the longest of a single turn. `gconfig.max_new_tokens` bounds each turn.",
    )
    timeout_s: float = Field(600.0, gt=0, description="Longest time of one episode, in seconds; then it has failed.")
    max_failed_share: float = Field(
        0.5,
        ge=0,
        le=1,
        description="Share of the latest batch of episodes that may fail, by whatever cause; beyond it the run ends.",
    )
    endpoint: bool = Field(
        False,
        description="Answer an episode's requests on a port of loopback too, for agents in processes of their own: "
        "`client.base_url` and `client.api_key` work there.",
    )
    tool_call_parser: str | None = Field(
        None,
        description="SGLang's name for how the model family writes tool calls, such as `qwen25`; null: requests with tools "
        "are refused.",
    )


class RolloutConfig(Section):
    """How many responses are in flight and how old they may grow."""

    backend: str | None = Field(None, description="Layout of the servers, such as `sglang:d4t4`: 4 servers of 4 GPUs.")
    max_head_offpolicyness: int = Field(
        0, ge=0, description="Staleness bound η in weight versions, kept for every trajectory; 0 is synchronous."
    )
    sharing: Literal["resident", "alternate"] = Field(
        "resident",
        description="How servers share GPUs with the trainer, where the layout has them do so. `resident`: both stay on "
        "them; `alternate`: they take turns, and the other one's memory is free (`weight_update.requests` says what becomes "
        "of requests that run then).",
    )
    max_concurrent_rollouts: int | None = Field(
        None, ge=1, description="Most samples in flight; null: as many as the staleness bound admits."
    )
    oversampling: float = Field(
        0.0,
        ge=0,
        le=4,
        description="Groups that run beyond what the staleness bound needs, as a share of `train_dataset.batch_size`. A step "
        "takes the groups that finish first, and as many that are unfinished are cancelled for others. This saves the wait "
        "for the longest responses and biases what is trained towards short ones: prompts with long responses are trained "
        "less often than the dataset has them. 0: every prompt that was started is trained.",
    )
    prefill_once: bool = Field(
        True,
        description="Send a group's other samples when the first has begun, so that they share its prompt; false: at "
        "once, as for prompts of less than 64 tokens.",
    )
    client_processes: int = Field(
        0,
        ge=0,
        description="Processes that read and decode the servers' answers for the controller, one per 1.5 M tokens per second "
        "or so, on the nodes of the servers; 0: the controller does, which one core does at up to 2 M tokens per second.",
    )
    request_timeout_s: float = Field(
        600.0, gt=0, description="Longest time that a server may do nothing while it has requests, in seconds."
    )
    startup_timeout_s: float = Field(600.0, gt=0, description="Longest wait until every server is ready, in seconds.")
    max_restarts: int = Field(
        3,
        ge=0,
        description="Starts, in the whole run, of servers that died or hung; one death more ends the run. Of a server beyond "
        "the layout (`max_servers`) its own; one death more is the end of that server alone.",
    )
    min_servers: int = Field(
        1, ge=1, description="Servers that have to be left for a run to go on while another one is started again."
    )
    max_servers: int | None = Field(
        None,
        ge=1,
        description="Servers that the run may have: those of the layout, and further ones of their size while it runs, on "
        "whatever GPUs the existing cluster (`scheduler.type: ray`) has free or gets; null: those of the layout.",
    )
    max_logprob_diff: float | None = Field(
        None,
        gt=0,
        description="Largest mean distance between the trainer's and the servers' log-probs of the same responses at "
        "version 0; beyond it the run ends before its first step; null: 0.001 in float32, 0.1 in bfloat16.",
    )

    @property
    def alternates(self) -> bool:
        """Whether trainer and servers take turns on GPUs."""
        return self.sharing == "alternate"


class SGLangConfig(Section):
    """Settings of each SGLang server; device, data type and tensor parallel size come from the run."""

    mem_fraction_static: float = Field(
        0.8, gt=0, lt=1, description="Share of a GPU's memory for weights and KV cache; unused on CPU."
    )
    context_length: int | None = Field(
        None, ge=1, description="Positions of the server's context, in tokens; null: as many as the run needs."
    )
    attention_backend: str | None = Field(
        None, description="SGLang's attention kernels, such as `triton`; null: SGLang's choice (torch_native on CPU)."
    )
    max_running_requests: int | None = Field(
        None, ge=1, description="Most requests a server decodes at once; null: SGLang's choice."
    )
    deterministic: bool = Field(
        False,
        description="Samples depend on `seed` and weights alone, not on what shares their batch; slower, and not on CPU.",
    )
    port: int | None = Field(
        None, ge=1024, le=65535, description="Port of the first server, the next ones follow; null: free ports."
    )
    extra_args: dict[str, bool | int | float | str] = Field(
        {},
        description="Further `sglang.launch_server` options by name, such as `schedule_policy: lpm`; only what works with weight updates.",
    )


class WeightUpdateConfig(Section):
    """How new weights reach the servers."""

    mode: Literal["disk", "collective", "ipc"] = Field(
        "collective",
        description="`disk`: a checkpoint that servers read; `collective`: broadcast (nccl; gloo on CPU, and where the "
        "trainer's first rank shares its GPU with a server); `ipc`: servers read out of the memory of the trainer on the same GPUs.",
    )
    requests: Literal["in_place", "recompute", "drain"] = Field(
        "in_place",
        description="What becomes of running requests. `in_place`: they go on under the new weights with the keys and "
        "values that they have; `recompute`: these are made anew by the new weights; `drain`: the update waits for them.",
    )
    timeout_s: float = Field(
        300.0,
        gt=0,
        description="Longest time until every server has acknowledged, in seconds; anew where a server is lost meanwhile. "
        "With `drain` it begins when the last response has ended, and is the longest time in which none may grow.",
    )
    bucket_mb: int = Field(
        512, ge=1, description="Tensors sent at once, in MiB; with `ipc` it is the larger of this and `ahead_mb`."
    )
    ahead_mb: int = Field(
        4096,
        ge=0,
        description="Most that the trainer gathers before the servers pause, in MiB of its GPU; at least one bucket. What "
        "is left is gathered while requests wait, a bucket at a time or, with `ipc`, as much at a time.",
    )
    checksum: bool = Field(
        False,
        description="Compare a checksum of every tensor that a server was given with the trainer's, before the server goes "
        "on. They are added up as they are gathered, with `disk` once more for that.",
    )
