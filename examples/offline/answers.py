"""Supervised fine-tuning on the answers of a dataset. Rows have an `answer`; no training responses are generated."""


async def run(prompt, n, rollout):
    response = rollout.tokenizer.encode_response(prompt.row["answer"])
    return [rollout.wrap_response(prompt.tokens, response, 1.0)]
