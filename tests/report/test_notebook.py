"""A report as the last value of a notebook's cell, in a notebook that is executed.

It needs nbformat, nbclient and ipykernel, which `make test` does not install: pip install nbclient ipykernel.
"""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

COMPILE = """
import torch, slime_compile

def loss_fn(logits, target):
    return -torch.log_softmax(logits, -1).gather(-1, target[:, None]).mean()

logits, target = torch.randn(32, 2048, requires_grad=True), torch.zeros(32, dtype=torch.int64)
torch.compile(loss_fn, backend="slime_fused", options={"inner": "aot_eager"})(logits, target).backward()
"""


@pytest.mark.filterwarnings("default")  # of the notebook's packages
def test_an_executed_notebook_shows_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed: no notebook")
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed: no notebook")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed: no notebook")
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=":")
    cells = [COMPILE, "slime_compile.reports()[-1]", "slime_compile.summary()"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    for cell in notebook.cells[1:]:
        (output,) = cell.outputs
        page = output.data["text/html"]
        assert page.startswith('<div class="slime-report">')
        assert "loss_fn (In [1]), training, 2 fused operators" in page
        assert "<td>log-prob</td>" in page
        assert output.data["text/plain"].startswith("<Report: slime_fused: 2 fused operators")
