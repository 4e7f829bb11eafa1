"""The collected posterior: samples, their weights, and the predictive that averages over them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_sgmcmc.chains.sample import PosteriorSample, SampleRecord
from lightning_sgmcmc.checks import check_choice, check_number
from lightning_sgmcmc.contour.learned import LearnedContour
from lightning_sgmcmc.diagnostics.samples import effective_sample_size, normalised_weights, resample
from lightning_sgmcmc.likelihoods import Prediction
from lightning_sgmcmc.model import EnergyModel
from lightning_sgmcmc.posterior.checks import check_fits, check_sample
from lightning_sgmcmc.posterior.description import NotDescribableError, build
from lightning_sgmcmc.posterior.disk import DiskStore
from lightning_sgmcmc.posterior.export import SMALL, to_inference_data
from lightning_sgmcmc.posterior.predictive import append_with_new_statistics, average_predictions
from lightning_sgmcmc.posterior.store import MemoryStore, SampleStore, StoreView


class Posterior:
    """Samples of a posterior and what they predict.

    Iterating yields `PosteriorSample`s in the order of drawing, read from the disk one at a time.

    Args:
        store: the samples.
        model: the `BayesianModule` that the samples are states of, for predictions; its own weights stay untouched.
            None leaves the samples without predictions.

    >>> from lightning_sgmcmc.posterior.store import MemoryStore
    >>> store = MemoryStore()
    >>> for step, weight in ((10, 1.0), (20, 2.0)):
    ...     store.append(PosteriorSample(step, 0, 0, 1.0, 0.0, {"w": torch.tensor([weight])}, {}))
    >>> posterior = Posterior(store)
    >>> len(posterior), posterior.effective_sample_size
    (2, 2.0)
    """

    def __init__(self, store: SampleStore, model: EnergyModel | None = None) -> None:
        self.store = store
        self.model = model
        self._why_no_model = "no model was given"

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: EnergyModel | None = None,
        device: str | torch.device = "cpu",
        skip_damaged: bool = False,
    ) -> "Posterior":
        """Open a store on disk.

        Args:
            path: the folder that a `SampleCollector` wrote.
            model: a module like the one that was trained; None builds it from the store's description, where it has one
                (networks of torch's layers, and importable classes whose arguments are plain data).
            device: where predictions are computed.
            skip_damaged: read all samples once and leave out those that are damaged, missing, of another network or
                not finite, with a warning; files and manifest stay as they are.

        Raises:
            FileNotFoundError: if there is no store.
            ValueError: if the manifest is damaged or not one of ours, or the samples are of another network than
                `model`.
        """
        store = DiskStore(path, skip_damaged=skip_damaged)
        posterior = cls(store, model)
        if model is None:
            posterior._build_model(store.model_description)
        elif len(store) > 0 and not skip_damaged:
            check_fits(store[0], model)
        if skip_damaged:
            posterior._leave_out_damaged(store)
        if posterior.model is not None:
            posterior.model.to(device)
        return posterior

    def _build_model(self, description: Any) -> None:
        if description is None:
            self._why_no_model = "the store has no description of its network"
            return
        try:
            with torch.random.fork_rng(devices=[]):  # the weights it is made with are not used
                self.model = build(description)
        except NotDescribableError as error:
            self._why_no_model = str(error)

    def _leave_out_damaged(self, store: DiskStore) -> None:
        """Read all samples; those that cannot be used leave `records`, in memory only."""
        sound, reasons = [], [f"line {number} of the manifest is damaged" for number in store.damaged_lines]
        for index, record in enumerate(store.records):
            try:
                check_sample(store[index], self.model)
                sound.append(record)
            except ValueError as error:
                reasons.append(str(error))
        if reasons:
            total = len(store.records) + len(store.damaged_lines)
            rank_zero_warn(
                f"{len(reasons)} of {total} samples in {store.path} are left out, the first since {reasons[0]}"
            )
        store.records = sound

    def __len__(self) -> int:
        return len(self.store)

    def __iter__(self) -> Iterator[PosteriorSample]:
        return iter(self.store)

    def __getitem__(self, index: int) -> PosteriorSample:
        return self.store[index]

    @property
    def records(self) -> list[SampleRecord]:
        """The samples' records, which are known without loading the samples."""
        return self.store.records

    @property
    def log_weights(self) -> Tensor:
        """The samples' log importance weights, shape (S,), float64, up to a constant."""
        return torch.tensor([record.log_weight for record in self.records], dtype=torch.float64)

    @property
    def weights(self) -> Tensor:
        """The samples' weights, shape (S,), float64, summing to 1."""
        return normalised_weights(self.log_weights)

    @property
    def effective_sample_size(self) -> float:
        """(Σw)²/Σw² of the weights: how many equally weighted samples they are worth, autocorrelation apart."""
        return effective_sample_size(self.log_weights)

    @property
    def contour(self) -> LearnedContour | None:
        """What a contour sampler had learned at the end, None without one.

        Raises:
            ValueError: if its file is damaged.
        """
        return self.store.contour

    def reweighted(self, by: Literal["sample", "final"] = "final", exponent: float = 1.0) -> "Posterior":
        """Return this posterior with other importance weights; nothing is copied.

        Args:
            by: "sample" takes the weights at the time of each sample, "final" those by the π of the run's end and the
                samples' energies.
            exponent: α of tempered weights w^α; 1 leaves them, 0 makes all equal.

        Raises:
            ValueError: for another `by`, a negative exponent, or "final" without a learned contour.
        """
        check_choice("by", by, ("sample", "final"))
        check_number("exponent", exponent)
        log_weights = self.log_weights
        if by == "final":
            contour = self.contour
            if contour is None:
                raise ValueError(
                    "by='final' needs what a contour sampler has learned, and there is none: the samples are of a run "
                    "without ContourGradient"
                )
            energies = torch.tensor([record.energy for record in self.records], dtype=torch.float64)
            chains = torch.tensor([record.chain for record in self.records])
            device = contour.state.log_vector.device
            log_weights = contour.log_weights(energies.to(device), chains.to(device)).cpu()
        return self._selected(range(len(self)), (exponent * log_weights).tolist())

    def resample(
        self,
        count: int | None = None,
        method: Literal["systematic", "multinomial"] = "systematic",
        seed: int = 0,
    ) -> "Posterior":
        """Return equally weighted samples, drawn with repetition by the weights; nothing is copied.

        Args:
            count: how many; None is as many as there are.
            method: "systematic" or "multinomial", see `lightning_sgmcmc.diagnostics.resample`.
            seed: of the draw.

        Raises:
            ValueError: for an argument out of range, or weights that are NaN or all 0.

        Source: Deng et al. 2020 (CSGLD), Algorithm 1.
        """
        indices = resample(self.log_weights, count, method, torch.Generator().manual_seed(seed)).tolist()
        return self._selected(indices, [0.0] * len(indices))

    def _selected(self, indices: Sequence[int], log_weights: Sequence[float]) -> "Posterior":
        view = StoreView(self.store, indices, log_weights)
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
        store.contour = self.store.contour
        return Posterior(store, self.model)

    def predict(self, x: Any, return_samples: bool = False) -> Prediction:
        """Average the predictive distribution over the samples, by their weights.

        Args:
            x: inputs, a tensor (n, …); or an iterable of batches (a DataLoader), each inputs or a tuple that starts
                with them.
            return_samples: also keep each sample's prediction, in the order of the samples; memory grows with them.

        Returns:
            the predictive of all inputs, on the model's device.

        Raises:
            RuntimeError: if there are no samples, or no model (see `load`).
            ValueError: if there are no inputs, a loader shuffles, or no sample has a weight.
        """
        model = self._ready_model()
        _ = self.weights  # raises if they are NaN, or all zero
        return average_predictions(model, self, x, return_samples)

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
        """Re-estimate the running statistics of BatchNorm for every sample, by one pass over training data.

        A sample's statistics are an average over the steps before it, so they lag behind its weights. Afterwards they
        are the plain averages at its weights. Dropout stays off.

        Args:
            batches: an iterable that can be repeated for each sample (a DataLoader), of inputs or tuples that
                start with them.

        Returns:
            a new posterior, in memory; this one stays as it is.
        """
        model, store = self._ready_model(), MemoryStore()
        append_with_new_statistics(store, model, self, batches)
        return Posterior(store, model)

    def _ready_model(self) -> EnergyModel:
        if len(self) == 0:
            raise RuntimeError("there are no posterior samples")
        if self.model is None:
            raise RuntimeError(
                f"predictions need the network, and {self._why_no_model}: use Posterior.load(path, model=…)"
            )
        return self.model
