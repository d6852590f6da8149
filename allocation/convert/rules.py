"""Errors in, and losses from, other systems' settings. Registered like all rules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING

from allocation.backends import BACKENDS
from allocation.diagnostics import Finding, Problem, Severity
from allocation.language.spelling import spell
from allocation.plan import EnginePlan, Plan
from allocation.registry import LANGUAGE, STATE, rule

if TYPE_CHECKING:
    from allocation.convert.drafts import Draft
    from allocation.convert.settings import Setting, Unreadable
    from allocation.convert.system import System

_PLAIN = "settings are parsed, never evaluated"
_BOTH_WAYS = "written settings are read back and compared"


def _problem_at(setting: Setting | None, message: str, help: str | None = None) -> Problem:
    return Problem(message, (setting.span,), help, setting.source) if setting else Problem(message, (), help)


@rule("CONVERT-TEXT", source=_PLAIN)
def readable(unreadable: Unreadable) -> Iterator[Problem]:
    """Settings are YAML, `key=value` lines or command lines of a sensible size."""
    yield Problem(unreadable.reason, (unreadable.span,) if unreadable.span else (), None, unreadable.source)


@rule("CONVERT-NOTHING", source="nothing is guessed")
def something_to_read(title: str, expected: str) -> Iterator[Problem]:
    """At least one setting must define the parallelism of an engine."""
    yield Problem(f"the text contains no engine of {title}", (), f"the text needs {expected}")


@rule("CONVERT-VALUE", source="parallel sizes count ranks")
def value_is_a_size(size: Setting) -> Iterator[Problem]:
    """A parallel size or a number of GPUs is a positive integer."""
    if "$" not in size.value:
        yield _problem_at(size, f"`{size.value[:40]}` is not a positive integer", "write the number itself")


@rule("CONVERT-VARIABLE", source=_PLAIN)
def value_is_known(size: Setting) -> Iterator[Problem]:
    """Shell variables and references to values outside the text are unknown."""
    if "$" in size.value:
        why = f": it depends on {', '.join(size.unknown)}" if size.unknown else ""
        message = f"the text does not define the value of `{size.value[:40]}`{why}"
        yield _problem_at(size, message, "write the number itself")


@rule("CONVERT-DEVICES", source="ROLL evaluates device_mapping as Python; here it is parsed")
def devices_understood(devices: Setting, reason: str) -> Iterator[Problem]:
    """A device mapping is a list of GPU ids: `[0,1,2]`, `list(range(0,16))`, or several of them joined with `+`."""
    help = "write `list(range(0,8))`, `[0,1,2]` or several joined with `+`"
    yield _problem_at(devices, f"`{devices.value[:60]}` is not a list of GPU ids: {reason}", help)


@rule("CONVERT-MISSING", source="nothing is guessed")
def setting_there(key: str, near: Setting, help: str | None) -> Iterator[Problem]:
    """A setting that gives meaning to the others must not be missing."""
    yield _problem_at(near, f"`{key}` is missing", help)


@rule("CONVERT-BACKEND", source=LANGUAGE)
def backend_known(backend: Setting) -> Iterator[Problem]:
    """The software that runs an engine must be one of the language's backends."""
    close = get_close_matches(backend.value.lower(), BACKENDS, n=1)
    help = f"did you mean `{close[0]}`?" if close else f"the backends are {', '.join(BACKENDS)}"
    yield _problem_at(backend, f"an allocation has no backend `{backend.value[:40]}`", help)


@rule("CONVERT-READ-AS", source=LANGUAGE, severity=Severity.WARNING)
def read_as_another(setting: Setting, read_as: str, reason: str) -> Iterator[Problem]:
    """A missing or unsupported backend is read as a similar one."""
    yield _problem_at(setting, f"`{setting.value[:60]}` is read as `{read_as}`: {reason}")


@rule("CONVERT-GPUS", source="data parallelism follows from the number of GPUs",
      severity=Severity.WARNING)  # fmt: skip
def gpus_known(where: str, smallest: int) -> Iterator[Problem]:
    """Without the number of GPUs the data-parallel size is unknown; the smallest that fits is used."""
    yield Problem(f"the text does not define the number of GPUs; the minimum, {smallest}, is used", (), f"add {where}")


@rule("CONVERT-WORLD", source=f"{STATE}:823")
def gpus_divide(role: str, n_gpus: int, replica: int, setting: Setting | None) -> Iterator[Problem]:
    """The number of GPUs of an engine is a multiple of the GPUs of one replica, t·p·c."""
    yield _problem_at(
        setting, f"`{role}`: {n_gpus} GPUs are not a multiple of the {replica} GPUs of one replica (t·p·c)"
    )


@rule("CONVERT-SERVERS", source=LANGUAGE)
def servers_alike(first: Draft, other: Draft) -> Iterator[Problem]:
    """The servers of one engine have equal sizes."""
    message = f"the servers differ: `{spell(first.layout)}` and `{spell(other.layout)}`"
    yield Problem(message, (), "convert them one at a time")


@rule("CONVERT-LOSES-SETTING", source=LANGUAGE, severity=Severity.WARNING)
def setting_lost(unread: Setting, reason: str) -> Iterator[Problem]:
    """Some settings about GPUs have no equivalent in an allocation."""
    yield _problem_at(unread, f"`{unread.key}` is left out: {reason}")


@rule("CONVERT-UNWRITABLE", source=_BOTH_WAYS)
def nothing_to_write(system: System, plan: Plan, problems: Sequence[Finding]) -> Iterator[Problem]:
    """At least one engine of the plan must have an equivalent in the other system, and must be able to run there."""
    engines = ", ".join(f"`{engine.text}`" for engine in plan.engines)
    if problems:
        reason = next((f.message for f in problems if f.severity is Severity.ERROR), problems[0].message)
        yield Problem(f"{engines} cannot run in {system.title}: {reason}", (), system.limits.get("CONVERT-LOSES-GPUS"))
    else:
        yield Problem(f"{system.title} has no equivalent of {engines}", (), system.limits.get("CONVERT-LOSES-ENGINE"))


@rule("CONVERT-LOSES-ENGINE", source=_BOTH_WAYS, severity=Severity.WARNING)
def engine_lost(system: System, lost: EnginePlan) -> Iterator[Problem]:
    """Some engines have no equivalent in the other system's settings."""
    yield Problem(f"`{lost.text}` is left out of the settings of {system.title}", ())


@rule("CONVERT-LOSES-BACKEND", source=_BOTH_WAYS, severity=Severity.WARNING)
def backend_lost(system: System, moved: EnginePlan, theirs: EnginePlan) -> Iterator[Problem]:
    """The other system runs an engine on another backend."""
    yield Problem(f"`{moved.text}` runs on {theirs.backend} in {system.title}, not on {moved.backend}", ())


@rule("CONVERT-LOSES-SIZE", source=_BOTH_WAYS, severity=Severity.WARNING)
def size_lost(system: System, resized: EnginePlan, differences: Sequence[tuple[str, int, int]]) -> Iterator[Problem]:
    """The other system changes a size."""
    for name, ours, theirs in differences:
        yield Problem(f"`{resized.text}` has {name} {ours}, but {theirs} in the settings of {system.title}", ())


@rule("CONVERT-LOSES-GPUS", source=_BOTH_WAYS, severity=Severity.WARNING)
def gpus_lost(system: System, scattered: Plan) -> Iterator[Problem]:
    """The other system shares GPUs, places engines on nodes or numbers GPUs differently."""
    yield Problem(f"the settings of {system.title} place `{scattered.allocation}` on other GPUs", ())


@rule("CONVERT-LOSES-ORDER", source=_BOTH_WAYS, severity=Severity.WARNING)
def order_lost(system: System, reordered: Plan) -> Iterator[Problem]:
    """The other system does not support the rank order."""
    yield Problem(f"{system.title} does not support the rank order `{reordered.order}`", ())
