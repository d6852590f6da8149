"""The command `allocation`: check, explain, memory, plan, count, groups, convert, format, explain-code.

Commands import only the modules that they need: `count` takes little longer than the start of Python.
"""

from __future__ import annotations

import sys
from io import TextIOWrapper

import typer

from allocation.cli.conversions import convert, explain_code, format_
from allocation.cli.layouts import check, count, explain, groups
from allocation.cli.predictions import memory, plan

app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]}
)


@app.callback()
def main() -> None:
    """Compile allocation strings: engines, their parallel sizes and their GPUs.

    Quote a string that has ( ) or | in it. In place of a string, check,
    explain, count and groups take a run's YAML with key=value after it, and -
    for one string per line of standard input.

    \b
    Examples:
      allocation check 'sglang:d4t2+megatron:(attn:d2t2c2|ffn:e4)' --cluster 2x8
      allocation explain megatron:attn:d1p4t2c2/ffn:d1p4t1e4
      allocation count sglang:d4t4
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without Unicode gets `?`, not a traceback


for command in (check, explain, memory, plan, count, groups, convert):
    app.command()(command)
app.command("format")(format_)
app.command("explain-code")(explain_code)
