"""The documents: links that lead somewhere, reasons that the pass gives."""

import re
from pathlib import Path

import pytest
import torch

import slime_compile.ops  # noqa: F401  registers them
from fx_passes import pipeline

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), target


def test_the_five_reasons_are_those_of_the_pass() -> None:
    files = [
        f for package in ("fx_passes", "slime_compile") for f in (ROOT / package).rglob("*.py")
    ]
    sources = "".join(path.read_text() for path in files)
    written = " ".join(re.sub(r'"\s*\n\s*f?"', "", sources).split())
    text = (ROOT / "docs/reports.md").read_text().split("## The five")[1]
    quoted = re.findall(r'"([^"]+)"', " ".join(text.split("## In a program")[0].split()))
    assert len(quoted) >= 6
    for reason in quoted:
        for part in (
            reason.removeprefix("not in place ").removesuffix("at LINE, for later use").split("...")
        ):
            assert part.strip() in written, reason


def test_the_operators_are_as_documented() -> None:
    schemas = {
        str(schema) for schema in torch._C._jit_get_all_schemas() if "slime_fused::" in schema.name
    }
    headings = set(
        re.findall(r"^## `(slime_fused::.*)`$", (ROOT / "docs/ops.md").read_text(), re.M)
    )
    assert headings == {schema for schema in schemas if "linear" not in schema}


def test_the_passes_are_as_documented() -> None:
    text = (ROOT / "docs/design.md").read_text()
    (block,) = re.findall(r"<!-- passes -->\n```\n(.*)\n```\n<!-- end -->", text, re.S)
    assert block == pipeline.listed()
    assert {each.stage for each in pipeline.PASSES} == set(pipeline.STAGES)


def test_each_module_of_a_pass_is_in_the_pipeline() -> None:
    """What edits a graph by itself, and is none of these helpers, is a pass."""
    helpers = {"describe", "outcome", "pipeline", "stored", "torch_private", "verify", "__init__"}
    modules = {path.stem for path in (ROOT / "fx_passes").glob("*.py")} - helpers
    assert modules <= set(pipeline.NAMES)
