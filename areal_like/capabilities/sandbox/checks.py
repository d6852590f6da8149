"""Checks of sandboxes: the backend is there, and a sandbox of it runs a command."""

import asyncio
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from allocation.diagnostics import Finding
from areal_like.capabilities.agents.settings import episode_of
from areal_like.capabilities.agents.takers import check_takers
from areal_like.capabilities.sandbox.backends import SHIPPED, Recipe, probe
from areal_like.capabilities.sandbox.bubblewrap import PROGRAM
from areal_like.capabilities.sandbox.parameter import NAME
from areal_like.capabilities.sandbox.protocol import SandboxError
from areal_like.capabilities.sandbox.schema import CONTAINER_TOOLS, SandboxConfig, SandboxKeys
from areal_like.core.config.findings import finding
from areal_like.core.config.keys import with_keys
from areal_like.core.user_code import UserCodeError
from areal_like.known import Known

_KEY, _BACKEND = "episode.sandbox", "episode.sandbox.backend"


def check_sandbox(known: Known) -> Iterator[Finding]:
    """Check that workflows get the sandboxes that they ask for; start one, except in a dry run."""
    settings = with_keys(episode_of(known.config), SandboxKeys).sandbox
    if not known.config.workflows:
        return
    fix = f"set {_KEY}={{}} for bubblewrap"
    yield from check_takers(known.config, NAME, _KEY, fix, code="RUN-SANDBOX", is_set=settings is not None)
    if settings is not None:
        yield from _backend(settings, dry_run=known.dry_run)


def _backend(settings: SandboxConfig, *, dry_run: bool) -> Iterator[Finding]:
    name = settings.backend
    try:
        recipe = Recipe.pack(settings)
        if recipe.own is not None:
            recipe.own.load()
    except UserCodeError as error:
        yield _not_a_backend(name, error)
        return
    if name in CONTAINER_TOOLS and settings.image is None:
        help = f"name an image that `{name} images` lists"
        yield finding("RUN-SANDBOX", "episode.sandbox.image", f"{name} needs an image, and none is set", help)
        return
    program = PROGRAM if name == "bubblewrap" else name
    if dry_run:
        return
    if recipe.own is None and shutil.which(program) is None:
        others = [other for other in SHIPPED if shutil.which(PROGRAM if other == "bubblewrap" else other)]
        instead = f", or set {_BACKEND}={others[0]}" if others else ""
        help = f"install it, for example with `apt-get install {name}`{instead}"
        yield finding("RUN-SANDBOX", _BACKEND, f"{name} ({program}) is not installed on this host", help)
        return
    yield from _start(recipe)


def _start(recipe: Recipe) -> Iterator[Finding]:
    name = recipe.settings.backend
    try:
        with ThreadPoolExecutor(1) as thread:  # the caller may have an event loop
            thread.submit(asyncio.run, probe(recipe)).result()
    except UserCodeError as error:
        yield _not_a_backend(name, error)
    except SandboxError as error:
        help = "correct this, or set another backend"
        if "namespace" in str(error) or "permitted" in str(error):
            help = "allow user namespaces (as root in a container: the capability SYS_ADMIN), or set another backend"
        yield finding("RUN-SANDBOX", _BACKEND, f"{name} cannot start a sandbox: {error}", help)


def _not_a_backend(name: str, error: UserCodeError) -> Finding:
    help = f"choose one of {', '.join(SHIPPED)}, or name a class of yours (docs/workflows.md)"
    return finding("RUN-SANDBOX", _BACKEND, f"{name} cannot be used: {error}", help)
