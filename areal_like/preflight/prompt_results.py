"""Checks of what depends on the results of earlier steps by prompt: the curriculum and single rollouts."""

from collections.abc import Iterator, Sequence

from allocation.diagnostics import Finding, Severity
from areal_like.algorithms.types import Algorithm
from areal_like.config.findings import finding, nearest_words
from areal_like.config.schema import CurriculumConfig, RunConfig
from areal_like.data.dataset import training_steps
from areal_like.data.prompt_values import prompt_keys
from areal_like.data.rows import value_at
from areal_like.types import Prompt

_SECTION = "train_dataset.curriculum"


def check_prompt_results(
    config: RunConfig, algorithm: Algorithm | None, prompts: Sequence[Prompt]
) -> Iterator[Finding]:
    """Check the curriculum's bounds and column, and that prompts are visited more than once where that matters."""
    section = config.train_dataset.curriculum
    if section is not None:
        yield from _curriculum(section, prompts)
    has_values = algorithm is not None and "baselines" in algorithm.needs
    if prompts and (section is not None or has_values):
        yield from _visits(config, prompts, has_values=has_values)


def _curriculum(section: CurriculumConfig, prompts: Sequence[Prompt]) -> Iterator[Finding]:
    if section.low >= section.high:
        message = f"no mean reward is between {section.low:g} (low) and {section.high:g} (high)"
        help = f"write {_SECTION}.high={section.low + 0.5:g}, or a lower {_SECTION}.low"
        yield finding("RUN-CURRICULUM-BOUNDS", f"{_SECTION}.high", message, help)
    field = section.field
    if field is None:
        return
    without = next((prompt for prompt in prompts if value_at(prompt.row, field) is None), None)
    if without is not None:
        message = f"row {without.sample_id + 1} has no column {field}, by which rows share a mean reward"
        help = f"name a column of every row, or write {_SECTION}.field=null"
        nearest = nearest_words(field, map(str, without.row))
        yield finding("RUN-CURRICULUM-FIELD", f"{_SECTION}.field", message, help, nearest=nearest)


def _visits(config: RunConfig, prompts: Sequence[Prompt], *, has_values: bool) -> Iterator[Finding]:
    """Warn of a run in which hardly any prompt comes twice, so that earlier results are missing."""
    section = config.train_dataset.curriculum
    users: dict[str, str | None] = {} if section is None else {_SECTION: section.field}
    users |= {"algorithm": None} if has_values else {}
    visits = training_steps(config, len(prompts)) * config.train_dataset.batch_size
    for key, field in users.items():
        different = int(prompt_keys(prompts, field).max()) + 1
        if visits <= different:
            what = "prompts" if field is None else f"values of {field}"
            message = f"the run visits {visits} of {different} different {what}, so hardly any has earlier results"
            help = "raise total_train_epochs or total_train_steps"
            help += f", or name a column with few values in {_SECTION}.field" if key == _SECTION else ""
            yield finding("RUN-PROMPTS-ONCE", key, message, help, severity=Severity.WARNING)
