"""The record of a run: its description before the start, and how the run ended."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from allocation.diagnostics import render
from allocation.views.svg import plan_svg
from areal_like.capability import make_listeners
from areal_like.core.config.load import dump
from areal_like.core.loop.logprob_check import allowed_logprob_diff
from areal_like.job import Job
from areal_like.metrics.console import View
from areal_like.metrics.record import Record
from areal_like.metrics.scalars import StatsSink
from areal_like.metrics.sinks import make_sinks

MOST_DRAWN = 512  # devices in the report's picture of the plan


def make_record(job: Job, view: View, void_from: int | None) -> Record:
    """Return the record of a run; with `void_from` it continues before that step."""
    config, stats, directory = job.config, job.config.stats_logger, job.config.run_dir
    return Record(
        directory,
        f"{config.experiment_name} / {config.trial_name}",
        view,
        open_sinks(job, void_from),
        about=_describe(job),
        listeners=make_listeners(job),
        void_from=void_from,
        decode=partial(job.tokenizer.decode, special=True),
        n_samples=stats.samples,
        n_shown=stats.console_samples,
    )


def open_sinks(job: Job, void_from: int | None) -> list[StatsSink]:
    """Return the writers of each step's numbers; present numbers of `void_from` and later steps are void."""
    return make_sinks(job.config, job.config.run_dir, void_from)


@contextmanager
def recording(record: Record) -> Iterator[None]:
    """Record the events of the body, and how it ends."""
    try:
        with record.recording():
            yield
        record.end("finished")
    except BaseException as error:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        stopped = isinstance(error, KeyboardInterrupt | SystemExit | asyncio.CancelledError)
        record.end("interrupted" if stopped else f"failed: {error}")
        raise
    finally:
        record.close()


def _describe(job: Job) -> dict[str, Any]:
    """Return the report's description of a run before its start."""
    return {
        "steps": job.steps,
        "layout": str(job),
        "staleness": job.config.rollout.max_head_offpolicyness,
        "max_logprob_diff": allowed_logprob_diff(job.config),
        "plan": plan_svg(job.plan) if len(job.plan.devices) <= MOST_DRAWN else "",
        "findings": [render(found) for found in job.warnings],
        "config": dump(job.config),
    }
