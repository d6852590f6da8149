"""A run's YAML for `allocation check FILE`: registered as an entry point, so that the run and the compiler agree."""

from collections.abc import Sequence

from allocation.readers import FileError, ReadFile
from areal_like.config.findings import ConfigError
from areal_like.config.load import load
from areal_like.config.schema import RunConfig
from areal_like.preflight import preflight


def read(file: str, overrides: Sequence[str] = ()) -> ReadFile:
    """Return the findings of `--dry-run` for a file; raise FileError if it is not the YAML of a run."""
    try:
        loaded = load(file, overrides)
    except ConfigError as error:
        unreadable = [found for found in error.findings if found.code == "CONFIG-FILE"]
        if unreadable:
            raise FileError("\n".join(f"{found.key}: {found.message}; {found.help}" for found in unreadable)) from error
        return ReadFile(error.findings, None, "keys and types only")
    checked = preflight(loaded, dry_run=True)
    return ReadFile(checked.findings, checked.job.plan if checked.job else None, _describe(loaded.config))


def _describe(config: RunConfig) -> str:
    model = config.actor.path or "actor.init_model"
    cluster, batch = config.cluster, f"{config.train_dataset.batch_size}x{config.gconfig.n_samples}"
    return f"cluster {cluster.n_nodes}x{cluster.n_gpus_per_node}, model {model}, batch {batch}"
