"""The configuration of a run as one typed tree; imports neither torch nor the engine.

Names follow AReaL's published configuration where one exists. Every field states its unit; a rule that spans
several fields lives in `preflight/`, so that all of its findings come together.
"""

from areal_like.core.config.ignored import Ignored, Place
from areal_like.core.config.schema.actor import (
    ALL_LINEAR,
    ActorConfig,
    AdapterConfig,
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
from areal_like.core.config.schema.run import SCORERS, RunConfig, evaluation_name
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
    RecomputedModule,
    ReferenceConfig,
    RoleConfig,
    SchedulingStrategyConfig,
    TrainerRole,
    WarmStartConfig,
)
from areal_like.core.config.section import LEAST_TEMPERATURE, Section
