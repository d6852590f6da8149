"""Sandboxes: isolated process trees for the commands of episodes."""

from areal_like.capabilities.sandbox.checks import check_sandbox
from areal_like.capability import Capability

CAPABILITY = Capability(checks=[check_sandbox])
