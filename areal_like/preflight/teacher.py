"""Checks of the teacher: its use, its files, its layout and positions, and that its tokens are the policy's."""

import os
from collections.abc import Iterator, Sequence

from allocation.diagnostics import Finding
from allocation.model_spec import ModelSpec
from allocation.plan import Plan
from areal_like.algorithms.types import Algorithm
from areal_like.config.findings import finding, nearest_words, warn_ignored
from areal_like.config.schema import SERVER_RESERVE, RunConfig, TeacherConfig
from areal_like.data.dataset import hinted_tokens
from areal_like.data.rows import value_at
from areal_like.data.tokenizer import Tokenizer, TokenizerError
from areal_like.preflight.model import find_spec
from areal_like.preflight.served_layout import check_served_layout
from areal_like.preflight.weights import is_local
from areal_like.types import Prompt


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
            yield finding("RUN-TEACHER-MISSING", "teacher", message, help)
        return
    if algorithm is not None and not asked:
        why = "the algorithm does not use a teacher (actor.teacher_coef is 0)"
        yield warn_ignored("teacher", why, "write algorithm=distill, or actor.teacher_coef=0.1")
    yield from _where(config, teacher)
    if tokenizer is not None and tokenizer.vision is not None:
        yield from _images(config, prompts)
    if teacher.path is not None and teacher.is_served:
        spec, findings = find_spec(teacher.path, "teacher.path")
        yield from findings
        if spec is not None:
            yield from check_served_layout(config, "teacher", teacher.backend, spec, plan)
            yield from _positions(config, teacher, spec, tokenizer, prompts)
    if teacher.top_k is not None and tokenizer is not None and teacher.top_k > tokenizer.vocab_size:
        message = f"the teacher cannot return {teacher.top_k} ids of a vocabulary of {tokenizer.vocab_size}"
        yield finding(
            "RUN-TEACHER-TOP-K-MANY", "teacher.top_k", message, f"write teacher.top_k={min(8, tokenizer.vocab_size)}"
        )
    if teacher.path is not None and tokenizer is not None and is_local(teacher.path):
        yield from _tokenizer(teacher.path, tokenizer)
    if teacher.hint_field is not None:
        yield from _hint(config, teacher.hint_field, prompts)


def _images(config: RunConfig, prompts: Sequence[Prompt]) -> Iterator[Finding]:
    """Check that a teacher, who scores tokens alone, needs no images: of the data, or of an agent's messages."""
    pictured = next((prompt for prompt in prompts if prompt.images), None)
    if pictured is None and config.played_by is None:
        return
    where = "an agent's messages may have images" if pictured is None else f"row {pictured.sample_id + 1} has images"
    message = f"a teacher scores the tokens of text alone, and {where}"
    help = "take a model of text alone as actor.path, or train without a teacher"
    yield finding("RUN-TEACHER-IMAGES", "teacher", message, help)


def _where(config: RunConfig, teacher: TeacherConfig) -> Iterator[Finding]:
    places = [teacher.path is not None, teacher.url is not None, teacher.from_policy]
    if sum(places) != 1:
        message = "the teacher is a model (teacher.path), a running server (teacher.url) or the policy "
        message += f"(teacher.from_policy), and {'several are' if any(places) else 'none is'} set"
        help = "set one of these keys, and leave the others null"
        yield finding("RUN-TEACHER-WHERE", "teacher.path", message, help)
    if teacher.from_policy:
        yield from _from_policy(config, teacher)
    if teacher.url is None and not teacher.from_policy:
        return
    yield from _elsewhere(config, teacher)


def _from_policy(config: RunConfig, teacher: TeacherConfig) -> Iterator[Finding]:
    """Check that the policy as its own teacher knows more than the policy, and that its servers always answer."""
    if teacher.hint_field is None:
        message = "the policy teaches itself (teacher.from_policy), and without a hint it would learn what it knows"
        help = "write teacher.hint_field=…, a column such as the reference answer"
        yield finding("RUN-TEACHER-SELF", "teacher.hint_field", message, help)
    if config.rollout.alternates:
        message = "servers that share the trainer's GPUs in time slices cannot score while the trainer runs"
        yield finding("RUN-TEACHER-SELF-SHARING", "teacher.from_policy", message, "write rollout.sharing=resident")


def _elsewhere(config: RunConfig, teacher: TeacherConfig) -> Iterator[Finding]:
    """Check a teacher on servers that do not score at the policy's temperature."""
    if teacher.url is not None and teacher.api == "openai" and teacher.top_k is not None:
        message = "OpenAI's completions name likely tokens by their texts, not by ids, so teacher.top_k cannot be used"
        help = "write teacher.top_k=null, or teacher.api=sglang for a server of SGLang"
        yield finding("RUN-TEACHER-TOP-K", "teacher.top_k", message, help)
    if teacher.url is not None and teacher.api == "openai" and teacher.model is None:
        message = "requests of teacher.api=openai name a model, and teacher.model is null"
        help = "write teacher.model=…, one of the names that the server lists at /v1/models"
        yield finding("RUN-TEACHER-MODEL", "teacher.model", message, help)
    if config.gconfig.temperature != 1:
        place = "the policy's server" if teacher.from_policy else "a server at teacher.url"
        message = f"{place} scores at temperature 1, and the policy samples at {config.gconfig.temperature:g}"
        help = "write gconfig.temperature=1.0, or let the run start the teacher (teacher.path)"
        yield finding("RUN-TEACHER-TEMPERATURE", "gconfig.temperature", message, help)
    if teacher.url is not None and teacher.token_variable is not None and teacher.token_variable not in os.environ:
        message = f"the environment variable {teacher.token_variable} is not set"
        help = f"export {teacher.token_variable} before the start, or write teacher.token_variable=null"
        yield finding("RUN-TEACHER-TOKEN", "teacher.token_variable", message, help)


def _positions(
    config: RunConfig,
    teacher: TeacherConfig,
    spec: ModelSpec,
    tokenizer: Tokenizer | None,
    prompts: Sequence[Prompt],
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
        yield finding("RUN-TEACHER-POSITIONS", "teacher.path", message, help)
    elif (
        teacher.hint_field and tokenizer and (found := _longest_hinted(config, teacher.hint_field, tokenizer, prompts))
    ):
        prompt, n_tokens = found
        needed = n_tokens + config.gconfig.max_new_tokens
        if needed > room:
            message = f"row {prompt.sample_id + 1} with its hint has {n_tokens} tokens, and its response up to "
            message += f"{config.gconfig.max_new_tokens}; the teacher has {spec.max_positions} positions"
            help = f"shorten the hints, or use a teacher with {needed + SERVER_RESERVE} positions"
            yield finding("RUN-TEACHER-HINT-LENGTH", "teacher.hint_field", message, help)


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
        yield finding("RUN-TEACHER-TOKENIZER", "teacher.path", f"the teacher's tokenizer {problem}", help)


def _hint(config: RunConfig, field: str, prompts: Sequence[Prompt]) -> Iterator[Finding]:
    problem, near, help = None, list[str](), "name a column of every row, or write teacher.hint_field=null"
    without = next((prompt for prompt in prompts if value_at(prompt.row, field) is None), None)
    if config.played_by is not None:
        problem = "hints are added to single-turn prompts only, and the run has a workflow"
        help = "write teacher.hint_field=null"
    elif without is not None:
        problem = f"row {without.sample_id + 1} has no column {field}"
        near = nearest_words(field, without.row)
    if problem:
        yield finding("RUN-TEACHER-HINT", "teacher.hint_field", problem, help, nearest=near)
