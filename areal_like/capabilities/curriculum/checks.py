"""Checks of the curriculum: its bounds, its column, and that prompts are visited more than once."""

from collections.abc import Iterator, Sequence

from allocation.diagnostics import Finding
from areal_like.capabilities.curriculum.schema import CurriculumConfig, CurriculumKeys
from areal_like.core.config.findings import finding, nearest_words
from areal_like.core.config.keys import with_keys
from areal_like.core.types import Prompt, value_at
from areal_like.known import Known
from areal_like.preflight.exclusions import SEVERAL
from areal_like.preflight.prompt_results import check_visits

_SECTION = "train_dataset.curriculum"


def _is_set(known: Known) -> bool:
    each = known.config.adapted.values()
    return any(with_keys(own.train_dataset, CurriculumKeys).curriculum for own in each)


_SINGLE = "it orders the prompts of a single policy"
EXCLUDES = (SEVERAL.excludes("a curriculum", _is_set, _SINGLE, f"{_SECTION}=null", _SECTION),)


def check_curriculum(known: Known) -> Iterator[Finding]:
    """Check the curriculum of a run; several adapters have none."""
    config = known.config
    section = with_keys(config.train_dataset, CurriculumKeys).curriculum
    if section is not None and not config.adapters:
        prompts = known.prompts[""]
        yield from _check_section(section, prompts)
        name_column = f", or name a column with few values in {_SECTION}.field"
        yield from check_visits(config, prompts, _SECTION, section.field, more=name_column)


def _check_section(section: CurriculumConfig, prompts: Sequence[Prompt]) -> Iterator[Finding]:
    if section.low >= section.high:
        message = f"no mean reward is between {section.low:g} (low) and {section.high:g} (high)"
        help = f"write {_SECTION}.high={section.low + 0.5:g}, or a lower {_SECTION}.low"
        yield finding("RUN-CURRICULUM", f"{_SECTION}.high", message, help)
    field = section.field
    if field is None:
        return
    without = next((prompt for prompt in prompts if value_at(prompt.row, field) is None), None)
    if without is not None:
        message = f"row {without.sample_id + 1} has no column {field}, by which rows share a mean reward"
        help = f"name a column of every row, or write {_SECTION}.field=null"
        nearest = nearest_words(field, map(str, without.row))
        yield finding("RUN-CURRICULUM", f"{_SECTION}.field", message, help, nearest=nearest)
