"""`python -m allocation` is the command `allocation`."""

from allocation.cli import app

app(prog_name="allocation")
