"""Agents on a host of their own: a service that plays an episode for whoever sends an address and a key.

    python remote_agents.py ADDRESS PORT FILE

Each request has the endpoint's address, the key of an episode and a question. The agent is a client of OpenAI without
any part of the engine; FILE gets a line with address and key for each episode.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import httpx
import openai
from aiohttp import web

WORKFLOW = """
import itertools
import httpx

AGENTS = itertools.cycle({urls!r})

async def run(row, client):
    episode = {{"base_url": str(client.base_url), "api_key": client.api_key, "question": row["question"]}}
    async with httpx.AsyncClient(trust_env=False, timeout=None) as http:
        reply = await http.post(next(AGENTS), json=episode)
    digits = "".join(reply.raise_for_status().json())
    return digits.count("1") / max(1, len(digits))
"""


def service(seen: Path) -> web.Application:
    """Return the service; `seen` gets the episodes."""

    async def play(request: web.Request) -> web.Response:
        episode: dict[str, str] = await request.json()
        with seen.open("a") as file:
            file.write(f"{episode['base_url']} {episode['api_key']}\n")
        answers = await converse(episode["base_url"], episode["api_key"], episode["question"])
        return web.json_response(answers)

    app = web.Application()
    app.router.add_post("/", play)
    return app


async def converse(base_url: str, api_key: str, question: str) -> list[str]:
    """Return the answers of two turns."""
    messages: list[Any] = [{"role": "user", "content": question}]
    async with (
        httpx.AsyncClient(trust_env=False, timeout=None) as http,
        openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http) as client,
    ):
        for _ in range(2):
            completion = await client.chat.completions.create(model="policy", messages=messages)
            answer = str(completion.choices[0].message.content)
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "again"}]
    return [message["content"] for message in messages if message["role"] == "assistant"]


if __name__ == "__main__":
    web.run_app(service(Path(sys.argv[3])), host=sys.argv[1], port=int(sys.argv[2]), print=None)
