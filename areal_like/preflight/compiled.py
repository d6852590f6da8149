"""The compiler's findings with the keys of a run: the key behind each rule, in each role's section."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from allocation.diagnostics import Finding, Source
from areal_like.config.keys import annotation_of
from areal_like.config.schema import SCORERS, SERVER_RESERVE, RunConfig
from areal_like.preflight.view import RoleView

_SETTINGS = {
    "ALLOC-BATCH-MINIBATCHES": "ppo_n_minibatches",
    "ALLOC-PACKED-LENGTH": "mb_spec.max_tokens_per_mb",
    "ALLOC-RECOMPUTE": "megatron.recompute_granularity",
    "ALLOC-DISPATCHER": "megatron.moe_token_dispatcher_type",
    "ALLOC-DEEPEP": "megatron.override_transformer_config.moe_enable_deepep",
    "ALLOC-OVERLAP-GATHER": "megatron.overlap_param_gather",
    "ALLOC-DETERMINISTIC-NCCL": "megatron.use_deterministic_algorithms",
}
_OF_RUN = {"offload": "rollout.sharing=alternate"}  # settings of the compiler that a key with another value makes
_SECTIONS = {
    name: section
    for section in ("actor.mb_spec", "actor.megatron", "actor.fsdp", "sglang")
    for name in annotation_of(section).model_fields  # type: ignore[union-attr]
}
_OVERRIDES = "actor.megatron.override_transformer_config"


def with_keys(found: Finding, views: Mapping[str, RoleView]) -> Finding:
    """Return a finding of the compiler about the key to change, where the layout is not it."""
    asked = [views[role] for role in found.roles if role in views]
    view, source = (asked or list(views.values()))[0], _with_backend_keys(found.source)
    remedy, spans, help = found.remedy, found.spans, found.help
    if setting := _SETTINGS.get(found.code):
        source, spans = Source("", view.key(setting)), ()
    if found.code == "ALLOC-SEQUENCE-POSITIONS" and view.model is not None:
        key, others = _longest(view.run)
        room = view.model.max_positions - others - SERVER_RESERVE
        help = f"write {key}={room} or less" if room > 0 else "use shorter prompts (max_prompt_length)"
        source, spans = Source("", key), ()
    if remedy is not None:
        help = remedy.text(lambda name, value: " ".join(dict.fromkeys(_spell(name, value, asked or [view]))))
    return replace(found, source=source, spans=spans, help=help)


def backend_key(role: str) -> str:
    """Return the key of a role's layout."""
    return f"{SCORERS.get(role, role)}.backend"


def _with_backend_keys(source: Source) -> Source:
    """Return a text with the keys of the layouts in it; the compiler calls each by its role."""
    if source.key is None:
        return source
    names = {f"{role}.backend": backend_key(role) for role in SCORERS}
    return replace(source, key=" + ".join(names.get(key, key) for key in source.key.split(" + ")))


def _spell(name: str, value: str, views: Sequence[RoleView]) -> Iterator[str]:
    """Yield a setting of the compiler as keys of the run with their values, one for each section that has it."""
    section, _, leaf = _SECTIONS.get(name, _OVERRIDES).partition(".")
    if name in _OF_RUN:
        yield _OF_RUN[name]
    elif section != "actor":
        yield f"{section}.{name}={value}"
    else:
        for view in views:
            yield f"{view.key(leaf)}.{name}={value}"
            if (name, value) == ("recompute_granularity", "full"):
                yield from (f"{view.key(leaf)}.{other}" for other in _list_excluded(view))


def _list_excluded(view: RoleView) -> Iterator[str]:
    """Yield settings that full recomputation excludes, without their values."""
    if view.engine.megatron.recompute_modules:
        yield "recompute_modules=null"
    if view.engine.megatron.moe_layer_recompute:
        yield "moe_layer_recompute=false"


def _longest(config: RunConfig) -> tuple[str, int]:
    """Return the key that bounds a sequence, and how many of its tokens that key does not count."""
    if config.played_by is not None and config.longest_episode is not None:
        return "episode.max_tokens", 0
    return "gconfig.max_new_tokens", config.longest_sequence - config.gconfig.max_new_tokens
