"""IPC handles: the server's rank reads weights from the memory of the trainer rank on the same device, without a copy.

A handle is JSON: CUDA's own handle (`cudaIpcGetMemHandle`, as torch 2.11 shares storages between processes), or
on CPU the name of a file that both map. Nothing is unpickled.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

import torch
from torch import Tensor


def device_name(device: torch.device) -> str:
    """Return a device's name that is the same in trainer and server, whichever GPUs each of them sees."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "cpu"


def export_handle(flat: Tensor, file: Path) -> str:
    """Return a handle of `flat`, `[bytes]`, which must live until every reader is done. `file` is used on CPU only."""
    if not flat.is_cuda:
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.from_file(str(file), shared=True, size=len(flat), dtype=torch.uint8).copy_(flat)
        return json.dumps({"file": str(file), "bytes": len(flat)})
    torch.cuda.synchronize(flat.device)  # so that readers need no event of this process
    _, *shared = flat.untyped_storage()._share_cuda_()
    words = [base64.b64encode(part).decode() if isinstance(part, bytes) else part for part in shared]
    return json.dumps({"cuda": words, "bytes": len(flat)})


def open_handle(handle: str, device: torch.device) -> Tensor:
    """Open the memory of a handle, `[bytes]`; it is released with its last reference."""
    terms = json.loads(handle)
    if "file" in terms:
        return torch.from_file(terms["file"], shared=True, size=terms["bytes"], dtype=torch.uint8)
    *parts, _ = [base64.b64decode(part) if isinstance(part, str) else part for part in terms["cuda"]]
    index = torch.cuda.current_device() if device.index is None else device.index
    storage = torch.UntypedStorage._new_shared_cuda(index, *parts, False)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (terms["bytes"],))
