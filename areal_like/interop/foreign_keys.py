"""Explains the keys of other systems where a key is unknown."""

from areal_like.interop.keys import known_elsewhere

FOREIGN_KEYS = [known_elsewhere]
