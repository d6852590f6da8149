"""The registered rules, and the function that runs them.

A rule is a small generator of `Problem`s with `@rule`; `docs/rules.md` prints its docstring as the reason.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from itertools import islice
from pkgutil import iter_modules
from typing import Any

from allocation.diagnostics import Finding, Problem, Severity, Source

# Sources that many rules name.
LANGUAGE = "the allocation language"
STATE = "Megatron-LM core/parallel_state.py"
CONFIG = "Megatron-LM core/transformer/transformer_config.py"

# One rule about one engine: beyond this the text is no allocation, and the answer should stay short.
MOST_PER_RULE = 20

Check = Callable[..., Iterator[Problem]]


@dataclass(frozen=True, slots=True)
class Rule:
    """A registered constraint. `source` names its origin, `megatron` Megatron's name of the quantity.

    `needs` are the names of the parameters of `check`, in their order.
    """

    code: str
    severity: Severity
    source: str
    megatron: str | None
    needs: tuple[str, ...]
    check: Check

    @property
    def reason(self) -> str:
        """The docstring of the rule's function, as one paragraph."""
        return " ".join((self.check.__doc__ or "").split())


RULES: dict[str, Rule] = {}


def rule(
    code: str, *, source: str, megatron: str | None = None, severity: Severity = Severity.ERROR
) -> Callable[[Check], Check]:
    """Register a generator of `Problem`s under a stable `code`."""

    def register(check: Check) -> Check:
        needs = check.__code__.co_varnames[: check.__code__.co_argcount]
        registered = Rule(code, severity, source, megatron, needs, check)
        if RULES.setdefault(code, registered) is not registered:
            raise ValueError(f"two rules have the code {code}")
        _runnable.cache_clear()
        return check

    return register


def register_all() -> None:
    """Import, and so register, every rule about allocations. `allocation.convert` registers those about conversions."""
    for module in iter_modules(import_module("allocation.rules").__path__):
        import_module(f"allocation.rules.{module.name}")


class UnknownSize(Exception):
    """Raised when a rule reads a size that is itself wrong in the string; the rule is then skipped."""


def run_rules(source: Source, *roles: str, **known: Any) -> list[Finding]:
    """Return the findings, about `source` and `roles`, of every rule whose needs are all in `known`."""
    findings: list[Finding] = []
    for rule in _runnable(tuple(known)):
        try:
            for p in islice(rule.check(*[known[name] for name in rule.needs]), MOST_PER_RULE):
                where, about, help = p.source or source, p.roles or roles, p.remedy.text() if p.remedy else p.help
                found = Finding(rule.code, rule.severity, p.message, where, p.spans, help, rule.megatron)
                findings.append(replace(found, remedy=p.remedy, roles=about, quoted=p.quoted))
        except UnknownSize:
            continue
    return findings


@cache
def _runnable(names: tuple[str, ...]) -> tuple[Rule, ...]:
    return tuple(rule for rule in RULES.values() if set(rule.needs) <= set(names))
