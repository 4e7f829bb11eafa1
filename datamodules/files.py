"""Arrays in a user's files: found, read without running what a pickle can contain, and checked.

Each error is one sentence that names the file and the remedy.
"""

import inspect
import io
import pickle
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from joblib.numpy_pickle import NumpyArrayWrapper, NumpyUnpickler
from torch import Tensor

from lightning_sgmcmc.files import megabytes, read_regular

LARGEST_ARRAY = 2**32
"""Largest size of an array, in bytes; a compressed file of a few megabytes can expand to any size."""
PLAIN_KINDS = "biuf"
"""Kinds of elements that are read: booleans, integers and floating-point numbers."""
OVERHEAD = 2**16
"""Bytes of a file besides the array's elements."""


def find_file(root: str | Path, *candidates: str, what: str) -> Path:
    """Return the first of `root/candidate` that exists."""
    for candidate in candidates:
        path = Path(root) / candidate
        if path.is_file():
            return path
    raise FileNotFoundError(f"{what} is not at {Path(root) / candidates[0]}: put the file there, or pass another root")


def read_arrays(path: Path, names: Sequence[str]) -> list[np.ndarray]:
    """Return the named arrays of an `.npz` file, read without pickles."""
    try:
        arrays = np.load(path, allow_pickle=False)
    except (zipfile.BadZipFile, EOFError, ValueError) as error:
        raise ValueError(f"{path} is damaged or not an .npz file: replace it") from error
    if not isinstance(arrays, np.lib.npyio.NpzFile):
        raise ValueError(f"{path} should be an .npz file with the arrays {', '.join(names)}, but is one array")
    with arrays:
        missing = [name for name in names if name not in arrays.files]
        if missing:
            found = ", ".join(arrays.files) or "nothing"
            raise ValueError(f"{path} has no array {', '.join(missing)}: it holds {found}")
        return [_read_member(path, arrays, name) for name in names]


def _read_member(path: Path, arrays: "np.lib.npyio.NpzFile", name: str) -> np.ndarray:
    archive = arrays.zip
    assert archive is not None, "the file is open"
    try:
        size = archive.getinfo(f"{name}.npy" if f"{name}.npy" in archive.namelist() else name).file_size
        if size > LARGEST_ARRAY:
            raise ValueError(f"it has {megabytes(size)}, more than {megabytes(LARGEST_ARRAY)}")
        return arrays[name]
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, OverflowError, MemoryError) as error:
        raise ValueError(f"{name} in {path} cannot be read ({one_line(error)}): replace the file") from error


def to_images(array: np.ndarray, shape: tuple[int, int, int], where: str) -> Tensor:
    """Return uint8 images (n, C, H, W), (n, H, W, C), or (n, H, W) if C is 1, as (n, C, H, W), by their (C, H, W)."""
    channels, height, width = shape
    accepted = [(channels, height, width), (height, width, channels), *([(height, width)] if channels == 1 else [])]
    if array.dtype != np.uint8 or array.shape[1:] not in accepted or len(array) == 0:
        raise ValueError(
            f"{where} should be uint8 images of shape (n, {channels}, {height}, {width}), got {array.dtype} of shape "
            f"{array.shape}"
        )
    if array.shape[1:] == (height, width, channels):
        array = np.moveaxis(array, 3, 1)
    return torch.as_tensor(np.ascontiguousarray(array)).reshape(-1, channels, height, width)


def to_labels(array: np.ndarray, count: int, first: int, last: int, where: str) -> Tensor:
    """Return class labels, integers of shape (n,) or (n, 1), as int64 of shape (n,)."""
    if array.dtype.kind not in "iu" or array.shape not in ((count,), (count, 1)):
        raise ValueError(f"{where} should be {count} integers, got {array.dtype} of shape {array.shape}")
    if array.min() < first or array.max() > last:
        raise ValueError(f"{where} should be between {first} and {last}, got {array.min()} to {array.max()}")
    return torch.as_tensor(array.astype(np.int64)).reshape(-1)


def one_line(error: BaseException) -> str:
    """Return an exception's message without line breaks."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


# -- scikit-learn's files ---------------------------------------------------------------------------------------------


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
    """Unpickles a single array; every other class or function raises an error."""

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
    """Return the array, of a limited size in bytes, that `joblib.dump` wrote, as scikit-learn's downloads do."""
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
