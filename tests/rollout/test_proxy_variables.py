"""Requests to servers go to the servers, whatever proxy the environment names."""

from __future__ import annotations

import asyncio

import pytest
from fake_server import FakeServer, serving
from limits import HUNG_S

from areal_like.core.rollout.pool import ServerPool


@pytest.mark.parametrize("variable", ["http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy", "ALL_PROXY"])
def test_requests_to_servers_ignore_the_proxy_of_the_environment(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "http://127.0.0.1:9")  # where nothing listens

    async def run() -> str:
        async with serving(FakeServer()) as urls, ServerPool(urls, "token", HUNG_S) as pool:
            return await pool.servers[0].weight_version(HUNG_S)

    assert asyncio.run(asyncio.wait_for(run(), HUNG_S))
