"""An agent of two turns, whose reward is high for what the answers of its row are to have: digits, or none."""

from typing import Any


async def run(row: dict[str, Any], client: Any) -> float:
    """Ask twice; return the share of the wanted characters in both answers."""
    messages = [{"role": "user", "content": row["question"]}]
    said = ""
    for _ in range(2):
        completion = await client.chat.completions.create(model="policy", messages=messages, max_tokens=6)
        answer = completion.choices[0].message
        messages += [answer, {"role": "user", "content": row["question"]}]
        said += answer.content
    digits = sum(character.isdigit() for character in said) / max(1, len(said))
    return digits if row["wanted"] == "digits" else 1 - digits
