"""The curriculum: prompts of a middle success rate are preferred."""

from areal_like.capabilities.curriculum.checks import check_curriculum
from areal_like.capabilities.curriculum.stream import make_stream
from areal_like.capability import Capability

CAPABILITY = Capability(checks=[check_curriculum], stream=make_stream)
