"""A token for all paths: SGLang 0.5.17 requires none at its WebSocket, at /health… and at /metrics….

`srt/utils/auth.py` decides by the start of a path, and leaves WebSockets out. Only /health stays open, and generates
nothing.
"""

import os
from collections.abc import Sequence
from typing import Any

from areal_like.rollout.sglang import TOKEN_VARIABLE
from areal_like.rollout.sglang.patch import Launch, Patch


def require_token(_: Launch) -> Sequence[str]:
    """Return the argument for the token in the environment, and require it on every path except /health."""
    token = os.environ.pop(TOKEN_VARIABLE, None)
    if token is None:
        return ()
    close_to_strangers()
    return ("--api-key", token)


def close_to_strangers() -> None:
    """Require the token on every path except /health, which then generates nothing."""
    from sglang.srt.entrypoints.http_server import app
    from sglang.srt.utils import auth
    from starlette.routing import WebSocketRoute

    os.environ["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "0"
    app.router.routes[:] = [route for route in app.router.routes if not isinstance(route, WebSocketRoute)]
    decide = auth.decide_request_auth

    def decide_by_whole_path(*, path: str, **request: Any) -> auth.AuthDecision:
        return decide(path=path if path == "/health" else "", **request)

    auth.decide_request_auth = decide_by_whole_path


PATCH = Patch(prepare=require_token)
