"""Values that follow from several keys of another system: one module per system, whose `rules` write our values."""

from collections.abc import Callable, Mapping

from areal_like.interop.rules import areal, roll, slime, trinity, verl
from areal_like.interop.rules.translation import Translation

RULES: Mapping[str, Callable[[Translation, str], None]] = {
    "areal": areal.rules,
    "verl": verl.rules,
    "siirl": verl.rules,
    "trinity": trinity.rules,
    "roll": roll.rules,
    "slime": slime.rules,
}
