"""Which classes a store may name: those of imported modules, and torch's and this library's networks.

A store can come from anywhere, so its text must not choose what Python imports or calls.
"""

import hashlib
import importlib
import inspect
import sys
from pathlib import Path
from types import CodeType
from typing import Any

from torch import nn

from lightning_sgmcmc.plain import parts_in

IMPORTED = ("lightning_sgmcmc", "torch.nn", "torchvision.models", "torchvision.ops")
"""Packages whose modules are imported if a store names them."""
_REFUSED = "lightning lightning_fabric peft pytorch_lightning torch torchmetrics torchvision transformers"
REFUSED = tuple(_REFUSED.split())
"""Packages whose other modules raise an error even if imported: some of their classes read files or download."""
TRUST = "pass net=… or model=…, or trust=True if you trust whoever wrote the folder"


class NotDescribableError(ValueError):
    """Raised if a module cannot be converted to plain data, or be rebuilt from them."""


def path_of(value: Any) -> str:
    """Return the name of a class or function for `find`."""
    if "<locals>" in value.__qualname__:
        raise NotDescribableError(f"{value.__qualname__} is defined inside a function")
    module = "__main__" if value.__module__ == "__mp_main__" else value.__module__  # the same, in a spawned process
    return f"{module}:{value.__qualname__}"


def find_module_class(path: Any, trust: bool = False) -> type[nn.Module]:
    """Return the torch module class of this name; with `trust` any module is imported, which runs its code."""
    found = find(path, trust)
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise NotDescribableError(f"{path} is not a torch module")
    return found


def check_texts(cls: type[nn.Module], arguments: Any) -> None:
    """Raise if a text of a store would reach a constructor that may take it for a file or a download: a class of
    another installed package gets no text at all, a user's own class none with a separator."""
    if _is_below(cls.__module__, IMPORTED):
        return
    is_installed = _is_installed(cls)
    for text in parts_in(arguments, str):
        if is_installed or "/" in text or "\\" in text:
            whose = "of another package" if is_installed else "yours"
            raise NotDescribableError(
                f"{cls.__name__} is {whose}, and gets the text {text[:80]!r}, which it may take for the name of a file "
                f"or a download: {TRUST}"
            )


def _is_installed(cls: type) -> bool:
    file = getattr(sys.modules.get(cls.__module__), "__file__", None) or ""
    return any(f"{part}-packages" in Path(file).parts for part in ("site", "dist"))


def code_of(cls: type[nn.Module]) -> str:
    """Return a digest of what a class of the user's own computes, after Python's version, whose code it is of; "" for
    others. It is of the constructor, `forward`, and all methods that these name."""
    if _is_below(cls.__module__, (*IMPORTED, *REFUSED)) or _is_installed(cls):
        return ""
    waiting, found = ["__init__", "forward", "output_of", "predictive_terms"], dict[str, str]()
    while waiting:
        name = waiting.pop()
        method = inspect.getattr_static(cls, name, None)
        method = inspect.unwrap(getattr(method, "__func__", getattr(method, "fget", method)))  # of a property too
        code = getattr(method, "__code__", None)
        if name in found or code is None or _is_below(method.__module__ or "", (*IMPORTED, *REFUSED)):
            continue
        found[name] = f"{_text_of(code)} {[v for v in method.__defaults__ or () if isinstance(v, int | float | str)]}"
        waiting += _names_in(code)
    text = repr(sorted(found.items())).encode()
    return f"{sys.version_info[0]}.{sys.version_info[1]} {hashlib.blake2b(text, digest_size=8).hexdigest()}"


def _text_of(code: CodeType) -> str:
    """Return what a function does as text, the same in each process; of its texts not the first, which may say so."""
    constants = [_text_of(c) if isinstance(c, CodeType) else _ordered(c) for c in code.co_consts]
    constants = [c for place, c in enumerate(constants) if place or not isinstance(code.co_consts[0], str)]
    return f"{code.co_code.hex()} {code.co_names} {constants}"


def _ordered(constant: Any) -> str:
    return repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant)


def _names_in(code: CodeType) -> list[str]:
    return [*code.co_names, *(name for c in code.co_consts if isinstance(c, CodeType) for name in _names_in(c))]


def find(path: Any, trust: bool = False, packages: tuple[str, ...] = ()) -> Any:
    """Return the class or function of this name; see `find_module_class`."""
    parts = path.split(":") if isinstance(path, str) else []
    names = [name for part in parts for name in part.split(".")]
    if len(parts) != 2 or not all(name.isidentifier() for name in names):
        raise NotDescribableError(f"{str(path)[:80]!r} is not the name of a class")
    module_name, qualified_name = parts
    module = found = _module(module_name, trust, packages)
    for name in qualified_name.split("."):
        # Not getattr: a module's `__getattr__` may import. Only classes hold classes: a module holds other modules.
        if name not in vars(found) or not (found is module or isinstance(found, type)):
            raise NotDescribableError(
                f"{qualified_name} was defined in the script that sampled, and this program does not define it: import "
                "it by `from SCRIPT import …` into this program's main module, or pass net=… or model=…"
                if module_name == "__main__"
                else f"cannot import {module_name}:{qualified_name}: {module_name} has no {qualified_name}"
            )
        found = vars(found)[name]
    return found


def _module(name: str, trust: bool, packages: tuple[str, ...]) -> Any:
    known = _is_below(name, (*IMPORTED, *packages))
    if not trust and not known and _is_below(name, REFUSED):
        raise NotDescribableError(f"{name} has no networks that a store may name: pass net=… or model=…")
    if name in sys.modules:
        return sys.modules[name]
    if not (trust or known):
        raise NotDescribableError(
            f"{name} is not imported, and a store does not choose what is: import {name} first, {TRUST}"
        )
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise NotDescribableError(f"cannot import {name}: {error}") from error


def _is_below(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)
