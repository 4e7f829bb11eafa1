"""The running Bayesian model average, evaluated as the samples are drawn."""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, Subset
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_sgmcmc.callbacks.base import SamplerCallback, bayesian, require_schedule
from lightning_sgmcmc.evaluation import CycleAverage, WeightedAverage, evaluate, evaluation_mode
from lightning_sgmcmc.module import BayesianModule
from lightning_sgmcmc.store import PosteriorSample

MEMBER_KEYS = ("step", "chain", "cycle")


@dataclass
class Evaluation:
    """What is known of the collected samples on one data set.

    Attributes:
        members: for each sample its step, chain, cycle and own metrics.
        running: for each sample the metrics of the average of all samples so far.
        average: the average's tensors (see `WeightedAverage`), for figures.
        target: the targets, shape (n, …), None where the module has no likelihood.
    """

    members: list[dict[str, float]] = field(default_factory=list)
    running: list[dict[str, float]] = field(default_factory=list)
    average: WeightedAverage | None = None
    target: Tensor | None = None

    @property
    def bma(self) -> dict[str, float]:
        """The metrics of the average of all samples."""
        return self.running[-1] if self.running else {}

    @property
    def single(self) -> dict[str, float]:
        """The single samples' metrics, averaged over the samples."""
        names = [name for name in self.bma if self.members]
        return {name: sum(m[name] for m in self.members) / len(self.members) for name in names}

    @property
    def single_std(self) -> dict[str, float]:
        """The single samples' standard deviation of each metric (NaN for one sample)."""
        count = len(self.members)
        deviations = {}
        for name, mean in self.single.items():
            squares = sum((m[name] - mean) ** 2 for m in self.members)
            deviations[name] = math.sqrt(squares / (count - 1)) if count > 1 else math.nan
        return deviations


class BayesianModelAverage(SamplerCallback):
    """Averages the samples' predictive distributions and says how good the average is.

        p(y|x,D) ≈ Σ_j w_j·p(y|x,θ_j)

    Each sample is evaluated once, when it is drawn, on the validation data; what is kept is the running weighted
    average of probabilities (of densities and moments in regression), not the samples. `trainer.test` and
    `trainer.validate` evaluate the samples that a `SampleCollector` kept. Metrics are logged as `val/bma_…`,
    `test/bma_…`, with the mean of the single samples' as `val/single_…` beside them: accuracy, nll, brier, ece and
    entropy for classes; rmse, nll and the coverage of central 50 % and 90 % intervals in regression, in original
    units where the datamodule has a `target_std`.

    Args:
        cycle_weights: "uniform" averages all samples by their own (importance) weights; "harmonic" weighs each cycle
            by the harmonic mean of its samples' likelihoods p(D|θ) over all training data, one more pass over them
            for each sample.

    Raises:
        ValueError: for another cycle_weights; at setup, if no schedule would draw a sample.

    Source: Zhang et al. 2020 (cSG-MCMC), eq. (4).
    """

    def __init__(self, cycle_weights: Literal["uniform", "harmonic"] = "uniform") -> None:
        if cycle_weights not in ("uniform", "harmonic"):
            raise ValueError(f"cycle_weights must be 'uniform' or 'harmonic', got {cycle_weights!r}")
        self.cycle_weights = cycle_weights
        self._averages: list[_LoaderAverage] = []

    # -- during the fit -----------------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            require_schedule(trainer, self)

    def reset(self) -> None:
        self._averages = []

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._publish(bayesian(pl_module, self), "val")  # what a checkpoint brought, if the run is over already

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        loaders = _validation_loaders(trainer)
        if not loaders:
            rank_zero_warn(
                "BayesianModelAverage has no validation data to evaluate the samples on; trainer.test will do it."
            )
        if any(isinstance(getattr(loader, "sampler", None), RandomSampler) for loader in loaders):
            raise ValueError(
                "the validation loader shuffles, so predictions of several samples cannot be averaged: make the "
                "validation or test loader with shuffle=False"
            )
        if len(self._averages) != len(loaders):
            self._averages = [_LoaderAverage(self.cycle_weights) for _ in loaders]
        self._publish(bayesian(pl_module, self), "val")

    def on_posterior_sample(self, trainer: pl.Trainer, pl_module: BayesianModule, sample: PosteriorSample) -> None:
        if not self._averages:
            return
        self._take(trainer, pl_module, sample, _loaders(trainer.val_dataloaders), trainer.num_val_batches)
        metrics = self._metrics("val")
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # For checkpoint monitors, which want their key from the first epoch on; the loggers have had the numbers.
        if trainer.state.fn == "fit" and not trainer.sanity_checking and self._averages:
            metrics = self._metrics("val") or _no_metrics(bayesian(pl_module, self), "val")
            pl_module.log_dict(metrics, logger=False, sync_dist=True)

    # -- after the fit ------------------------------------------------------------------------------------------------

    def on_test_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._evaluate_posterior(trainer, bayesian(pl_module, self), "test")

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pl_module.log_dict(self._metrics("test"), sync_dist=True)

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == "validate":
            self._evaluate_posterior(trainer, bayesian(pl_module, self), "val")
            pl_module.log_dict(self._metrics("val"), sync_dist=True)

    def _evaluate_posterior(self, trainer: pl.Trainer, module: BayesianModule, stage: str) -> None:
        if module.posterior is None or len(module.posterior) == 0:
            raise RuntimeError(
                f"BayesianModelAverage found no samples to evaluate on the {stage} data: add a SampleCollector to the "
                "fit, and give its dirpath here if this is another process"
            )
        source = trainer.test_dataloaders if stage == "test" else trainer.val_dataloaders
        limits = trainer.num_test_batches if stage == "test" else trainer.num_val_batches
        loaders = _loaders(source)
        self._averages = [_LoaderAverage(self.cycle_weights) for _ in loaders]
        self._publish(module, stage)
        for sample in module.posterior:
            self._take(trainer, module, sample, loaders, limits)

    # -- both ---------------------------------------------------------------------------------------------------------

    def _take(
        self,
        trainer: pl.Trainer,
        module: BayesianModule,
        sample: PosteriorSample,
        loaders: list[Any],
        limits: list[int | float],
    ) -> None:
        """Evaluate a sample on every loader and take it into the averages."""
        scale = float(getattr(getattr(trainer, "datamodule", None), "target_std", None) or 1.0)
        devices = [module.device] if module.device.type == "cuda" else []
        precision = trainer.strategy.precision_plugin
        # Going through a loader draws from the global generator, and the chain must not notice that it is evaluated.
        with torch.random.fork_rng(devices), evaluation_mode(module):
            state = {name: tensor.to(module.device) for name, tensor in sample.state.items()}
            log_likelihood = self._full_log_likelihood(trainer, module, state)
            for average, loader, limit in zip(self._averages, loaders, limits, strict=True):
                with precision.val_step_context():
                    scores = evaluate(module, state, _batches(trainer, module, loader, limit))
                average.take(module, sample, scores, scale, log_likelihood)

    def _full_log_likelihood(self, trainer: pl.Trainer, module: BayesianModule, state: Mapping[str, Tensor]) -> float:
        """Return log p(D|θ) of all training data, if the weights ask for it."""
        if self.cycle_weights == "uniform":
            return 0.0
        if trainer.train_dataloader is None:
            trainer.fit_loop.setup_data()
        total = torch.zeros((), dtype=torch.float64)
        for loader in _loaders(trainer.train_dataloader):
            mine = Subset(loader.dataset, range(trainer.global_rank, len(loader.dataset), trainer.world_size))
            again = DataLoader(mine, batch_size=loader.batch_size or 1, collate_fn=loader.collate_fn)
            with trainer.strategy.precision_plugin.val_step_context():
                _, log_density, _ = evaluate(module, state, _batches(trainer, module, again, len(again)))
            total += log_density.double().sum().cpu()
        return float(trainer.strategy.reduce(total, reduce_op="sum"))

    def _publish(self, module: BayesianModule, stage: str) -> None:
        if self._averages:
            module.evaluations[stage] = self._averages[0].evaluation

    def _metrics(self, stage: str) -> dict[str, float]:
        metrics = {}
        for index, average in enumerate(self._averages):
            suffix = f"/dataloader_idx_{index}" if len(self._averages) > 1 else ""
            for kind, values in (("bma", average.evaluation.bma), ("single", average.evaluation.single)):
                metrics.update({f"{stage}/{kind}_{name}{suffix}": value for name, value in values.items()})
        return metrics

    def state_dict(self) -> dict[str, Any]:
        return {"averages": [average.state_dict() for average in self._averages]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._averages = []
        for saved in state_dict["averages"]:
            average = _LoaderAverage(self.cycle_weights)
            average.load_state_dict(saved)
            self._averages.append(average)


class _LoaderAverage:
    """The running average over the data of one loader."""

    def __init__(self, cycle_weights: str) -> None:
        self.evaluation = Evaluation()
        self._total: WeightedAverage | CycleAverage = (
            WeightedAverage() if cycle_weights == "uniform" else CycleAverage()
        )

    def take(
        self,
        module: BayesianModule,
        sample: PosteriorSample,
        scores: tuple[dict[str, Tensor], Tensor, Tensor | None],
        scale: float,
        log_likelihood: float,
    ) -> None:
        terms, log_density, target = scores
        log_density = _gather(log_density)
        terms = {name: _gather(term) for name, term in terms.items()}
        target = _gather(target) if target is not None else None
        self._check_order(target)
        if isinstance(self._total, CycleAverage):
            self._total.add(
                terms,
                log_density,
                sample.log_weight,
                chain=sample.chain,
                cycle=sample.cycle,
                log_likelihood=log_likelihood,
            )
            average = self._total.combined()
        else:
            self._total.add(terms, log_density, sample.log_weight)
            average = self._total
        own = _figures(module, terms, log_density, target, scale)
        place = {key: getattr(sample, key) for key in MEMBER_KEYS}
        self.evaluation.members.append(place | own)
        self.evaluation.running.append(_figures(module, average.terms, average.log_density, target, scale))
        self.evaluation.average = average

    def _check_order(self, target: Tensor | None) -> None:
        known = self.evaluation.target
        if known is not None and target is not None and not torch.equal(known.to(target.device), target):
            raise ValueError(
                "the evaluation data came in another order than for the sample before, so predictions cannot be "
                "averaged: make the validation or test loader with shuffle=False"
            )
        self.evaluation.target = target

    def state_dict(self) -> dict[str, Any]:
        evaluation = self.evaluation
        return {
            "total": self._total.state_dict(),
            "members": evaluation.members,
            "running": evaluation.running,
            "target": evaluation.target,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._total.load_state_dict(state["total"])
        average = self._total.combined() if isinstance(self._total, CycleAverage) else self._total
        self.evaluation = Evaluation(list(state["members"]), list(state["running"]), average, state["target"])


def _figures(
    module: BayesianModule, terms: Mapping[str, Tensor], log_density: Tensor, target: Tensor | None, scale: float
) -> dict[str, float]:
    if module.likelihood is None or target is None:
        return {"nll": -log_density.mean().item()}
    metrics = module.likelihood.metrics(terms, log_density, target, scale)
    return {name: float(value) for name, value in metrics.items()}


def _no_metrics(module: BayesianModule, stage: str) -> dict[str, float]:
    names = module.likelihood.metric_names if module.likelihood is not None else ("nll",)
    return {f"{stage}/{kind}_{name}": math.nan for kind in ("bma", "single") for name in names}


def _loaders(source: Any) -> list[Any]:
    """Return the loaders of what the trainer calls its dataloaders: None, one, a list or a dictionary."""
    if source is None:
        return []
    if isinstance(source, Mapping):
        return list(source.values())
    return list(source) if isinstance(source, list | tuple) else [source]


def _validation_loaders(trainer: pl.Trainer) -> list[Any]:
    """Return the validation loaders, also where the first validation is some epochs away."""
    if trainer.val_dataloaders is None and trainer.enable_validation:
        trainer.validating = True
        trainer.fit_loop.epoch_loop.val_loop.setup_data()
        trainer.training = True
    return _loaders(trainer.val_dataloaders)


def _batches(trainer: pl.Trainer, module: BayesianModule, loader: Any, limit: float) -> Iterator[Any]:
    stop = int(limit) if math.isfinite(limit) else None
    for batch in itertools.islice(loader, stop):
        yield trainer.strategy.batch_to_device(batch, module.device)


def _gather(tensor: Tensor) -> Tensor:
    """Return the tensor of all ranks, joined along the first axis."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.cat(gather_all_tensors(tensor.contiguous()))
    return tensor
