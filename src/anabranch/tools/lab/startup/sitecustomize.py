"""Runs as a rank's interpreter starts, and has the lab's links put into torch.distributed as soon as that is imported.

Python prints an error of this file and then ignores it. So everything that can fail happens at the import of
torch.distributed. On the path this file hides the system's own sitecustomize, if there is one, and therefore runs it.
"""

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType

MODULE = "torch.distributed.distributed_c10d"
GIVEN = sorted({"ANABRANCH_EMULATED", "ANABRANCH_LAB_INSIDE"} & os.environ.keys())


class _Finder(MetaPathFinder):
    """Finds torch's module once, and has the lab's links installed in it as soon as it is loaded."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_install(module: ModuleType) -> None:
                load(module)
                _install(module)

            spec.loader.exec_module = load_and_install  # type: ignore[method-assign]  # of this one loader
        return spec


def _install(module: ModuleType) -> None:
    try:
        from anabranch.tools.lab.emulation import install as emulation
        from anabranch.tools.lab.emulation.settings import EmulatedNetwork
        from anabranch.tools.lab.inside import install as inside
    except ImportError as error:
        raise ImportError(
            f"{' and '.join(GIVEN)} is set and {sys.executable} cannot import anabranch: {error}. Install anabranch "
            "there too, or unset it to run without the lab's links"
        ) from error
    if (network := EmulatedNetwork.from_environment()) is not None:
        emulation.install(module, network)
    if inside.INSIDE_VARIABLE in os.environ:
        inside.install(module)


def _run_hidden_sitecustomize() -> None:
    here = Path(__file__).resolve().parent
    spec = PathFinder.find_spec("sitecustomize", [entry for entry in sys.path if Path(entry).resolve() != here])
    if spec is not None and spec.loader is not None:
        sys.modules["sitecustomize"] = module = module_from_spec(spec)
        spec.loader.exec_module(module)


if GIVEN:
    sys.meta_path.insert(0, _Finder())
_run_hidden_sitecustomize()
