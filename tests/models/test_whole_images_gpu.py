"""Servers of gemma3 with images on a GPU: as exact as transformers in bfloat16, also after an update in place."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from tiny_servers import change, served, update
from whole_images import SERVERS, Judge, compare, save_model, write_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def test_servers_see_whole_images(tmp_path: Path) -> None:
    first = {name: tmp_path / name for name in SERVERS}  # a server writes its log beside its model
    networks = [write_model(path) for path in first.values()]
    judge, wrong = Judge(first["graphs"], "cuda"), []
    with ExitStack() as stack, ThreadPoolExecutor(len(SERVERS)) as threads:
        starting = [
            threads.submit(stack.enter_context, served(first[name], "cuda", *settings))
            for name, settings in SERVERS.items()
        ]
        for name, server in zip(SERVERS, starting, strict=True):
            try:
                post = server.result()
            except pytest.fail.Exception as error:  # the others are compared all the same
                wrong.append(f"{name}: {error}")
                continue
            wrong += compare(name, post, judge)
            if name == "graphs":
                updated = tmp_path / "updated"
                write_model(updated)
                save_model(change(networks[0]), updated)
                update(post, updated, "cuda")
                wrong += compare("updated", post, Judge(updated, "cuda"))
    assert not wrong, "\n".join(wrong)
