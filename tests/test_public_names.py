"""What `import slime_compile` offers: everything public, nothing imported before it is used."""

import importlib
import os
import subprocess
import sys
from types import ModuleType

import pytest

import slime_compile

MODULES = [
    "backend",
    "deferred.handle",
    "deferred.logits",
    "dry_run.estimate",
    "dry_run.explain",
    "dynamo.remedies",
    "rl.divergence",
    "rl.linear_log_probs",
    "rl.log_probs",
    "rl.memory_model",
    "rl.memory_probe",
    "rl.micro_batches",
    "rl.packed",
    "rl.packing",
    "rl.redistribute",
    "report",
]


def test_every_name_is_there() -> None:
    homes: dict[str, object] = vars(slime_compile)["_HOMES"]
    assert set(slime_compile.__all__) == {*homes, "__version__"}
    assert set(slime_compile.__all__) <= set(dir(slime_compile))
    for name in homes:
        assert not isinstance(getattr(slime_compile, name), ModuleType)


def test_no_name_is_a_module_s() -> None:
    """An imported submodule becomes an attribute of the package and would hide a function of its name."""
    for module in MODULES:
        importlib.import_module(f"slime_compile.{module}")
        assert module.split(".")[0] not in slime_compile.__all__


def test_functions_of_the_loss_path_are_public() -> None:
    for module in (
        "rl.memory_model",
        "rl.micro_batches",
        "rl.packed",
        "rl.packing",
        "rl.redistribute",
    ):
        home = importlib.import_module(f"slime_compile.{module}")
        defined = {
            name
            for name, value in vars(home).items()
            if callable(value)
            and getattr(value, "__module__", "") == home.__name__
            and not name.startswith("_")
        }
        assert defined - {"group_device"} <= set(slime_compile.__all__)


def test_the_package_imports_nothing() -> None:
    code = "import sys, slime_compile; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.thorough
def test_a_name_that_is_not_there_is_a_type_error() -> None:
    api = pytest.importorskip("mypy.api")
    code = "import slime_compile\nslime_compile.explain\nslime_compile.integrations\nslime_compile.expalin"
    quiet = ["--config-file=", "--ignore-missing-imports", "--follow-imports=silent"]
    said, _, status = api.run(["-c", code, f"--cache-dir={os.devnull}", *quiet])
    assert status == 1
    assert said.count("error:") == 1
    assert '"expalin"' in said


@pytest.mark.thorough
def test_integrations_are_there_without_their_packages() -> None:
    """Each is an attribute, whether imported or not; what it is for is imported by `enable()`."""
    code = (
        "import sys, slime_compile; names = slime_compile.integrations.__all__\n"
        "for name in names: assert callable(getattr(slime_compile.integrations, name).enable)\n"
        "assert not {'accelerate', 'openrlhf', 'slime', 'trl', 'verl'} & set(sys.modules)\n"
        "assert set(names) == {'accelerate', 'openrlhf', 'slime', 'trl', 'verl'}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
