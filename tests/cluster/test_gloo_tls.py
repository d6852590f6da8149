"""gloo's TLS transport protects nothing in this torch, as docs/clusters.md says; where it does, runs should use it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RANK = """
import sys
import torch
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 2), rank=int(sys.argv[1]), world_size=2)
total = torch.ones(3)
dist.all_reduce(total)
print(total[0].item())
"""


@pytest.mark.long
def test_a_rank_with_tls_exchanges_tensors_with_one_that_has_none(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    words = (
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=run",
        "-keyout",
        key,
        "-out",
        certificate,
    )
    subprocess.run(["openssl", "req", *words], check=True, capture_output=True)
    name = "GLOO_DEVICE_TRANSPORT"
    tls = {f"{name}_TCP_TLS_PKEY": key, f"{name}_TCP_TLS_CERT": certificate, f"{name}_TCP_TLS_CA_FILE": certificate}
    environments = ({name: "TCP_TLS"} | {variable: str(path) for variable, path in tls.items()}, dict[str, str]())
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / "store")],
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", **own},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, own in enumerate(environments)
    ]
    assert [rank.communicate()[0] for rank in ranks] == ["2.0\n"] * 2
