"""`slime-compile explain FILE.py:FUNCTION` and `slime-compile estimate FILE.py:FUNCTION`: dry runs.

The inputs come from `example_inputs()` in the file: it returns a tuple of arguments, or a pair of such a tuple and a
dict of keyword arguments. Or they come from `--inputs`, one word per argument: `dtype[sizes]` is a tensor, "grad:"
before it makes it require grad, `name=` makes it a keyword argument; any other word is a number or a string.

    slime-compile explain loss.py:loss_fn --inputs "grad:f32[205280,76032] i64[205280] temperature=0.7"

Tensors are fake: nothing is allocated and nothing computed.
"""

import argparse
import ast
import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from slime_compile.backend.options import Options
from slime_compile.dry_run.estimate import estimate_peak
from slime_compile.dry_run.explain import explain
from slime_compile.dry_run.operators import operators, render
from slime_compile.report.places import shortened
from slime_compile.report.terminal import show
from slime_compile.torch_private import FakeTensorMode

DTYPES = {
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i64": torch.int64,
    "i32": torch.int32,
    "bool": torch.bool,
}

_TENSOR = re.compile(r"(grad:)?(\w+)\[([\d,]*)\]")

_TENSOR_MEANT = re.compile(r"(grad:)?[a-z]+\d*\[.*")

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


class Refused(SystemExit):
    """Wrong input; the exit status is 2."""

    def __init__(self, message: str):
        super().__init__(2)
        self.message = message

    def __str__(self) -> str:
        return self.message


def add_arguments(parser: argparse.ArgumentParser, estimates: bool) -> None:
    """The options of `explain`, or of `estimate`."""
    parser.set_defaults(estimates=estimates, operators=False, save=None)
    parser.add_argument("function", help="FILE.py:FUNCTION or package.module:function")
    parser.add_argument(
        "--inputs",
        help='arguments, like "grad:f32[1024,32000] i64[1024]"; default: the file\'s example_inputs()',
    )
    if not estimates:
        parser.add_argument(
            "--operators",
            action="store_true",
            help="list the operators reaching the passes instead",
        )
        parser.add_argument(
            "--save", metavar="FILE.html", help="write the report as an HTML file, too"
        )
    parser.add_argument("--json", action="store_true", help="the result as one line of JSON")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the backend; repeat it for several",
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the report, the operators or the estimate.

    Raises:
        Refused: with what must hold, where the function, its inputs or an option cannot be read.
    """
    module, function = load(arguments.function)
    args, kwargs = (
        parse_inputs(arguments.inputs) if arguments.inputs is not None else _own_inputs(module)
    )
    options = dict(_named(each) for each in arguments.option)
    try:
        Options.parse(options)
    except RuntimeError as error:
        raise Refused(str(error)) from None
    _check_fit(function, args, kwargs)
    if arguments.estimates:
        estimate = estimate_peak(function, *args, kwargs=kwargs, **options)
        print(json.dumps(dataclasses.asdict(estimate)) if arguments.json else estimate)
        return 0
    if not arguments.operators:
        with _without_log("torch._subclasses.fake_tensor"):  # the refusal has its error
            report = explain(function, **options)(*args, **kwargs)
        if report.notes and not report.graphs:
            raise Refused(
                f"{arguments.function} cannot be called with these inputs: {report.notes[0]}"
            )
        if arguments.save is not None:
            report.save(arguments.save)
        if arguments.json:
            print(json.dumps(report.to_dict()))
        else:
            show(report)
        return 0
    found, report = operators(function, **options)(*args, **kwargs)
    if arguments.json:
        print(json.dumps([dataclasses.asdict(each) for each in found]))
        return 0
    print(shortened(render(found)))
    for line in (*report.breaks, *report.python_frames):
        print(shortened(f"not traced: {line.name} at {line.source}: {line.reason}"))
    for note in report.notes:
        print(f"note: {note}")
    return 0


@contextlib.contextmanager
def _without_log(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _check_fit(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    signature = inspect.signature(function)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise Refused(f"the inputs must fit {name}{signature}: {error}") from None


def load(place: str) -> tuple[Any, Callable[..., Any]]:
    """The module and the function of `FILE.py:FUNCTION` or `package.module:function`."""
    home, separator, name = place.rpartition(":")
    if not separator or not name:
        raise Refused(f"the function must be given as FILE.py:FUNCTION, got {place!r}")
    module = _file(Path(home)) if home.endswith(".py") else importlib.import_module(home)
    function: Any = module
    for part in name.split("."):
        if not hasattr(function, part):
            raise Refused(
                f"{home} must define `{name}`, it defines {', '.join(_callables(module))}"
            )
        function = getattr(function, part)
    if not callable(function):
        raise Refused(f"{place} must be a function or a module, got {type(function).__name__}")
    return module, function


def _file(path: Path) -> Any:
    if not path.exists():
        raise Refused(f"there is no file {path}")
    sys.path.insert(0, str(path.resolve().parent))  # as `python FILE.py` does
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _callables(module: Any) -> list[str]:
    return sorted(
        name for name, value in vars(module).items() if callable(value) and not name.startswith("_")
    )


def _own_inputs(module: Any) -> Inputs:
    """The file's own inputs: a tuple of arguments, or a pair of that and of keyword arguments."""
    if not hasattr(module, "example_inputs"):
        raise Refused(
            "the inputs must be given: define example_inputs() in the file, returning a tuple of arguments, "
            'or say --inputs "grad:f32[1024,32000] i64[1024]"'
        )
    found = module.example_inputs()
    match found:
        case (tuple() as args, dict() as kwargs):
            return args, kwargs
        case tuple():
            return found, {}
    raise Refused(
        f"example_inputs() must return a tuple of arguments, or (tuple, dict), got {type(found).__name__}"
    )


def parse_inputs(text: str) -> Inputs:
    """Arguments and keyword arguments from words, tensors as fakes."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    with FakeTensorMode():
        for word in text.split():
            name, named, value = word.rpartition("=")
            if named:
                kwargs[name] = _value(value)
            else:
                args.append(_value(value))
    return tuple(args), kwargs


def _value(word: str) -> Any:
    found = _TENSOR.fullmatch(word)
    if found is None and _TENSOR_MEANT.fullmatch(word):
        raise Refused(
            f"a tensor must be given as dtype[size,size,...], like f32[1024,32000], got {word!r}"
        )
    if found is None:
        return _plain(word)
    grad, dtype, sizes = found.groups()
    if dtype not in DTYPES:
        raise Refused(f"the dtype of {word!r} must be one of {', '.join(DTYPES)}")
    shape = [int(size) for size in sizes.split(",") if size]
    return torch.empty(shape, dtype=DTYPES[dtype], requires_grad=bool(grad))


def _plain(word: str) -> Any:
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError):
        return word


def _named(option: str) -> tuple[str, Any]:
    name, separator, value = option.partition("=")
    if not separator:
        raise Refused(f"--option must be NAME=VALUE, got {option!r}")
    return name, _plain(value)
