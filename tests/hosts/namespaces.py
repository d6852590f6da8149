"""Hosts on one machine, made of Linux namespaces: own addresses, processes, names, /tmp and /dev/shm.

A host is the tree of one init process, and the network between hosts is a bridge in a namespace of its own. Nothing has
a name on the machine itself, so that everything is gone with its processes, however a test ends.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

NETWORKS = ("10.78.0.", "10.79.0.")  # the second one where a test asks for it
NETWORKS6 = ("fd00:78::", "fd00:79::")
TOOLS = ("ip", "nsenter", "unshare", "mount")
# the first process of a host: shares directories below /tmp, and waits for orphans
_INIT = """
import os, pathlib, subprocess, sys, time, uuid
name, hosts, *shared = sys.argv[1:]
mount = lambda *words: subprocess.run(("mount", *words), check=True)
mount("--make-rprivate", "/")
descriptors = [(path, os.open(path, os.O_PATH)) for path in shared]
for path in ("/tmp", "/dev/shm"):
    mount("-t", "tmpfs", "tmpfs", path)
for path, descriptor in descriptors:
    os.makedirs(path, exist_ok=True)
    subprocess.run(("mount", "--no-canonicalize", "--bind", f"/proc/self/fd/{descriptor}", path), check=True,
                   pass_fds=(descriptor,))
pathlib.Path("/tmp/home").mkdir()
pathlib.Path("/tmp/.etc-hosts").write_text(hosts)
mount("--bind", "/tmp/.etc-hosts", "/etc/hosts")
pathlib.Path("/tmp/.boot-id").write_text(f"{uuid.uuid4()}\\n")
mount("--bind", "/tmp/.boot-id", "/proc/sys/kernel/random/boot_id")
subprocess.run(("hostname", name), check=True)
print("ready", flush=True)
while True:
    try:
        os.wait()
    except ChildProcessError:
        time.sleep(0.2)
"""


def reason_to_skip() -> str | None:
    """Return why no hosts can be made here, or None where they can."""
    if os.geteuid():
        return "hosts are made of network namespaces, which need root"
    if lacking := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"hosts are made of network namespaces, and {', '.join(lacking)} is not installed"
    probe = ("unshare", "--net", "--mount", "--pid", "--fork", "ip", "link", "add", "br0", "type", "bridge")
    made = subprocess.run(probe, capture_output=True, text=True, check=False)
    return f"this system makes no network namespaces: {made.stderr.strip()}" if made.returncode else None


@dataclass(frozen=True)
class Host:
    """One host; `init` is its first process as the machine sees it."""

    number: int
    init: psutil.Process
    switch: int
    ipv6: bool

    @property
    def address(self) -> str:
        return self.address_in(0)

    def address_in(self, network: int) -> str:
        """Return the address of interface `eth0` or `eth1`."""
        return f"{(NETWORKS6 if self.ipv6 else NETWORKS)[network]}{self.number}"

    @property
    def netloc(self) -> str:
        """The address as a URL has it."""
        return f"[{self.address}]" if self.ipv6 else self.address

    @property
    def entering(self) -> list[str]:
        """What a command on this host begins with."""
        return ["nsenter", "--all", f"--wdns={Path.cwd()}", f"--target={self.init.pid}", "env", "HOME=/tmp/home"]

    def start(self, *command: str | Path, **options: Any) -> subprocess.Popen[Any]:
        """Start a command on this host."""
        return subprocess.Popen([*self.entering, *map(str, command)], **options)

    def cut(self, network: int = 0) -> None:
        """Unplug the cable of a network."""
        self._set("down", network)

    def mend(self, network: int = 0) -> None:
        """Plug the cable in again."""
        self._set("up", network)

    def kill(self) -> None:
        """Switch the host off: all of its processes are gone at once."""
        self.init.kill()

    def runs(self, process: psutil.Process) -> bool:
        """Whether a process is on this host; what made the host shares its network, but not its processes."""
        return os.readlink(f"/proc/{process.pid}/ns/pid") == os.readlink(f"/proc/{self.init.pid}/ns/pid")

    def processes(self) -> list[psutil.Process]:
        """All processes on this host but its first one."""
        found = []
        for process in psutil.process_iter():
            with suppress(OSError):  # it has just ended
                if process.pid != self.init.pid and self.runs(process):
                    found.append(process)
        return found

    def _set(self, state: str, network: int) -> None:
        _tell(self.switch, "link", "set", f"port{self.number}-{network}", state)


@contextmanager
def hosts(count: int, *shared: Path, networks: int = 1, ipv6: bool = False) -> Iterator[list[Host]]:
    """Make hosts that all see the working directory and the directories `shared`, and nothing else of /tmp.

    Each has an interface in each of the networks, which are apart, with an IPv4 address or with an IPv6 address alone.
    """
    shared = tuple({*shared, *(here for here in [Path.cwd()] if here.is_relative_to("/tmp"))})
    started: list[subprocess.Popen[Any]] = []
    try:
        switch = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
        started.append(switch)
        while os.readlink(f"/proc/{switch.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
            pass  # for some milliseconds
        for network in range(networks):
            _tell(switch.pid, "link", "add", f"br{network}", "type", "bridge")
            _tell(switch.pid, "link", "set", f"br{network}", "up")
        made = []
        for number in range(1, count + 1):
            holder, init = _start_host(number, count, shared, NETWORKS6[0] if ipv6 else NETWORKS[0])
            started.append(holder)
            made.append(Host(number, init, switch.pid, ipv6))
            for network in range(networks):
                _plug_in(made[-1], network)
            _tell(init.pid, "link", "set", "lo", "up")
        yield made
    finally:
        for process in reversed(started):
            for child in psutil.Process(process.pid).children():
                child.kill()
            process.kill()
            process.wait()


def _start_host(
    number: int, count: int, shared: Sequence[Path], network: str
) -> tuple[subprocess.Popen[str], psutil.Process]:
    names = "127.0.0.1 localhost\n::1 localhost\n" + "".join(
        f"{network}{each} h{each}\n" for each in range(1, count + 1)
    )
    apart = ("--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")
    program = (sys.executable, "-S", "-c", _INIT, f"h{number}", names, *map(str, shared))
    holder = subprocess.Popen(["unshare", *apart, *program], stdout=subprocess.PIPE, text=True)
    assert holder.stdout and holder.stdout.readline() == "ready\n", f"host {number} did not start"
    (init,) = psutil.Process(holder.pid).children()
    return holder, init


def _plug_in(host: Host, network: int) -> None:
    port, interface = f"port{host.number}-{network}", f"eth{network}"
    _tell(host.switch, "link", "add", port, "type", "veth", "peer", "name", interface, "netns", str(host.init.pid))
    _tell(host.switch, "link", "set", port, "master", f"br{network}", "up")
    size = ("/64", "nodad") if host.ipv6 else ("/24",)  # nodad: the address may be used at once
    _tell(host.init.pid, "address", "add", host.address_in(network) + size[0], "dev", interface, *size[1:])
    _tell(host.init.pid, "link", "set", interface, "up")


def _tell(pid: int, *words: str) -> None:
    """Have `ip` act in the network namespace of a process."""
    subprocess.run(["nsenter", f"--target={pid}", "--net", "ip", *words], check=True)
