"""Writes `docs/benchmarks.md` and its charts from the figures in `benchmarks/results/`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import learning_figures

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results"
PAGE = ROOT / "docs/benchmarks.md"
CHARTS = ROOT / "docs/images"
BLUE, GREY, INK = "#0969da", "#afb8c1", "#1f2328"

TRAINER = {  # result file: shape, layout
    "trainer_throughput_qwen3_0.6b_h200": ("Qwen3-0.6B", "1 H200"),
    "trainer_throughput_qwen3_0.6b_all_h200": ("Qwen3-0.6B, loss on all tokens", "1 H200"),
    "trainer_throughput_fsdp_0.6b_h200": ("Qwen3-0.6B, FSDP beside bare FSDP2", "1 H200"),
    "trainer_throughput_qwen3_4b_h200": ("Qwen3-4B, full recomputation", "1 H200"),
    "trainer_throughput_fsdp_4b_h200x2": ("Qwen3-4B, FSDP beside bare FSDP2", "2 H200"),
    "trainer_throughput_qwen3_8b_h200": ("Qwen3-8B, full recomputation, moments in bfloat16", "1 H200"),
    "trainer_throughput_qwen3_moe_h200": ("5.8B with 64 experts", "1 H200"),
    "trainer_throughput_folded_h200x4": ("5.8B with 64 experts, `megatron:(attn:t2c2\\|ffn:e4)`", "4 H200"),
}
SETTINGS = {  # result file of benchmarks.expert_settings: shape, device
    "experts_h200": ("5.8B with 64 experts", "1 H200"),
    "experts_router_h200": ("5.8B with 64 experts, another machine", "1 H200"),
    "experts_h100": ("3.2B with 64 experts", "1 H100"),
    "dense_0.6b_h200": ("Qwen3-0.6B", "1 H200"),
    "dense_0.6b_h100": ("Qwen3-0.6B", "1 H100"),
    "dense_0.1b_h200": ("0.1B", "1 H200"),
    "dense_0.1b_h100": ("0.1B", "1 H100"),
}
ASYNC = {
    "async_speed_h200x2": "Qwen3-0.6B, 256 responses per step",
    "async_speed_before_h200x2": "Qwen3-0.6B, 256 responses per step, earlier commit",
    "async_speed_16_prompts_h200x2": "Qwen3-0.6B, 128 responses per step",
    "async_speed_4b_h200x2": "Qwen3-4B, 128 responses per step",
}
UPDATES = ("update_cost_h200x2", "update_cost_ipc_h200", "update_cost_ipc_ahead_h200", "update_cost_moe_ipc_h200")
SHARED = {
    "shared_prompts_0.6b_h200": "Megatron",
    "shared_prompts_0.6b_long_prompts_h200": "Megatron",
    "shared_prompts_fsdp_0.6b_h200": "FSDP",
}

_REAL = "python -m benchmarks.real_run {} --config examples/{}.yaml"
COMMANDS = (  # claim, hardware, command
    (
        "Rollouts of SmolLM2-135M beside unpatched SGLang: the engine's server ≥ 0.97, its client ≥ 0.90",
        "1 H200",
        _REAL.format("servers", "math/gsm8k_smollm2") + " --running 384,1024 --rounds 3",
    ),
    (
        "GSM8K with SmolLM2-135M in one lease: accuracy, start, tokens per second (repeat with `seed=2` and `seed=3`)",
        "1 H200",
        _REAL.format("run", "math/gsm8k_smollm2") + " --limit 1500 --name gsm8k_smollm2_seed1 seed=1",
    ),
    (
        "Updates of a model with 64 experts (5.8B) over NCCL: pause, share of the link's speed",
        "2 H200",
        "python -m benchmarks.update_cost --device cuda --shapes qwen3-moe-16-layers --modes collective --rounds 3",
    ),
    (
        "A loop of Qwen3-30B-A3B's shape: tokens per second and GPU, phases, memory and time beside their predictions",
        "4 H200",
        "python -m benchmarks.moe_30b --arms split,shared",
    ),
    (
        "Asynchronous runs at 4B with one server GPU more or less: at least twice the best synchronous run",
        "4 H200",
        "python -m benchmarks.async_speed --gpus 4 --shape 4B --servers 1 --staleness 2",
    ),
    (
        "FP8 rollouts at Qwen3-8B's shape in more and longer blocks: at least 1.3 of bfloat16",
        "1 H200",
        "python -m benchmarks.fp8_rollouts --shape qwen3-8b --rounds 6 --seconds 30",
    ),
)

TREE_SHAPES = {
    "last": "all before turn 8",
    "halves": "two at a time, before turns 3, 5 and 7",
    "each": "one before each turn",
}


def main() -> None:
    """Write the page and its charts."""
    rows = [(TRAINER[name][0].replace("\\|", "|").replace("`", ""), read(name)["ratio"]) for name in TRAINER]
    (CHARTS / "trainer_ratio.svg").write_text(bars(rows, "tokens per second relative to the bare loop"))
    async_rows = [(f"{title}, {kind}", ratio["ratio"]) for title, kind, ratio in async_ratios()]
    (CHARTS / "async_ratio.svg").write_text(bars(async_rows, "samples per second relative to the synchronous run"))
    PAGE.write_text(page())


def page() -> str:
    """Return the page as Markdown."""
    return "\n".join(sections())


def sections() -> Iterator[str]:
    """Yield every section, line by line."""
    yield INTRODUCTION
    yield from table(["Shape", "GPUs", "Tokens/s", "Peak memory", "Log-probs/training"], trainer())
    if any(map(exists, SETTINGS)):
        yield SETTINGS_OF_STEPS
        head = ["Shape", "Tokens", "Settings", "Tokens/s", "Share of peak", "Log-probs/training", "Kernels", "Idle"]
        yield from table(head, settings())
    yield BALANCE
    yield from table(
        ["Model", "Sequences", "Tokens", "Ranks, by tokens", "by FLOPs", "Each, by tokens", "by FLOPs"], balance()
    )
    yield ASYNCHRONY
    yield from table(["Workload", "Lengths", "η = 0, samples/s", "best η = 2, samples/s", "Ratio"], asynchrony())
    yield WEIGHTS
    yield from table(["Shape", "Transport", "Pause, ms", "Share of link speed", "Throughput"], updates())
    yield FP8
    yield from table(["Server", "Tokens/s", "Distance of log-probs, nats", "Update, GB", "Pause, ms"], fp8_rollouts())
    yield FP8_CURVES
    yield from table(["Servers", "Reward at step 0", "10", "20", "30", "40", "50", "60"], fp8_curves())
    yield DELTAS
    yield from table(["Case", "Median from step 10 on", "Largest from step 10 on"], weight_deltas())
    yield FAR
    yield from table(["Order of the runs", "Directly, steps/s", "Over the link, steps/s", "Ratio"], far_servers())
    yield PROMPTS
    yield from table(["Backend", "Prompt + response", "Training", "Log-probs"], shared_prompts())
    yield TREES
    yield from table(["Branches", "Device", "Tokens, flat / tree", "Training", "Log-probs"], tree_training())
    yield ROLLOUTS
    yield from table(["Measure", "Ratio", "Device"], rollouts())
    yield PREFILLS
    yield from table(["Server", "Requests at once", "Delayed prefills", "Tokens/s", "ms per pass"], prefills())
    yield SERVERS.format(**rollouts_of_a_run())
    yield from table(
        ["Device", "Requests at once", "SGLang's own, tokens/s", "the engine's", "the engine's client"], servers()
    )
    yield CONTROLLER
    yield from table(["Device", "Samples in flight", "Tokens/s", "Tokens/CPU s"], controller())
    yield CHECKPOINTS
    yield from table(["Backend", "Device", "Size, GiB", "Blocked share of the write"], checkpoints())
    yield TRL
    yield from table(["Seed", "areal-like, s", "TRL, s", "Ratio", "Ratio without start-up"], demo())
    yield from learning_figures.sections()
    soak = read("soak_memory_cpu")
    yield MEMORY.format(**soak)
    head = ["Process", "Private MiB, first", "after half of the time", "at the end", "Growth, MiB per hour"]
    yield from table(head, memory(soak["processes"]))
    yield ONE_ARENA.format(**(other := read("soak_memory_one_arena_cpu")))
    yield from table(head, memory(other["processes"]))
    yield PREDICTIONS
    yield RECORDING.format(**read("recording_cost_cpu"))
    yield NOT_RUN
    yield from table(["Claim", "Hardware", "Command"], ((claim, where, f"`{line}`") for claim, where, line in COMMANDS))


def read(name: str) -> Any:
    """Return one result file."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def exists(name: str) -> bool:
    """Return whether a result file is there."""
    return (RESULTS / f"{name}.json").exists()


def table(head: Sequence[str], rows: Iterator[Sequence[str]]) -> Iterator[str]:
    """Yield a Markdown table."""
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield f"| {' | '.join(row)} |"


def link(name: str, text: str) -> str:
    """Return a link to a result file."""
    return f"[{text}](../benchmarks/results/{name}.json)"


def trainer() -> Iterator[Sequence[str]]:
    """Yield the engine beside bare loops."""
    for name, (shape, gpus) in TRAINER.items():
        found = read(name)
        memory = found["peak_gib"]["engine"] / found["peak_gib"]["bare"]
        yield shape, gpus, link(name, f"{found['ratio']:.2f}"), f"{memory:.2f}", f"{found['log_probs_ratio']:.1f}"


def balance() -> Iterator[Sequence[str]]:
    """Yield the spread of the cost of micro-batches."""
    for found in read("packing_cpu")["cases"]:
        tokens, apart, meeting = found["tokens"], found["cost"], found["cost, ranks meet"]
        spread = link("packing_cpu", f"{tokens['ranks']:.2f}"), f"{apart['ranks']:.2f}"
        meets = f"{tokens['micro_batches']:.2f}", f"{meeting['micro_batches']:.2f}"
        yield found["model"], f"{found['sequences']}", f"{found['tokens_per_micro_batch']:,}", *spread, *meets


def settings() -> Iterator[Sequence[str]]:
    """Yield steps with other micro-batches, recomputation and kernels, interleaved in one process."""
    for name, (shape, device) in SETTINGS.items():
        for arm in read(name)["arms"].values() if exists(name) else ():
            if "failed" in arm:
                continue
            speed, forward = arm["seconds_figures"], arm["log_probs_figures"]
            kernels = {"grouped": "grouped experts", "fused": "fused gradients", "router": "fused router"}
            kernels["recompute"] = f"recomputed {'layers' if arm['recompute'] == 'full' else arm['recompute']}"
            chosen = ", ".join(words for key, words in kernels.items() if arm[key])
            ratio = forward["tokens_per_second"] / speed["tokens_per_second"]
            profile = arm.get("profile") or {}
            kernels_of = f"{profile['kernels']:,}" if profile else "–"
            idle = f"{profile['idle_share']:.0%}" if profile else "–"
            tokens = link(name, f"{speed['tokens_per_second']:,}")
            share = f"{speed['share_of_peak']:.1%}"
            yield f"{shape}, {device}", f"{arm['tokens']:,}", chosen, tokens, share, f"{ratio:.1f}", kernels_of, idle


def async_ratios() -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield workload, kind of lengths and measured ratio."""
    for name, title in ASYNC.items():
        for kind, ratio in read(name)["ratio"].items():
            yield title, kind.replace("_", "-"), ratio


def asynchrony() -> Iterator[Sequence[str]]:
    """Yield asynchronous beside synchronous runs."""
    names = {title: name for name, title in ASYNC.items()}
    for title, kind, found in async_ratios():
        speed = found["samples_per_s"]
        best = speed[found["best"]]
        yield title, kind, f"{speed['sync']:.1f}", f"{best:.1f}", link(names[title], f"{found['ratio']:.2f}")


def updates() -> Iterator[Sequence[str]]:
    """Yield what weight updates cost; of the file of two GPUs only NCCL, since IPC was measured again."""
    for name in UPDATES:
        for case in read(name)["cases"]:
            if name == "update_cost_h200x2" and case["mode"] == "ipc":
                continue
            pause, kept = pause_ms(case), throughput(case)
            prefetched = ", all weights prefetched" if name.endswith("_ahead_h200") else ""
            yield (
                case["shape"],
                f"{case['backend']}{prefetched}",
                link(name, "–" if pause is None else f"{pause:.0f}"),
                f"{case['share_of_link']:.2f}",
                "–" if kept is None else f"{kept:.2f}",
            )


def fp8_rollouts() -> Iterator[Sequence[str]]:
    """Yield what servers in FP8 do beside servers in bfloat16."""
    name = "fp8_rollouts_h200"
    for form, arm in read(name)["arms"].items():
        speed = link(name, ", ".join(f"{rate:,.0f}" for rate in arm["tokens_per_second"]))
        yield form, speed, f"{arm['apart']:.2f}", f"{arm['bytes'] / 1e9:.1f}", f"{1000 * arm['pause_s']:.0f}"


def fp8_curves() -> Iterator[Sequence[str]]:
    """Yield the evaluation rewards of a run with servers in each data type."""
    found = read("fp8_curves_h200")
    for form in ("bfloat16", "fp8"):
        yield link("fp8_curves_h200", form), *(f"{reward:.3f}" for reward in found[form]["held_out"].values())


def weight_deltas() -> Iterator[Sequence[str]]:
    """Yield sizes of weight deltas."""
    for case in read("weight_deltas_cpu")["cases"]:
        late = case["from_step_10"]
        yield case["case"], link("weight_deltas_cpu", f"{late['median']:.3f}"), f"{late['largest']:.3f}"


def far_servers() -> Iterator[Sequence[str]]:
    """Yield rates of steps with downloads over a slow link and without it."""
    name = "far_servers_cpu"
    for each in read(name)["rounds"]:
        direct, far = (f"{each[kind]['steps_per_second']:.3f}" for kind in ("direct", "link"))
        yield ", ".join(each["order"]), link(name, direct), far, f"{each['ratio']:.2f}"


def pause_ms(case: Mapping[str, Any]) -> float | None:
    """Return the median pause of requests in milliseconds, of a busy server where that was measured."""
    parts = case.get("parts", {}).get("in_place", case["idle"])
    return 1000 * parts["pause_s"]["median"] if "pause_s" in parts else None


def throughput(case: Mapping[str, Any]) -> float | None:
    """Return throughput with an update every few seconds relative to none."""
    return case.get("ratio", {}).get("in_place")


def shared_prompts() -> Iterator[Sequence[str]]:
    """Yield the speed of shared prompts."""
    for name, backend in SHARED.items():
        found = read(name)
        size = f"{found['prompt_tokens']} + {found['response_tokens']}"
        yield backend, size, link(name, f"{found['ratio']['train']:.2f}"), f"{found['ratio']['log_probs']:.2f}"


def tree_training() -> Iterator[Sequence[str]]:
    """Yield the speed of conversations packed as trees."""
    for name, device in (("tree_training_cuda", "H100"), ("tree_training_cpu", "CPU")):
        for shape, found in read(name)["shapes"].items():
            ratio = found["ratio"]
            training = link(name, f"{ratio['train']:.2f}")
            yield TREE_SHAPES[shape], device, f"{found['bound']:.2f}", training, f"{ratio['log_probs']:.2f}"


def rollouts() -> Iterator[Sequence[str]]:
    """Yield the collector and the agent path beside bare clients."""
    bare, agent = read("rollout_throughput_cpu"), read("agent_path_cpu")
    yield "collector beside a bare HTTP client", link("rollout_throughput_cpu", f"{bare['ratio']:.3f}"), "2 CPU cores"
    gpu = read("rollout_throughput_cuda")
    yield "collector beside a bare HTTP client", link("rollout_throughput_cuda", f"{gpu['ratio']:.3f}"), "1 H200"
    yield "agent beside single turns", link("agent_path_cpu", f"{agent['ratio']:.3f}"), "2 CPU cores"


def prefills() -> Iterator[Sequence[str]]:
    """Yield servers of a real model with and without delayed prefills."""
    name = "batched_prefills_h200"
    rows = [row for row in read(name)["rows"] if row["side"] != "engine_client" and row["requests_at_once"] > 64]
    for row in sorted(rows, key=lambda row: (row["requests_at_once"], row["side"] == "engine", row["prefill_delayer"])):
        server = "SGLang's own" if row["side"] == "unpatched" else "the engine's"
        speed = link(name, f"{row['log_tokens_per_s']:,}")
        delayed = "yes" if row["prefill_delayer"] else "no"
        yield server, f"{row['requests_at_once']:,}", delayed, speed, f"{row['ms_per_pass']:.1f}"


def rollouts_of_a_run() -> Mapping[str, float]:
    """Return the tokens per second of a run whose trainer waits, and their share of an unpatched server's."""
    run, alone = read("gsm8k_smollm2_higher_lr"), read("real_run_servers_h200")
    columns = (run[name] for name in ("seconds/step", "throughput/rollout_tokens_per_second", "idle/trainer"))
    steps = [(seconds, speed) for seconds, speed, idle in zip(*columns, strict=True) if idle > 0.7]
    waiting = sum(seconds * speed for seconds, speed in steps) / sum(seconds for seconds, _ in steps)
    return {"waiting": waiting, "share": waiting / alone["tokens_per_s"]["unpatched"]["768"]}


def servers() -> Iterator[Sequence[str]]:
    """Yield the speed of servers and of the engine's client, relative to SGLang's own server."""
    for name, device in (("real_run_servers_h200", "1 H200"), ("real_run_servers_cpu", "2 CPU cores")):
        found = read(name)
        for level, speed in found["tokens_per_s"]["unpatched"].items():
            shares = (f"{found['share_of_unpatched'][side][level]:.2f}" for side in ("engine", "client"))
            yield device, level, link(name, f"{speed:,}"), *shares


def controller() -> Iterator[Sequence[str]]:
    """Yield the controller's throughput."""
    for name in ("controller_in_flight_cpu16", "controller_512_groups_cpu16"):
        found = read(name)
        for best in found["best_round"]:
            speed = f"{best['response_tokens'] / best['wall_s'] / 1e6:.2f} M"
            cores = f"{found['device']['cpus']} cores"
            cost = f"{best['tokens_per_cpu_second'] / 1e6:.2f} M"
            yield cores, f"{best['in_flight']:,}", link(name, speed), cost


def checkpoints() -> Iterator[Sequence[str]]:
    """Yield how long checkpoints block training."""
    for name, device in (("checkpoint_h200", "1 H200"), ("checkpoint_cpu", "2 CPU cores")):
        for backend, found in read(name)["backends"].items():
            yield backend, device, f"{found['gib']:.1f}", link(name, f"{found['share']:.3f}")


def memory(processes: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[str]]:
    """Yield the memory of each process of a long run."""
    for found in processes:
        sizes = found["private_mib"]
        if sizes[-1] < 5:
            continue
        shown = (f"{sizes[place]:.1f}" for place in (0, len(sizes) // 2, -1))
        yield f"{found['name']} ({found.get('command', '')})", *shown, f"{found['growth_mib_per_hour']:.2f}"


def demo() -> Iterator[Sequence[str]]:
    """Yield seconds to the target reward, per seed."""
    found = read("demo_vs_trl")
    for seed, one in found["seeds"].items():
        trl, ratio = one["trl"]["total_s"], one["ratio"]
        missed = "not reached"
        yield (
            seed,
            f"{one['engine']['total_s']:.0f}",
            missed if trl is None else f"{trl:.0f}",
            "–" if trl is None else f"{ratio['total']:.2f}",
            "–" if trl is None else f"{ratio['training']:.2f}",
        )
    total, training = found["ratio"]["total"], found["ratio"]["training"]
    yield "median", "", "", link("demo_vs_trl", f"{total:.2f}"), f"{training:.2f}"


def bars(rows: Sequence[tuple[str, float]], caption: str) -> str:
    """Return a bar chart as SVG; the dashed line is 1."""
    left, width, height = 430, 360, 26
    scale = width / max(2.0, *(value for _, value in rows))
    parts = []
    for number, (label, value) in enumerate(rows):
        y = 34 + number * height
        parts.append(f'<text x="{left - 8}" y="{y + 14}" fill="{INK}" text-anchor="end">{label}</text>')
        parts.append(f'<rect x="{left}" y="{y}" width="{value * scale:.0f}" height="18" rx="3" fill="{BLUE}"/>')
        parts.append(f'<text x="{left + value * scale + 6:.0f}" y="{y + 14}" fill="{INK}">{value:.2f}</text>')
    one, bottom = left + scale, 34 + len(rows) * height
    parts.append(f'<line x1="{one:.0f}" x2="{one:.0f}" y1="28" y2="{bottom}" stroke="{GREY}" stroke-dasharray="4 3"/>')
    parts.append(f'<text x="{left}" y="20" fill="{INK}" font-weight="600">{caption}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="850" height="{bottom + 12}" font-size="13"'
    ground = f'<rect width="850" height="{bottom + 12}" fill="white"/>'
    return f'{head} font-family="system-ui, sans-serif">\n{ground}\n' + "\n".join(parts) + "\n</svg>\n"


INTRODUCTION = """# Benchmarks

Every figure links to its result file, which records the command, the commit, the device and the raw values. Figures are ratios of
two measurements in one run. `python docs/generate/figures.py` writes this page.

- [Trainer](#trainer)
- [Asynchronous and synchronous runs](#asynchronous-and-synchronous-runs)
- [Weight updates](#weight-updates)
- [FP8 rollouts](#fp8-rollouts)
- [Weight deltas](#weight-deltas)
- [Shared prompts](#shared-prompts)
- [Rollouts](#rollouts)
- [Controller](#controller)
- [Checkpoints](#checkpoints)
- [Demo beside TRL](#demo-beside-trl)
- [Learning and staleness](#learning-and-staleness)
- [Log-probs across updates](#log-probs-across-updates)
- [Algorithms](#algorithms)
- [Curriculum and single rollouts](#curriculum-and-single-rollouts)
- [Killed runs](#killed-runs)
- [Memory](#memory)
- [Not run yet](#not-run-yet)

## Trainer

The engine beside a bare loop of the same library on the same micro-batches (`python -m benchmarks.trainer_throughput`). The bare
loop computes logits for every token; the engine computes them only for trained tokens (28 % here), except in the second row.

![Tokens per second of the engine relative to a bare loop](images/trainer_ratio.svg)
"""
SETTINGS_OF_STEPS = """
Steps of one engine with other micro-batches, recomputation and kernels, interleaved in one process, at a learning rate of 0
(`python -m benchmarks.expert_settings`): loss and gradient norm are equal. The share of peak counts the model's products, not
recomputed ones; the file has the formula. Kernels and idle time of the GPU are those of a step under torch's profiler.
"""
BALANCE = """
Cost of packed micro-batches of long-tailed lengths over 8 data-parallel ranks (`python -m benchmarks.packing`), balanced by tokens
and by FLOPs, which grow with the square of a length: the largest rank over the mean, and for ranks that wait for each other in every
micro-batch (FSDP, expert parallelism) the sum of the largest of each. 1 is the optimum, and a batch whose longest sequence costs more
than a micro-batch's mean cannot reach it.
"""
ASYNCHRONY = """
## Asynchronous and synchronous runs

Both engines on both of two H200, with forced response lengths: log-normal with a long tail, or equal
(`python -m benchmarks.async_speed`).

![Samples per second of the asynchronous run relative to the synchronous one](images/async_ratio.svg)
"""
WEIGHTS = """
## Weight updates

An update every 5 s while 256 requests run (`python -m benchmarks.update_cost`). The pause is the median time that requests stand
still. Throughput is relative to no updates.
"""
FP8 = """
## FP8 rollouts

Servers of Qwen3-8B's shape on one GPU with 256 requests, in turns, in two blocks of 9 s (`python -m benchmarks.fp8_rollouts`). FP8 was
slower in both. Weights are random, so rounding moves log-probs much further than in a trained model. The blocks were short because a
server in FP8 compiled kernels for two minutes; since then it compiles fewer before it answers.
"""
FP8_CURVES = """
Learning with servers in FP8 and in bfloat16: a generated model of 100M parameters that learns arithmetic (examples/math/gsm8k_grpo.yaml).
"""
DELTAS = """
## Weight deltas

Size of the files of [deltas](weight_updates.md#deltas) as a share of a full copy, over 24 steps of the CPU demo with other data types
and learning rates (`python -m benchmarks.weight_deltas`). The demo's own learning rate, 8e-4, is far above those of large models.
"""
FAR = """
## Servers far away

Speed of the CPU demo at η = 2 in bfloat16, with a learning rate of 1e-5, whose server [downloads](weight_updates.md#servers-far-away)
deltas over a link with 50 ms in each direction and 20 MB/s, relative to the same downloads without the link
(`python -m benchmarks.far_servers`). Requests for tokens do not cross the link. The model is so small that the delay of the link counts
and not its bandwidth.
"""
PROMPTS = """
## Shared prompts

Speed with `actor.mb_spec.share_prompts` relative to without, Qwen3-0.6B on one H200, eight samples per prompt
(`python -m benchmarks.shared_prompts`).
"""
TREES = """
Conversations of 8 turns with 8 branches, as trees relative to flat packing: Qwen3-0.6B's shape on one H100, a small model on a CPU
(`python -m benchmarks.tree_training`).
"""
ROLLOUTS = """
## Rollouts

`python -m benchmarks.rollout_throughput` and `python -m benchmarks.agent_path`.
"""
PREFILLS = """
SmolLM2-135M-Instruct with GSM8K's prompts and natural ends on one H200, as a closed loop of requests
(`python -m benchmarks.real_run servers`). Without delayed prefills SGLang prefills after most decoding passes, and every running
request waits. The two arms ran on two machines of one kind.
"""
SERVERS = """
The engine's server and client beside SGLang's own server with its best settings, in turns on one machine (`python -m
benchmarks.real_run servers`): SmolLM2-135M-Instruct on the H200, the example's small model on the CPU. A whole run on that H200
([file](../benchmarks/results/gsm8k_smollm2_higher_lr.json)) made {waiting:,.0f} tokens/s in steps in which its trainer waited for more than
70 % of the time, which is {share:.2f} of SGLang's own server with 768 requests; other runs shared the GPU.
"""
CONTROLLER = """
## Controller

One controller process with simulated servers (`python -m benchmarks.controller`).
"""
CHECKPOINTS = """
## Checkpoints

Share of the write during which training is blocked (`python -m benchmarks.checkpoint`). The model is Qwen3-0.6B on the H200 and a
smaller one on the CPU, where a copy in memory is only ten times as fast as the write.
"""
TRL = """
## Demo beside TRL

Seconds until the demo's evaluation reward reaches 0.9, on 2 CPU cores (`python -m benchmarks.demo_vs_trl`).
"""
NOT_RUN = """
## Not run yet

Commands for claims that have no result file yet, because no GPU or no idle CPU was available.
"""
MEMORY = """
## Memory of a long run

`python -m benchmarks.soak_memory` trains agents on two CPU cores and reads the memory of every process each minute
([file](../benchmarks/results/soak_memory_cpu.json)). It ran {minutes} minutes, beside other jobs, and trained {steps:,} steps. The
growth is the slope of the second half. Processes with less than 5 MiB, such as warm sandboxes, are left out.
"""
ONE_ARENA = """
The growth is fragmentation in glibc's allocator: an arena per thread, and large freed blocks that it keeps. With `MALLOC_ARENA_MAX=1` and
`MALLOC_MMAP_THRESHOLD_=131072` for all processes ([file](../benchmarks/results/soak_memory_one_arena_cpu.json)) none but Ray's
`gcs_server` grew in the second half of {minutes} minutes and {steps:,} steps. The controller and the agents' workers set both themselves,
unless the environment does; trainers are faster without.
"""
RECORDING = """
## Recording steps

Recorded steps of the CPU example ÷ their unrecorded neighbours, in turns in one run (`python -m benchmarks.recording_cost`), over {pairs}
pairs: [{ratio:.3f}](../benchmarks/results/recording_cost_cpu.json) of the time (95 % interval {interval[0]:.3f} to {interval[1]:.3f}), and
{cpu_ratio:.3f} of the CPU seconds of the controller and the trainer's ranks ({cpu_interval[0]:.3f} to {cpu_interval[1]:.3f}), as recording
computes beside training.
"""
PREDICTIONS = """
## Memory

Memory predictions are compared with measurements in [memory and planning](memory_and_planning.md).
"""

if __name__ == "__main__":
    main()
