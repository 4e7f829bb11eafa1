"""The collected posterior: samples, their weights, and the predictive that averages over them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from lightning_sgmcmc.chains.sample import PosteriorSample, SampleRecord, comparable_log_weights
from lightning_sgmcmc.checks import check_choice, check_number
from lightning_sgmcmc.contour.learned import LearnedContour
from lightning_sgmcmc.diagnostics.samples import normalised_weights, resample, weight_efficiency
from lightning_sgmcmc.evaluation.html_table import html_table
from lightning_sgmcmc.model import EnergyModel
from lightning_sgmcmc.posterior.calibration import (
    Calibration,
    fit_calibration,
    identify,
    save_calibration,
    saved_calibration,
)
from lightning_sgmcmc.posterior.checks import check_fits, sound_records
from lightning_sgmcmc.posterior.description import warn_of_other_network
from lightning_sgmcmc.posterior.disk import DiskStore
from lightning_sgmcmc.posterior.display import SHOWN, samples_in, summary
from lightning_sgmcmc.posterior.export import SMALL, to_inference_data
from lightning_sgmcmc.posterior.network import model_of
from lightning_sgmcmc.posterior.predictive import ReadySamples, average_predictions, ready_samples, with_new_statistics
from lightning_sgmcmc.posterior.store import MemoryStore, SampleStore, StoreView
from lightning_sgmcmc.predictions import Prediction


class Posterior:
    """Samples of a posterior and their predictions.

    Iterating yields `PosteriorSample`s in the order of drawing, read from disk one at a time.

    Args:
        store: the samples.
        model: the `BayesianModule` of the samples, for predictions; its own weights are not changed. None disables
            predictions.

    >>> from lightning_sgmcmc.posterior.store import MemoryStore
    >>> store = MemoryStore()
    >>> for step, weight in ((10, 1.0), (20, 2.0)):
    ...     store.append(PosteriorSample(step, 0, 0, 1.0, 0.0, {"w": torch.tensor([weight])}, {}))
    >>> posterior = Posterior(store)
    >>> len(posterior), posterior.weight_efficiency
    (2, 1.0)
    """

    def __init__(self, store: SampleStore, model: EnergyModel | None = None) -> None:
        if not isinstance(store, SampleStore):
            raise TypeError(
                f"store must be a sample store, got a {type(store).__name__}: open a folder by Posterior.load(path)"
            )
        self.store = store
        self.model = model
        self.calibration: Calibration | None = None
        """What `calibrate` has fitted, which predictions use; None leaves them as they are."""
        self._why_no_model = "no model was given"
        self._ready: ReadySamples | None = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_ready": None}

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: nn.Module | None = None,
        device: str | torch.device = "cpu",
        skip_damaged: bool = False,
        net: nn.Module | None = None,
        trust: bool = False,
    ) -> "Posterior":
        """Open a store on disk.

        Args:
            path: the folder that a `SampleCollector` wrote, or the folder of a run that has it as `samples`.
            model: a module like the trained one; None builds it from the store's description, if any (networks of
                torch's layers, torchvision's models, and classes whose arguments are plain data and whose module is
                imported). A plain network is taken as `net`.
            device: device for predictions.
            skip_damaged: read all samples once and skip those that are damaged, missing, of another network or not
                finite, with a warning; files and manifest are not changed.
            net: a network like the trained one, to build the module with; its likelihood comes from the description.
            trust: import whatever modules the description names, which runs their code; only for folders whose writer
                you trust.

        Raises:
            FileNotFoundError: if there is no store.
            ValueError: if the manifest is damaged or has another format, both `model` and `net` are given, the
                description has no place for `net`, or the samples belong to another network than the given one.
        """
        if model is not None and net is not None:
            raise ValueError("model already contains a network: pass either model=… or net=…")
        if model is not None and not isinstance(model, EnergyModel):
            model, net = None, model
        store = DiskStore(samples_in(Path(path)), skip_damaged=skip_damaged)
        posterior = cls(store)
        if model is None:
            model, posterior._why_no_model = model_of(store, net, trust)
        elif len(store) > 0 and not skip_damaged:
            check_fits(store[0], model)
            warn_of_other_network(store.model_description, model)
        posterior.model = model
        if skip_damaged:
            store.records = sound_records(store, model)  # in memory only
        posterior.calibration = saved_calibration(store)
        if model is not None:
            model.to(device)
        return posterior

    def __len__(self) -> int:
        return len(self.store)

    def __iter__(self) -> Iterator[PosteriorSample]:
        return iter(self.store)

    @overload
    def __getitem__(self, index: int) -> PosteriorSample: ...

    @overload
    def __getitem__(self, index: slice) -> "Posterior": ...

    def __getitem__(self, index: int | slice) -> "PosteriorSample | Posterior":
        """Return a sample, or the posterior of a slice of them; nothing is copied."""
        if not isinstance(index, slice):
            return self.store[index]
        chosen = range(*index.indices(len(self)))
        return self._selected(chosen, [self.records[i].log_weight for i in chosen])

    def __repr__(self) -> str:
        calibrated = f", calibrated: {self.calibration}" if self.calibration is not None else ""
        where = f", {path}" if (path := getattr(self.store, "path", "")) else ""
        return f"Posterior({summary(self.records)}{calibrated}{where})"

    def _repr_html_(self) -> str:
        rows = [(r.step, r.chain, r.cycle, r.energy, r.log_weight) for r in self.records[:SHOWN]]
        more = [] if len(self) <= SHOWN else [("…",) * 5]
        return html_table(repr(self), ("step", "chain", "cycle", "energy", "log-weight"), [*rows, *more])

    @property
    def records(self) -> list[SampleRecord]:
        """The samples' records, available without loading the samples."""
        return self.store.records

    @property
    def log_weights(self) -> Tensor:
        """The samples' log importance weights, shape (S,), float64, up to one constant.

        If each chain learned its own π (a `ContourGradient` of several chains that do not interact), the records'
        log-weights have a constant of their own for each chain. They are then normalised within each chain, so that
        chains count alike.
        """
        return comparable_log_weights(self.records)

    @property
    def weights(self) -> Tensor:
        """The samples' weights, shape (S,), float64, summing to 1."""
        return normalised_weights(self.log_weights)

    @property
    def weight_efficiency(self) -> float:
        """(Σw)²/(S·Σw²) of the S samples' weights, a share in (0, 1]; 1 for equal weights."""
        return weight_efficiency(self.log_weights)

    @property
    def contour(self) -> LearnedContour | None:
        """The final learned state of a contour sampler, None without one.

        Raises:
            ValueError: if its file is damaged.
        """
        return self.store.contour

    def reweighted(self, by: Literal["sample", "final"] = "final", exponent: float = 1.0) -> "Posterior":
        """Return this posterior with other importance weights; nothing is copied.

        Args:
            by: "sample" uses the weights from the time of each draw, "final" those from the final π and the samples'
                energies.
            exponent: α of tempered weights w^α; 1 keeps them, 0 makes all of a chain equal.

        Raises:
            ValueError: for another `by`, a negative exponent, or "final" without a learned contour.
        """
        check_choice("by", by, ("sample", "final"))
        check_number("exponent", exponent)
        log_weights, comparable = self.log_weights, None
        if by == "final":
            contour = self.contour
            if contour is None:
                raise ValueError(
                    "by='final' needs the state learned by a contour sampler, and these samples come from a run "
                    "without ContourGradient: use by='sample'"
                )
            energies = torch.tensor([record.energy for record in self.records], dtype=torch.float64)
            chains = torch.tensor([record.chain for record in self.records])
            device = contour.state.log_vector.device
            log_weights = contour.log_weights(energies.to(device), chains.to(device)).cpu()
            comparable = contour.is_shared
        return self._selected(range(len(self)), (exponent * log_weights).tolist(), comparable)

    def resample(
        self,
        count: int | None = None,
        method: Literal["systematic", "multinomial"] = "systematic",
        seed: int = 0,
    ) -> "Posterior":
        """Return equally weighted samples, drawn with replacement by the weights; nothing is copied.

        Args:
            count: number of draws; None means the number of samples.
            method: "systematic" or "multinomial", see `lightning_sgmcmc.diagnostics.resample`.
            seed: seed of the draw.

        Raises:
            ValueError: for an argument out of range, or weights that are NaN or all 0.

        Source: Deng et al. 2020 (CSGLD), Algorithm 1.
        """
        indices = resample(self.log_weights, count, method, torch.Generator().manual_seed(seed)).tolist()
        return self._selected(indices, [0.0] * len(indices), True)

    def _selected(
        self, indices: Sequence[int], log_weights: Sequence[float], comparable: bool | None = None
    ) -> "Posterior":
        view = StoreView(self.store, indices, log_weights, comparable)
        chosen = Posterior(view, self.model)
        chosen._why_no_model = self._why_no_model
        return chosen

    def in_memory(self) -> "Posterior":
        """Return this posterior with all samples read into memory, for many small predictions."""
        if isinstance(self.store, MemoryStore):
            return self
        store = MemoryStore()
        for sample in self:
            store.append(sample)
        store.contour, store.scaling = self.store.contour, self.store.scaling
        kept = Posterior(store, self.model)
        kept.calibration = self.calibration
        return kept

    def standardised(self) -> "Posterior":
        """Return this posterior with predictions in the units of the standardised targets; nothing is copied."""
        chosen = self._selected(range(len(self)), [record.log_weight for record in self.records])
        chosen.store.scaling, chosen.calibration = None, self.calibration
        return chosen

    def predict(self, x: Any, return_samples: bool = False) -> Prediction:
        """Average the predictive distribution over the samples with their weights.

        If the datamodule of the fit standardised its targets (`target_mean`, `target_std`), the store has their
        scaling, and predictions are in the data's units; `posterior.standardised().predict(x)` leaves them as the
        network sees them. Scale inputs as the datamodule did. Small samples stay in memory. On a GPU samples run at
        once (`torch.vmap`), on a CPU one after another, which is faster there.

        Args:
            x: a tensor, array or data frame (n, …), a dict by the names of `forward`, or a tuple of all that it needs;
                or batches (a loader) of these or as in training, read in one pass. Floats get the samples' dtype.
            return_samples: also return each sample's prediction, in the order of the samples, at the cost of memory.

        Returns:
            the predictive of all inputs, on the model's device. It keeps each sample's distribution, for `interval`,
            `quantile`, `cdf` and `sample`, if all take at most 64 MB or with return_samples.

        Raises:
            RuntimeError: if there are no samples, or no model.
            TypeError: if x is a tuple that could be one batch or several.
            ValueError: if there are no inputs, or all weights are 0.
        """
        model = self._ready_model()
        normalised_weights(log_weights := self.log_weights)  # raises if they are NaN, or all zero
        self._ready = ready_samples(self._ready, self.store, model)
        prediction = average_predictions(self._ready, log_weights.tolist(), x, return_samples)
        prediction = prediction if self.calibration is None else self.calibration.applied(prediction)
        scaling = self.store.scaling
        return prediction if scaling is None else prediction.rescaled(scaling.mean, scaling.std)

    def calibrate(self, data: Any, save: bool = False) -> "Posterior":
        """Return this posterior with calibrated predictions, by one number that minimizes the NLL of validation data.

            classes: p_k ∝ p̄_k^(1/T), p̄ the averaged predictive;   regression: std → factor·std, by the NLL of
            N(mean, (factor·std)²)

        The average is scaled, not each sample: T = 2 halves the logits log p̄. For one sample this is temperature
        scaling of its network. Intervals are scaled alike, those of numbers about the mean. The samples' weights are
        respected. `trainer.test` evaluates the average without it; other samples or weights are calibrated again.

        Args:
            data: validation data with targets, not used in the fit: a loader or a list of batches as in training, or a
                datamodule, whose validation data are used.
            save: also write the number beside the samples (`calibration.json`), where `Posterior.load` finds it.

        Raises:
            ValueError: if there are no data; with save, if the samples are in no folder.
            TypeError: if `data` has another type, or the likelihood predicts neither classes nor real numbers.

        Source: Guo et al. 2017; Rahaman & Thiery 2021, section 4 (scaling the average of an ensemble).
        """
        chosen = self._selected(range(len(self)), [record.log_weight for record in self.records])
        given = self._ready_model(), self, self.log_weights.tolist(), data, identify(self.records)
        chosen.calibration = fit_calibration(*given)
        if save:
            save_calibration(chosen.calibration, self.store)
        return chosen

    def to_arviz(
        self,
        parameters: Sequence[str] | None = None,
        predictions: Mapping[str, Tensor] | None = None,
        max_elements: int = SMALL,
    ) -> Any:
        """Return the samples as ArviZ's container; see `lightning_sgmcmc.posterior.export.to_inference_data`.

        Example::

            prediction = posterior.predict(x, return_samples=True)
            data = posterior.to_arviz(predictions={"probabilities": prediction.sample_probabilities})
            arviz.summary(data, group="posterior_predictive")
        """
        return to_inference_data(self.store, parameters, predictions, max_elements)

    def update_batch_norm(self, batches: Iterable[Any]) -> "Posterior":
        """Re-estimate BatchNorm's running statistics for every sample, each by one pass over training data.

        A sample's statistics are an average over earlier steps, so they lag its weights. The new statistics are plain
        averages at its weights. Dropout is off.

        Args:
            batches: an iterable of inputs, or of tuples that start with inputs, that can be repeated for each sample
                (a DataLoader).

        Returns:
            a new posterior, in memory; this one is unchanged.
        """
        model = self._ready_model()
        return Posterior(with_new_statistics(self.store, model, batches), model)

    def _ready_model(self) -> EnergyModel:
        if len(self) == 0:
            raise RuntimeError("the posterior has no samples to predict with")
        if self.model is None:
            remedy = "use Posterior.load(path, net=…) or model=…"
            raise RuntimeError(f"predictions need the network, but {self._why_no_model}; {remedy}")
        return self.model
