"""Completion and checks of a migrated run: roles, evaluation, refused values, `???`."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from allocation.convert.settings import dump
from areal_like.core.algorithms.settings import KEYS, PRESETS, settings_of
from areal_like.core.config.findings import ConfigError
from areal_like.core.config.keys import all_keys, annotation_of
from areal_like.core.config.load import load
from areal_like.core.config.schema import MOST_KEPT, SERVER_RESERVE, ActorConfig, NormConfig, RunConfig
from areal_like.interop.keys import entry
from areal_like.interop.rules.translation import MISSING, Translation

_FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
_DIVERGENCES = ("actor.kl_loss_coef", "actor.kl_ctl")
_NORMS = ("actor.reward_norm", "actor.adv_norm")
_ENDLESS = ("slime", "roll", "trinity")  # their number of steps overrides the epochs
_PACKED = ".mb_spec.max_tokens_per_mb"
_READ = (
    "prompt_field",
    "answer_field",
    "max_prompt_length",
    "overlong_prompts",
    "prompt_suffix",
    "system_prompt",
    "image_field",
)
_TRAINED = (
    "actor.",
    "critic.",
    "ref.",
    "gconfig.",
    "train_dataset.",
    "algorithm",
    "total_",
    "rollout.max_head",
    "reward",
)
_HOW = tuple(
    f"{role}.{part}" for role in ("actor", "critic", "ref") for part in ("megatron.recompute", "mb_spec", "env")
)


def complete(peer: Translation) -> None:
    """Add missing roles, and drop unused sections and values equal to our defaults."""
    for add in (_roles, _evaluation, _repetitions, _recomputation, _sampling):
        add(peer)
    ours = peer.ours
    name = re.sub(r"[^\w.-]", "-", str(ours.get("experiment_name", f"from-{peer.system}")))
    ours["experiment_name"] = name.strip(".-") or "run"
    if isinstance(steps := ours.get("total_train_steps"), int) and peer.system in _ENDLESS:
        ours["total_train_epochs"] = max(steps, 1)
    for key in ("actor.path", "train_dataset.path"):
        if ours.get(key) is None:
            peer.fill(key, "the configuration does not set it")
    if not any(key.startswith("reward.") for key in ours):
        peer.fill("reward.function", "the reward is code: write it as my_rewards.py:score, or set reward.type=gsm8k")
    _drop_defaults(peer)


def _sampling(peer: Translation) -> None:
    """Bound the number of sampled ids if sampling is truncated."""
    top_k, cut = peer.ours.get("gconfig.top_k", -1), peer.ours.get("gconfig.top_p", 1) != 1
    if isinstance(top_k, int) and (top_k > MOST_KEPT or (cut and top_k < 1)):
        peer.ours["gconfig.top_k"] = MOST_KEPT
        limit = "gconfig.top_k" if top_k > MOST_KEPT else "gconfig.top_p"
        key = next((key for key in peer.said if _maps_to(peer, key, limit)), limit)
        peer.changes[key] = f"at most the {MOST_KEPT} likeliest ids are sampled from (gconfig.top_k)"


def _maps_to(peer: Translation, key: str, ours: str) -> bool:
    """Return whether another system's key is only another name of ours."""
    found = entry(peer.system, key)
    return found is not None and found[1].ours == ours


def _roles(peer: Translation) -> None:
    ours = peer.ours
    needed = {
        "ref": any(ours.get(key) for key in _DIVERGENCES) or ours.get("algorithm") == "dpo",
        "critic": ours.get("algorithm") == "ppo",
    }
    for role, wanted in needed.items():
        own = [key for key in ours if key.startswith(f"{role}.")]
        if wanted and not own:
            ours[role] = {}
        for key in own if not wanted else ():
            del ours[key]
            if key in peer.said or f"now {key}" in peer.renamed.values():
                peer.unneeded[key] = f"the algorithm uses no {'reference' if role == 'ref' else 'critic'}"
    if not needed["ref"]:
        ours.pop("actor.kl_estimator", None)


def _sets(ours: Mapping[str, Any]) -> list[str]:
    """Return the sections of evaluation prompts."""
    return [
        key.removesuffix(".path") for key in ours if re.match(r"(valid_dataset|evaluator\.datasets\.\w+)\.path$", key)
    ]


def _evaluation(peer: Translation) -> None:
    """Read evaluation prompts like training prompts; without any, disable evaluation."""
    ours = peer.ours
    if "valid_dataset.path" in ours:
        if peer.system != "areal":
            for name in _READ:
                for place in _sets(ours) if (value := ours.get(f"train_dataset.{name}")) is not None else ():
                    ours.setdefault(f"{place}.{name}", value)
        return
    for key in [key for key in ours if key.startswith(("evaluator.", "valid_dataset."))]:
        del ours[key]
        if key in peer.renamed.values():
            peer.unneeded[key] = "the configuration names no evaluation prompts (valid_dataset.path)"


def _repetitions(peer: Translation) -> None:
    """Answer each evaluation prompt once where all of its answers would be the same."""
    for section in ("evaluator", *(place for place in _sets(peer.ours) if place != "valid_dataset")):
        names = [f"{section}.{name}" for name in ("temperature", "top_k", "n_samples")]
        temperature, top_k, n_samples = (peer.ours.get(name) for name in names)
        if temperature is None and section != "evaluator":
            continue
        greedy = temperature in (None, 0) or top_k == 1
        if greedy and n_samples not in (None, 1):
            peer.ours[names[2]] = 1
            peer.renamed[names[2]] = f"1, because the {n_samples} greedy answers to a prompt are the same"


def _recomputation(peer: Translation) -> None:
    for section in ("actor", "critic", "ref"):
        if peer.ours.get(f"{section}.megatron.recompute_granularity") != "full":
            continue
        settings = {f"{section}.megatron.{name}": setting for name, setting in _FULL.items()}
        if "fsdp" in str(peer.ours.get("allocation_mode")):
            for key in settings:
                peer.ours.pop(key, None)
            peer.ours[f"{section}.fsdp.gradient_checkpointing"] = True
        else:
            for key, setting in settings.items():
                peer.ours.setdefault(key, setting)


def _drop_defaults(peer: Translation) -> None:
    """Leave out values equal to our defaults; values written by the user stay, unless a preset has them."""
    name = peer.ours.get("algorithm")
    preset = settings_of(PRESETS[str(name)], ActorConfig()) if name in PRESETS else None
    said = {note.removeprefix("now ") for note in peer.renamed.values()} | set(peer.said) | {"reward.type"}
    for norm in _NORMS:
        _drop_norm(peer, norm, preset)
    for key in [key for key, value in peer.ours.items() if value != MISSING and key not in said]:
        if not key.startswith(_NORMS) and _default(key, preset) == peer.ours[key]:
            del peer.ours[key]


def _drop_norm(peer: Translation, norm: str, preset: Any) -> None:
    """Leave out a norm equal to the algorithm's; of another norm, leave out the default values."""
    keys = [key for key in peer.ours if key.startswith(f"{norm}.")]
    if not keys or preset is None:
        return
    own = NormConfig(**{key.rpartition(".")[2]: peer.ours[key] for key in keys})
    same = own == getattr(preset, norm.partition(".")[2])
    for key in keys:
        if same or peer.ours[key] == NormConfig.model_fields[key.rpartition(".")[2]].default:
            del peer.ours[key]
    if not same and own == NormConfig():
        peer.ours[norm] = {}


def _default(key: str, preset: Any) -> Any:
    """Return our default of a key."""
    section, _, leaf = key.partition(".")
    if section == "actor" and preset is not None and leaf.partition(".")[0] in KEYS:
        value: Any = preset
    elif section == "actor" and leaf.startswith(("reward_norm.", "adv_norm.")):
        return ...
    else:
        value = RunConfig.model_fields[section].get_default(call_default_factory=True)
    for name in leaf.split(".") if leaf else ():
        value = getattr(value, name, ...)
    return value


def drop_refused(peer: Translation) -> str:
    """Return the YAML without values that our keys reject; values that the user must fill in stay `???`."""
    ours = peer.ours
    for _ in range(4):
        try:
            config = load(yaml.safe_load(dump(_with_stand_ins(ours)))).config
        except ConfigError as error:
            refused = {str(found.key): found.message for found in error.findings}
            for key in [key for key in ours if key in refused]:
                notes = peer.changes if key.startswith(_TRAINED) and not key.startswith(_HOW) else peer.unneeded
                notes[key] = f"{ours.pop(key)!r} is left out: {refused.pop(key)}"
            for key, message in refused.items():
                peer.fill(key, message)
            continue
        _room(peer, config)
        break
    order = {key: place for place, key in enumerate(all_keys())}
    return dump(dict(sorted(ours.items(), key=lambda item: order.get(item[0], len(order)))))


_STAND_INS: Mapping[str, Any] = {"algorithm": "grpo", "allocation_mode": "sglang:d1+fsdp:d1"}


def fill_placeholders(text: str) -> str:
    """Return a migrated YAML with placeholder values for `???`, so that the rest can be checked."""
    return dump(_with_stand_ins(dict(_flat(yaml.safe_load(text), ""))))


def _flat(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _with_stand_ins(ours: Mapping[str, Any]) -> dict[str, Any]:
    values = dict(ours)
    for key in [key for key, value in ours.items() if value == MISSING]:
        kind = str(annotation_of(key))
        values[key] = _STAND_INS.get(key, "my_file.py:run" if "str" in kind else True if "bool" in kind else 1)
    return values


def _room(peer: Translation, config: RunConfig) -> None:
    """Remove a context length that is too short, and enlarge micro-batches for the longest sequence."""
    if config.sglang.context_length and config.context_length < (needed := config.longest_generated + SERVER_RESERVE):
        length = peer.ours.pop("sglang.context_length", None)
        peer.unneeded["sglang.context_length"] = f"{length} is too short and left out: the run needs {needed}"
    if config.actor.mb_spec.max_tokens_per_mb < config.longest_sequence:
        peer.ours[f"actor{_PACKED}"] = room = -(-config.longest_sequence // 1024) * 1024
        peer.renamed[f"actor{_PACKED}"] = f"{room}, because the longest sequence must fit"
