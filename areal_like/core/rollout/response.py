"""The response of a server to one prompt."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from areal_like.core.columns import Columns
from areal_like.core.types import FinishReason, Floats, Ints


@dataclass(eq=False)
class Response:
    """Response to one prompt; arrays and `columns` are `[generated tokens]`.

    `inputs` are columns of tokens as inputs. Their rows begin with the first token whose row was unknown, in the
    prompt, and end with the last token but one, which made the last.
    """

    tokens: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    logprobs: Floats = field(default_factory=lambda: np.zeros(0, np.float32))
    versions: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    finish_reason: FinishReason | None = None
    columns: Columns = field(default_factory=dict)
    inputs: Columns = field(default_factory=dict)

    def cut(self, tokens: int) -> Response:
        """Return the first tokens alone, without an end."""
        size = min(tokens, len(self.tokens))
        removed = len(self.tokens) - size
        columns = {name: values[:size] for name, values in self.columns.items()}
        inputs = {name: rows[: max(0, len(rows) - removed)] for name, rows in self.inputs.items()}
        return Response(self.tokens[:size], self.logprobs[:size], self.versions[:size], None, columns, inputs)
