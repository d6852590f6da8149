"""Train with TRL's GRPOTrainer: `python -m benchmarks.trl_grpo CONFIG EVENTS TARGET LIMIT_S`.

CONFIG is a resolved configuration; training starts from its `actor.path`. Appends one JSON line to EVENTS per
evaluation. The settings are TRL's closest equivalents: loss "dapo" (mean over the batch's tokens), group-normalised
advantages, as many optimizer steps per batch of fresh samples, the same learning-rate schedule, no reference model,
float32 on a CPU. On a GPU weights are in float32 and passes in bfloat16, PER_PASS samples at a time.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from areal_like.core.config.load import load
from areal_like.core.config.schema import DatasetConfig, OptimizerConfig, RunConfig
from areal_like.data.dataset import read_records, training_steps
from areal_like.rewards.gsm8k import quick, verify

PER_PASS = 64  # samples of a pass on a GPU, whose logits fit beside the rest
EVALUATED = 512  # prompts of a pass


def judge(response: str, answer: str) -> float:
    reward = quick(response, answer)
    return verify(response, answer) if reward is None else reward


def rewards(completions: list[Any], answer: list[str], **_: object) -> list[float]:
    """Judge completions, each a text or a chat of one message."""
    texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
    return [judge(response, wanted) for response, wanted in zip(texts, answer, strict=True)]


def all_records(data: DatasetConfig) -> list[Mapping[str, Any]]:
    return list(read_records(data).rows)


def as_prompt(question: str, tokenizer: Any) -> Any:
    """Return a chat where the tokenizer has a template, as a run does."""
    return [{"role": "user", "content": question}] if tokenizer.chat_template else question


class HeldOut(TrainerCallback):
    """Evaluates on the evaluation prompts as often as the run and at its temperature."""

    def __init__(self, config: RunConfig, tokenizer, events: Path, target: float, limit_s: float) -> None:
        self._events, self._target = events, target
        self._every, self._minibatches = config.evaluator.freq_steps, config.actor.ppo_n_minibatches
        self._deadline = time.time() + limit_s
        self._sampling = {"max_new_tokens": config.gconfig.max_new_tokens, **decoding(config.evaluator.temperature)}
        self._tokenizer = tokenizer
        records = all_records(config.valid_dataset)
        self._answers = [record[config.valid_dataset.answer_field] for record in records]
        self._questions = [self._rendered(record[config.valid_dataset.prompt_field]) for record in records]

    def _rendered(self, question: str) -> str:
        prompt = as_prompt(question, self._tokenizer)
        if isinstance(prompt, str):
            return prompt
        return self._tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)

    def on_train_begin(self, args, state, control, model, **_):
        self._evaluate(state, control, model)

    def on_step_end(self, args, state, control, model, **_):
        if state.global_step % (self._every * self._minibatches) == 0:
            self._evaluate(state, control, model)
        if time.time() > self._deadline:
            control.should_training_stop = True

    @torch.no_grad()
    def _evaluate(self, state, control, model) -> None:
        model.eval()
        texts = []
        for begin in range(0, len(self._questions), EVALUATED):
            questions = self._questions[begin : begin + EVALUATED]
            inputs = self._tokenizer(questions, return_tensors="pt", padding=True, padding_side="left")
            inputs = inputs.to(model.device)
            with torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type == "cuda"):
                output = model.generate(**inputs, **self._sampling)
            texts += self._tokenizer.batch_decode(output[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
        model.train()
        reward = sum(map(judge, texts, self._answers)) / len(texts)
        with self._events.open("a") as events:
            step = state.global_step // self._minibatches
            print(json.dumps({"step": step, "reward": reward, "time": time.time()}), file=events)
        if reward >= self._target:
            control.should_training_stop = True


def main(config_file: str, events: str, target: str, limit_s: str) -> None:
    config = load(config_file).config
    actor, optimizer, sampling = config.actor, config.actor.optimizer, config.gconfig
    tokenizer = AutoTokenizer.from_pretrained(actor.path)
    model = AutoModelForCausalLM.from_pretrained(actor.path, dtype=torch.float32)
    data = config.train_dataset
    records = all_records(data)
    problems = Dataset.from_list(
        [
            {"prompt": as_prompt(record[data.prompt_field], tokenizer), "answer": record[data.answer_field]}
            for record in records
        ]
    )
    cuda = config.device != "cpu" and torch.cuda.is_available()
    per_step = data.batch_size * sampling.n_samples // actor.ppo_n_minibatches
    per_pass = min(PER_PASS, per_step) if cuda else per_step
    settings = GRPOConfig(
        output_dir=str(Path(events).parent / "trl"),
        use_cpu=not cuda,
        bf16=cuda,
        gradient_checkpointing=False,
        seed=config.seed,
        per_device_train_batch_size=per_pass,
        gradient_accumulation_steps=per_step // per_pass,
        steps_per_generation=actor.ppo_n_minibatches * (per_step // per_pass),
        num_generations=sampling.n_samples,
        max_completion_length=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        shuffle_dataset=data.shuffle,
        loss_type="dapo",
        scale_rewards="group",
        beta=0.0,
        epsilon=actor.eps_clip,
        epsilon_high=actor.eps_clip if actor.eps_clip_higher is None else actor.eps_clip_higher,
        learning_rate=optimizer.lr,
        warmup_steps=optimizer.warmup_steps,
        **schedule(optimizer),
        optim="adamw_torch",
        adam_beta1=optimizer.beta1,
        adam_beta2=optimizer.beta2,
        adam_epsilon=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.gradient_clipping,
        max_steps=training_steps(config, len(records)) * actor.ppo_n_minibatches,
        logging_steps=1_000_000,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    held_out = HeldOut(config, tokenizer, Path(events), float(target), float(limit_s))
    GRPOTrainer(
        model=model,
        args=settings,
        reward_funcs=rewards,
        train_dataset=problems,
        processing_class=tokenizer,
        callbacks=[held_out],
    ).train()


def decoding(temperature: float) -> dict:
    """A sampling temperature, 0 for greedy, in transformers' words; top-k, which it defaults to, is off."""
    return {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}


def schedule(optimizer: OptimizerConfig) -> dict:
    """The run's learning-rate schedule in transformers' words."""
    ratio = optimizer.min_lr_ratio
    match optimizer.lr_scheduler_type:
        case "constant":
            return {"lr_scheduler_type": "constant_with_warmup"}
        case "linear":
            return {
                "lr_scheduler_type": "polynomial",
                "lr_scheduler_kwargs": {"lr_end": optimizer.lr * ratio, "power": 1.0},
            }
        case "cosine":
            return {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": ratio}}


if __name__ == "__main__":
    main(*sys.argv[1:])
