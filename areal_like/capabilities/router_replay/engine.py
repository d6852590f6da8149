"""Router replay in the ranks of a trainer."""

from areal_like.trainer.hooks import BuiltModel, EngineHook


def make_engine_hook(built: BuiltModel) -> EngineHook | None:
    """Return the hook of an actor; other models' routers choose by themselves."""
    if built.spec.role != "actor":
        return None
    if built.spec.backend == "megatron":
        from areal_like.capabilities.router_replay.megatron import MegatronRouterReplay

        return MegatronRouterReplay(built.models)
    from areal_like.capabilities.router_replay.fsdp import FSDPRouterReplay

    return FSDPRouterReplay(built.models[0])
