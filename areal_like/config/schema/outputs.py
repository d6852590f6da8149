"""What a run keeps and shows: `saver`, `recover` and `stats_logger`."""

from typing import Literal

from pydantic import Field

from areal_like.config.schema.section import Section


class SaverConfig(Section):
    """When Hugging Face checkpoints are written; the last one always is."""

    freq_steps: int | None = Field(
        None, ge=1, description="Training steps between two checkpoints; null: only the last."
    )
    merge_lora: bool = Field(
        False, description="Write the whole model with its adapters added, beside the adapters (`actor.use_lora`)."
    )


class WandBConfig(Section):
    """Weights & Biases; its own variables say more, such as WANDB_API_KEY and WANDB_BASE_URL."""

    mode: Literal["disabled", "offline", "online"] = Field(
        "disabled", description="`offline`: into the run's directory, for `wandb sync`; `online`: to the server."
    )
    project: str | None = Field(None, description="Project; null: `experiment_name`.")
    entity: str | None = Field(None, description="User or team; null: wandb's default.")
    group: str | None = Field(None, description="Group of runs; null: none.")


class SwanLabConfig(Section):
    """SwanLab."""

    mode: Literal["disabled", "local", "offline", "cloud"] = Field(
        "disabled",
        description="`local`, `offline`: into the run's directory, to watch or to send later; `cloud`: sent.",
    )
    project: str | None = Field(None, description="Project; null: `experiment_name`.")
    workspace: str | None = Field(None, description="Workspace; null: swanlab's default.")


class MLflowConfig(Section):
    """MLflow."""

    tracking_uri: str | None = Field(
        None,
        description="Server or database, such as `http://localhost:5000` or `sqlite:///mlflow.db`; null: no MLflow.",
    )
    experiment_name: str | None = Field(None, description="Experiment; null: the run's `experiment_name`.")


class RecoverConfig(Section):
    """Checkpoints from which the same command goes on with a run that ended early."""

    mode: Literal["off", "auto", "fault"] = Field(
        "off",
        description="`off`: none are written, and a run's directory is never entered again; `auto`: the same command goes "
        "on with a run, whatever ended it; `fault`: only where a failure did, not the end of training or Ctrl-C.",
    )
    freq_steps: int | None = Field(
        None, ge=1, description="Training steps between two checkpoints; null: none for that."
    )
    freq_secs: float | None = Field(
        600.0, gt=0, description="Time between two checkpoints, in seconds; null: none for that. The last step has one."
    )
    keep: int = Field(2, ge=1, description="Checkpoints to keep: the last ones.")


class StatsLoggerConfig(Section):
    """Where the numbers of each step go."""

    wandb: WandBConfig = Field(WandBConfig(), description="Weights & Biases.")
    swanlab: SwanLabConfig = Field(SwanLabConfig(), description="SwanLab.")
    mlflow: MLflowConfig = Field(MLflowConfig(), description="MLflow.")
    tensorboard: bool = Field(True, description="Write TensorBoard events to the run's directory.")
    console: bool = Field(True, description="Print live progress and a table of steps.")
    console_samples: int = Field(
        2, ge=0, description="Responses that are printed at each evaluation of a set, from the worst to the best."
    )
    samples: int | None = Field(
        256,
        ge=0,
        description="Samples of each step and of each evaluation that are kept in `samples/`; null: all of them.",
    )
    report: bool = Field(True, description="Write `report.html` to the run's directory as the run goes on.")
