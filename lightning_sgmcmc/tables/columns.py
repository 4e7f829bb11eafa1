"""What the columns of inputs and targets are: offered by a datamodule, kept by a store, read by predictions."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_sgmcmc.tables.arrays import as_tensor, is_table
from lightning_sgmcmc.tables.inputs import InputColumns, plain, some

CLOSE = 1e-6
"""Relative difference of two scalings that is rounding."""


@dataclass(frozen=True)
class TargetScaling:
    """Mean and standard deviation by which targets were standardised: one number each, or one for each target.

    Attributes:
        mean, std: of the targets.
        names: of the targets' columns; () if they are not known.
    """

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    names: tuple[Any, ...] = ()

    @classmethod
    def of_datamodule(cls, datamodule: Any) -> "TargetScaling | None":
        """Return the scaling of a datamodule with a `target_std`, and a `target_mean` unless it is 0; else None."""
        std = getattr(datamodule, "target_std", None)
        if std is None:
            return None
        mean = getattr(datamodule, "target_mean", None)
        means, stds = (
            tuple(torch.as_tensor(value).double().reshape(-1).tolist())
            for value in (0.0 if mean is None else mean, std)
        )
        return cls(means, stds, tuple(map(plain, getattr(datamodule, "target_names", ()))))

    @property
    def factor(self) -> float | Tensor:
        """The divisor of the targets: a number, or one for each target, float64 (D,)."""
        return self.std[0] if len(self.std) == 1 else torch.tensor(self.std, dtype=torch.float64)

    @property
    def shift(self) -> float | Tensor:
        """What was subtracted from the targets before: a number, or one for each target, float64 (D,)."""
        return self.mean[0] if len(self.mean) == 1 else torch.tensor(self.mean, dtype=torch.float64)

    @property
    def labels(self) -> tuple[str, ...]:
        """What several targets with a scaling each are called, by name or number; () of one."""
        return tuple(map(str, self.names or range(len(self.std)))) if len(self.std) > 1 else ()

    def received(self, y: Any) -> Any:
        """Return targets as in training: a series or a frame has the data's units, a tensor those of the training.

        Raises:
            ValueError: for an array without names, which could be either.
        """
        if is_table(y):
            values = as_tensor("y", y)
            return ((values.reshape(len(values), -1) - self.shift) / self.factor).float()
        if isinstance(y, np.ndarray) and (any(self.mean) or any(value != 1 for value in self.std)):
            raise ValueError(
                "the targets are a NumPy array, and the run's targets were standardised, so their unit is unknown: "
                "pass a pandas series in the data's units, or a tensor of standardised targets"
            )
        return y


@dataclass(frozen=True)
class Columns:
    """What the inputs and targets of a run are; a store keeps it as the fit's datamodule offers it.

    Attributes:
        inputs: the inputs' columns and scaling; None if they are not known.
        targets: the targets' scaling; None if they were not scaled, or if it is not known.
        classes: the classes' names, in the order of their labels; () if they have none.
        task: what the targets are: "regression", "classes" or "counts"; "" if it is not known.
    """

    IF_SET: ClassVar = ("inputs", "targets", "classes", "task")

    inputs: InputColumns | None = None
    targets: TargetScaling | None = None
    classes: tuple[Any, ...] = ()
    task: str = ""

    @classmethod
    def of_datamodule(cls, datamodule: Any) -> "Columns":
        """Return what a datamodule says by its `input_columns`, `target_mean`, `target_std` and `classes`."""
        inputs, classes = getattr(datamodule, "input_columns", None), getattr(datamodule, "classes", ())
        return cls(
            inputs if isinstance(inputs, InputColumns) else None,
            TargetScaling.of_datamodule(datamodule),
            tuple(map(plain, classes)) if isinstance(classes, list | tuple) else (),
            str(getattr(datamodule, "task", None) or ""),
        )

    def difference(self, other: "Columns") -> str | None:
        """Return in which way another run's or datamodule's data have other columns or units; None if they may agree.

        What one of the two does not say is not compared.
        """
        if self.inputs is not None and other.inputs is not None:
            ours, theirs = self.inputs, other.inputs
            if ours.names and theirs.names and ours.names != theirs.names:
                return f"columns {some(theirs.names)}, not {some(ours.names)}"
            if any(ours.categories) and ours.categories != theirs.categories:
                return "other categories"
            if ours.shape != theirs.shape:
                return f"inputs of shape {theirs.shape}, not {ours.shape}"
            if not (
                _close(ours.scaling[0], theirs.scaling[0], ours.scaling[1])
                and _close(*(o.scaling[1] for o in (ours, theirs)))
            ):
                return "inputs of another scaling"
        if self.classes and other.classes and self.classes != other.classes:
            return f"classes {some(other.classes)}, not {some(self.classes)}"
        are_known = (
            (self.targets is not None or self.inputs is not None),
            (other.targets is not None or other.inputs is not None),
        )
        ours_y, theirs_y = self.targets or TargetScaling(), other.targets or TargetScaling()
        if all(are_known) and not (
            _close(ours_y.factor, theirs_y.factor) and _close(ours_y.shift, theirs_y.shift, ours_y.factor)
        ):
            return "targets of another scaling"
        return None

    def check(self, datamodule: Any, targets: bool = True) -> None:
        """Raise ValueError if a datamodule's batches are in other units, or of other columns, than these.

        Args:
            datamodule: it is set up; None for loaders, whose batches are as in the fit.
            targets: whether its targets count.
        """
        theirs = self if datamodule is None else Columns.of_datamodule(datamodule)
        found = self.difference(theirs if targets else replace(theirs, targets=self.targets))
        if found is not None:
            raise ValueError(
                f"{type(datamodule).__name__} has other data than the samples' fit ({found}): pass "
                "TableDataModule(…, like=posterior), which takes columns and units of the fit, or a loader of data as "
                "in the fit"
            )

    def received(self, batch: Any) -> Any:
        """Return a batch as in training, (inputs, target): its frames are in the data's units, its tensors are not.

        Raises:
            ValueError: for an array without names whose unit is not known.
        """
        if isinstance(batch, Mapping) and self.inputs is not None:
            received = self.inputs.received
            return {name: value if isinstance(value, Tensor) else received(value) for name, value in batch.items()}
        if not isinstance(batch, list | tuple) or len(batch) != 2:
            return batch
        x, y = batch
        return (
            self.inputs.received(x) if self.inputs is not None else x,
            self.targets.received(y) if self.targets is not None else y,
        )


def _close(ours: float | Tensor, theirs: float | Tensor, unit: float | Tensor = 1.0) -> bool:
    a, b = torch.broadcast_tensors(*(torch.as_tensor(value, dtype=torch.float64) for value in (ours, theirs)))
    allowed = CLOSE * torch.maximum(a.abs(), torch.as_tensor(unit, dtype=torch.float64).abs())
    return bool(((a - b).abs() <= allowed).all())
