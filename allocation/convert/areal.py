"""AReaL: one `backend` field per engine, or the older single string, `sglang.d4p1t1+d2p2t1`.

Both follow AReaL's allocation reference. The older string is also read in its spelling with dots, with `m` for tensor
parallelism, and with an unnamed trainer: AReaL uses megatron if p or e is above 1, else fsdp.
"""

import re
from dataclasses import asdict, replace

import allocation.language.reading as language
from allocation.backends import BACKENDS, DEFAULT_ROLE
from allocation.convert.drafts import Draft, engines, join, names_needed
from allocation.convert.settings import Reading, Setting, dump
from allocation.convert.system import System
from allocation.diagnostics import Finding, Source, Span
from allocation.language.spelling import normalise, spell
from allocation.language.syntax import LONGEST, Allocation, Dim, Group, Layout, Member, Word
from allocation.plan import EnginePlan, Plan
from allocation.registry import run_rules
from allocation.resolve import resolve

ROLES = ("rollout", "actor", "critic", "ref", "teacher")
_VIRTUAL = "megatron.virtual_pipeline_parallel_size"
_COMPONENT = re.compile(
    r"\s*(?:(?P<backend>[A-Za-z]\w*)\s*(?:[\[(]\s*(?P<name>\w+)\s*[\])]\s*)?(?P<mark>[.:])\s*)?(?P<layout>.*?)\s*$",
    re.S,
)
_DIMS = re.compile(r"(?:[dptmce]\d+)+")
_NO_TRAINER = ("eval", "cpu")


def read(text: str) -> tuple[str, list[Finding]]:
    """Return the engines of per-engine fields (YAML or `key=value`), of `allocation_mode`, or of a bare string."""
    if not re.search(r"backend|allocation_mode", text):
        text = text.strip()
        reading = Reading(text, {})
        whole = Setting("allocation_mode", text, Source(text), Span(0, len(text)))
        return _legacy(reading, whole), reading.findings
    reading = Reading.of_config(text)
    fields = {role: setting for role in ROLES if (setting := reading.find(f"{role}.backend"))}
    mode = reading.find("allocation_mode")
    if not fields and mode:
        return _legacy(reading, mode), reading.findings
    if not fields:
        return reading.nothing("AReaL", "a field such as actor.backend, or allocation_mode")
    groups: dict[str, list[Member]] = {}
    hosts: dict[str, str] = {}
    for role, setting in fields.items():
        member = _member(reading, setting, role)
        if member is None:
            continue
        host = reading.value(f"{role}.scheduling_strategy.target")
        if reading.value(f"{role}.scheduling_strategy.type") != "colocation" or host not in fields:
            host = role
        hosts[role] = host = hosts.get(host, host)
        groups.setdefault(host, []).append(member)
    return _text(list(groups.values())), reading.findings


def _member(reading: Reading, setting: Setting, role: str) -> Member | None:
    """Return the member in a field, with the sizes that AReaL keeps in other fields."""
    value = setting.value
    if value.startswith("archon"):
        reading.report(setting=setting, read_as="megatron", reason="both have the same dimensions")
        value = value.replace("archon", "megatron", 1)
    source = Source(value, setting.key)
    tree, findings = language.read(source)
    reading.findings += findings or _of_words(tree, source, role)
    members = list(tree.members)
    if len(members) != 1:
        if not findings:
            reading.report(backend=setting)
        return None
    member = members[0]
    extra = []
    if member.backend.text == "megatron" and (stages := reading.size(f"{role}.{_VIRTUAL}")) > 1:
        extra.append(Dim("v", str(stages)))
    if member.backend.text == "sglang" and (experts := reading.size("sglang.ep_size")) > 1:
        extra.append(Dim("e", str(experts)))
    layout = Layout((*member.layout.attn, *extra), member.layout.ffn)
    return Member(member.backend, layout, Word(role))


def _of_words(tree: Allocation, source: Source, role: str | None = None) -> list[Finding]:
    """Return the findings about letters, counts and names, where an error would be lost or change the meaning."""
    engines = [resolve(member, source, role) for member in tree.members]
    findings = [found for engine in engines for found in run_rules(source, member=engine)]
    return findings if role else [*findings, *run_rules(source, engines=engines)]


def _text(groups: list[list[Member]]) -> str:
    """Return the allocation, with names only where they are needed and without the sizes that are 1, but for `d`."""
    named = names_needed((_role(member), member.backend.text) for group in groups for member in group)

    def shorten(member: Member) -> Member:
        attn = member.layout.attn
        kept = tuple(dim for dim in attn if dim.letter == "d" or dim.count != "1") or attn
        layout = Layout(kept, member.layout.ffn)
        return Member(member.backend, layout, Word(_role(member)) if named else None, member.gpus)

    return spell(normalise(Allocation(tuple(Group(tuple(map(shorten, group))) for group in groups))))


def _role(member: Member) -> str:
    if member.name:
        return member.name.text
    backend = BACKENDS.get(member.backend.text)
    return DEFAULT_ROLE[backend.kind] if backend else "actor"


def _legacy(reading: Reading, setting: Setting) -> str:
    """Return a whole allocation in any of the older spellings."""
    text = setting.value
    if len(text) <= LONGEST:
        parts: list[str] = []
        for start, end in language.pieces(text):
            value = text[start:end].strip()
            component = Setting(setting.key, value, Source(text, setting.source.key), Span(start, end))
            if component.value in _NO_TRAINER:
                reading.report(unread=component, reason=f"`{component.value}` is not an engine with GPUs")
            else:
                parts.append((text[start - 1] if parts else "") + _component(reading, component))
        text = "".join(parts)
    source = Source(text, setting.source.key)
    tree, findings = language.read(source)
    reading.findings += findings or _of_words(tree, source)
    return "" if findings else _text([list(group.members) for group in tree.groups])


def _component(reading: Reading, setting: Setting) -> str:
    """Return one engine in the current spelling."""
    match = _COMPONENT.match(setting.value)
    layout = match["layout"] if match else setting.value
    if match is None or not (_DIMS.fullmatch(layout) or match["mark"]):
        return setting.value
    if match["mark"] != ":":
        layout = re.sub(r"m(?=\d)", "t", layout)
    backend = match["backend"]
    if backend is None:
        backend = "megatron" if re.search(r"[pe](?!1(?!\d))\d", layout) else "fsdp"
        reason = "this is AReaL's default trainer"
        reading.report(setting=setting, read_as=f"{backend}:{layout}", reason=reason)
    elif backend == "archon":
        reading.report(setting=setting, read_as="megatron", reason="both have the same dimensions")
        backend = "megatron"
    return f"{backend}{'[' + match['name'] + ']' if match['name'] else ''}:{layout}"


def write(plan: Plan) -> str:
    """Return YAML with the cluster and a `backend` per engine; engines on the same GPUs are colocated."""
    written: dict[str, object] = {"cluster": asdict(plan.cluster)}
    roles: list[str] = []
    for engine in engines(plan, ROLES):
        written[f"{engine.role}.backend"] = f"{engine.backend}:{spell(_draft(engine).layout)}"
        if engine.sizes.vpp > 1:
            written[f"{engine.role}.{_VIRTUAL}"] = engine.sizes.vpp
        if engine.kind == "server" and engine.sizes.ep > 1:
            written["sglang.ep_size"] = engine.sizes.ep
        sharing = next(group for group in plan.groups if engine.role in group)
        if host := next((role for role in sharing if role in roles), None):
            written[f"{engine.role}.scheduling_strategy"] = {"type": "colocation", "target": host}
        roles.append(engine.role)
    return dump(written) if roles else ""


def _draft(engine: EnginePlan) -> Draft:
    """Return the engine in AReaL's letters, which have no `v` and for servers no `e`."""
    sizes = replace(engine.sizes, vpp=1)
    if engine.kind == "server":
        sizes = replace(sizes, ep=1, etp=1)
    return Draft(engine.role, engine.backend, sizes)


def write_legacy(plan: Plan) -> str:
    """Return the whole allocation as one string, for `allocation_mode`."""
    by_role = {engine.role: engine for engine in plan.engines}
    return join([[_draft(by_role[role]) for role in group] for group in plan.groups])


_LIMITS = {
    "CONVERT-LOSES-ENGINE": f"the engines of AReaL are {', '.join(ROLES)}",
    "CONVERT-LOSES-GPUS": "AReaL assigns the GPUs itself, in the order rollout, actor, critic, ref",
}
SYSTEM = System("areal", "AReaL", read, write, _LIMITS)
LEGACY = System(
    "areal-legacy",
    "AReaL's allocation_mode",
    read,
    write_legacy,
    _LIMITS | {"CONVERT-LOSES-SIZE": "the string has no letter for this size; use AReaL's per-engine fields"},
)
