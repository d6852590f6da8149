"""FP8 rollouts: servers compute linear layers in FP8, from weights that the trainer rounds before it sends them."""

from areal_like.capabilities.fp8.checks import check_fp8
from areal_like.capability import Capability

CAPABILITY = Capability(checks=[check_fp8])
