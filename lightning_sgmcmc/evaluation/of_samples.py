"""Scores of samples on the data of a run's loaders, in one pass for all of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import pytorch_lightning as pl
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_sgmcmc.chains.sample import PosteriorSample
from lightning_sgmcmc.chains.together import MOST
from lightning_sgmcmc.chains.transfers import HostCopies
from lightning_sgmcmc.evaluation.averages import Terms
from lightning_sgmcmc.evaluation.scoring import Scorer, Scores
from lightning_sgmcmc.evaluation.share import share_of
from lightning_sgmcmc.model import EnergyModel

Tree = TypeVar("Tree")


LARGEST_SCORES = 2**30
"""Bytes of the scores of samples that are scored together."""


@dataclass(frozen=True)
class SampleScores:
    """What an average over samples needs of one.

    Attributes:
        on_loaders: its scores on each loader's data.
        log_likelihood: log p(D|θ) of all training data, 0 if the weights do not need it.
        ood: the likelihood's terms on each set of out-of-distribution data.
    """

    on_loaders: list[Scores]
    log_likelihood: float
    ood: dict[str, Terms]

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(leaf.nbytes for leaf in pytree.tree_leaves((self.on_loaders, self.ood)) if isinstance(leaf, Tensor))


Score = Callable[[list[PosteriorSample]], list[SampleScores]]


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
    """Return the scores of each sample on a loader's data, of all ranks.

    Args:
        trainer: the run's.
        module: the samples' module, in evaluation mode.
        scorer: scores samples of this module.
        states: the samples' parameters and buffers, on the module's device.
        loader: the loader of evaluation data, as the trainer has prepared it.
        limit: number of batches to use.
        dataloader_idx: index of the loader among the trainer's.
    """
    share = share_of(trainer, loader, limit, dataloader_idx)
    found = []
    for terms, log_density, target in scorer(states, share.batches(trainer, module)):
        log_density = share.whole(log_density)
        terms = {name: share.whole(term) for name, term in terms.items()}
        found.append((terms, log_density, share.whole(target) if target is not None else None))
    return found


def in_host_memory(tree: Tree) -> Tree:
    """Return containers of tensors with those of a CUDA device in host memory; the host waits for the device once.

    Averages and metrics are then computed there. Each of their numbers would be a wait of its own on the device.
    """
    leaves, shape = pytree.tree_flatten(tree)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.device.type == "cuda"]
    if places:
        for place, copy in zip(places, HostCopies([leaves[i] for i in places]).wait(), strict=True):
            leaves[place] = copy
    moved: Tree = pytree.tree_unflatten(leaves, shape)
    return moved


class DrawingScores:
    """The scores of a drawing's samples, computed for several of them in one pass when the first is wanted."""

    def __init__(self) -> None:
        self._drawn: list[PosteriorSample] = []
        """Samples without scores."""
        self._scored: list[tuple[PosteriorSample, SampleScores]] = []
        self._most = MOST

    def begin(self, samples: Sequence[PosteriorSample]) -> None:
        """Begin a drawing; nothing is computed yet."""
        self._drawn, self._scored = list(samples), []

    def of(self, sample: PosteriorSample, score: Score) -> SampleScores:
        """Return the scores of a sample, the drawing's next one, or one that is in no drawing.

        Args:
            sample: the sample.
            score: returns the scores of several samples.
        """
        if not (self._scored and self._scored[0][0] is sample):
            if not (self._drawn and self._drawn[0] is sample):
                self.begin([sample])
            together, self._drawn = self._drawn[: self._most], self._drawn[self._most :]
            self._scored = list(zip(together, score(together), strict=True))
            self._most = max(1, min(MOST, LARGEST_SCORES // max(self._scored[0][1].size, 1)))
        return self._scored.pop(0)[1]
