"""What is written can be read: by transformers, and by an engine in another layout."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import uuid
import weakref
from dataclasses import replace
from functools import cache

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file
from tolerance import close_to
from trainer_jobs import (
    Setting,
    initial_weights,
    resume,
    save_after_two_steps,
    save_to_a_full_disk,
    save_with_a_mark,
    save_without_copies,
)
from trainer_ranks import Ranks
from transformers import AutoModelForCausalLM

from allocation import ParallelSizes
from areal_like.backends.megatron.optimizer_shards import boxes, halves, join_halves
from areal_like.backends.training.hf_checkpoint import in_buckets, save_tensors, write_checkpoint
from areal_like.backends.training.host_copies import HostCopies

ONE = ParallelSizes()
DP2 = ParallelSizes(dp=2, edp=2)
TP2_PP2 = ParallelSizes(tp=2, pp=2, etp=2)
FOLDED = ParallelSizes(tp=2, dp=2, ep=2, etp=2)
EP2 = ParallelSizes(dp=2, ep=2)
EP4 = ParallelSizes(dp=4, ep=4)


@pytest.fixture(scope="module")
def saved(ranks, models, tmp_path_factory):
    """Saves a model from a layout, once; returns the folder and the numbers of the third and fourth step."""

    def save(model: str, sizes: ParallelSizes):
        folder = tmp_path_factory.mktemp("saved")
        n = sizes.tp * sizes.pp * sizes.cp * sizes.dp
        return folder, ranks.run(save_after_two_steps, n, Setting(models[model], sizes), folder)[0]

    return cache(save)


@pytest.mark.parametrize(
    ("model", "before", "after"),
    [
        ("tied", TP2_PP2, DP2),
        ("moe", FOLDED, EP2),
        pytest.param("moe", ONE, EP2, marks=pytest.mark.long),
        *(
            pytest.param(*row, marks=pytest.mark.long)
            for row in (
                ("tied", DP2, TP2_PP2),
                ("tied", TP2_PP2, ONE),
                ("moe", FOLDED, EP4),
                ("moe", EP4, FOLDED),
                ("moe", EP4, ONE),
                ("moe", EP2, DP2),
                ("moe", TP2_PP2, EP2),
            )
        ),
    ],
    ids=[
        *("tp2pp2-dp2", "folded-ep2", "one-ep2", "dp2-tp2pp2", "tp2pp2-one"),
        *("folded-ep4", "ep4-folded", "ep4-one", "ep2-dp2", "tp2pp2-ep2"),
    ],
)
def test_another_layout_continues_the_run(ranks, models, saved, model, before, after):
    folder, expected = saved(model, before)
    n = after.tp * after.pp * after.cp * after.dp
    steps = ranks.run(resume, n, Setting(models[model], after), folder)[0]
    assert steps == [close_to(step) for step in expected]


def test_experts_spread_and_gathered_continue_an_unsharded_optimizer(ranks, models, tmp_path):
    for before, after in [(ONE, EP2), (EP2, ONE)]:
        first, then = (
            Setting(models["moe"], at, megatron={"use_distributed_optimizer": False}) for at in (before, after)
        )
        folder = tmp_path / f"ep{before.ep}"
        expected = ranks.run(save_after_two_steps, before.dp, first, folder)[0]
        steps = ranks.run(resume, after.dp, then, folder)[0]
        assert steps == [close_to(step) for step in expected]


@pytest.mark.parametrize(
    ("model", "sizes"), [pytest.param("tied", TP2_PP2, marks=pytest.mark.long), ("moe", FOLDED)], ids=["tied", "moe"]
)
def test_transformers_loads_the_hugging_face_checkpoint(ranks, models, saved, model, sizes):
    folder = saved(model, sizes)[0] / "hf"
    assert (folder / "tokenizer.json").exists()
    assert not list(folder.parent.glob("*.partial"))
    hf, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    assert hf.dtype == torch.float32

    weights = ranks.run(initial_weights, 1, Setting(folder))[0]
    assert weights.keys() == load_file(folder / "model.safetensors").keys()
    for name, parameter in hf.named_parameters():
        assert name in weights or model == "moe"  # transformers 5 fuses experts
        if name in weights:
            np.testing.assert_array_equal(parameter.detach().numpy(), weights[name])


@pytest.mark.parametrize("bridge", ["mbridge", "megatron-bridge"])
@pytest.mark.parametrize("model", ["tied", pytest.param("untied", marks=pytest.mark.long), "moe"])
def test_what_is_loaded_comes_out_bit_equal(ranks, models, model, bridge):
    weights = ranks.run(initial_weights, 2, Setting(models[model], ParallelSizes(tp=2, etp=2), bridge=bridge))[0]
    original = load_file(models[model] / "model.safetensors")
    assert weights.keys() == original.keys()
    for name, tensor in original.items():
        np.testing.assert_array_equal(weights[name], tensor.numpy(), err_msg=name)


def test_a_run_of_elements_is_boxes():
    for shape in [(7,), (3, 5), (2, 3, 4), (1, 6, 1), (4, 1, 1, 3)]:
        numbers = torch.arange(math.prod(shape)).view(shape)
        for start, end in itertools.combinations(range(numbers.numel() + 1), 2):
            found = [
                numbers[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))].flatten()
                for offsets, sizes in boxes(shape, start, end)
            ]
            assert torch.cat(found).tolist() == list(range(start, end))
            assert len(found) < 2 * len(shape)


def test_weights_are_made_of_bfloat16_and_the_half_behind_it():
    weights = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    ties = (weights.view(torch.int32) & ~0xFFFF | 0x8000).view(torch.float32)
    for whole in (weights, ties):
        rounded, low = halves(whole)
        up = (whole.view(torch.int32) >> 16) + (low < 0)  # as Transformer Engine rounds
        assert torch.equal(rounded, up.short().view(torch.bfloat16)) and torch.equal(join_halves(rounded, low), whole)
    assert torch.equal(halves(weights)[0], weights.bfloat16())
    assert not torch.equal(halves(ties)[0], ties.bfloat16())  # which rounds half of them down


@pytest.mark.parametrize(
    ("backend", "limit"), [("megatron", 0), pytest.param("megatron", 50_000, marks=pytest.mark.long), ("fsdp", 0)]
)
def test_a_checkpoint_beyond_its_memory_is_written_before_training_goes_on(ranks, models, tmp_path, backend, limit):
    setting = Setting(models["tied"], DP2 if backend == "megatron" else ParallelSizes(dp=2), backend=backend)
    expected = ranks.run(save_without_copies, 2, replace(setting, copy_bytes=limit), tmp_path)[0]
    steps = ranks.run(resume, 2, setting, tmp_path)[0]
    assert steps == [close_to(step) for step in expected]


def test_host_copies_take_no_more_than_their_limit():
    large, small = torch.ones(100), torch.ones(10)
    copies = HostCopies(limit=400)
    taken = copies.take({"small": small, "large": large})
    small.fill_(2)
    large.fill_(2)
    assert taken["small"].unique().tolist() == [1] and taken["large"].unique().tolist() == [2] and not copies.complete
    assert HostCopies(limit=440).take({"small": small, "large": large})["large"] is not large
    copies.take({"small": small})
    assert copies.complete


def test_host_copies_keep_their_memory():
    one, two = torch.ones(4, 4), torch.zeros(3)
    tensors = {"one": one, "two": two, "turned": one.T, "same": one[:]}
    copies = HostCopies()
    first = copies.take(tensors)
    one.fill_(7)
    two.fill_(7)
    assert [copy.unique().tolist() for copy in first.values()] == [[1], [0], [1], [1]]
    assert first["one"] is first["same"] and first["one"] is not first["turned"]
    del tensors["turned"], tensors["same"]
    assert copies.take(tensors)["one"] is first["one"] and first["one"].unique().tolist() == [7]
    unnamed = weakref.ref(first.pop("turned"))
    assert unnamed() is None
    assert copies.take({"one": two})["one"].shape == (3,)


def test_a_save_leaves_no_process_even_of_a_killed_rank(ranks, models, tmp_path):
    pool, mark = Ranks(), uuid.uuid4().hex
    try:
        assert pool.run(save_with_a_mark, 1, Setting(models["tied"]), tmp_path / "state", mark) == [[]]
    finally:
        pool.close()  # SIGKILL
    assert not [process for process in psutil.process_iter() if mark in environment(process).values()]
    step, _ = ranks.run(resume, 1, Setting(models["tied"]), tmp_path)[0]  # though nothing had been trained yet
    assert step["skipped"] == 0


def environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}


def test_weights_reach_the_host_one_by_one(tmp_path, models, monkeypatch):
    """Neither the writer nor a bucket keeps a weight on its device when the next one is made."""
    monkeypatch.setattr("areal_like.backends.training.hf_checkpoint._SHARD_BYTES", 20_000)
    alive = weakref.WeakSet()

    class OnDevice(torch.Tensor):
        def detach(self):
            return self

        def cpu(self):
            return self.as_subclass(torch.Tensor).clone()

    def weights():
        for name, tensor in load_file(models["tied"] / "model.safetensors").items():
            assert len(alive) == 0
            gathered = tensor.as_subclass(OnDevice)
            alive.add(gathered)
            yield name, gathered
            del gathered

    write_checkpoint(tmp_path / "out", weights(), models["tied"], "float32")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2


@pytest.mark.parametrize(("backend", "written_last"), [("megatron", "metadata.json"), ("fsdp", ".metadata")])
def test_a_disk_that_is_full_is_named(ranks, models, tmp_path, backend, written_last):
    said = ranks.run(save_to_a_full_disk, 2, Setting(models["tied"], DP2, backend=backend), tmp_path / "state")
    assert all("MiB are free there" in words for words in said)
    assert not (tmp_path / "state" / written_last).exists()


def test_nothing_to_load_is_an_error(ranks, models, tmp_path):
    with pytest.raises(AssertionError, match="is not a trainer checkpoint"):
        ranks.run(resume, 1, Setting(models["tied"]), tmp_path)


def test_buckets_keep_order_and_limit():
    weights = [(str(i), torch.zeros(size)) for i, size in enumerate([10, 30, 100, 5, 5])]
    buckets = list(in_buckets(iter(weights), limit=160))
    assert [[name for name, _ in bucket] for bucket in buckets] == [["0", "1"], ["2"], ["3", "4"]]


def test_a_checkpoint_has_the_tokenizer_that_was_chosen(tmp_path, models):
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    for name in ("tokenizer.json", "special_tokens_map.json", "chat_template.jinja", "merges.txt"):
        (tokenizer / name).write_text("chosen")
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (tokenizer / name).write_text("another model's")
    source = shutil.copytree(models["tied"], tmp_path / "source")
    (source / "added_tokens.json").write_text("the model's own")
    (source / "generation_config.json").write_text("the model's own")
    weights = load_file(source / "model.safetensors")

    write_checkpoint(tmp_path / "out", weights.items(), source, "float32", tokenizer=tokenizer)
    assert {file.name for file in (tmp_path / "out").iterdir() if file.read_bytes() == b"chosen"} == {
        *("tokenizer.json", "special_tokens_map.json", "chat_template.jinja", "merges.txt")
    }
    assert {file.name for file in (tmp_path / "out").iterdir()} - {file.name for file in tokenizer.iterdir()} == set()
    assert (tmp_path / "out/generation_config.json").read_text() == "the model's own"
    assert load_file(tmp_path / "out/model.safetensors").keys() == weights.keys()

    write_checkpoint(tmp_path / "own", weights.items(), source, "float32")
    assert (tmp_path / "own/tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert (tmp_path / "own/added_tokens.json").exists()


def test_an_unfinished_checkpoint_is_where_it_is_told_to_be(tmp_path, models):
    target, scratch = tmp_path / "checkpoints/step-1", tmp_path / "scratch"

    def weights():
        for name, tensor in load_file(models["tied"] / "model.safetensors").items():
            assert len(list(scratch.iterdir())) == 1
            assert not target.parent.exists()
            yield name, tensor

    write_checkpoint(target, weights(), models["tied"], "float32", scratch=scratch)
    assert list(scratch.iterdir()) == []
    assert list(target.parent.iterdir()) == [target]


def test_large_checkpoints_are_sharded_and_replace_old_ones(tmp_path, models, monkeypatch):
    monkeypatch.setattr("areal_like.backends.training.hf_checkpoint._SHARD_BYTES", 20_000)
    weights = load_file(models["tied"] / "model.safetensors")
    for _ in range(2):
        write_checkpoint(tmp_path / "out", iter(weights.items()), models["tied"], "float32")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == weights.keys()
    assert len(set(index["weight_map"].values())) > 2
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights.items())
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(("umask", "mode"), [(0o077, 0o600), (0o022, 0o644)])
def test_weights_are_for_those_who_may_read_the_files_of_this_process(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        save_tensors({"weight": torch.ones(2)}, file := tmp_path / "model.safetensors")
    finally:
        os.umask(before)
    assert file.stat().st_mode & 0o777 == mode
