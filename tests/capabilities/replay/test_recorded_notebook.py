"""The notebook about recorded runs: its saved answers are those of this code.

`python -m tests.capabilities.replay.test_recorded_notebook` runs the notebook and saves the answers in it.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

nbformat = pytest.importorskip("nbformat")
jupyter_client = pytest.importorskip("jupyter_client")
nbclient = pytest.importorskip("nbclient")
run_sync = pytest.importorskip("jupyter_core.utils").run_sync

NOTEBOOK = Path(__file__).parents[3] / "docs/notebooks/recorded_run.ipynb"


def executed():
    """The notebook, run in its folder by the Python that runs this; its kernel opens no port."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    place = {"metadata": {"path": str(NOTEBOOK.parent)}}
    with TemporaryDirectory() as sockets:
        kernel = jupyter_client.AsyncKernelManager(kernel_name="python3", transport="ipc", ip=f"{sockets}/ipc")
        client = nbclient.NotebookClient(notebook, km=kernel, timeout=600, record_timing=False, resources=place)
        try:
            return client.execute()
        finally:
            run_sync(kernel.shutdown_kernel)(now=True)  # the client ends only kernels that it started itself


def answers(notebook):
    return [output.data["text/plain"] for cell in notebook.cells for output in cell.get("outputs", ())]


def test_the_notebook_runs_and_its_saved_answers_are_current(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOK.parents[2]))
    saved = answers(nbformat.read(NOTEBOOK, as_version=4))
    assert len(saved) == 6
    assert saved == answers(executed())


if __name__ == "__main__":
    nbformat.write(executed(), NOTEBOOK)
