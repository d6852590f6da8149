"""A user's reward function: its signature and return values. Runs in the workers of a `RewardPool`.

`score(response: str, row: dict) -> float` judges one response. `score_group(responses: list[str], row: dict) ->
list[float]` judges all responses to a prompt, and may compare them. The name of the first parameter decides which of
the two a function is. Either may be `async`, and may return a dict instead of a float: its key `reward` is the reward,
and its other values are recorded with it.
"""

import asyncio
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from areal_like.core.types import Reward
from areal_like.core.user_code import Portable, UserCodeError, where_it_failed

ONE, GROUP = "response", "responses"  # names of the first parameter
VALUE = "reward"  # key of a dict with named parts
MOST = 3.4e38  # larger rewards would overflow in float32, the type used in training


@functools.cache
def compares_group(portable: Portable) -> bool:
    """Return whether a function takes all responses to a prompt; raise UserCodeError if it is not a reward."""
    function, name = portable.load(), portable.reference
    if not callable(function):
        raise UserCodeError(f"{name} is {_show(function)}, not a function")
    try:
        parameters = inspect.signature(function)
        parameters.bind("", {})
    except (TypeError, ValueError) as error:
        raise UserCodeError(f"{name} cannot be called as score(response, row): {error}") from error
    first = next(iter(parameters.parameters), "")
    if first not in (ONE, GROUP):
        names = f"{ONE} (one at a time) or {GROUP} (all of a prompt)"
        raise UserCodeError(f"{name}{parameters} cannot be called: name its first parameter {names}")
    return first == GROUP


def group_test(portable: Portable) -> Callable[[], bool]:
    """Return, in a worker, a test of whether a reward function compares responses."""
    compares = compares_group(portable)
    return lambda: compares


@functools.cache
def judge(portable: Portable) -> Callable[[Sequence[str], Mapping[str, Any]], list[Reward]]:
    """Return, in a worker, the function that judges the responses to one row: all of them, or one.

    The returned function raises UserCodeError if the user's function fails or returns an invalid value.
    """
    function, compares, name = portable.load(), compares_group(portable), portable.reference

    def judge(responses: Sequence[str], row: Mapping[str, Any]) -> list[Reward]:
        given = _call(function, name, list(responses) if compares else responses[0], dict(row))
        values = _as_list(given, len(responses), name) if compares else [given]
        return [as_reward(value, name) for value in values]

    return judge


def _call(function: Callable[..., Any], name: str, *arguments: Any) -> Any:
    try:
        given = function(*arguments)
        return _loop().run(given) if inspect.iscoroutine(given) else given
    except BaseException as error:  # a user's function may raise anything
        code = getattr(inspect.unwrap(function), "__code__", None)
        reason = where_it_failed(error, code.co_filename) if code else f"{type(error).__name__}: {error}"
        raise UserCodeError(f"{name}, {_one_line(reason, 500)}") from error


@functools.cache
def _loop() -> asyncio.Runner:
    """Return one event loop for all calls, so that an asynchronous client can be kept between them."""
    return asyncio.Runner()


def _as_list(given: Any, count: int, name: str) -> list[Any]:
    if isinstance(given, str | Mapping) or not hasattr(given, "__iter__"):
        raise UserCodeError(f"{name} returned {_show(given)}, not a list of {count} numbers")
    values = list(given)
    if len(values) != count:
        raise UserCodeError(f"{name} returned {len(values)} values for {count} responses")
    return values


def as_reward(given: Any, name: str) -> Reward:
    """Convert the return value of `name`, a finite number or a dict of them; raise UserCodeError otherwise."""
    if not isinstance(given, Mapping):
        return Reward(_number(given, name, "a number, or a dict of numbers"))
    if VALUE not in given:
        keys = ", ".join(map(str, given)) or "nothing"
        raise UserCodeError(f"{name} returned a dict without the key {VALUE!r}; it has {keys}")
    numbers = {str(key): _number(value, name, f"a number under {key!r}") for key, value in given.items()}
    return Reward(numbers.pop(VALUE), numbers)


def _number(given: Any, name: str, wanted: str) -> float:
    """Convert a number of Python, numpy or torch; it must be finite."""
    try:
        number = math.nan if isinstance(given, str | bytes) else float(given)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= MOST:  # rejects NaN, too
        raise UserCodeError(f"{name} returned {_show(given)}, not {wanted}")
    return number


def _show(value: Any) -> str:
    return _one_line(repr(value), 60)


def _one_line(text: str, most: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[:most]}..."
