"""Data of another distribution, on which predictions should be uncertain."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_sgmcmc.batches.inputs import inputs_of
from lightning_sgmcmc.batches.loader import is_shuffled
from lightning_sgmcmc.chains.execution import States, TogetherCall, state_of
from lightning_sgmcmc.evaluation.scoring import EvaluationShare, concatenate, share_of_plain
from lightning_sgmcmc.model import EnergyModel, overrides
from lightning_sgmcmc.namespace import pl, rank_zero_warn

OutOfDistributionSource: TypeAlias = pl.LightningDataModule | DataLoader[Any]
NAME = re.compile(r"[\w.-]+")
METRICS = (
    "auroc",
    "aupr_out",
    "aupr_in",
    "fpr95",
    "max_probability_auroc",
    "mutual_information_auroc",
    "entropy",
    "brier",
)


class OutOfDistributionData:
    """The out-of-distribution sets of a `BayesianModelAverage`: their loaders, and a sample's predictions on them."""

    def __init__(self, sources: Any) -> None:
        if sources is None:
            sources = {}
        elif not isinstance(sources, Mapping):
            name = type(sources).__name__.removesuffix("DataModule").lower()
            sources = {"ood" if isinstance(sources, DataLoader) else name: sources}
        for name, source in sources.items():
            if not isinstance(name, str) or not NAME.fullmatch(name):
                raise ValueError(
                    f"the out-of-distribution data have the name {name!r}, which becomes part of the metrics' names: "
                    "use letters, digits, '-', '.' and '_'"
                )
            if not isinstance(source, pl.LightningDataModule | DataLoader):
                raise TypeError(
                    f"out-of-distribution data '{name}' should be a datamodule or a DataLoader, got a "
                    f"{type(source).__name__}"
                )
            _check_order(name, source)
        self.sources: dict[str, Any] = dict(sources)
        self._loaders: dict[str, Any] = {}

    def __repr__(self) -> str:
        return str(list(self.sources)) if self.sources else "None"

    @property
    def metric_names(self) -> list[str]:
        """The names of the metrics, as in an `Evaluation`."""
        return [f"ood_{name}_{metric}" for name in self.sources for metric in METRICS]

    def setup(self, trainer: pl.Trainer, module: EnergyModel) -> None:
        """Read the data, normalised by the statistics of the trainer's datamodule."""
        if not self.sources:
            return
        if module.likelihood is None or module.likelihood.per_sample_term != "probabilities":
            raise ValueError(
                "out-of-distribution data are evaluated by the entropy of class probabilities, which "
                f"likelihood={module.likelihood!r} does not have: omit ood"
            )
        for name, source in self.sources.items():
            self._loaders[name] = _test_loader(trainer, name, source)
            _check_order(name, self._loaders[name])
            if len(self._loaders[name]) == 0:
                raise ValueError(f"ood: the out-of-distribution data '{name}' are empty")

    def terms(
        self, trainer: pl.Trainer, module: EnergyModel, states: Sequence[Mapping[str, Tensor]]
    ) -> list[dict[str, dict[str, Tensor]]]:
        """Return the likelihood's terms of each sample on each set, gathered from all ranks, in evaluation mode."""
        limit = 1 if cast(Any, trainer).fast_dev_run else math.inf
        on_sets: dict[str, list[dict[str, Tensor]]] = {}
        for name in self.sources:
            share = share_of_plain(trainer, self._loaders[name], limit)
            each = self._evaluate(share.batches(trainer, module), module, states, name)
            on_sets[name] = [{key: share.whole(term) for key, term in terms.items()} for terms in each]
        return [{name: terms[index] for name, terms in on_sets.items()} for index in range(len(states))]

    def check(self, trainer: pl.Trainer, module: EnergyModel) -> None:
        """Pass a batch of each set through the network, so that errors occur before hours of training."""
        with module.at_chain(0):
            state = {name: tensor.detach() for name, tensor in state_of(module).items()}
        for name in self.sources:
            batches = EvaluationShare(self._loaders[name], 1).batches(trainer, module)
            self._evaluate(batches, module, [state], name)

    def _evaluate(
        self, batches: Iterable[Any], module: EnergyModel, states: Sequence[Mapping[str, Tensor]], name: str
    ) -> list[dict[str, Tensor]]:
        """Return the terms of each sample on some of a set's batches."""
        call, together = TogetherCall(module, _terms_of_batch), States(states)
        with torch.no_grad():
            try:
                found = [list(call(together, batch)) for batch in batches]
                return [concatenate(each) for each in zip(*found, strict=True)]
            except (RuntimeError, TypeError, ValueError) as error:
                raise type(error)(
                    f"the network cannot process the out-of-distribution data '{name}': {error}"
                ) from error


def _terms_of_batch(module: EnergyModel, batch: Any) -> dict[str, Tensor]:
    assert module.likelihood is not None
    if overrides(module, "output_and_target"):
        return module.likelihood.terms(module.output_and_target(batch)[0])
    own = overrides(module, "inputs_and_target")
    inputs = module.inputs_and_target(batch)[0] if own else inputs_of(batch, module.accepted_arguments)
    return module.likelihood.terms(module.output_of(inputs))


def _test_loader(trainer: pl.Trainer, name: str, source: Any) -> Any:
    if isinstance(source, DataLoader):
        return source
    source.trainer = trainer
    per_node = source.prepare_data_per_node
    if trainer.local_rank == 0 if per_node else trainer.global_rank == 0:
        source.prepare_data()
    trainer.strategy.barrier("out-of-distribution data")
    source.setup("test")
    training = getattr(trainer, "datamodule", None)
    adopted = hasattr(source, "normalise_as") and source.normalise_as(training)
    if not adopted and getattr(source, "normalises", False):
        why = f"{type(training).__name__} has no input_scaling that fits"
        if training is None:
            why = "the trainer has loaders, no datamodule"
        rank_zero_warn(
            f"The out-of-distribution data '{name}' are normalised by their own statistics, since the training data's "
            f"are unknown ({why}), so their scale may give them away or hide them: use one of the library's "
            "datamodules for training too, or pass a loader of inputs as the network should see them."
        )
    return source.test_dataloader()


def _check_order(name: str, loader: Any) -> None:
    if is_shuffled(loader):
        raise ValueError(
            f"the loader of the out-of-distribution data '{name}' shuffles, so predictions of several samples cannot "
            "be averaged: create it with shuffle=False"
        )
