"""The memory model: what must hold for any layout, figures that follow from the shapes, and what findings say."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import allocation
from allocation import BatchSpec, MegatronSettings, MemorySettings, ParallelSizes
from allocation.cli import app
from allocation.compiler import RoleSettings
from allocation.hardware import GIB, GPUS, find_gpu
from allocation.memory import estimate, footprint, footprints, shared_peak
from allocation.memory.activations import activations, layer_activations, micro_batches
from allocation.memory.fsdp import trainer as fsdp_trainer
from allocation.memory.megatron import phases_of_stage, trainer
from allocation.memory.servers import kv_read_bytes
from allocation.model_spec import from_config, load_model
from allocation.parameters import active_parameters, count_held, kind, stage_chunks, stages, total_parameters
from allocation.settings import Workload

MODELS = {
    name: allocation.load_model(name)
    for name in ("qwen3-0.6b", "qwen3-8b", "qwen3-30b-a3b", "deepseek-v2-lite", "qwen3-next-80b-a3b-instruct")
}
FULL = MegatronSettings(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
BATCH = BatchSpec(1024, max_length=4096, max_tokens_per_mb=16384)
powers = st.sampled_from([1, 2, 4])


@st.composite
def layouts(draw):
    """A model and sizes that divide it."""
    model = MODELS[draw(st.sampled_from(list(MODELS)))]
    tp, cp, dp, pp = draw(powers), draw(powers), draw(powers), draw(st.sampled_from([1, 2]))
    ep = draw(st.sampled_from([e for e in (1, 2, 4, 8) if model.experts and tp * cp * dp % e == 0] or [1]))
    pp = pp if model.layers % pp == 0 else 1
    return model, ParallelSizes(tp=tp, pp=pp, cp=cp, dp=dp, ep=ep, edp=tp * cp * dp // ep)


def peak(model, sizes, megatron=None, batch=BATCH):
    return trainer("actor", sizes, Workload(model, megatron or MegatronSettings(), MemorySettings(), batch)).peak.bytes


def parameters(model, sizes):
    parts = stages(model, sizes, MegatronSettings())
    return [count_held(model, sizes, part, first=not i, last=i == sizes.pp - 1) for i, part in enumerate(parts)]


@given(layouts())
def test_more_ranks_never_hold_more_parameters(case):
    model, sizes = case
    now = max(part.total for part in parameters(model, sizes))
    for wider in (
        replace(sizes, tp=sizes.tp * 2, edp=sizes.edp * 2),
        replace(sizes, ep=sizes.ep * 2) if model.experts and sizes.edp % 2 == 0 else sizes,
        replace(sizes, etp=2, edp=sizes.edp // 2) if sizes.edp % 2 == 0 else sizes,
    ):
        assert max(part.total for part in parameters(model, wider)) <= now


@given(layouts())
def test_all_parameters_lie_somewhere(case):
    model, sizes = case
    one = replace(sizes, tp=1, ep=1, etp=1)
    there = sum(part.total for part in parameters(model, one))
    copies = 1 if one.pp > 1 and model.tied_embeddings else 0  # the last stage has the output layer, too
    assert there == total_parameters(model) + copies * model.vocab_size * model.hidden_size


@given(layouts())
def test_what_saves_memory_saves_memory(case):
    model, sizes = case
    now = peak(model, sizes)
    assert peak(model, sizes, FULL) <= now
    assert peak(model, sizes, batch=replace(BATCH, max_tokens_per_mb=8192)) <= now
    assert peak(model, sizes, MegatronSettings(use_distributed_optimizer=False)) >= now
    assert peak(model, replace(sizes, dp=sizes.dp * 2, edp=sizes.edp * 2)) <= now + (300 << 20)  # NCCL's buffers
    if sizes.pp == 1:  # with a pipeline more micro-batches are under way on the first stage
        assert peak(model, replace(sizes, cp=sizes.cp * 2, edp=sizes.edp * 2)) <= now + (300 << 20)


def test_static_memory_is_eighteen_bytes_a_parameter():
    """bfloat16 weights 2, float32 gradients 4, main weights 4 and moments 8 (Megatron-LM's distributed optimizer)."""
    model = MODELS["qwen3-8b"]
    step = trainer("actor", ParallelSizes(), Workload(model)).phase("optimizer step")
    sizes = {item.name: item.bytes for item in step.items}
    n = total_parameters(model)
    assert [sizes[name] / n for name in ("weights", "gradients (float32)", "main weights (float32)", "Adam's moments")] == [
        2, 4, 4, 8,
    ]  # fmt: skip
    float32 = trainer("actor", ParallelSizes(), Workload(model, memory=MemorySettings(dtype="float32")))
    assert {i.name: i.bytes / n for i in float32.phase("load").items}["weights"] == 4
    assert "main weights (float32)" not in {item.name for item in float32.phase("load").items}


def test_active_parameters_of_a_mixture_of_experts():
    assert active_parameters(MODELS["qwen3-30b-a3b"]) == pytest.approx(3.0e9, rel=0.05)  # 3.3e9 with the embedding
    assert total_parameters(MODELS["qwen3-30b-a3b"]) == pytest.approx(30.5e9, rel=0.01)


def test_kv_cache_per_token():
    """Published: 2 · 36 layers · 8 heads · 128 · 2 bytes; DeepSeek's latent is 512 + 64 numbers a layer."""
    for name, bytes_each in (("qwen3-8b", 147_456), ("deepseek-v2-lite", 27 * 576 * 2)):
        server = allocation.compile("sglang:d1").engines[0]
        assert footprint(server, Workload(MODELS[name])).kv_token_bytes == bytes_each


def test_layers_with_a_window_have_a_pool_of_their_own_in_gpt_oss():
    """SGLang's `swa_full_tokens_ratio`: 0.8 tokens there for each in the pool of the other layers."""
    server = allocation.compile("sglang:d1").engines[0]
    model = allocation.load_model("gpt-oss-20b")
    assert len(model.sliding_layers) == 12
    assert footprint(server, Workload(model)).kv_token_bytes == int((12 + 0.8 * 12) * 2 * 8 * 64 * 2)
    assert kv_read_bytes(model, ParallelSizes(), 2, 10_000) == (12 * 10_000 + 12 * 128) * 2 * 8 * 64 * 2
    assert kv_read_bytes(model, ParallelSizes(), 2, 100) == 24 * 100 * 2 * 8 * 64 * 2


def test_first_stage_of_a_pipeline_keeps_most_micro_batches():
    model = MODELS["qwen3-8b"]
    sizes = ParallelSizes(pp=4)
    few = BatchSpec(1, max_length=4096, max_tokens_per_mb=4096)
    assert micro_batches(sizes, Workload(model, batch=few)) == 1
    one, many = (
        trainer("actor", sizes, Workload(model, batch=batch)).phase("forward and backward") for batch in (few, BATCH)
    )
    kept = [{i.name: i.bytes for i in phase.items}.get("activations", 0) for phase in (one, many)]
    assert kept[1] > 3 * kept[0]


def test_larger_groups_of_an_interleaved_pipeline_keep_more():
    sizes, kept = ParallelSizes(pp=2, vpp=2), []
    for group in (None, 4):
        work = Workload(MODELS["qwen3-8b"], MegatronSettings(microbatch_group_size_per_vp_stage=group), batch=BATCH)
        items = trainer("actor", sizes, work).phase("forward and backward").items
        kept.append(next(item.bytes for item in items if item.name == "activations"))
    assert kept[1] == kept[0] * 7 // 5  # (2 - 1)·2 + (2 - 1)·group + 1


def test_the_middle_of_an_uneven_pipeline_is_looked_at():
    """With 2 layers at each end the 76 others lie on two stages: 38 layers of 72B weights on 8 GPUs."""
    model = allocation.load_model("qwen2.5-72b")
    ends = replace(FULL, num_layers_in_first_pipeline_stage=2, num_layers_in_last_pipeline_stage=2)
    made = trainer("actor", ParallelSizes(pp=4, tp=8), Workload(model, ends))
    layer = (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 29568) / 8  # queries and output, keys and values, MLP
    assert made.stage == 1
    assert made.phase("optimizer step").bytes == pytest.approx(38 * layer * 18 * 1.03, rel=0.02)
    found = allocation.check(
        "megatron:d1p4t8", model=model, megatron=ends, memory=MemorySettings(find_gpu("h100").memory)
    )
    assert [finding.code for finding in found.findings] == ["ALLOC-MEMORY"]


@st.composite
def pipelines(draw, sizes=((1, 1), (2, 1), (4, 1), (2, 2), (3, 2), (4, 3)), every=True):
    """A model, sizes and settings whose stages, and whose chunks of a stage, have any numbers of layers."""
    model = MODELS[draw(st.sampled_from(list(MODELS)))]
    pp, vpp = draw(st.sampled_from(sizes))
    ends = sorted(draw(st.lists(st.integers(0, model.layers), min_size=pp * vpp - 1, max_size=pp * vpp - 1)))
    counts = [end - start for start, end in zip([0, *ends], [*ends, model.layers], strict=True)]
    recomputed = [FULL, replace(FULL, recompute_method="block")] if every else []
    settings = draw(st.sampled_from([MegatronSettings(), *recomputed]))
    text = f"E{'|'.join('t' * count for count in counts)}L"
    return model, ParallelSizes(pp=pp, vpp=vpp), replace(settings, pipeline_model_parallel_layout=text)


@given(pipelines())
def test_no_stage_needs_more_than_is_said(case):
    model, sizes, settings = case
    work = Workload(model, settings, batch=BATCH)
    chunks = stage_chunks(model, sizes, settings)
    each = [
        max(phase.bytes for phase in phases_of_stage(sizes, work, part, stage, True, replays=True))
        for stage, part in enumerate(chunks)
    ]
    assert trainer("actor", sizes, work).peak.bytes == max(each)


def test_the_routes_of_a_micro_batch_are_counted_where_the_actor_replays_them():
    work = Workload(load_model("Qwen/Qwen3-30B-A3B"), MegatronSettings(), batch=BATCH)
    for role, counted in (("actor", True), ("critic", False)):
        items = {
            item.name: item.bytes for item in trainer(role, ParallelSizes(ep=8, dp=8), work).phase("log-probs").items
        }
        assert ("expert routes" in items) == counted
    # 48 layers of 8 experts, a byte each, and as indices of 8 bytes
    actor = trainer("actor", ParallelSizes(ep=8, dp=8), work).phase("log-probs").items
    assert {item.name: item.bytes for item in actor}["expert routes"] == work.tokens * 48 * 8 * (1 + 8)
    halves = fsdp_trainer("actor", ParallelSizes(cp=2, dp=4), work).phase("log-probs").items
    assert {item.name: item.bytes for item in halves}["expert routes"] == work.tokens // 2 * 48 * 8 * (1 + 8)


def test_under_fsdp_ranks_that_split_matrices_gather_less_and_have_whole_hidden_states():
    work = Workload(load_model("qwen3-8b"), MegatronSettings(), batch=BATCH)
    whole, split = (
        {item.name: item.bytes for item in fsdp_trainer("actor", sizes, work).phase("forward and backward").items}
        for sizes in (ParallelSizes(dp=8), ParallelSizes(dp=4, tp=2))
    )
    shards = "weights (float32 shards)"
    assert split[shards] == pytest.approx(whole[shards], rel=1e-3)  # of both on eight ranks
    assert split["logits"] == whole["logits"] // 2
    assert split["gathered layers"] < whole["gathered layers"]
    assert whole["activations"] / 2 < split["activations"] < whole["activations"]


@given(pipelines(((2, 2), (3, 2), (4, 3)), every=False), st.sampled_from([1, 2, 8]))
def test_chunks_of_any_length_are_kept_as_long_as_the_schedule_runs(case, micro_batches):
    """The interleaved schedule, one forward and backward after the other, of the first stage."""
    model, sizes, settings = case
    batch = BatchSpec(micro_batches * sizes.pp, max_length=1024, micro_batch=1)
    chunks = stage_chunks(model, sizes, settings)[0]
    size = [
        sum(layer_activations(model, sizes, kind(model, n), Workload(model)) for n in part) * 1024 for part in chunks
    ]
    total, pp, vpp = batch.sequences * sizes.vpp, sizes.pp, sizes.vpp
    warm, kept, most = min((pp - 1) * 2 + (vpp - 1) * pp, total), 0, 0
    for i in range(total + warm):
        kept += size[i // pp % vpp] if i < total else 0
        most = max(most, kept)
        kept -= size[vpp - 1 - (i - warm) // pp % vpp] if i >= warm else 0
    assert activations(sizes, Workload(model, settings, batch=batch), chunks, 0, 1024)[0] == most


def test_what_does_not_fit_is_refused_with_what_would():
    h100 = MemorySettings(find_gpu("h100").memory)
    found = allocation.check("megatron:d8", model="qwen3-8b", batch=BATCH, memory=h100).findings
    finding = next(finding for finding in found if finding.code == "ALLOC-MEMORY")
    assert "Adam's moments" in finding.message and "forward and backward" in finding.message
    assert finding.nearest
    for text in finding.nearest:
        assert allocation.check(text, model="qwen3-8b", batch=BATCH, memory=h100).ok
    assert "recompute_granularity=full" in finding.help or "max_tokens_per_mb=" in finding.help
    options = dict(word.split("=") for word in finding.help.split() if "=" in word)
    batch = replace(BATCH, max_tokens_per_mb=int(options.pop("max_tokens_per_mb", BATCH.max_tokens_per_mb)))
    layers = {"recompute_num_layers": 1} if options else {}
    assert allocation.check(
        "megatron:d8", model="qwen3-8b", batch=batch, memory=h100, megatron=MegatronSettings(**{**options, **layers})
    ).ok


def test_a_role_without_a_batch_beside_others_is_answered():
    text, batch = "megatron[ref]:d1|sglang[rollout]:d1|megatron[actor]:d1", BatchSpec(32, 8, 1, 9000, 32768)
    memory, own = MemorySettings(40 * GIB), {"ref": RoleSettings(MODELS["qwen3-0.6b"], None, MegatronSettings())}
    result = allocation.check(text, model=MODELS["qwen3-0.6b"], batch=batch, memory=memory, own=own)
    assert "ALLOC-MEMORY" in {finding.code for finding in result.findings}


def test_what_helps_fsdp_is_its_own():
    h100 = MemorySettings(find_gpu("h100").memory)
    found = allocation.check("fsdp:d8", model="qwen3-8b", batch=BATCH, memory=h100).findings
    finding = next(finding for finding in found if finding.code == "ALLOC-MEMORY")
    assert "gradient_checkpointing=true" in finding.help
    lighter = replace(h100, gradient_checkpointing=True)
    assert allocation.check("fsdp:d8", model="qwen3-8b", batch=BATCH, memory=lighter).ok
    offloaded = footprint(
        allocation.compile("fsdp:d8").engines[0],
        Workload(MODELS["qwen3-8b"], memory=replace(h100, offload_params=True)),
    )
    assert "Adam's moments" not in {item.name for phase in offloaded.phases for item in phase.items}


def test_sequences_that_do_not_fit_under_fsdp_are_shared():
    memory, batch = MemorySettings(find_gpu("h100").memory), replace(BATCH, max_length=32768, max_tokens_per_mb=32768)
    (finding,) = allocation.check("fsdp:d8", model="qwen3-8b", batch=batch, memory=memory).findings
    assert finding.nearest == ("fsdp:d1c8",)
    for text in finding.nearest:
        assert allocation.check(text, model="qwen3-8b", batch=batch, memory=memory).ok


@pytest.mark.parametrize("trainer", ["megatron", "fsdp"])
@pytest.mark.parametrize("full", [False, True])
def test_capped_attention_keeps_a_score_of_every_earlier_token_of_a_sequence(full, trainer):
    """Eight bytes of each, counted by saved_tensors_hooks in transformers' Gemma2Model of either data type."""
    settings = {} if trainer == "fsdp" else {"megatron": FULL if full else MegatronSettings()}
    memory = replace(MemorySettings(find_gpu("h100").memory), gradient_checkpointing=full and trainer == "fsdp")
    engine = allocation.compile(f"{trainer}:d8").engine("actor")
    found = []
    for capped in (True, False):
        model = replace(MODELS["qwen3-8b"], capped_attention=capped)
        whole = footprint(engine, Workload(model, memory=memory, batch=BATCH, **settings))
        items = whole.phase("forward and backward").items
        found.append(sum(item.bytes for item in items if item.name.startswith(("activations", "recomputed"))))
    longest = min(BATCH.max_length, BATCH.max_tokens_per_mb)
    scores = 8 * model.heads * BATCH.max_tokens_per_mb * longest
    assert found[0] - found[1] == pytest.approx(scores * (1 if full else model.layers), rel=1e-6)


@pytest.mark.parametrize(("recomputed", "layers"), [(False, 48), (True, 1)])
def test_merged_experts_of_all_layers_stay_unless_they_are_recomputed(recomputed, layers):
    model, merged = MODELS["qwen3-30b-a3b"], 3 * 128 * 2048 * 768
    memory = MemorySettings(gradient_checkpointing=recomputed, merged_experts=merged)
    found = fsdp_trainer("actor", ParallelSizes(dp=8), Workload(model, memory=memory, batch=BATCH))
    for phase, number in (("forward and backward", layers), ("log-probs", 1)):
        items = {item.name: item.bytes for item in found.phase(phase).items}
        assert items["experts merged with adapters"] == (number + 1) * merged * 2


def test_a_config_of_gemma2_that_leaves_out_its_cap_has_one():
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96}
    assert from_config({"model_type": "gemma2", **shape}).capped_attention
    assert not from_config({"model_type": "gemma2", **shape, "attn_logit_softcapping": None}).capped_attention


def test_ranks_that_share_sequences_under_fsdp_share_activations_and_parameters():
    work = Workload(MODELS["qwen3-8b"], memory=MemorySettings(find_gpu("h100").memory), batch=BATCH)
    alone, shared = (
        {item.name: item.bytes for item in footprint(plan, work).phase("forward and backward").items}
        for plan in (allocation.compile(text).engine("actor") for text in ("fsdp:d8", "fsdp:d2c4"))
    )
    assert shared["activations"] * 4 == pytest.approx(alone["activations"], rel=1e-6)
    assert shared["logits"] * 4 == pytest.approx(alone["logits"], rel=1e-6)
    assert shared["weights (float32 shards)"] == alone["weights (float32 shards)"]


@pytest.mark.parametrize(
    ("key", "names", "needed"),
    [
        ("param_offload", {"weights"}, {"load", "log-probs", "forward and backward", "weight update", "save"}),
        ("grad_offload", {"gradients (float32)"}, {"load", "forward and backward"}),
        ("optimizer_offload", {"main weights (float32)", "Adam's moments"}, {"load", "save"}),
    ],
)
def test_what_is_offloaded_is_there_in_the_phases_that_need_it(key, names, needed):
    work = Workload(MODELS["qwen3-8b"], MegatronSettings(**{key: True}), batch=BATCH)
    plain = Workload(MODELS["qwen3-8b"], batch=BATCH)
    for sizes in (ParallelSizes(), ParallelSizes(dp=4, edp=4)):
        less, more = trainer("actor", sizes, work), trainer("actor", sizes, plain)
        # over 4 ranks main weights take less than the weights that move to a buffer before there are any
        later = {"Adam's moments", "main weights (float32)"} if sizes.dp > 1 else {"Adam's moments"}
        for phase in less.phases:
            there = {item.name for item in phase.items} & names
            wanted = names - later if phase.name == "load" else names
            assert there == (wanted if phase.name in needed | {"optimizer step"} else set()), phase.name
        assert less.idle < more.idle
        assert less.phase("optimizer step").bytes == more.phase("optimizer step").bytes


def test_a_reference_that_is_offloaded_leaves_its_gpu_alone():
    work = Workload(MODELS["qwen3-8b"], MegatronSettings(param_offload=True), batch=BATCH)
    reference = trainer("ref", ParallelSizes(), work)
    assert reference.idle < 1 << 30 < reference.phase("log-probs").bytes


def test_nothing_is_refused_without_the_size_of_a_gpu():
    assert allocation.check("megatron:d1", model="deepseek-v3", batch=BATCH).ok


def test_engines_that_share_a_gpu_need_room_together():
    h200 = MemorySettings(find_gpu("h200").memory)
    shared = allocation.check("sglang:d1|megatron:d1", model="qwen3-1.7b", batch=BATCH, memory=h200)
    assert "together need" in next(f.message for f in shared.findings if f.code == "ALLOC-MEMORY")
    assert allocation.check("sglang:d1+megatron:d1", model="qwen3-1.7b", batch=BATCH, memory=h200).ok
    turns = replace(h200, offload=True)
    assert allocation.check("sglang:d1|megatron:d1", model="qwen3-1.7b", batch=BATCH, memory=turns).ok


def test_engines_that_meet_on_no_gpu_are_not_added_up():
    """The critic and the reference share the actor's GPUs, and none with each other."""
    text, known = "megatron[actor]:d4@0-3|megatron[critic]:d2@0-1|megatron[ref]:d2@2-3", {"model": "qwen3-1.7b"}
    pairs = [text.rpartition("|")[0], text.replace("|megatron[critic]:d2@0-1", "")]
    sizes = []
    for gib in range(40, 80):
        known["memory"] = MemorySettings(gib * GIB)
        fits = [allocation.check(layout, **known).ok for layout in (text, *pairs)]
        assert fits[0] == all(fits[1:]), gib
        sizes.append(fits[0])
    assert {*sizes} == {True, False}
    together = text.replace("@2-3", "@1-2")
    found = allocation.check(together, model="qwen3-1.7b", memory=MemorySettings(40 * GIB)).findings
    assert "actor and critic and ref together need" in found[0].message


def test_those_who_train_stay_together_in_their_turn():
    """The reference and the actor wait for the servers together, so they are there together."""
    h200 = MemorySettings(find_gpu("h200").memory, mem_fraction_static=0.3, offload=True)
    work = Workload(allocation.load_model("qwen3-1.7b"), batch=BATCH, memory=h200)
    plan = allocation.compile("sglang[rollout]:d1|megatron[actor]:d1|megatron[ref]:d1")
    server, actor, ref = footprints(plan, work)
    alone, both = (shared_peak(prints, offload=True) for prints in ([server, actor], [server, actor, ref]))
    assert actor.peak.bytes > server.peak.bytes and both - alone == ref.idle
    assert ref.fixed < ref.idle < actor.peak.bytes


def test_a_reference_is_read_and_nothing_else():
    """Its weights, and the largest weight as it was stored and once more for the rank."""
    model = MODELS["qwen3-8b"]
    load = trainer("ref", ParallelSizes(), Workload(model)).phase("load").items
    table = 2 * model.vocab_size * model.hidden_size
    assert {item.name: item.bytes for item in load if not item.name.startswith("CUDA")} == {
        "weights": 2 * total_parameters(model), "weight that is read": 2 * table,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("grads", "moments", "bytes"), [("float32", "float32", 2 + 4 + 2 + 8), ("bfloat16", "bfloat16", 2 + 2 + 2 + 4)]
)
def test_the_precision_aware_optimizer_keeps_numbers_of_its_own_size(grads, moments, bytes):
    settings = MegatronSettings(
        use_precision_aware_optimizer=True, main_grads_dtype=grads, exp_avg_dtype=moments, exp_avg_sq_dtype=moments
    )
    model = MODELS["qwen3-8b"]
    static = trainer("actor", ParallelSizes(), Workload(model, settings, batch=BATCH)).phase("optimizer step").items
    names = ("weights", "gradients", "main weights", "Adam's moments")
    assert sum(item.bytes for item in static if item.name.startswith(names)) == bytes * total_parameters(model)


def test_a_server_needs_room_for_its_cache():
    small = MemorySettings(find_gpu("24GiB").memory)
    found = allocation.check("sglang:d1", model="qwen3-14b", memory=small).findings
    assert [f.code for f in found] == ["ALLOC-MEMORY", "ALLOC-MEMORY-KV"]
    assert all(allocation.check(text, model="qwen3-14b", memory=small).ok for f in found for text in f.nearest)


def test_adapters_on_a_server_take_memory_from_its_cache():
    server, model, gpu = allocation.compile("sglang:d1").engines[0], MODELS["qwen3-30b-a3b"], find_gpu("h200").memory
    served = 10**9
    without, found = (
        footprint(server, Workload(model, memory=MemorySettings(gpu, served_adapters=number))) for number in (0, served)
    )
    items = {item.name: item.bytes for item in found.phase("rollout").items}
    assert items["adapters"] == 2 * served
    assert without.kv_tokens - found.kv_tokens == pytest.approx(2 * served / found.kv_token_bytes, abs=1)


def test_the_command_draws_and_counts(tmp_path):
    picture = tmp_path / "memory.svg"
    words = ["memory", "sglang:d1t2+megatron:d2t2", "-m", "qwen3-8b", "--recompute", "full", "--svg", str(picture)]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "80", "NO_COLOR": "1"})
    assert result.exit_code == 0 and "forward and backward" in result.output
    assert picture.read_text().startswith("<svg")
    small = CliRunner().invoke(app, [*words, "--gpu", "24GiB", "--json"])
    assert small.exit_code == 1 and "ALLOC-MEMORY" in small.stderr
    engines = json.loads(small.stdout)["engines"]
    assert engines["actor"]["peak"]["bytes"] > 24 * GIB
    assert CliRunner().invoke(app, ["memory", "megatron:d1"]).exit_code == 2
    assert "did you mean" in CliRunner().invoke(app, [*words, "--gpu", "h201"]).stderr


@pytest.mark.parametrize("words", ["d2", "d2 --length 41000", "d8 -b 4x1", "d2c2 --length 16385"])
def test_what_does_not_fit_is_told_whatever_else_is_wrong_with_the_batch(words):
    layout, *options = words.split()
    asked = ["memory", f"megatron:{layout}", *options, "-m", "qwen3-8b", "--gpu", "a100-40"]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 1 and "actor needs" in result.stderr


def test_every_model_and_backend_has_an_estimate():
    for name in allocation.model_spec.known_models():
        model = allocation.load_model(name)
        for text in ("megatron:d8", "fsdp:d8", "sglang:d8", "vllm:d8"):
            made = estimate(allocation.compile(text), Workload(model, FULL, MemorySettings(GPUS["h200"].memory), BATCH))
            assert all(item.bytes > 0 for one in made.footprints for phase in one.phases for item in phase.items), name
            assert made._repr_html_().startswith("<div>")


def test_deterministic_attention_needs_a_workspace_that_grows_with_the_square_of_the_tokens() -> None:
    model = replace(MODELS["qwen3-0.6b"], heads=12)

    def of(tokens: int, length: int) -> int:
        batch, settings = BatchSpec(256, max_length=length, max_tokens_per_mb=tokens), MegatronSettings()
        return peak(model, ParallelSizes(), replace(settings, deterministic_mode=True), batch) - peak(
            model, ParallelSizes(), settings, batch
        )

    measured = 384 * GIB  # on an H200: 256 sequences in a micro-batch of at most 8,192 tokens
    assert of(8192, 32) == pytest.approx(measured, rel=0.05)
    assert of(4096, 32) == pytest.approx(measured / 8, rel=0.05)
    assert of(8192, 8192) == pytest.approx(measured / 256, rel=0.3)
