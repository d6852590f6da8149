"""Ports of a host that are reserved for the run (`cluster.ports`)."""

import errno
import os
import socket
from random import SystemRandom

PORTS_VARIABLE = "AREAL_LIKE_PORTS"  # the range, in the environment of every process of the run


def reserve_port(host: str, port: int = 0) -> socket.socket:
    """Return a socket that reserves a port of this host's address until it is closed; port 0 means any free port.

    Such a port is one of the run's range. The system does not assign the reserved port to other processes, but a server
    that requests it with SO_REUSEADDR, as servers do, can listen on it. Raises OSError if the port, or every port of
    the range, is taken.
    """
    if port == 0 and (text := os.environ.get(PORTS_VARIABLE)):
        return _reserve_in_range(host, text)
    holder = socket.socket(_family(host))
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        holder.bind((host, port))
    except OSError:
        holder.close()
        raise
    return holder


def listen(host: str, port: int = 0) -> socket.socket:
    """Return a socket that listens on this address only; raises OSError as `reserve_port`.

    Its descriptor can be a TCPStore's `master_listen_fd`, which would otherwise listen on every interface.
    """
    listener = reserve_port(host, port)
    listener.listen(2048)
    return listener


def stop_listening(descriptor: int) -> None:
    """Close a listening socket whose descriptor belongs to a TCPStore, as soon as no rank has to connect any more.

    The store keeps its connections, and later closes the unused socket that takes the descriptor.
    """
    with socket.socket() as unused:
        os.dup2(unused.fileno(), descriptor, inheritable=False)


def _reserve_in_range(host: str, text: str) -> socket.socket:
    ports = list(port_range(text))
    SystemRandom().shuffle(ports)  # runs that start together on a host rarely try the same port
    for port in ports:
        holder = socket.socket(_family(host))
        try:
            # without SO_REUSEADDR, which would let two holders have the same port
            holder.bind((host, port))
        except OSError as error:
            holder.close()
            if error.errno != errno.EADDRINUSE:
                raise
            continue
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # for the server that will listen there
        return holder
    raise OSError(errno.EADDRINUSE, f"all ports of cluster.ports={text} are in use on this host. Widen the range")


def port_range(text: str) -> range:
    """Return the ports of a range such as `20000-20999`. Raises ValueError."""
    first, _, last = text.partition("-")
    if not 1024 <= int(first) <= int(last) <= 65535:
        raise ValueError(f"{text} is not FIRST-LAST with 1024 <= FIRST <= LAST <= 65535")
    return range(int(first), int(last) + 1)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
