"""Release of memory under requests: SGLang 0.5.17 releases that of an idle server alone."""

from areal_like.rollout.sglang.patch import Launch, Patch


def release_with_requests(launch: Launch) -> None:
    """Let a server that generates release its memory while requests wait or run."""
    if launch.generates:
        from sglang.srt.managers import scheduler

        from areal_like.rollout.sglang.patches.inside.memory import updater_with_requests

        scheduler.SchedulerWeightUpdaterManager = updater_with_requests()


PATCH = Patch(schedule=release_with_requests)
