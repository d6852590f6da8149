"""Checks of the reward model, a classifier that SGLang scores with, and of its files."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from allocation.diagnostics import Finding
from areal_like.config.findings import finding
from areal_like.config.schema import RewardModelConfig, RunConfig
from areal_like.data.tokenizer import Tokenizer, TokenizerError
from areal_like.preflight.weights import is_local
from areal_like.rollout.sglang.classifier import CLASSES
from areal_like.types import Prompt

_PATH = "reward.model.path"


def check_reward_model(config: RunConfig, prompts: Sequence[Prompt]) -> Iterator[Finding]:
    """Check that a reward model is set exactly if one is used, has one label and encodes the first row."""
    asked = [key for key, judge in config.reward.judges.items() if judge.function is None and judge.type == "model"]
    model = config.reward.model
    if model is None:
        for key in asked:
            message = "the reward comes from a reward model, and the section reward.model is missing"
            help = "write reward.model.path=… and reward.model.backend=sglang:d1"
            yield finding("RUN-REWARD-MODEL", f"{key}.type", message, help)
        return
    if not asked:
        message = "no reward uses this model"
        help = "write reward.type=model, or `type: model` for one of reward.parts"
        yield finding("RUN-REWARD-MODEL", "reward.model", message, help)
    if is_local(model.path):  # a name on the hub is looked at once it is downloaded
        yield from _files(model, prompts)


def _files(model: RewardModelConfig, prompts: Sequence[Prompt]) -> Iterator[Finding]:
    try:
        described = json.loads(Path(model.path, "config.json").read_text())
        tokenizer = Tokenizer.load(model.path)
    except (OSError, ValueError) as error:
        message = f"config.json cannot be read: {error}"
        yield finding("RUN-REWARD-MODEL", _PATH, message, "write the directory of a classifier")
        return
    except TokenizerError as error:
        help = "put the tokenizer's files beside the model"
        yield finding("RUN-REWARD-MODEL", _PATH, str(error), help)
        return
    names, labels = described.get("architectures") or ["missing"], len(described.get("id2label") or {0: "", 1: ""})
    if names[0] not in CLASSES:
        message = f"its architecture is {names[0]}; supported classifiers are {', '.join(CLASSES)}"
        help = "use one of these, or a reward function of your own (reward.function)"
        yield finding("RUN-REWARD-MODEL", _PATH, message, help)
    elif labels != 1:
        message = f"it has {labels} labels; a reward model must have exactly one"
        yield finding("RUN-REWARD-MODEL", _PATH, message, "use a model with one label")
    for prompt in prompts[:1]:
        try:
            tokenizer.encode_chat(
                [*prompt.messages(), {"role": "assistant", "content": "x"}], add_generation_prompt=False
            )
        except TokenizerError as error:
            message = f"row {prompt.sample_id + 1} with a response cannot be encoded: {error}"
            help = "correct chat_template.jinja beside the reward model"
            yield finding("RUN-REWARD-MODEL", _PATH, message, help)
