"""Faults that can be made in a Python file: each is one expression or statement that is replaced by another.

`mutants_of` lists them. Not touched: annotations, decorators, docstrings, assertions, f-strings, messages.
A mutant's key is its file, function, kind and a digest of its expression in which names are numbers: it stays the same
when something is renamed or other lines are added.
"""

import ast
import functools
import hashlib
import keyword
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

KINDS = {
    "never": "a condition is false: a guard is dropped, or a branch",
    "always": "a condition is true",
    "conjunct": "one operand of `and`, of `or`, is dropped",
    "comparison": "== and !=, < and <=, `in` and `not in`, `is` and `is not` are exchanged",
    "operand": "a sum, product, union, negation is one of its operands",
    "exchange": "any and all, min and max are exchanged",
    "swap": "the first two arguments of a call are swapped",
    "argument": "a call is one of its arguments, or what its method belongs to",
    "keyword": "a keyword argument is dropped",
    "filter": "a comprehension takes everything",
    "empty": "a loop or comprehension goes over nothing",
    "element": "an element of a table is dropped",
    "number": "a number is one more, True is False",
    "returned": "a flag that is returned is constant; None is returned where it may be",
    "statement": "a statement is dropped, with what it raises or changes",
}


@dataclass(frozen=True)
class Mutant:
    """`before`, which stands at bytes `start` to `end` of `file`, becomes `after`."""

    file: str
    function: str
    kind: str
    line: int
    start: int
    end: int
    before: str
    after: str
    reached: int  # the line that must run for the mutant to matter: the guarded one where a guard is dropped
    number: int = 1  # of those in this function that look the same

    @functools.cached_property
    def key(self) -> str:
        digest = hashlib.sha256(_numbered(f"{self.before} -> {self.after}").encode()).hexdigest()[
            :6
        ]
        again = f".{self.number}" if self.number > 1 else ""
        return f"{self.file} {self.function} {self.kind} {digest}{again}"

    def applied(self, text: bytes) -> bytes:
        return text[: self.start] + self.after.encode() + text[self.end :]


def _numbered(text: str) -> str:
    names: dict[str, str] = {}

    def number(found: re.Match[str]) -> str:
        name = found[0]
        return name if keyword.iskeyword(name) else names.setdefault(name, f"v{len(names)}")

    return re.sub(r"[A-Za-z_]\w*", number, text)


def mutants_of(file: str, text: bytes) -> list[Mutant]:
    """All mutants of a file; `file` is the name they have in keys."""
    starts = [0]
    for line in text.split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)
    counts: Counter[str] = Counter()
    result = []
    tree = ast.parse(text)
    guarded = {id(n.test): n.body[0].lineno for n in ast.walk(tree) if isinstance(n, ast.If)}
    for function, kind, node, after in _faults(tree, "module", None):
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        before = ast.unparse(node)
        less = kind == "never" or (isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or))
        reached = guarded.get(id(node), node.lineno) if less else node.lineno
        made = Mutant(file, function, kind, node.lineno, start, end, before, after, reached)
        counts[made.key] += 1
        result.append(replace(made, number=counts[made.key]))
    return result


Fault = tuple[str, str, ast.stmt | ast.expr, str]  # function, kind, what is replaced, by what
_SKIPPED = (ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom, ast.Raise)
_ANNOTATIONS = ("annotation", "returns", "decorator_list", "type_params", "bases")


def _faults(node: ast.AST, function: str, returns: str | None) -> Iterator[Fault]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        function = node.name if function == "module" else f"{function}.{node.name}"
        returns = ast.unparse(node.returns) if getattr(node, "returns", None) else None
    for kind, place, after in _at(node, function == "module", returns):
        yield function, kind, place, after
    for field, value in ast.iter_fields(node):
        below = value if isinstance(value, list) else [value]
        of_a_type = isinstance(node, ast.Subscript) and field == "slice" and function == "module"
        if field in _ANNOTATIONS or of_a_type:
            continue
        for child in below:
            if (
                isinstance(child, ast.AST)
                and not isinstance(child, _SKIPPED)
                and not _is_said(child)
            ):
                yield from _faults(child, function, returns)


def _is_said(node: ast.AST) -> bool:
    """A docstring, or a call that logs."""
    if not isinstance(node, ast.Expr):
        return False
    value = node.value
    return isinstance(value, ast.Constant) or ast.unparse(value).startswith(("log.", "warnings."))


Change = tuple[str, ast.stmt | ast.expr, str]


def _at(node: ast.AST, at_top: bool, returns: str | None) -> Iterator[Change]:
    yield from _of_condition(node)
    yield from _of_arithmetic(node)
    if isinstance(node, ast.Call):
        yield from _of_call(node)
    yield from _of_loop(node)
    if at_top and isinstance(node, ast.Set | ast.Tuple | ast.List | ast.Dict):
        yield from _without_one(node)
    if isinstance(node, ast.Return) and returns is not None:
        yield from _of_return(node, returns)
    body = getattr(node, "body", ())
    droppable = (
        [each for each in body if _is_droppable(node, each)] if isinstance(body, list) else []
    )
    yield from (("statement", each, "pass") for each in droppable)


def _of_condition(node: ast.AST) -> Iterator[Change]:
    match node:
        case ast.While(test=test):
            yield "never", test, "False"
        case (
            ast.If(test=test)
            | ast.IfExp(test=test)
            | ast.Assign(value=(ast.Compare() | ast.BoolOp() | ast.UnaryOp(op=ast.Not())) as test)
        ):
            yield "never", test, "False"
            yield "always", test, "True"
        case ast.BoolOp(values=values):
            for at in range(len(values)):
                kept = values[:at] + values[at + 1 :]
                yield "conjunct", node, _text(ast.BoolOp(node.op, kept) if kept[1:] else kept[0])
        case ast.Compare(ops=[op]) if type(op) in _OTHER:
            other = ast.Compare(node.left, [_OTHER[type(op)]()], node.comparators)
            yield "comparison", node, _text(other)


def _of_arithmetic(node: ast.AST) -> Iterator[Change]:
    match node:
        case ast.UnaryOp():
            yield "operand", node, _text(node.operand)
        case ast.BinOp() if not isinstance(node.left, ast.Constant | ast.JoinedStr):
            yield "operand", node, _text(node.left)
            if not isinstance(node.op, ast.Sub | ast.Mod | ast.FloorDiv):
                yield "operand", node, _text(node.right)
        case ast.Constant(value=bool() as flag):
            yield "number", node, str(not flag)
        case ast.Constant(value=int() | float() as number):
            yield "number", node, str(number + 1)


def _of_loop(node: ast.AST) -> Iterator[Change]:
    match node:
        case ast.For():
            yield "empty", node.iter, "()"
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            for part in node.generators:
                yield from (("filter", condition, "True") for condition in part.ifs)
                yield "empty", part.iter, "()"


def _of_return(node: ast.Return, returns: str) -> Iterator[Change]:
    if node.value is None or isinstance(node.value, ast.Constant):
        return
    if returns == "bool":
        yield "returned", node.value, "True"
        yield "returned", node.value, "False"
    elif "None" in returns:
        yield "returned", node.value, "None"


def _text(node: ast.expr) -> str:
    simple = isinstance(node, ast.Name | ast.Attribute | ast.Constant | ast.Call)
    return ast.unparse(node) if simple else f"({ast.unparse(node)})"


_OTHER: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_EXCHANGED = {"any": "all", "all": "any", "min": "max", "max": "min"}
_COMMUTATIVE = {"isinstance", "min", "max", "same", "zip", "promote_types", "add", "join"}


def _of_call(node: ast.Call) -> Iterator[Change]:
    name = getattr(node.func, "attr", None) or getattr(node.func, "id", "")
    if isinstance(node.func, ast.Name) and name in _EXCHANGED:
        yield (
            "exchange",
            node,
            _text(ast.Call(ast.Name(_EXCHANGED[name]), node.args, node.keywords)),
        )
    for at, given in enumerate(node.keywords):
        if given.arg is not None:
            rest = node.keywords[:at] + node.keywords[at + 1 :]
            yield "keyword", node, _text(ast.Call(node.func, node.args, rest))
    plain = [arg for arg in node.args if not isinstance(arg, ast.Starred)]
    if name.istitle() or plain != node.args or name == "isinstance":
        return
    if (
        len(plain) > 1
        and name not in _COMMUTATIVE
        and ast.unparse(plain[0]) != ast.unparse(plain[1])
    ):
        swapped = [plain[1], plain[0], *plain[2:]]
        yield "swap", node, _text(ast.Call(node.func, swapped, node.keywords))
    if len(plain) > 1 and name not in _EXCHANGED:
        values = [arg for arg in plain if isinstance(arg, ast.Name | ast.Call)]
        yield from (("argument", node, _text(value)) for value in values)
    if not plain and isinstance(node.func, ast.Attribute):
        yield "argument", node, _text(node.func.value)


def _without_one(node: ast.Set | ast.Tuple | ast.List | ast.Dict) -> Iterator[Change]:
    for at in range(len(node.keys if isinstance(node, ast.Dict) else node.elts)):
        if isinstance(node, ast.Dict):
            keys, values = (
                node.keys[:at] + node.keys[at + 1 :],
                node.values[:at] + node.values[at + 1 :],
            )
            yield "element", node, ast.unparse(ast.Dict(keys, values))
        else:
            rest = node.elts[:at] + node.elts[at + 1 :]
            yield (
                "element",
                node,
                ast.unparse(type(node)(rest)) if rest or not isinstance(node, ast.Set) else "set()",
            )


def _is_droppable(parent: ast.AST, node: ast.stmt) -> bool:
    """What may be missing without an error of Python's: no definition of a name. A whole branch is `never`'s."""
    if isinstance(parent, ast.If) and len(parent.body) == 1 and not parent.orelse:
        return False
    if isinstance(node, ast.Assign):
        (target, *_), read = (
            node.targets,
            {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)},
        )
        named = {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}
        return isinstance(target, ast.Subscript | ast.Attribute) or (bool(named) and named <= read)
    return isinstance(node, ast.AugAssign | ast.Raise) or (
        isinstance(node, ast.Expr) and not _is_said(node)
    )
