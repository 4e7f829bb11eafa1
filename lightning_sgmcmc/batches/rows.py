"""The training rows of a run: which data the posterior conditions on, and how the loader draws them."""

import copy
import itertools
import math
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils import data as torch_data
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset, default_collate

from lightning_sgmcmc.batches.loader import ResumableLoader, as_is
from lightning_sgmcmc.batches.orders import BatchOrder, CyclicOrder, Permutation, SymmetricOrder
from lightning_sgmcmc.batches.switching import SwitchingBatchSampler, SwitchingOrder
from lightning_sgmcmc.namespace import pl
from lightning_sgmcmc.seeding import derive_seed, reseed_everything, unchanged_generators

if TYPE_CHECKING:
    from pytorch_lightning.overrides.distributed import UnrepeatedDistributedSampler
else:
    UnrepeatedDistributedSampler = pl.overrides.distributed.UnrepeatedDistributedSampler


@dataclass(frozen=True)
class TrainingRows:
    """The rows of a training loader; one object answers for N, a full pass and a fresh batch.

    Attributes:
        dataset: what holds the rows; None for a stream.
        indices: of the rows in the data set, each once; None if it is not known which the loader draws.
        count: N as far as the loader shows it; None if it does not.
        source: what `count` is, or why it is unknown.
        is_random: whether every batch is a random part of the rows; otherwise batches may come in a fixed order.
        in_order: whether batches are known to come in the same order in every epoch.
        replacement: whether rows are drawn with replacement.
        batch_size: rows of a batch of this process; of the largest, if batches are not even.
        is_even: whether all batches but the last have `batch_size` rows.
        share: rows of an epoch of this process.
        sizes: rows of each batch of an epoch of this process; None if unknown, or by `batch_size` and `share`.
        drop_last: whether a short last batch is left out.
        collate_fn: makes a batch of rows.
        whole: whether an item of the data set is a batch itself.
        is_observed: whether all targets are observed, as far as known; else `count` is that of the observed ones.
        loading: the arguments by which a `DataLoader` of the rows has the training loader's workers and pinned memory.
    """

    dataset: Any = None
    indices: Sequence[int] | None = None
    count: int | None = None
    source: str = ""
    is_random: bool = False
    in_order: bool = False
    replacement: bool = False
    batch_size: int | None = None
    is_even: bool = True
    share: int | None = None
    sizes: Sequence[int] | None = None
    drop_last: bool = False
    collate_fn: Any = None
    whole: bool = False
    is_observed: bool = True
    loading: Mapping[str, Any] = field(default_factory=dict)

    @property
    def are_tensors(self) -> bool:
        """Whether a batch consists of rows of tensors in memory, to which nothing more is done."""
        plain = type(self.dataset) is TensorDataset or getattr(self.dataset, "plain_tensors", None) is not None
        return plain and self.collate_fn in (default_collate, as_is) and not self.loading.get("num_workers")

    def size_at(self, batch: int) -> int | None:
        """Return the rows of a batch of an epoch in this process, None if unknown."""
        if self.sizes is not None:
            return self.sizes[batch] if batch < len(self.sizes) else None
        if self.batch_size is None or self.share is None or not self.is_even:
            return None
        left = self.share - batch * self.batch_size
        return min(self.batch_size, left) if left > 0 else None

    def sizes_of(self, batches: int) -> list[int] | None:
        """Return the rows of the first batches of an epoch, None if they are unknown."""
        sizes = [self.size_at(batch) for batch in range(batches)]
        return None if None in sizes else [size for size in sizes if size is not None]

    def loader(
        self,
        places: Sequence[int],
        dataset: Any = None,
        batch_size: int | None = None,
        *,
        order: Permutation | None = None,
        passes: int = 0,
    ) -> DataLoader[Any]:
        """Return a loader of some rows, by their numbers from 0 or their places in an order, by default in training's
        batches; it is one of so many `passes` that share training's workers, and with 0 loads in this process."""
        assert self.indices is not None
        size = None if self.whole else batch_size or self.batch_size or 1
        part = RowsAt(self.dataset if dataset is None else dataset, self.indices, places, order, size or 1)
        options: dict[str, Any] = dict(self.loading) if passes else {}
        if options.get("num_workers"):
            options["num_workers"] = math.ceil(options["num_workers"] / passes)
        return DataLoader(part, batch_size=size, collate_fn=self.collate_fn, **options)


class RowsAt(torch_data.Dataset[Any]):
    """Rows of a data set by their places in an order of them, which are looked up for one batch at a time."""

    def __init__(
        self, dataset: Any, indices: Sequence[int], places: Sequence[int], order: Permutation | None, batch_size: int
    ) -> None:
        self._dataset, self._indices, self._places, self._order = dataset, indices, places, order
        self._batch_size = batch_size
        self.seed: tuple[int | str, ...] | None = None
        """A seed and names, by which and by a batch's number a worker seeds its generators before each batch."""

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, number: int) -> Any:
        return self._dataset[self._chosen([number])[0]]

    def __getitems__(self, numbers: list[int]) -> Any:
        chosen = self._chosen(numbers)
        fetch = getattr(self._dataset, "__getitems__", None)
        return fetch(chosen) if callable(fetch) else [self._dataset[index] for index in chosen]

    def _chosen(self, numbers: list[int]) -> list[int]:
        if self.seed is not None and torch_data.get_worker_info() is not None:
            (seed, *names), batch = self.seed, numbers[0] // self._batch_size
            reseed_everything(derive_seed(int(seed), *names, batch))
            if batch == 0:
                torch.empty((), dtype=torch.int64).random_()  # as the pass of a loader without workers begins
        chosen = [self._places[number] for number in numbers]
        if self._order is not None:
            chosen = self._order[chosen].tolist()
        return chosen if isinstance(self._indices, range) else [self._indices[place] for place in chosen]


def num_data_of(trainer: pl.Trainer, given: int | None, module: str, sets_up: bool) -> int | None:
    """Return N, the given one if there is one; None where data are those of a module that makes them in its `setup`,
    which comes later."""
    if sets_up and isinstance(trainer.fit_loop._data_source.instance, pl.LightningModule):
        return given
    return resolve_num_data(given, trainer, module)[0]


def resolve_num_data(
    given: int | None, trainer: pl.Trainer, module: str, rows: TrainingRows | None = None
) -> tuple[int, bool]:
    """Return N, and whether the user said it: the given one, else the datamodule's or the number of rows, which are
    looked up unless they are given."""
    rows = training_rows(trainer) if rows is None else rows
    datamodule = getattr(trainer, "datamodule", None)
    declared = getattr(datamodule, "num_data", None)
    if rows.count is not None and rows.indices is not None and declared == len(rows.indices):
        declared = None
    if given is not None and declared is not None and given != declared:
        raise ValueError(contradiction(given, f"{type(datamodule).__name__}.num_data", int(declared)))
    known = given if given is not None else declared
    if known is not None:
        return int(known), True
    if rows.count is None:
        raise ValueError(f"the number of training data is not known ({rows.source}): pass num_data=… to {module}")
    return rows.count, False


def contradiction(given: int, source: str, found: int | None) -> str:
    """Return the message that a given N is wrong."""
    return (
        f"num_data={given} contradicts {source}, which says {found}; leave num_data out (to temper the posterior, set "
        "temperature)"
    )


def training_rows(trainer: pl.Trainer) -> TrainingRows:
    """Return the rows of a run's training loader, without those whose target in memory is not observed."""
    if trainer.train_dataloader is None:
        trainer.fit_loop.setup_data()
    loader, likelihood = trainer.train_dataloader, getattr(trainer.lightning_module, "likelihood", None)
    rows = rows_of(loader)
    if isinstance(loader, ResumableLoader) and float(trainer.num_training_batches) != len(loader):
        rows = replace(rows, share=None, sizes=None)  # the trainer's epochs begin anywhere in the order
    if likelihood is None or rows.count is None:
        return rows
    key = (rows.count, likelihood.missing)
    known = _OBSERVED.get(loader)
    if known is None or known[0] != key:
        known = _OBSERVED[loader] = (key, _observed(rows, likelihood))
    if known[1] in (0, rows.count):  # without any the first batch raises an error
        return rows
    return replace(rows, count=known[1], source="the number of observed targets", is_observed=False)


def _observed(rows: TrainingRows, likelihood: Any) -> int:
    """Return the number of rows with an observed target, of all rows where targets are not in memory."""
    target, observed = targets_in_memory(rows.dataset), None
    if target is not None and rows.indices is not None:
        are_first = isinstance(rows.indices, range)
        observed = likelihood.observed(target[: len(rows.indices)] if are_first else target[torch.tensor(rows.indices)])
    assert rows.count is not None
    return rows.count if observed is None else int(observed.sum())


def targets_in_memory(dataset: Any) -> Tensor | None:
    """Return the targets of a data set of pairs of tensors, in its order; None for another one."""
    if isinstance(dataset, Subset):
        whole = targets_in_memory(dataset.dataset)
        return None if whole is None else whole[torch.as_tensor(dataset.indices)]
    if isinstance(dataset, torch_data.ConcatDataset):
        parts = [targets_in_memory(part) for part in dataset.datasets]
        known = [part for part in parts if part is not None]
        alike = len({part.shape[1:] for part in known}) == 1 and len({part.device for part in known}) == 1
        return torch.cat(known) if alike and len(known) == len(parts) else None
    tensors = getattr(dataset, "tensors", None)
    return tensors[1] if isinstance(tensors, tuple) and len(tensors) == 2 else None


NESTED = (Subset, torch_data.ConcatDataset)
"""Data sets that hold rows of others."""


def repetitions(rows: TrainingRows) -> int:
    """Return how many of the rows repeat others, as far as indices, `Subset` and `ConcatDataset` show."""
    if rows.indices is None or (isinstance(rows.indices, range) and not isinstance(rows.dataset, NESTED)):
        return 0
    found: dict[int, list[Tensor]] = {}
    _trace(rows.dataset, rows.indices, found)
    return sum(len(drawn) - len(drawn.unique()) for drawn in map(torch.cat, found.values()))


def _trace(dataset: Any, indices: Any, found: dict[int, list[Tensor]]) -> None:
    """Add the indices of rows in the data sets that hold them, by their identity."""
    if isinstance(indices, range):
        indices = torch.arange(indices.start, indices.stop, indices.step)
    drawn = torch.as_tensor(indices if isinstance(indices, Tensor) else list(indices), dtype=torch.int64)
    drawn = torch.where(drawn < 0, drawn + (len(dataset) if hasattr(dataset, "__len__") else 0), drawn)
    if isinstance(dataset, Subset):
        _trace(dataset.dataset, torch.as_tensor(dataset.indices, dtype=torch.int64)[drawn], found)
    elif isinstance(dataset, torch_data.ConcatDataset):
        start = 0
        for part, stop in zip(dataset.datasets, dataset.cumulative_sizes, strict=True):
            _trace(part, drawn[(drawn >= start) & (drawn < stop)] - start, found)
            start = stop
    else:
        found.setdefault(id(dataset), []).append(drawn)


_OBSERVED: "WeakKeyDictionary[Any, tuple[Any, int]]" = WeakKeyDictionary()
"""The number of observed targets of each loader's rows."""
_KNOWN: "WeakKeyDictionary[Any, tuple[Any, TrainingRows]]" = WeakKeyDictionary()
"""The rows of each loader and what they depend on; an own batch sampler is looked through once."""


def rows_of(loader: Any) -> TrainingRows:
    """Return the rows of a training loader."""
    if isinstance(loader, ResumableLoader):
        key = loader.num_data, len(loader), loader.spec_of(loader.chains[0])
        known = _KNOWN.get(loader)
        if known is None or known[0] != key:
            known = _KNOWN[loader] = (key, _of_resumable(loader))
        return known[1]
    if not isinstance(loader, DataLoader):
        return TrainingRows(source="the training loader is not a torch DataLoader")
    length = len(loader.dataset) if hasattr(loader.dataset, "__len__") else -1
    known = _KNOWN.get(loader)
    if known is None or known[0] != length:
        known = _KNOWN[loader] = (length, _of_torch(loader))
    return known[1]


def _of_resumable(loader: ResumableLoader) -> TrainingRows:
    order, count = loader.order_of(loader.chains[0]), loader.num_data
    is_own = type(order).indices is not BatchOrder.indices
    return TrainingRows(
        dataset=loader.dataset,
        indices=range(count),
        count=count,
        source="the training data set's length",
        is_random=not order.repeats,
        in_order=isinstance(order, CyclicOrder),
        batch_size=loader.batch_size,
        # Otherwise an epoch begins anywhere in the order.
        share=math.ceil(count / loader.num_replicas) if len(loader) == order.batches_per_epoch else None,
        sizes=_Sizes(order) if is_own and len(loader) == order.batches_per_epoch else None,
        drop_last=loader.drop_last,
        collate_fn=loader.collate_fn,
        loading=_loading(loader) if loader.num_workers else {},
    )


class _Sizes(Sequence[int]):
    """The number of data in each batch of an order's first epoch."""

    def __init__(self, order: BatchOrder) -> None:
        self._order = order

    def __len__(self) -> int:
        return self._order.batches_per_epoch

    def __getitem__(self, batch: Any) -> Any:
        if not 0 <= batch < len(self):
            raise IndexError(batch)
        return len(self._order.indices(batch))


def _loading(loader: Any) -> dict[str, Any]:
    """Return the arguments of a loader's workers and pinned memory."""
    of_workers = ("timeout", "worker_init_fn", "multiprocessing_context") if loader.num_workers else ()
    names = ("num_workers", "pin_memory", *of_workers)
    return {name: getattr(loader, name) for name in names if hasattr(loader, name)}


def _of_torch(loader: DataLoader[Any]) -> TrainingRows:
    dataset, collate_fn = loader.dataset, loader.collate_fn
    if not hasattr(dataset, "__len__"):
        return TrainingRows(source="the training data set has no length", collate_fn=collate_fn)
    if isinstance(dataset, torch_data.IterableDataset):
        return TrainingRows(source="a stream's length may be an estimate", collate_fn=collate_fn)
    by_list = loader.batch_size is None and loader.batch_sampler is None
    if loader.batch_size is not None:
        rows = replace(_drawn_by(loader.sampler, dataset), batch_size=loader.batch_size, drop_last=loader.drop_last)
    elif not by_list:
        rows = _drawn_in_batches(loader.batch_sampler, dataset)
    elif isinstance(loader.sampler, torch_data.BatchSampler):  # the data set returns whole batches of indices
        rows = _drawn_in_batches(loader.sampler, dataset)
    else:
        source = "with batch_size=None an item of the training data set is a batch"
        if isinstance(loader.sampler, DistributedSampler):
            source += (
                ", and with several processes Lightning replaces batch_sampler=BatchSampler(…) by batch_size=None, so "
                "give the loader batch_size= and sampler= instead"
            )
        return TrainingRows(
            dataset=dataset,
            indices=_drawn_by(loader.sampler, dataset).indices,
            source=source,
            collate_fn=collate_fn,
            whole=True,
            loading=_loading(loader),
        )
    return replace(
        rows,
        dataset=_Single(dataset) if by_list else dataset,
        count=None if rows.indices is None else len(rows.indices),
        source=rows.source or "the training data set's length",
        collate_fn=operator.itemgetter(0) if by_list else collate_fn,
        loading=_loading(loader),
    )


def _drawn_in_batches(batches: Any, dataset: Any) -> TrainingRows:
    """Return what a batch sampler draws in an epoch, and the sizes of its batches."""
    if isinstance(batches, SwitchingBatchSampler):
        number = len(batches)
        size = len(next(iter(copy.deepcopy(batches))))
        drawn = _all_of(range(batches.num_data), is_random=True, share=size * number)
        return replace(drawn, batch_size=size, sizes=[size] * number)
    iterates = type(batches).__iter__
    if isinstance(batches, torch_data.BatchSampler) and iterates is torch_data.BatchSampler.__iter__:
        drawn = _drawn_by(batches.sampler, dataset)
        return replace(drawn, batch_size=batches.batch_size, drop_last=batches.drop_last)
    epoch = _epoch_of(batches, dataset)
    if epoch is None:
        return _judged(batches, None, dataset)
    sizes = [len(batch) if isinstance(batch, Sequence) else 1 for batch in epoch]
    drawn = _judged(batches, [index for batch in epoch for index in tree_leaves(batch)], dataset)
    return replace(drawn, batch_size=max(sizes, default=1), is_even=False)


def _all_of(indices: Sequence[int], share: int | None = None, **kind: Any) -> TrainingRows:
    """Return all of some rows; `share` is the number of an epoch's draws if it is another one."""
    return TrainingRows(indices=indices, share=len(indices) if share is None else share, **kind)


def _drawn_by(sampler: Any, dataset: Any) -> TrainingRows:
    """Return what a sampler draws in an epoch; `indices` is None if unknown, with the reason in `source`."""
    if isinstance(sampler, DistributedSampler):
        wrapped = getattr(sampler.dataset, "_sampler", None)
        whole = range(len(sampler.dataset))  # type: ignore[arg-type]
        drawn = _all_of(whole, is_random=sampler.shuffle, in_order=not sampler.shuffle)
        if wrapped is not None:
            drawn = _drawn_by(wrapped, dataset)
        padded = not isinstance(sampler, UnrepeatedDistributedSampler)
        number = sampler.total_size if padded and drawn.indices is not None else drawn.share
        return replace(drawn, share=None if number is None else math.ceil(number / sampler.num_replicas))
    iterates = type(sampler).__iter__
    if isinstance(sampler, torch_data.RandomSampler) and iterates is torch_data.RandomSampler.__iter__:
        whole = range(len(sampler.data_source))
        return _all_of(whole, sampler.num_samples, is_random=True, replacement=sampler.replacement)
    if isinstance(sampler, torch_data.SequentialSampler) and iterates is torch_data.SequentialSampler.__iter__:
        return _all_of(range(len(sampler.data_source)), in_order=True)
    if isinstance(sampler, torch_data.SubsetRandomSampler) and iterates is torch_data.SubsetRandomSampler.__iter__:
        source = f"the {type(sampler).__name__}'s number of indices"
        return _all_of([int(index) for index in sampler.indices], is_random=True, source=source)
    if isinstance(sampler, torch_data.WeightedRandomSampler):
        weights = torch.as_tensor(sampler.weights)
        if bool((weights == weights[0]).all()):
            whole = range(len(weights))
            return _all_of(whole, sampler.num_samples, is_random=True, replacement=sampler.replacement)
        raise ValueError(
            "the training loader draws by a WeightedRandomSampler, whose weights would count some data several times, "
            "so the posterior would be that of other data: pass shuffle=True, and weigh classes in decisions on the "
            "predicted probabilities"
        )
    return _judged(sampler, _epoch_of(sampler, dataset), dataset)


def repetition(loader: Any, batch_idx: int, limit: float) -> tuple[int | None, float]:
    """Return the rows of this rank's batch if its last one is there only to make the ranks' shares equally long, else
    None, and all ranks' rows over the data in them, of a loader of which `limit` batches are used."""
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler) or loader.batch_size is None or limit < len(loader):
        return None, 1.0
    dataset: Any = sampler.dataset
    count, own = len(dataset), len(sampler)
    is_last = batch_idx == len(loader) - 1 and (own - 1) * sampler.num_replicas + sampler.rank >= count
    ratio = own * sampler.num_replicas / count
    return own - batch_idx * loader.batch_size if is_last else None, ratio


def _judged(sampler: Any, drawn: Sequence[int] | None, dataset: Any) -> TrainingRows:
    """Return what an epoch of an own sampler shows, None if unknown: all rows once, or nothing certain."""
    source = f"the training loader draws by a {type(sampler).__name__}"
    if drawn is None:
        return TrainingRows(source=source)
    if len(drawn) == len(dataset) == len({int(index) for index in drawn}):
        return _all_of(range(len(dataset)))
    times = set(Counter(int(index) for index in drawn).values())
    if len(times) > 1:
        source += (
            f", some of {len(dataset)} rows {max(times)} times in an epoch and others less often; if it balances "
            "classes, the posterior is that of other data, so use shuffle=True, and weigh classes in decisions on the "
            "predicted probabilities"
        )
        return TrainingRows(source=source, share=len(drawn))
    source += (
        f", {len(drawn)} of {len(dataset)} rows in an epoch, and whether these are all data is not known; for a part "
        "of a data set pass Subset(dataset, indices) to the loader"
    )
    return TrainingRows(source=source, share=len(drawn))


def _epoch_of(sampler: Iterable[Any], dataset: Any) -> list[Any] | None:
    """Return an epoch of a copy of a sampler, None if it cannot be copied or does not end."""
    most = 2 * len(dataset) + 1000
    try:
        with unchanged_generators([]):
            copied = copy.deepcopy(sampler, {id(dataset): dataset})
            epoch = list(itertools.islice(copied, most + 1))
    except Exception:  # whatever a user's sampler raises outside its loader
        return None
    return epoch if len(epoch) <= most else None


class _Single(torch_data.Dataset[Any]):
    """A data set that is indexed by lists, one row at a time."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self._dataset[indices]]


# -- reversal ----------------------------------------------------------------------------------------------------------


def fault_of_order(trainer: pl.Trainer, steps: int) -> str | None:
    """Return why the batches of trajectories of so many steps are likelier in one direction and the remedy, or None."""
    # As likely in both directions are independent batches, those of whole epochs in random order, parts of one such
    # epoch, and whole pairs of `SymmetricOrder`.
    if not _order_matters(trainer):
        return None
    loader: Any = trainer.train_dataloader
    epoch, batches = trainer.num_training_batches, steps * trainer.accumulate_grad_batches
    order = _order_of(loader)
    if isinstance(order, SymmetricOrder):
        pair = 2 * order.batches_per_epoch
        if epoch == order.batches_per_epoch and batches % pair == 0:
            return None
        return (
            f"SymmetricOrder goes forwards and backwards in two epochs, and a trajectory of {steps} steps cuts that: "
            f"pass every_n_steps={pair // trainer.accumulate_grad_batches}"
        )
    if getattr(order, "repeats", False) or training_rows(trainer).in_order:
        return "the batches come in the same order in every epoch: shuffle the training data, or use SymmetricOrder"
    if isinstance(order, SwitchingOrder):
        return "SwitchingOrder holds a batch beyond a trajectory's end: use the default order of the data"
    of_order = epoch if order is None else order.batches_per_epoch
    for length in (int(epoch), int(of_order)):
        if length % batches and batches % length:
            return (
                f"a trajectory of {steps} steps takes {batches} batches, which cut an epoch of {length}: pass an "
                "every_n_steps whose batches divide an epoch, or are several epochs"
            )
    return None


def fault_of_start(trainer: pl.Trainer, steps: int, batch_idx: int) -> str | None:
    """Return why a trajectory of so many steps, which fit the epochs, may not begin with a batch, None if it may."""
    if not _order_matters(trainer):
        return None
    accumulated = trainer.accumulate_grad_batches
    first, epoch = batch_idx // accumulated, math.ceil(trainer.num_training_batches / accumulated)
    if first % min(steps, epoch):
        return f"a trajectory would begin with step {first + 1} of an epoch and cut the next"
    if isinstance(_order_of(trainer.train_dataloader), SymmetricOrder) and trainer.current_epoch % 2:
        return "a trajectory would begin with a way back of SymmetricOrder"
    return None


def has_short_steps(trainer: pl.Trainer) -> bool:
    """Return whether the last step of an epoch is known to have fewer data than the others."""
    if not _order_matters(trainer):
        return False
    epoch, accumulated = trainer.num_training_batches, trainer.accumulate_grad_batches
    if epoch % accumulated:
        return True
    sizes = training_rows(trainer).sizes_of(int(epoch))
    return sizes is not None and len({*sizes}) > 1


def _order_matters(trainer: pl.Trainer) -> bool:
    """Return whether an epoch is known to have several steps with different data."""
    epoch = trainer.num_training_batches
    several = math.isfinite(epoch) and epoch > trainer.accumulate_grad_batches
    return several and not training_rows(trainer).replacement


def _order_of(loader: Any) -> BatchOrder | None:
    return loader.order_of(loader.chains[0]) if isinstance(loader, ResumableLoader) else None


def stream_of(trainer: pl.Trainer, rows: TrainingRows | None = None) -> Any:
    """Return the data set of the training loader if it has no rows that can be indexed, else None; its rows are looked
    up unless they are given."""
    rows = training_rows(trainer) if rows is None else rows
    dataset = getattr(trainer.train_dataloader, "dataset", None)
    return dataset if rows.dataset is None else None
