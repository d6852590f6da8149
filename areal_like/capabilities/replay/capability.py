"""Recording of training steps, and their replay without servers."""

from areal_like.capabilities.replay.disk_cost import check_disk
from areal_like.capabilities.replay.recorder import make_recorder
from areal_like.capability import Capability

CAPABILITY = Capability(checks=(check_disk,), hook=make_recorder)
