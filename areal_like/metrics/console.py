"""The console: the current phase of a run, and one row per step."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from allocation.diagnostics import Finding, render

COLUMNS = {  # of the table of steps: the statistic or metric in each, if it is one, and its format
    "step": ("", "{:>5.0f}"),
    "reward": ("reward", "{:>7.3f}"),
    "eval": ("", "{:>8.3f}"),
    "loss": ("loss", "{:>9.3g}"),
    "kl": ("kl", "{:>9.3g}"),
    "entropy": ("entropy", "{:>8.3f}"),
    "clip": ("clip_share", "{:>6.3f}"),
    "stale": ("staleness_mean", "{:>6.2f}"),
    "lp-diff": ("logprob_diff", "{:>8.1e}"),
    "srv-idle": ("idle/servers", "{:>8.0%}"),
    "trn-idle": ("idle/trainer", "{:>8.0%}"),
    "tok/s": ("throughput/rollout_tokens_per_second", "{:>7.0f}"),
    "s": ("seconds/step", "{:>6.2f}"),
}
REPEAT_HEADER = 25
LEGEND = """\
Each row is a step: mean reward of its samples, mean reward of the evaluation prompts, loss, KL to the policy that
sampled, entropy, share of clipped tokens, staleness in versions, difference between the log-probs of servers and
trainer, idle shares of servers and trainer, tokens that servers generated per second of the step, seconds."""


class _Terminal(Console):
    """A console that ignores a closed output, so that a run continues, and ends, without its reader."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), self.file.fileno())  # for other writers, and at exit


def printable(text: str) -> str:
    """Return a text with escapes in place of characters that move, colour or hide text on a terminal.

    Messages quote users' exceptions and models' output.
    """
    return text if text.isprintable() else "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def complain(what: Iterable[Finding | str]) -> None:
    """Print problems to standard error, a paragraph for each."""
    text = "\n\n".join(item if isinstance(item, str) else render(item) for item in what)
    if text:
        _Terminal(stderr=True).print(printable(text), markup=False, highlight=False, soft_wrap=True)


class View:
    """Live progress at the bottom of a terminal with a table of steps above it; plain lines when piped."""

    def __init__(self, enabled: bool) -> None:
        self.console = _Terminal(quiet=not enabled, highlight=False)
        self._rows = 0
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
            disable=not (enabled and self.console.is_terminal),
        )

    @contextmanager
    def live(self) -> Iterator[None]:
        """Show progress while the body runs."""
        with self._progress:
            yield

    def say(self, text: str) -> None:
        """Print one line."""
        self.console.print(printable(text), soft_wrap=True, markup=False)

    @contextmanager
    def doing(self, what: str, total: int | None = None) -> Iterator[Callable[[], None]]:
        """Show `what` as current while the body runs; each call of the yielded function advances the bar by one."""
        task = self._progress.add_task(what, total=total)
        try:
            yield lambda: self._progress.advance(task)
        finally:
            self._progress.remove_task(task)

    def row(self, values: Mapping[str, float]) -> None:
        """Print one step; missing values stay blank."""
        if not self._rows:
            self.say(LEGEND)
        if self._rows % REPEAT_HEADER == 0:
            header = (f"{name:>{len(form.format(0))}}" for name, (_, form) in COLUMNS.items())
            self.console.print(" ".join(header), style="bold", soft_wrap=True)
        cells = (
            form.format(values[name]) if name in values else " " * len(form.format(0))
            for name, (_, form) in COLUMNS.items()
        )
        self.console.print(" ".join(cells), soft_wrap=True)
        self._rows += 1
