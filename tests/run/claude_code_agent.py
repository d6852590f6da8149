"""An agent that sends a recorded request of Claude Code with all its fields, and continues the conversation once."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import httpx

RECORDED = Path(__file__).parents[1] / "workflows/client_requests.jsonl"


def main() -> None:
    """Count the tokens, ask twice through HTTP, and print the share of digits as the reward."""
    rows = map(json.loads, RECORDED.read_text().splitlines())
    row: dict[str, Any] = next(row for row in rows if row["client"] == "claude-tools")
    body, said = row["body"], ""
    json.load(sys.stdin)
    url = os.environ["ANTHROPIC_BASE_URL"]
    headers = row["headers"] | {"x-api-key": os.environ["ANTHROPIC_API_KEY"]}
    with httpx.Client(headers=headers, timeout=600) as client:
        for _ in range(2):
            counted = {name: value for name, value in body.items() if name not in ("max_tokens", "stream")}
            tokens = client.post(f"{url}/v1/messages/count_tokens?beta=true", json=counted).raise_for_status().json()
            reply = client.post(url + row["path"], json=body | {"stream": False}).raise_for_status().json()
            assert reply["usage"]["input_tokens"] == tokens["input_tokens"]
            said += "".join(block.get("text", "") for block in reply["content"])
            result = [{"type": "text", "text": "go on", "cache_control": {"type": "ephemeral"}}]
            body["messages"] += [
                {"role": "assistant", "content": reply["content"]},
                {"role": "user", "content": result},
            ]
        client.post(url + row["path"], json=body | {"stream": True}).raise_for_status()
    print(sum(character.isdigit() for character in said) / (len(said) + 1))


if __name__ == "__main__":
    main()
