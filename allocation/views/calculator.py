"""The GPU-count calculator for notebooks: type an allocation, see GPUs, sizes, rank maps and findings.

It needs ipywidgets, which no other module of this package uses.
"""

from html import escape
from typing import Any

try:
    import ipywidgets
except ImportError as error:
    raise ImportError(
        "The calculator needs ipywidgets, which is not installed. Run `requirements/install dev`, or `pip install ipywidgets`."
    ) from error

from allocation.compiler import Result, check
from allocation.diagnostics import Severity, render
from allocation.model_spec import known_models
from allocation.plan import Cluster
from allocation.views.words import count

STYLES = {Severity.ERROR: "#c62828", Severity.WARNING: "#b26a00", Severity.NOTE: "#5f6b7a"}


def panel(text: str, *, model: str = "", cluster: str = "") -> str:
    """Return the calculator's output as HTML: number of GPUs, findings, then the plan. Empty `model`, `cluster`:
    unknown.

    User input never raises: an unreadable cluster is shown like a finding.
    """
    try:
        known = Cluster.parse(cluster) if cluster.strip() else None
    except ValueError as error:
        return _note(str(error), Severity.ERROR)
    result = check(text, model=model.strip() or None, cluster=known)
    findings = "".join(_note(render(finding), finding.severity) for finding in result.findings)
    return _verdict(result, known) + findings + (result.plan._repr_html_() if result.plan else "")


def _verdict(result: Result, cluster: Cluster | None) -> str:
    if result.plan is None:
        words = f"not valid: {count(sum(f.severity is Severity.ERROR for f in result.findings), 'error')}"
    else:
        words = count(result.plan.n_gpus, "GPU") + (f" of {cluster.n_gpus:,}" if cluster else "")
    return f'<div style="font-size:1.5em;font-weight:bold;margin:0.3em 0">{words}</div>'


def _note(text: str, severity: Severity) -> str:
    style = f"border-left:4px solid {STYLES[severity]};padding:0.2em 0.6em;margin:0.4em 0;white-space:pre-wrap"
    return f'<pre style="{style}">{escape(text)}</pre>'


class Calculator:
    """Three fields and their live results. `allocation`, `model` and `cluster` are ipywidgets fields.

    Without widgets, the last state is shown: the output for a notebook includes HTML.
    """

    def __init__(self, text: str = "megatron:d4", *, model: str = "", cluster: str = "") -> None:
        wide = {"layout": ipywidgets.Layout(width="95%"), "style": {"description_width": "6em"}}
        self.allocation = ipywidgets.Text(text, description="allocation", **wide)
        # A model's name may be looked up on the hub, so it is taken when it is complete, not at every letter.
        self.model = ipywidgets.Combobox(
            value=model, options=tuple(known_models()), description="model", continuous_update=False,
            placeholder="a name or a config.json; empty: unknown", **wide,
        )  # fmt: skip
        hint = "4x8 is four nodes with eight GPUs; empty: unknown"
        self.cluster = ipywidgets.Text(cluster, description="cluster", placeholder=hint, **wide)
        self._view = ipywidgets.HTML()
        self.widget = ipywidgets.VBox([self.allocation, self.model, self.cluster, self._view])
        for field in (self.allocation, self.model, self.cluster):
            field.observe(self._update, names="value")
        self._update()

    @property
    def html(self) -> str:
        """The HTML below the fields."""
        shown: str = self._view.value
        return shown

    def _update(self, _: object = None) -> None:
        self._view.value = panel(self.allocation.value, model=self.model.value, cluster=self.cluster.value)

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        bundle: dict[str, Any] = self.widget._repr_mimebundle_(**options)
        fields = " ".join(f"<code>{escape(f.value)}</code>" for f in (self.allocation, self.model, self.cluster))
        return bundle | {"text/html": f"<div>{fields}</div>{self.html}", "text/plain": f"Calculator: {fields}"}
