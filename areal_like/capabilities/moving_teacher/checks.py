"""Checks of a teacher that follows the policy: it has the policy's shape, and the role that it follows moves."""

from collections.abc import Iterator

from allocation.diagnostics import Finding
from areal_like.capabilities.moving_teacher.schema import MovingKeys
from areal_like.core.config.findings import finding
from areal_like.core.config.keys import with_keys
from areal_like.core.config.schema import RunConfig
from areal_like.known import Known
from areal_like.preflight.model import find_spec


def uses_reference(config: RunConfig) -> bool:
    """Return whether the teacher takes the weights of the reference."""
    return config.teacher is not None and with_keys(config.teacher, MovingKeys).follows == "ref"


def check_moving_teacher(known: Known) -> Iterator[Finding]:
    """Check the shape of the teacher, and the reference if it follows that."""
    config, teacher = known.config, known.config.teacher
    if teacher is None or with_keys(teacher, MovingKeys).update_every_steps is None:
        return
    if uses_reference(config) and (config.ref is None or config.ref.update_every_steps is None):
        message = "the teacher follows the reference, and the run has no reference that moves"
        help = "write ref={update_every_steps: 1, ema_decay: 0.9}, or teacher.follows=actor"
        yield finding("RUN-TEACHER-MOVES", "teacher.follows", message, help)
    if teacher.path is None or not teacher.is_served:
        return
    spec, _ = find_spec(teacher.path, "teacher.path")  # its findings are the teacher's own
    known_specs = [each for each in (spec, known.model) if each is not None]
    shapes = [(each.layers, each.hidden_size, each.vocab_size) for each in known_specs]
    if len(set(shapes)) > 1:
        message = "a teacher that takes the policy's weights must have its shape; layers, hidden size and vocabulary "
        message += f"are {' and '.join(map(str, shapes))}"
        help = "set teacher.path to the value of actor.path, or teacher.update_every_steps=null"
        yield finding("RUN-TEACHER-MOVES", "teacher.update_every_steps", message, help)
