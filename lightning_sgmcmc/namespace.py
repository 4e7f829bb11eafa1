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
