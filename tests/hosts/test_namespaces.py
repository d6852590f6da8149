"""The hosts that the other tests in this folder run on are apart as machines are."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from limits import HUNG_S
from namespaces import Host, hosts, reason_to_skip

pytestmark = [pytest.mark.hosts, pytest.mark.skipif(reason_to_skip() is not None, reason=str(reason_to_skip()))]


def told(host: Host, code: str) -> str:
    done = host.start(sys.executable, "-S", "-c", code, stdout=subprocess.PIPE, text=True)
    return done.communicate()[0].strip()


def reaches(host: Host, other: Host) -> bool:
    """Whether the other host refuses a connection, as only one that is reached does."""
    code = f"import socket; s = socket.socket(); s.settimeout(2); print(s.connect_ex(({other.address!r}, 9)))"
    return told(host, code) == "111"


def test_hosts_have_addresses_names_processes_and_files_of_their_own(tmp_path: Path) -> None:
    with hosts(2, tmp_path) as (first, second):
        assert told(first, "import socket; print(socket.gethostname())") == "h1"
        assert told(second, "import socket; print(socket.gethostbyname('h1'))") == first.address
        told(first, f"open('/tmp/own', 'w'); open({str(tmp_path / 'shared')!r}, 'w')")
        seen = f"import os; print(os.path.exists('/tmp/own'), os.path.exists({str(tmp_path / 'shared')!r}))"
        assert told(second, seen) == "False True"
        assert int(told(second, "import os; print(len([n for n in os.listdir('/proc') if n.isdigit()]))")) <= 3
        assert reaches(first, second)
        second.cut()
        assert not reaches(first, second)
        second.mend()
        assert reaches(first, second)
        second.kill()
        second.init.wait(60)
        limit = time.monotonic() + HUNG_S  # the kernel takes the network down later
        while reaches(first, second):
            assert time.monotonic() < limit
    first.init.wait(60)  # it may still be ending
