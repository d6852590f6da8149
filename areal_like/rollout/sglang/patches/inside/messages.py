"""A command as SGLang's HTTP process sends it to its schedulers, and their answer."""

from sglang.srt.managers import io_struct


class RanksCommand(io_struct.BaseReq):
    """A command by name with its text; the last of an update brings the `weight_version`."""

    name: str
    text: str = ""
    weight_version: str | None = None
    flush_cache: bool = False
    torch_empty_cache: bool = False


class RanksAnswer(io_struct.BaseReq):
    """Whether all ranks have carried out a command."""

    success: bool
    message: str


io_struct.hook_custom_types(RanksCommand, RanksAnswer)
