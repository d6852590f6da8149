"""A language model as judge: `reward.judge`."""

from typing import Annotated, Literal

from pydantic import Field

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
