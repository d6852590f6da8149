"""The schema as dotted keys with their types, for overrides, suggestions and the reference.

Secrets among the values are never printed or stored: variables, passwords in URLs, tokens.
"""

import re
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, Union, get_args, get_origin

from areal_like.core.config.schema import RunConfig, Section


def members(annotation: Any) -> tuple[Any, ...]:
    """Return the alternatives of a type: `str | None` gives `(str, NoneType)`, any other type itself."""
    return get_args(annotation) if get_origin(annotation) in (types.UnionType, Union) else (annotation,)


def section_of(annotation: Any) -> type[Section] | None:
    """Return the section that a type holds, if it holds one."""
    return next(
        (member for member in members(annotation) if isinstance(member, type) and issubclass(member, Section)), None
    )


def entries_of(annotation: Any) -> type[Section] | None:
    """Return the section of each entry of a type such as `dict[str, Section]`."""
    return section_of(get_args(annotation)[1]) if get_origin(annotation) is dict else None


def annotation_of(key: str) -> Any | None:
    """Return the type of a dotted key, or None if the key is unknown."""
    annotation: Any = RunConfig
    for part in key.split("."):
        section = section_of(annotation)
        if section is not None:
            if part not in section.model_fields:
                return None
            annotation = section.model_fields[part].annotation
        elif get_origin(annotation) is dict:
            annotation = get_args(annotation)[1]
        elif annotation is not Any:
            return None
    return annotation


def all_keys(section: type[Section] = RunConfig, prefix: str = "") -> Iterator[str]:
    """Yield every dotted key of the schema, sections included."""
    for name, info in section.model_fields.items():
        yield prefix + name
        inner = section_of(info.annotation)
        if inner is not None:
            yield from all_keys(inner, f"{prefix}{name}.")


def with_keys[S: Section](section: Section, keys: type[S]) -> S:
    """Return a section as one with the keys that a capability adds to it (KEYS of its `schema.py`)."""
    if not isinstance(section, keys):
        raise TypeError(f"{type(section).__name__} has no keys of {keys.__name__}: name it in KEYS")
    return section


def takes_text(annotation: Any) -> bool:
    """Return whether a value of this type is text as it stands, independent of its YAML form."""
    return all(
        member in (str, types.NoneType)
        or (get_origin(member) is Literal and all(isinstance(c, str) for c in get_args(member)))
        for member in members(annotation)
    )


def is_below(keys: Iterable[str], section: str) -> bool:
    """Return whether one of the dotted keys is `section` or lies in it."""
    return any(key == section or key.startswith(f"{section}.") for key in keys)


def value_at(data: Any, key: str) -> Any:
    """Return the value at a dotted key of nested mappings, None where there is none."""
    for part in key.split("."):
        data = data.get(part) if isinstance(data, dict) else None
    return data


MASK = "***"
_ALL_BELOW = re.compile(r"_vars$")  # a section whose values are the environment of a process
_KEY = re.compile(r"(^|[_-])(api[_-]?key|token|secret|password|passwd)$", re.IGNORECASE)
_PASSWORD = re.compile(r"(?<=://)([^/@\s:]*):[^/@\s]*@")


def mask(values: Any, name: str = "") -> Any:
    """Return nested values with `***` in the place of possible secrets; `name` is the key that they have."""
    if isinstance(values, Mapping):
        everything = bool(_ALL_BELOW.search(name))
        return {key: MASK if everything else mask(value, str(key)) for key, value in values.items()}
    if isinstance(values, list):
        return [mask(value) for value in values]
    if not isinstance(values, str):
        return values
    return MASK if _KEY.search(name) else mask_urls(values)


def mask_urls(text: str) -> str:
    """Return a text whose URLs have `***` in the place of passwords."""
    return _PASSWORD.sub(rf"\1:{MASK}@", text)


def is_secret(key: str) -> bool:
    """Return whether the value of a dotted key is never shown."""
    section, _, name = key.rpartition(".")
    return bool(_ALL_BELOW.search(section) or _KEY.search(name))


def find_masked_keys(values: Any, key: str = "") -> Iterator[str]:
    """Return the dotted keys whose values were masked, as they are where a run's own `config.yaml` is read."""
    if isinstance(values, Mapping):
        for name, value in values.items():
            yield from find_masked_keys(value, f"{key}.{name}" if key else str(name))
    elif isinstance(values, str) and ((values == MASK and is_secret(key)) or f":{MASK}@" in values):
        yield key
