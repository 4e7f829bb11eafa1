"""A posterior made smaller: one network with its averaged predictive and its epistemic part, or few of its samples."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import optimize
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sgmcmc.batches.inputs import (
    are_inputs,
    arguments_of_network,
    as_tensors,
    batches_in,
    called,
    check_batches,
    inputs_of,
    unwrapped,
)
from lightning_sgmcmc.chains.execution import borrowed
from lightning_sgmcmc.checks import check_count, check_within
from lightning_sgmcmc.diagnostics.scores import predictive_entropy
from lightning_sgmcmc.evaluation.scoring import HOOKS, is_overridden
from lightning_sgmcmc.model import EnergyModel, overrides
from lightning_sgmcmc.namespace import pl, rank_zero_warn
from lightning_sgmcmc.posterior.calibration import batches_of, tensors_of
from lightning_sgmcmc.posterior.densities import log_densities
from lightning_sgmcmc.posterior.stored import StoredSamples
from lightning_sgmcmc.predictions import ClassPrediction, Prediction, RegressionPrediction
from lightning_sgmcmc.tables import InputColumns, TargetScaling
from lightning_sgmcmc.tensors import widest


class Student(nn.Module):
    """One network that predicts as a posterior does, at the cost of one sample.

        classes:   K + 1 outputs (z, r):     p = softmax(z),  mutual information = sigmoid(r)·H(p)
        numbers:   3·D outputs (m, s, r):    mean = m,  std = exp(s),  epistemic std = sqrt(sigmoid(r))·std

    Pixels, tokens, fields and sequences have as many outputs at each place: (n, K + 1, H, W) or (n, T, K + 1), and
    (n, 3·C, H, W) or (n, T, 3·D). Its forward returns these tensors, so it can be exported; `predict` returns a
    `Prediction`.

    Args:
        net: the network.
        classes: K; None for numbers.
        scaling: of the targets, or None.
        columns: what the columns of the inputs are, or None.
        axis: the axis of the output that has the K + 1 or 3·D numbers.
    """

    def __init__(
        self,
        net: nn.Module,
        classes: int | None = None,
        scaling: TargetScaling | None = None,
        columns: InputColumns | None = None,
        axis: int = 1,
    ) -> None:
        super().__init__()
        self.net = net
        self.classes = classes
        self.axis = axis
        self.scaling = scaling
        self.columns = columns

    def forward(self, *inputs: Any) -> tuple[Tensor, ...]:
        """Return (probabilities (n, K), mutual information (n,)), or (mean, std, epistemic std), each (n, D).

        Places come after n, as in `ClassPrediction` and `RegressionPrediction`.
        """
        given = inputs[0] if len(inputs) == 1 else inputs
        return tuple(self._prediction(self.output_of(given)).parts[name] for name in self.outputs)

    def output_of(self, inputs: Any) -> Tensor:
        """Return the network's output for inputs, which are passed as a `BayesianModule` passes them."""
        is_one = isinstance(inputs, Tensor)
        output: Tensor = unwrapped(
            self.net(inputs) if is_one else called(self.net, inputs, arguments_of_network(self.net))
        )
        return output

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of what forward returns."""
        return ("mean", "std", "epistemic_std") if self.classes is None else ("probabilities", "mutual_information")

    @torch.no_grad()
    def predict(self, x: Any) -> Prediction:
        """Return the predictive of inputs, in evaluation mode.

        Args:
            x: inputs, or an iterable of batches, as `Posterior.predict` takes them.

        Raises:
            ValueError: if there are no inputs.
        """
        first, arguments, found = next(self.parameters()), arguments_of_network(self.net), []
        with borrowed(self):
            for batch in batches_in(x, arguments):
                inputs = as_tensors(inputs_of(batch, arguments), first.device, first.dtype, self.columns)
                found.append(self._prediction(self.output_of(inputs)))
        if not found:
            raise ValueError("x has no inputs to predict")
        names = found[0].parts
        return found[0].replaced(**{name: torch.cat([one.parts[name] for one in found]) for name in names})

    def _prediction(self, output: Tensor) -> Prediction:
        prediction = prediction_of(output, self.classes, self.axis)
        units = self.scaling
        return prediction if units is None else prediction.rescaled(units.shift, units.factor, units.is_far)


def prediction_of(output: Tensor, classes: int | None, axis: int = 1) -> Prediction:
    """Return the predictive of a student's output, K + 1 or 3·D numbers on an axis, in the units of standardised
    targets."""
    output = output.float()
    if classes is not None:
        output = output.movedim(axis, -1)
        probabilities = output[..., :classes].softmax(-1)
        entropy = predictive_entropy(probabilities)
        return ClassPrediction(probabilities, entropy, entropy * output[..., classes].sigmoid())
    mean, log_std, share = output.chunk(3, axis)
    std = log_std.clamp(-20, 20).exp()
    return RegressionPrediction(mean, std, std * share.sigmoid().sqrt())


def distillation_loss(output: Tensor, teacher: Prediction, weight: float, axis: int = 1) -> tuple[Tensor, Tensor]:
    """Return the loss of the predictive, and that of its epistemic part, both means over the data in nats.

    An example's places (pixels, tokens) are summed, as its log density is.

        classes:   KL(p̄ ‖ p)                                  and  weight·H̄·kl(v̄ ‖ v),  v the share I/H of the entropy
        numbers:   Σ_d KL(N(m̄_d, s̄_d²) ‖ N(m_d, s_d²))      and  weight·Σ_d kl(v̄_d ‖ v_d),  v the share of the variance

    A bar is the teacher's, I the mutual information, and kl(a ‖ b) that of two coins.

    Source: Korattikara et al. 2015 (the predictive); Vadera et al. 2020 (expectations such as the entropy).
    """
    if isinstance(teacher, ClassPrediction):
        known = teacher.probabilities.float()
        classes, output = known.shape[-1], output.float().movedim(axis, -1)
        logs = output[..., :classes].log_softmax(-1)
        predictive = _mean_over_data(torch.special.xlogy(known, known) - known * logs)
        entropy = predictive_entropy(known)
        share = teacher.mutual_information.float() / entropy.clamp_min(torch.finfo(torch.float32).tiny)
        share = share.clamp_max(1)  # a mutual information of `novelty` may exceed the entropy
        return predictive, weight * _mean_over_data(entropy * _coins(share, output[..., classes]))
    mean, log_std, logit = output.float().chunk(3, axis)
    log_std = log_std.clamp(-20, 20)
    std = teacher.std.float()
    squares = (std.square() + (teacher.mean.float() - mean).square()) / (2 * (2 * log_std).exp())
    predictive = _mean_over_data(log_std - std.log() + squares - 0.5)
    share = (teacher.epistemic_std.float() / std).square()
    return predictive, weight * _mean_over_data(_coins(share, logit))


def _mean_over_data(values: Tensor) -> Tensor:
    """Return the mean over the first axis of the sums over the others."""
    return values.reshape(len(values), -1).sum(1).mean()


def _coins(share: Tensor, logit: Tensor) -> Tensor:
    """Return the KL divergence of a coin with probability sigmoid(logit) from one with probability `share`."""
    share = share.clamp(0, 1)
    least = -torch.special.entr(share) - torch.special.entr(1 - share)
    return least + nn.functional.binary_cross_entropy_with_logits(logit, share, reduction="none")


class Distillation(pl.LightningModule):
    """Trains a student on a posterior's predictions of a loader's inputs; labels are not used.

    `Posterior.distill` fits it; fit it by a trainer of your own for other settings, callbacks and loggers, and read
    `student`. The posterior predicts each batch as the loader makes it, so augmented or perturbed inputs are predicted
    anew: a step costs a pass of every sample (fewer with `posterior.thin(count=…)`). It logs `distill/predictive`, the
    KL divergence of the student from the average in nats, and `distill/epistemic`.

    Args:
        posterior: the teacher, with its weights and calibration.
        net: the student's network: K + 1 outputs for K classes, 3·D for D numbers, at each place (see `Student`).
        lr: the largest step size of Adam; it falls to 0 by a cosine.
        epistemic_weight: weight of the epistemic part in the loss.

    Raises:
        TypeError: if the posterior predicts neither classes nor numbers; in the first step.
        ValueError: if an argument is out of range; in the first step, if the network has another number of outputs.

    Example::

        from lightning_sgmcmc.posterior import Distillation

        task = Distillation(posterior, torch.nn.Linear(2, 3), lr=1e-2)  # two classes
        loader = torch.utils.data.DataLoader(x, batch_size=3)
        pl.Trainer(max_epochs=2, logger=False, enable_checkpointing=False).fit(task, loader)
        task.student.predict(x).mutual_information
    """

    def __init__(
        self, posterior: StoredSamples, net: nn.Module, lr: float = 1e-3, epistemic_weight: float = 1.0
    ) -> None:
        super().__init__()
        if not isinstance(net, nn.Module):
            raise TypeError(f"student should be a torch module, got a {type(net).__name__}")
        check_within("lr", lr, "(0, inf)")
        check_within("epistemic_weight", epistemic_weight, "[0, inf)")
        self._teacher: Any = posterior.standardised()
        self._teacher.model = posterior.model
        self._home: torch.device | None = None
        self._columns = posterior.columns
        self.student = Student(net, scaling=self._columns.targets, columns=self._columns.inputs)
        self.lr = lr
        self.epistemic_weight = epistemic_weight
        self._is_known = False
        for name in HOOKS:
            if is_overridden(name, posterior.model):
                setattr(self, name, getattr(posterior.model, name))

    def reading(self, batches: Any) -> Any:
        """Return batches as a loader that a trainer reads in every epoch, before the fit.

        A trainer takes a list for several loaders. Lists and iterators are what the network receives, without hooks.
        """
        check_batches(batches)
        if not isinstance(batches, list | Iterator):
            return batches
        for name in HOOKS:
            vars(self).pop(name, None)
        data: Any = list(batches)
        return DataLoader(data, batch_size=None)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.student.parameters(), lr=self.lr)
        steps = self.trainer.estimated_stepping_batches
        if not math.isfinite(steps):
            return optimizer
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(int(steps), 1))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_fit_start(self) -> None:
        self._columns.check(getattr(self.trainer, "datamodule", None))
        self._home = next(self._teacher.model.parameters()).device
        self._teacher.model.to(self.device)

    def on_fit_end(self) -> None:
        self._teacher.model.to(self._home)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        predictive, epistemic, _ = self._losses(batch)
        self.log_dict({"distill/predictive": predictive.detach(), "distill/epistemic": epistemic.detach()})
        return predictive + epistemic

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        predictive, epistemic, size = self._losses(batch)
        self.log_dict({"distill/val_predictive": predictive, "distill/val_epistemic": epistemic}, batch_size=size)

    def _losses(self, batch: Any) -> tuple[Tensor, Tensor, int]:
        """Return the two parts of the loss, and the number of data."""
        model = self._teacher.model
        own = overrides(model, "inputs_and_target") and not are_inputs(batch)
        inputs = model.inputs_and_target(batch)[0] if own else inputs_of(batch, model.accepted_arguments)
        inputs = as_tensors(inputs, self.device, next(self.student.parameters()).dtype, self._columns.inputs)
        teacher = self._teacher.predict([batch if own else inputs])
        output = self.student.output_of(inputs)
        if not self._is_known:
            self.student.classes, self.student.axis = self._layout(teacher, output)
            self._is_known = True
        return *distillation_loss(output, teacher, self.epistemic_weight, self.student.axis), len(teacher)

    @staticmethod
    def _layout(teacher: Prediction, output: Tensor) -> tuple[int | None, int]:
        """Return K, or None for numbers, and the axis of the student's outputs, after a check of their shape."""
        if isinstance(teacher, ClassPrediction):
            rows, *places, classes = teacher.probabilities.shape
            shapes = {1: (rows, classes + 1, *places), 1 + len(places): (rows, *places, classes + 1)}
            why = f"{classes} classes need {classes + 1}"
        elif isinstance(teacher, RegressionPrediction):
            shape, classes = tuple(teacher.mean.shape), None
            shapes = {a: (*shape[:a], 3 * shape[a], *shape[a + 1 :]) for a in range(1, len(shape))}
            why = (
                f"{shape[1]} numbers need {3 * shape[1]}"
                if len(shape) == 2
                else f"numbers {shape} need 3 times as many"
            )
        else:
            raise TypeError(
                f"distill knows predictions of classes and of numbers, and these are a {teacher}: use "
                "posterior.compress(k, data) or thin(count=k), and ensemble() for one network"
            )
        axes = [axis for axis, shape in shapes.items() if tuple(output.shape) == shape]
        if not axes:
            wanted = " or ".join(map(str, dict.fromkeys(shapes.values())))
            raise ValueError(
                f"the student's output has shape {tuple(output.shape)}, and {why} outputs for each datum, so {wanted} "
                "(see Student): change its last layer"
            )
        if len(axes) > 1:
            raise ValueError(
                f"the student's output has shape {tuple(output.shape)}, in which the {classes} classes may be on axis "
                f"{axes[0]} or {axes[1]}: distil on inputs with another number of places"
            )
        return classes, axes[0]


# -- few samples -------------------------------------------------------------------------------------------------------

FOLDS = 2
"""Parts of the data: the loss on each is that of samples chosen on the other."""
FEW = 20
"""Data in a part, below which a choice is mostly chance."""
UNIT = 10.0
"""How much the sum of the weights counts beside the data, where it should be 1."""


@dataclass(frozen=True)
class Compression:
    """What few samples lose against the whole posterior.

    Attributes:
        count: number of samples chosen.
        of: number of samples of the whole.
        nll_loss: mean NLL of data with samples that were chosen on other data, minus the whole's, in nats per example;
            the data take part in turn. Above 0 is a loss.
        standard_error: of `nll_loss`, over the data.
        whole: metrics of the whole on the data, as `evaluate` has them (NLL, accuracy, in regression coverage, …), and
            `auroc` of the given out-of-distribution inputs.
        chosen: likewise of the chosen samples; the data chose them, so its NLL is a little too low.
    """

    count: int
    of: int
    nll_loss: float
    standard_error: float
    whole: Mapping[str, float]
    chosen: Mapping[str, float]

    def __str__(self) -> str:
        parts = [f"NLL {self.nll_loss:+.4f} ± {self.standard_error:.4f}"]
        parts += [
            f"{name} {self.whole[name]:.3f} to {self.chosen[name]:.3f}"
            for name in self.whole
            if name.startswith(("coverage", "accuracy", "auroc"))
        ]
        return f"{self.count} of {self.of} samples: {', '.join(parts)}"


def compress(
    posterior: Any, model: EnergyModel, k: int, data: Any, unknown: Any
) -> tuple[list[int], Tensor, Compression]:
    """Return the chosen samples in their order, their weights and the loss; see `Posterior.compress`."""
    check_count("k", k, optional=False)
    store = posterior.store
    if k > len(store):
        raise ValueError(f"k={k} is more than the {len(store)} samples: pass at most {len(store)}")
    if not all(record.comparable for record in store.records):
        raise ValueError(
            "compress needs weights that compare across chains, and each chain of these samples has a π of its own: "
            "compress one chain's samples, or posterior.resample() first"
        )
    weights = posterior.weights
    batches = tensors_of(batches_of(data, store.columns, model, "compress"), model, store)
    logs = log_densities(model, store, batches, "compress").values
    if logs.shape[1] < 2 * FEW:
        rank_zero_warn(f"compress chooses on {logs.shape[1]} data, which is mostly chance: pass {2 * FEW} at least")
    indices, own = chosen_samples(logs, weights, k)
    loss = held_out_loss(logs, weights, k)
    metrics: list[dict[str, float]] = []
    for selection in (posterior, posterior._selected(indices, own.log().tolist(), True)):
        metrics.append(dict(selection.evaluate(batches).bma))
        if unknown is not None:
            metrics[-1]["auroc"] = next(iter(selection.detect(batches, unknown).metrics.values()))["auroc"]
    error = float(loss.std() / len(loss) ** 0.5)
    return indices, own, Compression(len(indices), len(store), float(loss.mean()), error, *metrics)


def chosen_samples(logs: Tensor, weights: Tensor, k: int) -> tuple[list[int], Tensor]:
    """Return k samples and their weights, at which their mixture's densities are nearest to the whole's.

        minimize Σ_i (Σ_j w_j·p_j(y_i)/p(y_i) - 1)²   over w ≥ 0, Σ_j w_j = 1, of k samples j,   p the whole's mixture

    Samples come in one after another, each where a step from the mixture to it leaves the least; weights are fitted
    anew after each. Samples whose weight is 0 then are left out.

    Args:
        logs: log p_j(y_i), shape (S, n).
        weights: of the whole, shape (S,), summing to 1.
        k: number of samples.

    Source: Pati et al. 1993 (orthogonal matching pursuit), with weights ≥ 0; Lawson & Hanson 1974 (their fit).

    >>> logs = torch.tensor([[0.0, -9.0], [-9.0, 0.0], [0.0, -9.0]])
    >>> indices, weights = chosen_samples(logs, torch.tensor([0.25, 0.5, 0.25]), 2)
    >>> indices, weights.round(decimals=3).tolist()
    ([0, 1], [0.5, 0.5])
    """
    logs, weights = widest(logs), widest(weights)
    whole = (logs + weights.log()[:, None]).logsumexp(0)
    ratios = (logs - whole).exp().numpy().T
    data, ones = len(ratios), np.ones(len(ratios))
    left, found, share = (weights > 0).numpy().copy(), list[int](), np.zeros(0)
    for _ in range(min(k, int(left.sum()))):
        mixture = ratios[:, found] @ share
        # A first sample is the mixture; a later one takes the best part of it.
        toward, rest = ratios - mixture[:, None], ones - mixture
        part = np.clip(toward.T @ rest / np.maximum((toward**2).sum(0), 1e-300), 0, 1) if found else 1.0
        remains = ((rest[:, None] - part * toward) ** 2).sum(0)
        remains[~left] = np.inf
        found.append(int(remains.argmin()))
        left[found[-1]] = False
        system = np.vstack([ratios[:, found], np.full(len(found), UNIT * data**0.5)])
        share = optimize.nnls(system, np.append(ones, UNIT * data**0.5))[0]
        share /= share.sum()
    kept = sorted((index, part) for index, part in zip(found, share.tolist(), strict=True) if part > 0)
    return [index for index, _ in kept], torch.tensor([part for _, part in kept], dtype=torch.float64)


def held_out_loss(logs: Tensor, weights: Tensor, k: int) -> Tensor:
    """Return each datum's NLL by samples that were chosen on the other half of the data, minus the whole's, (n,)."""
    halves: Sequence[Tensor] = [torch.arange(first, logs.shape[1], FOLDS) for first in range(FOLDS)]
    loss = torch.zeros(logs.shape[1], dtype=torch.float64)
    if logs.shape[1] < FOLDS:
        return loss.fill_(torch.nan)
    whole = (logs + weights.log()[:, None]).logsumexp(0)
    for own, other in zip(halves, reversed(halves), strict=True):
        indices, parts = chosen_samples(logs[:, other], weights, k)
        loss[own] = whole[own] - (logs[indices][:, own] + parts.log()[:, None]).logsumexp(0)
    return loss
