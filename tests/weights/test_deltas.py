"""Deltas restore every bit, servers catch up by the files that they lack, and a damaged file is named."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import serving as real
import torch
from fake_server import FakeServer, serving
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import HUNG_S
from local_trainer import LocalTrainer
from torch import Tensor, distributed

from areal_like.backends.sglang import COMMAND, receiving
from areal_like.backends.sglang.loading import views
from areal_like.backends.sglang.patches import commands
from areal_like.backends.transports.checksum import checksum, numbers
from areal_like.backends.transports.deltas import files as deltas
from areal_like.backends.transports.deltas.files import (
    change,
    differences,
    read_delta,
    read_full,
    write_delta,
    write_full,
)
from areal_like.core.errors import WeightUpdateError, WorkerError
from areal_like.core.rollout.pool import Sampling, ServerPool
from areal_like.core.transfer import Chain
from areal_like.core.weights import SyncSpec, compare_checksums, make_sender, make_sync, publish

pytestmark = pytest.mark.covers("updates: disk")

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int8,
    torch.bool,
]


def tensor_of(bits: bytes, dtype: torch.dtype) -> Tensor:
    """Return these bits as numbers, whatever they are: NaNs with payloads, -0.0, denormals."""
    if dtype is torch.bool:
        bits = bytes(byte & 1 for byte in bits)
    whole = len(bits) // dtype.itemsize * dtype.itemsize
    return torch.tensor(list(bits[:whole]), dtype=torch.uint8).view(dtype)


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))


@settings(deadline=None, max_examples=50)
@given(st.sampled_from(DTYPES), st.lists(st.tuples(st.binary(min_size=8, max_size=8), st.booleans()), max_size=40))
def test_a_delta_restores_every_bit(dtype: torch.dtype, words: list[tuple[bytes, bool]]) -> None:
    before = tensor_of(b"".join(old for old, _ in words), dtype)
    after = tensor_of(b"".join(old if same else old[::-1] for old, same in words), dtype)
    result = before.clone()
    for start, piece in differences(before, after):
        change(result, start, piece)
    assert same_bits(result, after)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_special_numbers_survive(dtype: torch.dtype, tmp_path: Path) -> None:
    """NaNs with two payloads, both zeros, infinity and the smallest number, in a matrix and in a scalar."""
    payload = tensor_of(bytes([1, 0xC0, 0xFF, 0x7F]) if dtype is torch.float32 else bytes([0xC1, 0x7F]), dtype)
    special = torch.tensor([0.0, -0.0, torch.nan, torch.inf, torch.finfo(dtype).smallest_normal], dtype=dtype)
    new = {"matrix": torch.cat([special, payload]).view(2, 3), "scalar": payload.view(())}
    old = {name: torch.zeros_like(tensor) for name, tensor in new.items()}
    pieces = {(name, start): piece for name in new for start, piece in differences(old[name], new[name])}
    write_delta(tmp_path / "delta", pieces)
    read_delta(tmp_path / "delta", old)
    assert all(same_bits(old[name], new[name]) for name in new)
    write_full(tmp_path / "full", new)
    copy = {name: torch.zeros_like(tensor) for name, tensor in new.items()}
    read_full(tmp_path / "full", copy)
    assert all(same_bits(copy[name], new[name]) for name in new)


def test_a_version_without_a_change_is_a_delta_too(tmp_path: Path) -> None:
    kept = {"weight": torch.ones(3)}
    write_delta(tmp_path / "delta", {})
    read_delta(tmp_path / "delta", kept)
    assert same_bits(kept["weight"], torch.ones(3))


def test_pieces_of_a_large_tensor_are_put_where_they_belong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deltas, "PIECE", 7)
    before = torch.arange(40, dtype=torch.bfloat16)
    after = before.clone()
    after[[0, 6, 7, 22, 39]] += 1
    pieces = list(differences(before, after))
    assert [start for start, _ in pieces] == [0, 7, 21, 35]
    for start, piece in pieces:
        change(before, start, piece)
    assert same_bits(before, after)


def test_few_changed_words_make_a_small_file(tmp_path: Path) -> None:
    """3 % of bfloat16 words, as an optimizer step with the learning rate of RL changes."""
    generator = torch.Generator().manual_seed(0)
    before = torch.randn(1 << 18, generator=generator).bfloat16()
    after = before.clone()
    after.view(torch.int16)[torch.rand(len(before), generator=generator) < 0.03] += 1
    write_delta(tmp_path / "delta", {("w", start): piece for start, piece in differences(before, after)})
    assert (tmp_path / "delta").stat().st_size < 0.04 * before.nbytes


class Engine:
    """Weights that the tests change."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tensors = {
            "odd": torch.randn(5, generator=generator).bfloat16(),
            "wide": torch.randn(3, 4, generator=generator),
            "whole": torch.randn(6, generator=generator).bfloat16(),
        }

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.tensors.items()

    def step(self) -> None:
        for tensor in self.tensors.values():
            tensor.view(-1)[:2] += 1


class Model(torch.nn.Module):
    """Copies, as SGLang does, what it is given."""

    def __init__(self) -> None:
        super().__init__()
        for name, tensor in Engine().tensors.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros_like(tensor)))

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            getattr(self, name).data.copy_(tensor)


class Trainer:
    """A trainer of one rank, which notes the files that it wrote."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.written = engine, list[Any]()
        self.restart()

    def restart(self) -> None:
        self.sender = make_sender("deltas", self.engine, 0, "127.0.0.1")

    async def transfer(self, step: str, *arguments: Any, timeout_s: float) -> Any:
        self.written.append(getattr(self.sender, step)(*arguments))
        return self.written[-1]


class Receiver(FakeServer):
    """A server whose one rank receives for real; `files` counts those that each update named."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.runner, self._group = SimpleNamespace(model=Model(), device="cpu", gpu_id=0), group
        self.files, self.read = list[int](), list[str]()
        self.answers[COMMAND] = self.receive

    async def receive(self) -> Any:
        body = self.bodies(COMMAND)[-1]
        _, chain = Chain.from_json(body["text"])
        self.files.append(len(chain.files))
        held = getattr(self.runner, "local_copy", None)
        self.read += [file.path for file in chain.files_after(held and held.held)]
        done, told = commands.run_command(self.runner, body["name"], body["text"], self._group)
        if done:
            self.version = body["weight_version"]
        return {"success": done, "message": told}


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Any]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    yield distributed.group.WORLD
    distributed.destroy_process_group()


def check(server: Receiver, engine: Engine) -> None:
    for name, tensor in engine.tensors.items():
        assert same_bits(getattr(server.runner.model, name).data, tensor)


def sync_of(trainer: Any, pool: ServerPool, directory: Path, full_every: int) -> Any:
    return make_sync("deltas", trainer, pool, SyncSpec(20, directory, 1, "gloo", 1, full_every=full_every))


def test_a_late_server_and_one_that_missed_versions_catch_up(tmp_path: Path, group: Any) -> None:
    engine, servers, folder = Engine(), [Receiver(group) for _ in range(3)], tmp_path / "files"
    always, missing, late = servers
    trainer = Trainer(engine)

    async def run() -> None:
        async with serving(*servers) as urls, ServerPool(urls[:2], "token", HUNG_S) as pool:
            bound = sync_of(trainer, pool, folder, 4)
            for version in range(9):
                if version == 1:
                    pool.leave(pool.servers[1])
                if version == 3:
                    pool.join(urls[1], 1)
                if version == 6:
                    pool.join(urls[2], 2)
                await publish(bound, version, 20)
                check(always, engine)
                engine.step()

    asyncio.run(run())
    full = [True, False, False, False, True, False, False, False, True]
    assert [file.full is not None for file in trainer.written] == full
    assert [file.delta is None for file in trainer.written] == [True] + [False] * 8
    assert always.files == [1, 2, 3, 4, 1, 2, 3, 4, 1]
    assert [part.endswith(".delta.safetensors") for part in always.read] == [False] + [True] * 8
    assert missing.files == [1, 4, 1, 2, 3, 4, 1]
    assert late.files == [3, 4, 1]
    engine_bits = {name: getattr(always.runner.model, name).data for name in engine.tensors}
    for server in (missing, late):
        assert all(same_bits(getattr(server.runner.model, name).data, bits) for name, bits in engine_bits.items())
    assert len(list(folder.iterdir())) == 2


def test_a_restarted_trainer_begins_with_a_full_copy(tmp_path: Path, group: Any) -> None:
    engine, (server,) = Engine(), [Receiver(group)]
    trainer = Trainer(engine)

    async def run() -> None:
        async with serving(server) as urls, ServerPool(urls, "token", HUNG_S) as pool:
            bound = sync_of(trainer, pool, tmp_path / "files", 10)
            for version in (0, 1, 1, 2):
                if len(trainer.written) == 2:
                    trainer.restart()
                await publish(bound, version, 20)
                check(server, engine)
                engine.step()

    asyncio.run(run())
    assert [file.full is not None for file in trainer.written] == [True, False, True, False]


@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing"])
@pytest.mark.parametrize("number", [0, 1])
def test_a_damaged_file_is_named_and_mended_by_a_full_copy(
    tmp_path: Path, group: Any, damage: str, number: int
) -> None:
    engine, (server,) = Engine(), [Receiver(group)]

    class Damaging(Trainer):
        async def transfer(self, *arguments: Any, timeout_s: float) -> Any:
            written = await super().transfer(*arguments, timeout_s=timeout_s)
            if len(self.written) == number + 1:
                path = Path((written.delta or written.full).path)
                whole = path.read_bytes()
                changed = whole[:-1] + bytes([whole[-1] ^ 1]) if damage == "flipped" else whole[:-9]
                path.write_bytes(changed)
                if damage == "missing":
                    path.unlink()
            return written

    async def run() -> None:
        trainer = Damaging(engine)
        async with serving(server) as urls, ServerPool(urls, "token", HUNG_S) as pool:
            bound = sync_of(trainer, pool, tmp_path / "files", 9)
            for version in range(number):
                await publish(bound, version, 20)
            engine.step()
            what = "does not exist on this host" if damage == "missing" else "is corrupt: its SHA-256 differs"
            with pytest.raises(
                WeightUpdateError, match=rf"files/{number}-[\w.]+\.safetensors {what}.*weight_update\.mode=collective"
            ):
                await publish(bound, number, 20)
            assert server.runner.local_copy is None
            trainer.restart()
            await publish(bound, number, 20)
            check(server, engine)

    asyncio.run(run())


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    class Full:
        async def transfer(self, *_: Any, **__: Any) -> None:
            raise WorkerError("actor", 0, "weight update (write)", "OSError: No space left on device", tmp_path)

    async def run() -> None:
        async with ServerPool(["http://127.0.0.1:9"], "token", HUNG_S) as pool:
            await publish(sync_of(Full(), pool, tmp_path, 3), 1, 20)

    with pytest.raises(WeightUpdateError, match="weights of version 1 do not fit on the disk of"):
        asyncio.run(run())


def test_other_ranks_gather_and_write_nothing(tmp_path: Path) -> None:
    sender = make_sender("deltas", Engine(), 1, "127.0.0.1")
    assert sender.write(tmp_path / "files" / "0", None, True) is None
    assert not list(tmp_path.iterdir())


def test_ranks_of_a_server_share_one_copy_without_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second rank maps what the first has created, and applies nothing itself."""
    monkeypatch.setattr(receiving.tempfile, "gettempdir", lambda: str(tmp_path))
    engine, folder = Engine(), tmp_path / "files"
    sender = make_sender("deltas", engine, 0, "127.0.0.1")
    files = Chain([sender.write(folder / "0", None, True).full])
    ranks = [receiving.LocalCopy("token", files) for _ in range(2)]
    for step in ("open", "update"):
        for rank in ranks[::-1]:
            getattr(rank, step)(*([files] if step == "update" else []))
    assert [path.name for path in tmp_path.iterdir()] == ["files"]
    engine.step()
    files = replace(files, files=[*files.files, sender.write(folder / "1", "0", False).delta])
    for rank in ranks:
        assert rank.has_tensors(files)
        rank.update(files)
    for rank in ranks:
        assert all(same_bits(tensor, engine.tensors[name]) for name, tensor in views(rank._flat, rank.layout))
    with pytest.raises(RuntimeError, match="before it is mapped"):
        receiving.LocalCopy("other", files).load(Model(), torch.device("cpu"))


def test_checksums_are_those_of_what_was_written(tmp_path: Path) -> None:
    engine = Engine()
    sender = make_sender("deltas", engine, 0, "127.0.0.1")
    sender.sums = {}
    sender.write(tmp_path / "0", None, True)
    engine.step()
    sender.write(tmp_path / "1", "0", False)
    assert numbers(sender.sums) == numbers({name: checksum(tensor) for name, tensor in engine.weights()})


def test_a_real_server_serves_the_weights_of_deltas(sglang_server: Any, tmp_path: Path) -> None:
    """With checksums of every tensor, over a full copy, a delta and the next full copy."""
    models = [real.peaked_model(sglang_server.model, tmp_path / str(seed), seed) for seed in range(2)]
    trainer = LocalTrainer(models[0], mode="deltas")

    async def run() -> None:
        async with real.pool_on(sglang_server) as pool:
            pool.checking = lambda servers, deadline: compare_checksums(trainer, servers, deadline)
            bound = sync_of(trainer, pool, tmp_path / "files", 2)
            for version, model in enumerate([models[0], models[1], models[0]]):
                trainer.model = model
                await publish(bound, version, HUNG_S)
                assert await pool.servers[0].weight_version(HUNG_S) == str(version)
                (response,) = await pool.generate([[5, 9, 11]], Sampling(8))
                expected = real.transformers_logprobs(model, [5, 9, 11], response.tokens)
                np.testing.assert_allclose(response.logprobs, expected, atol=1e-4)

    asyncio.run(run())
