"""`python -m areal_like` is the command `areal-like`."""

from areal_like.commands import main

main()
