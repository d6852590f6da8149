"""Prompts: `train_dataset`, `valid_dataset` and `evaluator`."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StringConstraints

from areal_like.config.schema.section import PATH, TEMPERATURE, Section

_SET_NAME = StringConstraints(pattern=r"^\w[\w.-]*$", max_length=64)


def _template_variables(variables: dict[str, Any]) -> dict[str, Any]:
    """Variables of a chat template, without those that a run gives it."""
    if taken := {"messages", "tools", "chat_template", "add_generation_prompt"} & variables.keys():
        raise ValueError(f"variables of the template without {', '.join(sorted(taken))}, which the run gives it")
    return variables


class ArithmeticConfig(Section):
    """The generated word problems of `path: arithmetic`."""

    max_number: int = Field(20, ge=2, le=999, description="Largest operand.")
    size: int = Field(8192, ge=1, le=10**7, description="Number of problems.")
    seed: int = Field(0, ge=0, description="Seed of the generator; train and test never share a question.")


class SourceConfig(Section):
    """Rows, and how a prompt is made of one. All of its columns reach reward and workflow."""

    path: Annotated[str, PATH] = Field(
        description="A JSONL or Parquet file, a Hugging Face dataset name such as `openai/gsm8k`, `arithmetic`, or "
        "`my_data.py:rows`: an object with `__len__` and `__getitem__`, or a function that returns one."
    )
    name: str | None = Field(None, description="Configuration of a Hugging Face dataset, such as `main`.")
    split: str = Field("train", description="Split of a Hugging Face dataset; `train` or `test` of `arithmetic`.")
    prompt_field: str = Field(
        "question",
        description="Field that holds the problem: text, or a list of messages (`role`, `content`). Dots reach into "
        "nested fields.",
    )
    answer_field: str = Field(
        "answer",
        description="Field that holds the reference answer, such as `reward_model.ground_truth`; needed where the "
        "reward has a `type`.",
    )
    system_prompt: str | None = Field(
        None, description="System message of prompts that have none; null: none. It makes a conversation of a text."
    )
    prompt_suffix: str = Field("", description="Text added to the end of the last message, or of a text.")
    tools: list[dict[str, Any]] = Field(
        [], description="Tools that the chat template is given, as JSON schemas in OpenAI's form."
    )
    tools_field: str | None = Field(None, description="Field with a row's own tools, in place of `tools`; null: none.")
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_template_variables)] = Field(
        {}, description="Variables of the chat template, such as `enable_thinking: false`."
    )
    arithmetic: ArithmeticConfig = Field(ArithmeticConfig(), description="Settings of `path: arithmetic`.")


class DatasetConfig(SourceConfig):
    """Where prompts come from and how long they may be."""

    max_prompt_length: int = Field(1024, ge=1, description="Longest prompt, in tokens.")
    overlong_prompts: Literal["refuse", "drop", "truncate"] = Field(
        "refuse",
        description="What is done with longer ones. `refuse`: the run does not start; `drop`: their rows are left out; "
        "`truncate`: their last `max_prompt_length` tokens are kept. How many, a warning says.",
    )


class MixtureConfig(SourceConfig):
    """A further set of prompts."""

    weight: float = Field(1.0, gt=0, description="Share of the prompts, relative to the weights of the others.")


class TrainDatasetConfig(DatasetConfig):
    """The prompts that are trained on."""

    batch_size: int = Field(64, ge=1, description="Prompts per training step; each gives `gconfig.n_samples` samples.")
    shuffle: bool = Field(True, description="Visit the prompts in a new seeded order every epoch.")
    mixture: dict[str, MixtureConfig] = Field(
        {}, description="Further sets by name, drawn from beside `path`'s by their `weight`."
    )
    weight: float = Field(1.0, gt=0, description="Share of the prompts of `path`, relative to those of `mixture`.")

    @property
    def weights(self) -> dict[str, float] | None:
        """The weight of each set by its name, "" for `path`'s; None where there is only that."""
        further = {name: source.weight for name, source in self.mixture.items()}
        return {"": self.weight, **further} if further else None


class ValidDatasetConfig(DatasetConfig):
    """The held-out prompts that are only evaluated on."""

    split: str = Field("test", description="Split of a Hugging Face dataset; `train` or `test` of `arithmetic`.")
    max_samples: int | None = Field(None, ge=1, description="Evaluate on the first this many prompts; null: on all.")
    workflow: str | None = Field(
        None,
        description="Workflow that this set is evaluated with, as `workflow` names one; `single_turn`: the built-in one; "
        "null: the run's.",
    )


class EvaluationConfig(ValidDatasetConfig):
    """One of several sets of held-out prompts; what is null here is the evaluator's."""

    n_samples: int | None = Field(None, ge=1, description="Responses per prompt; null: `evaluator.n_samples`.")
    temperature: Annotated[float | None, TEMPERATURE] = Field(
        None, ge=0, description="Softmax temperature, 0 is greedy; null: `evaluator.temperature`."
    )
    max_new_tokens: int | None = Field(
        None, ge=1, description="Longest response, in tokens; null: `evaluator.max_new_tokens`."
    )


class EvaluatorConfig(Section):
    """When held-out prompts are evaluated, and how; `valid_dataset` is one set of them, `datasets` are further ones."""

    freq_steps: int | None = Field(None, ge=1, description="Training steps between two evaluations; null: none.")
    n_samples: int = Field(1, ge=1, description="Responses per prompt: the n of mean@n, and the largest k of pass@k.")
    temperature: Annotated[float, TEMPERATURE] = Field(
        0.0, ge=0, description="Softmax temperature of evaluation; 0 is greedy."
    )
    max_new_tokens: int | None = Field(
        None, ge=1, description="Longest response, in tokens; null: `gconfig.max_new_tokens`."
    )
    pass_reward: float = Field(1.0, description="A response passes, for pass@k, where its reward is at least this.")
    at_start: bool = Field(True, description="Evaluate before the first training step.")
    at_end: bool = Field(True, description="Evaluate after the last training step.")
    datasets: dict[Annotated[str, _SET_NAME], EvaluationConfig] = Field(
        {},
        description="Further sets by name: the keys of `valid_dataset`, and `n_samples`, `temperature` and "
        "`max_new_tokens` where they differ from the evaluator's.",
    )
