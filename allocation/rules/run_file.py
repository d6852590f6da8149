"""Rules about a run's YAML as far as it bears on the layout; `allocation/run_file.py` reads it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from difflib import get_close_matches

from allocation.diagnostics import Problem, Severity, rule

_SOURCE = "the run's YAML"


@rule("ALLOC-RUN-VALUE", "run value", source=_SOURCE)
def value_readable(problem: str) -> Iterator[Problem]:
    """A key has a value of its type, and a reference (`${gconfig.n_samples}`) leads to a value."""
    yield Problem(problem)


@rule("ALLOC-RUN-LAYOUT", "run", source="AReaL's configuration")
def layout_said_once(whole: str | None, backends: Sequence[str]) -> Iterator[Problem]:
    """The layout stands in `allocation_mode` or in the engines' own `backend` fields, never in both."""
    if whole is None and not backends:
        help = "write for example `actor: {backend: megatron:d2}` and `rollout: {backend: sglang:d1}`"
        yield Problem("the file gives no layout", help=help)
    elif whole is not None and backends:
        yield Problem(f"the layout is also given by {' and '.join(backends)}", help="keep one of the two")


@rule("ALLOC-RUN-UNREAD", "run override", source=_SOURCE, severity=Severity.NOTE)
def override_bears_on_layout(key: str, known: Collection[str]) -> Iterator[Problem]:
    """An override of another key changes nothing here; a misspelt one should not go unnoticed."""
    close = get_close_matches(key, known, n=1, cutoff=0.8)
    yield Problem("this key does not bear on the layout", help=f"did you mean `{close[0]}`?" if close else None)
