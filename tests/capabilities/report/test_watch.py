"""The page of a run over HTTP: behind a token, on loopback, and up to date in a real browser."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from browser import NAMES
from limits import HUNG_S
from test_report import STEPS, record_run

from areal_like.capabilities.report.page import REPORT_FILE, Report
from areal_like.capabilities.report.watch import WatchedPage, make_server
from areal_like.capabilities.report.write import write_report

TOKEN = "a-token"


@contextmanager
def watching(page: WatchedPage) -> Iterator[str]:
    with make_server(page, 0, TOKEN) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return record_run(tmp_path / "run", end=None)


def add_step(run: Path, step: int) -> None:
    page = Report(run / REPORT_FILE)
    page.log(step, {"seconds/step": 1.0, "reward/mean": 0.5, "memory/controller": 0.25, "tokens/trained": 7.0})
    page.close()


def test_nothing_is_shown_without_the_token(run: Path, tmp_path: Path) -> None:
    with watching(WatchedPage(run, tmp_path)) as url:
        for query in ("", "?token=", "?token=other", "?token=%C3%BF", "?token=a-token2"):
            for path in ("/", "/more", "/run.json"):
                status, text = get(f"{url}{path}{query}")
                assert status == 403 and "reward" not in text
        assert get(f"{url}/?token={TOKEN}")[0] == 200
        for path in ("/config.yaml", "/../run.json", "/more/x"):
            assert get(f"{url}{path}?token={TOKEN}")[0] == 404
        assert get(f"{url}/more?token={TOKEN}&page=x")[0] == 400


def test_new_entries_are_sent_once_and_a_rebuilt_page_is_loaded_again(run: Path, tmp_path: Path) -> None:
    page = WatchedPage(run, tmp_path)
    number, end = (run / REPORT_FILE).stat().st_ino, (run / REPORT_FILE).stat().st_size
    assert page.more(number, end) == {"end": end, "entries": ""}
    add_step(run, STEPS + 1)
    with (run / REPORT_FILE).open("ab") as file:
        file.write(b'<script>add(0,"scalars",[14,{"rew')  # an entry that is being written
    found = page.more(number, end)
    assert found["entries"].count("</script>") == 1 and found["entries"].endswith("</script>\n")
    assert page.more(number, found["end"]) == {"end": found["end"], "entries": ""}
    write_report([run], run / REPORT_FILE)
    assert page.more(number, found["end"]) == {"replaced": True}


def test_a_run_without_a_report_is_shown(run: Path, tmp_path: Path) -> None:
    (run / REPORT_FILE).unlink()
    text = WatchedPage(run, tmp_path).whole().decode()
    assert f'"scalars",[{STEPS},' in text.replace(" ", "") and not (run / REPORT_FILE).exists()


def browse(url: str, profile: Path) -> str:
    """Return the document that a browser shows after ten seconds of its own time, in which nothing is complained of."""
    browser = next(filter(None, map(shutil.which, NAMES)), None)
    if browser is None:
        pytest.skip("needs Chromium")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={profile}"]
    options += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--disable-background-networking"]
    options += ["--virtual-time-budget=10000", "--enable-logging=stderr", "--dump-dom"]
    result = subprocess.run([browser, *options, url], capture_output=True, text=True, timeout=HUNG_S)
    assert [line for line in result.stderr.splitlines() if "CONSOLE" in line] == []
    return result.stdout


class Growing(WatchedPage):
    """A page that gets steps when the browser asks for more."""

    def __init__(self, run: Path, spare: Path) -> None:
        super().__init__(run, spare)
        self.directory, self.asked = run, 0

    def more(self, page: int, start: int) -> dict[str, Any]:
        self.asked += 1
        if self.asked <= 2:
            add_step(self.directory, STEPS + self.asked)
        return super().more(page, start)


def test_a_browser_shows_steps_that_end_while_it_looks(run: Path, tmp_path: Path) -> None:
    page = Growing(run, tmp_path)
    with watching(page) as url:
        text = browse(f"{url}/?token={TOKEN}", tmp_path / "profile")
    assert page.asked >= 2
    assert f"step {STEPS + 2} of {STEPS}" in text
    for what in ("Memory of processes (GiB)", "Token ledger", "Timeline", "Samples", "Reward"):
        assert f">{what}" in text


@contextmanager
def forwarded(port: int) -> Iterator[int]:
    """Another port whose connections go to a port of loopback, as `ssh -L` makes it."""

    class Forward(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with socket.create_connection(("127.0.0.1", port)) as other:
                asking = threading.Thread(target=pump, args=(self.request, other), daemon=True)
                asking.start()
                pump(other, self.request)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Forward) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()


def pump(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


def test_a_browser_behind_a_tunnel_shows_steps_that_end_while_it_looks(run: Path, tmp_path: Path) -> None:
    """Its port, and the names of the host in its requests, are those of the tunnel's near end."""
    page = Growing(run, tmp_path)
    with watching(page) as url, forwarded(int(url.rpartition(":")[2])) as port:
        assert get(f"http://localhost:{port}/?token={TOKEN}")[0] == 200
        assert get(f"http://localhost:{port}/")[0] == 403
        text = browse(f"http://127.0.0.1:{port}/?token={TOKEN}", tmp_path / "profile")
    assert page.asked >= 2
    assert f"step {STEPS + 2} of {STEPS}" in text


def test_a_browser_loads_a_rebuilt_page(run: Path, tmp_path: Path) -> None:
    class Rebuilt(Growing):
        def more(self, page: int, start: int) -> dict[str, Any]:
            if self.asked == 1:
                write_report([run], run / REPORT_FILE)
            return super().more(page, start)

    with watching(Rebuilt(run, tmp_path)) as url:
        assert f"step {STEPS + 2} of {STEPS}" in browse(f"{url}/?token={TOKEN}", tmp_path / "profile")


def test_the_command_serves_a_finished_run_until_it_is_interrupted(tmp_path: Path) -> None:
    run = record_run(tmp_path / "run")
    command = [sys.executable, "-m", "areal_like", "watch", str(run), "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    ) as it:
        assert it.stdout is not None
        address, tunnel = it.stdout.readline().strip(), it.stdout.readline()
        status, text = get(address)
        assert status == 200 and '"finished"' in text and "ssh -L" in tunnel
        assert get(address[:-3])[0] == 403
        it.send_signal(signal.SIGINT)
        assert it.wait(HUNG_S) == 0


def test_a_directory_that_is_no_run_and_a_taken_port_are_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "areal_like", "watch"]
    assert subprocess.run([*command, str(tmp_path)], capture_output=True).returncode == 2
    run = record_run(tmp_path / "run")
    with watching(WatchedPage(run, tmp_path)) as url:
        port = url.rpartition(":")[2]
        refused = subprocess.run([*command, str(run), "--port", port], capture_output=True, text=True)
    assert refused.returncode == 2 and "--port" in refused.stderr
    assert json.loads((run / "run.json").read_text())["title"] == "a title"
