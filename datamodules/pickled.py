"""Arrays in scikit-learn's files, read without running what else a pickle can contain."""

import inspect
import io
import pickle
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from joblib.numpy_pickle import NumpyArrayWrapper, NumpyUnpickler

from lightning_sgmcmc.files import read_regular

PLAIN_KINDS = "biuf"
"""Kinds of elements that are read: booleans, integers and floating-point numbers."""
OVERHEAD = 2**16
"""Bytes of a file besides the array's elements."""


class _Array(NumpyArrayWrapper):
    """An array in the file, of a limited size."""

    limit = 0

    def read(self, unpickler: Any, *options: Any) -> Any:
        shape, dtype = tuple(self.shape), self.dtype
        if not isinstance(dtype, np.dtype) or dtype.kind not in PLAIN_KINDS:
            raise pickle.UnpicklingError("its elements are not numbers")
        if not all(isinstance(size, int) and size >= 0 for size in shape):
            raise pickle.UnpicklingError("its shape is not a tuple of integers")
        if len(shape) > 4 or np.prod([float(size) for size in shape]) * dtype.itemsize > self.limit:
            raise pickle.UnpicklingError(f"its shape {shape} is too large")
        return self.read_array(unpickler, *options)


class _ArrayUnpickler(NumpyUnpickler):
    """Unpickles a single array; every other class or function is refused."""

    limit = 0

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("joblib.numpy_pickle", "NumpyArrayWrapper"):
            return type("_Array", (_Array,), {"limit": self.limit})
        if (module, name) == ("numpy", "dtype"):
            return np.dtype
        if (module, name) == ("numpy", "ndarray"):
            return object  # only named, as the array's type
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which is no array")


def read_dumped_array(path: Path, largest: int) -> np.ndarray:
    """Return the array that `joblib.dump` wrote, as scikit-learn's downloads do.

    Args:
        path: the file, compressed by zlib or not at all.
        largest: largest size of the array's elements, in bytes.

    Raises:
        OSError: if it is missing, a link or a device.
        ValueError: if it is damaged, too large, or contains something else than an array of numbers.
    """
    content = read_regular(path, largest + OVERHEAD)
    try:
        if not content.startswith(b"\x80"):
            decompressor = zlib.decompressobj()
            content = decompressor.decompress(content, largest + OVERHEAD)
            if decompressor.unconsumed_tail:
                raise ValueError(f"it expands to more than {largest:,} bytes")
        options = {"ensure_native_byte_order": True, "mmap_mode": None}
        known = inspect.signature(NumpyUnpickler.__init__).parameters
        unpickler = _ArrayUnpickler(
            str(path), io.BytesIO(content), **{name: value for name, value in options.items() if name in known}
        )
        unpickler.limit = largest
        array = unpickler.load()
    except Exception as error:  # a damaged pickle can raise anything
        raise ValueError(f"{path} is damaged or not scikit-learn's ({error})") from error
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{path} should contain an array, but contains a {type(array).__name__}")
    return array
