"""Rules that need the model: divisibility of its dimensions, by the names of the model's config."""

from collections.abc import Iterator

from allocation.diagnostics import Problem, Severity
from allocation.families import TRAINED
from allocation.model_spec import ModelError, ModelSpec
from allocation.registry import CONFIG, rule
from allocation.resolve import Engine

_DIVIDE = "Megatron-LM core/utils.py, divide"
SERVER_PADDING = 64  # DEFAULT_VOCAB_PADDING_SIZE of SGLang 0.5.17


def _split(total: int, what: str, engine: Engine, name: str) -> Iterator[Problem]:
    """Yield a problem if the engine's size `name` does not divide a quantity."""
    if total % getattr(engine, name):
        values = [str(value) for value in range(1, min(total, 512) + 1) if total % value == 0]
        help = f"it must be one of {', '.join(values[:12])}{', …' if len(values) > 12 else ''}"
        yield Problem(f"{total} {what} cannot be split by `{engine.says(name)}`", engine.spans(name), help)


@rule("ALLOC-MODEL", source="the model's config.json")
def model_readable(model_error: ModelError) -> Iterator[Problem]:
    """The model must be found and its config complete; wrong and unknown fields are named."""
    yield Problem(str(model_error))


@rule("ALLOC-FAMILY", source="allocation/families/", severity=Severity.WARNING)
def family_known(whole_model: ModelSpec) -> Iterator[Problem]:
    """Layers of a known family are counted exactly, layers of an unknown family as dense with a gated feed-forward
    part."""
    if not whole_model.known_family and whole_model.counted is None:
        message = f"{whole_model.name} is of the unknown family {whole_model.family}: "
        yield Problem(f"{message}its parameters are counted as for a dense model with a gated feed-forward part")


@rule("ALLOC-QUANTIZED", source="weight updates send the trainer's unquantized weights", severity=Severity.WARNING)
def weights_as_trained(whole_model: ModelSpec) -> Iterator[Problem]:
    """Quantized checkpoints are counted with unquantized weights, which training and weight updates need; runs of
    areal-like reject such checkpoints."""
    if whole_model.quantization:
        message = (
            f"the checkpoint of {whole_model.name} is quantized (quantization_config: {whole_model.quantization}), "
        )
        message += "and memory is counted without quantization, for the trainer and for servers"
        yield Problem(message, (), "dequantize the checkpoint: runs train and serve weights that are not quantized")


@rule("ALLOC-UNTRAINED", source="areal_like/trainer/megatron/bridges/support.py", severity=Severity.NOTE)
def family_is_trained(trainer: Engine, model: ModelSpec) -> Iterator[Problem]:
    """The compiler checks layouts for more model families than areal-like trains."""
    trained = TRAINED.get(trainer.backend.name)
    if trained is not None and model.family not in trained and (model.known_family or trainer.backend.name != "fsdp"):
        message = f"the layout is valid, but areal-like does not train {model.family} with {trainer.backend.name}"
        yield Problem(message, (trainer.node.backend.span,))


@rule("ALLOC-HEADS", source=f"{CONFIG}, num_attention_heads", megatron="num_attention_heads")
def heads_by_tp(engine: Engine, model: ModelSpec) -> Iterator[Problem]:
    """With tensor parallelism every rank has whole attention heads, in trainers and in servers."""
    return _split(model.heads, "attention heads", engine, "tp")


@rule("ALLOC-KV-HEADS", source=f"{CONFIG}, num_query_groups", megatron="num_query_groups")
def kv_heads_by_tp(engine: Engine, model: ModelSpec) -> Iterator[Problem]:
    """KV heads are split over TP, or each is copied to several ranks: their number is a multiple or a divisor of TP."""
    if not model.latent_attention and model.kv_heads % engine.tp and engine.tp % model.kv_heads:
        message = f"{model.kv_heads} KV heads are neither a multiple nor a divisor of `{engine.says('tp')}`"
        yield Problem(message, engine.spans("tp"))


@rule("ALLOC-KV-COPIES", source="Megatron-LM core/transformer/attention.py", severity=Severity.NOTE)
def kv_heads_copied(engine: Engine, model: ModelSpec) -> Iterator[Problem]:
    """With more TP ranks than KV heads each rank keeps a copy of a head, which saves no memory."""
    if not model.latent_attention and engine.tp > model.kv_heads and engine.tp % model.kv_heads == 0:
        copies = engine.tp // model.kv_heads
        message = f"each of the {model.kv_heads} KV heads is stored {copies} times with `{engine.says('tp')}`"
        yield Problem(message, engine.spans("tp"))


@rule("ALLOC-SEQUENCE-HEADS", source="DeepSpeed Ulysses, arXiv 2309.14509")
def heads_by_sequence_parallel(trainer: Engine, model: ModelSpec) -> Iterator[Problem]:
    """Ranks that share a sequence under FSDP have all its tokens in attention, and each has some whole heads."""
    if trainer.backend.name == "fsdp":
        yield from _split(model.heads, "attention heads", trainer, "cp")


@rule("ALLOC-LINEAR-HEADS", source=f"{CONFIG}, linear_num_key_heads", megatron="linear_num_key_heads")
def linear_heads_by_tp_cp(trainer: Engine, model: ModelSpec) -> Iterator[Problem]:
    """Gated-delta-net layers split their key and value heads over tensor and context parallel ranks."""
    for what, heads in (("key", model.linear_key_heads), ("value", model.linear_value_heads)):
        if heads % (trainer.tp * trainer.cp):
            message = f"{heads} linear-attention {what} heads cannot be split by t·c = {trainer.tp * trainer.cp}"
            yield Problem(message, trainer.spans("tp", "cp"))


@rule("ALLOC-FFN", source=_DIVIDE, megatron="ffn_hidden_size")
def ffn_by_tp(engine: Engine, model: ModelSpec) -> Iterator[Problem]:
    """The dense FFN (also of a MoE model's first layers) is split over TP."""
    dense = model.dense_layers or not model.experts
    return _split(model.ffn if dense else 0, "FFN columns (intermediate_size)", engine, "tp")


@rule("ALLOC-EXPERT-FFN", source=_DIVIDE, megatron="moe_ffn_hidden_size")
def expert_ffn_by_etp(trainer: Engine, model: ModelSpec) -> Iterator[Problem]:
    """Each expert's FFN is split over expert tensor parallelism, which may differ from TP."""
    return _split(model.expert_ffn, "FFN columns of an expert", trainer, "etp")


@rule("ALLOC-SHARED-FFN", source=_DIVIDE, megatron="moe_shared_expert_intermediate_size")
def shared_ffn_by_tp(engine: Engine, model: ModelSpec) -> Iterator[Problem]:
    """Shared experts see every token and stay on the attention grid:

    TP splits them, not ETP, in trainers and in servers.
    """
    return _split(model.shared_ffn, "FFN columns of the shared experts", engine, "tp")


@rule("ALLOC-EXPERTS", source="Megatron-LM core/transformer/moe/moe_layer.py", megatron="num_moe_experts")
def experts_by_ep(engine: Engine, model: ModelSpec) -> Iterator[Problem]:
    """Every expert-parallel rank holds equally many experts."""
    return _split(model.experts, "experts", engine, "ep")


@rule("ALLOC-EP-DENSE", source=f"{CONFIG}, num_moe_experts", megatron="expert_model_parallel_size")
def experts_exist(engine: Engine, model: ModelSpec) -> Iterator[Problem]:
    """A dense model has no experts to distribute."""
    if engine.ep > 1 and not model.experts:
        yield Problem(f"`{engine.says('ep')}`, but {model.name} has no experts", engine.spans("ep"), "leave e out")


@rule("ALLOC-FOLD-DENSE", source="parallel folding, arXiv 2504.14960", severity=Severity.WARNING)
def folding_needs_experts(trainer: Engine, model: ModelSpec) -> Iterator[Problem]:
    """The `ffn` grid is the experts' grid; the FFN of a dense model follows `attn`."""
    if trainer.node.layout.ffn is not None and not model.experts and trainer.ep == 1:
        message = f"the ffn part has no effect: {model.name} has no experts"
        yield Problem(message, tuple(dim.span for dim in trainer.node.layout.ffn))


@rule("ALLOC-ROUTER-GROUPS", source=f"{CONFIG}, moe_router_num_groups", megatron="moe_router_num_groups")
def experts_by_router_groups(trainer: Engine, model: ModelSpec) -> Iterator[Problem]:
    """Group-limited routing splits the experts into equal groups."""
    if model.experts % model.router_groups:
        yield Problem(f"{model.experts} experts cannot be split into {model.router_groups} router groups")


@rule("ALLOC-EXPERT-BIAS", source=f"{CONFIG}, add_bias_linear", megatron="expert_tensor_parallel_size")
def expert_bias_needs_etp_1(trainer: Engine, model: ModelSpec) -> Iterator[Problem]:
    """Experts with a bias (gpt-oss) cannot be split by expert tensor parallelism."""
    if model.expert_bias and trainer.etp > 1:
        message = f"the experts of {model.name} have a bias, so `{trainer.says('etp')}` must be 1"
        yield Problem(message, trainer.spans("etp"), "write t1 in ffn, or leave it out")


@rule("ALLOC-SERVER-EXPERT-FFN", source="SGLang layers/moe/fused_moe_triton/layer.py: moe_tp_size")
def server_expert_ffn(server: Engine, model: ModelSpec) -> Iterator[Problem]:
    """The GPUs of a server that share experts, t/e, split each expert's FFN."""
    parts, rest = divmod(server.tp, server.ep)
    if not rest and model.expert_ffn % parts:
        message = f"{model.expert_ffn} FFN columns of an expert cannot be split by t/e = {parts}"
        yield Problem(message, server.spans("tp", "ep"))


@rule("ALLOC-SERVER-VOCAB", source="SGLang layers/vocab_parallel_embedding.py: divide(num_embeddings_padded, tp_size)")
def server_vocabulary_by_tp(server: Engine, model: ModelSpec) -> Iterator[Problem]:
    """The GPUs of a server split the vocabulary, which SGLang pads to a multiple of 64 and no further."""
    padded = -(-model.vocab_size // SERVER_PADDING) * SERVER_PADDING
    if model.heads % server.tp == 0:  # else the finding about heads is enough
        yield from _split(padded, "rows of the vocabulary, with SGLang's padding,", server, "tp")


@rule("ALLOC-SERVER-LAYERS", source="a pipeline stage has at least one layer")
def server_layers_by_pipeline(server: Engine, model: ModelSpec) -> Iterator[Problem]:
    """A server may split layers unevenly, but each stage needs one."""
    if server.pp > model.layers:
        yield Problem(f"{model.layers} layers cannot fill {server.pp} stages", server.spans("pp"))
