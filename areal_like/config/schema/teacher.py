"""Distillation: `teacher`."""

from typing import Annotated, Literal

from pydantic import Field

from areal_like.config.added import takes_keys
from areal_like.config.ignored import Ignored
from areal_like.config.section import PATH, Section

_ELSEWHERE = Ignored("`teacher.path` is null", lambda at: at.section.path is None)
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
    backend: Annotated[str | None, _ELSEWHERE] = None
    """Layout of its servers, such as `sglang:d2`; null: `teacher` in `allocation_mode`."""
    dtype: Annotated[Literal["float32", "bfloat16"] | None, _ELSEWHERE] = None
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
