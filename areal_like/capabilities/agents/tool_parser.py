"""The parser of a model family's tool calls."""

from collections.abc import Sequence
from typing import Any

from areal_like.capabilities.agents.conversation import parsed_arguments
from areal_like.capabilities.agents.session import ParseTools, Refused
from areal_like.core.errors import ServerError
from areal_like.core.rollout.http import Unavailable
from areal_like.core.rollout.pool import ServerPool

PARSING_TIMEOUT_S = 60.0
MOST_PARSERS = 2  # servers tried for parsing a text


def parser_of(pool: ServerPool, name: str) -> ParseTools:
    """Return SGLang's parser of a model family's tool calls; it runs in a server, because it imports torch."""

    async def parse(text: str, tools: Sequence[dict[str, Any]]) -> tuple[str, list[tuple[str, Any]]]:
        for server in pool.servers[:MOST_PARSERS]:
            try:
                remaining, found = await server.parse_tools(text, tools, name, PARSING_TIMEOUT_S)
            except Unavailable:  # the server is down, or its parser fails on this text
                continue
            except ServerError as error:
                raise Refused(f"tools: the server cannot parse tool calls: {error}", "tools") from error
            return remaining, [(called, parsed_arguments(parameters)) for called, parameters in found]
        return text, []

    return parse
