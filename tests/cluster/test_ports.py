"""Ports that a run opens come from `cluster.ports`, at IPv4 and IPv6 addresses; unknown host names are reported."""

from __future__ import annotations

import os
import secrets
import socket
from contextlib import ExitStack

import pytest
from limits import HUNG_S
from torch.distributed import TCPStore

from areal_like.backends.ray.address import address_problem
from areal_like.backends.ray.lifetime import run_lifetime
from areal_like.backends.ray.placement import url
from areal_like.capabilities.agents.endpoint import Endpoint
from areal_like.capabilities.agents.openai_api import OpenSessions
from areal_like.capabilities.agents.schema import EpisodeConfig
from areal_like.core.config.findings import ConfigError
from areal_like.core.config.load import load
from areal_like.runtime.ports import PORTS_VARIABLE, listen, port_range, reserve_port, stop_listening

PORTS = "21000-21015"


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> str:
    """A loopback address that no other process uses, in a run with a range of ports."""
    monkeypatch.setenv(PORTS_VARIABLE, PORTS)
    return ".".join(["127", *(str(1 + secrets.randbelow(250)) for _ in range(3))])


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def test_every_port_of_the_range_is_kept_once_and_then_the_key_is_named(host: str) -> None:
    kept = list[socket.socket]()
    with ExitStack() as held:

        def keep_all() -> None:
            while True:
                kept.append(held.enter_context(reserve_port(host)))

        with pytest.raises(OSError, match=f"all ports of cluster.ports={PORTS} are in use"):
            keep_all()
        ports = [each.getsockname()[1] for each in kept]
    assert len(set(ports)) == len(ports)
    assert set(ports) <= set(port_range(PORTS))


def test_a_server_listens_on_a_port_that_is_kept_for_it_and_no_other_holder_does(host: str) -> None:
    with reserve_port(host) as held, socket.create_server(held.getsockname()) as server:
        assert server.getsockname() == held.getsockname()


def test_a_listener_takes_a_port_of_the_range_and_a_given_one_is_used_as_it_is(host: str) -> None:
    with listen(host) as listener, socket.create_connection(listener.getsockname(), 10):
        assert listener.getsockname()[1] in port_range(PORTS)
        with pytest.raises(OSError, match="in use"):
            listen(host, listener.getsockname()[1])


def test_an_address_that_is_not_this_hosts_is_no_port_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PORTS_VARIABLE, PORTS)
    with pytest.raises(OSError, match="Cannot assign"):
        reserve_port("192.0.2.1")


@pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6 loopback address")
def test_an_ipv6_address_is_listened_on_and_has_brackets_in_urls(monkeypatch: pytest.MonkeyPatch) -> None:
    with listen("::1") as listener, socket.create_connection(listener.getsockname()[:2], 10):
        assert url("::1", listener.getsockname()[1]).startswith("http://[::1]:")
    with Endpoint(OpenSessions(), EpisodeConfig(endpoint_host="::1")) as endpoint:
        assert endpoint.base_url.startswith("http://[::1]:")


def test_the_endpoint_takes_a_port_of_the_range(host: str) -> None:
    with Endpoint(OpenSessions(), EpisodeConfig(endpoint_host=host)) as endpoint:
        assert int(endpoint.base_url.rpartition(":")[2].partition("/")[0]) in port_range(PORTS)


def test_processes_of_a_run_know_its_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PORTS_VARIABLE, raising=False)
    with run_lifetime(secrets.token_hex(6), ports=PORTS):
        assert os.environ[PORTS_VARIABLE] == PORTS
    assert PORTS_VARIABLE not in os.environ


@pytest.mark.parametrize("text", ["5-6", "3000-2000", "60000-70000"])
def test_a_wrong_range_is_refused(text: str, write) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.ports .* should be FIRST-LAST"):
        load(write(), [f"cluster.ports={text}"])
    with pytest.raises(ValueError, match="is not FIRST-LAST"):
        port_range(text)


def test_a_name_that_does_not_resolve_is_not_called_a_cluster_that_does_not_answer(monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "create_connection", fail)
    problem, help = address_problem("head.cluster.test:6379") or ("", "")
    assert problem == (
        "the host name in head.cluster.test:6379 does not resolve on this host: Name or service not known"
    )
    assert "/etc/hosts" in help


def test_a_port_of_a_store_is_closed_once_all_ranks_are_connected() -> None:
    listener = listen("127.0.0.1")
    port, descriptor = listener.getsockname()[1], listener.detach()
    store = TCPStore("127.0.0.1", port, 1, True, wait_for_workers=False, master_listen_fd=descriptor)
    stop_listening(descriptor)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), HUNG_S)
    store.set("key", "value")
    assert store.get("key") == b"value"
