"""The time limit of what should have ended: it is reached by what hangs, not by what is slow."""

HUNG_S = 600  # a busy machine has stood still for 90 seconds
