"""A teacher that follows the policy: every few steps its servers load the weights of the actor or the reference."""

from areal_like.capabilities.moving_teacher.checks import check_moving_teacher, uses_reference
from areal_like.capabilities.moving_teacher.hook import make_hook
from areal_like.capability import Capability

CAPABILITY = Capability(checks=[check_moving_teacher], hook=make_hook, uses_reference=uses_reference)
