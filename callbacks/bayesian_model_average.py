"""The running Bayesian model average, evaluated as the samples are drawn, also on data of another distribution."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from lightning_sgmcmc.batches.inputs import inputs_of
from lightning_sgmcmc.batches.loader import flat_loaders, is_shuffled
from lightning_sgmcmc.chains.callback import Place, SamplerCallback, sampling_module
from lightning_sgmcmc.chains.chains import ChainModel
from lightning_sgmcmc.chains.execution import state_of
from lightning_sgmcmc.chains.samples import Drawing, PosteriorSample, record_of
from lightning_sgmcmc.chains.schedule import require_schedule, target_of
from lightning_sgmcmc.chains.together import MOST, States, TogetherCall, grouped, runs_at_once
from lightning_sgmcmc.chains.trainer import is_finished
from lightning_sgmcmc.checks import check_choice, check_flag
from lightning_sgmcmc.evaluation.loader_average import LoaderAverage, UserMetrics
from lightning_sgmcmc.evaluation.passes import full_log_likelihoods, undisturbed
from lightning_sgmcmc.evaluation.reference import Reference, StoredScores
from lightning_sgmcmc.evaluation.scoring import (
    DrawingScores,
    EvaluationShare,
    SampleScores,
    Scorer,
    concatenate,
    in_host_memory,
    of_observed,
    scores_on,
    share_of_plain,
    states_on,
)
from lightning_sgmcmc.files import megabytes
from lightning_sgmcmc.fit.checks import PatientStopping
from lightning_sgmcmc.model import EnergyModel, overrides
from lightning_sgmcmc.namespace import pl, rank_zero_info, rank_zero_warn
from lightning_sgmcmc.posterior.segments import scaling_of_run

LARGE_STATE = 5 * 10**7
"""Bytes of a checkpoint that the user hears of."""
OutOfDistributionSource: TypeAlias = pl.LightningDataModule | DataLoader[Any]


class BayesianModelAverage(SamplerCallback):
    """Averages the samples' predictive distributions and evaluates the average.

        p(y|x,D) ≈ Σ_j w_j·p(y|x,θ_j)

    Each sample is evaluated once, when it is drawn, on the validation data. The callback stores the running weighted
    average of probabilities (in regression, of densities and moments), not the samples; checkpoints have it too.
    `trainer.test` and `trainer.validate` evaluate the samples that a `SampleCollector` stored. Metrics are logged as
    `val/bma_…`, `test/bma_…`, and the mean over single samples as `val/single_…`: accuracy, nll, brier, ece and entropy
    for classification; rmse, nll and the coverage of central 50 % and 90 % intervals for regression, in original units
    if the fit's datamodule has a `target_std`, which the store keeps. Several targets with a scaling each have an
    `rmse_<target>` each; `rmse` and `nll` are over all of them. If the samples' importance weights differ,
    `val/weight_efficiency` is (Σw)²/(S·Σw²), a share in (0, 1]. Before the first sample these metrics are NaN;
    `EarlyStopping` on one of them waits for it, and its patience counts the checks with new samples.

    For each out-of-distribution set (classification only) it adds `ood_<name>_auroc`, `aupr_out`, `aupr_in` and `fpr95`
    for separating its inputs from the evaluation data by predictive entropy (`diagnostics.detection_metrics`);
    `ood_<name>_max_probability_auroc` and `mutual_information_auroc` by these; `ood_<name>_entropy`, the mean
    predictive entropy in nats; and `ood_<name>_brier`, the mean over inputs and classes of the squared probability
    (Deng et al. 2022, since every class is wrong).

    Args:
        cycle_weights: "uniform" averages all samples with their own (importance) weights; "harmonic" weighs each cycle
            by the harmonic mean of its samples' likelihoods p(D|θ)^(1/τ) over all training data, at the cost of one
            more pass over them per sample. τ is the schedule's temperature, else the module's (1 if it is 0), so that
            the weight estimates the evidence of the sampled density in that cycle; the paper has τ = 1.
        importance_weights: "sample" uses each sample's weight from the time of its draw; "final" lets `trainer.test`
            and `trainer.validate` use weights from the final π of a `ContourGradient`. During the fit only the former
            are known.
        ood: out-of-distribution data: a datamodule, whose test data are used, or a loader in a fixed order; or several
            by name. An unnamed one is called after its class (`NotMNISTDataModule`: "notmnist"). The library's
            datamodules are normalised by the training data's statistics, those of the trainer's datamodule; a loader's
            data are used as they are.
        metrics: metrics of your own by name, torchmetrics or functions of (prediction, target) that return a number.
            The prediction is the class probabilities (n, K), or in regression the means in original units. They are
            logged as `val/bma_<name>` and `val/single_<name>`.
        scores: let `trainer.test` and `trainer.validate` also report scores that need all samples together: for
            Gaussian likelihoods `crps` and `interval_score_90`, exact for the mixture of the samples, in original units
            (for other likelihoods of numbers use `diagnostics.sample_crps(prediction.sample(200), y)`); for classes
            `aurc`, the area under the risk-coverage curve, and `risk_80`, the error rate of the 80 % surest ones.
        reference: class probabilities of another predictive of the test data, such as HMC's: a tensor (n, K), or a
            .npy, .npz or .csv file (for CIFAR-10 `evaluation.cifar10_hmc(path)`). `trainer.test` reports `agreement`,
            the share of equal predicted classes, and `total_variation`.

    Raises:
        ValueError: for another cycle_weights or importance_weights; at setup, if no schedule would draw a sample, or
            out-of-distribution data are combined with a likelihood without class probabilities.

    Source: Zhang et al. 2020 (cSG-MCMC), eq. (4).
    """

    place = Place.AVERAGE

    def __init__(
        self,
        cycle_weights: Literal["uniform", "harmonic"] = "uniform",
        ood: OutOfDistributionSource | dict[str, OutOfDistributionSource] | None = None,
        importance_weights: Literal["sample", "final"] = "sample",
        metrics: Mapping[str, Callable[..., Any]] | None = None,
        scores: bool = False,
        reference: Any = None,
    ) -> None:
        check_flag("scores", scores)
        if scores and cycle_weights == "harmonic":
            raise ValueError("scores needs the samples' own weights: use cycle_weights='uniform'")
        check_choice("importance_weights", importance_weights, ("sample", "final"))
        check_choice("cycle_weights", cycle_weights, ("uniform", "harmonic"))
        self.cycle_weights = cycle_weights
        self.importance_weights = importance_weights
        self.ood = OutOfDistributionData(ood)
        self.metrics = UserMetrics(metrics)
        self.scores = scores
        self.reference = Reference(reference)
        self._averages: list[LoaderAverage] = []
        self._told_size = False
        self._scorer: Scorer | None = None
        self._scores = DrawingScores()
        self._places: dict[int, Tensor] = {}
        """No targets of each loader, in the shape of its first batch's."""
        self._latest: tuple[PosteriorSample, SampleScores] | None = None
        """The newest drawn sample with its scores."""
        self._stopping = PatientStopping()

    # -- during the fit -----------------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            require_schedule(trainer, self)
        if stage != "predict":
            self.metrics.check(sampling_module(pl_module, self))
            self.ood.setup(trainer, sampling_module(pl_module, self))

    def reset(self) -> None:
        self._averages = []

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if is_finished(trainer) and not self._averages:
            return
        # The checkpoint's averages, if the run is already complete.
        self._publish(sampling_module(pl_module, self), "val")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        loaders = validation_loaders(trainer)
        if not loaders:
            rank_zero_warn(
                "BayesianModelAverage has no validation data to evaluate the samples on; trainer.test evaluates them."
            )
        if any(is_shuffled(loader) for loader in loaders):
            raise ValueError(
                "the validation loader shuffles, so predictions of several samples cannot be averaged: create the "
                "validation or test loader with shuffle=False"
            )
        module = sampling_module(pl_module, self)
        with undisturbed(trainer, module):
            self.ood.check(trainer, module)
        if len(self._averages) != len(loaders):
            self._averages = [LoaderAverage(self.cycle_weights, self.metrics) for _ in loaders]
        # Not by "auto": on a GPU it takes half a minute, and saves a second at each drawing of a long run.
        self._scorer = Scorer(module, compiled=runs_at_once(module.device) and module.chains.compiled is True)
        self._publish(module, "val")
        self._stopping.begin(trainer, self._count())

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._end()

    def _end(self) -> None:
        self._stopping.end()
        self._scorer, self._latest = None, None
        self._scores.begin([])

    def _count(self) -> int:
        return len(self._averages[0].evaluation.members) if self._averages else 0

    def on_posterior_samples(self, trainer: pl.Trainer, pl_module: ChainModel, drawing: Drawing) -> None:
        self._scores.begin(drawing.samples)

    def on_posterior_sample(self, trainer: pl.Trainer, pl_module: ChainModel, sample: PosteriorSample) -> None:
        if not self._averages:
            return
        self._add(trainer, pl_module, sample, self.scores_of(trainer, pl_module, sample))
        self._log(trainer)

    def scores_of(self, trainer: pl.Trainer, module: ChainModel, sample: PosteriorSample) -> SampleScores:
        """Return a drawn sample's scores on the validation data, computed once for all callbacks that need them."""
        if self._latest is None or self._latest[0] is not sample:
            loaders, limits = flat_loaders(trainer.val_dataloaders), trainer.num_val_batches
            scores = self._scores.of(sample, lambda samples: self._score(trainer, module, samples, loaders, limits))
            self._latest = sample, scores
        return self._latest[1]

    def _log(self, trainer: pl.Trainer) -> dict[str, float]:
        """Pass the validation metrics to the loggers, and return them."""
        metrics = self._metrics("val")
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)
        return metrics

    def evaluate_again(self, trainer: pl.Trainer, module: ChainModel) -> None:
        """Evaluate the stored samples at the end of a fit by the weights that they were given there, and log it.

        The metrics replace those of even weights in `trainer.callback_metrics`, which searches of settings read.
        """
        self.evaluate_stored(trainer, module, "val")
        logged = {name: torch.tensor(value) for name, value in self._log(trainer).items()}
        trainer.callback_metrics.update(logged)

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        # At the first validation instead of the first sample: batches of several lengths cannot be joined.
        module = sampling_module(pl_module, self)
        if hasattr(module.likelihood, "ignore_index") and module.chains.compiled is not True:  # which pads them
            _, target = module.inputs_and_target(batch)
            concatenate([{"target": self._places.setdefault(dataloader_idx, target[:0])}, {"target": target[:0]}])

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # For checkpoint monitors, which require their key from the first epoch; the loggers already have the numbers.
        if trainer.state.fn == "fit" and not trainer.sanity_checking and self._averages:
            metrics = self._metrics("val") or self._no_metrics(sampling_module(pl_module, self), "val")
            pl_module.log_dict(metrics, logger=False, sync_dist=True, add_dataloader_idx=False)
            self._stopping.samples = self._count()

    # -- after the fit ------------------------------------------------------------------------------------------------

    def on_test_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.evaluate_stored(trainer, sampling_module(pl_module, self), "test")

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pl_module.log_dict(self._metrics("test"), sync_dist=True, add_dataloader_idx=False)

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == "validate":
            self.evaluate_stored(trainer, sampling_module(pl_module, self), "val")
            pl_module.log_dict(self._metrics("val"), sync_dist=True, add_dataloader_idx=False)

    def evaluate_stored(self, trainer: pl.Trainer, module: ChainModel, stage: str) -> None:
        """Evaluate the stored samples with their present weights on the data of a stage, "test" or "val".

        Raises:
            RuntimeError: if there are no samples.
            ValueError: if the datamodule's data are in other units than those of the samples' fit.
        """
        if module.posterior is None or len(module.posterior) == 0:
            raise RuntimeError(
                f"BayesianModelAverage found no samples to evaluate on the {stage} data: add a SampleCollector to the "
                "fit and, if that ran in another process, SampleCollector(dirpath) with its folder to this trainer"
            )
        module.posterior.columns.check(getattr(trainer, "datamodule", None))
        source = trainer.test_dataloaders if stage == "test" else trainer.val_dataloaders
        limits = trainer.num_test_batches if stage == "test" else trainer.num_val_batches
        loaders = flat_loaders(source)
        self._averages = [LoaderAverage(self.cycle_weights, self.metrics) for _ in loaders]
        self._publish(module, stage)
        in_fit, self._scorer = self._scorer, self._scorer or Scorer(module)
        stored = self._stored_scores(trainer, module, stage)
        samples = iter(module.posterior.reweighted(self.importance_weights))
        for group in grouped(samples, lambda sample: sample.own_state, MOST):
            self._scores.begin(group)
            for sample in group:
                scores = self._scores.of(sample, lambda some: self._score(trainer, module, some, loaders, limits))
                self._add(trainer, module, sample, scores)
                for average, one, (terms, _, target) in zip(self._averages, stored, scores.on_loaders, strict=True):
                    average.evaluation.members[-1] |= one.add(record_of(sample), terms, target)
        for evaluation, one in zip((average.evaluation for average in self._averages), stored, strict=True):
            if evaluation.average is not None:
                evaluation.running[-1] |= one.of_average(evaluation.average.terms, evaluation.target)
        self._scorer = in_fit

    def _stored_scores(self, trainer: pl.Trainer, module: ChainModel, stage: str) -> list[StoredScores]:
        scaling = scaling_of_run(trainer, module)
        first = self.reference if stage == "test" else None
        return [
            StoredScores(module.likelihood, scaling.factor, first if index == 0 else None, self.scores)
            for index in range(len(self._averages))
        ]

    # -- during and after the fit -------------------------------------------------------------------------------------

    def _score(
        self,
        trainer: pl.Trainer,
        module: ChainModel,
        samples: list[PosteriorSample],
        loaders: list[Any],
        limits: list[int | float],
    ) -> list[SampleScores]:
        """Evaluate samples on every loader, in one pass for all of them, or for the first whose scores fit."""
        scorer = self._scorer or Scorer(module)
        with undisturbed(trainer, module):
            states, on_loaders = states_on(module.device, samples), []
            for index, (loader, limit) in enumerate(zip(loaders, limits, strict=True)):
                on_loaders.append(scores_on(trainer, module, scorer, states, loader, limit, index))
                states = states[: len(on_loaders[-1])]
            log_likelihoods = [0.0] * len(states)
            if self.cycle_weights == "harmonic":
                log_likelihoods = full_log_likelihoods(trainer, module.chains, states, "cycle_weights='harmonic'")
            ood = self.ood.terms(trainer, module, states)
            ood, on_loaders = in_host_memory((ood, on_loaders))
            on_loaders = [[of_observed(module, scores) for scores in found] for found in on_loaders]
        return [
            SampleScores([found[i] for found in on_loaders], log_likelihoods[i], ood[i]) for i in range(len(states))
        ]

    def _add(self, trainer: pl.Trainer, module: ChainModel, sample: PosteriorSample, scores: SampleScores) -> None:
        """Add a sample to the averages."""
        scaling = scaling_of_run(trainer, module)
        log_likelihood = scores.log_likelihood
        if self.cycle_weights == "harmonic":
            temperature = target_of(trainer, module)
            own = temperature[sample.chain] if isinstance(temperature, tuple) else temperature
            log_likelihood /= float(own) or 1.0  # at 0 no density is sampled
        with undisturbed(trainer, module):
            for index, (average, found) in enumerate(zip(self._averages, scores.on_loaders, strict=True)):
                average.add(module, sample, found, scaling, log_likelihood, scores.ood if index == 0 else {})

    def _publish(self, module: ChainModel, stage: str) -> None:
        if self._averages:
            module.evaluations[stage] = self._averages[0].evaluation

    def _metrics(self, stage: str) -> dict[str, float]:
        metrics = {}
        for average, suffix in zip(self._averages, self._suffixes, strict=True):
            evaluation = average.evaluation
            for kind, values in (("bma", evaluation.bma), ("single", evaluation.single)):
                metrics.update({f"{stage}/{kind}_{name}{suffix}": value for name, value in values.items()})
            if evaluation.weight_efficiency is not None:
                metrics[f"{stage}/weight_efficiency{suffix}"] = evaluation.weight_efficiency
            if math.isfinite(evaluation.chains.disagreement):
                metrics[f"{stage}/chain_disagreement{suffix}"] = evaluation.chains.disagreement
        return metrics

    @property
    def _suffixes(self) -> list[str]:
        """The ends of the metrics' names, one for each loader, as Lightning adds them."""
        count = len(self._averages)
        return [f"/dataloader_idx_{index}" for index in range(count)] if count > 1 else [""]

    def _no_metrics(self, module: ChainModel, stage: str) -> dict[str, float]:
        names = module.likelihood.metric_names if module.likelihood is not None else ("nll",)
        if "rmse" in names:
            names = (*names, *(f"rmse_{name}" for name in scaling_of_run(module.trainer, module).labels))
        names = (*names, *self.metrics.names)
        metrics: dict[str, float] = {}
        for index, suffix in enumerate(self._suffixes):
            own = (*names, *self.ood.metric_names) if index == 0 else names
            metrics |= {f"{stage}/{kind}_{name}{suffix}": math.nan for kind in ("bma", "single") for name in own}
        return metrics

    def state_dict(self) -> dict[str, Any]:
        state = {"averages": [average.state_dict() for average in self._averages]}
        size = sum(leaf.nbytes for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor))
        if size > LARGE_STATE and not self._told_size:
            self._told_size = True
            rank_zero_info(
                f"BayesianModelAverage adds {megabytes(size)} to each checkpoint, its sums over the validation data: "
                "validate on fewer data, or test after the fit."
            )
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._averages = []
        for saved in state_dict["averages"]:
            average = LoaderAverage(self.cycle_weights, self.metrics)
            average.load_state_dict(saved)
            self._averages.append(average)


def validation_loaders(trainer: pl.Trainer) -> list[Any]:
    """Return the validation loaders, even if the first validation is some epochs away."""
    if trainer.val_dataloaders is None and trainer.enable_validation:
        trainer.validating = True
        trainer.fit_loop.epoch_loop.val_loop.setup_data()
        trainer.training = True
    return flat_loaders(trainer.val_dataloaders)


# -- data of another distribution --------------------------------------------------------------------------------------

OOD_NAME = re.compile(r"[\w.-]+")
OOD_METRICS = (
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
            if not isinstance(name, str) or not OOD_NAME.fullmatch(name):
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
        return [f"ood_{name}_{metric}" for name in self.sources for metric in OOD_METRICS]

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
