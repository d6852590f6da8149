"""Checks of the teacher: its use, its files, its layout and positions, and that its tokens are the policy's."""

from collections.abc import Iterator, Sequence

from allocation.diagnostics import Finding
from allocation.model_spec import ModelSpec
from allocation.plan import Plan
from areal_like.core.algorithms.types import Algorithm
from areal_like.core.config.findings import check_variable, finding, nearest_words, warn_ignored
from areal_like.core.config.schema import SERVER_RESERVE, RunConfig, TeacherConfig
from areal_like.core.types import Prompt, value_at
from areal_like.data.dataset import hinted_tokens
from areal_like.data.tokenizer import Tokenizer, TokenizerError
from areal_like.preflight.model import find_spec
from areal_like.preflight.served_layout import check_served_layout
from areal_like.preflight.weights import is_local


def check_teacher(
    config: RunConfig,
    algorithm: Algorithm | None,
    tokenizer: Tokenizer | None,
    prompts: Sequence[Prompt],
    plan: Plan | None,
) -> Iterator[Finding]:
    """Check the section `teacher`: its use, its place, its files and layout, and the policy's tokenizer and rows."""
    teacher, asked = config.teacher, algorithm is not None and "teacher" in algorithm.needs
    if teacher is None:
        if asked:
            why = "actor.teacher_coef" if config.actor.teacher_coef else f"algorithm={config.algorithm}"
            message = f"{why} needs the log-probs of a teacher, and the section teacher is missing"
            help = "write teacher.path=… and teacher.backend=sglang:d1, or teacher.url=…"
            yield finding("RUN-ALGORITHM-MODELS", "teacher", message, help)
        return
    if algorithm is not None and not asked:
        why = "the algorithm does not use a teacher (actor.teacher_coef is 0)"
        yield warn_ignored("teacher", why, "write algorithm=distill, or actor.teacher_coef=0.1")
    yield from _where(teacher)
    if teacher.url is not None:
        yield from check_variable("teacher.token_variable", teacher.token_variable)
    if teacher.path is not None and teacher.is_served:
        spec, findings = find_spec(teacher.path, "teacher.path")
        yield from findings
        if spec is not None:
            yield from check_served_layout(config, "teacher", teacher.backend, spec, plan)
            yield from _positions(config, teacher, spec, tokenizer, prompts)
    if teacher.top_k is not None and tokenizer is not None and teacher.top_k > tokenizer.vocab_size:
        message = f"the teacher cannot return {teacher.top_k} ids of a vocabulary of {tokenizer.vocab_size}"
        yield finding(
            "RUN-TEACHER-FILES", "teacher.top_k", message, f"write teacher.top_k={min(8, tokenizer.vocab_size)}"
        )
    if teacher.path is not None and tokenizer is not None and is_local(teacher.path):
        yield from _tokenizer(teacher.path, tokenizer)
    if teacher.hint_field is not None and config.played_by is None:
        yield from _hint(teacher.hint_field, prompts)


def _where(teacher: TeacherConfig) -> Iterator[Finding]:
    places = [teacher.path is not None, teacher.url is not None, teacher.from_policy]
    if sum(places) != 1:
        message = "the teacher is a model (teacher.path), a running server (teacher.url) or the policy "
        message += f"(teacher.from_policy), and {'several are' if any(places) else 'none is'} set"
        help = "set one of these keys, and leave the others null"
        yield finding("RUN-TEACHER", "teacher.path", message, help)


def _positions(
    config: RunConfig, teacher: TeacherConfig, spec: ModelSpec, tokenizer: Tokenizer | None, prompts: Sequence[Prompt]
) -> Iterator[Finding]:
    """Check that the longest sequence, and the longest prompt with its hint, fit the teacher's positions."""
    room = spec.max_positions - SERVER_RESERVE
    if not spec.max_positions:
        return
    if config.longest_sequence > room:
        message = (
            f"sequences of {config.longest_sequence} tokens do not fit the teacher's {spec.max_positions} positions"
        )
        help = (
            f"use a teacher with {config.longest_sequence + SERVER_RESERVE} positions, or shorten prompts and responses"
        )
        yield finding("RUN-TEACHER-FILES", "teacher.path", message, help)
    elif (
        teacher.hint_field and tokenizer and (found := _longest_hinted(config, teacher.hint_field, tokenizer, prompts))
    ):
        prompt, n_tokens = found
        needed = n_tokens + config.gconfig.max_new_tokens
        if needed > room:
            message = f"row {prompt.sample_id + 1} with its hint has {n_tokens} tokens, and its response up to "
            message += f"{config.gconfig.max_new_tokens}; the teacher has {spec.max_positions} positions"
            help = f"shorten the hints, or use a teacher with {needed + SERVER_RESERVE} positions"
            yield finding("RUN-TEACHER-FILES", "teacher.hint_field", message, help)


def _longest_hinted(
    config: RunConfig, field: str, tokenizer: Tokenizer, prompts: Sequence[Prompt]
) -> tuple[Prompt, int] | None:
    """Return the prompt with the longest text of prompt and hint, and its tokens; None without hints."""
    with_hint = [prompt for prompt in prompts if value_at(prompt.row, field) is not None]
    if config.played_by is not None or not with_hint:
        return None
    longest = max(with_hint, key=lambda prompt: len(str(value_at(prompt.row, field))) + len(prompt.tokens))
    return longest, len(hinted_tokens(config.train_dataset, tokenizer, longest, field))


def _tokenizer(path: str, tokenizer: Tokenizer) -> Iterator[Finding]:
    """Check that a token id is the same text for the teacher and the policy."""
    try:
        own = Tokenizer.load(path).backend.get_vocab()
        other = [word for word, number in tokenizer.backend.get_vocab().items() if own.get(word) != number]
        problem = f"differs from the policy's in {len(other)} tokens, such as {other[0]!r}" if other else None
    except TokenizerError as error:
        problem = f"cannot be read: {error}"
    if problem:
        help = "use a model of the policy's family, with its tokenizer.json beside it"
        yield finding("RUN-TEACHER-FILES", "teacher.path", f"the teacher's tokenizer {problem}", help)


def _hint(field: str, prompts: Sequence[Prompt]) -> Iterator[Finding]:
    without = next((prompt for prompt in prompts if value_at(prompt.row, field) is None), None)
    if without is not None:
        message, nearest = f"row {without.sample_id + 1} has no column {field}", nearest_words(field, without.row)
        help = "name a column of every row, or set teacher.hint_field=null"
        yield finding("RUN-TEACHER", "teacher.hint_field", message, help, nearest=nearest)
