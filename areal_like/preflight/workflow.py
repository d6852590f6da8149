"""The user's own workflow: is it there, has it a form that a run can call, and are its settings known?"""

from collections.abc import Iterator

from allocation import Finding
from areal_like.config.findings import finding, nearest_words, warn_ignored
from areal_like.config.schema import SINGLE_TURN, RewardConfig, RunConfig
from areal_like.rollout.sglang.options import tool_call_parsers
from areal_like.runtime.user_code import Portable, UserCodeError, load_object
from areal_like.workflows.make import Level, WorkflowError, level_of


def check_workflow(config: RunConfig) -> Iterator[Finding]:
    """Load every workflow and look at its parameters; it is not run."""
    levels: dict[str, Level] = {}
    for key, reference in config.workflows.items():
        try:
            levels[key] = level_of(load_object(reference))
            Portable.of(reference)
        except UserCodeError as error:
            yield finding("RUN-WORKFLOW-LOAD", key, str(error))
        except WorkflowError as error:
            yield finding("RUN-WORKFLOW-FORM", key, f"{reference} cannot be called: {error}")
    if not config.workflows:
        return
    single = any(data.workflow == SINGLE_TURN for data in config.evaluations.values())
    if levels.get("workflow") == "episode" and not single and config.reward != RewardConfig():
        yield warn_ignored("reward", "the workflow returns the reward of an episode itself")
    name, known = config.episode.tool_call_parser, tool_call_parsers()
    if name is not None and name not in known:
        help = f"choose one of {', '.join(known)}"
        message = f"SGLang has no tool-call parser {name!r}"
        yield finding(
            "RUN-WORKFLOW-TOOL-PARSER", "episode.tool_call_parser", message, help, nearest=nearest_words(name, known)
        )
