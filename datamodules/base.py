"""The base of datamodules with data in memory: splits, normalisation, loaders."""

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_sgmcmc import compiling
from lightning_sgmcmc.batches.loader import ChainBatches, ResumableLoader, as_is
from lightning_sgmcmc.batches.orders import BatchOrder, MakeOrder, check_order
from lightning_sgmcmc.checks import check_count, check_within, names_arguments
from lightning_sgmcmc.datamodules.augmentation import Augmentation
from lightning_sgmcmc.namespace import pl
from lightning_sgmcmc.tables import InputColumns
from lightning_sgmcmc.tables.columns import some
from lightning_sgmcmc.tensors import sent


@dataclass
class Split:
    """The inputs (n, …) and targets (n, …) of one part of the data; `inputs` may be empty."""

    inputs: Tensor
    targets: Tensor


class TensorBatches(Dataset[tuple[Tensor, ...]]):
    """Tensors of equal length that are indexed by whole batches, without a Python loop over the items.

    Args:
        tensors: one or more tensors with the same first axis, on one device; the first holds the inputs.
        transform: applied to the inputs of each batch, for instance to turn uint8 images into normalised floats.

    Raises:
        TypeError: if one is not a tensor.
        ValueError: if there are no tensors, or their lengths or devices differ.
    """

    def __init__(self, *tensors: Tensor, transform: Callable[[Tensor], Tensor] | None = None) -> None:
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                raise TypeError(f"tensors must be torch tensors, got a {type(tensor).__name__}: use torch.as_tensor")
        if not tensors or len({len(tensor) for tensor in tensors}) != 1:
            raise ValueError(f"tensors must have the same length, got lengths {[len(tensor) for tensor in tensors]}")
        if len({tensor.device for tensor in tensors}) != 1:
            raise ValueError(f"tensors must be on the same device, got {[str(tensor.device) for tensor in tensors]}")
        self.tensors = tensors
        self.transform = transform

    @property
    def device(self) -> torch.device:
        """The device of the data."""
        return self.tensors[0].device

    @property
    def plain_tensors(self) -> tuple[Tensor, ...] | None:
        """The tensors of whose rows batches consist; None where more is done to them."""
        is_own = type(self).whole_batch is TensorBatches.whole_batch
        return self.tensors if is_own and self.transform is None else None

    def __len__(self) -> int:
        return self.tensors[0].shape[0]

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(tensor[0] for tensor in self.whole_batch([index]))

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        return self.whole_batch(indices)

    def whole_batch(self, indices: Sequence[int] | Tensor) -> tuple[Tensor, ...]:
        """Return the batch of the data with these indices."""
        index = sent(torch.as_tensor(indices), self.device)
        rest = (tensor[index] for tensor in self.tensors[1:])
        if isinstance(self.transform, Augmentation):
            return (self.transform.of_rows(self.tensors[0], index), *rest)
        inputs = self.tensors[0][index]
        return (self.transform(inputs) if self.transform is not None else inputs, *rest)


def _batches_of(trainer: pl.Trainer, each: int) -> float:
    """Return how many batches a fit takes at most, of epochs of so many."""
    epochs, steps = trainer.max_epochs, trainer.max_steps
    by_epochs = math.inf if epochs is None or epochs < 0 else epochs * each
    return min(by_epochs, math.inf if steps < 0 else steps * trainer.accumulate_grad_batches)


class ArrayDataModule(pl.LightningDataModule):
    """Base of the datamodules whose data fit in memory.

    Subclasses implement `load`, which returns the parts, normalised by the training part. After `setup`, `num_data`
    is the number of training data N, which the posterior conditions on.

    Args:
        batch_size: data per training batch, > 0; validation and test batches have four times as many, at most 512.
        drop_last: leave out the last batch of an epoch if it is smaller; N stays the whole training part.
        seed: seed of a random split.
        order: makes the order of the training data, such as `CyclicOrder` (see `ResumableLoader`).

    Raises:
        ValueError: if batch_size is below 1.
        TypeError: if order cannot be called.
    """

    num_classes: int | None = None
    """Number of classes, None in regression."""
    task: str = ""
    """What the targets are: "regression", "classes", "counts" or "censored"; "" if it is not said."""
    task_is_said: bool = True
    """Whether the user has said it, or the values suggest it."""
    are_classes_ordered: bool = True
    """Whether the labels of named classes follow an order that the data state; otherwise that of their letters."""
    target_mean: Any = None
    target_std: Any = None
    """In regression, the mean and standard deviation that the targets were standardised by; tensors (D,) for several
    targets."""

    input_scaling: tuple[Tensor, Tensor] | None = None
    """Mean and standard deviation by which `load` standardised the inputs, of the shape of one input or broadcast to
    it; None if `load` does not tell, or if each batch is normalised by `transform`."""

    def __init__(self, batch_size: int, drop_last: bool = False, seed: int = 0, order: MakeOrder = BatchOrder) -> None:
        super().__init__()
        check_count("batch_size", batch_size, optional=False)
        check_count("seed", seed, least=0, optional=False)
        check_order(order)
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.seed = seed
        self.order = order
        self._splits: tuple[Split, Split, Split] | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        names_arguments(cls)

    def __str__(self) -> str:
        if self._splits is None:
            return f"{type(self).__name__}, whose data are read by setup()"
        train, val, test = (f"{len(split.targets):,}" for split in self._splits)
        return f"{type(self).__name__}: {train} training, {val} validation and {test} test data"

    @abstractmethod
    def load(self) -> tuple[Split, Split, Split]:
        """Return the training, validation and test parts."""

    def transform(self) -> Callable[[Tensor], Tensor] | None:
        """Return the function applied to the inputs of each batch, or None."""
        return None

    def setup(self, stage: str) -> None:
        """Read and split the data, once."""
        if self._splits is None:
            self._splits = self.load()

    @property
    def splits(self) -> tuple[Split, Split, Split]:
        """The training, validation and test parts, after `setup`."""
        if self._splits is None:
            raise RuntimeError(
                f"{type(self).__name__} has no data before setup(): call setup(), or let the trainer call it"
            )
        return self._splits

    @property
    def input_columns(self) -> InputColumns | None:
        """What the inputs are and how they were scaled, after `setup`, for a fit's store; None if `load` does not tell
        by `input_scaling`."""
        if self.input_scaling is None or self._splits is None or not _fits(self.input_scaling, self.input_shape):
            return None
        return InputColumns(shape=self.input_shape).scaled_by(*self.input_scaling)

    def normalise_as(self, training: pl.LightningDataModule | None) -> bool:
        """Normalise the inputs by the statistics of another datamodule's training data, after `setup` of both.

        A network sees data of another distribution as it would see them in use: normalised like its training data.

        Returns:
            whether it could: both must have an `input_scaling` that fits these inputs.

        Raises:
            ValueError: if both have names of columns, and these differ.
        """
        ours, theirs = self.input_scaling, getattr(training, "input_scaling", None)
        _check_names(self, training)
        if ours is None or theirs is None or not _fits(theirs, self.input_shape):
            return False
        splits = []
        for part in self.splits:
            raw = part.inputs.double() * ours[1] + ours[0]
            splits.append(Split(((raw - theirs[0]) / theirs[1]).float(), part.targets))
        self._splits, self.input_scaling = (splits[0], splits[1], splits[2]), theirs
        return True

    @property
    def normalises(self) -> bool:
        """Whether the inputs are normalised by statistics of this datamodule's own."""
        return self.input_scaling is not None

    @property
    def num_data(self) -> int:
        """N, the number of training data, after `setup`."""
        return len(self.splits[0].targets)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input, after `setup`."""
        return tuple(self.splits[0].inputs.shape[1:])

    def train_transform(self) -> Callable[[Tensor], Tensor] | None:
        """Return the function applied to the inputs of each training batch.

        Augmentation draws from the default generator of the inputs' device, which the loader seeds before each batch.
        """
        return self.transform()

    def training_data(self) -> TensorBatches:
        """Return the training data without augmentation, for full-data likelihoods."""
        return TensorBatches(self.splits[0].inputs, self.splits[0].targets, transform=self.transform())

    def _loader(self, part: int, train: bool = False) -> Any:
        split = self.splits[part]
        if len(split.targets) == 0:
            return []  # how Lightning expresses that there is no loader
        transform = self.train_transform() if train else self.transform()
        dataset = TensorBatches(split.inputs, split.targets, transform=transform)
        if not train:
            return evaluation_loader(dataset, evaluation_size(self.batch_size))
        loader = ResumableLoader(
            dataset, self.batch_size, drop_last=self.drop_last, order=self.order, **replica_of(self)
        )
        if isinstance(transform, Augmentation) and self.trainer is not None:
            transform.compiles = _batches_of(self.trainer, len(loader)) >= compiling.WORTH_ON_CUDA
        return loader

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a batch to the device; a batch that is there already is returned without a search through it."""
        if is_on(batch, device):
            return batch
        if device.type == "cuda" and type(batch) is tuple and all(type(part) is Tensor for part in batch):
            return tuple(sent(part, device) for part in batch)
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def train_dataloader(self) -> Any:
        return self._loader(0, train=True)

    def val_dataloader(self) -> Any:
        return self._loader(1)

    def test_dataloader(self) -> Any:
        return self._loader(2)

    def predict_dataloader(self) -> Any:
        return self._loader(2)


names_arguments(ArrayDataModule)


def evaluation_size(batch_size: int) -> int:
    """Return the data of a validation batch: four times those of a training batch, since no gradient keeps what the
    layers compute, and 512 at most if these are fewer; a pass in larger batches takes less time."""
    return max(batch_size, min(4 * batch_size, 512))


def evaluation_loader(dataset: TensorBatches, batch_size: int) -> DataLoader[Any]:
    """Return a loader of whole batches in the data's order, whose sampler the trainer can replace."""
    return DataLoader(dataset, batch_size=batch_size, collate_fn=as_is)


def _check_names(ours: ArrayDataModule, training: Any) -> None:
    """Raise unless two tables have the same columns in one order, if both have names."""
    names = [getattr(getattr(data, "input_columns", None), "names", ()) for data in (ours, training)]
    if all(names) and names[0] != names[1]:
        raise ValueError(
            f"{type(ours).__name__} has the columns {some(names[0])}, and the training data {some(names[1])}: pass "
            "TableDataModule(…, like=the training data's datamodule)"
        )


def _fits(scaling: tuple[Tensor, Tensor], shape: tuple[int, ...]) -> bool:
    """Return whether a scaling broadcasts to inputs of a shape."""
    try:
        return all(torch.broadcast_shapes(part.shape, shape) == shape for part in scaling)
    except RuntimeError:
        return False


def is_on(batch: Any, device: torch.device) -> bool:
    """Return whether a batch is a tuple of tensors on a device, or such tuples for several chains."""
    if type(batch) is ChainBatches:
        return all(is_on(part, device) for part in batch)
    return type(batch) is tuple and all(type(part) is Tensor and part.device == device for part in batch)


def replica_of(datamodule: pl.LightningDataModule) -> dict[str, Any]:
    """Return `num_replicas` and `rank` of this process among those that share a chain's data."""
    strategy = getattr(datamodule.trainer, "strategy", None)
    kwargs = getattr(strategy, "distributed_sampler_kwargs", None) or {}
    return {name: kwargs[name] for name in ("num_replicas", "rank") if name in kwargs}


def check_fractions(val_fraction: float, test_fraction: float = 0.0) -> None:
    """Raise unless both fractions and their sum are in [0, 1)."""
    check_within("val_fraction", val_fraction, "[0, 1)")
    check_within("test_fraction", test_fraction, "[0, 1)")
    check_within("val_fraction + test_fraction", val_fraction + test_fraction, "[0, 1)")


def random_split(
    count: int, fractions: tuple[float, ...], seed: int, labels: Tensor | None = None, check: bool = True
) -> list[Tensor]:
    """Return index sets, the rest first and then one for each fraction, as a function of the arguments alone.

    Args:
        labels: if given, the shares hold within each class (stratified), shape (count,).
        check: whether parts must have about their share; a caller that has a message of its own checks them itself.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(count, generator=generator)
    groups = [order] if labels is None else [order[labels[order] == label] for label in labels.unique()]
    parts: list[list[Tensor]] = [[] for _ in range(len(fractions) + 1)]
    for group in groups:
        start = 0
        for part, fraction in enumerate(fractions, start=1):
            stop = start + round(fraction * len(group))
            parts[part].append(group[start:stop])
            start = stop
        parts[0].append(group[start:])
    found = [torch.cat(part).sort().values for part in parts]
    wanted = [fraction * count / 2 for fraction in fractions]
    if check and (len(found[0]) == 0 or any(len(part) < least for part, least in zip(found[1:], wanted, strict=True))):
        what = "" if labels is None else f" in {len(groups)} classes, each of which is split,"
        raise ValueError(
            f"{count} data{what} leave parts of {', '.join(str(len(part)) for part in found)} data for the shares "
            f"{', '.join(f'{share:.3g}' for share in (1 - sum(fractions), *fractions))}: pass fractions that suit "
            "them (0 for no part), or more data"
        )
    return found


def standardise(train: Tensor, *others: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return all tensors standardised by the training part, column by column, and its mean and standard deviation.

    A column that is constant in the training part is only centred. NaN, a target that is not observed, stays NaN and
    does not count.
    """
    mean = train.nanmean(0)
    distance = (train - mean).abs()
    largest = distance.nan_to_num(0.0, torch.inf).amax(0).clamp_min(torch.finfo(train.dtype).tiny)
    std = largest * (distance / largest).square().nanmean(0).sqrt()  # whatever the unit: no square over- or underflows
    varies = std > 1e-12 * mean.abs()
    std = torch.where(varies, std, torch.ones_like(std))
    value = train.nan_to_num(-torch.inf, torch.inf, -torch.inf).amax(0)  # the mean of equal numbers is rounded
    mean = torch.where(varies | mean.isnan(), mean, value)
    return [((part - mean) / std).float() for part in (train, *others)], mean, std


def with_intercept(inputs: list[Tensor], scaling: tuple[Tensor, Tensor]) -> tuple[list[Tensor], tuple[Tensor, Tensor]]:
    """Return inputs with a first column of ones, and their scaling, which leaves that column as it is."""
    mean, std = torch.cat([scaling[0].new_zeros(1), scaling[0]]), torch.cat([scaling[1].new_ones(1), scaling[1]])
    return [torch.cat([torch.ones(len(part), 1), part], 1) for part in inputs], (mean, std)
