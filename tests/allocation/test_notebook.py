"""The GPU-count calculator: its fields live, and its notebook, whose saved answers are those of this code.

`python -m tests.allocation.test_notebook` runs the notebook and saves the answers in it.
"""

import re
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

nbformat = pytest.importorskip("nbformat")
jupyter_client = pytest.importorskip("jupyter_client")
nbclient = pytest.importorskip("nbclient")
run_sync = pytest.importorskip("jupyter_core.utils").run_sync
calculators = pytest.importorskip("allocation.views.calculator")

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "docs" / "notebooks" / "gpu_count_calculator.ipynb"


def executed():
    """The notebook, run from the repository's root by the Python that runs this; its kernel opens no port."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    place = {"metadata": {"path": str(ROOT)}}
    with TemporaryDirectory() as sockets:  # they would stay in the working directory
        kernel = jupyter_client.AsyncKernelManager(kernel_name="python3", transport="ipc", ip=f"{sockets}/ipc")
        client = nbclient.NotebookClient(notebook, km=kernel, timeout=900, record_timing=False, resources=place)
        try:
            return client.execute()
        finally:
            run_sync(kernel.shutdown_kernel)(now=True)  # the client ends only kernels that it started itself


def answers(notebook):
    """What readers without a kernel see of every cell. Ids of widgets are new in each run and stay out."""
    seen = []
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            seen.append(output.get("text") or data.get("text/html") or data.get("text/plain"))
    return seen


@pytest.fixture(scope="module")
def fresh():
    return executed()


def test_notebook_runs_and_its_saved_answers_are_current(fresh):
    saved = answers(nbformat.read(NOTEBOOK, as_version=4))
    assert len(saved) >= 5
    assert saved == answers(fresh), "run `python -m tests.allocation.test_notebook`"


def test_kernel_leaves_no_socket(fresh):
    assert [path for path in ROOT.iterdir() if path.is_socket()] == []


def test_saved_answers_tell_nothing_of_the_machine():
    text = NOTEBOOK.read_text()
    assert not re.search(r"(/(home|root|work|tmp|usr)/|site-packages|[A-Z]:\\\\)", text)
    assert "Traceback" not in text


def test_saved_calculator_has_a_picture_and_widgets_for_pages_that_show_them():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    data = notebook.cells[1].outputs[0].data
    assert "32 GPUs of 32" in data["text/html"] and "<svg" in data["text/html"]
    state = notebook.metadata.widgets["application/vnd.jupyter.widget-state+json"]["state"]
    assert data["application/vnd.jupyter.widget-view+json"]["model_id"] in state


def test_fields_are_live():
    calculator = calculators.Calculator("megatron:d2")
    assert "2 GPUs" in calculator.html
    calculator.allocation.value = "megatron:d2t4"
    assert "8 GPUs" in calculator.html
    calculator.cluster.value = "1x4"
    assert "not valid: 1 error" in calculator.html and "ALLOC-" in calculator.html
    calculator.cluster.value = "2x8"
    assert "8 GPUs of 16" in calculator.html
    calculator.model.value = "qwen2.5-0.5b"
    assert "14 attention heads" in calculator.html or "ALLOC-HEADS" in calculator.html
    calculator.cluster.value = "many"
    assert "NODESxGPUS" in calculator.html


@pytest.mark.parametrize("text", ["", "<script>alert(1)</script>", "megatron:d2|", "d4", "megatron:d" + "9" * 18])
def test_whatever_is_typed_gets_an_answer(text):
    shown = calculators.panel(text, cluster="2x8")
    assert "not valid" in shown
    assert "<script" not in shown


def test_sizes_beyond_any_cluster():
    assert "1,000,000,000 GPUs" in calculators.panel("megatron:d1000000000")


if __name__ == "__main__":
    nbformat.write(executed(), NOTEBOOK)
