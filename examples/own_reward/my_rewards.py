"""Custom rewards for the arithmetic problems, outside the package. This command starts a run with one of them:

    python examples/math/gsm8k_rl.py --config examples/math/gsm8k_grpo_cpu.yaml \
        reward.function=examples/own_reward/my_rewards.py:score
"""


def score(response: str, row: dict) -> float:
    return float(response.strip() == row["answer"])


def close(response: str, row: dict) -> dict[str, float]:
    """Return partial credit; `off` is only recorded, as `reward_parts/off`."""
    digits = "".join(filter(str.isdigit, response))
    off = abs(int(digits[:6] or 999) - int(row["answer"].removeprefix("#### ")))
    return {"reward": 1 / (1 + off), "off": off}


def shortest(responses: list[str], row: dict) -> list[float]:
    """Compare the responses to a prompt: right ones gain by being shorter than the longest right one."""
    right = [response.strip() == row["answer"] for response in responses]
    longest = max((len(response) for response, good in zip(responses, right, strict=True) if good), default=0)
    return [good * (longest - len(response)) / (longest or 1) for response, good in zip(responses, right, strict=True)]
