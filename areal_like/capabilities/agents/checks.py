"""Checks of the user's own workflow: it exists, a run can call it, and its settings are valid."""

import ssl
from collections.abc import Iterator
from itertools import pairwise

from allocation.diagnostics import Finding
from areal_like.capabilities.agents.forms import Level, WorkflowError, level_of
from areal_like.capabilities.agents.schema import EpisodeConfig
from areal_like.capabilities.agents.settings import branch_of, episode_of
from areal_like.core.algorithms.settings import PRESETS, settings_of
from areal_like.core.config.findings import finding, nearest_words, warn_ignored
from areal_like.core.config.schema import RewardConfig, RunConfig
from areal_like.core.rollout.backends import backend_of
from areal_like.core.user_code import Portable, UserCodeError, load_object
from areal_like.known import Known
from areal_like.runtime.ports import reserve_port

KEY = "rollout.branch"


def check_branches(config: RunConfig, *, per_group: bool) -> Iterator[Finding]:
    """Check that the samples of a group can branch as required; a workflow `per_group` makes them itself."""
    branch, n = branch_of(config), config.gconfig.n_samples
    if branch is None:
        return
    if any(later <= earlier for earlier, later in pairwise(branch.after)):
        message = f"branching points must be in ascending order; {branch.after} is not"
        yield finding("RUN-BRANCH", f"{KEY}.after", message, f"write {KEY}.after={sorted(set(branch.after))}")
    if n % branch.per_root:
        message = (
            f"{len(branch.after)} branching points with {branch.width} continuations make {branch.per_root} samples of one, "
            f"and n_samples={n} is not a multiple of it"
        )
        more = -(-n // branch.per_root) * branch.per_root
        yield finding("RUN-BRANCH", f"gconfig.n_samples + {KEY}", message, f"write gconfig.n_samples={more}")
    yield from _check_length(config, max(branch.after))
    if per_group:
        message = "the workflow runs whole groups itself, so the run cannot share their turns"
        yield finding("RUN-BRANCH", KEY, message, f"write {KEY}=null, or a workflow of one episode")
    yield from _check_algorithm(config)


def _check_length(config: RunConfig, last: int) -> Iterator[Finding]:
    """Check that a sample can be longer than the last branching point."""
    has_turns = config.played_by is not None
    key = "episode.max_turns" if has_turns else "gconfig.max_new_tokens"
    most = episode_of(config).max_turns if has_turns else config.gconfig.max_new_tokens
    if last >= most:
        unit = "turns" if has_turns else "tokens"
        message = f"no sample branches after {last} {unit}, because {key} is {most}"
        yield finding("RUN-BRANCH", f"{KEY}.after", message, f"use smaller branching points, or raise {key}")


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
    yield finding("RUN-BRANCH", f"algorithm + {KEY}", why, help)


_WILDCARDS = ("0.0.0.0", "::")


def check_workflow(known: Known) -> Iterator[Finding]:
    """Load every workflow and look at its parameters; it is not run.

    A dry run, which may be on another host, does not try the address of the endpoint.
    """
    config, episode, levels = known.config, episode_of(known.config), dict[str, Level]()
    for key, reference in config.workflows.items():
        try:
            levels[key] = level_of(load_object(reference))
            Portable.pack(reference)
        except UserCodeError as error:
            yield finding("RUN-WORKFLOW", key, str(error))
        except WorkflowError as error:
            yield finding("RUN-WORKFLOW", key, f"{reference} cannot be called: {error}")
    yield from check_branches(config, per_group=levels.get("workflow") == "group")
    if not config.workflows:
        return
    if episode.endpoint:
        yield from _endpoint(episode, dry_run=known.dry_run)
    grades = episode.on_timeout == "grade"
    if grades and levels and "episode" not in levels.values():
        yield warn_ignored("episode.on_timeout", "the workflow runs whole groups, not episodes")
    judges = grades or any(data.played_by is None for data in config.evaluations.values())
    if levels.get("workflow") == "episode" and not judges and config.reward != RewardConfig():
        yield warn_ignored("reward", "the workflow returns the reward of an episode itself")
    name, parsers = episode.tool_call_parser, backend_of(config).tool_call_parsers()
    if name is not None and name not in parsers:
        help = f"choose one of {', '.join(parsers)}"
        message = f"SGLang has no tool-call parser {name!r}"
        yield finding("RUN-WORKFLOW", "episode.tool_call_parser", message, help, nearest=nearest_words(name, parsers))


def scores_episodes(config: RunConfig, reference: str) -> bool:
    """Return whether episodes that reach a limit are graded; episodes of groups are not.

    A workflow that cannot be loaded counts as a workflow of episodes: a finding reports it.
    """
    if episode_of(config).on_timeout != "grade":
        return False
    try:
        return level_of(load_object(reference)) == "episode"
    except (UserCodeError, WorkflowError):
        return True


def _endpoint(episode: EpisodeConfig, *, dry_run: bool) -> Iterator[Finding]:
    """Check that the endpoint can listen on its address, and that its certificate and key belong together."""
    if host_problem := None if dry_run else _host_problem(episode.endpoint_host):
        help = "name an address of this host, or write episode.endpoint_host=auto"
        yield finding("RUN-ENDPOINT", "episode.endpoint_host", host_problem, help)
    certificate, key = episode.endpoint_certificate, episode.endpoint_key
    if certificate is None and key is None:
        return
    problem = "the certificate and its key are needed together" if None in (certificate, key) else None
    try:
        if certificate and key:
            no_password = b""  # an encrypted key fails, instead of asking at the terminal
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, lambda: no_password)
    except (OSError, ssl.SSLError) as error:
        problem = f"the certificate and its key cannot be used: {error}"
    if problem:
        help = (
            "set episode.endpoint_certificate and episode.endpoint_key to PEM files of one certificate, with the key not "
            "encrypted, or both to null"
        )
        yield finding("RUN-ENDPOINT", "episode.endpoint_certificate", problem, help)


def _host_problem(host: str | None) -> str | None:
    """Return why the endpoint cannot listen on an address, or agents could not reach it there."""
    if host in (None, "auto"):
        return None
    if host in _WILDCARDS:
        return f"agents cannot reach {host}, which stands for every address of a host"
    try:
        reserve_port(str(host)).close()
    except OSError as error:
        return f"this host cannot listen on {host}: {error.strerror}"
    return None
