"""Torch's private interfaces: in one file of each package, all of them there, and one error where one is not."""

import ast
import re
from pathlib import Path

import pytest
import torch

import fx_passes
import slime_compile
from fx_passes import torch_private as graphs
from fx_passes.torch_private import Interface
from slime_compile import torch_private

PACKAGES = [Path(package.__file__).parent for package in (slime_compile, fx_passes)]
PRIVATE = re.compile(r"^torch(?!\.ops\b)(\.\w+)*\._(?!_)\w+|^torch\.fx\.experimental")
PUBLIC = {
    "torch.utils._pytree",
    "torch._dynamo",
    "torch._ops",
    "torch._ops.OpOverload",
}
"""Underscored, but what everybody uses: pytrees, overloads, torch._dynamo.reset in texts."""

PARTS = re.compile(r"\w+").findall
MEMBERS = {
    *("_member_map_", "_member_names_", "_value2member_map_"),  # of an Enum
    *("_name_", "_value_"),  # of its member
    *("_current_frames", "_getframe"),  # of sys
    *("_assert_async", "_c10d_functional", "_to_copy", "_unsafe_view"),  # operators
    *("_backward_hooks", "_backward_pre_hooks"),  # of a module: torch has no public way to ask
    "_boxed_call",  # AOTAutograd's mark of a callable that empties its list of arguments
    "_codegen",  # of a graph, for its set_codegen
    "_forward_impl",  # Megatron-core's
    "_profiler_enabled",  # of torch.autograd
    "_schema",  # of an operator
    "_slime_fused_inlines",  # our mark on torch.compile
}
"""Of other objects than torch's interfaces, or what everybody uses."""


def private_names(source: str) -> set[str]:
    """Modules imported from, and attributes of torch."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute):
            names.add(ast.unparse(node))
    found = {match[0] for name in names if (match := PRIVATE.match(name))}
    return found - PUBLIC


def test_they_are_in_one_file() -> None:
    elsewhere = {
        str(path.relative_to(package.parent)): names
        for package in PACKAGES
        for path in package.rglob("*.py")
        if path.name != "torch_private.py" and (names := private_names(path.read_text()))
    }
    assert elsewhere == {}


def trees() -> list[ast.Module]:
    files = (path for package in PACKAGES for path in package.rglob("*.py"))
    return [ast.parse(path.read_text()) for path in files]


def private_members(tree: ast.Module) -> set[str]:
    """Those of other objects than `self`."""
    attributes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    private = (node for node in attributes if re.match(r"_(?!_)", node.attr))
    return {node.attr for node in private if ast.unparse(node.value) not in ("self", "cls")}


def our_members(tree: ast.Module) -> set[str]:
    """Methods, and what is assigned to a `self`."""
    found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if stored and ast.unparse(node.value) == "self":
            found.add(node.attr)
    return found


def test_private_members_are_told_too() -> None:
    used = set().union(*map(private_members, trees()))
    ours = set().union(*map(our_members, trees()))
    told = {name for each in torch_private.INTERFACES.values() for name in each.needs}
    homes = {part for each in torch_private.INTERFACES.values() for part in PARTS(each.home)}
    assert used - ours - told - homes == MEMBERS


def test_all_are_there_and_told_alike() -> None:
    assert torch_private.missing() == []
    assert {*torch_private.INTERFACES, "check"} == {*torch_private.__all__, *graphs.INTERFACES}
    assert {*graphs.INTERFACES} < {*graphs.__all__} < {*dir(graphs), *graphs.INTERFACES}
    for name in torch_private.INTERFACES:
        assert getattr(torch_private, name) is not None


def test_a_missing_one_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, home in (("one", "torch:_no_such_name"), ("two", "torch.no_such_module:name")):
        interface = Interface(home, f"why {name}", f"instead of {name}")
        monkeypatch.setitem(torch_private.INTERFACES, name, interface)
    with pytest.raises(ImportError) as caught:
        torch_private.check()
    text = str(caught.value)
    assert f"torch {torch.__version__} lacks" in text
    assert "torch:_no_such_name (why one; instead: instead of one)" in text
    assert "torch.no_such_module:name (why two" in text
    with pytest.raises(ImportError) as caught:
        _ = torch_private.one
    assert str(caught.value) == text


def test_an_attribute_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    interface = Interface("torch:nn", "a test", "nothing", ("Module", "gone"))
    monkeypatch.setitem(torch_private.INTERFACES, "nn", interface)
    with pytest.raises(ImportError, match="gone of torch:nn"):
        torch_private.check()
