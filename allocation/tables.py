"""Builds `tables.json` from `grammar.lark` with Lark: `python -m allocation.tables`.

Lark computes the LALR(1) tables; only they are shipped, because loading Lark takes longer than a whole
`allocation count`. A test keeps the file current.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
START = ("allocation", "member")


def build() -> dict[str, Any]:
    """The LALR tables of the grammar, as JSON-able data.

    `states[i]` maps a terminal to `[next state]` (shift) or a rule number (reduce), and a rule's name to
    `[state after it]` (goto). Terminals come in the order in which they are tried.
    """
    from lark import Lark
    from lark.parsers.lalr_analysis import Shift

    lark = Lark((FOLDER / "grammar.lark").read_text(), parser="lalr", start=list(START), maybe_placeholders=False)
    table = lark.parser.parser.parser.parse_table
    rules: list[list[Any]] = []
    rule_numbers: dict[Any, int] = {}
    # States are numbered in the order in which they are reached, so that the file does not depend on hash order.
    reached = [table.start_states[name] for name in START]
    state_numbers = {state: number for number, state in enumerate(reached)}
    rows = []
    for state in reached:
        row: dict[str, Any] = {}
        for symbol, (action, argument) in sorted(table.states[state].items()):
            if action is Shift:
                if argument not in state_numbers:
                    state_numbers[argument] = len(reached)
                    reached.append(argument)
                row[symbol] = [state_numbers[argument]]
            else:
                if argument not in rule_numbers:
                    rule_numbers[argument] = len(rules)
                    rules.append(_rule(argument))
                row[symbol] = rule_numbers[argument]
        rows.append(row)
    return {
        "terminals": {
            t.name: t.pattern.to_regexp() for t in sorted(lark.terminals, key=lambda t: (-t.priority, t.name))
        },
        "ignore": list(lark.ignore_tokens),
        "start": {name: state_numbers[table.start_states[name]] for name in START},
        "end": {name: state_numbers[table.end_states[name]] for name in START},
        "rules": rules,
        "states": rows,
    }


def _rule(rule: Any) -> list[Any]:
    """`[symbol it yields, action, number of symbols, positions kept]`; Lark's own repetitions start with `_`."""
    kept = [i for i, symbol in enumerate(rule.expansion) if not getattr(symbol, "filter_out", False)]
    action = rule.alias or rule.origin.name
    return [rule.origin.name, action, len(rule.expansion), kept]


def dump() -> str:
    """The text of `tables.json`."""
    return json.dumps(build(), separators=(",", ":")) + "\n"


if __name__ == "__main__":
    (FOLDER / "tables.json").write_text(dump())
