"""Files of reference probabilities, and their comparison with predictions."""

import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_sgmcmc.chains.samples import SampleRecord, comparable_log_weights
from lightning_sgmcmc.diagnostics.decisions import agreement, aurc, risk_at_coverage, total_variation
from lightning_sgmcmc.diagnostics.draws import normalised_weights
from lightning_sgmcmc.diagnostics.scores import gaussian_mixture_crps, interval_score
from lightning_sgmcmc.predictions.distributions import Normal
from lightning_sgmcmc.predictions.mixture import Mixture
from lightning_sgmcmc.tables import as_tensor
from lightning_sgmcmc.tensors import widest

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
    """A reference predictive of the test data, from what `read_probabilities` takes; None is no reference."""

    def __init__(self, source: Any) -> None:
        self.probabilities = None if source is None else read_probabilities(source)

    def __repr__(self) -> str:
        return "None" if self.probabilities is None else f"{tuple(self.probabilities.shape)}"

    def values(self, terms: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the agreement and total variation of class probabilities (n, K); nothing without a reference."""
        if self.probabilities is None:
            return {}
        if "probabilities" not in terms:
            raise ValueError("reference compares class probabilities, and these predictions have none: omit reference")
        own = terms["probabilities"].cpu()
        return {
            "agreement": float(agreement(own, self.probabilities)),
            "total_variation": float(total_variation(own, self.probabilities)),
        }


# -- stored scores -----------------------------------------------------------------------------------------------------


INTERVAL = 0.9
COVERAGE = 0.8
BLOCK = 2**22
"""Numbers of (sample, datum) pairs that are in one block of data."""


class StoredScores:
    """Collects the samples' predictions of one loader's data, and scores each and their average, in the original units;
    the CRPS and interval score of an average of Gaussians are exact."""

    def __init__(self, likelihood: Any, scale: float | Tensor, reference: Reference | None, with_scores: bool) -> None:
        self._reference = Reference(None) if reference is None else reference
        self._likelihood = likelihood
        self._with_scores = with_scores
        self._is_gaussian = with_scores and getattr(likelihood, "distribution", None) is Normal
        self._scale = scale
        self._records: list[SampleRecord] = []
        self._means: list[Tensor] = []
        self._stds: list[Tensor] = []

    def add(self, record: SampleRecord, terms: Mapping[str, Tensor], target: Tensor | None) -> dict[str, float]:
        """Add a sample; return its own scores."""
        found = self._reference.values(terms) | self._selective(terms, target)
        if self._is_gaussian and target is not None:
            self._records.append(record)
            self._means.append(terms["mean"].float().cpu())
            self._stds.append(terms["variance"].sqrt().float().cpu())
            one = torch.ones(1, dtype=torch.float64)
            found |= self._scores(one, self._means[-1][None], self._stds[-1][None], target)
        return found

    def of_average(self, terms: Mapping[str, Tensor], target: Tensor | None) -> dict[str, float]:
        """Return the scores of the weighted average of all samples."""
        found = self._reference.values(terms) | self._selective(terms, target)
        if self._means and target is not None:
            weights = normalised_weights(comparable_log_weights(self._records))
            found |= self._scores(weights, torch.stack(self._means), torch.stack(self._stds), target)
        return found

    def _selective(self, terms: Mapping[str, Tensor], target: Tensor | None) -> dict[str, float]:
        if not self._with_scores or target is None or "probabilities" not in terms or terms["probabilities"].dim() != 2:
            return {}
        if target.is_floating_point() and target.shape == terms["probabilities"].shape:
            return {}  # soft labels are neither right nor wrong
        read = getattr(self._likelihood, "labels", None)
        labels = (read(target) if read is not None else target).long()
        probabilities = terms["probabilities"]
        risk = risk_at_coverage(probabilities, labels, COVERAGE)
        return {"aurc": float(aurc(probabilities, labels)), f"risk_{COVERAGE * 100:.0f}": float(risk)}

    def _scores(self, weights: Tensor, means: Tensor, stds: Tensor, target: Tensor) -> dict[str, float]:
        target = target.cpu().double().reshape(means.shape[1:])
        crps, missed = 0.0, 0.0
        size = max(BLOCK // max(means[:, :1].numel(), 1), 1)
        for first in range(0, len(target), size):
            own = slice(first, first + size)
            mean, std, y = widest(means[:, own]), widest(stds[:, own]), target[own]
            crps += self._total(gaussian_mixture_crps(weights, mean, std, y))
            mixture = Mixture(Normal, {"loc": mean, "scale": std}, weights)
            ends = [mixture.quantile(q) for q in (0.5 - INTERVAL / 2, 0.5 + INTERVAL / 2)]
            missed += self._total(interval_score(ends[0], ends[1], y, INTERVAL))
        factor = (1.0 if isinstance(self._scale, Tensor) else self._scale) / max(int((~target.isnan()).sum()), 1)
        return {"crps": crps * factor, f"interval_score_{INTERVAL * 100:.0f}": missed * factor}

    def _total(self, each: Tensor) -> float:
        """Return the sum over observed targets (n, D), each in its unit if every number has one of its own."""
        return float((each * self._scale.to(each) if isinstance(self._scale, Tensor) else each).nansum())
