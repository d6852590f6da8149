"""Secrets in a configuration, which are never printed or stored: variables, passwords in URLs, tokens."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

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
