"""Many pieces of work are spread over turns of the event loop, in order, and who is cancelled takes no turn."""

from __future__ import annotations

import asyncio

from areal_like.core.rollout.turns import Turns


def test_pieces_are_spread_in_order_and_cancelled_ones_take_no_turn():
    done: list[tuple[int, int]] = []
    turn = 0

    async def run() -> None:
        nonlocal turn
        turns = Turns(3)

        async def piece(number: int) -> None:
            await turns()
            done.append((turn, number))

        async def count() -> None:
            nonlocal turn
            while True:
                turn += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        pieces = [asyncio.create_task(piece(number)) for number in range(20)]
        await asyncio.sleep(0)
        pieces[5].cancel()
        await asyncio.gather(*pieces, return_exceptions=True)
        await asyncio.sleep(0.01)  # nothing of it goes on
        later = turn
        await piece(20)
        assert turn == later, "who comes alone does not wait"
        counting.cancel()

    asyncio.run(run())
    assert [number for _, number in done] == [number for number in range(21) if number != 5]
    assert max([at for at, _ in done].count(some) for some in range(turn + 1)) == 3
