"""Router replay (R3): the trainer's routers choose the experts that the servers chose."""

from areal_like.capabilities.router_replay.decision import check, describe, find_served, server_options
from areal_like.capabilities.router_replay.statistics import make_hook
from areal_like.capability import Capability

CAPABILITY = Capability(
    checks=[check], served=find_served, server_options=server_options, describe=describe, hook=make_hook
)
