"""Errors of servers whose answers lack further values for the trainer.

A repetition would not help: the server computes the same again.
"""

from areal_like.errors import ServerError

ROUTES, KEPT = "routed_experts", "output_token_sampling"  # how the fields of an answer begin


def refuse_routes(server: str, problem: str) -> ServerError:
    """Return the error of a server whose answer has no usable experts."""
    return ServerError(
        f"{server} does not return the experts of each token, which rollout.router_replay needs: {problem}. Set "
        "rollout.router_replay=off",
        "unusable",
        [server],
    )


def refuse_kept(server: str, problem: str) -> ServerError:
    """Return the error of a server whose answer has no usable ids that tokens were sampled from."""
    return ServerError(
        f"{server} {problem}. The trainer needs the ids that each token was sampled from, for gconfig.top_p, "
        "gconfig.top_k and gconfig.min_p. Set gconfig.top_p=1, gconfig.top_k=-1 and gconfig.min_p=0, and top_p and top_k "
        "in no request",
        "unusable",
        [server],
    )
