"""Router replay (R3): the trainer's routers choose the experts that the servers chose."""

from areal_like.capabilities.router_replay.decision import EXCLUDES, describe, find_served
from areal_like.capabilities.router_replay.statistics import make_hook
from areal_like.capability import Capability

CAPABILITY = Capability(excludes=EXCLUDES, served=find_served, describe=describe, hook=make_hook)
