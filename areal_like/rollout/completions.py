"""A server with OpenAI's completions, such as vLLM or SGLang, that another one than the run has started."""

import numpy as np

from areal_like.rollout.http import Connection
from areal_like.types import Floats, Ints


class EchoedCompletions:
    """Log-probs of tokens by completions whose prompt is echoed, at temperature 1."""

    PATH = "/v1/completions"

    def __init__(self, connection: Connection, model: str) -> None:
        self._connection, self._model = connection, model

    async def __call__(self, tokens: Ints, timeout_s: float) -> Floats:
        """Return the log-prob of each token after those before it, `[tokens]`; 0 for the first one."""
        body = {"model": self._model, "prompt": tokens, "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 1}
        answer = await self._connection.post(self.PATH, body, timeout_s)
        with self._connection.reading(self.PATH):
            (choice,) = answer["choices"]
            scored = choice["logprobs"]["token_logprobs"][: len(tokens)]
            if len(scored) != len(tokens):
                raise ValueError(f"{len(scored)} log-probs for {len(tokens)} tokens: the server does not echo")
            return np.array([0.0, *map(float, scored[1:])], np.float32)
