"""In every Python of a command on the stand-in: `tests.cuda.standin.install` as soon as torch is imported."""

import importlib.abc
import importlib.machinery
import sys


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Finds torch as it would be found, with a loader that installs the stand-in after it."""

    def find_spec(self, name, path, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            from tests.cuda.standin import install

            install.install()

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _AfterTorch())
