"""The response of a server to one prompt."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from areal_like.per_token import KeptIds, Routes
from areal_like.types import FinishReason, Floats, Ints


@dataclass(eq=False)
class Response:
    """Response to one prompt; arrays are `[generated tokens]`.

    The last row of `routes` belongs to the last token but one, which made the last; the first row to the first prompt
    token with an unknown row. `kept` has a list for each generated token. `temperature` is 0 where it is the run's.
    """

    tokens: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    logprobs: Floats = field(default_factory=lambda: np.zeros(0, np.float32))
    versions: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    finish_reason: FinishReason | None = None
    routes: Routes | None = None
    kept: KeptIds | None = None
    temperature: float = 0.0

    def cut(self, tokens: int) -> Response:
        """Return the first tokens alone, without an end."""
        size = min(tokens, len(self.tokens))
        routes = None if self.routes is None else self.routes[: max(0, len(self.routes) - (len(self.tokens) - size))]
        kept = None if self.kept is None else self.kept.cut(0, size)
        columns = (self.tokens[:size], self.logprobs[:size], self.versions[:size])
        return Response(*columns, routes=routes, kept=kept, temperature=self.temperature)
