"""A workflow with the response length given by the row, so that random weights suffice; used by async_speed."""

import asyncio
from dataclasses import replace


async def run(prompt, n, rollout):
    """One response of each of the row's `lengths`, in tokens; every other one has reward 1."""
    forced = replace(rollout, sampling=replace(rollout.sampling, ignore_eos=True, stop_token_ids=()))
    responses = await asyncio.gather(*(forced.sample(prompt.tokens, length) for length in prompt.row["lengths"][:n]))
    return [rollout.trajectory([prompt.tokens, it], float(place % 2)) for place, it in enumerate(responses)]
