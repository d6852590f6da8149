"""Nearest valid strings: small changes of the layouts that have errors, each checked before it is suggested.

The distance of a change is the sum of |log2(new / old)| over the changed counts; see `_distance`.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import combinations

from allocation.backends import BACKENDS, SIZE_OF
from allocation.diagnostics import Finding, Severity, Source, has_errors
from allocation.language.reading import parse, read
from allocation.language.spelling import spell
from allocation.language.syntax import Allocation, Dim, Group, Layout, Member
from allocation.registry import RULES
from allocation.resolve import count

OFFERED = 2
MOST_CHECKS = 60
LONGEST_TEXT = 160
# Rules that need one of these can be satisfied by other counts; a wrong word cannot.
CURABLE = {"engine", "trainer", "server", "request", "placed", "planned", "room"}
# Changing the experts or the data-parallel size leaves the model's own split as the user wrote it.
_PREFERENCE = "edctpv"

Findings = tuple[Finding, ...]
Judge = Callable[[str | Mapping[str, str]], Findings]


def with_remedies(spec: str | Mapping[str, str], key: str | None, findings: Findings, judge: Judge) -> Findings:
    """Return the findings with remedies that work.

    Errors get up to two valid strings where changing counts is enough to reach them. A help that quotes an allocation
    which is itself wrong here is taken out.
    """
    checks = iter(range(MOST_CHECKS))
    findings = tuple(f if all(_works(text, judge) for text in f.quoted) else replace(f, help=None) for f in findings)
    if isinstance(spec, str):
        return _attach(findings, Source(spec, key), judge, checks)

    def judge_field(role: str, text: str) -> Findings:
        others = {f"{name}.backend" for name in spec if name != role}
        return tuple(finding for finding in judge({**spec, role: text}) if finding.key not in others)

    for role, text in spec.items():
        findings = _attach(findings, Source(text, f"{role}.backend"), partial(judge_field, role), checks)
    return findings


def _works(text: str, judge: Judge) -> bool:
    """Return whether to suggest an allocation: it is valid, or its backend or its spelling has a finding of its own."""
    tree, wrong = read(Source(text))
    return bool(wrong) or any(m.backend.text not in BACKENDS for m in tree.members) or not has_errors(judge(text))


def _attach(findings: Findings, source: Source, judge: Callable[[str], Findings], checks: Iterator[int]) -> Findings:
    wrong = [finding for finding in findings if finding.severity is Severity.ERROR and finding.source == source]
    curable = all(
        CURABLE.intersection(RULES[f.code].needs) and f.spans for f in wrong if f.code != "ALLOC-FOLD-PIPELINE"
    )
    if not wrong or not curable or len(source.text) > LONGEST_TEXT:
        return findings
    thirds = any("HEADS" in finding.code for finding in wrong)
    nearest = _search(source.text, judge, checks, thirds=thirds)
    return tuple(replace(finding, nearest=nearest) if finding in wrong else finding for finding in findings)


def _search(text: str, judge: Callable[[str], Findings], checks: Iterator[int], *, thirds: bool) -> tuple[str, ...]:
    """Return valid strings near `text`: one member after the other is changed until nothing is wrong with it.

    Each candidate takes one of `checks`; when none are left, the search returns its results so far.
    """
    tree = parse(text)
    current = [text]
    for number, member in enumerate(tree.members):
        kept: list[str] = []
        for base in current:
            if not _wrong(judge(base), base, number):
                kept.append(base)
                continue
            members = list(parse(base).members)
            for variant, _ in zip(_variants(member, thirds=thirds), checks, strict=False):
                candidate = _text(tree, [*members[:number], variant, *members[number + 1 :]])
                if not _wrong(judge(candidate), candidate, number):
                    kept.append(candidate)
                    if len(kept) == OFFERED:
                        break
        current = kept[:OFFERED]
    return tuple(text for text in current if not has_errors(judge(text))) or _smaller(tree, judge)


def _smaller(tree: Allocation, judge: Callable[[str], Findings]) -> tuple[str, ...]:
    """Return the allocation with every data-parallel size halved until it fits, and with two groups colocated."""
    members = list(tree.members)
    found = []
    if len(tree.groups) == 2 and len(members) == 2:
        found.append(spell(Allocation((Group(tuple(members)),))))
    for step in range(1, 8):
        sizes = [{d.letter: count(d) or 0 for d in member.layout.attn} for member in members]
        if any(size.get("d", 1) % 2**step for size in sizes):
            break
        halved = [_change(m, {("attn", "d"): s["d"] // 2**step}) for m, s in zip(members, sizes, strict=True)]
        found.append(_text(tree, halved))
    return tuple(text for text in found if not has_errors(judge(text)))[:OFFERED]


def _wrong(findings: Iterable[Finding], text: str, number: int) -> bool:
    """Return whether an error lies in member `number` of `text`."""
    span = list(parse(text).members)[number].span
    return any(
        f.severity is Severity.ERROR and (f.span is None or span.start <= f.span.start < span.end) for f in findings
    )


def _text(tree: Allocation, members: Iterable[Member]) -> str:
    remaining = iter(members)
    return spell(Allocation(tuple(Group(tuple(next(remaining) for _ in group.members)) for group in tree.groups)))


def _variants(member: Member, *, thirds: bool) -> Iterator[Member]:
    """Yield members with one or two counts changed, nearest first."""
    dims = member.layout.dims
    if member.backend.text not in BACKENDS or any(count(dim) is None and dim.count != "*" for _, dim in dims):
        return
    present = {(part, dim.letter): count(dim) for part, dim in dims if dim.count != "*"}
    present.setdefault(("attn", "d"), 1)
    single = [
        (_distance(value, new, thirds=thirds and place[1] == "t"), place, new)
        for place, value in present.items()
        if value and place[1] in SIZE_OF[place[0]] and place not in (("ffn", "d"), ("ffn", "p"))
        for new in _near(value)
    ]
    single.sort(key=lambda change: (change[0], _PREFERENCE.index(change[1][1])))
    if any(part == "ffn" for part, _ in present):
        yield _change(member, {})
    for _, place, new in single[:40]:
        yield _change(member, {place: new})
    for rounded in (math.floor, math.ceil):
        yield _change(member, {place: 2 ** rounded(math.log2(value)) for place, value in present.items() if value})
    yield from _trade_copies(member, present)
    pairs = [(a, b) for a, b in combinations(single[:16], 2) if a[1] != b[1]]
    for a, b in sorted(pairs, key=lambda pair: pair[0][0] + pair[1][0]):
        yield _change(member, dict((a[1:], b[1:])))


def _trade_copies(member: Member, present: Mapping[tuple[str, str], int | None]) -> Iterator[Member]:
    """Yield members on as many GPUs with fewer copies of the model and more parts of it."""
    copies, backend = present[("attn", "d")] or 1, BACKENDS[member.backend.text]
    letters = "c" if backend.name == "fsdp" else "tp"  # FSDP splits sequences, not matrices
    for factor in (2, 4, 8):
        for letter in letters if copies % factor == 0 and member.layout.ffn is None else "":
            if letter in backend.letters:
                parts = (present.get(("attn", letter)) or 1) * factor
                yield _change(member, {("attn", "d"): copies // factor, ("attn", letter): parts})


def _near(value: int) -> list[int]:
    steps = [value * 2, value * 4, value // 2, value // 4, value + 1, value - 1, value + 2, value - 2, 1]
    return [new for new in dict.fromkeys(steps) if new >= 1 and new != value]


def _distance(old: int, new: int, *, thirds: bool) -> float:
    """Return |log2(new / old)|, plus a penalty for a size that is not a power of two: few models are divisible by it.

    With `thirds`, where 2 does not divide a model's heads, 3 often does.
    """
    odd = 0.4 if thirds and new == 3 else 2
    return abs(math.log2(new / old)) + (odd if new & (new - 1) else 0)


def _change(member: Member, changes: Mapping[tuple[str, str], int]) -> Member:
    """Return the member with new counts; a `d` or `p` in `ffn` follows from the rest."""
    attn = [Dim(d.letter, str(changes.get(("attn", d.letter), d.count))) for d in member.layout.attn]
    for letter in "tpcd":
        if ("attn", letter) in changes and all(d.letter != letter for d in attn):
            attn.insert(len(attn) * (letter != "d"), Dim(letter, str(changes["attn", letter])))
    if member.layout.ffn is None:
        return replace(member, layout=Layout(tuple(attn)))
    size = {d.letter: count(d) or 1 for d in attn}
    ffn = [Dim(d.letter, str(changes.get(("ffn", d.letter), d.count))) for d in member.layout.ffn]
    expert = {d.letter: count(d) or 1 for d in ffn}
    derived = {
        "p": size.get("p", 1),
        "d": size.get("d", 1) * size.get("t", 1) * size.get("c", 1) // (expert.get("t", 1) * expert.get("e", 1)) or 1,
    }
    ffn = [Dim(d.letter, str(derived.get(d.letter, d.count))) for d in ffn]
    return replace(member, layout=Layout(tuple(attn), tuple(ffn)))
