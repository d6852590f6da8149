"""What a run keeps and shows: `saver`, `recover` and `stats_logger`."""

from typing import Literal

from pydantic import Field

from areal_like.config.schema.section import Section


class SaverConfig(Section):
    """Hugging Face checkpoints; the last one is always written."""

    freq_steps: int | None = Field(
        None, ge=1, description="Training steps between two checkpoints; null: only the last one."
    )
    merge_lora: bool = Field(False, description="Write the merged model beside the adapters (`actor.use_lora`).")


class WandBConfig(Section):
    """Weights & Biases; WANDB_API_KEY and WANDB_BASE_URL are read from the environment."""

    mode: Literal["disabled", "offline", "online"] = Field(
        "disabled",
        description="`offline`: write to the run's directory, for `wandb sync`; `online`: send to the server.",
    )
    project: str | None = Field(None, description="Project; null: `experiment_name`.")
    entity: str | None = Field(None, description="User or team; null: wandb's default.")
    group: str | None = Field(None, description="Group of runs; null: none.")


class SwanLabConfig(Section):
    """SwanLab."""

    mode: Literal["disabled", "local", "offline", "cloud"] = Field(
        "disabled",
        description="`local`, `offline`: write to the run's directory, to view or send later; `cloud`: send.",
    )
    project: str | None = Field(None, description="Project; null: `experiment_name`.")
    workspace: str | None = Field(None, description="Workspace; null: swanlab's default.")


class MLflowConfig(Section):
    """MLflow."""

    tracking_uri: str | None = Field(
        None,
        description=(
            "Server or database, such as `http://localhost:5000` or `sqlite:///mlflow.db`; null: MLflow is off."
        ),
    )
    experiment_name: str | None = Field(None, description="Experiment; null: the run's `experiment_name`.")


class RecoverConfig(Section):
    """Checkpoints from which the same command resumes an interrupted run."""

    mode: Literal["off", "auto", "fault"] = Field(
        "off",
        description="`off`: none are written, and a run's directory is never entered again; `auto`: the same command goes "
        "on with a run, whatever ended it; `fault`: only where a failure did, not the end of training or Ctrl-C.",
    )
    freq_steps: int | None = Field(
        None, ge=1, description="Training steps between two recovery checkpoints; null: not by steps."
    )
    freq_secs: float | None = Field(
        600.0,
        gt=0,
        description="Seconds between two recovery checkpoints; null: not by time. The last step always has one.",
    )
    keep: int = Field(2, ge=1, description="Number of recovery checkpoints to keep.")
    timeout_s: float = Field(
        1800.0,
        gt=0,
        description="Seconds that writing one recovery checkpoint may take; a write that takes longer ends the run.",
    )
    restart: bool = Field(
        False,
        description="Start at step 0 if the run has steps but no whole checkpoint; false: that is an error. The "
        "run's journal and incomplete checkpoints are put aside; a whole checkpoint is always resumed.",
    )


class StatsLoggerConfig(Section):
    """Destinations of the metrics of each step."""

    wandb: WandBConfig = Field(WandBConfig(), description="Weights & Biases.")
    swanlab: SwanLabConfig = Field(SwanLabConfig(), description="SwanLab.")
    mlflow: MLflowConfig = Field(MLflowConfig(), description="MLflow.")
    tensorboard: bool = Field(True, description="Write TensorBoard events to the run's directory.")
    console: bool = Field(True, description="Print progress and a table of steps.")
    console_samples: int = Field(2, ge=0, description="Responses to print at each evaluation, from worst to best.")
    samples: int | None = Field(
        256,
        ge=0,
        description="Samples per step and evaluation to keep in `samples/`; null: all.",
    )
    report: bool = Field(True, description="Keep `report.html` in the run's directory up to date.")
