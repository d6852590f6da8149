"""What the rules accept, megatron-core accepts, and the other way round."""

from itertools import permutations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import allocation
from allocation import MegatronSettings, ModelSpec
from allocation.pipeline import pipeline_stages

config = pytest.importorskip("megatron.core.transformer.transformer_config")
state = pytest.importorskip("megatron.core.parallel_state")
layout = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")

ORDERS = ["-".join(order) for order in permutations(["tp", "cp", "ep", "dp", "pp"])]
small = st.sampled_from([1, 1, 2, 3, 4])
LETTERS = {"embedding": "E", "loss": "L", "decoder": "t", "mtp": "m"}
pieces = st.lists(
    st.sampled_from(["E", "t", "L", "m", "|", "(t|)*2", "(tt|t)*3", "t*4", ",", "*2", "(", ")", " ", "x"])
)


def refused(call, *arguments, **options):
    try:
        call(*arguments, **options)
    except (AssertionError, ValueError, RuntimeError, NotImplementedError):
        return True
    return False


@pytest.fixture(scope="module")
def initialized():
    """Whether Megatron's grids of some sizes can be built, without any process group."""
    distributed = state.torch.distributed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "create_group", lambda *_, **__: None)
        patch.setattr(state, "create_hierarchical_groups", lambda *_, **__: ([None] * 2, [None] * 2))
        patch.setattr(distributed, "is_initialized", lambda: True)
        patch.setattr(distributed, "get_rank", lambda *_: 0)

        def ok(world, **options):
            patch.setattr(distributed, "get_world_size", lambda *_: world)
            for name in [name for name in vars(state) if name.startswith("_") and name.isupper()]:
                patch.setattr(state, name, None)
            return not refused(state.initialize_model_parallel, **options, create_gloo_process_groups=False)

        yield ok


@settings(max_examples=100)
@given(small, small, small, small, small, small, st.sampled_from([1, 1, 2, 4]), st.sampled_from(ORDERS))
def test_grids_are_accepted_alike(initialized, d, t, p, c, e, etp, instances, order):
    text = f"megatron:(attn:d{d}t{t}p{p}c{c}|ffn:t{etp}e{e})"
    options = MegatronSettings(num_distributed_optimizer_instances=instances)
    ours = allocation.check(text, order=order, megatron=options).ok
    assert ours == initialized(
        d * t * p * c, tensor_model_parallel_size=t, pipeline_model_parallel_size=p, context_parallel_size=c,
        expert_model_parallel_size=e, expert_tensor_parallel_size=etp, order=order,
        num_distributed_optimizer_instances=instances,
    )  # fmt: skip


@settings(max_examples=100)
@given(
    st.sampled_from([2, 4, 6, 8, 12]), st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 3]),
    st.sampled_from([None, 0, 1, 2, 3]), st.sampled_from([None, 0, 1, 2, 3]), st.none() | pieces,
    st.sampled_from(["alltoall", "allgather", "flex"]), st.booleans(), st.sampled_from([0, 4]),
)  # fmt: skip
def test_options_are_accepted_alike(layers, p, v, first, last, parts, dispatcher, deepep, experts):
    assume(p > 1 or (v == 1 and None in (first, last)))
    assume((first or 0) + (last or 0) <= layers)  # Megatron takes fewer than no layers in the middle
    text = None if parts is None else f"E{''.join(parts)}{'t' * (layers - ''.join(parts).count('t'))}L"
    options = {
        "num_layers_in_first_pipeline_stage": first,
        "num_layers_in_last_pipeline_stage": last,
        "pipeline_model_parallel_layout": text,
        "moe_token_dispatcher_type": dispatcher,
        "moe_enable_deepep": deepep,
    }
    model = ModelSpec(
        "m", "llama", 16, layers, 2, 2, 32, 64, experts=experts, expert_ffn=8 if experts else 0, head_dim=8
    )
    ours = allocation.check(f"megatron:p{p}v{v}", model=model, megatron=MegatronSettings(**options)).ok
    uneven = text is None and first is last is None and layers % (p * v)  # which the layers' block asserts
    assert ours != bool(uneven) | refused(
        config.TransformerConfig,
        num_layers=layers, hidden_size=16, num_attention_heads=2, num_moe_experts=experts or None,
        moe_ffn_hidden_size=8 if experts else None, pipeline_model_parallel_size=p, add_bias_linear=False,
        virtual_pipeline_model_parallel_size=v, pipeline_dtype=state.torch.bfloat16, variable_seq_lengths=True, **options,
    )  # fmt: skip


@settings(max_examples=100)
@given(pieces)
def test_layout_strings_are_read_alike(parts):
    text = "".join(parts)
    try:
        stages = layout.PipelineParallelLayerLayout.parse_str_to_list(text)
    except AssertionError:
        stages = None
    assert pipeline_stages(text) == (stages and ["".join(LETTERS[it.name] for it in stage) for stage in stages])
