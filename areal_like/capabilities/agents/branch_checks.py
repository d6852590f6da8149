"""`rollout.branch`: groups that have these branches, and an algorithm that reads their trees."""

from collections.abc import Iterator
from itertools import pairwise

from allocation.diagnostics import Finding
from areal_like.algorithms.settings import PRESETS, settings_of
from areal_like.capabilities.agents.settings import branch_of, episode_of
from areal_like.config.findings import finding
from areal_like.config.schema import RunConfig

KEY = "rollout.branch"


def check_branches(config: RunConfig, *, per_group: bool) -> Iterator[Finding]:
    """Check that the samples of a group can branch as required; a workflow `per_group` makes them itself."""
    branch, n = branch_of(config), config.gconfig.n_samples
    if branch is None:
        return
    if any(later <= earlier for earlier, later in pairwise(branch.after)):
        message = f"branching points must be in ascending order; {branch.after} is not"
        yield finding("RUN-BRANCH-ORDER", f"{KEY}.after", message, f"write {KEY}.after={sorted(set(branch.after))}")
    if n % branch.per_root:
        message = (
            f"{len(branch.after)} branching points with {branch.width} continuations make {branch.per_root} samples of one, "
            f"and n_samples={n} is not a multiple of it"
        )
        more = -(-n // branch.per_root) * branch.per_root
        yield finding("RUN-BRANCH-SAMPLES", f"gconfig.n_samples + {KEY}", message, f"write gconfig.n_samples={more}")
    yield from _check_length(config, max(branch.after))
    if per_group:
        message = "the workflow runs whole groups itself, so the run cannot share their turns"
        yield finding("RUN-BRANCH-GROUP", KEY, message, f"write {KEY}=null, or a workflow of one episode")
    yield from _check_algorithm(config)


def _check_length(config: RunConfig, last: int) -> Iterator[Finding]:
    """Check that a sample can be longer than the last branching point."""
    has_turns = config.played_by is not None
    key = "episode.max_turns" if has_turns else "gconfig.max_new_tokens"
    most = episode_of(config).max_turns if has_turns else config.gconfig.max_new_tokens
    if last >= most:
        unit = "turns" if has_turns else "tokens"
        message = f"no sample branches after {last} {unit}, because {key} is {most}"
        yield finding("RUN-BRANCH-LENGTH", f"{KEY}.after", message, f"use smaller branching points, or raise {key}")


def _check_algorithm(config: RunConfig) -> Iterator[Finding]:
    """Check that the algorithm credits a node by its children; one of the user's reads the nodes itself."""
    preset = PRESETS.get(config.algorithm)
    settings = settings_of(preset, config.actor) if preset else None
    if config.algorithm in ("dpo", "sft"):
        why = f"algorithm={config.algorithm} trains whole responses, and a shared part belongs to several"
    elif settings is not None and settings.critic:
        why = f"algorithm={config.algorithm} takes advantages from a critic, not from the values of children"
    elif settings is not None and settings.turns_alone:
        why = f"algorithm={config.algorithm} trains each turn as a sample, and a shared turn belongs to several"
    elif settings is not None and settings.discount != 1:
        why = "actor.discount discounts per token within one response, and a node belongs to several"
    else:
        return
    help = f"write algorithm=grpo with actor.discount=1, or {KEY}=null"
    yield finding("RUN-BRANCH-ALGORITHM", f"algorithm + {KEY}", why, help)
