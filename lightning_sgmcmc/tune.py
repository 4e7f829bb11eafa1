"""A step size from short runs: `propose_lr`.

Heat bounds the step of a stochastic-gradient sampler, and it has two sources. The mini-batch noise of the gradient adds
lr·N·Var(g)/(2·η·τ) of the target's temperature (η the friction, 1 for SGLD), which grows with lr and falls with the
batch size. The finite step adds about lr·λ/(4 - 2η) of it, with λ the curvature of the mean potential: it is large in
the sharpest directions only. Both appear within a few relaxation times of those sharp directions, so a short run finds
them. A short run cannot find how long a chain needs to spread over the flat directions, N·(prior variance)/lr steps. A
smaller step is never healthier in that respect, so the proposal is the largest step whose heat is within the tolerance.
"""

import logging
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_info

from lightning_sgmcmc.callbacks import ChainHealth, SamplerCallback, SamplingSchedule
from lightning_sgmcmc.checks import check_count
from lightning_sgmcmc.diagnostics.findings import FindingKind
from lightning_sgmcmc.diagnostics.health import HealthReport, Temperatures
from lightning_sgmcmc.module import BayesianModule
from lightning_sgmcmc.run.guard import NonFiniteEnergyError

MIN_STEPS = 100
"""The fewest steps of a probe."""


@dataclass(frozen=True)
class Probe:
    """A short run at one step size.

    Attributes:
        lr: the step size.
        kinetic: kinetic temperature of all tensors together, None if the run diverged.
        configurational: configurational temperature of all tensors together, None if the run diverged.
        noise_share: the largest share of mini-batch noise in a tensor's step.
        energy: mean Ũ in nats.
        healthy: whether nothing heats the chain beyond the tolerance.
        reason: a sentence on what heats it, else "".
        cause: the reason in one or two words ("kinetic temperature", "divergence", "refused"), else "".
    """

    lr: float
    kinetic: float | None
    configurational: float | None
    noise_share: float | None
    energy: float | None
    healthy: bool
    reason: str
    cause: str = ""

    @property
    def verdict(self) -> str:
        """ "healthy", or the cause."""
        return "healthy" if self.healthy else self.cause

    @classmethod
    def failed(cls, lr: float, cause: str, error: Exception) -> "Probe":
        """Return the probe of a run that an error ended."""
        return cls(lr, None, None, None, None, False, f"{cause}: {error}", cause)


@dataclass(frozen=True)
class StepProposal:
    """The result of `propose_lr`.

    Attributes:
        lr: the largest step size that was healthy, None if none was.
        probes: all probes, by step size.
        is_bounded: whether a larger step was tried and was unhealthy; otherwise the proposal is the largest step tried.
    """

    lr: float | None
    probes: tuple[Probe, ...]
    is_bounded: bool


def propose_lr(
    module: BayesianModule,
    train_dataloaders: Any = None,
    datamodule: pl.LightningDataModule | None = None,
    *,
    steps: int = 500,
    burn_in_steps: int = 500,
    tolerance: float = 0.2,
    max_probes: int = 10,
    make_trainer: Callable[..., pl.Trainer] = pl.Trainer,
) -> StepProposal:
    """Return the largest step size at which a short run is healthy.

    The chain is optimized at temperature 0 with the module's lr. From there it is probed at the module's temperature:
    at lr, then at steps twice as large while they are healthy or half as large while they are not, and finally between
    the last two. So the proposal is within a factor √2 of the largest healthy step, up to the noise of a probe. A probe
    is unhealthy if `ChainHealth` finds heat (too high a temperature, too much mini-batch noise, divergence), if the
    kinetic temperature of all tensors together is above τ·(1 + tolerance), or if the energy is above that of d harmonic
    coordinates, U_0 + τ·(1 + tolerance)·d/2, with U_0 the energy of the optimum. Temperatures below τ do not count:
    they depend on the length of the run.

    The call restores the module: parameters and buffers, lr, evaluations.

    Args:
        module: the module, with an lr to start the search from (None uses the sampler's default).
        train_dataloaders: training data, or
        datamodule: the datamodule that has them.
        steps: optimizer steps of a probe, at least 100.
        burn_in_steps: optimizer steps at temperature 0 before the probes.
        tolerance: accepted relative deviation of temperatures.
        max_probes: the largest number of probes.
        make_trainer: makes a trainer from keyword arguments; a partial of `Trainer` with devices or precision.

    Raises:
        ValueError: for an argument out of range, or a module at temperature 0.
        TypeError: if the module is not a `BayesianModule`.
    """
    _check_arguments(module, steps, burn_in_steps, max_probes)
    data = {"train_dataloaders": train_dataloaders, "datamodule": datamodule}
    module.configure_model()  # stacks several chains, for good
    runs = _ShortRuns(module, data, tolerance, make_trainer)
    with _restored(module):
        lr, energy = runs.burn_in(burn_in_steps)
        with _restored(module) as restore:

            def probe(lr: float) -> Probe:
                restore()
                found = runs.probe(lr, steps, energy)
                rank_zero_info(f"lr={lr:.3g}: {found.verdict}")
                return found

            return _proposal(_search(probe, lr, max_probes))


def _check_arguments(module: Any, steps: int, burn_in_steps: int, max_probes: int) -> None:
    if not isinstance(module, BayesianModule):
        raise TypeError(
            f"propose_lr works with a BayesianModule, got {type(module).__name__}: derive the module from "
            "lightning_sgmcmc.BayesianModule"
        )
    check_count("steps", steps, least=MIN_STEPS)
    check_count("burn_in_steps", burn_in_steps, least=0)
    check_count("max_probes", max_probes)
    if module.temperature == 0:
        raise ValueError("at temperature 0 the chain does not sample, so no step is too hot: set temperature")
    if not (module.lr is None or isinstance(module.lr, int | float)):
        raise ValueError(
            f"propose_lr finds one step size for all chains and parameters, got lr={module.lr}: pass the module one "
            "number, or none"
        )
    if module.lr == 0:
        raise ValueError("lr is 0: set the module's lr to a step size to start the search from")


def _search(probe: Callable[[float], Probe], lr: float, max_probes: int) -> list[Probe]:
    """Probe at lr, then up or down by factors of two until health changes, then between the last two."""
    probes = [probe(lr)]
    factor = 2.0 if probes[0].healthy else 0.5
    while len(probes) < max_probes and probes[-1].healthy == probes[0].healthy:
        probes.append(probe(probes[-1].lr * factor))
    if len(probes) < max_probes and probes[-1].healthy != probes[0].healthy:
        probes.append(probe(math.sqrt(probes[-1].lr * probes[-2].lr)))
    return probes


def _proposal(probes: list[Probe]) -> StepProposal:
    # Heat grows with the step, so a healthy probe beyond an unhealthy one was luck.
    limit = min((p.lr for p in probes if not p.healthy), default=math.inf)
    below = [p.lr for p in probes if p.healthy and p.lr < limit]
    return StepProposal(max(below, default=None), tuple(sorted(probes, key=lambda p: p.lr)), math.isfinite(limit))


class _MeanEnergy(SamplerCallback):
    """Averages the energies of the steps after `start`."""

    def __init__(self, start: int) -> None:
        self.start, self.count = start, 0
        self.total: torch.Tensor | float = 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        if trainer.global_step > self.start:
            self.total, self.count = self.total + pl_module.chains.observed.energy.mean(), self.count + 1

    @property
    def mean(self) -> float | None:
        """The mean, None without steps."""
        return float(self.total) / self.count if self.count else None


@dataclass
class _ShortRuns:
    """Makes the short runs."""

    module: BayesianModule
    data: dict[str, Any]
    tolerance: float
    make_trainer: Callable[..., pl.Trainer]

    def _fit(self, steps: int, *callbacks: pl.Callback) -> None:
        trainer = self.make_trainer(
            max_steps=steps,
            max_epochs=-1,
            callbacks=list(callbacks),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
            num_sanity_val_steps=0,
            fast_dev_run=False,
        )
        with _quiet():
            trainer.fit(self.module, **self.data)

    def burn_in(self, steps: int) -> tuple[float, float | None]:
        """Optimize; return the sampler's lr, and the mean energy of the later half (None without steps)."""
        energy = _MeanEnergy(steps // 2)
        # The last step alone is not burn-in, since a schedule without a sample is refused.
        schedule = SamplingSchedule(burn_in_steps=max(steps - 1, 0), every_n_steps=1, temperature=0.0)
        self._fit(max(steps, 1), schedule, energy)
        given = self.module.lr
        lr = float(given if isinstance(given, int | float) else self.module.sampler.defaults["lr"])
        return lr, energy.mean if steps > 0 else None

    def probe(self, lr: float, steps: int, lowest: float | None) -> Probe:
        """Sample for some steps and judge.

        Args:
            lr: the step size.
            steps: optimizer steps.
            lowest: the energy of the optimum, None if it is not known.
        """
        self.module.lr = lr
        health = ChainHealth(every_n_steps=max(1, min(20, steps // 100)), tolerance=self.tolerance, warn=False)
        try:
            self._fit(steps, SamplingSchedule(burn_in_steps=0, every_n_steps=steps), health)
        except ValueError as error:  # the sampler refuses the step
            return Probe.failed(lr, "refused", error)
        except NonFiniteEnergyError as error:
            return Probe.failed(lr, FindingKind.DIVERGENCE.value, error)
        report = self.module.health
        assert report is not None
        total = report.total or Temperatures()
        cause, reason = self._trouble(report, total, lowest)
        share = max(report.gradient_noise_share.values(), default=None)
        energy = report.energy.mean
        return Probe(lr, total.kinetic, total.configurational, share, energy, not reason, reason, cause)

    def _trouble(self, report: HealthReport, total: Temperatures, lowest: float | None) -> tuple[str, str]:
        """Return what heats the chain, as a cause and a sentence, or empty strings."""
        heat = next((finding for finding in report.findings if finding.is_heat), None)
        if heat is not None:
            return heat.kind.value, heat.text
        limit, energy = report.temperature * (1 + self.tolerance), report.energy
        if total.kinetic is not None and total.kinetic > limit:
            cause = FindingKind.KINETIC.value
            return cause, f"{cause}: {total.kinetic:.3g} in all tensors together"
        if lowest is not None and energy.mean is not None and energy.std is not None:
            numel = sum(entry.numel or 0 for entry in report.tensors.values())
            highest = lowest + limit * numel / 2
            if energy.mean - energy.std > highest:
                cause = FindingKind.ENERGY.value
                return cause, f"{cause}: {energy.mean:.6g} is above the expected {highest:.6g}"
        return "", ""


@contextmanager
def _restored(module: BayesianModule) -> Iterator[Callable[[], None]]:
    """Restore the module's tensors and the attributes that a fit sets at the end; yield a function that does so now.

    Copying the module is not safe: compiled networks and attributes of a subclass may not copy.
    """
    tensors = [*module.parameters(), *module.buffers()]
    kept = [t.detach().clone() for t in tensors]
    names = ("lr", "num_data", "posterior", "evaluations", "health")
    plain = {name: getattr(module, name) for name in names}
    seed, trainable = module.chains.seed, module.chains.trainable
    training = module.training

    def restore() -> None:
        with torch.no_grad():
            for tensor, value in zip([*module.parameters(), *module.buffers()], kept, strict=True):
                tensor.copy_(value)
                tensor.grad = None
        for name, value in plain.items():
            setattr(module, name, value)
        module.chains.reset()
        module.chains.seed, module.chains.trainable = seed, trainable
        module.train(training)

    try:
        yield restore
    finally:
        restore()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Lightning's messages about a run."""
    logger = logging.getLogger("pytorch_lightning.utilities.rank_zero")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="pytorch_lightning")
            yield
    finally:
        logger.setLevel(level)
