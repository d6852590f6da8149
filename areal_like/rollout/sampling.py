"""How a response is sampled."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from areal_like.columns import Form


@dataclass(frozen=True)
class Sampling:
    """Sampling settings. Temperature 0 is greedy, `top_k` -1 has no limit.

    A response ends with a token of `stop_token_ids` or, unless `ignore_eos`, the model's end token. `columns` are
    the forms of the columns that servers return for capabilities. `adapter` is the name of one of several that the
    servers have. The tokens of evaluations are not `trained`.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    columns: Mapping[str, Form] = field(default_factory=dict)
    top_k: int = -1
    min_p: float = 0.0
    adapter: str | None = None
    trained: bool = True

    @property
    def is_cut(self) -> bool:
        """Whether trained tokens are drawn from some of the vocabulary: servers then return the ids for each."""
        return self.trained and self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)
