"""The local learning coefficient of a trained network, from the losses along chains around it."""

from typing import Any

import torch
from torch import Tensor

from lightning_sgmcmc.chains.callback import Place, Run, SamplerCallback
from lightning_sgmcmc.chains.chains import ChainModel, Chains
from lightning_sgmcmc.chains.samples import Drawing
from lightning_sgmcmc.chains.schedule import require_schedule
from lightning_sgmcmc.chains.state import Stage
from lightning_sgmcmc.chains.trainer import is_trial, log_scalars
from lightning_sgmcmc.checks import check_choice, check_flag
from lightning_sgmcmc.evaluation.loader_average import HeldData, held_data
from lightning_sgmcmc.evaluation.passes import (
    Kind,
    center_energies,
    centers_of,
    check_centered,
    differs_in_training,
    excess_energies,
    gamma_of,
    has_fresh_batches,
)
from lightning_sgmcmc.figures.logging import log_figure
from lightning_sgmcmc.namespace import pl, rank_zero_warn
from lightning_sgmcmc.samplers import Sampler
from lightning_sgmcmc.singular.estimate import LearningCoefficientEstimate, estimate_of, notes_on
from lightning_sgmcmc.tensors import exact, exact_device

FIRST_ROOM = 256
"""Steps for which the first trace has room; it doubles when it is full."""


class LearningCoefficient(SamplerCallback):
    """Estimates the local learning coefficient of the weights at which the prior is centred.

        λ̂ = n·β·(E[L(w)] - L(w*)),   w ~ exp(-n·β·L(w) - γ/2·‖w - w*‖²)

    L is the mean loss -log p(y|x,w) of n data, in nats. The expectation is over the draws of all chains after the
    burn-in. `lightning_sgmcmc.singular.localized` returns the module's temperature, prior and start for n·β and γ; in
    general n·β = n/τ and γ = 1/(τ·std²), for a temperature τ and a `GaussianPrior(std, center=…)`. The loss at the
    centre w* is computed once, on all training data.

    At the end of the fit the estimate is in `result`, its numbers and a figure of the traces are logged as
    `learning_coefficient/…`, and a problem is warned of: a loss below the centre's, chains that disagree, a drift.

    Args:
        loss: what L(w) is at a state w. "own": at each sample, w and w* on the same random training data, as many as a
            step has; it is unbiased, and costs two forward passes a sample. "full": at each sample, on all training
            data, in evaluation mode. "step": at each step after the burn-in, on the data of that step, at no cost. The
            data of a step are those that the present epoch has not used yet, so the mean is too large by up to
            n·β·lr/2·tr Cov(g), with Cov(g) the covariance of a mini-batch gradient of the mean loss. It is 0 for full
            batches.
        warn: whether to warn of a problem.

    Raises:
        ValueError: for another `loss`; at the start of the fit, without a schedule, a prior with a centre or training
            data; at the first step after the burn-in, for temperature 0, chains of several temperatures, or together
            with a callback that changes the sampled law (`ContourGradient`, `ReplicaExchange`, `SWAG`, `MCDropout`).

    Source: Lau, Furman, Wang, Murfet & Wei 2023 (The Local Learning Coefficient, arXiv 2308.12108); Watanabe 2013 (A
    widely applicable Bayesian information criterion, β = 1/log n).

    Example::

        from lightning_sgmcmc.singular import localized

        net = torch.nn.Linear(2, 2)  # trained
        module = BayesianModule(net, Categorical(), **localized(num_data=24, gamma=1.0), lr=0.1, num_chains=4)
        coefficient = LearningCoefficient()
        callbacks = [SamplingSchedule(burn_in_steps=200, every_n_steps=5), coefficient]
        trainer = pl.Trainer(max_steps=1000, callbacks=callbacks)  # trainer.fit(module, data); coefficient.result
    """

    place = Place.DIAGNOSIS

    def __init__(self, loss: Kind = "own", warn: bool = True) -> None:
        check_choice("loss", loss, ("own", "full", "step"))
        check_flag("warn", warn)
        self.loss = loss
        self.warn = warn
        self.result: LearningCoefficientEstimate | None = None
        """The estimate of the last fit, once it has ended."""
        self.reset()

    def reset(self) -> None:
        self.result = None
        self._kind: Kind = self.loss
        self._centers: dict[str, Tensor] = {}
        self._held: HeldData | None = None
        """The training data of the centre's energy."""
        self._center: Tensor | None = None
        self._temperature = 0.0
        self._trace: Tensor | None = None
        self._recorded: list[list[int]] = []
        """Step, epoch and batch size of each value."""
        self._step = 0

    def check(self, trainer: pl.Trainer, module: ChainModel) -> None:
        check_centered(module.prior, "LearningCoefficient")
        require_schedule(trainer, self)

    def begin(self, run: Run, saved: dict[str, Any] | None) -> None:
        self._kind = self.loss
        if self.loss == "own" and not has_fresh_batches(run.trainer):
            self._kind = "step"
            rank_zero_warn(
                "LearningCoefficient draws random training data at each sample, and this loader allows none: it uses "
                "the data of the steps instead (loss='step'). Pass one loader with a batch_size and a data set with a "
                "length."
            )
        self._step = run.sampler.step_count
        if saved is None:
            return
        self._recorded = [list(row) for row in saved["recorded"]]
        self._temperature = saved["temperature"]
        if saved["center"] is not None:
            own, device = run.layout.own, exact_device(run.module.device)
            self._center, self._trace = own(saved["center"]).to(device), own(saved["trace"]).to(device)

    # -- values -------------------------------------------------------------------------------------------------------

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._kind == "step" and self._is_new() and self.run.chains.progress.stage is Stage.SAMPLING:
            self._record(trainer)

    def acts_in(self, step: int) -> bool:
        return self._kind == "step"

    def on_posterior_samples(self, trainer: pl.Trainer, pl_module: ChainModel, drawing: Drawing) -> None:
        if self._kind != "step" and self._is_new():
            self._record(trainer)

    def _is_new(self) -> bool:
        """Return whether a step was made since the last call: no accumulated or skipped one, or further drawing."""
        before, self._step = self._step, self.run.sampler.step_count
        return before != self._step

    def _record(self, trainer: pl.Trainer) -> None:
        chains, sampler = self.run.chains, self.run.sampler
        if not self._centers:
            self._begin(trainer, chains, sampler)
        if self._held is not None and not self._held.is_same(held_data(trainer)):
            raise ValueError(
                "LearningCoefficient compares energies with that of the centre, and the training data changed since: "
                "use a datamodule whose data stay the same"
            )
        assert self._trace is not None
        assert self._center is not None
        column = len(self._recorded)
        if column == self._trace.shape[1]:
            self._trace = torch.cat([self._trace, torch.zeros_like(self._trace)], 1)
        excess = excess_energies(self._kind, trainer, chains, sampler, self._centers, self._center)
        self._trace[:, column].copy_(excess)
        size = chains.observed.batch_size * chains.accumulation.window
        if chains.weights is not None and not chains.weights.differ_by_size:
            size = 1
        self._recorded.append([sampler.step_count, trainer.current_epoch, size])

    def _begin(self, trainer: pl.Trainer, chains: Chains, sampler: Sampler) -> None:
        """Check the sampled law, and compute the loss at the centre, before the first value."""
        for subject in ("set controls", "expand samples"):
            holder = chains.claims.holder(subject)
            if holder is not None:
                raise ValueError(
                    f"LearningCoefficient needs draws of exp(-U/τ) itself, and {type(holder).__name__} changes what is "
                    f"drawn: remove {type(holder).__name__}"
                )
        temperature = _temperature_of(sampler)
        self._centers, self._held = centers_of(chains), held_data(trainer)
        if self._center is None:
            self._temperature = temperature
            self._center = center_energies(trainer, chains, self._centers, "LearningCoefficient")
            room = torch.zeros(chains.num_chains, FIRST_ROOM, dtype=torch.float64)
            self._trace = room.to(exact_device(chains.model.device))

    # -- the estimate -------------------------------------------------------------------------------------------------

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        module, sampler = self.run.module, self.run.sampler
        traces, center = self._gathered()
        if not self._recorded or traces is None or center is None:
            return
        chains = module.chains
        differs = self._kind != "full" and differs_in_training(module)
        times = None if module.plan is None else module.plan.relaxation_times
        notes = notes_on(times, differs, (self._temperature, _temperature_of(sampler)))
        steps, epochs, sizes = torch.tensor(self._recorded).unbind(1)
        count = chains.observed.num_data
        facts: dict[str, Any] = {
            "nbeta": count / self._temperature,
            "gamma": gamma_of(chains, self._temperature),
            "num_data": count,
            "center_loss": float(center.mean()) / count,
        }
        self.result = estimate_of(traces / self._temperature, steps, epochs, sizes, self._kind, notes, **facts)
        self._publish(trainer, self.result)

    def _publish(self, trainer: pl.Trainer, result: LearningCoefficientEstimate) -> None:
        if is_trial(trainer):
            return
        if self.warn and result.verdict == "warning":
            rank_zero_warn(f"LearningCoefficient: {result.findings[0].text}.")
        log_scalars(trainer, result.scalars(), trainer.global_step)
        if trainer.loggers:
            log_figure(trainer, "learning_coefficient/traces", result.figure(), trainer.global_step, None)

    def _gathered(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the recorded values and the centre's energy of all chains of the run, on the host."""
        if self._trace is None or self._center is None or self._run is None:
            return self._trace, self._center
        layout = self.run.layout
        trace, center = self._trace[:, : len(self._recorded)].contiguous(), self._center
        if self._kind == "step":  # each rank has the losses of its own data
            trace = layout.mean_over_data(trace)
        return layout.gather(trace.cpu()), layout.gather(center.cpu())

    def end(self) -> None:
        """Drop the run; its own values stay, without those of other processes, which may have failed."""
        if self._trace is not None:
            self._trace = self._trace[:, : len(self._recorded)].cpu()
        self._center = None if self._center is None else self._center.cpu()
        self._held = None
        self._centers = {}

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        trace, center = self._gathered()
        return {
            "trace": None if trace is None else trace[:, : len(self._recorded)].clone(),
            "center": center,
            "recorded": [list(row) for row in self._recorded],
            "temperature": self._temperature,
        }


def _temperature_of(sampler: Sampler) -> float:
    """Return τ of the last step."""
    temperatures = exact(sampler.param_groups[0]["temperature"]).reshape(-1)
    first = float(temperatures[0])
    if first <= 0 or bool((temperatures != first).any()):
        raise ValueError(
            f"LearningCoefficient needs one temperature above 0 for all chains, got {temperatures.tolist()}: pass "
            "**localized(num_data, gamma) of lightning_sgmcmc.singular to the module"
        )
    return first
