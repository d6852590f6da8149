"""Outputs of a run: `saver`, `recover` and `stats_logger`."""

from typing import Annotated, Literal

from pydantic import Field

from areal_like.core.config.added import takes_keys
from areal_like.core.config.ignored import Ignored, ignored_if
from areal_like.core.config.section import Section

_TAKING_TURNS = Ignored(
    "trainer and servers are time-shared (`rollout.sharing: alternate`)", lambda place: place.run.rollout.alternates
)


@takes_keys("saver")
class SaverConfig(Section):
    """Hugging Face checkpoints; the last one is always written."""

    freq_steps: int | None = Field(None, ge=1)
    """Training steps between two checkpoints; null: only the last one."""
    merge_lora: Annotated[bool, ignored_if("actor.use_lora", False)] = False
    """Write the merged model beside the adapters (`actor.use_lora`)."""


class WandBConfig(Section):
    """Weights & Biases; WANDB_API_KEY and WANDB_BASE_URL are read from the environment."""

    mode: Literal["disabled", "offline", "online"] = "disabled"
    """`offline`: write to the run's directory, for `wandb sync`; `online`: send to the server."""
    project: Annotated[str | None, ignored_if("stats_logger.wandb.mode", "disabled")] = None
    """Project; null: `experiment_name`."""
    entity: Annotated[str | None, ignored_if("stats_logger.wandb.mode", "disabled")] = None
    """User or team; null: wandb's default."""
    group: Annotated[str | None, ignored_if("stats_logger.wandb.mode", "disabled")] = None
    """Group of runs; null: none."""


class SwanLabConfig(Section):
    """SwanLab."""

    mode: Literal["disabled", "local", "offline", "cloud"] = "disabled"
    """`local`, `offline`: write to the run's directory, to view or send later; `cloud`: send."""
    project: Annotated[str | None, ignored_if("stats_logger.swanlab.mode", "disabled")] = None
    """Project; null: `experiment_name`."""
    workspace: Annotated[str | None, ignored_if("stats_logger.swanlab.mode", "disabled")] = None
    """Workspace; null: swanlab's default."""


class MLflowConfig(Section):
    """MLflow."""

    tracking_uri: str | None = None
    """Server or database, such as `http://localhost:5000` or `sqlite:///mlflow.db`; null: MLflow is off."""
    experiment_name: Annotated[str | None, ignored_if("stats_logger.mlflow.tracking_uri", None)] = None
    """Experiment; null: the run's `experiment_name`."""


@takes_keys("recover")
class RecoverConfig(Section):
    """Checkpoints from which the same command resumes an interrupted run."""

    mode: Literal["off", "auto", "fault"] = "off"
    """`off`: no checkpoints; the directory of a run is never reused. `auto`: the same command resumes a run, whatever
    ended it. `fault`: it resumes only after a failure, not after the last step or Ctrl-C. With `auto` and
    `fault` the first Ctrl-C saves a checkpoint."""
    freq_steps: Annotated[int | None, ignored_if("recover.mode", "off")] = Field(None, ge=1)
    """Training steps between two recovery checkpoints; null: not by steps."""
    freq_secs: Annotated[float | None, ignored_if("recover.mode", "off")] = Field(600.0, gt=0)
    """Seconds between two recovery checkpoints; null: not by time. The last step always has one."""
    keep: Annotated[int, ignored_if("recover.mode", "off")] = Field(2, ge=1)
    """Number of recovery checkpoints to keep."""
    host_copy_gb: Annotated[float | None, ignored_if("recover.mode", "off")] = Field(None, ge=0)
    """Maximum host memory in GB for a rank's copy of its checkpoint, from which it is written while training
    continues. Tensors beyond it are written from the device in chunks, and training waits for the write; null: no
    limit. Several adapters are always copied."""
    timeout_s: Annotated[float, ignored_if("recover.mode", "off")] = Field(1800.0, gt=0)
    """Maximum seconds of writing one recovery checkpoint; a longer write ends the run."""
    restart: Annotated[bool, ignored_if("recover.mode", "off")] = False
    """Start at step 0 if the run has steps but no complete checkpoint; false: that is an error. The journal and
    incomplete checkpoints are put aside; a complete checkpoint is always resumed."""
    restarts_per_hour: Annotated[int, ignored_if("recover.mode", "off"), _TAKING_TURNS] = Field(3, ge=0)
    """Maximum restarts per hour of a trainer that lost a rank or a host: it continues from the last checkpoint while
    the servers keep running. The next loss ends the run; 0: the first one does."""
    layouts: Annotated[
        list[str],
        ignored_if("recover.mode", "off"),
        ignored_if("recover.restarts_per_hour", 0),
        ignored_if("scheduler.type", "local"),
        _TAKING_TURNS,
    ] = Field([])
    """Smaller layouts in which a trainer that lost a host restarts on its remaining ones, in order of preference:
    values of `actor.backend`, or of `allocation_mode` where that is set. Without one that fits, the trainer waits for
    hosts."""


@takes_keys("stats_logger")
class StatsLoggerConfig(Section):
    """Destinations of the metrics of each step."""

    wandb: WandBConfig = WandBConfig()
    """Weights & Biases."""
    swanlab: SwanLabConfig = SwanLabConfig()
    """SwanLab."""
    mlflow: MLflowConfig = MLflowConfig()
    """MLflow."""
    tensorboard: bool = True
    """Write TensorBoard events to the run's directory."""
    console: bool = True
    """Print progress and a table of steps."""
    console_samples: Annotated[
        int, ignored_if("stats_logger.samples", 0), ignored_if("stats_logger.console", False)
    ] = Field(2, ge=0)
    """Responses to print at each evaluation, from worst to best."""
    samples: int | None = Field(256, ge=0)
    """Samples per step and evaluation to keep in `samples/`, of at most 200 steps and evaluations of a set: every other
    older one is removed; null: everything is kept."""
