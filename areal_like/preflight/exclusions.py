"""The exclusion table, and its rows on whole runs."""

from typing import Any

from allocation.adapters import attention_layers
from allocation.diagnostics import Severity
from areal_like.capability import capabilities
from areal_like.core.config.schema import ALL_LINEAR, TeacherConfig
from areal_like.exclusions import Exclusion, Feature
from areal_like.known import Known
from areal_like.preflight.lora import FEED_FORWARD
from areal_like.preflight.role_exclusions import MODEL, PREDICTION, ROLE

SERVED = ("llama", "mistral", "qwen2", "qwen3")  # families whose adapters tests compare with merged weights
# Families with experts for which tests do so on GPUs; SGLang has no other kernels for adapters of experts
SERVED_EXPERTS = (
    "qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "minimax_m2", "glm4_moe", "deepseek_v2", "deepseek_v3", "kimi_k2",
    "glm4_moe_lite",
)  # fmt: skip
_SERVES, _TARGETS = "weight_update.adapters", "actor.target_modules"
_MERGED, _SINGLE = f"{_SERVES}=false", "it belongs to a single policy"


def _has_model(known: Known, *families: str) -> str | None:
    """Return the family of the actor's model if it is one of these."""
    return known.model.family if known.model is not None and known.model.family in families else None


def _adapts_experts(known: Known, *layers: str) -> bool:
    """Return whether GPU servers add adapters to these layers of a model with experts."""
    is_served = known.device == "cuda" and _has_model(known, *SERVED_EXPERTS)
    return bool(is_served) and not {ALL_LINEAR, *layers}.isdisjoint(known.config.actor.target_modules)


def _untested_family(known: Known) -> str | None:
    model = known.model
    return None if model is None or _has_model(known, *SERVED, *SERVED_EXPERTS) else model.family


def _has_latent_queries(known: Known) -> bool:
    spec = known.model
    plain = spec is not None and spec.latent_attention and not spec.q_rank
    return bool(spec and plain and _adapts_experts(known, *attention_layers(spec)))


def _dense_layers(known: Known) -> str | None:
    spec = known.model
    if spec is None or not spec.dense_layers or spec.shared_ffn or not _adapts_experts(known, *FEED_FORWARD):
        return None
    return f"{len(spec.dense_layers)} of {spec.layers}"


def _only_attention(known: Known) -> str:
    layers = ",".join(attention_layers(known.model)) if known.model else ""
    return f"{_TARGETS}=[{layers}] or {_MERGED}"


def _wide_servers(known: Known) -> int:
    if known.plan is None or not _adapts_experts(known, *FEED_FORWARD):
        return 0
    gpus = known.plan.engine("rollout").sizes.per_replica
    return gpus if gpus > 1 else 0


def _has_baselines(known: Known) -> bool:
    return any(each is not None and "baselines" in each.needs for each in known.algorithms.values())


def _seen_images(known: Known) -> str | None:
    """Return where images come from that a teacher would not see."""
    if known.tokenizer is None or known.tokenizer.vision is None:
        return None
    pictured = next((prompt for own in known.prompts.values() for prompt in own if prompt.images), None)
    if pictured is not None:
        return f"row {pictured.sample_id + 1} has images"
    return "an agent's messages may have images" if "workflow" in known.config.workflows else None


def _find_teacher(known: Known) -> TeacherConfig:
    """Return the teacher, or one without keys that anything excludes."""
    return known.config.teacher or TeacherConfig()


def _find_apart(known: Known) -> str | None:
    """Return the layouts of trainer and servers if they are on different GPUs."""
    engines = [known.plan.engine(role) for role in ("actor", "rollout")] if known.plan else []
    apart = len({frozenset(engine.devices) for engine in engines}) > 1
    return " and ".join(engine.text for engine in engines) if apart else None


# fmt: off
_adapters = Feature[Known]("RUN-ADAPTERS", f"{_SERVES}=true", _SERVES, lambda it: it.config.weight_update.adapters)
# Several adapters in one run: capabilities that belong to a single policy have rows of it.
SEVERAL = Feature[Known]("RUN-SEVERAL", "several adapters", "adapters", lambda it: it.config.adapters)
_teacher = Feature[Known]("RUN-TEACHER", "a teacher", "teacher", lambda it: it.config.teacher is not None)
_policy = Feature[Known]("RUN-TEACHER", "teacher.from_policy=true", "teacher.from_policy", lambda it: _find_teacher(it).from_policy)
_openai = Feature[Known]("RUN-TEACHER", "teacher.api=openai", "teacher.api", lambda it: _find_teacher(it).url and _find_teacher(it).api == "openai")
_elsewhere = Feature[Known](
    "RUN-TEACHER", "a teacher on servers that run already", "teacher", lambda it: _find_teacher(it).url or _find_teacher(it).from_policy)
_hints = Feature[Known]("RUN-TEACHER", "teacher.hint_field", "teacher.hint_field", lambda it: _find_teacher(it).hint_field is not None)
_slices = Feature[Known](
    "RUN-SHARING", "rollout.sharing=alternate", "rollout.sharing", lambda it: it.config.rollout.alternates and it.plan is not None)
_cpu = Feature[Known]("RUN-CPU", "device=cpu", "device", lambda it: it.device == "cpu")

RUN = (
    SEVERAL.excludes("actor.use_lora=false", lambda it: not it.config.actor.use_lora,
        "several adapters need LoRA", "actor.use_lora=true"),
    SEVERAL.excludes(_MERGED, lambda it: not it.config.weight_update.adapters,
        "servers that receive merged weights hold one adapter", f"{_SERVES}=true and weight_update.mode=disk"),
    SEVERAL.excludes("a critic", lambda it: it.config.critic, _SINGLE, "use an algorithm without critic, such as grpo", "critic"),
    SEVERAL.excludes("a teacher", lambda it: it.config.teacher, _SINGLE, "teacher=null", "teacher"),
    SEVERAL.excludes("a warm start", lambda it: it.config.warm_start, _SINGLE, "warm_start=null", "warm_start"),
    SEVERAL.excludes("a reference with other weights", lambda it: it.config.ref and not it.config.base_is_reference,
        _SINGLE, "ref={} for the base without adapters", "ref"),
    SEVERAL.excludes("a reward model", lambda it: any(own.reward.model for own in it.config.adapted.values()),
        _SINGLE, "use a reward function", "reward.model"),
    SEVERAL.excludes("a judge", lambda it: any(own.reward.judge for own in it.config.adapted.values()),
        _SINGLE, "use a reward function", "reward.judge"),
    SEVERAL.excludes("algorithm=single_rollout", _has_baselines, _SINGLE, "use another algorithm", "algorithm"),

    _adapters.excludes("actor.use_lora=false", lambda it: not it.config.actor.use_lora,
        "no adapters are trained", f"{_MERGED} or actor.use_lora=true"),
    _adapters.excludes("another weight_update.mode than disk", lambda it: it.config.weight_update.mode != "disk",
        "adapters are sent as files", "weight_update.mode=disk", "weight_update.mode"),
    _adapters.excludes("weight_update.full_every above 1", lambda it: it.config.weight_update.full_every > 1,
        "an adapter is always sent whole, without deltas", "weight_update.full_every=1", "weight_update.full_every"),
    _adapters.excludes("weight_update.url", lambda it: it.config.weight_update.url is not None,
        "servers read an adapter below cluster.fileroot", "weight_update.url=null", "weight_update.url"),
    _adapters.excludes("weight_update.checksum=true", lambda it: it.config.weight_update.checksum,
        "checksums are those of merged weights, which the servers do not have", "weight_update.checksum=false", "weight_update.checksum"),
    _adapters.excludes("actor.megatron.use_dist_checkpointing=true", lambda it: it.config.actor.megatron.use_dist_checkpointing,
        "the servers start without the weights of actor.megatron.dist_checkpointing_path", _MERGED),
    _adapters.excludes("rollout.sharing=alternate", lambda it: it.config.rollout.alternates,
        "servers that release their memory get their weights back from an update", _MERGED),
    _adapters.excludes("this family of model", _untested_family,
        "no test shows that SGLang adds an adapter to a {} as the trainer does", f"{_MERGED}, or use a {' or '.join(SERVED)}"),
    _adapters.excludes("adapters of latent attention", _has_latent_queries,
        "SGLang adds none to queries that are not compressed (q_lora_rank: null)", f"{_TARGETS}=[{','.join(FEED_FORWARD)}] or {_MERGED}", _TARGETS),
    _adapters.excludes("adapters of experts in a model with dense layers", _dense_layers,
        "SGLang adds none to layers without experts ({}) of a model without shared experts", _only_attention, _TARGETS),
    _adapters.excludes("adapters of experts on wide servers", _wide_servers,
        "tests compare them on servers of one GPU, and the layout has servers of {}", f"{_MERGED}, or use servers of one GPU"),

    _teacher.excludes("images", _seen_images, "it scores the tokens of text alone, and {}", "use a text-only model as actor.path, or no teacher"),
    _teacher.excludes("sampling from some ids", lambda it: it.config.gconfig.is_cut,
        "it scores tokens over the whole vocabulary", "gconfig.top_p=1, gconfig.top_k=-1 and gconfig.min_p=0", "gconfig.top_k"),
    _policy.excludes("teacher.hint_field=null", lambda it: _find_teacher(it).hint_field is None,
        "without a hint the policy would learn what it knows", "name a column such as the answer in teacher.hint_field", "teacher.hint_field"),
    _policy.excludes("rollout.sharing=alternate", lambda it: it.config.rollout.alternates,
        "servers in time slices cannot score while the trainer runs", "rollout.sharing=resident"),
    _openai.excludes("teacher.top_k", lambda it: _find_teacher(it).top_k is not None,
        "it names likely tokens by their texts, not by ids", "teacher.top_k=null or teacher.api=sglang", "teacher.top_k"),
    _openai.excludes("teacher.model=null", lambda it: _find_teacher(it).model is None,
        "requests name a model", "name in teacher.model one of the models that the server lists at /v1/models", "teacher.model"),
    _elsewhere.excludes("another gconfig.temperature than 1", lambda it: it.config.gconfig.temperature != 1,
        "they score at temperature 1", "gconfig.temperature=1.0, or let the run start the teacher (teacher.path)", "gconfig.temperature"),
    _hints.excludes("a workflow", lambda it: "workflow" in it.config.workflows,
        "hints are added to single-turn prompts only", "teacher.hint_field=null"),

    _slices.excludes("different GPUs of trainer and servers", _find_apart, "{} share none to take turns on",
        "rollout.sharing=resident, or place both on all GPUs: sglang:…|megatron:…"),
    _slices.excludes("episodes", lambda it: it.config.workflows,
        "their time limit includes the trainer's time slices", "", "episode.timeout_s", Severity.WARNING),
    _slices.excludes("weight_update.requests=drain", lambda it: it.config.weight_update.requests == "drain",
        "a time slice of the trainer starts while requests run", "weight_update.requests=in_place", "weight_update.requests"),

    _cpu.excludes("sglang.attention_backend", lambda it: it.config.sglang.attention_backend not in (None, "torch_native"),
        "SGLang has only torch_native there", "sglang.attention_backend=torch_native", "sglang.attention_backend"),
    _cpu.excludes("sglang.deterministic=true", lambda it: it.config.sglang.deterministic,
        "SGLang is deterministic on GPUs only", "sglang.deterministic=false", "sglang.deterministic"),
    _cpu.excludes("rollout.sharing=alternate", lambda it: it.config.rollout.alternates and it.plan is not None,
        "GPUs are time-shared", "rollout.sharing=resident", "rollout.sharing"),
    _cpu.excludes(f"{_SERVES}=true", lambda it: it.config.weight_update.adapters and _has_model(it, *SERVED_EXPERTS),
        "SGLang adds adapters to a {} with kernels for GPUs only", f"{_MERGED}, or use a {' or '.join(SERVED)}", _SERVES),
)
# fmt: on


def exclusion_table() -> tuple[Exclusion[Any], ...]:
    """Return every row: on runs, on roles, and of capabilities."""
    return (*RUN, *ROLE, *MODEL, *PREDICTION, *(row for each in capabilities() for row in each.excludes))
