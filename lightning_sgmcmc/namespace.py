"""Which Lightning a program uses: the package `pytorch_lightning`, or `lightning` with the same classes again.

The two do not mix: a Trainer of one refuses the modules and callbacks of the other. All files of this library therefore
take Lightning from here, and the first import of the library decides: `SGMCMC_LIGHTNING`, if it is set; else what the
program has imported; else `pytorch_lightning`, or `lightning` where that is all there is.
"""

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

VARIABLE = "SGMCMC_LIGHTNING"
"""The environment variable that chooses."""
PLAIN, UNIFIED = "pytorch_lightning", "lightning"
PACKAGES = {PLAIN: PLAIN, UNIFIED: "lightning.pytorch"}
FABRICS = {PLAIN: "lightning_fabric", UNIFIED: "lightning.fabric"}


def _chosen() -> str:
    asked = os.environ.get(VARIABLE, "")
    if asked not in ("", *PACKAGES):
        raise ValueError(f"{VARIABLE} must be {PLAIN} or {UNIFIED}, got {asked!r}")
    if asked:
        return asked
    imported = [name for name, package in PACKAGES.items() if package in sys.modules]
    if len(imported) == 1:
        return imported[0]
    if imported:  # as the program's own names say, since other packages import either
        return UNIFIED if _of_program() == {UNIFIED} else PLAIN
    return PLAIN if importlib.util.find_spec(PLAIN) is not None else UNIFIED


def _of_program(*modules: str) -> set[str]:
    """Return the packages whose modules or classes have names in the main program, or in some modules."""
    found = set()
    for name in ("__main__", *modules):
        for value in list(vars(sys.modules.get(name, sys)).values()):
            origin = value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", None)
            found |= {of for of in PACKAGES if f"{origin}." == f"{of}." or f"{origin}.".startswith(f"{PACKAGES[of]}.")}
    return found


NAME = _chosen()
"""The package that this process uses, `pytorch_lightning` or `lightning`."""
OTHER = PLAIN if NAME == UNIFIED else UNIFIED
if TYPE_CHECKING:
    import lightning_fabric as fabric
    import pytorch_lightning as pl
else:
    pl = importlib.import_module(PACKAGES[NAME])
    fabric = importlib.import_module(FABRICS[NAME])
rank_zero_info = pl.utilities.rank_zero.rank_zero_info
rank_zero_warn = pl.utilities.rank_zero.rank_zero_warn


def __getattr__(name: str) -> Any:
    if name == "cli":  # which takes a second to import
        return importlib.import_module(f"{PACKAGES[NAME]}.cli")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def is_of_other_namespace(value: Any) -> bool:
    """Return whether an object's class, or one of its base classes, comes from the package that is not used."""
    return any(f"{cls.__module__}.".startswith(f"{PACKAGES[OTHER]}.") for cls in type(value).__mro__)


def names_other_lightning(*modules: str) -> bool:
    """Return whether a module, or the main program, imports from the other package and not from the one in use."""
    return PACKAGES[OTHER] in sys.modules and _of_program(*modules) == {OTHER}


def way_out() -> str:
    """Return what to do where a program's Lightning is not the one in use."""
    first = "import lightning" if OTHER == UNIFIED else "import pytorch_lightning"
    return (
        f"this process uses {PACKAGES[NAME]}, and {PACKAGES[OTHER]} does not mix with it: write `{first}` before "
        f"`import lightning_sgmcmc`, set the environment variable {VARIABLE}={OTHER}, or import from {PACKAGES[NAME]}"
    )


class _Aliases(MetaPathFinder, Loader):
    """Finds the modules of the other package in the one that is used."""

    names = {
        PLAIN: {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"},
        UNIFIED: {"lightning.pytorch": "pytorch_lightning", "lightning.fabric": "lightning_fabric"},
    }[OTHER]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how to load a module of the other package, None for others."""
        return ModuleSpec(fullname, self) if self._own(fullname) is not None else None

    def _own(self, name: str) -> str | None:
        if name == UNIFIED == OTHER:  # which has the names of its part for training
            return PLAIN
        for theirs, ours in self.names.items():
            if f"{name}.".startswith(f"{theirs}."):
                return ours + name.removeprefix(theirs)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module in use, whatever it is called in the other package."""
        module = importlib.import_module(str(self._own(spec.name)))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module as it was."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def accept_both_names() -> None:
    """Let this process import either package by its name and get the one in use, as command lines and YAML files do.

    A package that is imported already stays what it is.
    """
    if not any(isinstance(finder, _Aliases) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Aliases())
