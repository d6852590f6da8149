"""Conversion of other systems' configurations and launch scripts to a run's YAML; nothing in them is evaluated."""

import re
from collections.abc import Iterator
from typing import Any

import yaml

from allocation.convert.settings import NULL, Reading, Setting
from areal_like.core.config.keys import all_keys, annotation_of
from areal_like.interop.completion import complete, drop_refused
from areal_like.interop.keys import TITLES, defaults_of, entry, plain_key
from areal_like.interop.keys.entries import Entry, rename
from areal_like.interop.layouts import share_trainer_gpus, write_layout
from areal_like.interop.rules import RULES
from areal_like.interop.rules.translation import MISSING, Translation

_FROM_ENVIRONMENT = re.compile(r"\$\{oc\.env:\w{1,99},([^${}\n]{0,999})\}")
_MODEL_OPTIONS = re.compile(r"\$\{MODEL_ARGS\[@\]\}")  # slime's files of the model's sizes, which config.json has
_OPEN = re.compile(r"\$\{[\w.:]")  # a reference that nothing resolves
_NAMES = ("experiment_name", "trial_name", "cluster.fileroot")  # which a run may choose itself
_DEEPEST = 20
_LISTS = ("target_modules", "recompute_modules", "stop_token_ids")
_SECTIONS = {key.partition(".")[0] for key in all_keys()}
_TELLING = {  # keys that identify a system
    "slime": r"--(rollout-num-gpus|hf-checkpoint|rollout-batch-size)\b",
    "siirl": r"\bsiirl\b",
    "trinity": r"(?m)^(explorer|synchronizer|buffer):|trainer_config:",
    "roll": r"(?m)^(actor_train|actor_infer|pretrain|num_return_sequences_in_group|sft_train|student):",
    "verl": r"\bactor_rollout_ref\b|\bverl\.trainer\b",
    "areal": r"(?m)^(gconfig|rollout|actor|allocation_mode|async_training):|\b(actor|rollout)\.backend=|\ballocation_mode=",
}


def migrate(text: str, system: str | None = None) -> Translation:
    """Return a run's YAML from a configuration or a script; `system` is one of `TITLES`, or detected from the keys."""
    text = _with_defaults(text)
    system = system or next((name for name, keys in _TELLING.items() if re.search(keys, text)), None)
    if system is None:
        known = ", ".join(TITLES.values())
        return Translation("", problems=[f"this is not a configuration of {known}: it has none of their keys"])
    reading = Reading.of_command(text) if system == "slime" else Reading.of_config(_as_actor(text, system))
    if not reading.settings:
        return Translation(system, problems=[str(found) for found in reading.findings] or ["it contains no settings"])
    peer = Translation(system, defaults=defaults_of(system, text), problems=list(_unread(reading)))
    peer.said = dict(_read_settings(reading, peer))
    unknown = dict(peer.changes)
    _translate(peer)
    write_layout(reading, peer)
    _follow(peer, text)
    share_trainer_gpus(peer)
    peer.changes |= unknown
    complete(peer)
    peer.yaml = drop_refused(peer)
    return peer


def _with_defaults(text: str) -> str:
    """Return the text with the defaults of environment variables in their place, as `${oc.env:NAME,default}`."""
    for _ in range(_DEEPEST):
        filled = _FROM_ENVIRONMENT.sub(r"\1", text)
        if filled == text:
            break
        text = filled
    return text


def _unread(reading: Reading) -> Iterator[str]:
    """Yield the parts of a script that the script alone does not give: all of the result may depend on them."""
    if reading.trainings:
        lines = ", ".join(map(str, reading.trainings))
        yield f"the script starts several trainings with other settings, in lines {lines}: keep one of them"
    for part in reading.unread:
        if not _MODEL_OPTIONS.fullmatch(part.text):
            why = ", ".join(part.reasons)
            yield f"line {part.line}: the settings in {part.text} are not read: they depend on {why}. Write them out"


def _as_actor(text: str, system: str) -> str:
    """Return ROLL's configuration with the sections of its other pipelines renamed as in its RL pipeline."""
    if system == "roll":
        for section, actor in (("(?:sft|student)_train", "actor_train"), ("student_infer", "actor_infer")):
            text = re.sub(rf"(?m)^{section}:", f"{actor}:", text)
    return text


def _read_settings(reading: Reading, peer: Translation) -> Iterator[tuple[str, Any]]:
    """Yield the settings with their values; a null is None, and a value known only to the shell is left to the user."""
    for key in reading.settings:
        if key.isupper():
            continue
        found = reading.find(key)
        if found is None or found.value in NULL:
            yield key, None
        elif not found.unknown and not _OPEN.search(found.value):
            yield key, _plain(found.value)
        else:
            yield from _read_unknown(key, found, peer)


def _read_unknown(key: str, found: Setting, peer: Translation) -> Iterator[tuple[str, Any]]:
    """Yield a setting whose value is not in the text, and note its dependencies."""
    known = entry(peer.system, key)
    target = known[1].ours if known else None
    why = f"{found.value} depends on {', '.join(found.unknown) or 'values outside the text'}"
    if target in _NAMES:
        peer.unneeded[key] = f"{why}; the default of {target} is used"
    elif target and annotation_of(target) is not None:
        peer.missing[target] = f"{key}: {why}"
        yield key, MISSING
    elif known and known[1].together == "evaluator.datasets" and found.value.count(",") == 1:
        peer.missing["valid_dataset.path"] = f"{key}: {why}"
    elif not found.unknown and re.fullmatch(r"\$\{[\w.]+\}", found.value):  # refers to a section
        yield key, found.value
    elif known is None or not known[1].unneeded:
        peer.changes[key] = why
        if known and known[1].together:
            yield key, found.value
    else:
        peer.unneeded[key] = known[1].unneeded


def _plain(text: str) -> Any:
    """Return the value that YAML reads, without creating objects: a scalar, a list, or the text."""
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):
        return text
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value):
        return float(value)
    return value if isinstance(value, bool | int | float | str | list) else text


def _translate(peer: Translation) -> None:
    """Write every setting, and the other system's defaults, that have a key here; note the others."""
    ours = set(all_keys())
    settings = {**{key: value for key, value in peer.defaults.items() if key not in peer.said}, **peer.said}
    for key, value in settings.items():
        name, found = entry(peer.system, key) or (key, None)
        if peer.system == "areal" and key in ours and (found is None or name != key):
            found = rename(key)
        if found is None and peer.system == "areal" and key.partition(".")[0] not in _SECTIONS:
            peer.missing["workflow"] = f"{key.partition('.')[0]} belongs to AReaL's training script: write a workflow"
            peer.unneeded[key] = "this key belongs to AReaL's training script; set the parameters of the workflow"
        elif found is None:
            peer.changes[key] = f"{value!r}: unknown key, so its effect is unknown"
        elif found.ours:
            _write(peer, key, plain_key(key)[len(name) :] if found.below else "", found, value)
        elif found.changes:
            note = peer.unneeded if value in found.same or str(value) in map(str, found.same) else peer.changes
            text = "has no effect with this value" if note is peer.unneeded else f"{value!r}: {found.changes}"
            if key in peer.said:
                note[key] = text
        elif key in peer.said and found.unneeded:
            peer.unneeded[key] = found.unneeded
        elif key in peer.said and found.together != key:
            peer.renamed[key] = f"now {found.together}"


def _write(peer: Translation, key: str, rest: str, found: Entry, value: Any) -> None:
    """Write one value under our name of its key."""
    target = f"{found.ours}{rest}"
    if isinstance(value, str) and value.startswith("${actor."):
        peer.unneeded[key] = "the actor's value is the default"
        return
    if value is None and key in peer.said:
        peer.unneeded[key] = "null"
        return
    if found.values is not None and not isinstance(value, list):
        value = found.values.get(str(value), value)
    if target.endswith(_LISTS):
        items = value if isinstance(value, list) else [value]
        value = [one for item in items for one in _as_list((found.values or {}).get(str(item), item))]
    elif isinstance(value, list) and annotation_of(target) is not None:
        value = _first(peer, key, target, value)
    elif ".env_vars." in target:
        value = str(value)
    if value is None:
        peer.unneeded[key] = "left unset here for this value"
        return
    peer.ours[target] = value
    if key in peer.said and target != key:
        peer.renamed[key] = f"now {target}"


def _first(peer: Translation, key: str, target: str, values: list[Any]) -> Any:
    """Return the only item of a list; for several evaluation sets, the first and a note; for other data, None."""
    if len(values) <= 1:
        return values[0] if values else None
    if target == "train_dataset.path":
        why = f"{', '.join(map(str, values))} form one set: join them in my_data.py:rows, or in a mixture"
        peer.missing[target] = why
        return MISSING
    if target == "valid_dataset.path":
        for place, value in enumerate(values[1:], 2):
            name = re.sub(r"\W+", "_", str(value).rpartition("/")[2].partition(".")[0]) or "set"
            peer.ours[f"evaluator.datasets.{name}_{place}.path"] = value
        return values[0]
    peer.changes[key] = f"only {values[0]}, without {', '.join(map(str, values[1:]))}"
    return values[0]


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _follow(peer: Translation, text: str) -> None:
    """Write the values that follow from several keys, and `???` for values that the user must set."""
    RULES[peer.system](peer, text)
    for key in peer.missing:
        peer.ours[key] = MISSING
