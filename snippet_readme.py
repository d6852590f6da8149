from areal_like import train


def score(response: str, row: dict) -> float:
    answer = row["answer"].rpartition("####")[2].strip()
    return float(response.rpartition("####")[2].strip() == answer)


print(train("examples/math/gsm8k_grpo_cpu.yaml", {"total_train_steps": 20}, reward=score))
