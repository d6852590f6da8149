"""Delivers new weights to every rank of a server: all ranks have them, or the update failed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from areal_like.backends.sglang.loading import addresses, load
from areal_like.backends.sglang.local_copy import LocalCopy
from areal_like.backends.transports.collective.giving_up import is_marked, wait_for
from areal_like.backends.transports.ipc.handles import device_name, open_handle
from areal_like.core.transfer import EXPORT_LAYOUT, Chain, Layout

_FAILURES = (RuntimeError, LookupError, TypeError, ValueError, AssertionError, OSError)


def receive_exported(runner: Any, handles: Mapping[str, str], group: Any) -> tuple[bool, str]:
    """Load the bucket exported on its device on every rank of a server (`group`)."""
    return on_each(group, lambda: _load_exported(runner, handles))


def receive_broadcast(runner: Any, request: Any, group: Any) -> tuple[bool, str]:
    """Load all buckets of a broadcast on every rank of a server (`group`), receiving the next one meanwhile.

    One request of SGLang's `/update_weights_from_distributed` names them all: its `load_format` has how many of the
    tensors each bucket holds, as a JSON list.
    """
    return on_each(group, lambda: _load_buckets(runner, request))


def receive_checkpoint(read: Callable[[], Any], group: Any) -> tuple[bool, str]:
    """`read` a checkpoint on every rank of a server (`group`); SGLang's own answer is one rank's alone."""

    def work() -> None:
        answer = read()
        if not answer.success:
            raise RuntimeError(answer.message)

    return on_each(group, work)


def receive_files(runner: Any, request: str, group: Any) -> tuple[bool, str]:
    """Load the weights after the last of a chain of files on every rank of a server.

    The first update creates the server's copy of the weights, in a file that the request's token names. After a failure
    the next update begins with the full copy.
    """
    token, chain = Chain.from_json(request)

    def create() -> None:
        if runner.local_copy is None or not runner.local_copy.has_tensors(chain):
            runner.local_copy = LocalCopy(token, chain)

    def load_all() -> None:
        runner.local_copy.load(runner.model, _device(runner))
        torch.get_device_module(_device(runner)).synchronize()

    runner.local_copy = getattr(runner, "local_copy", None)
    for step in (create, lambda: runner.local_copy.open(), lambda: runner.local_copy.update(chain), load_all):
        done, told = on_each(group, step)
        if not done:
            if runner.local_copy is not None:
                runner.local_copy.unlink()
            runner.local_copy = None
            break
    return done, told


def on_each(group: Any, work: Callable[[], None]) -> tuple[bool, str]:
    """Do `work` on every rank of a server (`group`); return whether all have succeeded, and the failures."""
    problem = ""
    try:
        work()
    except _FAILURES as error:
        problem = f"failed to load: {type(error).__name__}: {error}"
    problems: list[Any] = [problem] * torch.distributed.get_world_size(group)
    if len(problems) > 1:  # asking oneself takes half a millisecond while requests wait
        torch.distributed.all_gather_object(problems, problem, group=group)
    told = [f"rank {rank} {problem}" for rank, problem in enumerate(problems) if problem]
    return not told, "; ".join(told) or "loaded"


def _load_exported(runner: Any, handles: Mapping[str, str]) -> None:
    device = _device(runner)
    name = device_name(device)
    if name not in handles:
        raise LookupError(f"no trainer rank exports its weights on {name}")
    load(runner.model, open_handle(handles[name], device), json.loads(handles[EXPORT_LAYOUT]), addresses(runner.model))
    torch.get_device_module(device).synchronize()  # the exporting rank may change its memory afterwards


def _load_buckets(runner: Any, request: Any) -> None:
    sender = runner.weight_updater._model_update_group[request.group_name]
    tensors = zip(request.names, request.dtypes, request.shapes, strict=True)
    layouts = [list(islice(tensors, count)) for count in json.loads(request.load_format)]
    device, wait = _device(runner), _waiting(sender, request.group_name)

    def begin(layout: Layout) -> tuple[Tensor, Any]:
        size = sum(torch.Size(shape).numel() * getattr(torch, dtype).itemsize for _, dtype, shape in layout)
        flat = torch.empty(size, dtype=torch.uint8, device=device)
        return flat, torch.distributed.broadcast(flat, src=0, group=sender, async_op=True)

    failure: BaseException | None = None
    coming, where = [begin(layouts[0])], addresses(runner.model)
    for layout, following in zip(layouts, [*layouts[1:], None], strict=True):
        flat, work = coming.pop()
        if following:
            coming.append(begin(following))
        wait(work)
        try:
            if failure is None:
                load(runner.model, flat, layout, where)
        except _FAILURES as error:  # the other ranks still receive, and would wait for this one
            failure = error
    torch.get_device_module(device).synchronize()  # who answers has them
    if failure:
        raise failure


def _waiting(sender: Any, name: str) -> Callable[[Any], None]:
    """Return the function that waits for a broadcast: over gloo until the controller gives the group up."""
    if torch.distributed.get_backend(sender) != "gloo":
        return lambda work: work.wait()
    return partial(wait_for, group=sender, is_given_up=partial(is_marked, name))


def _device(runner: Any) -> torch.device:
    return torch.device(runner.device, runner.gpu_id) if runner.device == "cuda" else torch.device("cpu")
