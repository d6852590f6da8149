"""A route that ends the wait for a broadcast whose sender is lost: SGLang 0.5.17 waits until the group's time limit."""

from areal_like.backends.sglang import GIVE_UP
from areal_like.backends.sglang.patch import Launch, Patch
from areal_like.backends.transports.collective.giving_up import mark


def add_route(_: Launch) -> None:
    """Add the route of `Server.give_up_group`."""
    from fastapi import Body
    from sglang.srt.entrypoints.http_server import app

    @app.post(GIVE_UP)
    async def give_up(group_name: str = Body(embed=True)) -> dict[str, object]:
        try:
            mark(group_name)
        except (OSError, ValueError) as error:
            return {"success": False, "message": str(error)}
        return {"success": True, "message": "given up"}


PATCH = Patch(serve=add_route)
