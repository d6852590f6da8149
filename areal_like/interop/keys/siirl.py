"""siiRL's keys: verl's, and few of its own."""

from areal_like.interop.keys.entries import LAYOUT, Table
from areal_like.interop.keys.verl import VERL

SIIRL: Table = {**VERL, "trainer.trainer_strategy": LAYOUT}
