"""The ranks of a layout: d times c ranks with tokens of their own, and for each of them t ranks that split matrices.

Neighbouring ranks share tokens first, then sequences.
"""

from dataclasses import dataclass, replace
from datetime import timedelta

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import PreTrainedModel

from allocation.plan import ParallelSizes
from areal_like.backends.fsdp import ulysses
from areal_like.backends.fsdp.tensor_parallel import finish_gradients
from areal_like.core.trainer.packing import MicroBatch

DATA, TENSOR = "data", "tensor"


@dataclass(frozen=True)
class Grid:
    """This rank's place among all ranks, and its groups.

    `data` are the ranks with the same parts of all matrices, `everyone` are all ranks; both shard parameters. `tensor`
    are the ranks that split matrices, None where no rank does. Of the ranks that share each sequence (`sequences`),
    `context` have different tokens of it (`fsdp/ulysses.py`); each of these groups is None where it is one rank.
    """

    sizes: ParallelSizes
    everyone: DeviceMesh
    data: DeviceMesh
    tensor: DeviceMesh | None
    context: dist.ProcessGroup | None
    sequences: dist.ProcessGroup | None

    @property
    def dp_rank(self) -> int:
        return dist.get_rank() // (self.sizes.cp * self.sizes.tp)

    def part(self, pack: MicroBatch) -> MicroBatch:
        """Return this rank's part of a pack: some of its tokens, and every t-th prediction of those."""
        cp_rank, tp_rank = divmod(dist.get_rank() % (self.sizes.cp * self.sizes.tp), self.sizes.tp)
        own = ulysses.part(pack, self.sizes.cp, cp_rank)
        shared = slice(tp_rank, None, self.sizes.tp)
        return replace(own, rows=own.rows[shared], targets=own.targets[shared])

    def sum_over_sequences(self, tensor: Tensor) -> Tensor:
        """Return the sum over the ranks that share each sequence, with gradient; every one of them has to call it."""
        return ulysses.sum_over(self.sequences, tensor)

    def finish_gradients(self, model: PreTrainedModel) -> None:
        """Make the gradients of shared parameters equal on all ranks that split matrices."""
        if self.tensor is not None:
            finish_gradients(model, self.tensor)


def make_grid(sizes: ParallelSizes, device_type: str, timeout_s: float) -> Grid:
    """Return this rank's grid. Every rank has to call it."""
    ranks = np.arange(sizes.dp * sizes.cp * sizes.tp).reshape(sizes.dp, sizes.cp, sizes.tp)
    everyone = init_device_mesh(device_type, (ranks.size,))
    data, tensor, context = everyone, None, None
    if sizes.tp > 1:  # before other groups: torch caches a mesh by the names of its groups
        rows = ranks.reshape(-1, sizes.tp)
        groups = [_make_group(rows.T, timeout_s), _make_group(rows, timeout_s)]
        mesh = DeviceMesh.from_group(groups, device_type, mesh=rows.tolist(), mesh_dim_names=(DATA, TENSOR))
        data, tensor = mesh[DATA], mesh[TENSOR]
    if sizes.cp > 1:
        context = _make_group(ranks.transpose(0, 2, 1).reshape(-1, sizes.cp), timeout_s)
    shared = sizes.cp * sizes.tp > 1
    sequences = _make_group(ranks.reshape(sizes.dp, -1), timeout_s) if shared else None
    return Grid(sizes, everyone, data, tensor, context, sequences)


def _make_group(rows: NDArray[np.int64], timeout_s: float) -> dist.ProcessGroup:
    """Return the group of the row that this rank is in."""
    group, _ = dist.new_subgroups_by_enumeration(rows.tolist(), timeout=timedelta(seconds=timeout_s))
    return group
