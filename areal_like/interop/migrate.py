"""Whole configurations and launch scripts of other systems to a run's YAML; nothing in them is evaluated."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from allocation import AllocationError, compile, parse
from allocation.convert import read
from allocation.convert.settings import NULL, Reading, dump
from allocation.diagnostics import Severity
from allocation.language.spelling import normalised, spell
from allocation.language.syntax import Allocation, Group
from areal_like.algorithms.presets import ALGORITHMS
from areal_like.config.findings import ConfigError
from areal_like.config.keys import all_keys
from areal_like.config.load import load
from areal_like.config.schema import SERVER_RESERVE
from areal_like.interop.keys import TITLES, entry
from areal_like.interop.keys.entries import to

_FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
_LISTS = ("target_modules", "recompute_modules")
_ALGORITHMS = {
    "gae": "ppo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp",
    "reinforce": "reinforce_pp",
}  # by verl's, ROLL's and slime's estimators
_DIVERGENCES = ("actor.kl_loss_coef", "actor.kl_ctl")
_SWITCHES = {  # of those, where they are off unless set
    **dict.fromkeys(("verl", "siirl"), ("actor_rollout_ref.actor.use_kl_loss", "algorithm.use_kl_in_reward")),
    "roll": ("use_kl_loss", "add_token_level_kl"),
    "slime": ("use-kl-loss",),
}
_ESTIMATORS = {"low_var_kl": "k3", "mse": "k2"}
_ROLES = ("ref", "critic")
_PACKED = ".mb_spec.max_tokens_per_mb"
_FILTER = "data.filter_overlong_prompts"  # verl's, which filters first and cuts what is left
_OVERLONG = {True: "drop", "left": "truncate", "error": "refuse"}
_ROWS = {"prompt_field": "prompt", "answer_field": "reward_model.ground_truth"}  # of verl's data, unless told
_READ = ("prompt_field", "answer_field", "max_prompt_length", "overlong_prompts")  # of held-out prompts as of others
_RECOVER = {True: "auto", "on": "auto", "resume": "auto", False: "off", "disabled": "off", "disable": "off"}
_MODULES = {  # Megatron's linear layers
    "linear_qkv": ["q_proj", "k_proj", "v_proj"],
    "linear_proj": ["o_proj"],
    "linear_fc1": ["gate_proj", "up_proj"],
    "linear_fc2": ["down_proj"],
}
_BY_NAME = "env_vars"  # a mapping whose keys are a user's own


@dataclass
class Migration:
    """What came of a configuration: `yaml` runs where `problems` is empty; `notes` say what changed or was left."""

    system: str
    yaml: str = ""
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def migrate(text: str, system: str | None = None) -> Migration:
    """A run's YAML from a configuration or a script; `system` is one of `TITLES`, or what the keys look like."""
    system = system or _recognised(text)
    if system is None:
        known = ", ".join(TITLES.values())
        return Migration("", problems=[f"this is not a configuration of {known}: none of their keys is in it"])
    done = Migration(system)
    reading = Reading.of_command(text) if system == "slime" else Reading.of_config(text)
    if not reading.settings:
        done.problems += [str(found) for found in reading.findings] or ["no settings are in it"]
        return done
    values = dict(_values(reading, done))
    if (algorithm := values.get("algorithm", "grpo")) not in ALGORITHMS:
        done.problems.append(f"algorithm: {algorithm!r} is none of those that are here: {', '.join(ALGORITHMS)}")
    _reference(reading, values, done)
    _critic(values, done)
    _layout(reading, values, done)
    _rows(values, done)
    _held_out(values, done)
    _defaults(values, done)
    _accept(values, done)
    return done


def _recognised(text: str) -> str | None:
    """The system whose telling keys are in a text."""
    telling = {
        "slime": r"--(rollout-num-gpus|hf-checkpoint|rollout-batch-size)\b",
        "siirl": r"\bsiirl\b",
        "trinity": r"(?m)^(explorer|synchronizer|buffer):|trainer_config:",
        "roll": r"(?m)^(actor_train|actor_infer|pretrain|num_return_sequences_in_group):",
        "verl": r"\bactor_rollout_ref\b",
        "areal": r"(?m)^(gconfig|rollout|actor|allocation_mode|async_training):|\b(actor|rollout)\.backend=|\ballocation_mode=",
    }
    return next((name for name, pattern in telling.items() if re.search(pattern, text)), None)


def _values(reading: Reading, done: Migration) -> Iterator[tuple[str, Any]]:
    """Our keys with their values; what has none is noted."""
    ours = set(all_keys())
    left: dict[str, list[str]] = {}
    for key in reading.settings:
        setting = reading.find(key)
        if setting is None or setting.value in NULL or key in reading.variables or key.isupper():
            continue
        found = entry(done.system, key)
        if done.system == "areal" and key in ours and not (found and found.ours):
            found = to(key)
        if found is None:
            done.notes.append(f"{key}: not known here, left out")
            continue
        if found.ours is None:
            why = f"not needed: {found.unneeded}" if found.unneeded else f"lost: {found.lost}"
            left.setdefault(why, []).append(key)
            continue
        target = found.ours
        if target.endswith(_BY_NAME) and key.rpartition(".")[2] != _BY_NAME:
            target = f"{target}.{key.rpartition('.')[2]}"
        if target.startswith(_ROLES) and setting.value == f"${{actor.{key.partition('.')[2]}}}":
            done.notes.append(f"{key}: not needed: where it is not set it is the actor's")
            continue
        if target == "workflow" and ":" not in setting.value:
            done.notes.append(
                f"workflow: lost: {setting.value} is no function here; write one, and workflow=my_file.py:run"
            )
            continue
        text = re.sub(r"\$(HOME|\{HOME\})(?=/)", "~", setting.value)
        if "$" in text:
            done.notes.append(f"{key}: {text} is known to the shell only; write {target} yourself")
            continue
        if key == "data.truncation" and (reading.value(_FILTER) or "").lower() == "true":
            done.notes.append(f"{key}: not needed: {_FILTER} leaves nothing to cut")
            continue
        if target != key:
            done.notes.append(f"{key}: now {target}")
        value = text if f".{_BY_NAME}." in target else _plain(text, listed=target.endswith(_LISTS))
        if not isinstance(value, list) and len(several := _listed(text)) > 1:
            done.notes.append(f"{key}: the first alone, without {', '.join(map(str, several[1:]))}")
        if target == "gconfig.top_p" and value != 1:
            done.notes.append(f"{key}: lost: {text} of the probability mass, as SGLang's log-probs are of all of it")
            continue
        yield from _value(target, value, key)
    done.notes += [f"{', '.join(keys)}: {why}" for why, keys in left.items()]


def _listed(text: str) -> list[Any]:
    """The items of a list, none of another value."""
    value = _plain(text, listed=True) if text.startswith("[") else []
    return value if isinstance(value, list) else []


def _plain(text: str, *, listed: bool = False) -> Any:
    """What YAML reads, without making objects: a scalar, of a list the first, or a list where the key is `listed`."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if listed:
        return value if isinstance(value, list) else [value]
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value):
        return float(value)
    if isinstance(value, list):
        return (value or [text])[0]
    return value if isinstance(value, bool | int | float | str) else text


def _value(target: str, value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """The value as we write it: switches that are several keys, and numbers that mean `never`."""
    if key.endswith("gradient_checkpointing"):
        section = target.rpartition(".")[0]
        yield from ((f"{section}.{name}", setting) for name, setting in _FULL.items() if value is True)
    elif target.endswith("overlong_prompts"):
        yield from [(target, _OVERLONG.get(value, value))] if value is not False else []
    elif target == "actor.kl_estimator":
        yield target, _ESTIMATORS.get(str(value), value)
    elif target == "recover.mode":
        yield target, _RECOVER.get(value, value)
    elif target == "actor.target_modules":
        yield target, [name for module in value for name in _MODULES.get(module, [module])]
    elif target == "algorithm":
        yield target, _ALGORITHMS.get(str(value), value)
        yield from [("actor.reward_norm.mean_level", "group")] if value == "reinforce_plus_plus_baseline" else []
    elif not (target.endswith(("freq_steps", "total_train_steps")) and isinstance(value, int) and value <= 0):
        yield target, value


def _reference(reading: Reading, values: dict[str, Any], done: Migration) -> None:
    """A divergence that is switched off has no coefficient; without one there is no reference."""
    for switch, coefficient in zip(_SWITCHES.get(done.system, ()), _DIVERGENCES, strict=False):
        if values.get(coefficient) and (reading.value(switch) or "").lower() != "true":
            del values[coefficient]
            done.notes.append(f"{coefficient}: left out, as {switch} is not true")
    own = [key for key in values if key.startswith("ref.")]
    if any(values.get(key) for key in _DIVERGENCES):
        if not own:
            values["ref"] = {}
            done.notes.append("ref: the model that the run starts from, as a divergence from it is asked for")
    elif values.get("algorithm") != "dpo":
        for key in own:
            done.notes.append(f"{key}: {values.pop(key)!r} is left out: nothing asks for a reference")


def _critic(values: dict[str, Any], done: Migration) -> None:
    """What estimates values is there if the algorithm needs it."""
    own = [key for key in values if key.startswith("critic.")]
    if done.system == "areal" and own and "algorithm" not in values:
        values["algorithm"] = "ppo"
        done.notes.append("algorithm: ppo, as a critic is there")
    if values.get("algorithm") == "ppo" and not own:
        values["critic"] = {}
        done.notes.append("critic: the actor's model with a value head, as algorithm=ppo needs values")
    elif values.get("algorithm", "grpo") != "ppo":
        for key in own:
            done.notes.append(f"{key}: {values.pop(key)!r} is left out: no algorithm here but ppo has a critic")


def _rows(values: dict[str, Any], done: Migration) -> None:
    """How prompts are read, which the others say once for those that are trained on and for held-out ones."""
    for name, column in _ROWS.items() if done.system in ("verl", "siirl") else ():
        if f"train_dataset.{name}" not in values:
            values[f"train_dataset.{name}"] = column
            done.notes.append(f"train_dataset.{name}: {column}, as in verl's data")
    known = {name: values[key] for name in _READ if (key := f"train_dataset.{name}") in values}
    if known and done.system != "areal" and "valid_dataset.path" in values:
        values |= {f"valid_dataset.{name}": value for name, value in known.items()}
        done.notes.append(f"valid_dataset: {', '.join(known)} as train_dataset has them")


def _held_out(values: dict[str, Any], done: Migration) -> None:
    """Nothing is evaluated where no held-out prompts are named."""
    if not any(key.startswith(("valid_dataset.", "evaluator.datasets.")) for key in values):
        for key in [key for key in values if key.startswith("evaluator.")]:
            done.notes.append(f"{key}: {values.pop(key)!r} is left out: no held-out prompts are named (valid_dataset)")


def _layout(reading: Reading, values: dict[str, Any], done: Migration) -> None:
    """One allocation for the whole run, with our servers."""
    if done.system == "areal" and ("allocation_mode" in values or "actor.backend" in values):
        own = [key for key in ("allocation_mode", "actor.backend", "rollout.backend") if key in values]
        text = "\n".join(f"{key}={values[key]}" for key in own) if len(own) > 1 else str(values[own[0]])
    else:
        text = reading.text
    text, findings = _slime(reading) if done.system == "slime" else read(done.system, text)
    done.notes += [f"layout: {found.message}" for found in findings if found.severity is not Severity.ERROR]
    done.problems += [f"layout: {found.message}" for found in findings if found.severity is Severity.ERROR]
    if not text:
        return
    for key in ("allocation_mode", "actor.backend", "rollout.backend"):
        values.pop(key, None)
    if "vllm" in text:
        done.notes.append("layout: servers are SGLang's, where vLLM's were")
    try:
        values["allocation_mode"] = allocation = _two_roles(text.replace("vllm", "sglang"), done)
        plan = compile(allocation)
        _role_layouts(parse(allocation), values, done)
    except AllocationError as error:
        done.problems += [f"layout: {found.message}" for found in error.findings]
        return
    if not any(engine.servers for engine in plan.engines):
        done.problems.append(f"layout: no servers are in {allocation}, and every run here has some: add sglang:d1+")
    cp = max(engine.sizes.cp for engine in plan.engines)
    for key in [key for key in values if key.endswith(_PACKED) and done.system != "areal" and cp > 1]:
        values[key] *= cp  # of a GPU there, of those that share a sequence here
        done.notes.append(f"{key}: {values[key]}, of {cp} GPUs that share sequences")
    _cluster(plan.n_gpus, values, done)


def _role_layouts(allocation: Allocation, values: dict[str, Any], done: Migration) -> None:
    """A role on the actor's GPUs has its layout without a word; others are said beside the actor's own."""
    texts = {it.backend.text: spell(Allocation((Group((it,)),))) for group in allocation.groups for it in group.members}
    actor = next((text for backend, text in texts.items() if backend in ("megatron", "fsdp")), None)
    for role in [role for role in _ROLES if f"{role}.backend" in values]:
        own, _ = read("areal", written := str(values.pop(f"{role}.backend")))  # whose key it is
        where = {name: values.pop(f"{role}.scheduling_strategy.{name}", "") for name in ("type", "target")}
        if own == actor and where["type"] != "separation" and where["target"] in ("", "actor"):
            done.notes.append(f"{role}.backend: not needed: it has the actor's layout, on its GPUs")
        else:
            keys = f"actor.backend={actor}, rollout.backend={texts.get('sglang')} and {role}.backend={own or written}"
            done.problems.append(f"layout: {role}.backend is not the actor's: write {keys} in place of allocation_mode")


def _cluster(gpus: int, values: dict[str, Any], done: Migration) -> None:
    """At least as many nodes as the layout needs; several are a Ray cluster that is there before the run."""
    per_node = values.setdefault("cluster.n_gpus_per_node", min(gpus, 8))
    needed = -(-gpus // per_node) if isinstance(per_node, int) and per_node > 0 else 1
    nodes = values.setdefault("cluster.n_nodes", needed)
    if isinstance(nodes, int) and nodes < needed:
        values["cluster.n_nodes"] = nodes = needed
        done.notes.append(f"cluster.n_nodes: {needed}, as the layout has {gpus} GPUs")
    if isinstance(nodes, int) and nodes > 1 and values.get("scheduler.type") != "ray":
        values["scheduler.type"] = "ray"
        done.notes.append(f"scheduler.type: ray, as {nodes} nodes are a Ray cluster that is started before the run")


def _two_roles(text: str, done: Migration) -> str:
    """The allocation without the roles that are switched on by sections of their own."""
    groups = []
    for group in parse(text).groups:
        kept = tuple(member for member in group.members if not member.name or member.name.text in ("actor", "rollout"))
        for member in group.members:
            if member not in kept and member.name:
                done.notes.append(
                    f"layout: {member.name.text} is left out; a section {member.name.text} switches it on"
                )
        if kept:
            groups.append(Group(kept))
    return spell(normalised(Allocation(tuple(groups))))


def _slime(reading: Reading) -> tuple[str, list[Any]]:
    """slime's layout: actors on so many nodes, servers of so many GPUs, side by side or colocated."""
    tp, pp = reading.size("tensor-model-parallel-size"), reading.size("pipeline-model-parallel-size")
    cp = reading.size("context-parallel-size")
    ep, etp = reading.size("expert-model-parallel-size"), reading.size("expert-tensor-parallel-size")
    gpus = reading.size("actor-num-nodes") * reading.size("actor-num-gpus-per-node", default=8)
    each = reading.size("rollout-num-gpus-per-engine")
    shared = reading.has("colocate")
    servers = (gpus if shared else reading.size("rollout-num-gpus", default=gpus)) // each
    sizes = {"d": gpus // (tp * pp * cp), "p": pp, "t": tp, "c": cp}
    attn = "".join(f"{letter}{size}" for letter, size in sizes.items() if size != 1 or letter == "d")
    actor = f"megatron:(attn:{attn}|ffn:e{ep}t{etp})" if ep > 1 else f"megatron:{attn}"
    return f"sglang:d{servers}t{each}{'|' if shared else '+'}{actor}", reading.findings


def _defaults(values: dict[str, Any], done: Migration) -> None:
    """What a run needs and the others say otherwise."""
    values.setdefault("experiment_name", f"from-{done.system}")
    values["experiment_name"] = re.sub(r"[^\w.-]", "-", str(values["experiment_name"])).strip(".-") or "run"
    mini = values.get("actor.ppo_n_minibatches")
    if done.system in ("verl", "siirl", "trinity") and isinstance(mini, int):
        size = values.get("train_dataset.batch_size")
        if isinstance(size, int) and mini and size % mini == 0:
            values["actor.ppo_n_minibatches"] = size // mini
            done.notes.append(f"actor.ppo_n_minibatches: {size} prompts in mini-batches of {mini}")
        else:
            del values["actor.ppo_n_minibatches"]
            done.notes.append("actor.ppo_n_minibatches: left out, as the batch's size is not known")
    for section in ("actor", "critic", "ref"):
        if values.get(f"{section}.megatron.recompute_granularity") != "full":
            continue
        settings = {f"{section}.megatron.{name}": setting for name, setting in _FULL.items()}
        if "fsdp" in values.get("allocation_mode", ""):
            for key in settings:
                values.pop(key, None)
            values[f"{section}.fsdp.gradient_checkpointing"] = True
            done.notes.append(f"{section}.fsdp.gradient_checkpointing: recomputation, as the trainer is FSDP")
        else:
            values.update({**settings, **values})
    if "total_train_steps" in values and "total_train_epochs" not in values:
        values["total_train_epochs"] = values["total_train_steps"]
        done.notes.append("total_train_epochs: as many as total_train_steps, which end the run")
    if not any(key.startswith("reward.") for key in values):
        values["reward.type"] = "gsm8k"
        done.notes.append("reward.type: gsm8k, until you name your own (reward.function)")


def _accept(values: dict[str, Any], done: Migration) -> None:
    """Leaves out values that our keys refuse, and says what is still missing."""
    for _ in range(3):
        try:
            config = load(yaml.safe_load(dump(values))).config
            if config.context_length < (needed := config.longest_generated + SERVER_RESERVE):
                message = f"{values.pop('sglang.context_length')} is left out: the run needs {needed}"
                done.notes.append(f"sglang.context_length: {message}")
            if config.actor.mb_spec.max_tokens_per_mb < config.longest_sequence:
                values[f"actor{_PACKED}"] = room = -(-config.longest_sequence // 1024) * 1024
                done.notes.append(f"actor{_PACKED}: {room}, as the longest sequence has to fit")
            break
        except ConfigError as error:
            refused = {str(f.key): f.message for f in error.findings}
        for key in [key for key in values if key in refused]:
            done.notes.append(f"{key}: {values.pop(key)!r} is left out: {refused.pop(key)}")
    else:
        done.problems += [f"{key}: {message}" for key, message in refused.items()]
    done.yaml = dump(values)
