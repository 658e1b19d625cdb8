"""Reports of code that comes from torch's compile cache: the second of two processes with one cache."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from slime_compile.ops import native
from tests.support.processes import run_python

WARM = """
import json, sys, torch, slime_compile
def loss(x, w, t):
    return torch.log_softmax(x @ w, -1).gather(-1, t[:, None]).mean()
def nothing(x):
    return (x * 2).sin()
def refused(x):
    return (x.softmax(-1) ** 2).cumsum(-1).mean()
x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, 1030, requires_grad=True)
torch.compile(loss, backend="slime_fused")(x, w, torch.randint(0, 1030, (4,))).backward()
torch.compile(nothing, backend="slime_fused")(torch.randn(8))
torch.compile(refused, backend="slime_fused")(torch.randn(4, 1030, requires_grad=True)).backward()
try:
    slime_compile.summary().assert_fused()
except AssertionError as error:
    assert "full-vocabulary values stored" in str(error) or "no unknown graph" in str(error)
else:
    raise SystemExit("what is left is not seen")
print(json.dumps([r.to_dict() for r in slime_compile.reports()]))
"""


def run_script(
    script: Path, cache: Path, *arguments: str, log: Path | None = None, **environment: str
) -> list[dict[str, Any]]:
    """What the script prints in a process of its own."""
    code = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    told = {"TORCH_LOGS": "slime_compile", "TORCH_LOGS_OUT": str(log)} if log else {}
    found: list[dict[str, Any]] = json.loads(
        run_python(
            code, str(script), *arguments, TORCHINDUCTOR_CACHE_DIR=str(cache), **told, **environment
        )
    )
    return found


@pytest.mark.thorough
def test_reports_survive_the_compile_cache(tmp_path: Path) -> None:
    script = tmp_path / "warm.py"
    script.write_text(WARM)
    log = tmp_path / "torch.log"
    cold, warm = (run_script(script, tmp_path / "cache", log=log) for _ in range(2))
    said = log.read_text()
    assert said.count("slime_fused: 2 fused operators in 1 graph") == 2
    assert "not called yet" not in said
    assert [r["fused"] for r in cold] == [r["fused"] for r in warm] == [2, 0, 0]
    for report in (*cold, *warm):
        for graph in report["graphs"]:
            loaded = graph.pop("cached")
            assert loaded == any(report is r for r in warm)
    assert cold[0] == warm[0]
    assert cold[0]["in_place"][0]["in_place"]
    assert not warm[1]["graphs"][0]["has_vocabulary"]
    assert warm[2] == cold[2]
    assert warm[2]["rejections"]
    shutil.rmtree(tmp_path / "cache" / "slime_compile" / "aside")
    (unknown,) = run_script(script, tmp_path / "cache")[2]["graphs"]
    assert unknown["unknown"]
    assert "the fused operators are unknown" in unknown["notes"][0]


LEAF = """
import json, sys, torch, slime_compile
def loss(logits, t):
    return torch.log_softmax(logits, -1).gather(-1, t[:, None]).mean()
leaf = torch.randn(4, 1030, requires_grad=True)
logits = leaf if "leaf" in sys.argv else leaf * 1
fn = torch.compile(loss, backend="slime_fused")
value = fn(logits, torch.randint(0, 1030, (4,)))
found = [slime_compile.reports()[0].to_dict()]
value.backward()
slime_compile.reports()[0].assert_fused(2, in_place=False)
slime_compile.summary().assert_fused(2)
print(json.dumps([*found, slime_compile.reports()[0].to_dict()]))
"""


@pytest.mark.thorough
def test_hit_by_another_kind_of_input(tmp_path: Path) -> None:
    """Compiled for logits that are no leaf, which is all the same where each call decides; then called with a leaf."""
    script = tmp_path / "leaf.py"
    script.write_text(LEAF)
    _, compiled = run_script(script, tmp_path / "cache")
    before_backward, loaded = run_script(script, tmp_path / "cache", "leaf")
    assert [g["cached"] for g in loaded["graphs"]] == [True]
    assert loaded["fused"] == compiled["fused"] == 2
    (held,), (leaf,) = compiled["in_place"], loaded["in_place"]
    assert (held["in_place"], held["calls"], held["over"]) == (False, 1, 0)
    assert leaf == {**held, "reason": "the logits are a leaf that requires grad"}
    assert held["reason"].startswith("Python references the logits")
    assert before_backward["in_place"] == []
    assert (
        "in place or not is known after the first backward"
        in before_backward["graphs"][0]["notes"][0]
    )


@pytest.mark.thorough
@pytest.mark.skipif(not native.has_vectors(), reason="no vector instructions")
def test_formulas_in_the_place_of_operators(tmp_path: Path) -> None:
    """No operator is left that could carry the report."""
    script = tmp_path / "small.py"
    script.write_text(LEAF)
    _, compiled = run_script(script, tmp_path / "cache", SLIME_FUSED_INLINE_BELOW="100000")
    at_once, loaded = run_script(script, tmp_path / "cache", SLIME_FUSED_INLINE_BELOW="100000")
    assert at_once == loaded
    cached = [graph.pop("cached") for found in (compiled, loaded) for graph in found["graphs"]]
    assert cached == [False, True]
    assert loaded == compiled
    assert "inductor compiles the formula" in loaded["in_place"][0]["reason"]


@pytest.mark.thorough
def test_lines_are_those_of_this_process(tmp_path: Path) -> None:
    """The same function, further down in another file."""
    first, second = tmp_path / "first.py", tmp_path / "second.py"
    first.write_text(LEAF)
    second.write_text("\n\n\n" + LEAF)
    _, compiled = run_script(first, tmp_path / "cache")
    _, loaded = run_script(second, tmp_path / "cache")
    assert loaded["graphs"][0]["cached"]
    line = f"{second}:{LEAF.splitlines().index('def loss(logits, t):') + 2 + 3}"
    assert {v["source"] for v in loaded["graphs"][0]["values"]} == {line}
    assert {p["source"] for p in loaded["in_place"]} == {line}
    assert compiled["in_place"][0]["source"].startswith(str(first))
    assert loaded["graphs"][0]["name"] == f"loss ({second})"


CONSUMED = LEAF.replace(
    'backend="slime_fused")', 'backend="slime_fused", options={"consume_logits": True})'
).replace("in_place=False", 'in_place="leaf" not in sys.argv')


@pytest.mark.thorough
def test_where_logits_are_consumed_a_leaf_has_code_of_its_own(tmp_path: Path) -> None:
    script = tmp_path / "consumed.py"
    script.write_text(CONSUMED)
    for arguments in ((), ("leaf",)):
        _, report = run_script(script, tmp_path / "cache", *arguments)
        assert not report["graphs"][0]["cached"]
        assert [p["in_place"] for p in report["in_place"]] == [not arguments]
