"""Watches temperatures, mini-batch noise and energies of a chain, and warns with advice where they are off."""

import json
import math
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_sgmcmc.callbacks.base import SamplerCallback, bayesian
from lightning_sgmcmc.diagnostics.batch_means import BatchMeans, merge_batches, without_warm_up
from lightning_sgmcmc.diagnostics.health import (
    ANCHOR,
    DIVERGENCE,
    KINETIC,
    NOISE,
    PLAIN,
    ROWS,
    Record,
    assess,
    inner_products,
    square_norms,
)
from lightning_sgmcmc.module import BayesianModule
from lightning_sgmcmc.run.folder import run_folder
from lightning_sgmcmc.run.guard import NonFiniteEnergyError
from lightning_sgmcmc.run.loggers import write_output
from lightning_sgmcmc.samplers import Sampler, StepLaw
from lightning_sgmcmc.samplers.base import Control

EXTRAS = 4  # energy, its square, temperature, whether the gradient was clipped


class ChainHealth(SamplerCallback):
    """Says whether the step size is right, from what the chain shows while it samples.

    For each parameter tensor the kinetic and the configurational temperature against the target's τ, the share of mini-
    batch noise in the variance of a step, and whether the energy still drifts: see
    `lightning_sgmcmc.diagnostics.health`. Only steps of a sampling stage count, each with its own step size and
    temperature. A report is made at the end of every sampling stage, after a validation if there is a quarter more to
    go by, and at the end of the fit: it stands in
    `module.health` and in the run folder's `health.json`, its totals go to the loggers as `health/…`, and each kind of
    warning is given once.

    The mini-batch noise is half the mean square of the difference of two successive gradients, which needs no gradient
    of single data. It is too high by a share of lr·λ or less, with λ the curvature along the noise. Gradients are those
    before clipping, times the gradient multiplier, since that is the force whose law is sampled. A tensor that goes
    without a gradient in a step is left out. With several chains the figures are means over them, each in units of its
    own step size and temperature. The memory is three copies of the parameters.

    Args:
        every_n_steps: how many optimizer steps from one observation to the next.
        tolerance: accepted relative deviation from the target.
        false_alarm_rate: probability of a warning in a report on a chain that is within the tolerance.
        warm_up: share of each sampling stage, at its beginning, that is left out.
        warn: whether to warn; the report says the same without.

    Raises:
        ValueError: for an argument out of range.

    Source: Wenzel et al. 2020, section 4 and appendix I.

    Example::

        trainer = pl.Trainer(max_epochs=200, callbacks=[CyclicalSchedule(num_cycles=4), ChainHealth()])
    """

    def __init__(
        self,
        every_n_steps: int = 20,
        tolerance: float = 0.2,
        false_alarm_rate: float = 0.01,
        warm_up: float = 0.25,
        warn: bool = True,
    ) -> None:
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps must be at least 1, got {every_n_steps}")
        if not 0 < tolerance < math.inf:
            raise ValueError(f"tolerance must be positive and finite, got {tolerance}")
        if not 0 < false_alarm_rate < 1:
            raise ValueError(f"false_alarm_rate must be in (0, 1), got {false_alarm_rate}")
        if not 0 <= warm_up < 1:
            raise ValueError(f"warm_up must be in [0, 1), got {warm_up}")
        self.every_n_steps = every_n_steps
        self.tolerance = tolerance
        self.false_alarm_rate = false_alarm_rate
        self.warm_up = warm_up
        self.warn = warn
        self.reset()

    def reset(self) -> None:
        self._past: tuple[Tensor, Tensor] | None = None  # batches of the stages that are over
        self._stage: BatchMeans | None = None
        self._pending: Tensor | None = None
        self._missing: set[str] = set()
        self._warned: set[str] = set()
        self._copied_at = -1
        self._observations, self._reported_observations = 0, -1
        self._folder = Path()
        self._trainer: pl.Trainer | None = None
        self._is_spread = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        module = bayesian(pl_module, self)
        sampler = self._sampler = module.sampler
        self._trainer, self._is_spread = trainer, module.layout.is_spread
        self._folder = run_folder(trainer)
        names = {p: name for name, p in module.named_parameters()}
        self._params = [p for group in sampler.param_groups for p in group["params"]]
        self._names = [names.get(p, f"parameter {i}") for i, p in enumerate(self._params)]
        sizes = [len(group["params"]) for group in sampler.param_groups]
        self._slices = [slice(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(len(sizes))]
        self._chains = sampler.num_chains
        numels = torch.tensor([p.numel() / self._chains for p in self._params]).to(self._params[0])
        self._inverse_numels = 1 / (numels[:, None] if self._chains > 1 else numels)
        self._step = sampler.step_count
        self._clip = (trainer.gradient_clip_val, str(trainer.gradient_clip_algorithm or "norm").split(".")[-1].lower())
        self._anchors: list[Tensor] = []
        self._changes: list[Tensor] = []
        self._variances: list[Control | None] = [None] * len(sizes)
        length = self._past[0].shape[1] if self._past is not None else self._length
        if length != self._length:
            rank_zero_warn("The checkpoint's health record is of another network; ChainHealth begins anew.")
            self._past = None

    @property
    def _length(self) -> int:
        return ROWS * len(self._params) + EXTRAS

    # -- a step -------------------------------------------------------------------------------------------------------

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        sampler = self._sampler
        if pl_module.chain_state.stage != "sampling" or not all(map(sampler.is_noisy, sampler.param_groups)):  # type: ignore[union-attr]
            return
        step, every = sampler.step_count + 1, self.every_n_steps
        observed, copied = step % every == 0, (step + 1) % every == 0
        if self._stage is None:
            self._begin()
        if observed or copied:
            with torch.no_grad():
                gradients = self._gradients()
                if observed and self._copied_at == step - 1:
                    self._pending = self._observe_forces(gradients)
                if copied:
                    torch._foreach_copy_(self._changes, gradients)
                    self._copied_at = step

    def _begin(self) -> None:
        if not self._anchors:
            self._anchors = [torch.empty_like(p) for p in self._params]
            self._changes = [torch.empty_like(p) for p in self._params]
        torch._foreach_copy_(self._anchors, [p.detach() for p in self._params])
        self._stage = BatchMeans(self._length, self._params[0])
        self._variances = [None] * len(self._slices)
        self._copied_at = -1

    def _gradients(self) -> list[Tensor]:
        if any(p.grad is None for p in self._params):
            self._missing |= {n for n, p in zip(self._names, self._params, strict=True) if p.grad is None}
            return [torch.zeros_like(p) if p.grad is None else p.grad for p in self._params]
        return [p.grad for p in self._params]  # type: ignore[misc]

    def _observe_forces(self, gradients: list[Tensor]) -> Tensor:
        """Return θ·g, c·g, g·g and (g - g of the last step)² for each tensor, and whether g will be clipped."""
        torch._foreach_sub_(self._changes, gradients)
        value, algorithm = self._clip
        clipped = torch.zeros((), dtype=gradients[0].dtype, device=gradients[0].device)
        if value:
            if algorithm == "value":
                clipped = (torch.stack(torch._foreach_norm(gradients, math.inf)).amax() > value).to(clipped)
            else:
                clipped = (square_norms(gradients, self._chains).sum(0).sqrt() > value).to(clipped).mean()
        scales: list[Tensor] = []
        for group in self._sampler.param_groups:
            scales += self._sampler.preconditioner(group["params"]) or []
        if scales:  # norms in the metric of the preconditioner
            torch._foreach_sqrt_(scales)
            torch._foreach_mul_(self._changes, scales)
        weighted = torch._foreach_mul(gradients, scales) if scales else gradients
        parts = [
            inner_products([p.detach() for p in self._params], gradients, self._chains),
            inner_products(self._anchors, gradients, self._chains),
            square_norms(weighted, self._chains),
            square_norms(self._changes, self._chains),
        ]
        return torch.cat([*(part.flatten() for part in parts), clipped.reshape(1)])

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        sampler, stage = self._sampler, self._stage
        if stage is None:
            return
        if sampler.step_count == self._step:  # an accumulated micro-batch, or a step that the loss scaler skipped
            self._pending = None
            return
        self._step = sampler.step_count
        module = bayesian(pl_module, self)
        if module.chain_state.stage != "sampling":
            self._end_stage()
            self._report(trainer, module)
            return
        groups = zip(sampler.param_groups, self._variances, strict=True)
        self._variances = [self._law(group).momentum_variance(before) for group, before in groups]
        if self._pending is not None:
            with torch.no_grad():
                stage.add(self._observation(sampler, self._pending, module.chain_state.energy.mean()))
            self._observations, self._pending = self._observations + 1, None

    def _observation(self, sampler: Sampler, forces: Tensor, energy: Tensor) -> Tensor:
        """Return one step's row: the four numbers of each tensor, and the extras."""
        rows: list[list[Tensor]] = [[], [], [], []]
        several = self._chains > 1
        shape = (4, -1, self._chains) if several else (4, -1)
        plain, anchored, squares, changes = forces[:-1].reshape(shape)
        for group, part, variance in zip(sampler.param_groups, self._slices, self._variances, strict=True):
            params, inverse = self._params[part], self._inverse_numels[part]
            kappa = group["gradient_multiplier"]
            assert sampler.num_data is not None  # there was noise
            scale = sampler.num_data * kappa / group["temperature"]
            factor = self._law(group).gradient_noise_factor * kappa**2
            rows[PLAIN].append(plain[part] * inverse * scale)
            rows[ANCHOR].append(anchored[part] * inverse * scale)
            rows[NOISE].append(changes[part] * inverse * (factor / 2))
            if variance is None:
                rows[KINETIC].append(1 + squares[part] * inverse * factor)
            else:
                held = zip(sampler.stored_momenta(group), params, strict=True)
                momenta = [torch.zeros_like(p) if m is None else m for m, p in held]
                rows[KINETIC].append(square_norms(momenta, self._chains) * inverse / variance)
        temperature = sampler.param_groups[0]["temperature"]
        if not isinstance(temperature, Tensor):
            temperature = energy.new_tensor(temperature) if energy.device.type == "cpu" else energy * 0 + temperature
        extras = torch.stack([energy, energy.square(), temperature.mean(), forces[-1].to(energy)])
        # What each chain shows in units of its own step size and temperature is averaged over the chains.
        shown = (part.mean(1) if several else part for row in rows for part in row)
        return torch.cat([*shown, extras.to(forces)])

    def _law(self, group: dict[str, Any]) -> StepLaw:
        law = self._sampler.law(group)
        return self._sampler.langevin_law(group) if law is None else law

    # -- reports ------------------------------------------------------------------------------------------------------

    def _batches(self) -> tuple[Tensor, Tensor] | None:
        """Return all batches so far, of this stage and of those before it."""
        parts = [self._past] if self._past is not None else []
        if self._stage is not None:
            parts.append(without_warm_up(*self._stage.full(), self.warm_up))
        parts = [part for part in parts if len(part[1])]
        if not parts:
            return None
        return merge_batches(torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]))

    def _of_all_processes(self, trainer: pl.Trainer, means: Tensor) -> Tensor:
        """Return the mean over the processes' chains."""
        reduced: Tensor = trainer.strategy.reduce(means.to(self._params[0]), reduce_op="mean")  # type: ignore[assignment]
        return reduced.double().cpu()

    def _end_stage(self) -> None:
        self._past, self._stage, self._pending = self._batches(), None, None

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        enough = self._observations > 1.25 * self._reported_observations
        if trainer.state.fn == "fit" and not trainer.sanity_checking and enough:
            self._report(trainer, bayesian(pl_module, self))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end_stage()
        self._reported_observations = -1
        self._report(trainer, bayesian(pl_module, self))

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        # The energy guard stops a chain that diverges before its numbers come here; the record should say why.
        if isinstance(exception, NonFiniteEnergyError) and trainer.state.fn == "fit":
            self._reported_observations = -1
            self._report(trainer, bayesian(pl_module, self), diverged=True)

    def _report(self, trainer: pl.Trainer, module: BayesianModule, diverged: bool = False) -> None:
        """Assess what there is, unless that was done; publish it."""
        if self._observations == self._reported_observations:
            return
        self._reported_observations = self._observations
        # Where the run has failed, the ranks may no longer be in step, so what they share is left out.
        record = self._record(trainer, shared=not diverged)
        report = assess(record, self._sampler.step_count, self.tolerance, self.false_alarm_rate)
        if diverged:
            report["verdict"], report["warnings"] = "warning", [DIVERGENCE, *report["warnings"]]
        module.health = report
        for warning in report["warnings"] if self.warn else []:
            kind = warning.split(":")[0]
            if kind not in self._warned:
                self._warned.add(kind)
                rank_zero_warn(f"ChainHealth: {warning}.")
        if trainer.is_global_zero and self.warn and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            write_output(self._folder / "health.json", (json.dumps(report, indent=2) + "\n").encode())
        scalars = _scalars(report)
        for logger in trainer.loggers:
            logger.log_metrics(scalars, step=trainer.global_step)

    def _record(self, trainer: pl.Trainer, shared: bool = True) -> Record:
        batches = self._batches()
        count, length = len(self._params), self._length
        means, counts = (
            batches if batches is not None else (torch.zeros(0, length, dtype=torch.float64), torch.zeros(0))
        )
        kept = [i for i, name in enumerate(self._names) if name not in self._missing]
        extras = means[:, ROWS * count :]
        if shared and trainer.world_size > 1:  # the energies of a step are of the ranks' own batches
            extras = self._of_all_processes(trainer, extras)
            if self._is_spread:
                means = self._of_all_processes(trainer, means)
        weights = counts / counts.sum()
        temperature = float((extras[:, 2] * weights).sum()) if len(counts) else math.nan
        groups = self._sampler.param_groups
        allowance = [self._law(group).gradient_noise_allowance for group in groups for _ in group["params"]]
        return Record(
            names=[self._names[i] for i in kept],
            numels=[self._params[i].numel() for i in kept],
            values=means[:, : ROWS * count].reshape(-1, ROWS, count)[:, :, kept],
            energies=extras[:, 0],
            square_energies=extras[:, 1],
            counts=counts,
            temperature=round(temperature, 6) if math.isfinite(temperature) else 1.0,
            allowance=[allowance[i] for i in kept],
            clipped=float((extras[:, 3] * weights).sum()) if self._clip[0] else None,
        )

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._trainer = None

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        batches = self._batches()
        means, counts = (None, None) if batches is None else batches
        if means is not None and self._trainer is not None and self._is_spread:
            means = self._of_all_processes(self._trainer, means)  # a checkpoint is of all chains
        return {
            "means": means,
            "counts": counts,
            "missing": sorted(self._missing),
            "warned": sorted(self._warned),
            "observations": self._observations,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        means, counts = state_dict["means"], state_dict["counts"]
        self._past = None if means is None else (means, counts)
        self._missing, self._warned = set(state_dict["missing"]), set(state_dict["warned"])
        self._observations = state_dict["observations"]


def _scalars(report: dict[str, Any]) -> dict[str, float]:
    """Return what goes to the loggers: the totals, the largest deviations, the number of warnings."""
    scalars = {"health/warnings": float(len(report["warnings"]))}
    for kind in ("kinetic", "configurational"):
        values = [entry[kind] for entry in report["tensors"].values() if entry[kind] is not None]
        if values and report["temperature"] > 0:
            scalars[f"health/{kind}_temperature"] = report["total"][kind]
            deviations = [abs(value / report["temperature"] - 1) for value in values]
            scalars[f"health/{kind}_temperature_max_deviation"] = max(deviations)
    if report["gradient_noise_share"]:
        scalars["health/gradient_noise_share_max"] = max(report["gradient_noise_share"].values())
    return scalars
