"""Rules about the words of one member: backends, names, letters, counts and GPU ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from difflib import get_close_matches

from allocation.diagnostics import Problem
from allocation.language.syntax import LARGEST, Dim
from allocation.resolve import BACKENDS, RESERVED, UNKNOWN_BACKEND, Engine, count
from allocation.rules.registry import rule

_LANGUAGE = "the allocation language"
DIMENSIONS = {"d": "data", "t": "tensor", "p": "pipeline", "c": "context", "e": "expert", "v": "virtual pipeline"}
_LONG_NAMES = {
    "dp": "d", "data": "d", "tp": "t", "tensor": "t", "mp": "t", "pp": "p", "pipeline": "p", "cp": "c", "sp": "c",
    "context": "c", "ep": "e", "expert": "e", "vp": "v", "vpp": "v", "etp": "t", "edp": "d",
}  # fmt: skip


def _parts(member: Engine) -> tuple[tuple[str, tuple[Dim, ...]], ...]:
    layout = member.node.layout
    if layout.ffn is None:
        return (("", layout.attn),)
    return (("attn", layout.attn), ("ffn", layout.ffn))


def _dims(member: Engine) -> Iterator[Dim]:
    return (dim for _, dims in _parts(member) for dim in dims)


@rule("ALLOC-BACKEND", source=_LANGUAGE)
def backend_known(member: Engine) -> Iterator[Problem]:
    """A member starts with one of the known backends."""
    word = member.node.backend
    if word.text not in BACKENDS:
        guess = member.backend.name
        known = ", ".join(f"`{name}`" for name in BACKENDS)
        help = f"did you mean `{guess}`?" if guess else f"the backends are {known}"
        if word.text == "ffn":
            help = "a folded layout with `|` stands in parentheses: `megatron:(attn:…|ffn:…)`"
        yield Problem(f"unknown backend `{word}`", (word.span,), help)


@rule("ALLOC-NAME-RESERVED", source=_LANGUAGE)
def name_reserved(member: Engine) -> Iterator[Problem]:
    """A name must not be a word of the language, or a string could be read in two ways."""
    name = member.node.name
    if name and name.text in RESERVED:
        yield Problem(f"`{name}` is a word of the language and cannot be a name", (name.span,))


@rule("ALLOC-LETTER", source=_LANGUAGE)
def letter_known(member: Engine) -> Iterator[Problem]:
    """The dimensions are d, t, p, c, e and v, in lower case."""
    for dim in _dims(member):
        if dim.letter in DIMENSIONS:
            continue
        guess = _LONG_NAMES.get(dim.letter.lower(), dim.letter.lower())
        if guess not in DIMENSIONS and (close := get_close_matches(guess, _LONG_NAMES, n=1)):
            guess = _LONG_NAMES[close[0]]
        letters = ", ".join(f"{letter} ({word})" for letter, word in DIMENSIONS.items())
        help = f"did you mean `{guess}{dim.count}`?" if guess in DIMENSIONS else f"the letters are {letters}"
        yield Problem(f"`{_short(dim.letter)}` is not a dimension", (dim.span,), help)


@rule("ALLOC-LETTER-TWICE", source=_LANGUAGE)
def letter_once(member: Engine) -> Iterator[Problem]:
    """A letter that stands twice in one layout has no single meaning."""
    for _, dims in _parts(member):
        for letter, times in Counter(dim.letter for dim in dims).items():
            if times > 1 and letter in DIMENSIONS:
                same = [dim for dim in dims if dim.letter == letter]
                texts = " and ".join(f"`{_short(str(dim))}`" for dim in same[:3]) + (" …" if times > 3 else "")
                spans = (same[1].span, same[0].span, *(dim.span for dim in same[2:]))
                yield Problem(f"letter {letter} is written {_times(times)}: {texts}", spans)


@rule("ALLOC-LETTER-BACKEND", source="the backends' own options: fsdp has no pipeline, a server no context")
def letter_of_backend(member: Engine) -> Iterator[Problem]:
    """Each backend has its own dimensions; one that it lacks would be accepted and do nothing. A size of 1 does
    nothing anywhere, so it may be written."""
    for dim in _dims(member):
        if dim.letter in DIMENSIONS and dim.letter not in member.backend.letters and dim.count != "1":
            others = " or ".join(
                b.name for b in BACKENDS.values() if dim.letter in b.letters and b.kind == member.backend.kind
            )
            message = f"{member.backend.name} has no {DIMENSIONS[dim.letter]} parallelism, but `{_short(str(dim))}` asks for it"
            yield Problem(message, (dim.span,), f"use {others}" if others else f"leave `{_short(str(dim))}` out")


@rule("ALLOC-LETTER-PLACE", source="Megatron-LM core/parallel_state.py:479: one grid never has both EP and CP")
def letter_in_place(member: Engine) -> Iterator[Problem]:
    """In a folded layout c and v belong to `attn`, e to `ffn`."""
    for part, dims in _parts(member):
        for dim in dims:
            if (part == "attn" and dim.letter == "e") or (part == "ffn" and dim.letter in "cv"):
                other = "ffn" if part == "attn" else "attn"
                yield Problem(
                    f"`{_short(str(dim))}` does not belong in `{part}`", (dim.span,), f"write it in `{other}`"
                )


@rule("ALLOC-FOLD-BACKEND", source="parallel folding, arXiv 2504.14960: a Megatron feature")
def folding_backend(member: Engine) -> Iterator[Problem]:
    """Only Megatron gives the experts a grid of their own."""
    if member.node.layout.ffn is not None and not member.backend.folds:
        yield Problem(f"{member.backend.name} has no folded layout", (member.node.layout.span,), "use megatron")


@rule("ALLOC-COUNT-MISSING", source=_LANGUAGE)
def count_written(member: Engine) -> Iterator[Problem]:
    """Every letter has its count; 1 is never implied by a bare letter."""
    for dim in _dims(member):
        if not dim.count and dim.letter in DIMENSIONS:
            yield Problem(f"`{dim.letter}` has no count", (dim.span,), f"write for example `{dim.letter}2`")


@rule("ALLOC-COUNT-ZERO", source=_LANGUAGE)
def count_positive(member: Engine) -> Iterator[Problem]:
    """A size counts ranks, so it is at least 1."""
    for dim in _dims(member):
        if dim.count and not dim.count.strip("0"):
            yield Problem(f"`{_short(str(dim))}` is not a size: sizes start at 1", (dim.span,))


@rule("ALLOC-COUNT-LEADING-ZERO", source=_LANGUAGE)
def count_in_one_spelling(member: Engine) -> Iterator[Problem]:
    """A number has one spelling: `d01` is more likely a slip for another number than a 1."""
    for dim in _dims(member):
        if dim.count.startswith("0") and (digits := dim.count.lstrip("0")):
            help = f"write `{_short(dim.letter + digits)}`"
            yield Problem(f"`{_short(str(dim))}` has a leading zero", (dim.span,), help)


@rule("ALLOC-COUNT-LARGE", source=_LANGUAGE)
def count_bounded(member: Engine) -> Iterator[Problem]:
    """Numbers beyond 10^18 are mistakes, and reading them exactly would cost time."""
    for dim in _dims(member):
        if dim.count.strip("0") and dim.count != "*" and count(dim) is None:
            yield Problem(f"`{_short(str(dim))}` is larger than {LARGEST:.0e}".replace("e+", "e"), (dim.span,))


@rule("ALLOC-STAR-LETTER", source=_LANGUAGE)
def star_on_d(member: Engine) -> Iterator[Problem]:
    """Only the data-parallel size can follow from the cluster: the others change what a replica is."""
    for part, dims in _parts(member):
        for dim in dims:
            if dim.count == "*" and (dim.letter != "d" or part == "ffn"):
                yield Problem(
                    f"`*` cannot stand on `{_short(dim.letter)}`", (dim.span,), "`d*` alone takes what is left"
                )


@rule("ALLOC-GPU-RANGE", source=_LANGUAGE)
def gpu_ranges(member: Engine) -> Iterator[Problem]:
    """A range of GPU ids runs upwards and names each GPU once; the order of the ranges is the rank order."""
    reached = -1
    for gpus in sorted(member.node.gpus, key=lambda gpus: int(gpus.first)):
        first, last = int(gpus.first), int(gpus.last)
        if max(first, last) > LARGEST:
            yield Problem(f"`{_short(str(gpus))}` is not a GPU id", (gpus.span,))
        elif first > last:
            yield Problem(f"`{gpus}` runs backwards", (gpus.span,), f"write `{last}-{first}`")
        elif first <= reached:
            yield Problem(f"`{gpus}` names a GPU a second time", (gpus.span,))
        reached = max(reached, last)


@rule(
    "ALLOC-FOLD-PIPELINE",
    source="Megatron-LM core/parallel_state.py:904",
    megatron="pipeline_model_parallel_size",
)
def same_pipeline(member: Engine) -> Iterator[Problem]:
    """Attention and experts of a layer live on the same stage, so both grids have the same pipeline."""
    if "ffn_pp" in member.written and member.backend is not UNKNOWN_BACKEND:
        attn, ffn = member.pp, member.size("ffn_pp")
        if attn != ffn:
            yield Problem(
                f"pipeline sizes differ: {attn} in attn and {ffn} in ffn",
                (member.written["ffn_pp"].span, *(member.spans("pp") if "pp" in member.written else ())),
                "leave p out of ffn: it is inherited",
            )


def _times(number: int) -> str:
    return "twice" if number == 2 else f"{number} times"


def _short(text: str) -> str:
    return text if len(text) <= 24 else text[:20] + "…"
