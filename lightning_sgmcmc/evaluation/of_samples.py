"""Scores of samples on the data of a run's loaders, in one pass for all of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import pytorch_lightning as pl
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_sgmcmc.chains.sample import PosteriorSample
from lightning_sgmcmc.chains.transfers import HostCopies
from lightning_sgmcmc.evaluation.averages import Terms
from lightning_sgmcmc.evaluation.scoring import Scorer, Scores
from lightning_sgmcmc.evaluation.share import share_of
from lightning_sgmcmc.model import EnergyModel

Tree = TypeVar("Tree")


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


def states_on(device: Any, samples: Sequence[PosteriorSample]) -> list[dict[str, Tensor]]:
    """Return the states of samples on a device."""
    return [{name: tensor.to(device) for name, tensor in sample.state.items()} for sample in samples]


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
