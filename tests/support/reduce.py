"""The smallest program that still fails: delta debugging over a program's syntax tree and the tensors it gets.

Entry point: `smallest(program, fails)`. Knows nothing of what a program computes: it leaves statements out, puts a part
of an expression in the place of the whole, one variable in the place of another, and makes the tensors plainer, as long
as `fails` says that what it got fails in the same way.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

from tests.support.program_inputs import NAMES, Spec
from tests.support.programs import Program

Fails = Callable[[Program], bool]


def smallest(program: Program, fails: Fails, seconds: float = 60.0) -> Program:
    """Tries smaller programs until none fails, or the time is up."""
    ends = time.monotonic() + seconds
    tried: set[Program] = set()
    while time.monotonic() < ends:
        for smaller in candidates(program):
            if time.monotonic() > ends:
                return program
            if smaller in tried:
                continue
            tried.add(smaller)
            if fails(smaller):
                program = smaller
                break
        else:
            return program
    return program


def candidates(program: Program) -> Iterator[Program]:
    """Smaller programs, those with the largest part missing first."""
    yield from _plainer(program)
    tree = ast.parse("\n".join(program.statements).replace("\nreturn", "\n_returned ="))
    for make in (_without_outputs, _without_statements, _fewer_moved, _named_once, _hoisted):
        for smaller in make(tree):
            try:
                yield _program(smaller, program.spec)
            except SyntaxError:
                continue


def _program(tree: ast.Module, spec: Spec) -> Program:
    statements = [ast.unparse(ast.fix_missing_locations(each)) for each in tree.body]
    statements[-1] = statements[-1].replace("_returned =", "return", 1)
    program = Program(tuple(statements), spec)
    compile(program.source, "<program>", "exec")
    return program


def _plainer(program: Program) -> Iterator[Program]:
    """The same statements on plainer tensors."""
    spec, plain = program.spec, Spec()
    for name in ("layout", "rows", "grads", "dtype", "row_dtype", "misses", "vocab", "lead"):
        if getattr(spec, name) != getattr(plain, name):
            changed = dataclasses.replace(spec, **{name: getattr(plain, name)})
            yield Program(program.statements, changed)
    for at in range(len(spec.rows)):
        rows = spec.rows[:at] + spec.rows[at + 1 :]
        if rows:
            yield Program(program.statements, dataclasses.replace(spec, rows=rows))
    for lead in ((1,), (2,), (3,)):
        if lead < spec.lead:
            yield Program(program.statements, dataclasses.replace(spec, lead=lead))


def _without_outputs(tree: ast.Module) -> Iterator[ast.Module]:
    returned = tree.body[-1].value  # type: ignore[attr-defined]
    for at in range(len(returned.elts) if len(returned.elts) > 1 else 0):
        changed = copy.deepcopy(tree)
        del changed.body[-1].value.elts[at]  # type: ignore[attr-defined]
        yield changed


def _without_statements(tree: ast.Module) -> Iterator[ast.Module]:
    """A name that is missing then makes eager code raise, and that is no failure."""
    for at in reversed(range(len(tree.body) - 1)):
        changed = copy.deepcopy(tree)
        del changed.body[at]
        yield changed
    for at, statement in enumerate(tree.body[:-1]):
        if isinstance(statement, ast.With | ast.For):  # its body alone
            changed = copy.deepcopy(tree)
            changed.body[at : at + 1] = changed.body[at].body  # type: ignore[attr-defined]
            yield changed
            for inside in range(len(statement.body) if len(statement.body) > 1 else 0):
                changed = copy.deepcopy(tree)
                del changed.body[at].body[inside]  # type: ignore[attr-defined]
                yield changed


def _fewer_moved(tree: ast.Module) -> Iterator[ast.Module]:
    """`a, b = (move(v) for v in (x, y))` with one pair less; the last one as `a = move(x)`."""
    for at, statement in enumerate(tree.body[:-1]):
        match statement:
            case ast.Assign(
                targets=[ast.Tuple(elts=names)],
                value=ast.GeneratorExp(generators=[ast.comprehension(iter=ast.Tuple(elts=moved))]),
            ):
                for pair in range(len(names) if len(names) > 1 else 0):
                    changed = copy.deepcopy(tree)
                    fewer: Any = changed.body[at]
                    del fewer.targets[0].elts[pair], fewer.value.generators[0].iter.elts[pair]
                    yield changed
                if len(names) == 1:
                    changed = copy.deepcopy(tree)
                    only: Any = changed.body[at]
                    only.value = _Replaced("v", moved[0]).visit(only.value.elt)
                    only.targets = [names[0]]
                    yield changed


def _named_once(tree: ast.Module) -> Iterator[ast.Module]:
    """A variable's expression in place of its uses, or another variable in place of this one."""
    for at, statement in enumerate(tree.body[:-1]):
        if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Name):
            continue
        name = statement.targets[0].id
        for value in (*(ast.Name(n) for n in (*NAMES[:6], "reward")), statement.value):
            changed = copy.deepcopy(tree)
            del changed.body[at]
            yield _Replaced(name, value).visit(changed)


class _Replaced(ast.NodeTransformer):
    def __init__(self, name: str, value: ast.expr) -> None:
        self.name, self.value = name, value

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return copy.deepcopy(self.value) if node.id == self.name else node


def _hoisted(tree: ast.Module) -> Iterator[ast.Module]:
    """A part of an expression in the place of the whole, the nearest to the root of the tree first."""
    wholes = [n for n in ast.walk(tree) if isinstance(n, ast.expr) and not isinstance(n, ast.Name)]
    for at, whole in enumerate(wholes):
        for part in _parts(whole):
            changed = copy.deepcopy(tree)
            target = [
                n
                for n in ast.walk(changed)
                if isinstance(n, ast.expr) and not isinstance(n, ast.Name)
            ][at]
            yield _Swapped(target, copy.deepcopy(part)).visit(changed)


def _parts(whole: ast.expr) -> Iterator[ast.expr]:
    if isinstance(whole, ast.Call):
        if isinstance(whole.func, ast.Attribute):
            yield whole.func.value
        yield from whole.args
        for at in range(len(whole.keywords)):
            yield ast.Call(whole.func, whole.args, whole.keywords[:at] + whole.keywords[at + 1 :])
    elif isinstance(whole, ast.BinOp):
        yield from (whole.left, whole.right)
    elif isinstance(whole, ast.UnaryOp):
        yield whole.operand
    elif isinstance(whole, ast.Subscript | ast.Attribute | ast.Starred):
        yield whole.value
    elif isinstance(whole, ast.Compare):
        yield whole.left


class _Swapped(ast.NodeTransformer):
    def __init__(self, target: ast.expr, value: ast.expr) -> None:
        self.target, self.value = target, value

    def visit(self, node: ast.AST) -> ast.AST:
        return self.value if node is self.target else self.generic_visit(node)
