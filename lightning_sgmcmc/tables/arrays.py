"""Arrays, lists and frames of numbers as tensors, whatever their strides, byte order and type."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

PLAIN = ("b1", "u1", "i1", "i2", "i4", "i8", "f2", "f4", "f8")
"""NumPy's types that torch computes with."""


def is_frame(x: Any) -> bool:
    """Return whether x is a data frame of pandas, which need not be installed."""
    return _is_of_pandas(x) and hasattr(x, "columns")


def is_table(x: Any) -> bool:
    """Return whether x is a data frame or a series of pandas."""
    return _is_of_pandas(x) and hasattr(x, "iloc")


def as_series(y: Any) -> Any:
    """Return an array of pandas, such as a Categorical with its order, as a series; others as they are."""
    if not _is_of_pandas(y) or is_table(y):
        return y
    import pandas

    return pandas.Series(y)


def _is_of_pandas(x: Any) -> bool:
    return type(x).__module__.split(".")[0] == "pandas"


def check_same_rows(x: Any, y: Any) -> None:
    """Raise ValueError for a frame and targets of pandas whose index has the same rows in another order."""
    if not (is_table(x) and is_table(y)) or len(x) != len(y) or x.index.equals(y.index):
        return
    if x.index.is_unique and y.index.is_unique and not len(x.index.symmetric_difference(y.index)):
        raise ValueError(
            "y has the rows of x in another order, by their index: pass y.loc[x.index], or y.to_numpy() if rows belong "
            "together by their places"
        )


def as_frame(x: Any) -> Any:
    """Return a frame or series of pandas as a frame, (n, columns) or (n, 1)."""
    frame = x if is_frame(x) else x.to_frame()
    names = list(frame.columns)
    twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
    if twice is not None:
        raise ValueError(f"x has the column {twice!r} twice, so it is not known by its name: rename or drop one")
    return frame


def as_tensor(name: str, values: Any) -> Tensor:
    """Return numbers as a tensor that shares their memory where it can.

    Unsigned numbers of two bytes and more, which torch hardly computes with, become int64. The columns of a frame
    become float64.

    Args:
        name: the argument, for messages.
        values: a tensor, an array of any strides, byte order and type of numbers, a frame or series, or nested lists.

    Raises:
        TypeError: if they are no real numbers.
        ValueError: if some are masked.
    """
    if isinstance(values, Tensor):
        return values
    if is_table(values):
        frame = as_frame(values)
        columns = [column_numbers(name, column, frame[column]) for column in frame.columns]
        table = torch.as_tensor(np.stack(columns, 1))
        return table if is_frame(values) else table[:, 0]
    if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
        raise ValueError(f"{name} has masked values, which are no numbers: fill them in, or leave out their rows")
    array = _of_numbers(name, np.asarray(values))
    if array.dtype.newbyteorder("=").str[1:] not in PLAIN:
        array = array.astype(np.int64 if array.dtype.kind == "u" else np.float64)
    elif not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if not (array.flags.c_contiguous and array.flags.writeable):  # such as flips, of which torch has no view
        array = np.array(array, order="C")
    return torch.as_tensor(array)


def _of_numbers(name: str, array: np.ndarray) -> np.ndarray:
    """Return an array whose type is of real numbers; Python's own numbers in it are converted."""
    if array.dtype.kind == "O" and array.size:
        array = np.asarray(array.tolist())
    if array.dtype.kind not in "biuf":
        raise TypeError(
            f"{name} has values of type {array.dtype}, which are no numbers: encode them (pandas.factorize for labels, "
            "pandas.get_dummies for inputs)"
        )
    if array.dtype.kind == "u" and array.dtype.itemsize == 8 and array.size and array.max() >= 2**63:
        raise TypeError(f"{name} has integers of 2**63 and more, which torch has not: scale them in advance")
    return array


def column_numbers(name: str, column: Any, series: Any) -> np.ndarray:
    """Return the numbers of a series, float64 (n,); missing ones are NaN."""
    if getattr(series.dtype, "kind", "O") in "biuf":
        return np.array(series.to_numpy(dtype=np.float64, na_value=np.nan))
    try:
        if series.dtype.kind == "O" and not is_categorical(series):
            return as_tensor(name, series.to_numpy(dtype=object)).double().numpy()
    except TypeError:
        pass
    if getattr(series.dtype, "kind", "O") == "M":
        raise TypeError(
            f"{name} has the column {column!r} of dates, which are no numbers: pass the days since one of them, or the "
            f"month, leave it out, or test on the last rows by time={column!r}"
        )
    raise TypeError(
        f"{name} has the column {column!r} of {series.dtype}, which is not numeric: encode it "
        f"(pandas.get_dummies), say that it is categorical ({name}.astype({{{column!r}: 'category'}})), or leave it out"
    )


def is_categorical(series: Any) -> bool:
    """Return whether a series has the categorical type of pandas."""
    return bool(getattr(series.dtype, "name", "") == "category")


def with_categories(frame: Any) -> Any:
    """Return a frame whose columns of texts have the type "category"."""
    objects = [name for name in frame.columns if not is_categorical(frame[name]) and frame[name].dtype.kind == "O"]
    texts = [name for name in objects if any(isinstance(value, str) for value in frame[name])]
    return frame.astype(dict.fromkeys(texts, "category"))
