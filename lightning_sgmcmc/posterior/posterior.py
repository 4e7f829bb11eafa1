"""The collected posterior: samples, their weights, and the predictive that averages over them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from lightning_sgmcmc.batches.inputs import check_batches
from lightning_sgmcmc.batches.loader import is_shuffled, warn_of_order
from lightning_sgmcmc.chains.execution import borrowed, in_turn
from lightning_sgmcmc.chains.together import dtype_of
from lightning_sgmcmc.checks import check_count
from lightning_sgmcmc.diagnostics.draws import normalised_weights
from lightning_sgmcmc.evaluation.loader_average import Evaluation
from lightning_sgmcmc.evaluation.scoring import hooked
from lightning_sgmcmc.files import local_path
from lightning_sgmcmc.likelihoods import Likelihood
from lightning_sgmcmc.model import EnergyModel
from lightning_sgmcmc.namespace import pl, rank_zero_warn
from lightning_sgmcmc.posterior.calibration import fit_calibration, save_calibration, saved_calibration
from lightning_sgmcmc.posterior.decisions import Decisions
from lightning_sgmcmc.posterior.densities import evaluate_samples
from lightning_sgmcmc.posterior.description import model_of, warn_of_other_network
from lightning_sgmcmc.posterior.disk import DiskStore
from lightning_sgmcmc.posterior.distillation import Compression, Distillation, Student, compress
from lightning_sgmcmc.posterior.export import plot_map, plot_predictions, plot_reliability, plot_trace, samples_in
from lightning_sgmcmc.posterior.networks import Ensemble, State, mean_likelihood, plain_networks, samples_of_states
from lightning_sgmcmc.posterior.predictive import (
    average_predictions,
    check_fits,
    ready_samples,
    sound_records,
    with_new_statistics,
)
from lightning_sgmcmc.posterior.sharing import SCHEME, pulled, push, save_samples
from lightning_sgmcmc.predictions import ClassPrediction, MultiLabelPrediction, Prediction
from lightning_sgmcmc.priors import FlatPrior
from lightning_sgmcmc.tables import is_frame
from lightning_sgmcmc.tensors import copied, exact

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Posterior(Decisions):
    """Samples of a posterior and their predictions.

    Iterating yields `PosteriorSample`s in the order of drawing, read from disk one at a time.

    Args:
        store: the samples.
        model: the `BayesianModule` of the samples, for predictions; its own weights are not changed. None disables
            predictions.

    >>> from lightning_sgmcmc.chains.samples import PosteriorSample
    >>> from lightning_sgmcmc.posterior.store import MemoryStore
    >>> store = MemoryStore()
    >>> for step, weight in ((10, 1.0), (20, 2.0)):
    ...     store.append(PosteriorSample(step, 0, 0, 1.0, 0.0, {"w": torch.tensor([weight])}, {}))
    >>> posterior = Posterior(store)
    >>> len(posterior), posterior.weight_efficiency
    (2, 1.0)
    """

    compression: Compression | None = None
    """What the samples that `compress` has chosen lose; None for others, and after saving."""

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
            path: the folder that a `SampleCollector` or `save` wrote, or the folder of a run that has it as `samples`;
                or "hf://owner/name" (also "…@revision") of the Hugging Face Hub, which is downloaded once.
            model: a module like the trained one; None builds it from the store's description, if any (networks of
                torch's layers, models of torchvision and timm, and classes whose arguments are plain data and whose
                module is imported). A plain network is taken as `net`.
            device: device for predictions.
            skip_damaged: read all samples once and skip those that are damaged, missing, of another network or not
                finite, with a warning; files and manifest are not changed.
            net: a network like the trained one, to build the module with; its likelihood comes from the description.
            trust: import whatever modules the description names, which runs their code; only for folders whose writer
                you trust.

        Raises:
            FileNotFoundError: if there is no store.
            ImportError: for "hf://…" without huggingface_hub.
            ValueError: if the manifest is damaged or has another format, both `model` and `net` are given, the
                description has no place for `net`, or the samples belong to another network than the given one.
        """
        if model is not None and net is not None:
            raise ValueError("model already contains a network: pass either model=… or net=…")
        model = getattr(model, "_orig_mod", model)  # of torch.compile
        if model is not None and not isinstance(model, EnergyModel):
            model, net = None, model
        path = pulled(str(path)) if str(path).startswith(SCHEME) else path
        folder = samples_in(local_path(path, "path", "copy the folder to one first"))
        store = DiskStore(folder, skip_damaged=skip_damaged)
        store.hold()
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
            with in_turn(model):
                model.to(device)
        return posterior

    @classmethod
    def from_states(
        cls,
        net: nn.Module,
        states: Iterable[State] | str | Path,
        likelihood: Likelihood,
        weights: Sequence[float] | None = None,
        device: str | torch.device = "cpu",
    ) -> "Posterior":
        """Make a posterior of networks that were trained elsewhere: an ensemble, folds of a cross-validation, or
        snapshots.

        It predicts, calibrates, distils and draws pictures as any other; its networks count as chains of one sample,
        and their energies are unknown (NaN).

        Args:
            net: a network like the trained ones, in which nothing is changed.
            states: state dicts, modules, or files: a state dict of torch.save or safetensors, or a checkpoint of
                Lightning, whose names may begin with those of a part (`model.`, `net.`); or folders with one such file
                each, as transformers writes them. A folder alone has the files of all networks, by their names.
            likelihood: turns outputs into predictions, as it would in a `BayesianModule`.
            weights: of the networks, ≥ 0, in their order; None weighs all alike.
            device: device for predictions.

        Raises:
            ValueError: if there are no states, one lacks a tensor of the network or has another shape, a file cannot be
                read as weights, or the weights are not as many as the states or not finite numbers ≥ 0.
            FileNotFoundError: if a file is missing, or a folder has none.

        Example::

            members = [torch.nn.Linear(4, 3) for _ in range(5)]  # trained elsewhere; or a folder of their checkpoints
            posterior = Posterior.from_states(torch.nn.Linear(4, 3), members, Categorical())
            prediction = posterior.predict(torch.randn(10, 4))
        """
        model = EnergyModel(copied(net), likelihood, FlatPrior())
        posterior = cls(samples_of_states(states, model), model)
        if weights is not None:
            given = exact(weights).reshape(-1)
            if len(given) != len(posterior) or not bool(
                (given >= 0).all() & given.isfinite().all() & (given.sum() > 0)
            ):
                raise ValueError(
                    f"weights must be {len(posterior)} finite numbers ≥ 0, one for each state and not all 0, got "
                    f"{list(weights)}"
                )
            posterior.store.set_log_weights(given.log().tolist())
        model.to(device)
        return posterior

    def extend(self, states: Iterable[State] | str | Path, weights: Sequence[float] | None = None) -> "Posterior":
        """Return this posterior with further networks that were trained elsewhere, such as another fold; see
        `from_states`.

        Each network counts as one sample, as in `merge`: this posterior's samples count by their number. Predictions
        stay in the units of this one's targets, in which the networks must have been trained. Parameters of the
        likelihood, such as a learned noise, are the mean of this one's samples.

        Args:
            states: as for `from_states`.
            weights: of the networks among each other, ≥ 0, in their order; None weighs all alike.

        Raises:
            RuntimeError: if there are no samples, or no model with a network and a likelihood.
            ValueError: as `from_states` and `merge` do.
        """
        model = self._ready_model()
        if model.likelihood is None or "net" not in model._modules:
            raise RuntimeError(
                f"{type(model).__name__} has no network and likelihood of their own to read states with: make "
                "Posterior.from_states(net, states, likelihood), and merge"
            )
        with borrowed(model), model.at_chain(0):
            likelihood = mean_likelihood(model.likelihood, self, self.weights)
            net = copied(model.net).to(dtype_of(self.store[0].parameters))
            others = type(self).from_states(net, states, likelihood, weights)
        others.store.columns = self.columns
        others.model = model
        return self.merge(others)

    def predict(self, x: Any, return_samples: bool = False) -> Prediction:
        """Average the predictive distribution over the samples with their weights.

        The store knows how the fit's datamodule scaled its data. Predictions are in the data's units;
        `posterior.standardised().predict(x)` leaves them as the network sees them. A data frame is in the data's units
        too: its columns are taken by their names, encoded and scaled as in the fit. A tensor or a loader's batch is
        what the network receives. Numbers whose mean is over 1,000 standard deviations from 0 are float64. Small
        samples stay in memory. On a GPU samples run at once (`torch.vmap`), on a CPU one after another.

        If there are samples of `novelty`, the mutual information (`epistemic`) is theirs, without a calibration, and
        the prediction also has `expected_entropy`. Probabilities, entropy and `aleatoric` are of the weighted samples.

        Args:
            x: a data frame, a tensor or an array (n, …), a dict by the names of `forward`, or a tuple of all that it
                needs; or batches of these or as in training, in a list, or of a loader, whose batches pass the
                module's batch hooks. Floats get the samples' dtype.
            return_samples: also return each sample's prediction, in the order of the samples, at the cost of memory.

        Returns:
            the predictive of all inputs, on the model's device. It keeps each sample's distribution, for `interval`,
            `quantile`, `cdf` and `sample`, if all take at most 64 MB or with return_samples.

        Raises:
            RuntimeError: if there are no samples, or no model.
            TypeError: if x is a tuple that could be one batch or several, or holds no numbers.
            ValueError: if there are no inputs, or all weights are 0; if a frame lacks a column of the fit or has
                another one; for a NumPy array if the fit standardised its inputs, since its unit is unknown: pass
                `posterior.inputs(x)`.
        """
        model = self._ready_model()
        normalised_weights(log_weights := self.log_weights)  # raises if they are NaN, or all zero
        warn_of_order(x, "predictions")
        x = list(hooked(x, model)) if self.novelty is not None and (isinstance(x, Iterator) or is_shuffled(x)) else x
        ready = self._ready = ready_samples(self._ready, self.store, model)
        prediction = average_predictions(ready, log_weights.tolist(), x, return_samples)
        prediction = prediction if self.calibration is None else self.calibration.applied(prediction)
        if self.novelty is not None and isinstance(prediction, ClassPrediction | MultiLabelPrediction):
            prediction = prediction.with_epistemic_of(self.novelty.predict(x))
        scaling = self.store.scaling
        if scaling is not None:
            prediction = prediction.rescaled(scaling.shift, scaling.factor, scaling.is_far)
        return prediction.named(self.store.columns.labels, x.index if is_frame(x) else None)

    def predict_batches(self, batches: Iterable[Any], return_samples: bool = False) -> Iterator[Prediction]:
        """Yield the predictive of each batch as it is read, for data whose predictions do not fit in memory.

        The data are read in one pass. The samples stay in memory between batches if they take at most an eighth of the
        free memory (on CUDA a quarter). Otherwise a warning says that they are read from disk again for every batch,
        and larger batches are the remedy.

        Args:
            batches: an iterable of batches (a DataLoader), as `predict` takes them.
            return_samples: also return each sample's prediction.

        Raises:
            RuntimeError: if there are no samples, or no model.
            TypeError: if batches is one array instead of an iterable of batches.
        """
        check_batches(batches)
        return self._predictions(batches, return_samples)

    def _predictions(self, batches: Iterable[Any], return_samples: bool) -> Iterator[Prediction]:
        warn_of_order(batches, "predictions")
        for number, batch in enumerate(hooked(batches, self._ready_model())):
            if number == 1 and self._ready is not None and not self._ready.are_kept:
                rank_zero_warn(
                    "predict_batches reads all samples from the store again for every batch, since they take more "
                    "memory than is kept: use larger batches, or fewer samples by posterior.thin(count=…)."
                )
            yield self.predict(batch if is_frame(batch) else [batch], return_samples)

    def save(self, path: str | Path, dtype: Any = None, base: Literal["mean"] | None = None) -> "Posterior":
        """Write these samples, such as a thinned or merged selection, to a folder that `Posterior.load` opens.

            stored = round(θ - base),   read = stored + base, base 0 by default

        Weights, columns, calibration, the samples of `novelty` and the network's description go with them. A sample
        that `resample` has drawn repeatedly is written once, with the sum of its weights.

        Args:
            path: a new folder.
            dtype: "bfloat16" (8 significant bits) or "float16" (11 bits, numbers up to 65504) halves the size: float32
                parameters are rounded, and are float32 again when read, so predictions are computed in float32. Running
                statistics and other buffers stay as they are. None keeps all as it is stored, "float32" writes float32
                parameters in full.
            base: "mean" stores each parameter's difference to its mean over the samples, and the mean once in float32:
                more digits where the samples differ little.

        Returns:
            the posterior of the folder, with this one's model.

        Raises:
            FileExistsError: if the folder contains samples.
            RuntimeError: if there are no samples.
            ValueError: for an unknown dtype or base, a base without a dtype, parameters that are not float32, or
                numbers too large for float16.
        """
        saved = Posterior(save_samples(self, path, dtype, base), self.model)
        saved._why_no_model = self._why_no_model
        saved.calibration = saved_calibration(saved.store)
        return saved

    def push_to_hub(
        self,
        repo_id: str,
        dtype: Any = None,
        base: Literal["mean"] | None = None,
        private: bool | None = None,
        run: str | Path | None = None,
    ) -> str:
        """Upload these samples to the Hugging Face Hub, with a card; `Posterior.load` takes the address returned.

        The card (README.md) says what the run was, from its `results.json`: name, kind, sentences, metrics, calibration
        and versions, without paths. The files are those of `save`, with the names of columns and classes. Samples that
        the repository had before are replaced. huggingface_hub has the login.

        Args:
            repo_id: "owner/name"; it is created if needed.
            dtype: see `save`.
            base: see `save`.
            private: whether a new repository is private; None leaves it to the owner's default.
            run: folder of the run whose `results.json` the card quotes; None takes the one around the samples, if any.

        Returns:
            "hf://owner/name".

        Raises:
            ImportError: without huggingface_hub.
            ValueError: for another form of repo_id, a run without results, or as `save` does.
            RuntimeError: if there are no samples.
        """
        if self.novelty is not None:
            rank_zero_warn("The samples of posterior.novelty are not sent: mutual information will be of the others.")
        return push(self, repo_id, dtype, base, private, run)

    def networks(self) -> Iterator[nn.Module]:
        """Yield each sample's network: a plain module in evaluation mode, on the model's device, made one at a time.

        It is a copy of the module's `net` with the sample's tensors. Of a subclass of `BayesianModule` that defines
        `forward` itself, it is a module with its layers and that forward. Parameters that samples do not contain are
        one tensor that all networks share. The samples' `weights` are in the same order.

        Raises:
            RuntimeError: if there are no samples, or no model.
            ValueError: if a sample is damaged, they are dropout masks, or a layer has a weak reference to another.
        """
        return (network for network, _ in plain_networks(self.store, self._ready_model()))

    def ensemble(self, outputs: Sequence[str] | None = None) -> Ensemble:
        """Return the average as one plain network, for torch.export, ONNX and `torch.save`.

        Its forward takes the network's inputs, those in the data's units by `posterior.inputs(x)`, and returns what
        `predict` does, calibration and units included: class probabilities (n, K), or the mean and the standard
        deviation (n, D). It has a copy of every sample with a
        positive weight, and evaluates them one after another.

        Args:
            outputs: names of other parts of the prediction to return, such as ("probabilities", "mutual_information").
                All are of the samples that predict, not of `novelty`.

        Raises:
            RuntimeError: if there are no samples, or no model with a likelihood.
            ValueError: if a sample is damaged, or the samples are dropout masks.
        """
        model = self._ready_model()
        if model.likelihood is None:
            raise RuntimeError(
                f"{type(model).__name__} has no likelihood object to define a predictive: pass likelihood=…"
            )
        weights = self.weights.tolist()
        kept = [i for i, weight in enumerate(weights) if weight > 0]
        members: Any = list(plain_networks(self._selected(kept, [0.0] * len(kept)).store, model, with_hooks=True))
        return Ensemble(members, [weights[i] for i in kept], self.calibration, self.store.scaling, outputs)

    def evaluate(
        self, data: Any, metrics: Mapping[str, Callable[..., Any]] | None = None, group: Any = None
    ) -> Evaluation:
        """Return the metrics of the average and of single samples on any data with targets, and of guessing.

        They are those that `trainer.test` computes, in the data's units, without a calibration. After `calibrate`,
        `calibrated` of the result has those of the calibrated predictions.

        Args:
            data: data with targets: a loader that does not shuffle, a list of batches as in training, or a datamodule,
                whose validation data are used. Frames and series in a batch are in the data's units.
            metrics: further ones by name, functions or torchmetrics of class probabilities (n, K) and labels (n,), or
                of means and targets (n, D).
            group: a label for each datum, in the data's order, such as a column of the frame: `groups` of the result
                has the metrics of each group.

        Raises:
            RuntimeError: if there are no samples, or no model.
            TypeError: if `data` has another type.
            ValueError: if there are no data, `group` has another length, or comes with a loader that shuffles.

        Example::

            posterior = Posterior.from_states(torch.nn.Linear(4, 3), [torch.nn.Linear(4, 3)], Categorical())
            batch = torch.randn(20, 4), torch.randint(3, (20,))
            found = posterior.evaluate([batch], group=["old"] * 10 + ["new"] * 10)
            found.bma["nll"], found.guessing["nll"], found.groups["old"]["accuracy"]
        """
        return evaluate_samples(self, self._ready_model(), data, metrics, group)

    def calibrate(self, data: Any, save: bool = False) -> "Posterior":
        """Return this posterior with calibrated predictions, by one number that minimizes the NLL of validation data.

            classes: p_k ∝ p̄_k^(1/T), p̄ the averaged predictive;   regression: std → factor·std, by the NLL of
            N(mean, (factor·std)²)

        The average is scaled, not each sample: T = 2 halves the logits log p̄. For one sample this is temperature
        scaling of its network. Intervals are scaled alike, those of numbers about the mean. The samples' weights are
        respected. `trainer.test` evaluates the average without it; other samples or weights are calibrated again.

        Args:
            data: validation data with targets, not used in the fit: a loader or a list of batches as in training, or a
                datamodule in the fit's units, whose validation data are used. Frames and series in a batch are in the
                data's units.
            save: also write the number beside the samples (`calibration.json`), where `Posterior.load` finds it.

        Raises:
            ValueError: if there are no data; with save, if the samples are in no folder.
            TypeError: if `data` has another type, or the likelihood predicts neither classes nor real numbers.

        Source: Guo et al. 2017; Rahaman & Thiery 2021, section 4 (scaling the average of an ensemble).
        """
        chosen = self._selected(range(len(self)))
        chosen.calibration = fit_calibration(self._ready_model(), self.store, self.weights.log().tolist(), data)
        if save:
            save_calibration(chosen.calibration, self.store)
        return chosen

    def distill(
        self,
        student: nn.Module,
        loader: Any,
        epochs: int = 20,
        lr: float = 1e-3,
        epistemic_weight: float = 1.0,
        **trainer: Any,
    ) -> Student:
        """Return one network with the average's predictive and its epistemic part, at the cost of one sample.

        The student learns the average's predictions of the loader's inputs, labels are not used; inputs that the loader
        augments or perturbs, or unlabelled ones, let it learn the epistemic part beyond the training data. Away from
        all these inputs it knows nothing. `lightning_sgmcmc.posterior.Distillation` is the Lightning module, for a
        trainer of your own.

        Args:
            student: a network with K + 1 outputs for K classes, or 3·D for D numbers, at each pixel or token (see
                `Student`); it is changed in place.
            loader: batches of inputs, or of pairs that start with them, also in a list; or a datamodule.
            epochs: passes over the loader.
            lr: the largest step size of Adam.
            epistemic_weight: weight of the epistemic part in the loss.
            trainer: arguments of the trainer, such as accelerator or callbacks.

        Raises:
            RuntimeError: if there are no samples, or no model.
            TypeError: if the predictive is neither of classes nor of numbers.
            ValueError: if an argument is out of range, or the student has another number of outputs.

        Source: Korattikara et al. 2015; Malinin et al. 2020; Vadera et al. 2020.
        """
        self._ready_model()
        check_count("epochs", epochs, optional=False)
        task = Distillation(self, student, lr, epistemic_weight)
        silent = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        fit = pl.Trainer(max_epochs=epochs, **(dict.fromkeys(silent, False) | trainer)).fit
        if isinstance(loader, pl.LightningDataModule):
            fit(task, datamodule=loader)
        else:
            fit(task, task.reading(loader))
        return task.student.eval()

    def compress(self, k: int, data: Any, unknown: Any = None) -> "Posterior":
        """Return k of the samples, with weights at which they predict most like all; nothing is copied.

            minimize Σ_i (Σ_j w_j·p_j(y_i)/p(y_i) - 1)²   over w ≥ 0, Σ_j w_j = 1, of k samples j,   p that of all

        Samples are chosen one after another. The result's `compression` is what they lose: the NLL of each half of the
        data by samples that the other half chose, minus that of all, and the metrics of both. A calibration is dropped;
        calibrate the result again. Fewer than k are left if further ones get no weight.

        Args:
            k: number of samples.
            data: data with targets, not used in the fit: a loader that does not shuffle, a list of batches as in
                training, or a datamodule, whose validation data are used. Some hundred are needed.
            unknown: out-of-distribution inputs, as `predict` takes them, for `compression`'s AUROC of the first score
                of `detect`.

        Raises:
            RuntimeError: if there are no samples, or no model.
            TypeError: if `data` has another type.
            ValueError: if k is larger than the number of samples, there are no data or no targets, or each chain has
                importance weights of its own.

        Source: Pati et al. 1993 (orthogonal matching pursuit); Lawson & Hanson 1974 (weights ≥ 0).

        Example::

            members = [torch.nn.Linear(4, 3) for _ in range(20)]
            posterior = Posterior.from_states(torch.nn.Linear(4, 3), members, Categorical())
            few = posterior.compress(5, [(torch.randn(200, 4), torch.randint(3, (200,)))])
            print(few.compression)  # 5 of 20 samples: NLL …
            few.save("few")
        """
        indices, weights, compression = compress(self, self._ready_model(), k, data, unknown)
        chosen = self._selected(indices, weights.log().tolist(), True)
        chosen.compression = compression
        if chosen.novelty is not None:
            chosen.drop_novelty("compress leaves out those at temperature 1")
        return chosen

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
        check_batches(batches)
        batches = batches if self.novelty is None else list(hooked(batches, model))
        found = Posterior(with_new_statistics(self.store, model, batches), model)
        found._novelty = None if self.novelty is None else self.novelty.update_batch_norm(batches)
        return found

    def plot_trace(self, parameters: Sequence[str] | None = None) -> "Figure":
        """Draw the samples' energies against the step, one line for each chain; with parameters, these instead.

        Args:
            parameters: names or shell patterns; one panel for each number, at most 12.

        Raises:
            ValueError: if there are no samples, a pattern matches no parameter, or more than 12 numbers.
        """
        return plot_trace(self.store, parameters)

    def plot_predictions(self, x: Any, y: Any = None) -> "Figure":
        """Draw the predictive of one number: mean, epistemic and total standard deviation.

        Against x, if it has one column; else against the observed y.

        Args:
            x: inputs (n, …).
            y: targets (n,) or (n, 1), in the data's units; needed if x has several columns.

        Raises:
            TypeError: if the predictive is not of numbers.
            ValueError: if it is of several numbers, or y is missing.
        """
        return plot_predictions(self.predict(x), x, y)

    def plot_map(self, x: Any, y: Any = None) -> "Figure":
        """Draw maps of a field's predictive: mean, epistemic and total standard deviation, for each channel.

        Args:
            x: inputs of one field, first axis 1, such as x[3:4].
            y: the observed field, (1, C, H, W), in the data's units: it and the error are drawn too. NaN stays blank.

        Raises:
            TypeError: if the predictive is not of numbers.
            ValueError: if it is not of one field (1, C, H, W) or (1, H, W), or y has another shape.
        """
        scaling = self.store.scaling
        return plot_map(self.predict(x), y, () if scaling is None else tuple(map(str, scaling.names)))

    def plot_reliability(self, x: Any, y: Any) -> "Figure":
        """Draw accuracy against confidence of the averaged class probabilities, with the calibration error.

        Args:
            x: inputs (n, …).
            y: labels (n,).

        Raises:
            TypeError: if the predictive is not of classes.
        """
        return plot_reliability(self.predict(x), self.columns.received((x, y))[1])

    def _ready_model(self) -> EnergyModel:
        if len(self) == 0:
            raise RuntimeError("the posterior has no samples to predict with")
        if self.model is None:
            remedy = "" if "pass net=…" in self._why_no_model else "; use Posterior.load(path, net=…) or model=…"
            raise RuntimeError(f"predictions need the network, but {self._why_no_model}{remedy}")
        return self.model
