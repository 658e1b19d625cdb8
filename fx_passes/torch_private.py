"""Every private interface of torch in `fx_passes`: its purpose, and the remedy if it is gone.

Entry points: `from fx_passes.torch_private import <name>`, with a lookup each time; `check`, `looked_up` and `find`,
used by `slime_compile.torch_private` for the backend's interfaces. A missing one raises one error with torch's version
and the missing names. To add one: a line under TYPE_CHECKING (for mypy) and a row of `INTERFACES`.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch._functorch._aot_autograd.descriptors import (
        GradAOTOutput,
        InputMutationAOTOutput,
        PlainAOTInput,
        TangentAOTInput,
    )
    from torch._guards import detect_fake_mode
    from torch._inductor import inductor_prims
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
    from torch.distributed import _functional_collectives as functional_collectives
    from torch.distributed.distributed_c10d import _get_group_size_by_name as group_size_by_name
    from torch.fx.experimental.symbolic_shapes import (
        ShapeEnv,
        free_unbacked_symbols,
        guard_or_false,
        statically_known_true,
    )
    from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
    from torch.utils._sympy.functions import FloorDiv

__all__ = [
    "INTERFACES",
    "FakeTensor",
    "FakeTensorMode",
    "FloorDiv",
    "GradAOTOutput",
    "InputMutationAOTOutput",
    "Interface",
    "PlainAOTInput",
    "ShapeEnv",
    "TangentAOTInput",
    "TorchDispatchMode",
    "check",
    "detect_fake_mode",
    "find",
    "free_unbacked_symbols",
    "functional_collectives",
    "group_size_by_name",
    "guard_or_false",
    "inductor_prims",
    "is_traceable_wrapper_subclass",
    "looked_up",
    "statically_known_true",
    "unset_fake_temporarily",
]


@dataclass(frozen=True)
class Interface:
    """One private name of torch's.

    Attributes:
        home: module and attribute.
        why: what we need it for.
        when_gone: what to look for instead.
        needs: attributes of it that we use, apart from calling it.
        early: looked for when the backend is imported; False for what is slow to import and seldom needed.
    """

    home: str
    why: str
    when_gone: str
    needs: tuple[str, ...] = ()
    early: bool = True


INTERFACES = {
    "FakeTensor": Interface(
        "torch._subclasses.fake_tensor:FakeTensor",
        "the value of a new node; torch's own way to it is ten times slower",
        "run the operator under the FakeTensorMode",
    ),
    "FakeTensorMode": Interface(
        "torch._subclasses.fake_tensor:FakeTensorMode",
        "shape and dtype of every new node; dry runs at any size",
        "torch._subclasses has it since 2.0; without it nothing can be rewritten",
    ),
    "unset_fake_temporarily": Interface(
        "torch._subclasses.fake_tensor:unset_fake_temporarily",
        "real data at compile time, for verify=True",
        "torch.utils._python_dispatch's way to leave a mode",
    ),
    "detect_fake_mode": Interface(
        "torch._guards:detect_fake_mode",
        "the mode of the graph being rewritten",
        'the fake_mode of any node\'s meta["val"]',
    ),
    "statically_known_true": Interface(
        "torch.fx.experimental.symbolic_shapes:statically_known_true",
        "comparisons of symbolic sizes without a guard",
        "documented in torch since 2.5; else refuse symbolic sizes",
    ),
    "guard_or_false": Interface(
        "torch.fx.experimental.symbolic_shapes:guard_or_false",
        "comparisons of symbolic sizes with a guard",
        "see statically_known_true",
    ),
    "ShapeEnv": Interface(
        "torch.fx.experimental.symbolic_shapes:ShapeEnv",
        "an abandoned rewrite leaves no symbol for torch's next value",
        "delete the new entries of pending_fresh_unbacked_symbols",
        needs=("create_symintnode", "ignore_fresh_unbacked_symbols", "suppress_guards"),
    ),
    "free_unbacked_symbols": Interface(
        "torch.fx.experimental.symbolic_shapes:free_unbacked_symbols",
        "whether data alone says how large a new value is",
        "free_symbols of the sizes, those without a hint",
    ),
    "TorchDispatchMode": Interface(
        "torch.utils._python_dispatch:TorchDispatchMode",
        "the ATen operators in a fused operator's formula",
        "torch.fx.experimental.proxy_tensor.make_fx of the formula",
    ),
    "is_traceable_wrapper_subclass": Interface(
        "torch.utils._python_dispatch:is_traceable_wrapper_subclass",
        "tensors composed of several, with unknown memory",
        "type(tensor) is FakeTensor",
    ),
    "FloorDiv": Interface(
        "torch.utils._sympy.functions:FloorDiv",
        "symbolic sizes as nodes of the graph",
        "sympy.floor of a quotient",
    ),
    "GradAOTOutput": Interface(
        "torch._functorch._aot_autograd.descriptors:GradAOTOutput",
        "the gradients among the outputs of a joint graph",
        "fw_metadata of the TracingContext: forward's outputs come first",
    ),
    "InputMutationAOTOutput": Interface(
        "torch._functorch._aot_autograd.descriptors:InputMutationAOTOutput",
        "inputs changed in place by the function",
        "fw_metadata.input_info of the TracingContext; without it such logits are read changed",
    ),
    "PlainAOTInput": Interface(
        "torch._functorch._aot_autograd.descriptors:PlainAOTInput",
        "the argument of each placeholder, for overwriting",
        "without it nothing may be written in place",
    ),
    "TangentAOTInput": Interface(
        "torch._functorch._aot_autograd.descriptors:TangentAOTInput",
        "tells a training graph by its tangents",
        "placeholders named tangents_*, as before torch 2.9",
    ),
    "inductor_prims": Interface(
        "torch._inductor:inductor_prims",
        "registers prims.fma, named by the rules",
        "torch.ops.prims, if torch registers it by itself",
    ),
    "functional_collectives": Interface(
        "torch.distributed:_functional_collectives",
        "registers the collectives of a graph",
        "torch.ops._c10d_functional",
    ),
    "group_size_by_name": Interface(
        "torch.distributed.distributed_c10d:_get_group_size_by_name",
        "how many ranks a collective in a graph joins",
        "torch.distributed.get_world_size of the group",
    ),
}


def __getattr__(name: str) -> Any:
    return looked_up(INTERFACES, name)


def check(interfaces: Mapping[str, Interface]) -> None:
    """Looks for the interfaces needed to compile.

    Raises:
        ImportError: with torch's version and each missing interface.
    """
    problems = _lacking(interfaces)
    if problems:
        raise ImportError(_message(problems))


def looked_up(interfaces: Mapping[str, Interface], name: str) -> Any:
    """The interface of this name, for a module's `__getattr__`.

    Raises:
        AttributeError: there is no such row.
        ImportError: as `check` does.
    """
    if name not in interfaces:
        raise AttributeError(f"torch_private has no attribute {name!r}")
    value, problem = find(interfaces[name])
    if problem:
        raise ImportError(_message(list(dict.fromkeys([problem, *_lacking(interfaces)]))))
    return value


def _lacking(interfaces: Mapping[str, Interface]) -> list[str]:
    """The missing or different interfaces among those needed to compile."""
    found = (find(interface) for interface in interfaces.values() if interface.early)
    return [problem for _, problem in found if problem]


def find(interface: Interface) -> tuple[Any, str]:
    """The interface, or why it is not usable."""
    module_name, _, attribute = interface.home.partition(":")
    lost = f"{interface.home} ({interface.why}; instead: {interface.when_gone})"
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        return None, f"{lost}: {error}"
    value = getattr(module, attribute, None)
    if value is None:  # a module not imported by its package
        try:
            value = importlib.import_module(f"{module_name}.{attribute}")
        except ImportError:
            return None, lost
    absent = [name for name in interface.needs if not hasattr(value, name)]
    return value, f"{', '.join(absent)} of {lost}" if absent else ""


def _message(problems: list[str]) -> str:
    return (
        f"torch {torch.__version__} lacks private interfaces used by slime_compile: {'; '.join(problems)}. "
        "Use a release of torch named in docs/versions.md, or a newer slime_compile"
    )
