"""Rules about the words of one member: backends, names, letters, counts and GPU ids."""

from collections import Counter
from collections.abc import Iterator
from difflib import get_close_matches

from allocation.backends import BACKENDS, UNKNOWN_BACKEND
from allocation.diagnostics import Problem
from allocation.language.syntax import LARGEST, Dim
from allocation.registry import LANGUAGE, STATE, rule
from allocation.resolve import Engine, count

DIMENSIONS = {"d": "data", "t": "tensor", "p": "pipeline", "c": "context", "e": "expert", "v": "virtual pipeline"}
_LONG_NAMES = {
    "dp": "d", "data": "d", "tp": "t", "tensor": "t", "mp": "t", "pp": "p", "pipeline": "p", "cp": "c", "sp": "c",
    "context": "c", "ep": "e", "expert": "e", "vp": "v", "vpp": "v", "etp": "t", "edp": "d",
}  # fmt: skip


def _problem_at(dim: Dim, message: str, help: str | None = None) -> Problem:
    """Return a problem of one dimension, which replaces `{}` in the message."""
    return Problem(message.format(f"`{_short(str(dim))}`"), (dim.span,), help)


@rule("ALLOC-BACKEND", source=LANGUAGE)
def backend_known(member: Engine) -> Iterator[Problem]:
    """A member starts with one of the known backends."""
    word = member.node.backend
    if word.text not in BACKENDS:
        guess = member.backend.name
        known = ", ".join(f"`{name}`" for name in BACKENDS)
        help = f"did you mean `{guess}`?" if guess else f"the backends are {known}"
        if word.text == "ffn":
            help = "a folded layout with `|` needs parentheses: `megatron:(attn:…|ffn:…)`"
        yield Problem(f"unknown backend `{word}`", (word.span,), help)


@rule("ALLOC-NAME-RESERVED", source=LANGUAGE)
def name_reserved(member: Engine) -> Iterator[Problem]:
    """A name must not be a word of the language; the string would be ambiguous."""
    name = member.node.name
    if name and name.text in (*BACKENDS, "attn", "ffn"):
        yield Problem(f"`{name}` is a reserved word and cannot be a name", (name.span,))


@rule("ALLOC-LETTER", source=LANGUAGE)
def letter_known(member: Engine) -> Iterator[Problem]:
    """The dimensions are d, t, p, c, e and v, in lower case."""
    for _, dim in member.dims:
        if dim.letter in DIMENSIONS:
            continue
        guess = _LONG_NAMES.get(dim.letter.lower(), dim.letter.lower())
        if guess not in DIMENSIONS and (close := get_close_matches(guess, _LONG_NAMES, n=1)):
            guess = _LONG_NAMES[close[0]]
        letters = ", ".join(f"{letter} ({word})" for letter, word in DIMENSIONS.items())
        help = f"did you mean `{guess}{dim.count}`?" if guess in DIMENSIONS else f"the letters are {letters}"
        yield Problem(f"`{_short(dim.letter)}` is not a dimension", (dim.span,), help)


@rule("ALLOC-LETTER-TWICE", source=LANGUAGE)
def letter_once(member: Engine) -> Iterator[Problem]:
    """A letter must not appear twice in one layout."""
    for (part, letter), times in Counter((part, dim.letter) for part, dim in member.dims).items():
        if times > 1 and letter in DIMENSIONS:
            first, second, *more = (dim for other, dim in member.dims if (other, dim.letter) == (part, letter))
            texts = " and ".join(f"`{_short(str(dim))}`" for dim in (first, second, *more[:1]))
            message = f"letter {letter} is written {'twice' if times == 2 else f'{times} times'}: {texts}"
            yield Problem(message + " …" * (times > 3), tuple(dim.span for dim in (second, first, *more)))


@rule("ALLOC-LETTER-BACKEND", source="the backends' own options: fsdp has no pipeline, a server no context")
def letter_of_backend(member: Engine) -> Iterator[Problem]:
    """Each backend has its own dimensions; an unsupported one would be accepted and ignored.

    A size of 1 has no effect, so it may be written.
    """
    for _, dim in member.dims:
        if dim.letter in DIMENSIONS and dim.letter not in member.backend.letters and dim.count != "1":
            others = " or ".join(
                b.name for b in BACKENDS.values() if dim.letter in b.letters and b.kind == member.backend.kind
            )
            message = f"{member.backend.name} has no {DIMENSIONS[dim.letter]} parallelism, but {{}} requests it"
            yield _problem_at(dim, message, f"use {others}" if others else f"leave `{_short(str(dim))}` out")


@rule("ALLOC-LETTER-PLACE", source="Megatron-LM core/parallel_state.py:479: one grid never has both EP and CP")
def letter_in_place(member: Engine) -> Iterator[Problem]:
    """In a folded layout c and v belong to `attn`, e to `ffn`."""
    for part, dim in member.dims if member.node.layout.ffn else ():
        if dim.letter in {"attn": "e", "ffn": "cv"}[part]:
            yield _problem_at(
                dim, f"{{}} does not belong in `{part}`", f"write it in `{'ffn' if part == 'attn' else 'attn'}`"
            )


@rule("ALLOC-FOLD-BACKEND", source="parallel folding, arXiv 2504.14960: a Megatron feature")
def folding_backend(member: Engine) -> Iterator[Problem]:
    """Only Megatron has a separate grid for the experts."""
    if member.node.layout.ffn is not None and not member.backend.folds:
        yield Problem(f"{member.backend.name} has no folded layout", (member.node.layout.span,), "use megatron")


@rule("ALLOC-COUNT-MISSING", source=LANGUAGE)
def count_written(member: Engine) -> Iterator[Problem]:
    """Every letter has its count; 1 is never implied by a bare letter."""
    for _, dim in member.dims:
        if not dim.count and dim.letter in DIMENSIONS:
            yield _problem_at(dim, "{} has no count", f"write for example `{dim.letter}2`")


@rule("ALLOC-COUNT-ZERO", source=LANGUAGE)
def count_positive(member: Engine) -> Iterator[Problem]:
    """A size counts ranks, so it is at least 1."""
    for _, dim in member.dims:
        if dim.count and not dim.count.strip("0"):
            yield _problem_at(dim, "{} is not a size: sizes start at 1")


@rule("ALLOC-COUNT-LEADING-ZERO", source=LANGUAGE)
def count_in_one_spelling(member: Engine) -> Iterator[Problem]:
    """A number has one spelling: `d01` is more likely a typing error than a 1."""
    for _, dim in member.dims:
        if dim.count.startswith("0") and (digits := dim.count.lstrip("0")):
            yield _problem_at(dim, "{} has a leading zero", f"write `{_short(dim.letter + digits)}`")


@rule("ALLOC-COUNT-LARGE", source=LANGUAGE)
def count_bounded(member: Engine) -> Iterator[Problem]:
    """Numbers beyond 10^18 are typing errors, and exact arithmetic on them would be slow."""
    for _, dim in member.dims:
        if dim.count.strip("0") and dim.count != "*" and count(dim) is None:
            yield _problem_at(dim, f"{{}} is larger than {LARGEST:.0e}".replace("e+", "e"))


@rule("ALLOC-STAR-LETTER", source=LANGUAGE)
def star_on_d(member: Engine) -> Iterator[Problem]:
    """Only the data-parallel size can follow from the cluster: the other sizes change the replica."""
    for part, dim in member.dims:
        if dim.count == "*" and (dim.letter != "d" or part == "ffn"):
            yield _problem_at(
                dim, f"`*` is not allowed on `{_short(dim.letter)}`", "only `d*` takes the remaining GPUs"
            )


@rule("ALLOC-GPU-RANGE", source=LANGUAGE)
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
            yield Problem(f"`{gpus}` repeats a GPU", (gpus.span,))
        reached = max(reached, last)


@rule("ALLOC-FOLD-PIPELINE", source=f"{STATE}:904", megatron="pipeline_model_parallel_size")
def same_pipeline(member: Engine) -> Iterator[Problem]:
    """Attention and experts of a layer are on the same stage, so both grids have the same pipeline."""
    if "ffn_pp" in member.written and member.backend is not UNKNOWN_BACKEND:
        attn, ffn = member.pp, member.ffn_pp
        if attn != ffn:
            message = f"pipeline sizes differ: {attn} in attn and {ffn} in ffn"
            yield Problem(message, member.spans("ffn_pp", "pp"), "leave p out of ffn: it is inherited")


def _short(text: str) -> str:
    return text if len(text) <= 24 else text[:20] + "…"
