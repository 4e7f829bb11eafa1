"""Scores of chosen samples on data that all processes share, without a trainer."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_sgmcmc.batches.inputs import digest, leaves_of
from lightning_sgmcmc.batches.loader import with_few_lengths
from lightning_sgmcmc.chains.execution import StatelessCall, borrowed, cloned
from lightning_sgmcmc.chains.samples import HostCopies, PosteriorSample
from lightning_sgmcmc.chains.together import MOST, States, TogetherCall
from lightning_sgmcmc.evaluation.averages import Terms
from lightning_sgmcmc.likelihoods import Likelihood
from lightning_sgmcmc.model import EnergyModel, overrides
from lightning_sgmcmc.namespace import fabric, pl, rank_zero_warn

sized_len = fabric.utilities.data.sized_len
is_overridden = pl.utilities.model_helpers.is_overridden

HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
"""Lightning's hooks of a batch, of the datamodule if it defines them and else of the module."""


class Validating:
    """What a hook finds as its trainer outside of a run: it validates, and the rest is the last trainer's, if any."""

    training = testing = predicting = sanity_checking = False
    validating = evaluating = True

    def __init__(self, trainer: pl.Trainer | None) -> None:
        self._trainer = trainer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)


def through_hooks(batch: Any, model: EnergyModel, datamodule: pl.LightningDataModule | None = None) -> Any:
    """Return a batch after the user's hooks, on the model's device, as a trainer evaluates it."""
    places = [(model, "_trainer")] if datamodule is None else [(model, "_trainer"), (datamodule, "trainer")]
    before = [getattr(owner, name) for owner, name in places]
    with borrowed(model):
        try:
            for (owner, name), trainer in zip(places, before, strict=True):
                setattr(owner, name, Validating(trainer))
            for name in HOOKS:
                of_data = datamodule is not None and is_overridden(name, datamodule)
                hook = getattr(datamodule if of_data else model, name)
                batch = hook(batch, model.device, 0) if name == "transfer_batch_to_device" else hook(batch, 0)
        finally:
            for (owner, name), trainer in zip(places, before, strict=True):
                setattr(owner, name, trainer)
    return batch


class HookedLoader:
    """A loader outside a trainer whose batches pass the user's hooks, as in `trainer.test`."""

    def __init__(self, loader: Any, model: EnergyModel, datamodule: pl.LightningDataModule | None) -> None:
        self._loader, self._model, self._datamodule = loader, model, datamodule
        self.sampler, self.batch_sampler = (getattr(loader, name, None) for name in ("sampler", "batch_sampler"))
        self.dataset = getattr(loader, "dataset", None)

    def __iter__(self) -> Iterator[Any]:
        return (through_hooks(batch, self._model, self._datamodule) for batch in self._loader)


def hooked(batches: Any, model: EnergyModel, datamodule: pl.LightningDataModule | None = None) -> Any:
    """Return a loader of batches as a trainer would read it; lists and iterators are what the network receives."""
    own = [model] if datamodule is None else [model, datamodule]
    plain = isinstance(batches, list | tuple | Iterator | HookedLoader)
    if plain or not any(is_overridden(name, one) for name in HOOKS for one in own):
        return batches
    return HookedLoader(batches, model, datamodule)


@dataclass(frozen=True)
class EvaluationShare:
    """This process's share of a loader's data, of which a number of batches is used, perhaps infinite.

    Of W `replicas`, rank r has the data r, r + W, …; with 0 each process has its own data. `num_data` is that of all
    shares without the repetitions that make them equally long.
    """

    loader: Any
    limit: float
    replicas: int = 0
    num_data: int = 0
    dataloader_idx: int = 0

    def batches(self, trainer: pl.Trainer, module: EnergyModel) -> Iterator[Any]:
        """Yield the share's batches in the run's precision, on the module's device, through the user's batch hooks."""
        stop = int(self.limit) if math.isfinite(self.limit) else None
        index = self.dataloader_idx
        for batch in itertools.islice(self.loader, stop):
            converted = trainer.precision_plugin.convert_input(batch)
            stage = trainer.state.stage
            try:
                if trainer.training:  # samples are evaluated between training steps; no hook is to augment their data
                    trainer.validating = True
                converted = trainer.lightning_module._on_before_batch_transfer(converted, dataloader_idx=index)
                converted = trainer.strategy.batch_to_device(converted, module.device, dataloader_idx=index)
            finally:
                trainer.state.stage = stage
            yield converted

    def fitting(self, of_batch: Sequence[Any]) -> int:
        """Return how many samples have scores that fit into `LARGEST_SCORES` together, and at least one, by the scores
        of each on the first batch of the share; the same number in all processes."""
        batches = self.limit if math.isfinite(self.limit) else sized_len(self.loader) or 1
        alone = self.replicas == 1 or not (torch.distributed.is_available() and torch.distributed.is_initialized())
        processes = 1 if alone else torch.distributed.get_world_size()
        tensors = [leaf for leaf in pytree.tree_leaves(of_batch[0]) if isinstance(leaf, Tensor)]
        size = sum(tensor.nbytes for tensor in tensors) * batches * processes
        count = max(1, min(len(of_batch), int(LARGEST_SCORES // max(size, 1))))
        return count if alone else int(min(gather_all_tensors(torch.tensor([count], device=tensors[0].device))))

    def whole(self, tensor: Tensor) -> Tensor:
        """Return the values of all data, in their order; `tensor` has those of this share along its first axis."""
        if self.replicas == 1 or not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return tensor
        if self.replicas == 0:
            return torch.cat(gather_all_tensors(tensor.contiguous()))
        # All shares are as long; in slices, since every process holds the whole already.
        whole = tensor.new_empty((len(tensor), self.replicas, *tensor.shape[1:]))
        count = max(1, LARGEST_SLICE // max(1, whole[:1].nbytes))
        for part, own in zip(whole.split(count), tensor.split(count), strict=True):
            sent = own.contiguous().view(-1).view(torch.uint8)
            come = sent.new_empty(self.replicas * len(sent))
            torch.distributed.all_gather_into_tensor(come, sent)
            part.copy_(come.view(tensor.dtype).view(self.replicas, *own.shape).transpose(0, 1))
        return whole.flatten(0, 1)[: self.num_data]


def share_of(trainer: pl.Trainer, loader: Any, limit: float, dataloader_idx: int = 0) -> EvaluationShare:
    """Return this process's share of the data of a loader that the trainer has prepared."""
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler):
        share = EvaluationShare(loader, limit)
    elif sampler.num_replicas == trainer.world_size:
        share = EvaluationShare(loader, limit, sampler.num_replicas, len(loader.dataset))
    else:
        # Training data are shared only by the ranks of a chain; here all processes share.
        shorter = math.ceil(limit * sampler.num_replicas / trainer.world_size) if limit < len(loader) else math.inf
        share = _shared_by_all(trainer, loader, shorter)
    return replace(share, dataloader_idx=dataloader_idx)


def share_of_plain(trainer: pl.Trainer, loader: Any, limit: float) -> EvaluationShare:
    """Return this process's share of the data of a loader with the same data in every process."""
    in_order = isinstance(getattr(loader, "sampler", None), SequentialSampler)
    if trainer.world_size > 1 and type(loader) is DataLoader and in_order and not math.isfinite(limit):
        return _shared_by_all(trainer, loader, limit)
    return EvaluationShare(loader, limit, 1)


def _shared_by_all(trainer: pl.Trainer, loader: DataLoader[Any], limit: float) -> EvaluationShare:
    again: DataLoader[Any] = DataLoader(
        loader.dataset,
        batch_size=loader.batch_size or 1,
        sampler=DistributedSampler(loader.dataset, trainer.world_size, trainer.global_rank, shuffle=False),
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
    )
    return EvaluationShare(again, limit, trainer.world_size, len(cast(Sized, loader.dataset)))


# -- scoring -----------------------------------------------------------------------------------------------------------


Scores = tuple[Terms, Tensor, Tensor | None]
"""The likelihood's terms (first axis n), log densities (n,) and targets (None without a likelihood)."""


class Scorer:
    """Scores every datum of batches by several samples, in one pass; the module, in evaluation mode, keeps its
    weights. The first pass checks the targets before it computes with them, unless `checks` is False."""

    def __init__(self, module: nn.Module, compiled: bool = False, checks: bool = True) -> None:
        self._call = TogetherCall(module, _score, compiled)
        self._check = TargetCheck(module) if checks else None
        self._net = getattr(module, "net", None) if compiled else None
        self.first: dict[int, int | None] = {}
        """The digest of each loader's first batch; None once another pass had another one."""

    def __call__(
        self,
        states: Sequence[Mapping[str, Tensor]],
        batches: Iterable[Any],
        fitting: Callable[[Sequence[Any]], int] | None = None,
    ) -> list[Scores]:
        """Return the scores of each sample, of parameters and buffers on the module's device; of as many of the first
        ones only as `fitting` says after the first batch."""
        together, found = States(states), list[list[Any]]()
        check, self._check = self._check, None
        with torch.no_grad():
            for place, batch in enumerate(batches):
                if check is not None:
                    check(states[0], batch, place)
                batch = batch if self._net is None else with_few_lengths(batch, self._net)
                found.append(list(self._call(together, batch)))
                if len(found) == 1 and len(states) > 1 and fitting is not None:
                    count = fitting(found[0])
                    if count < len(states):
                        together, found = States(states[:count]), [found[0][:count]]
        if not any(of_batch[0][0].numel() for of_batch in found):
            raise ValueError("batches has no data to evaluate")
        return [_joined(of_sample) for of_sample in zip(*found, strict=True)]


class TargetCheck:
    """Raises if a likelihood has no density for the targets of data that are evaluated."""

    def __init__(self, module: nn.Module) -> None:
        self._call = StatelessCall(module, _check)

    def __call__(self, state: Mapping[str, Tensor], batch: Any, place: int) -> None:
        """Check a batch, the given one in its loader, with the outputs of a sample."""
        try:
            with torch.no_grad(), borrowed(self._call.module):
                self._call.call(state, cloned(batch))  # which a network may change in place
        except ValueError as error:
            raise ValueError(f"batch {place} of the data to evaluate: {error}") from None


def _check(module: EnergyModel, batch: Any) -> None:
    likelihood = getattr(module, "likelihood", None)
    if likelihood is not None and not overrides(module, "log_likelihood"):
        likelihood.check_target(*module.output_and_target(batch))


def evaluate(module: nn.Module, state: Mapping[str, Tensor], batches: Iterable[Any], checks: bool = True) -> Scores:
    """Score every datum of the batches by one sample.

    Args:
        module: a `BayesianModule`, in evaluation mode; its own weights are not changed.
        state: the sample's parameters and buffers.
        batches: batches on the module's device.
        checks: whether to check the targets, which the first of several samples needs.

    Returns:
        the likelihood's terms (first axis n), log densities (n,) and targets (None without a likelihood).
    """
    return Scorer(module, checks=checks)([state], batches)[0]


def of_observed(module: nn.Module, scores: Scores) -> Scores:
    """Return scores without the data that have no observed target; numbers that are not observed become NaN."""
    terms, density, target = scores
    likelihood: Likelihood | None = getattr(module, "likelihood", None)
    entries = None if target is None or likelihood is None else likelihood.observed_entries(target)
    if target is None or entries is None or bool(entries.all()):
        return scores
    if target.is_floating_point():
        target = target.masked_fill(~entries, torch.nan)
    known = entries.flatten(1).any(1) if entries.dim() > 1 else entries
    if bool(known.all()):
        return terms, density, target
    return {name: term[known] for name, term in terms.items()}, density[known], target[known]


def _score(module: EnergyModel, batch: Any) -> tuple[Any, ...]:
    density, terms, target = module.score(batch)
    return (density, terms) if target is None else (density, terms, target)  # vmap returns tensors only


def _joined(parts: Sequence[tuple[Any, ...]]) -> Scores:
    """Join a sample's scores of successive batches."""
    densities, terms, *targets = zip(*parts, strict=True)
    return concatenate(terms), torch.cat(densities), torch.cat(targets[0]) if targets else None


def concatenate(parts: Iterable[Mapping[str, Tensor]]) -> Terms:
    """Join dictionaries of tensors along the first axis."""
    parts, joined = list(parts), {}
    for name in parts[0] if parts else ():
        shapes = list(dict.fromkeys(tuple(part[name].shape[1:]) for part in parts))
        if len(shapes) > 1:
            raise ValueError(
                f"the batches' outputs have different shapes, (n, …) with {shapes[0]} and {shapes[1]} for '{name}', "
                "and cannot be joined: pad all batches to one length in collate_fn (padding='max_length')"
            )
        joined[name] = torch.cat([part[name] for part in parts])
    return joined


# -- of samples --------------------------------------------------------------------------------------------------------


Tree = TypeVar("Tree")
LARGEST_SLICE = 2**26
"""Bytes of scores that a process receives at once."""
LARGEST_SCORES = 2**30
"""Bytes of the scores of samples that are scored together."""


@dataclass(frozen=True)
class SampleScores:
    """What an average over samples needs of one: its scores on each loader's data, log p(D|θ) of all training data (0
    if the weights do not need it), and the likelihood's terms on each set of out-of-distribution data."""

    on_loaders: list[Scores]
    log_likelihood: float
    ood: dict[str, Terms]


def states_on(device: Any, samples: Sequence[PosteriorSample]) -> list[dict[str, Tensor]]:
    """Return the states of samples on a device."""
    return [{name: tensor.to(device) for name, tensor in sample.own_state.items()} for sample in samples]


def scores_on(
    trainer: pl.Trainer,
    module: EnergyModel,
    scorer: Scorer,
    states: Sequence[Mapping[str, Tensor]],
    loader: Any,
    limit: float,
    dataloader_idx: int = 0,
) -> list[Scores]:
    """Return the scores of each sample, of tensors on the module's device, on a loader's data, of all ranks; of the
    first samples alone, and at least one, if those of all would be larger than `LARGEST_SCORES`."""
    share = share_of(trainer, loader, limit, dataloader_idx)
    batches, digests = _compared(share.batches(trainer, module), scorer.first, dataloader_idx), list[int]()
    if share.replicas == 0 and trainer.world_size > 1:
        batches = _seen(batches, digests)
    of_share = scorer(states, batches, share.fitting)
    if digests:
        first, *others = gather_all_tensors(torch.tensor(digests, device=of_share[0][1].device))
        if all(torch.equal(first, other) for other in others):
            return of_share  # every rank reads all data (use_distributed_sampler=False), so each datum counts once
    whole: list[Scores] = pytree.tree_map_only(Tensor, share.whole, of_share)
    return whole


def _compared(batches: Iterable[Any], first: dict[int, int | None], index: int) -> Iterator[Any]:
    """Yield batches, and warn once if the first one is not that of the loader's earlier passes."""
    rest = iter(batches)
    for batch in itertools.islice(rest, 1 if first.get(index, 0) is not None else 0):  # None: it has warned
        found = digest(in_host_memory([leaf for leaf in leaves_of(batch) if isinstance(leaf, Tensor)]))
        if first.setdefault(index, found) != found:
            first[index] = None
            rank_zero_warn(
                "The validation or test inputs differ from one sample's pass to the next, as random transforms make "
                "them, so the average is also one over these and has other scores than predictions of fixed inputs: "
                "give the loader a data set without random transforms."
            )
        yield batch
    yield from rest


def _seen(batches: Iterable[Any], digests: list[int]) -> Iterator[Any]:
    """Yield batches, and add the digest of each to a list."""
    for batch in batches:
        digests.append(digest(batch))
        yield batch


def in_host_memory(tree: Tree) -> Tree:
    """Return containers of tensors with those of a CUDA device in host memory; the host waits for the device once,
    where each number of averages and metrics would be a wait of its own."""
    leaves, shape = pytree.tree_flatten(tree)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.device.type == "cuda"]
    if places:
        for place, copy in zip(places, HostCopies([leaves[i] for i in places]).wait(), strict=True):
            leaves[place] = copy
    moved: Tree = pytree.tree_unflatten(leaves, shape)
    return moved


class DrawingScores:
    """The scores of a drawing's samples, computed for several of them in one pass when the first is wanted; a pass
    may have scored fewer than it was given."""

    def __init__(self) -> None:
        self._drawn: list[PosteriorSample] = []
        """Samples without scores."""
        self._scored: list[tuple[PosteriorSample, SampleScores]] = []
        self._most = MOST

    def begin(self, samples: Sequence[PosteriorSample]) -> None:
        """Begin a drawing; nothing is computed yet."""
        self._drawn, self._scored = list(samples), []

    def of(self, sample: PosteriorSample, score: Callable[[list[PosteriorSample]], list[SampleScores]]) -> SampleScores:
        """Return the scores of a sample, the drawing's next one, or one that is in no drawing."""
        if not (self._scored and self._scored[0][0] is sample):
            if not (self._drawn and self._drawn[0] is sample):
                self.begin([sample])
            together, self._drawn = self._drawn[: self._most], self._drawn[self._most :]
            self._scored = list(zip(together, score(together), strict=False))
            self._drawn = together[len(self._scored) :] + self._drawn
            first = self._scored[0][1]
            leaves = pytree.tree_leaves((first.on_loaders, first.ood))
            size = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
            self._most = max(1, min(MOST, LARGEST_SCORES // max(size, 1)))
        return self._scored.pop(0)[1]
