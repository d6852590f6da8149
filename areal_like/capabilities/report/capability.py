"""The report: a page about a run, and commands that show its samples and watch it."""

from areal_like.capabilities.report.run_page import make_page
from areal_like.capability import Capability

CAPABILITY = Capability(listeners=make_page)
