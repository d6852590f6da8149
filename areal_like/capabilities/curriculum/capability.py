"""The curriculum: prompts of a middle success rate are preferred."""

from areal_like.capabilities.curriculum.checks import EXCLUDES, check_curriculum
from areal_like.capabilities.curriculum.stream import make_stream
from areal_like.capability import Capability

CAPABILITY = Capability(checks=[check_curriculum], excludes=EXCLUDES, stream=make_stream)
