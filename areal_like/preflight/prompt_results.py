"""Checks of features that depend on the results of earlier steps by prompt, such as single rollouts."""

from collections.abc import Iterator, Sequence

from allocation.diagnostics import Finding, Severity
from areal_like.core.config.findings import finding
from areal_like.core.config.schema import RunConfig
from areal_like.core.loop.prompt_results import prompt_keys
from areal_like.core.types import Prompt
from areal_like.data.dataset import training_steps


def check_visits(
    config: RunConfig, prompts: Sequence[Prompt], key: str, field: str | None = None, *, more: str = ""
) -> Iterator[Finding]:
    """Warn of a run in which hardly any prompt, or value of `field`, comes twice, so that earlier results are missing.

    `key` is the key whose feature uses the results, `more` a further fix.
    """
    visits = training_steps(config, len(prompts)) * config.train_dataset.batch_size
    different = int(prompt_keys(prompts, field).max(initial=-1)) + 1
    if visits <= different and prompts:
        what = "prompts" if field is None else f"values of {field}"
        message = f"the run visits {visits} of {different} different {what}, so hardly any has earlier results"
        help = f"raise total_train_epochs or total_train_steps{more}"
        yield finding("RUN-PROMPTS-ONCE", key, message, help, severity=Severity.WARNING)
