"""The configuration of a run as one typed tree, with its root; imports neither torch nor the engine.

Names follow AReaL's published configuration where one exists. Every field states its unit; a rule that spans
several fields lives in `preflight/`, so that all of its findings come together.
"""

import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from areal_like.core.config.added import takes_keys
from areal_like.core.config.ignored import Ignored, Place
from areal_like.core.config.schema.actor import (
    ALL_LINEAR,
    ActorConfig,
    AdapterConfig,
    Adapters,
    BehaviourMode,
    KLEstimator,
    NormConfig,
)
from areal_like.core.config.schema.data import (
    ArithmeticConfig,
    DatasetConfig,
    EvaluationConfig,
    EvaluatorConfig,
    MixtureConfig,
    SourceConfig,
    TrainDatasetConfig,
    ValidDatasetConfig,
)
from areal_like.core.config.schema.machines import ClusterConfig, SchedulerConfig
from areal_like.core.config.schema.outputs import (
    MLflowConfig,
    RecoverConfig,
    SaverConfig,
    StatsLoggerConfig,
    SwanLabConfig,
    WandBConfig,
)
from areal_like.core.config.schema.rewards import (
    ChatJudgeConfig,
    JudgeConfig,
    RewardConfig,
    RewardModelConfig,
    RewardPartConfig,
    TeacherConfig,
)
from areal_like.core.config.schema.rollout import (
    MOST_KEPT,
    OWN_FILES,
    SERVER_RESERVE,
    GenerationConfig,
    RolloutConfig,
    SGLangConfig,
    WeightUpdateConfig,
)
from areal_like.core.config.schema.trainer import (
    PRECISIONS,
    CriticConfig,
    DType,
    EngineConfig,
    FSDPConfig,
    InitModelConfig,
    MegatronConfig,
    MicroBatchConfig,
    OptimizerConfig,
    ReferenceConfig,
    RoleConfig,
    TrainerRole,
    WarmStartConfig,
)
from areal_like.core.config.section import LEAST_TEMPERATURE, NAME, PATH, Section

SCORERS = {
    "reward": "reward.model",
    "teacher": "teacher",
    "judge": "reward.judge",
}  # the section of each engine that only scores


@takes_keys("")
class RunConfig(Section):
    """One run of asynchronous reinforcement learning."""

    experiment_name: Annotated[str, NAME] = Field(pattern=r"^\w[\w.-]*$")
    """First part of the run's directory."""
    trial_name: Annotated[str, NAME] = Field("", pattern=r"^(\w[\w.-]*)?$")
    """Second part of the run's directory; empty: that of the unfinished run of the same command (`recover.mode`), or
    the start time."""
    seed: int = Field(1, ge=0, lt=2**32)
    """Seed of weights, data order and sampling."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: CUDA if this host has a GPU, else CPU."""
    allocation_mode: str | None = None
    """Layout of the whole run, such as `sglang:d1|megatron:d1`; null: each role's `backend`."""
    total_train_epochs: int = Field(1, ge=1)
    """Passes over the training prompts."""
    total_train_steps: int | None = Field(None, ge=1)
    """Maximum training steps; null: no limit."""
    algorithm: str = "grpo"
    """`grpo`, `dr_grpo`, `dapo`, `rloo`, `reinforce_pp`, `gspo`, `cispo`, `cpgd`, `gmpo`, `sapo`, `topr`,
    `turn_reinforce`, `gigpo`, `ppo`, `distill`, `single_rollout`, `dpo`, `sft`, or your own function: `my_file.py:make`
    or `package.module:make` (see [algorithms](algorithms.md))."""
    tokenizer_path: Annotated[str | None, PATH] = None
    """Tokenizer in Hugging Face form; null: the model's own."""

    cluster: ClusterConfig = ClusterConfig()
    """Machines."""
    scheduler: SchedulerConfig = SchedulerConfig()
    """Ray cluster."""
    train_dataset: TrainDatasetConfig
    """Training prompts."""
    valid_dataset: ValidDatasetConfig | None = None
    """Evaluation prompts."""
    gconfig: GenerationConfig = GenerationConfig()
    """Sampling."""
    reward: RewardConfig = RewardConfig()
    """Scoring."""
    actor: ActorConfig
    """Trainer."""
    adapters: Adapters = Field({})
    """Several adapters of one base (`actor.use_lora`), by name, each trained on its own data; `{}`: one adapter (see
    [several adapters](lora.md#several-adapters))."""
    ref: ReferenceConfig | None = None
    """Reference model; null: none."""
    critic: CriticConfig | None = None
    """Critic; null: none."""
    teacher: TeacherConfig | None = None
    """Teacher of distillation; null: none."""
    rollout: RolloutConfig = RolloutConfig()
    """Rollout."""
    sglang: SGLangConfig = SGLangConfig()
    """Servers."""
    weight_update: WeightUpdateConfig = WeightUpdateConfig()
    """Weight transport."""
    warm_start: WarmStartConfig | None = None
    """Supervised training first; null: none."""
    evaluator: EvaluatorConfig = EvaluatorConfig()
    """Evaluation."""
    saver: SaverConfig = SaverConfig()
    """Checkpoints."""
    recover: RecoverConfig = RecoverConfig()
    """Resuming an interrupted run."""
    stats_logger: StatsLoggerConfig = StatsLoggerConfig()
    """Logging."""

    @cached_property
    def adapted(self) -> Mapping[str, "RunConfig"]:
        """The configuration of a run with each of `adapters` alone, by name; empty without them."""
        values = self.model_dump()
        return {name: RunConfig.model_validate(adapter.merge_into(values)) for name, adapter in self.adapters.items()}

    @property
    def prompts_per_step(self) -> int:
        """Prompts of a training step, of all adapters together."""
        each = self.adapted.values() or (self,)
        return sum(config.train_dataset.batch_size for config in each)

    @property
    def spare_groups(self) -> int:
        """Groups that may start beyond the trained ones."""
        return math.ceil(self.rollout.oversampling * self.train_dataset.batch_size)

    @property
    def run_dir(self) -> Path:
        """Directory of everything this run writes: absolute, as every process has a working directory of its own."""
        return Path(self.cluster.fileroot).absolute() / self.experiment_name / self.trial_name

    @property
    def host_timeout_s(self) -> float | None:
        """Seconds after which a silent host of servers is lost; None on one host, which cannot be."""
        return None if self.scheduler.type == "local" else self.cluster.host_timeout_s

    @property
    def trainer_restarts(self) -> int:
        """Restarts of the trainer per hour; 0 without checkpoints, and with time-shared GPUs."""
        return 0 if self.recover.mode == "off" or self.rollout.alternates else self.recover.restarts_per_hour

    @property
    def base_is_reference(self) -> bool:
        """Whether the reference is the actor without its adapters, as an empty section asks for nothing else."""
        elsewhere = self.warm_start is not None or "ref" in (self.allocation_mode or "")
        return self.actor.use_lora and self.ref == ReferenceConfig() and not elsewhere

    @property
    def further_roles(self) -> Mapping[TrainerRole, RoleConfig]:
        """The sections of the roles on trainer ranks beside the actor, as far as the run has them."""
        ref = None if self.base_is_reference else self.ref
        sections: dict[TrainerRole, RoleConfig | None] = {"ref": ref, "critic": self.critic}
        return {role: section for role, section in sections.items() if section is not None}

    @property
    def scorers(self) -> Mapping[str, RewardModelConfig | TeacherConfig | ChatJudgeConfig]:
        """The sections of models that only score, on servers of their own, by the name of their engine."""
        judge = self.reward.judge
        sections: dict[str, RewardModelConfig | TeacherConfig | ChatJudgeConfig | None] = {
            "reward": self.reward.model,
            "teacher": self.teacher if self.teacher and self.teacher.is_served else None,
            "judge": judge if judge and judge.url is None else None,
        }
        return {role: section for role, section in sections.items() if section is not None}

    @property
    def roles(self) -> Mapping[TrainerRole, EngineConfig]:
        """The models on trainer ranks, the actor first, each with the actor's settings where it has none of its own.

        A role without `path` has the actor's model, and its weights where it names no checkpoint of its own.
        """
        engines: dict[TrainerRole, EngineConfig] = {"actor": self.actor}
        for role, section in self.further_roles.items():
            fields = {name: _own_or(section, self.actor, name) for name in EngineConfig.model_fields}
            own = section.megatron or MegatronConfig()
            start = own if section.path or own.use_dist_checkpointing else self.actor.megatron
            weights = {name: getattr(start, name) for name in ("use_dist_checkpointing", "dist_checkpointing_path")}
            engines[role] = EngineConfig(**{**fields, "megatron": fields["megatron"].model_copy(update=weights)})
        return engines

    def optimizer(self, role: TrainerRole) -> OptimizerConfig | None:
        """Return the role's optimizer; None for one that is not trained."""
        if role == "critic" and self.critic is not None:
            return self.critic.optimizer or self.actor.optimizer
        return self.actor.optimizer if role == "actor" else None

    def updates(self, role: TrainerRole, steps: int) -> int:
        """Return the optimizer steps of a role's learning-rate schedule in a run of this many training steps.

        The first training steps may train a critic alone.
        """
        optimizer = self.optimizer(role)
        if optimizer and optimizer.lr_decay_steps is not None:
            return optimizer.lr_decay_steps
        without = self.critic.warmup_steps if role == "actor" and self.critic else 0
        epochs = self.actor.ppo_epochs if role == "actor" else 1
        return max(0, steps - without) * self.actor.ppo_n_minibatches * epochs

    @property
    def longest_sequence(self) -> int:
        """Most tokens of a trained sequence: a prompt and its response, or an episode's."""
        if self.adapted:
            return max(config.longest_sequence for config in self.adapted.values())
        if self.played_by is not None and self.longest_episode is not None:
            return self.longest_episode
        prompts = [self.train_dataset.max_prompt_length]
        if self.valid_dataset is not None and self.warm_start is not None:  # which ends by the evaluation reward
            prompts.append(self.valid_dataset.max_prompt_length)
        return max(prompts) + self.gconfig.max_new_tokens

    # Keys of a capability that has workflows overrule the next four.

    @property
    def played_by(self) -> str | None:
        """The workflow of training prompts in the place of the built-in one; None without."""
        return None

    @property
    def workflows(self) -> dict[str, str]:
        """All workflows in the place of the built-in one, by the keys that name them."""
        return {}

    @property
    def longest_episode(self) -> int | None:
        """Most tokens of a trajectory of these workflows; None: a prompt and its response."""
        return None

    @property
    def set_defaults(self) -> dict[str, Any]:
        """Values of the keys that a capability adds to evaluation sets, where a set has none of its own."""
        return {}

    @property
    def evaluations(self) -> dict[str, EvaluationConfig]:
        """Evaluation sets by name, with every setting; `valid_dataset` under this name.

        Each adapter has sets of its own: `math` is `valid_dataset` of the adapter `math`, `math.NAME` another set.
        """
        if self.adapted:
            return {
                evaluation_name(adapter, name): data
                for adapter, config in self.adapted.items()
                for name, data in config.evaluations.items()
            }
        own: dict[str, ValidDatasetConfig | None] = {"valid_dataset": self.valid_dataset, **self.evaluator.datasets}
        common = {
            "n_samples": self.evaluator.n_samples,
            "temperature": self.evaluator.temperature,
            "top_p": self.evaluator.top_p,
            "top_k": self.evaluator.top_k,
            "max_new_tokens": self.evaluator.max_new_tokens or self.gconfig.max_new_tokens,
            **self.set_defaults,
        }
        return {
            name: EvaluationConfig.model_validate(common | data.model_dump(exclude_none=True))
            for name, data in own.items()
            if data is not None
        }

    @property
    def evaluates(self) -> bool:
        """Whether there are evaluation prompts, and a time at which they are evaluated."""
        times = self.evaluator
        return bool(self.evaluations) and (times.at_start or times.at_end or times.freq_steps is not None)

    @property
    def longest_generated(self) -> int:
        """Most tokens of a prompt and its response, evaluation prompts included."""
        evaluated = (data.max_prompt_length + (data.max_new_tokens or 0) for data in self.evaluations.values())
        return max(self.longest_sequence, *evaluated, self.longest_episode or 0)

    @property
    def context_length(self) -> int:
        """Positions of a server's context, in tokens."""
        return self.sglang.context_length or self.longest_generated + SERVER_RESERVE


def evaluation_name(adapter: str, name: str) -> str:
    """Return the name of an adapter's evaluation set among the sets of all adapters."""
    return adapter if name == "valid_dataset" else f"{adapter}.{name}"


def _own_or(section: RoleConfig, actor: ActorConfig, name: str) -> Any:
    """Return a role's setting, or the actor's where it is null; but a role's layout is never taken for another's."""
    if name == "freeze_vision_tower":
        return actor.freeze_vision_tower
    if name not in type(section).model_fields:  # a critic computes values, so it has no output layer of logits
        return EngineConfig.model_fields[name].get_default()
    own = getattr(section, name)
    return getattr(actor, name) if own is None and name not in ("backend", "path") else own
