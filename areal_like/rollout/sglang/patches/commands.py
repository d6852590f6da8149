"""A route for commands to the ranks of a server: SGLang 0.5.17 has routes for its own requests alone.

A command has a name, a text and, at the end of an update, the version of the weights. Patches have the commands.
"""

from __future__ import annotations

from typing import Any

from areal_like.rollout.sglang import COMMAND
from areal_like.rollout.sglang.patch import Command, Launch, Patch, all_patches


def add_route(launch: Launch) -> None:
    """Add the route of `Server.command`."""
    if not launch.generates:
        return
    from sglang.srt.entrypoints import http_server
    from sglang.srt.managers import tokenizer_control_mixin

    from areal_like.rollout.sglang.patches.inside import messages

    tokenizer_control_mixin._COMMUNICATOR_SPECS.append(("command", messages.RanksAnswer))

    @http_server.app.post(COMMAND)
    async def run(body: dict[str, Any]) -> dict[str, object]:
        manager = http_server._global_state.tokenizer_manager
        manager.auto_create_handle_loop()
        done = await _send(manager, messages.RanksCommand(**body))
        if done.success and body.get("weight_version") is not None:
            manager.initial_weights_loaded = True
            manager._update_weight_version_if_provided(body["weight_version"])
        return {"success": done.success, "message": done.message}


async def _send(manager: Any, command: Any) -> Any:
    """Send a command at once to a paused server, else after its present requests."""
    async with manager.is_pause_cond:
        if manager.is_pause:
            return (await manager.command_communicator(command))[0]
    async with manager.model_update_lock.writer_lock:
        return (await manager.command_communicator(command))[0]


def take_commands(launch: Launch) -> None:
    """Let a scheduler carry out commands."""
    if not launch.generates:
        return
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.utils import TypeBasedDispatcher

    from areal_like.rollout.sglang.patches.inside import messages

    dispatch = Scheduler.init_request_dispatcher

    def dispatch_commands(self: Any) -> None:
        def run(command: messages.RanksCommand) -> messages.RanksAnswer:
            worker = self.weight_updater
            done, told = run_command(worker.tp_worker.model_runner, command.name, command.text, worker.tp_cpu_group)
            if done:
                worker.flush_cache_after_weight_update(command)
            return messages.RanksAnswer(success=done, message=told)

        dispatch(self)
        self._request_dispatcher += TypeBasedDispatcher([(messages.RanksCommand, run)])

    Scheduler.init_request_dispatcher = dispatch_commands


def run_command(runner: Any, name: str, text: str, group: Any) -> tuple[bool, str]:
    """Carry out a command on this rank of a server (`group`)."""
    known: dict[str, Command] = {name: run for patch in all_patches() for name, run in patch.commands.items()}
    if name not in known:
        return False, f"the command {name} is unknown"
    return known[name](runner, text, group)


PATCH = Patch(serve=add_route, schedule=take_commands)
