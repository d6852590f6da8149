"""Rules about names, roles, and one engine per config field."""

from collections.abc import Iterator
from itertools import chain, count

from allocation.backends import SERVER, TRAINER
from allocation.diagnostics import Problem
from allocation.language.syntax import Allocation, Word
from allocation.registry import LANGUAGE, rule
from allocation.resolve import Engine

_USUAL = {TRAINER: ("actor", "critic", "ref"), SERVER: ("rollout", "reward", "teacher", "judge")}


@rule("ALLOC-FIELD-MEMBERS", source="AReaL's per-engine fields")
def one_member_per_field(field: Allocation, role: str) -> Iterator[Problem]:
    """A per-engine field describes one engine; a whole allocation has its own field."""
    members = list(field.members)
    if len(members) > 1:
        help = "write the whole allocation in `allocation_mode`"
        yield Problem(f"{role}.backend contains {len(members)} engines, but must contain one", (members[1].span,), help)


@rule("ALLOC-NAME-KEY", source="AReaL's per-engine fields")
def name_agrees_with_field(field: Allocation, role: str) -> Iterator[Problem]:
    """The field determines the engine's role; another name in the string contradicts it."""
    for member in field.members:
        if member.name and member.name.text != role:
            yield Problem(f"the engine in the field of `{role}` is named `{member.name}`", (member.name.span,))


@rule("ALLOC-NAME-TWICE", source=LANGUAGE)
def names_unique(engines: list[Engine]) -> Iterator[Problem]:
    """A name belongs to one engine."""
    first: dict[str, Word] = {}
    for engine in engines:
        name = engine.node.name
        if name and first.setdefault(name.text, name) is not name:
            yield Problem(f"two engines are named `{name}`", (name.span, first[name.text].span))


@rule("ALLOC-NAME-NEEDED", source=LANGUAGE)
def roles_are_clear(engines: list[Engine]) -> Iterator[Problem]:
    """A lone trainer is the actor and a lone kind of server the rollout; otherwise names determine the roles."""
    taken = {engine.role for engine in engines if engine.node.name}
    for engine in engines:
        if engine.node.name:
            continue
        same = [other for other in engines if other.backend.kind == engine.backend.kind]
        if len(engines) > 2 or len(same) > 1 or any(o.role == engine.role for o in engines if o is not engine):
            usual = chain(_USUAL[engine.backend.kind], (f"{engine.backend.kind}{n}" for n in count(1)))
            taken.add(role := next(name for name in usual if name not in taken))
            help = f"write for example `{engine.node.backend}[{role}]:…`"
            message = f"`{engine.node.backend}` needs a name: the string does not determine its role"
            yield Problem(message, (engine.node.backend.span,), help)
