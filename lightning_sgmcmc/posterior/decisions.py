"""What a posterior is for: joint scores, out-of-distribution inputs, guarantees, labels to ask for, rollouts."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_sgmcmc.batches.inputs import as_tensors
from lightning_sgmcmc.batches.loader import warn_of_order
from lightning_sgmcmc.chains.execution import StatelessCall, borrowed
from lightning_sgmcmc.chains.together import dtype_of
from lightning_sgmcmc.checks import check_choice, check_count, check_flag
from lightning_sgmcmc.diagnostics.acquisition import (
    Acquisition,
    batch_bald,
    batch_of_numbers,
    information_of_numbers,
)
from lightning_sgmcmc.diagnostics.joint import JointScore
from lightning_sgmcmc.diagnostics.scores import detection_metrics
from lightning_sgmcmc.evaluation.comparison import html_table
from lightning_sgmcmc.model import EnergyModel
from lightning_sgmcmc.namespace import rank_zero_info, rank_zero_warn
from lightning_sgmcmc.posterior import densities, guarantees
from lightning_sgmcmc.posterior.calibration import check_predictions
from lightning_sgmcmc.posterior.predictive import network_inputs, states_in_place
from lightning_sgmcmc.posterior.store import SampleStore
from lightning_sgmcmc.posterior.stored import StoredSamples
from lightning_sgmcmc.predictions import ClassPrediction, Members, Mixture, Prediction, RegressionPrediction
from lightning_sgmcmc.seeding import OwnDraws, derive_seed
from lightning_sgmcmc.tables import as_tensor
from lightning_sgmcmc.tensors import exact, widest, widest_dtype

Step = Callable[[Tensor, Tensor], Tensor]
AcquisitionMethod = Literal["bald", "batchbald"]
LEAST = 1e-6
"""Nats below which a label adds nothing."""
COLUMNS = ("score", "auroc", "aupr_out", "aupr_in", "fpr95")


@dataclass(frozen=True, repr=False)
class Detection:
    """The separation of out-of-distribution inputs by each score, as text and, in a notebook, as a table.

    Attributes:
        metrics: by score, its `auroc`, `aupr_out`, `aupr_in` and `fpr95`, see `diagnostics.detection_metrics`.
        known: each score of the known inputs, shape (n,); larger is stranger.
        unknown: likewise of the out-of-distribution inputs, shape (m,).
    """

    metrics: Mapping[str, Mapping[str, float]]
    known: Mapping[str, Tensor] = field(repr=False)
    unknown: Mapping[str, Tensor] = field(repr=False)

    def __str__(self) -> str:
        rows = [COLUMNS, *((name, *(f"{own[c]:.3f}" for c in COLUMNS[1:])) for name, own in self.metrics.items())]
        widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
        first = [row[0].ljust(widths[0]) for row in rows]
        rest = ["  ".join(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)) for row in rows]
        return "\n".join(f"{name}  {numbers}" for name, numbers in zip(first, rest, strict=True))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = [(name, *(own[column] for column in COLUMNS[1:])) for name, own in self.metrics.items()]
        return html_table("Inputs from elsewhere", COLUMNS, rows)


class Decisions(StoredSamples):
    """The part of a `Posterior` that decides by its predictions."""

    def predict(self, x: Any, return_samples: bool = False) -> Prediction:
        """Average the predictive distribution over the samples with their weights."""
        raise NotImplementedError

    def _ready_model(self) -> EnergyModel:
        raise NotImplementedError

    # -- scores -------------------------------------------------------------------------------------------------------

    def log_likelihood(self, data: Any) -> Tensor:
        """Return log p(y_i | x_i, θ_s) of each datum by each sample, in nats, float64 (S, n), for ArviZ's `loo`.

        Densities are in the data's units. Data without an observed target are left out. A calibration does not count,
        since it is of the average. Samples are in their order; their `weights` are not included. Data are in the order
        of the loader: `arviz.loo`'s sum is the same in any, `arviz.compare` needs one order for all models.

        Args:
            data: data with targets, as `calibrate` takes them; a loader that does not shuffle.

        Raises:
            RuntimeError: if there are no samples, or no model.
            ValueError: if there are no data.

        Example::

            densities = posterior.log_likelihood(torch.utils.data.DataLoader(data, 64))  # the training data
            arviz.loo(posterior.to_arviz(log_likelihood=densities))
        """
        self._tell_of_calibration("log_likelihood")
        warn_of_order(data, "log densities")
        return densities.log_densities(self._ready_model(), self.store, data, "log_likelihood").values

    def joint_nll(
        self, data: Any, tau: int = 10, sampling: densities.Sampling | None = None, seed: int = 0
    ) -> JointScore:
        """Return the joint NLL of groups of τ data, in nats per input, with its standard error.

            -1/τ·log Σ_s w_s·Π_(t≤τ) p(y_t | x_t, θ_s)

        It scores whether the samples know how errors go together, which the ordinary NLL (τ = 1) does not see. Groups
        have no data in common. Densities are in the data's units. A calibration does not count, since it is of the
        average over samples.

        Args:
            data: test data with targets: a loader, a list of batches, or a datamodule, whose validation data are used.
            tau: inputs in a group.
            sampling: "dyadic" draws a group, with replacement, from two data by chance, as published; it repeats a
                example's target too, so it is for targets without noise. "nearest" takes the data nearest to two by
                chance. "random" takes τ by chance, of which few are related. None is "dyadic" for classes, and
                "nearest" for numbers.
            seed: of the choice of groups.

        Raises:
            RuntimeError: if there are no samples, or no model.
            ValueError: if there are fewer than τ data (2 for "dyadic"), or labels are soft, thus no outcomes.

        Source: Osband et al. 2022 (Evaluating high-order predictive distributions in deep learning).
        """
        self._tell_of_calibration("joint_nll")
        return densities.joint_score(self._ready_model(), self.store, self.weights, data, tau, sampling, seed)

    def _tell_of_calibration(self, what: str) -> None:
        if self.calibration is not None:
            rank_zero_info(
                f"{what} leaves out the posterior's calibration, which changes the average over samples and none of "
                "them."
            )

    def detect(self, known: Any, unknown: Any) -> Detection:
        """Return how well each score of the predictions separates out-of-distribution inputs from known ones.

        Classes have "entropy", "max_probability" (its negative), "mutual_information" and, with `Categorical`,
        "energy", the mean over samples of -log Σ_k exp(logit_k). A constant added to all logits changes the energy
        alone, so it is as good as the prior holds them. Numbers have "std" and "epistemic_std". Larger is stranger.
        Mutual information is of the samples of `novelty`, if there are some; other scores are of those that predict.

        Args:
            known: inputs like the training data, not used in the fit, as `predict` takes them.
            unknown: out-of-distribution inputs.

        Raises:
            RuntimeError: if there are no samples, or no model.
            ValueError: if a prediction is not finite, or there are no inputs.
            TypeError: if the predictive is neither of one class nor of numbers for each input.

        Source: Hendrycks & Gimpel 2017; Liu et al. 2020 (energy); Smith & Gal 2018 (mutual information).
        """
        model = self._ready_model()
        each = [_scores(self, model, x) for x in (known, unknown)]
        names = [name for name in each[0] if name in each[1]]
        metrics = {name: detection_metrics(each[0][name], each[1][name]) for name in names}
        plain = {name: {metric: float(value) for metric, value in own.items()} for name, own in metrics.items()}
        return Detection(plain, *each)

    # -- guarantees ---------------------------------------------------------------------------------------------------

    def conformal(
        self, data: Any, level: float = 0.9, method: guarantees.Method = "threshold", seed: int = 0
    ) -> guarantees.Conformal:
        """Return prediction sets or intervals that contain the truth with a guaranteed probability.

            P(y ∈ C(x)) ≥ level   for data exchangeable with the calibration data, whatever the predictive is worth

        The guarantee is over calibration and new data together, not for each x; a better predictive makes the sets
        smaller. Classes have sets, numbers have intervals, each of D numbers with the level.

        Args:
            data: calibration data with targets, used neither in the fit nor in `calibrate`: a loader, a list of
                batches as in training, or a datamodule, whose validation data are used.
            level: the probability, in (0, 1).
            method: for classes, "threshold" has the smallest sets, {k: p_k ≥ 1 - q}; "adaptive" has larger sets where
                the predictive is uncertain, for coverage that is more even over data; "class-conditional" has a
                threshold by class, for the level in every class, P(y ∈ C(x) | y) ≥ level. For numbers, "threshold" has
                mean ± q·std; "quantile" has the predictive's own interval of this level, wider or narrower by q, which
                follows skewed predictives.
            seed: of the draws by which adaptive sets have exact coverage.

        Raises:
            ValueError: if there are no data, level is out of range, or method is not for such predictions.
            TypeError: if the likelihood predicts neither classes nor numbers.

        Source: Lei et al. 2018; Sadinle et al. 2019; Romano et al. 2020; Vovk 2012 (class-conditional); Romano et al.
        2019 (Conformalized quantile regression).
        """
        return guarantees.fit_conformal(self, self._ready_model(), data, level, method, seed)

    def selective(
        self,
        data: Any,
        risk: float = 0.05,
        confidence: float = 0.95,
        score: guarantees.Score | None = None,
        tolerance: float | Sequence[float] | None = None,
    ) -> guarantees.Selective:
        """Return which predictions to answer so that at most a stated share of the answers is wrong.

            P(P(wrong | answered) ≤ risk) ≥ confidence   over calibration data that are independent draws of one law

        Answered are the inputs whose uncertainty is below a threshold: of 20 shares of the calibration data the largest
        whose exact binomial bound is below the risk. A better predictive answers more.

        Args:
            data: calibration data with targets, used neither in the fit nor in `calibrate`, as `conformal` takes them.
            risk: the largest probability of a wrong answer, in (0, 1).
            confidence: that the risk holds, in (0, 1).
            score: the uncertainty: "max_probability", "entropy" or "mutual_information" of classes (None: the first);
                "std" or "epistemic_std" of numbers (None: the first).
            tolerance: of numbers, the largest error of one that is right, in the data's units; one for each of D, and
                one for all numbers of a field or sequence, which is right if all of them are.

        Raises:
            ValueError: if no share of the data shows the risk, an argument is out of range, or tolerance is missing.

        Source: Geifman & El-Yaniv 2017, algorithm 1; Angelopoulos et al. 2021 (Learn then test).
        """
        return guarantees.fit_selective(self, self._ready_model(), data, risk, confidence, score, tolerance)

    # -- what next ----------------------------------------------------------------------------------------------------

    def acquire(self, pool: Any, k: int, method: AcquisitionMethod = "batchbald", seed: int = 0) -> Acquisition:
        """Return the k inputs of a pool whose labels would say most about the parameters.

        "bald" takes the k inputs with the largest mutual information I(y_i; θ) each, and of two equal inputs both.
        "batchbald" takes one after another by what its label adds, I(y_1, …, y_k; θ). For numbers the information is
        that of Gaussians with the samples' means and noise, ½·log det(1 + Λ^(-1/2)·C·Λ^(-1/2)). If there are samples of
        `novelty`, it is theirs.

        Args:
            pool: inputs, as `predict` takes them; a loader in a fixed order.
            k: inputs to choose.
            method: see above; the cost of "batchbald" grows with k times the pool.
            seed: of the joint labels that "batchbald" draws when there are over 10,000 of them.

        Raises:
            RuntimeError: if there are no samples, or no model.
            ValueError: if k is more than the pool's inputs, or a prediction is not finite.
            TypeError: if the predictive is neither of one class nor of numbers for each input.

        Source: Houlsby et al. 2011 (BALD); Kirsch et al. 2019 (BatchBALD).

        Example::

            pool = torch.randn(100, 2)
            to_label = pool[posterior.acquire(pool, 10).indices]
        """
        prediction = (self if self.novelty is None else self.novelty).predict(pool, return_samples=True)
        check_choice("method", method, ("bald", "batchbald"))
        check_count("k", k, optional=False)
        if k > len(prediction):
            raise ValueError(f"k={k} is more than the {len(prediction)} inputs of the pool: pass at most these")
        check_predictions(prediction, "acquire")
        kept: Any = prediction._kept
        if isinstance(prediction, ClassPrediction) and isinstance(kept, Members) and kept.probabilities.dim() == 3:
            generator = torch.Generator().manual_seed(derive_seed(seed, "acquire"))
            found = (
                _top(prediction.mutual_information, k)
                if method == "bald"
                else batch_bald(kept.probabilities, kept.weights, k, generator)
            )
            return _told(found, kept.weights)
        if not isinstance(kept, Mixture) or prediction.mean.dim() != 2:
            raise TypeError(
                f"acquire compares inputs by their class or their numbers (n, D), and these predictions are a "
                f"{prediction} without either for each input: choose by a score of your own"
            )
        law = kept.components
        if not bool(law.variance.isfinite().all()):
            raise ValueError(
                f"acquire needs the variance of the noise, and {kept.law.__name__} has none here: choose by "
                "prediction.epistemic"
            )
        numbers = law.mean, law.variance, kept.weights
        chosen = _top(information_of_numbers(*numbers), k) if method == "bald" else batch_of_numbers(*numbers, k)
        return _told(chosen, kept.weights)

    def rollout(
        self,
        x: Any,
        steps: int,
        step: Step | None = None,
        noise: bool = False,
        seed: int = 0,
    ) -> Tensor:
        """Return one trajectory for each sample: its network is applied again and again to its own output.

            y_t = E[y | x_t, θ_s], or with noise a draw,   x_(t+1) = step(x_t, y_t),   s = 1 … S

        A sample that errs keeps erring in its own way, so the trajectories' spread grows as the posterior says. The
        average's prediction, fed back, would forget that. The samples' `weights` are in the same order. A calibration
        does not count.

        Args:
            x: the first inputs (n, …), in the data's units if the store knows the inputs' columns, else as the network
                receives them.
            steps: outputs to make.
            step: returns the next inputs from the inputs and the outputs (n, D), both in the same units as here; None
                takes the output as the next input.
            noise: draw each output from the sample's own distribution in place of taking its mean.
            seed: of the noise.

        Returns:
            the outputs in the data's units, shape (S, steps, n, D).

        Raises:
            RuntimeError: if there are no samples, or no model.
            TypeError: if the likelihood has no distribution of numbers, or x is not one tensor or frame.
            ValueError: if steps is below 1, or an output is no input and step is None.

        Example::

            members = [torch.nn.Linear(2, 1) for _ in range(5)]  # of two lags of a series
            posterior = Posterior.from_states(torch.nn.Linear(2, 1), members, Gaussian())
            paths = posterior.rollout(torch.zeros(3, 2), 24, lambda x, y: torch.cat([x[:, 1:], y], 1))
        """
        model, store = self._ready_model(), self.store
        check_count("steps", steps, optional=False)
        check_flag("noise", noise)
        likelihood, columns, scaling = model.likelihood, store.columns.inputs, store.scaling
        if likelihood is None or likelihood.distribution is None:
            raise TypeError(
                f"rollout feeds numbers back, and {type(likelihood).__name__} has no distribution of numbers: roll "
                "each of posterior.networks() out in a loop of your own"
            )
        if isinstance(x, tuple | list | dict):
            raise TypeError(f"rollout needs the first inputs as one tensor or frame (n, …), got a {type(x).__name__}")
        # A frame is encoded once: its columns must be numbers to come from an output.
        first = columns.encoded(x) if columns is not None else as_tensor("x", x)
        dtype, is_far = dtype_of(store[0].parameters), scaling is not None and scaling.is_far
        first = as_tensors(first, model.device, widest_dtype(model.device) if is_far else dtype)
        mean, std = (0.0, 1.0) if columns is None else (part.to(first) for part in columns.scaling)
        call = StatelessCall(model, lambda m, inputs: m.likelihood.law(m.output_of(((inputs - mean) / std).to(dtype))))
        paths, own_draws = [], OwnDraws(derive_seed(seed, "rollout"), model.device)
        with borrowed(model), torch.no_grad():
            for state in states_in_place(model, store):
                inputs, path = first, []
                for _ in range(steps):
                    law = call.call(state, inputs)
                    with own_draws:
                        output = (law.sample() if noise else law.mean).to(first)
                    if scaling is not None:
                        output = output * exact(scaling.factor).to(output) + exact(scaling.shift).to(output)
                    path.append(output)
                    with own_draws:
                        inputs = output if step is None else step(inputs, output)
                    _check_next(inputs, first, step is None)
                paths.append(torch.stack(path))
        return torch.stack(paths)


# -- parts of these ----------------------------------------------------------------------------------------------------


def _check_next(inputs: Any, first: Tensor, is_output: bool) -> None:
    shape = tuple(inputs.shape) if isinstance(inputs, Tensor) else type(inputs).__name__
    if shape != tuple(first.shape):
        what = "an output" if is_output else "step(x, y)"
        raise ValueError(
            f"{what} has the shape {shape}, and inputs have {tuple(first.shape)}: pass step=…, which returns the next "
            "inputs from the inputs and the outputs"
        )


def _top(scores: torch.Tensor, count: int) -> Acquisition:
    values, indices = scores.topk(count)
    return Acquisition(indices.cpu(), widest(values).cpu())


def _told(found: Acquisition, weights: Tensor) -> Acquisition:
    """Return the chosen inputs, with a warning of those whose labels add nothing."""
    known, k = int((found.scores > LEAST).sum()), len(found.scores)
    if known < k:
        place = f"after {known} of k={k} inputs no other label" if known else "no label"
        rank_zero_warn(
            f"acquire: {place} of the pool tells the samples apart ({len(weights)}, effective number "
            f"{1 / float(weights.square().sum()):.1f}), so {'the rest' if known else 'the choice'} is arbitrary: "
            f"{f'pass k={known}' if known else 'choose at random'}, or draw more samples, or at temperature 1."
        )
    return found


def _scores(posterior: Any, model: EnergyModel, x: Any) -> dict[str, Tensor]:
    """Return the scores of inputs, each of shape (n,); larger is stranger."""
    x = list(x) if isinstance(x, Iterator) else x  # it is read twice
    prediction: Prediction = posterior.predict(x)
    check_predictions(prediction, "detect")
    if isinstance(prediction, RegressionPrediction):
        parts = {"std": prediction.std, "epistemic_std": prediction.epistemic_std}
        # Several numbers have a unit each: the mean logarithm orders inputs alike in every unit.
        return {name: widest(part).clamp_min(1e-300).log().flatten(1).mean(1).cpu() for name, part in parts.items()}
    if not isinstance(prediction, ClassPrediction) or prediction.probabilities.dim() != 2:
        raise TypeError(
            f"detect needs a class or numbers of each input, and these predictions are a {type(prediction).__name__} "
            "of several: pass scores of your own to diagnostics.detection_metrics"
        )
    scores = {"entropy": prediction.entropy, "max_probability": -prediction.probabilities.max(1).values}
    if "mutual_information" in prediction.parts:
        scores["mutual_information"] = prediction.mutual_information
    energy = _energies(model, posterior.store, posterior.weights, x)
    found = scores if energy is None else scores | {"energy": energy}
    return {name: widest(score).cpu() for name, score in found.items()}


def _energies(model: EnergyModel, store: SampleStore, weights: Tensor, x: Any) -> Tensor | None:
    """Return the mean over samples of the likelihood's energy of each input, shape (n,); None if it has none."""
    likelihood = model.likelihood
    if likelihood is None:
        return None
    batches = list(network_inputs(model, store, x))
    call, total = StatelessCall(model, lambda m, inputs: m.likelihood.energy(m.output_of(inputs))), torch.zeros(())
    with borrowed(model), torch.no_grad():
        for state, weight in zip(states_in_place(model, store), weights.tolist(), strict=True):
            found = [call.call(state, batch) for batch in batches]
            if any(own is None for own in found):
                return None
            total = total + weight * widest(torch.cat(found)).cpu()
    return total
