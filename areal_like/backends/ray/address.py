"""The address of an existing Ray cluster."""

import os
import re
import socket
import sys
from pathlib import Path

CONNECT_LIMIT_S = 10.0


def address_problem(address: str) -> tuple[str, str] | None:
    """Connect to the `address` of an existing cluster; return the problem and a fix, or None.

    Ray itself would search for minutes, or start a cluster.
    """
    named, source = resolve_address(address)
    if named == "auto":
        return None
    name = f"{named} (`auto`, from {source})" if source else named
    parts = re.fullmatch(r"(?P<host>\[[^]\s]+\]|[^:\s]+):(?P<port>[0-9]{1,5})", named)
    if parts is None or int(parts["port"]) > 65535:
        return f"{name!r} is not `auto` or HOST:PORT", "write it like 10.0.0.1:6379"
    try:
        socket.create_connection((parts["host"].strip("[]"), int(parts["port"])), CONNECT_LIMIT_S).close()
    except socket.gaierror as error:
        help = "name it in DNS or in this host's /etc/hosts, or write the IP address of the cluster's first node"
        return f"the host name in {name} does not resolve on this host: {error.strerror}", help
    except (OSError, UnicodeError) as error:  # a host name may be too long for its codec
        help = f"start a cluster there with `ray start --head --port {parts['port']}`, or set scheduler.type=local"
        return f"nothing answers at {name}: {error}", help
    return None


def resolve_address(address: str) -> tuple[str, str]:
    """Return the resolved address, and its source if that is not this text. Ray uses the same two sources.

    `ray start` writes the file, which stays when that cluster is killed (Ray 2.60 `_common/utils.py`,
    `get_ray_address_file`).
    """
    if address != "auto":
        return address, ""
    if named := os.environ.get("RAY_ADDRESS"):
        return named, "RAY_ADDRESS"
    temporary = os.environ.get("TMPDIR", "/tmp") if sys.platform == "linux" else "/tmp"
    last = Path(os.environ.get("RAY_TMPDIR", temporary), "ray", "ray_current_cluster")
    return (last.read_text().strip(), str(last)) if last.is_file() else (address, "")
