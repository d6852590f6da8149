"""Delivers new weights to every rank of a server: all ranks have them, or the update failed."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from areal_like.backends.sglang.loading import addresses, load, views
from areal_like.backends.transports.collective.giving_up import is_marked, wait_for
from areal_like.backends.transports.deltas.files import check, read_delta, read_full, read_layout
from areal_like.backends.transports.ipc.handles import device_name, open_handle
from areal_like.core.transfer import EXPORT_LAYOUT, Chain, Layout, WeightFile, locate

# A server's own copy of the weights under their Hugging Face names, to which deltas are applied.
#
# The ranks of a server on one host map the same file of the temporary directory. Its name is removed once all have
# mapped it, so that it ends with them.

AT_ONCE = 1 << 28  # bytes that go to the device together


class LocalCopy:
    """The weights in the state `held` of a chain of files."""

    def __init__(self, token: str, chain: Chain) -> None:
        """Create the file that `token` names, unless another rank of the host has."""
        self.layout: Layout = _read_layout(chain.full)
        self.held: str | None = None
        self._path = Path(tempfile.gettempdir(), f"weights-{token}")
        self._bytes = sum(torch.Size(shape).numel() * getattr(torch, dtype).itemsize for _, dtype, shape in self.layout)
        self._flat: Tensor | None = None
        self._owns = self._create()

    def open(self) -> None:
        """Map the file, which a rank of this host has created."""
        if self._flat is None:
            self._flat = torch.from_file(str(self._path), shared=True, size=self._bytes, dtype=torch.uint8)

    def unlink(self) -> None:
        """Remove the file's name, once all ranks of the host have mapped it or will not."""
        self._path.unlink(missing_ok=True)

    def update(self, chain: Chain) -> None:
        """Apply the files after `held`, or all of them; the ranks that did not create the file only note it."""
        self.unlink()
        if self._owns:
            for file in chain.files_after(self.held):
                self._apply(file, is_full=file == chain.full)
        self.held = chain.state

    def has_tensors(self, chain: Chain) -> bool:
        """Return whether the files have the tensors of this copy."""
        return chain.continues(self.held) or _read_layout(chain.full) == self.layout

    def load(self, model: Any, device: torch.device) -> None:
        """Load all tensors into an SGLang model."""
        where = addresses(model)
        flat = self._get_flat()
        for start, end, layout in self._buckets():
            load(model, flat[start:end].to(device), layout, where)

    def _get_flat(self) -> Tensor:
        if self._flat is None:
            raise RuntimeError("the local copy of the weights is used before it is mapped")
        return self._flat

    def _create(self) -> bool:
        try:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return False
        try:
            os.posix_fallocate(file, 0, self._bytes)  # a full disk is noticed here, not by a signal at a write
        finally:
            os.close(file)
        return True

    def _apply(self, file: WeightFile, *, is_full: bool) -> None:
        path = locate(file.path)
        check(path, file.sha256)
        (read_full if is_full else read_delta)(path, dict(views(self._get_flat(), self.layout)))

    def _buckets(self) -> Iterator[tuple[int, int, Layout]]:
        start, end = 0, 0
        layout: list[tuple[str, str, Sequence[int]]] = []
        for name, dtype, shape in self.layout:
            size = torch.Size(shape).numel() * getattr(torch, dtype).itemsize
            if layout and end + size - start > AT_ONCE:
                yield start, end, layout
                start, layout = end, []
            end += size
            layout.append((name, dtype, shape))
        if layout:
            yield start, end, layout


def _read_layout(full: WeightFile) -> Layout:
    """Return which tensors a full copy has, after a check of its checksum."""
    check(locate(full.path), full.sha256)
    return read_layout(locate(full.path))


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
