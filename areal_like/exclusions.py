"""The exclusion table: features of a run that do not go together, one row a pair, from which findings are made."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from allocation.diagnostics import Finding, Severity
from areal_like.core.config.findings import finding

_SETTING = re.compile(r"(?<![\w`])(\.?[a-z_]\w*(?:\.\w+)*)=(\[[^\]]*\]|[^\s,;]+)")


@dataclass(frozen=True)
class Feature[T]:
    """A named predicate on a run or a role; `code` is the code of its findings, `key` the key that turns it on.

    A key that starts with a dot is a setting of the role.
    """

    code: str
    name: str
    key: str
    holds: Callable[[T], Any]

    def excludes(
        self,
        name: str,
        holds: Callable[[T], Any],
        because: str,
        set: str | Callable[[T], str],
        key: str = "",
        severity: Severity = Severity.ERROR,
    ) -> "Exclusion[T]":
        """Return the row with another feature; its finding is about `key`, or about the key of this feature."""
        return Exclusion(self, Feature(self.code, name, key or self.key, holds), because, set, severity)


@dataclass(frozen=True)
class Exclusion[T]:
    """A row: `because` is the rule, where `{}` stands for the text that `excludes.holds` returns, `set` the fix."""

    feature: Feature[T]
    excludes: Feature[T]
    because: str
    set: str | Callable[[T], str]
    severity: Severity = Severity.ERROR

    def find_reason(self, of: T) -> str | None:
        """Return the rule if the excluded feature holds."""
        found = self.excludes.holds(of)
        return self.because.format(found) if found else None


def find_excluded[T](
    rows: Iterable[Exclusion[T]], of: T, key: Callable[[str], str] = lambda setting: setting
) -> Iterator[Finding]:
    """Yield the findings of a run or a role; `key` returns the dotted key of a role's setting."""

    def place(setting: str) -> str:
        return key(setting[1:]) if setting.startswith(".") else setting

    for row in rows:
        if not row.feature.holds(of) or (reason := row.find_reason(of)) is None:
            continue
        message = f"{row.feature.name} cannot be combined with {row.excludes.name}: {reason}"
        fix = row.set if isinstance(row.set, str) else row.set(of)
        help = _SETTING.sub(lambda found: f"`{place(found[1])}={found[2]}`", fix)
        help = f"set {help}" if help.startswith("`") else help
        yield finding(row.feature.code, place(row.excludes.key), message, help or None, severity=row.severity)


def describe_rows(rows: Iterable[Exclusion[Any]], code: str) -> Iterator[tuple[str, str, str]]:
    """Yield the rows of a code as words: the two features, the rule, and the fix."""
    for row in rows:
        if row.feature.code == code:
            fix = row.set if isinstance(row.set, str) else "as the finding says"
            because = row.because.replace("{}", "…")
            yield (
                f"{row.feature.name} with {row.excludes.name}",
                because,
                _SETTING.sub(r"`\1=\2`", fix).replace("`.", "`"),
            )
