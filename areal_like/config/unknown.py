"""Settings that are not known because they were refused: a check that asks for one has nothing more to say."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from allocation import Finding


class UnknownSetting(Exception):
    """A setting was asked for whose key was refused, or may have been meant by a misspelt one."""


def known[**P, T](read: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
    """What `read` returns for these arguments; None where it asks for an unknown setting."""
    try:
        return read(*args, **kwargs)
    except UnknownSetting:
        return None


def known_findings(check: Iterable[Finding]) -> list[Finding]:
    """The findings of a check, up to where it asks for an unknown setting."""
    findings = []
    try:
        for finding in check:
            findings.append(finding)
    except UnknownSetting:
        pass
    return findings
