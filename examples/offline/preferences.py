"""DPO on a dataset of preferences. Rows have `prompt`, `chosen` and `rejected`; no training responses are generated."""


async def run(prompt, n, rollout):
    tokenizer, row = rollout.tokenizer, prompt.row
    better, worse = (tokenizer.encode_response(row[name]) for name in ("chosen", "rejected"))
    return [rollout.wrap_response(prompt.tokens, better, 1.0), rollout.wrap_response(prompt.tokens, worse, 0.0)]
