"""Supervised fine-tuning on a dataset's answers: rows with an `answer`; nothing is generated to train on."""


async def run(prompt, n, rollout):
    response = rollout.tokenizer.encode_response(prompt.row["answer"])
    return [rollout.given(prompt.tokens, response, 1.0)]
