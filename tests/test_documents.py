"""The documents: links that lead somewhere, reasons that the pass gives."""

import functools
import inspect
import os
import re
from pathlib import Path
from unittest import mock

import pytest
import torch

import slime_compile
import slime_compile.ops  # registers them
from fx_passes import pipeline
from slime_compile import __main__
from slime_compile.backend.options import Options
from slime_compile.dry_run import command
from tests.support import prose

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "bench/README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_easy_to_read(path: Path) -> None:
    assert prose.density(path.read_text()) < 1.5


@pytest.mark.parametrize("name", sorted(slime_compile.__all__))
def test_public_docstrings_are_easy_to_read(name: str) -> None:
    """Of a class its methods', too: a page of an editor has all of them at once."""
    public = getattr(slime_compile, name)
    members = vars(public) if inspect.isclass(public) else {}
    texts = [
        public.__doc__,
        *(v.__doc__ for k, v in members.items() if k[0] != "_" and is_documented(v)),
    ]
    text = re.sub(r"^ +", "", "\n".join(filter(None, texts)), flags=re.M)
    assert prose.density(text) < 1.5 or sum(w in prose.PRONOUNS for w in prose.words_of(text)) <= 1


@pytest.mark.parametrize("read", [Options, __main__, command], ids=lambda read: read.__name__)
def test_options_and_help_are_easy_to_read(read: object) -> None:
    assert prose.density(inspect.getdoc(read) or "") < 1.5


def is_documented(member: object) -> bool:
    """Not the default of a field, which has the docstring of its type."""
    return inspect.isroutine(member) or isinstance(member, property | functools.cached_property)


def test_relative_pronouns_are_counted_in_running_text_only() -> None:
    text = "What is left, who `that` holds.\n\n| which | that |\n\n```\nwhere\n```\n[a page](what.md)\n"
    assert prose.words_of(text) == ["what", "is", "left", "who", "holds", "a", "page"]
    assert prose.density(text) == pytest.approx(100 * 2 / 7)
    assert prose.density("") == 0


def test_the_example_of_distillation_runs() -> None:
    code, _ = _examples_of_distillation()
    names: dict[str, torch.Tensor] = {}
    exec(code.replace('"slime_fused"', '"slime_fused", options={"inner": "aot_eager"}'), names)
    student = names["student"].detach().double().requires_grad_()
    first, second = (torch.log_softmax(x / 2.0, -1) for x in (student, names["teacher"].double()))
    (first.exp() * (first - second)).sum(-1).mean().backward()
    torch.testing.assert_close(names["student"].grad.double(), student.grad, rtol=1e-4, atol=1e-9)


def test_the_example_of_linear_divergence_runs() -> None:
    _, code = _examples_of_distillation()
    names: dict[str, torch.Tensor] = {}
    with mock.patch.dict(os.environ, {"SLIME_FUSED_INNER": "aot_eager"}):
        exec(code, names)
    student = names["student_hidden"].detach().double().requires_grad_()
    teacher = names["teacher_hidden"] @ names["teacher_weight"][:4096].t()
    first = torch.softmax(student @ names["student_weight"].detach().double().t() / 2.0, -1)
    second = torch.softmax(teacher.double() / 2.0, -1)
    mixture = (0.3 * second + 0.7 * first).log()
    of_teacher = (second * (second.log() - mixture)).sum(-1)
    divergence = 0.3 * of_teacher + 0.7 * (first * (first.log() - mixture)).sum(-1)
    (divergence * names["mask"]).sum().div(names["mask"].sum()).backward()
    torch.testing.assert_close(
        names["student_hidden"].grad.double(), student.grad, rtol=1e-4, atol=1e-7
    )


def _examples_of_distillation() -> list[str]:
    text = (ROOT / "docs/distillation.md").read_text()
    return re.findall(r"```python\n(.*?)```", text, re.S)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), target


def test_each_page_can_be_reached_from_readme() -> None:
    seen, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop().resolve()
        if page not in seen and page.suffix == ".md":
            seen.add(page)
            links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())
            waiting += [page.parent / link for link in links if "://" not in link]
    assert {path.resolve() for path in DOCUMENTS} <= seen


def test_the_changelog_has_short_lines_and_known_headings() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert max(map(len, text.splitlines())) <= 140
    first, *releases = re.findall(r"^## \[(.+)\](.*)$", text, re.M)
    assert first == ("Unreleased", "")
    assert all(re.fullmatch(r" - \d{4}-\d\d-\d\d", day) for _, day in releases)
    headings = {"Added", "Changed", "Fixed", "Removed", "Numerics", "Known limits"}
    assert set(re.findall(r"^### (.*)$", text, re.M)) <= headings


def test_links_to_headings() -> None:
    for page in DOCUMENTS:
        for target, heading in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text()):
            text = ((page.parent / target) if target else page).read_text()
            titles = re.findall(r"^#+ (.*)$", text, re.M)
            anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
            assert heading in anchors, (page.name, target, heading)


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


def test_each_public_name_is_on_the_page_of_the_api_once() -> None:
    text = (ROOT / "docs/api.md").read_text()
    *names, options = re.findall(r"^::: (.*)$", text, re.M)
    assert sorted(names) == [f"slime_compile.{name}" for name in sorted(slime_compile.__all__)]
    assert options == f"{Options.__module__}.{Options.__name__}"


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
    helpers = {
        "describe",
        "outcome",
        "pipeline",
        "refused",
        "stored",
        "torch_private",
        "verify",
        "__init__",
    }
    modules = {path.stem for path in (ROOT / "fx_passes").glob("*.py")} - helpers
    assert modules <= set(pipeline.NAMES)


def test_each_file_of_the_passes_is_in_the_design() -> None:
    text = (ROOT / "docs/design.md").read_text().split("## Files of fx_passes")[1]
    rows = dict(re.findall(r"^\| `([a-z_]+)/` \| (.*) \|$", text.split("## Folders")[0], re.M))
    packages = ROOT / "fx_passes"
    for folder in [packages, *(init.parent for init in packages.glob("*/__init__.py"))]:
        named = set(re.findall(r"(?:^|; )`(\w+)`: ", rows.pop(folder.name)))
        assert named == {path.stem for path in folder.glob("*.py")} - {"__init__"}, folder.name
    assert not rows
