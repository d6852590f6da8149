"""Scoring: `reward` with its models, and `teacher`."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from areal_like.core.config.added import takes_keys
from areal_like.core.config.ignored import Ignored
from areal_like.core.config.section import PATH, TEMPERATURE, Section

_FIELD = Ignored("`score_field` is set", lambda at: at.section.score_field is not None, reads="score_field")
_ELSEWHERE = Ignored("`url` is set", lambda at: at.section.url is not None, reads="url")
_SERVED = Ignored("`url` is null", lambda at: at.section.url is None, reads="url")

_PROMPT = """\
Rate how well the response solves the problem, from 0 (useless or wrong) to 10 (complete and correct).

Problem:
{question}

Reference answer:
{answer}

Response:
{response}

Explain briefly, and end with a line `Score: NUMBER`."""


class ChatJudgeConfig(Section):
    """A language model behind OpenAI's chat completions, whose answer contains a score."""

    path: Annotated[str | None, PATH] = None
    """Model with a chat template, on SGLang servers of the run: a directory or a name on the hub; null: the one at
    `url`."""
    backend: Annotated[str | None, _ELSEWHERE] = None
    """Layout of its servers, such as `sglang:d2`; null: `judge` in `allocation_mode`."""
    dtype: Annotated[Literal["float32", "bfloat16"] | None, _ELSEWHERE] = None
    """Data type of weights and activations; null: the actor's."""
    url: str | None = Field(None, pattern=r"^https?://[^/]+(/.*)?$")
    """Base URL of a running server's API instead, such as `https://api.openai.com/v1` or `http://judge:30000/v1`."""
    model: Annotated[str | None, _SERVED] = Field(None, min_length=1)
    """Name of the model in requests to `url`."""
    token_variable: Annotated[str | None, _SERVED] = Field(None, pattern=r"^\w+$")
    """Environment variable with the access token; null: none."""
    prompt: str | None = None
    """Message to the judge. `{question}`, `{answer}` and `{response}` stand for the prompt, the reference answer and
    the response; `{response}` is required. null: asks for a score from 0 to 10 beside the reference answer."""
    score_pattern: Annotated[str, _FIELD] = r"(?i)score:\s*\**\s*(-?\d+(?:\.\d+)?)"
    """Regular expression with one group, the score; the last match in the answer counts."""
    score_field: str | None = None
    """Field with the score in an answer that is a JSON object, such as `score`; dots reach nested fields. null:
    `score_pattern`."""
    score_min: float = 0.0
    """Score with reward 0; a lower one is unreadable."""
    score_max: float = 10.0
    """Score with reward 1; a higher one is unreadable."""
    temperature: Annotated[float | None, TEMPERATURE] = Field(0.0, ge=0)
    """Softmax temperature of the judge; null: the server's default."""
    max_tokens: int | None = Field(1024, ge=1)
    """Maximum length of an answer in tokens; null: the server's default."""
    requests: int = Field(64, ge=1)
    """Maximum requests at a time."""
    retries: int = Field(4, ge=0)
    """Repetitions of a request after a connection error, a timeout or status 408, 409, 429 or 5xx, with growing
    pauses."""
    timeout_s: float = Field(120.0, gt=0)
    """Maximum seconds to score one response, repetitions included; a slower one has no reward."""
    cache_size: int = Field(10_000, ge=0)
    """Scores to keep; an equal prompt has the same score without a request. 0: none."""

    @property
    def template(self) -> str:
        """Message to the judge, with its fields."""
        return _PROMPT if self.prompt is None else self.prompt


_ONLY_MODELS = Ignored(
    "only models score; `reward.model.timeout_s` and `reward.judge.timeout_s` apply",
    lambda at: all(part.function is None and part.type in ("model", "judge") for part in at.section.judges.values()),
)
_PARTS = Ignored("`reward.parts` is set", lambda at: bool(getattr(at.section, "parts", None)), reads="parts")
_FUNCTION = Ignored("`function` is set", lambda at: at.section.function is not None)
_NO_FUNCTION = Ignored("only a `function` receives special tokens", lambda at: at.section.function is None)


class JudgeConfig(Section):
    """Judge of a response: your own function, a shipped verifier, the reward model, or a language model."""

    type: Annotated[Literal["gsm8k", "model", "judge"], _PARTS, _FUNCTION] = "gsm8k"
    """`gsm8k`: 1 if the final answer equals the reference, else 0. `model`: the score of `reward.model`. `judge`: the
    score in the answer of `reward.judge`."""
    function: Annotated[str | None, _PARTS] = None
    """Your own function, `my_rewards.py:score` or `package.module:score`, with parameters (response, row)."""
    special_tokens: Annotated[bool, _PARTS, _NO_FUNCTION] = False
    """The function receives responses with their special tokens, such as `<|channel|>`."""


class RewardPartConfig(JudgeConfig):
    """One of several rewards."""

    weight: float = 1.0
    """Weight of this part in the sum."""


class RewardModelConfig(Section):
    """A reward model: a Hugging Face sequence classifier with one label, on SGLang servers of its own."""

    path: Annotated[str, PATH]
    """Classifier: a directory or a name on the hub."""
    backend: str | None = None
    """Layout of its servers, such as `sglang:d2`; null: `reward` in `allocation_mode`."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Data type of weights and activations; null: the actor's."""
    timeout_s: float = Field(300.0, gt=0)
    """Maximum seconds to score one response; a slower one has no reward."""


@takes_keys("reward")
class RewardConfig(JudgeConfig):
    """Scoring of responses."""

    parts: dict[str, RewardPartConfig] = Field({})
    """Several rewards by name, instead of `type` and `function`: each has one of these and a `weight`; the reward is
    the weighted sum."""
    model: RewardModelConfig | None = None
    """Model for `type: model`."""
    judge: ChatJudgeConfig | None = None
    """Language model for `type: judge`."""
    timeout_s: Annotated[float, _ONLY_MODELS] = Field(10.0, gt=0)
    """Maximum seconds to score one response; a slower one has no reward."""
    workers: Annotated[int | None, _ONLY_MODELS] = Field(None, ge=1, le=256)
    """Reward worker processes; null: one per core."""
    memory_mb: Annotated[int | None, _ONLY_MODELS] = Field(8192, ge=64)
    """Maximum memory of a reward worker and its children in MiB; a response that needs more has no reward. null: no
    limit."""
    max_missing_batches: int = Field(3, ge=0)
    """Maximum consecutive batches that are skipped because no response has a reward; the next one ends the run."""

    @property
    def judges(self) -> Mapping[str, JudgeConfig]:
        """Judges of the responses, by the key of their section."""
        parts = {f"reward.parts.{name}": part for name, part in self.parts.items()}
        return parts or {"reward": self}


_NO_PATH = Ignored("`teacher.path` is null", lambda at: at.section.path is None)
_OWN_SERVERS = Ignored("`teacher.url` is null", lambda at: at.section.url is None)
_NOT_OPENAI = Ignored("`teacher.api` is `sglang`", lambda at: at.section.api == "sglang")


@takes_keys("teacher")
class TeacherConfig(Section):
    """A model that returns the log-prob of each token that the policy sampled."""

    path: Annotated[str | None, PATH] = None
    """Model with the policy's tokenizer: a directory or a name on the hub; null: the one at `url`."""
    from_policy: bool = False
    """Self-distillation: the teacher is the policy with its current weights, on the policy's own servers, and reads
    `hint_field` beside the prompt."""
    backend: Annotated[str | None, _NO_PATH] = None
    """Layout of its servers, such as `sglang:d2`; null: `teacher` in `allocation_mode`."""
    dtype: Annotated[Literal["float32", "bfloat16"] | None, _NO_PATH] = None
    """Data type of weights and activations; null: the actor's."""
    url: str | None = Field(None, pattern=r"^https?://[^/]+(/.*)?$")
    """Running server to use instead, such as `http://teacher:30000`; it scores at temperature 1."""
    api: Annotated[Literal["sglang", "openai"], _OWN_SERVERS] = "sglang"
    """Interface at `url`: SGLang's own, or OpenAI's completions of token ids, which are echoed with log-probs, as vLLM
    serves them."""
    model: Annotated[str | None, _OWN_SERVERS, _NOT_OPENAI] = None
    """Name of the model in requests of `api: openai`."""
    token_variable: Annotated[str | None, _OWN_SERVERS] = Field(None, pattern=r"^\w+$")
    """Environment variable with the access token for `url`; null: none."""
    top_k: int | None = Field(None, ge=1, le=1024)
    """Likeliest ids of the teacher at each place that the policy learns, by the forward KL divergence; null: the
    log-prob of the sampled token alone, as an advantage."""
    hint_field: str | None = None
    """Column with text that only the teacher reads: a paragraph at the end of its last user message, such as a
    reference solution."""
    requests: int = Field(64, ge=1)
    """Maximum requests at a time."""
    timeout_s: float = Field(300.0, gt=0)
    """Maximum seconds to score one response; a slower one is not trained."""

    @property
    def is_served(self) -> bool:
        """Whether the run starts servers for the teacher."""
        return self.url is None and not self.from_policy
