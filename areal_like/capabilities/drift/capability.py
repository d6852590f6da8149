"""The drift alarm: servers and trainer are compared at every version."""

from areal_like.capabilities.drift.hook import make_hook
from areal_like.capability import Capability

CAPABILITY = Capability(hook=make_hook)
