"""A log of a long run stays small, and keeps its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_like.runtime import logs


def test_a_long_log_keeps_its_end_while_a_process_appends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "LOG_BYTES", 100)
    monkeypatch.setattr(logs, "KEPT_BYTES", 40)
    log = tmp_path / "server.log"
    with log.open("ab", buffering=0) as writer:
        for line in range(1000):
            writer.write(b"line %04d\n" % line)
            logs.shorten_log(log)
            assert log.stat().st_size <= 110
    assert log.read_text().splitlines()[-1] == "line 0999"
    assert "line 0996" in log.read_text()
    logs.shorten_log(tmp_path / "missing.log")
