"""Files of reference probabilities, and their comparison with predictions."""

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_sgmcmc.diagnostics.agreement import agreement, total_variation
from lightning_sgmcmc.tables import as_tensor

CIFAR_TEST = 10_000


def read_probabilities(source: Any) -> Tensor:
    """Return class probabilities (n, K), float32, from a file or an array.

    Args:
        source: a tensor or array, or the path of a .npy file, a .npz file with one array (or one named "probs",
            "probabilities" or "p"), or a .csv file with a row for each datum and perhaps a header.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if its rows are no probabilities.
    """
    where = "the reference"
    if isinstance(source, str | Path):
        path = Path(source)
        where, array = str(path), _read(path)
    else:
        array = as_tensor("reference", source).detach().cpu().numpy()
    if array.ndim != 2 or not np.issubdtype(array.dtype, np.number):
        raise ValueError(f"{where} should have the shape (n, K), got {array.shape} of {array.dtype}")
    found = torch.as_tensor(np.ascontiguousarray(array, dtype=np.float64))
    if not bool((found >= 0).all()) or not bool(((found.sum(1) - 1).abs() < 1e-2).all()):
        raise ValueError(
            f"{where} should have probabilities, non-negative rows that sum to 1: apply a softmax to logits first"
        )
    return (found / found.sum(1, keepdim=True)).float()


def _read(path: Path) -> np.ndarray:
    if not path.is_file():
        raise FileNotFoundError(f"there are no reference probabilities at {path}")
    if path.suffix == ".npy":
        return np.asarray(np.load(path, allow_pickle=False))
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as arrays:
            names = [n for n in ("probs", "probabilities", "p") if n in arrays.files] or arrays.files
            if len(names) != 1:
                raise ValueError(f"{path} has several arrays ({', '.join(arrays.files)}): save one, named 'probs'")
            return np.asarray(arrays[names[0]])
    if path.suffix == ".csv":
        lines = path.read_text(encoding="utf-8").splitlines()
        try:
            [float(cell) for cell in lines[0].split(",")]
            header = 0
        except (ValueError, IndexError):
            header = 1
        return np.loadtxt(lines[header:], delimiter=",", ndmin=2)
    raise ValueError(f"reference={str(path)!r} has an unknown ending: pass a .npy, .npz or .csv file")


@cache
def tfds_order(count: int = CIFAR_TEST, split: str = "test") -> tuple[int, ...]:
    """Return which datum of the original order is in each row of TensorFlow Datasets' files.

    Rows are sorted by the MD5 sum of the split's name and the datum's number.
    """
    return tuple(
        sorted(range(count), key=lambda i: hashlib.md5(f"{split}{i}".encode(), usedforsecurity=False).hexdigest())
    )


def cifar10_hmc(path: str | Path) -> Tensor:
    """Return the published HMC predictive of the CIFAR-10 test images, (10000, 10), in torchvision's order.

    The file is `data/cifar10/probs.csv` of the NeurIPS 2021 competition's starter kit
    (izmailovpavel/neurips_bdl_starter_kit). Its rows are in the order of TensorFlow Datasets. Pass the result as
    `BayesianModelAverage(reference=…)`. The samples are of a ResNet-20-FRN with Swish, on the first 40,960 training
    images without augmentation, prior N(0, 1/5), temperature 1.

    Raises:
        FileNotFoundError: if there is no file.
        ValueError: if it does not have 10,000 rows of 10 probabilities.

    Source: Izmailov et al. 2021.
    """
    rows = read_probabilities(path)
    if tuple(rows.shape) != (CIFAR_TEST, 10):
        raise ValueError(f"{path} should have the shape (10000, 10), got {tuple(rows.shape)}")
    found = torch.empty_like(rows)
    found[torch.tensor(tfds_order())] = rows
    return found


class Reference:
    """A reference predictive of the test data.

    Args:
        source: see `read_probabilities`; None is no reference.
    """

    names = ("agreement", "total_variation")

    def __init__(self, source: Any) -> None:
        self.probabilities = None if source is None else read_probabilities(source)

    def __repr__(self) -> str:
        return "None" if self.probabilities is None else f"{tuple(self.probabilities.shape)}"

    def values(self, probabilities: Tensor) -> dict[str, float]:
        """Return the agreement and total variation of class probabilities (n, K).

        Raises:
            ValueError: if the reference has another number of rows or classes.
        """
        assert self.probabilities is not None
        own = probabilities.cpu()
        return {
            "agreement": float(agreement(own, self.probabilities)),
            "total_variation": float(total_variation(own, self.probabilities)),
        }
