"""Prompts: `train_dataset`, `valid_dataset` and `evaluator`."""

import os
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StringConstraints

from areal_like.config.added import takes_keys
from areal_like.config.ignored import Ignored
from areal_like.config.section import PATH, TEMPERATURE, Section

_SET_NAME = StringConstraints(pattern=r"^\w[\w.-]*$", max_length=64)


def _template_variables(variables: dict[str, Any]) -> dict[str, Any]:
    """Check variables of a chat template, without those that a run gives it."""
    if taken := {"messages", "tools", "chat_template", "add_generation_prompt"} & variables.keys():
        raise ValueError(f"variables of the template without {', '.join(sorted(taken))}, which the run gives it")
    return variables


_FILE = Ignored("`path` is a file or an object", lambda at: _is_file(at.section.path))
_NOT_HUB = Ignored(
    "`path` is not a Hugging Face dataset", lambda at: _is_local(at.section.path) or at.section.path == "arithmetic"
)
_NOT_ARITHMETIC = Ignored("`path` is not `arithmetic`", lambda at: at.section.path != "arithmetic")
_ONE_SET = Ignored("there is one set of prompts (`mixture`)", lambda at: not at.section.mixture)
_GREEDY = Ignored(
    "all evaluations are greedy (`evaluator.temperature: 0`)",
    lambda at: not any(data.temperature for data in at.run.evaluations.values()),
)
_GREEDY_SET = Ignored(
    "the evaluations of this set are greedy (`temperature: 0`)",
    lambda at: not (at.run.evaluator.temperature if at.section.temperature is None else at.section.temperature),
)
_NOT_EVALUATED = Ignored("nothing is evaluated", lambda at: not at.run.evaluates)


def _is_file(path: str | list[str]) -> bool:
    """Return whether a path is a file or an object (my_data.py:rows); a folder or a list has splits too."""
    return isinstance(path, str) and (path.endswith((".jsonl", ".json", ".gz", ".parquet")) or ":" in path)


def _is_local(path: str | list[str]) -> bool:
    return not isinstance(path, str) or _is_file(path) or os.path.isdir(path)


class ArithmeticConfig(Section):
    """The generated word problems of `path: arithmetic`."""

    max_number: int = Field(20, ge=2, le=999)
    """Largest operand."""
    size: int = Field(8192, ge=1, le=10**7)
    """Number of problems."""
    seed: int = Field(0, ge=0)
    """Seed of the generator; training and test questions never overlap."""


class SourceConfig(Section):
    """Rows, and how a prompt is built from one. Reward and workflow receive all columns."""

    path: Annotated[str, PATH] | Annotated[list[Annotated[str, PATH]], Field(min_length=1)]
    """A file (`.jsonl`, `.json`, `.jsonl.gz`, `.json.gz`, `.parquet`), a folder, a pattern such as `data/*.parquet`, or
    a list of these; a Hugging Face dataset such as `openai/gsm8k`, `arithmetic`, or your own object `my_data.py:rows`
    with `__len__` and `__getitem__`, or a function that returns one."""
    name: Annotated[str | None, _NOT_HUB] = None
    """Configuration of a Hugging Face dataset, such as `main`."""
    split: Annotated[str, _FILE] = "train"
    """Split of a Hugging Face dataset or of a folder whose files name splits; `train` or `test` of `arithmetic`."""
    prompt_field: str = "question"
    """Field with the problem: text, a list of messages (`role`, `content`), or such a list as JSON text. Dots reach
    nested fields."""
    last_assistant: Literal["refuse", "continue", "drop"] = "refuse"
    """What happens to a last message of the assistant, where the solution often stands. `refuse`: the run does not
    start; `continue`: responses continue its text; `drop`: it is left out."""
    answer_field: str = "answer"
    """Field with the reference answer, such as `reward_model.ground_truth`; required if the reward has a `type`."""
    image_field: str | None = "images"
    """Field with a row's images, for models that see them: paths (relative to the file), encoded bytes, PIL images, or
    objects with `bytes` or `path`. `<image>` in the text is the place of one. null: none."""
    system_prompt: str | None = None
    """System message for prompts without one; null: none. A text prompt becomes a conversation."""
    prompt_suffix: str = ""
    """Text appended to the last message, or to a text prompt."""
    tools: list[dict[str, Any]] = Field([])
    """Tools for the chat template, as JSON schemas in OpenAI's format."""
    tools_field: str | None = None
    """Field with a row's own tools, a list or a list as JSON text, instead of `tools`; null: none."""
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_template_variables)] = Field({})
    """Variables of the chat template, such as `enable_thinking: false`."""
    arithmetic: Annotated[ArithmeticConfig, _NOT_ARITHMETIC] = ArithmeticConfig()
    """Settings of `path: arithmetic`."""

    @property
    def label(self) -> str:
        """The path in messages."""
        return self.path if isinstance(self.path, str) else ", ".join(self.path)


class DatasetConfig(SourceConfig):
    """Source of prompts and their maximum length."""

    max_prompt_length: int = Field(1024, ge=1)
    """Maximum prompt length in tokens."""
    overlong_prompts: Literal["refuse", "drop", "truncate"] = "refuse"
    """What happens to longer prompts. `refuse`: the run does not start; `drop`: their rows are skipped; `truncate`:
    their last `max_prompt_length` tokens are kept. A warning reports how many."""


class MixtureConfig(SourceConfig):
    """One more set of prompts."""

    weight: float = Field(1.0, gt=0)
    """Share of the prompts, relative to the other weights."""


@takes_keys("train_dataset")
class TrainDatasetConfig(DatasetConfig):
    """Training prompts."""

    batch_size: int = Field(64, ge=1)
    """Prompts per training step; each yields `gconfig.n_samples` samples."""
    shuffle: bool = True
    """Visit the prompts in a new seeded order in every epoch."""
    mixture: dict[str, MixtureConfig] = Field({})
    """More sets by name, sampled together with `path` by `weight`."""
    weight: Annotated[float, _ONE_SET] = Field(1.0, gt=0)
    """Share of the prompts of `path`, relative to those of `mixture`."""

    @property
    def weights(self) -> dict[str, float] | None:
        """The weight of each set by its name, "" for `path`'s; None where there is only that."""
        further = {name: source.weight for name, source in self.mixture.items()}
        return {"": self.weight, **further} if further else None


@takes_keys("valid_dataset")
class ValidDatasetConfig(DatasetConfig):
    """Evaluation prompts."""

    split: Annotated[str, _FILE] = "test"
    """Split of a Hugging Face dataset or of a folder whose files name splits; `train` or `test` of `arithmetic`."""
    max_samples: int | None = Field(None, ge=1)
    """Number of prompts, from the first one; null: all."""

    @property
    def played_by(self) -> str | None:
        """The workflow in the place of the built-in one, as a capability's keys have it; None without."""
        return None


class EvaluationConfig(ValidDatasetConfig):
    """One more set of evaluation prompts; null means the evaluator's value."""

    n_samples: int | None = Field(None, ge=1)
    """Responses per prompt; null: `evaluator.n_samples`."""
    temperature: Annotated[float | None, TEMPERATURE] = Field(None, ge=0)
    """Softmax temperature, 0 is greedy; null: `evaluator.temperature`."""
    top_p: Annotated[float | None, _GREEDY_SET] = Field(None, gt=0, le=1)
    """Nucleus: share of the probability mass that is sampled from; null: `evaluator.top_p`."""
    top_k: Annotated[int | None, _GREEDY_SET] = Field(None, ge=-1)
    """Number of the likeliest ids that are sampled from, -1 or 0: no limit; null: `evaluator.top_k`."""
    max_new_tokens: int | None = Field(None, ge=1)
    """Maximum response length in tokens; null: `evaluator.max_new_tokens`."""


class EvaluatorConfig(Section):
    """Evaluation: when and how prompts are answered; `valid_dataset` is one set, `datasets` adds more."""

    freq_steps: int | None = Field(None, ge=1)
    """Training steps between two evaluations; null: none."""
    n_samples: Annotated[int, _NOT_EVALUATED] = Field(1, ge=1)
    """Responses per prompt: the n of mean@n and the largest k of pass@k."""
    temperature: Annotated[float, TEMPERATURE, _NOT_EVALUATED] = Field(0.0, ge=0)
    """Softmax temperature in evaluations; 0 is greedy."""
    top_p: Annotated[float, _NOT_EVALUATED, _GREEDY] = Field(1.0, gt=0, le=1)
    """Nucleus in evaluations: share of the probability mass that is sampled from."""
    top_k: Annotated[int, _NOT_EVALUATED, _GREEDY] = Field(-1, ge=-1)
    """Number of the likeliest ids that are sampled from in evaluations; -1 or 0: no limit."""
    max_new_tokens: Annotated[int | None, _NOT_EVALUATED] = Field(None, ge=1)
    """Maximum response length in tokens; null: `gconfig.max_new_tokens`."""
    pass_reward: Annotated[float, _NOT_EVALUATED] = 1.0
    """Minimum reward with which a response passes (pass@k)."""
    at_start: bool = True
    """Evaluate before the first training step."""
    at_end: bool = True
    """Evaluate after the last training step."""
    datasets: dict[Annotated[str, _SET_NAME], EvaluationConfig] = Field({})
    """More sets by name: the keys of `valid_dataset`, and `n_samples`, `temperature`, `top_p`, `top_k` and
    `max_new_tokens` where they differ."""
