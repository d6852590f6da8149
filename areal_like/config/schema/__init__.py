"""The configuration of a run as one typed tree; imports neither torch nor the engine.

Names follow AReaL's published configuration where one exists. Every field states its unit; a rule that spans
several fields lives in `preflight/`, so that all of its findings come together.
"""

from areal_like.config.ignored import Ignored, Place
from areal_like.config.schema.actor import ALL_LINEAR, ActorConfig, BehaviourMode, KLEstimator, NormConfig
from areal_like.config.schema.adapters import AdapterConfig
from areal_like.config.schema.backends import PRECISIONS, FSDPConfig, MegatronConfig, RecomputedModule
from areal_like.config.schema.chat_judge import ChatJudgeConfig
from areal_like.config.schema.data import (
    ArithmeticConfig,
    DatasetConfig,
    EvaluationConfig,
    EvaluatorConfig,
    MixtureConfig,
    SourceConfig,
    TrainDatasetConfig,
    ValidDatasetConfig,
)
from areal_like.config.schema.machines import ClusterConfig, SchedulerConfig
from areal_like.config.schema.outputs import (
    MLflowConfig,
    RecoverConfig,
    SaverConfig,
    StatsLoggerConfig,
    SwanLabConfig,
    WandBConfig,
)
from areal_like.config.schema.rewards import JudgeConfig, RewardConfig, RewardModelConfig, RewardPartConfig
from areal_like.config.schema.roles import CriticConfig, ReferenceConfig, RoleConfig, SchedulingStrategyConfig
from areal_like.config.schema.rollout import (
    MOST_KEPT,
    OWN_FILES,
    SERVER_RESERVE,
    GenerationConfig,
    RolloutConfig,
    SGLangConfig,
    WeightUpdateConfig,
)
from areal_like.config.schema.run import SCORERS, RunConfig, evaluation_name
from areal_like.config.schema.teacher import TeacherConfig
from areal_like.config.schema.trainer import (
    DType,
    EngineConfig,
    InitModelConfig,
    MicroBatchConfig,
    OptimizerConfig,
    TrainerRole,
    WarmStartConfig,
)
from areal_like.config.section import LEAST_TEMPERATURE, Section
