"""Keys of workflows and their episodes: `workflow`, also of an evaluation set, `episode` and `rollout.branch`."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from areal_like.core.config.added import takes_keys
from areal_like.core.config.ignored import Ignored, ignored_if
from areal_like.core.config.section import PATH, Section

SINGLE_TURN = "single_turn"  # the built-in workflow

_NO_WORKFLOW = Ignored("no workflow of your own is set (`workflow`)", lambda at: not at.run.workflows)
_NO_ENDPOINT = ignored_if("episode.endpoint", False)
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


class BranchKeys(Section):
    """Tree search."""

    branch: BranchConfig | None = None
    """Tree search: samples of a group share their first tokens or turns and branch later
    ([branches](workflows.md#branches)); null: samples share their prompt only."""


class SetWorkflow(Section):
    """The workflow of an evaluation set."""

    workflow: str | None = None
    """Workflow for this set, named as in `workflow`; `single_turn`: the built-in one; null: the run's."""

    @property
    def played_by(self) -> str | None:
        return None if self.workflow == SINGLE_TURN else self.workflow


class WorkflowKeys(Section):
    """The workflow of a run, and the limits of its episodes."""

    workflow: str | None = None
    """Your own workflow, `my_workflow.py:run` or `package.module:run`, with parameters (row, client) or (prompt, n,
    rollout); null: one prompt, n samples, one reward each."""
    episode: Annotated[EpisodeConfig, _NO_WORKFLOW] = EpisodeConfig()
    """Limits of an episode of `workflow`."""

    @property
    def played_by(self) -> str | None:
        return None if self.workflow == SINGLE_TURN else self.workflow

    @property
    def set_defaults(self) -> dict[str, Any]:
        return {"workflow": self.workflow or SINGLE_TURN}

    @property
    def workflows(self) -> dict[str, str]:
        run: Any = self  # with the keys of the core
        sets = {"valid_dataset": run.valid_dataset} if run.valid_dataset else {}
        sets |= {f"evaluator.datasets.{name}": data for name, data in run.evaluator.datasets.items()}
        named = {"workflow": self.played_by} | {f"{key}.workflow": data.played_by for key, data in sets.items()}
        return {key: reference for key, reference in named.items() if reference is not None}

    @property
    def longest_episode(self) -> int | None:
        return self.episode.max_tokens if self.workflows else None


KEYS = {"": WorkflowKeys, "rollout": BranchKeys, "valid_dataset": SetWorkflow}
