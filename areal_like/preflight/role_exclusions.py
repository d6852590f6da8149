"""The rows of the exclusion table on roles on trainer ranks: their settings, and their models."""

from allocation.families import FAMILIES
from areal_like.backends.fsdp.support import (
    ALWAYS_TIED,
    NOT_PACKED,
    WITHOUT_MODEL,
    WITHOUT_SERVER,
    field_apart,
    find_undivided,
    has_plain_attention,
    has_states,
    looks_ahead,
    rope_of_lengths,
)
from areal_like.backends.megatron.bridges.proven import MTP
from areal_like.core.rollout.backends import find_backend
from areal_like.exclusions import Feature
from areal_like.preflight.view import RoleView

# Families whose routers have biases that Megatron can move
_WITH_ROUTER_BIASES = ("deepseek_v3", "kimi_k2", "minimax_m2", "glm4_moe", "glm4_moe_lite")
_OUTPUTS = ("layernorm", "moe_act")  # are recomputed by a function that asks Transformer Engine
_STAGES = "pipeline_model_parallel_layout"
_OVERRIDES, _PRECISE = ".megatron.override_transformer_config", ".megatron.use_precision_aware_optimizer"
_SHARES, _PREDICTS, _MODULES = ".mb_spec.share_prompts", ".megatron.train_mtp_layers", ".megatron.recompute_modules"
_OTHER = "use a model of another family, such as a qwen3"


def _family(view: RoleView) -> str:
    return view.model.family if view.model else ""


def _is_on_megatron(view: RoleView) -> bool:
    return view.backend in ("megatron", None)


def _get_override(view: RoleView, name: str) -> object:
    return view.engine.megatron.override_transformer_config.get(name)


def _balances_experts(view: RoleView) -> bool:
    if not view.model or not view.model.experts or view.backend != "megatron":
        return False
    moves = _family(view) in _WITH_ROUTER_BIASES and _get_override(view, "moe_router_bias_update_rate")
    by_loss = _get_override(view, "moe_router_load_balancing_type") not in (None, "none")
    return bool(by_loss or _get_override(view, "moe_z_loss_coeff") or moves)


def _complete(view: RoleView) -> dict[str, object]:
    """Return the model's config.json with the defaults of its family."""
    known = view.model is not None and view.model.known_family
    return {**(FAMILIES[_family(view)].defaults if known else {}), **view.description}


def _looks_ahead(view: RoleView) -> bool:
    return looks_ahead(_complete(view))


def _has_chunks_or_states(view: RoleView) -> bool:
    model = _complete(view)
    return not looks_ahead(model) and (not has_plain_attention(model) or has_states(model))


def _find_undivided(view: RoleView) -> str | None:
    spec, tp = view.model, view.layout.sizes.tp if view.layout else 1
    if spec is None or tp == 1:
        return None
    family = spec.family if spec.tower is None else str(view.description.get("model_type"))
    return find_undivided(family, (spec.heads, spec.kv_heads), tp)


def _find_field(view: RoleView) -> str | None:
    apart = field_apart(_complete(view))
    return f"{apart[0]} = {apart[1]}: {apart[2]}" if apart else None


def _lacks_server(view: RoleView) -> str | None:
    """Return the architecture of an unknown family for which the installed SGLang has no code."""
    named = list(view.description.get("architectures") or [])
    if view.model is None or view.model.counted is None or view.role != "actor" or not named:
        return None
    served = find_backend().architectures()
    return str(named[0]) if served and not {*served} & {*named} else None


def _without_tensors(view: RoleView) -> str:
    sizes = view.layout.sizes if view.layout else None
    context = f"c{sizes.cp}" if sizes and sizes.cp > 1 else ""
    return f"use the layout fsdp:d{sizes.dp * sizes.tp if sizes else 1}{context}, or train on Megatron"


def _without_context(view: RoleView) -> str:
    return f"use the layout fsdp:d{view.layout.sizes.dp * view.layout.sizes.cp if view.layout else 1}"


# fmt: off
_fsdp = Feature[RoleView]("RUN-FSDP", "the FSDP trainer", ".path", lambda it: it.backend == "fsdp")
_cpu = Feature[RoleView]("RUN-CPU", "device=cpu", "device", lambda it: it.device == "cpu" and _is_on_megatron(it))
_shares = Feature[RoleView]("RUN-SHARED-PROMPTS", "mb_spec.share_prompts=true", _SHARES, lambda it: it.engine.mb_spec.share_prompts)
_fsdp_shares = Feature[RoleView](
    "RUN-SHARED-PROMPTS", "mb_spec.share_prompts=true", _SHARES, lambda it: it.backend == "fsdp" and it.engine.mb_spec.share_prompts)
_precise = Feature[RoleView]("RUN-MEGATRON-PRECISION", "megatron.use_precision_aware_optimizer=true", _PRECISE,
    lambda it: _is_on_megatron(it) and it.engine.megatron.use_precision_aware_optimizer)
_full = Feature[RoleView]("RUN-MEGATRON-RECOMPUTE", "megatron.recompute_granularity=full", ".megatron.recompute_granularity",
    lambda it: _is_on_megatron(it) and it.engine.megatron.recompute_granularity == "full")
_ungrouped = Feature[RoleView]("RUN-MEGATRON-RECOMPUTE", "megatron.moe_grouped_gemm=false", ".megatron.moe_grouped_gemm",
    lambda it: _is_on_megatron(it) and (it.model is None or it.model.experts) and not it.engine.megatron.moe_grouped_gemm)
_critic = Feature[RoleView]("RUN-CRITIC", "the critic's float32 value head", ".dtype", lambda it: it.role == "critic")
_critic_on_megatron = Feature[RoleView]("RUN-CRITIC", "the critic's float32 value head", ".dtype",
    lambda it: it.role == "critic" and _is_on_megatron(it) and it.engine.dtype == "bfloat16")
_predicts = Feature[RoleView]("RUN-MTP-UNSUPPORTED", "megatron.train_mtp_layers=true", _PREDICTS,
    lambda it: it.role == "actor" and it.backend == "megatron" and it.engine.megatron.train_mtp_layers)

# On settings
ROLE = (
    _fsdp.excludes("dtype=float32 on GPUs", lambda it: it.device == "cuda" and it.engine.dtype == "float32",
        "its attention supports only bfloat16 and float16", ".dtype=bfloat16", ".dtype"),
    _fsdp.excludes("megatron.use_dist_checkpointing=true", lambda it: it.engine.megatron.use_dist_checkpointing,
        "it starts from Hugging Face weights, which areal-like convert-checkpoint makes", ".megatron.use_dist_checkpointing=false",
        ".megatron.use_dist_checkpointing"),

    _cpu.excludes("these megatron.recompute_modules", lambda it: " and ".join(n for n in _OUTPUTS if n in (it.engine.megatron.recompute_modules or ())),
        "{} cannot be recomputed there", f"{_MODULES}=null or device=cuda", _MODULES),
    _cpu.excludes("low-precision optimizer states", _precise.holds, "they need Transformer Engine's Adam", f"{_PRECISE}=false", _PRECISE),

    _shares.excludes("linear attention", lambda it: it.model and it.model.linear_layers,
        "it has no keys that responses could share", f"{_SHARES}=false"),
    _shares.excludes("latent attention", lambda it: it.backend == "megatron" and it.model and it.model.latent_attention,
        "its keys are computed inside a layer, where responses cannot share them", f"{_SHARES}=false"),
    _shares.excludes("balanced experts", _balances_experts,
        "they are balanced by token counts, in which a shared prompt would count only once", f"{_SHARES}=false"),

    _precise.excludes("megatron.use_distributed_optimizer=false", lambda it: not it.engine.megatron.use_distributed_optimizer,
        "only the distributed optimizer has such states", f"{_PRECISE}=false"),
    _precise.excludes("another dtype than bfloat16", lambda it: it.engine.dtype != "bfloat16",
        "such states belong to bfloat16 weights", f"{_PRECISE}=false"),

    _full.excludes("megatron.moe_layer_recompute=true", lambda it: it.engine.megatron.moe_layer_recompute,
        "it already recomputes the MoE layers", ".megatron.moe_layer_recompute=false", ".megatron.moe_layer_recompute"),
    _full.excludes("megatron.recompute_modules", lambda it: it.engine.megatron.recompute_modules,
        "it already recomputes every module", f"{_MODULES}=null", _MODULES),
    _ungrouped.excludes("the module moe_act in megatron.recompute_modules", lambda it: "moe_act" in (it.engine.megatron.recompute_modules or ()),
        "only grouped experts have it", ".megatron.moe_grouped_gemm=true", _MODULES),

    _critic.excludes("dtype=float16", lambda it: it.engine.dtype == "float16",
        "its gradients would overflow beside those of float16", "critic.dtype=bfloat16"),
    _critic_on_megatron.excludes("megatron.use_distributed_optimizer=false in checkpoints (recover.mode)",
        lambda it: not it.engine.megatron.use_distributed_optimizer and it.run.recover.mode != "off",
        "the optimizer of whole states does not save it", ".megatron.use_distributed_optimizer=true", ".megatron.use_distributed_optimizer"),
    _critic_on_megatron.excludes("megatron.main_grads_dtype=bfloat16", lambda it: it.engine.megatron.main_grads_dtype == "bfloat16",
        "gradient clipping assumes one data type", ".megatron.main_grads_dtype=float32", ".megatron.main_grads_dtype"),
)
# On the model's config.json, which `description` has
MODEL = (
    _fsdp.excludes("this family of model", lambda it: NOT_PACKED.get(_family(it)), "{}", f"{_OTHER}_moe"),
    _fsdp.excludes("a vision-language model's text part",
        lambda it: it.model and it.model.tower is None and _family(it) in {*WITHOUT_MODEL} - {*NOT_PACKED} and _family(it),
        "transformers has no language model of the family {}", "use a text-only model, such as a qwen3"),
    _fsdp.excludes("this family of model", lambda it: _family(it) in WITHOUT_SERVER and _family(it),
        "the pinned SGLang does not start with the rope of a {}", _OTHER),
    _fsdp.excludes("tie_word_embeddings = false", lambda it: it.model and _family(it) in ALWAYS_TIED and not it.model.tied_embeddings and _family(it),
        "SGLang uses the embedding as the output layer of a {}", f"tie the checkpoint's embeddings, or {_OTHER}"),
    _fsdp.excludes("use_bidirectional_attention", _looks_ahead,
        "tokens attend to later ones, which servers have not generated yet", "use a model without use_bidirectional_attention"),
    _fsdp.excludes("context parallelism of this model", lambda it: it.layout and it.layout.sizes.cp > 1 and _has_chunks_or_states(it),
        "its attention has chunks or states, so ranks cannot share sequences", _without_context),
    _fsdp_shares.excludes("attention with chunks or states", _has_chunks_or_states,
        "the FSDP trainer has no keys of it that responses could share", f"{_SHARES}=false"),
    _fsdp.excludes("tensor parallelism of this model", _find_undivided, "its matrices cannot be split: {}", _without_tensors),
    _fsdp.excludes("a field of config.json", _find_field, "the trainer and the servers differ with {}", "use a model without it"),
    _fsdp.excludes("a rope that depends on the sequence length", lambda it: rope_of_lengths(_complete(it)),
        "it packs sequences of all lengths, and the rope is {}", "use a model whose rope is the same for all lengths"),
    _fsdp.excludes("this architecture", _lacks_server, "the pinned SGLang has no {}", _OTHER),
    _fsdp.excludes("this family of model", lambda it: it.model and not it.model.known_family and it.model.counted is None and _family(it),
        "the installed transformers has no language model for model_type {}", "use a model of a family that transformers has"),
)
# On the layer for multi-token prediction of a model that has one
PREDICTION = (
    _predicts.excludes("this family of model", lambda it: _family(it) not in MTP and _family(it),
        f"it trains layers of {', '.join(MTP)}; the model is a {{}}", f"{_PREDICTS}=false"),
    _predicts.excludes("several such layers", lambda it: it.model and it.model.mtp_layers > 1 and it.model.mtp_layers,
        "it trains one layer; the model has {}", f"{_PREDICTS}=false"),
    _predicts.excludes("another bridge than megatron-bridge", lambda it: it.engine.megatron.bridge_type != "megatron-bridge",
        "only megatron-bridge converts the layer", ".megatron.bridge_type=megatron-bridge"),
    _predicts.excludes("actor.use_lora=true", lambda it: it.run.actor.use_lora,
        "it trains all weights of the layer", f"{_PREDICTS}=false or actor.use_lora=false"),
    _predicts.excludes("mb_spec.share_prompts=true", lambda it: it.engine.mb_spec.share_prompts,
        "a shared prompt has several next tokens", f"{_SHARES}=false"),
    _predicts.excludes("megatron.use_dist_checkpointing=true", lambda it: it.engine.megatron.use_dist_checkpointing,
        "the layer is read from a checkpoint in Hugging Face form", ".megatron.use_dist_checkpointing=false"),
    _predicts.excludes(_STAGES, lambda it: _get_override(it, _STAGES) is not None,
        "the layer is on the last stage", f"{_PREDICTS}=false, or leave out {_STAGES}"),
    _predicts.excludes("virtual pipelines", lambda it: it.layout and it.layout.sizes.vpp > 1,
        "the layer is in one chunk", f"{_PREDICTS}=false, or leave out v in the layout"),
)
# fmt: on
