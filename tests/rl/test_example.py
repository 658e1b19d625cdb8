"""The example runs, and shows what it says."""

import re
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import slime_compile

pytest.importorskip("matplotlib")

EXAMPLE = Path(__file__).parents[2] / "examples" / "packed_ppo_step.py"


@pytest.fixture
def main() -> Iterator[Callable[..., Any]]:
    threads = torch.get_num_threads()
    torch._dynamo.reset()
    yield runpy.run_path(str(EXAMPLE))["main"]
    torch.set_num_threads(threads)


def test_packed_ppo_step(main: Callable[..., Any], tmp_path: Path) -> None:
    picture = tmp_path / "curves.png"
    # 4 steps: one more than a batch has, as peaks are measured from the second batch on
    curves = main(["--steps", "4", "--inner", "aot_eager", "--plot", str(picture)])
    eager, fused = curves["eager"], curves["slime_fused"]
    assert len(eager.loss) == 4
    assert len(set(eager.loss)) == 4  # it trains
    assert fused.loss == pytest.approx(eager.loss, rel=1e-4)
    assert 0 < fused.peak_mib < 0.7 * eager.peak_mib
    assert picture.stat().st_size > 0


def test_snippet_of_the_loss_path() -> None:
    text = (EXAMPLE.parents[1] / "docs" / "loss_path.md").read_text()
    (snippet,) = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    known = len(slime_compile.reports())
    without_inductor = snippet.replace(
        'backend="slime_fused"', 'backend="slime_fused", options={"inner": "aot_eager"}'
    )
    names: dict[str, Any] = {}
    exec(without_inductor, names)
    assert names["cap"] == 65
    assert names["logits"].grad is not None
    assert [report.fused for report in slime_compile.reports()[known:]] == [2, 2]
