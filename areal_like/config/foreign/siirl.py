"""siiRL's keys: verl's, and few of its own."""

from areal_like.config.foreign.entries import LAYOUT, Table
from areal_like.config.foreign.verl import VERL

SIIRL: Table = {**VERL, "trainer.trainer_strategy": LAYOUT}
