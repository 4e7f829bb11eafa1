"""A step size from short runs: `propose_lr`, and `sgmcmc tune` on the command line.

What bounds the step of a stochastic-gradient sampler is heat, and there are two sources. The mini-batch noise of the
gradient adds lr·N·Var(g)/(2·η·τ) of the target's temperature (η the friction, 1 for SGLD), which grows with lr and
falls with the batch. The finite step adds about lr·λ/(4 - 2η) of it, with λ the curvature of the mean potential: it is
large in the sharpest directions only. Both show within a few relaxation times of those sharp directions, so a short run
finds them. It cannot find how long a chain needs to spread over the flat directions, N·(prior variance)/lr steps: a
smaller step is never healthier in that respect, so the largest step whose heat is within the tolerance is proposed.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_info

from lightning_sgmcmc.callbacks import ChainHealth, SamplerCallback, SamplingSchedule
from lightning_sgmcmc.diagnostics.health import HEAT_WARNINGS
from lightning_sgmcmc.module import BayesianModule
from lightning_sgmcmc.run.guard import NonFiniteEnergyError


@dataclass(frozen=True)
class Probe:
    """A short run at one step size.

    Attributes:
        lr: the step size.
        kinetic: kinetic temperature of all tensors together, None for rules without momentum, or if it diverged.
        configurational: the same for the configurational temperature.
        noise_share: the largest share of mini-batch noise in a tensor's step.
        energy: mean Ũ in nats.
        healthy: whether nothing heats the chain beyond the tolerance.
        reason: what does, else "".
    """

    lr: float
    kinetic: float | None
    configurational: float | None
    noise_share: float | None
    energy: float | None
    healthy: bool
    reason: str


@dataclass(frozen=True)
class StepProposal:
    """What `propose_lr` found.

    Attributes:
        lr: the largest step size that was healthy, None if none was.
        probes: all probes, by step size.
        is_bounded: whether a larger step was tried and found wanting; else the proposal is only the largest tried.
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

    The chain is optimized at temperature 0 with the module's lr, and from there probed at the module's temperature:
    at lr, then at steps twice as large while they are healthy or half as large while they are not, and at last between
    the two. So the proposal is within a factor √2 of where health ends, up to the noise of a probe. A probe is
    unhealthy if a `ChainHealth` warns of heat (too high a temperature, too much mini-batch noise, divergence), if the
    kinetic temperature of all tensors together is above τ·(1 + tolerance), or if the energy is above what d harmonic
    coordinates would have, U_0 + τ·(1 + tolerance)·d/2, with U_0 that of the optimum. Temperatures below τ do not
    count: they are a matter of the run's length.

    The module is left as it was: parameters and buffers, lr, evaluations.

    Args:
        module: the module, with an lr near which to look (None takes the sampler's own).
        train_dataloaders: training data, or
        datamodule: the datamodule that has them.
        steps: optimizer steps of a probe, at least 100.
        burn_in_steps: optimizer steps at temperature 0 before the probes.
        tolerance: accepted relative deviation of temperatures.
        max_probes: the most probes to make.
        make_trainer: makes a trainer from keyword arguments; a partial of `Trainer` with devices or precision.

    Raises:
        ValueError: for an argument out of range, or a module at temperature 0.
        TypeError: if the module is not a `BayesianModule`.
    """
    if not isinstance(module, BayesianModule):
        raise TypeError(f"propose_lr works with a BayesianModule, got {type(module).__name__}")
    for name, value, least in (
        ("steps", steps, 100),
        ("burn_in_steps", burn_in_steps, 0),
        ("max_probes", max_probes, 1),
    ):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    if module.temperature == 0:
        raise ValueError("at temperature 0 there is nothing to sample, so no step is too hot: set temperature")
    if module.lr == 0:
        raise ValueError("lr is 0: give the module an lr near which to look for a step size")
    data = {"train_dataloaders": train_dataloaders, "datamodule": datamodule}
    module.configure_model()  # several chains are stacked now, and stay so
    runs = _Runs(module, data, tolerance, make_trainer)
    with _unchanged(module):
        lr, energy = runs.burn_in(burn_in_steps)
        with _unchanged(module) as restore:

            def probe(lr: float) -> Probe:
                restore()
                found = runs.probe(lr, steps, energy)
                rank_zero_info(f"lr={lr:.3g}: {'healthy' if found.healthy else found.reason.split(':')[0]}")
                return found

            probes = _search(probe, lr, max_probes)
    healthy = [p.lr for p in probes if p.healthy]
    # Heat grows with the step, so a healthy probe beyond an unhealthy one was luck.
    limit = min((p.lr for p in probes if not p.healthy), default=math.inf)
    below = [lr for lr in healthy if lr < limit]
    return StepProposal(max(below, default=None), tuple(sorted(probes, key=lambda p: p.lr)), math.isfinite(limit))


def _search(probe: Callable[[float], Probe], lr: float, max_probes: int) -> list[Probe]:
    """Probe at lr, then up or down by factors of two until health changes, then between the last two."""
    probes = [probe(lr)]
    factor = 2.0 if probes[0].healthy else 0.5
    while len(probes) < max_probes and probes[-1].healthy == probes[0].healthy:
        probes.append(probe(probes[-1].lr * factor))
    if len(probes) < max_probes and probes[-1].healthy != probes[0].healthy:
        probes.append(probe(math.sqrt(probes[-1].lr * probes[-2].lr)))
    return probes


class _Energy(SamplerCallback):
    """Adds up the energies of the last half of a burn-in."""

    def __init__(self, start: int) -> None:
        self.start, self.count = start, 0
        self.total: torch.Tensor | float = 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        if trainer.global_step > self.start:
            self.total, self.count = self.total + pl_module.chain_state.energy.mean(), self.count + 1


@dataclass
class _Runs:
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
        trainer.fit(self.module, **self.data)

    def burn_in(self, steps: int) -> tuple[float, float | None]:
        """Optimize; return the sampler's lr and the mean energy at the end (None without steps)."""
        energy = _Energy(steps // 2)
        # The last step alone is not burn-in, since a schedule without a sample is refused.
        schedule = SamplingSchedule(burn_in_steps=max(steps - 1, 0), every_n_steps=1, temperature=0.0)
        with _quiet():
            self._fit(max(steps, 1), schedule, energy)
        lr = self.module.lr if self.module.lr is not None else float(self.module.sampler.defaults["lr"])
        if not isinstance(lr, int | float):
            raise ValueError("tuning finds one step size for all chains: give the module one lr, or none")
        return lr, float(energy.total) / energy.count if steps > 0 and energy.count else None

    def probe(self, lr: float, steps: int, lowest: float | None) -> Probe:
        """Sample for some steps and judge."""
        self.module.lr = lr
        health = ChainHealth(every_n_steps=max(1, min(20, steps // 100)), tolerance=self.tolerance, warn=False)
        try:
            with _quiet():
                self._fit(steps, SamplingSchedule(burn_in_steps=0, every_n_steps=steps), health)
        except ValueError as error:  # a step that the sampler itself refuses
            return Probe(lr, None, None, None, None, False, f"refused: {error}")
        except NonFiniteEnergyError as error:
            return Probe(lr, None, None, None, None, False, f"divergence: {error}")
        report = self.module.health
        assert report is not None
        total = report["total"] or {"kinetic": None, "configurational": None}
        reason = self._trouble(report, total, lowest)
        share = max(report["gradient_noise_share"].values(), default=None)
        energy = report["energy"]["mean"]
        return Probe(lr, total["kinetic"], total["configurational"], share, energy, not reason, reason)

    def _trouble(self, report: dict[str, Any], total: dict[str, Any], lowest: float | None) -> str:
        for warning in report["warnings"]:
            if warning.startswith(HEAT_WARNINGS) and " is below " not in warning:
                return str(warning)
        tau, limit = report["temperature"], 1 + self.tolerance
        if total["kinetic"] is not None and total["kinetic"] > tau * limit:
            return f"kinetic temperature: {total['kinetic']:.3g} in all tensors together"
        numel = sum(entry["numel"] for entry in report["tensors"].values())
        if lowest is not None and report["energy"]["mean"] is not None:
            highest = lowest + tau * limit * numel / 2
            if report["energy"]["mean"] - report["energy"]["std"] > highest:
                return f"energy: {report['energy']['mean']:.6g} is above the expected {highest:.6g}"
        return ""


@contextmanager
def _unchanged(module: BayesianModule) -> Iterator[Callable[[], None]]:
    """Put the module's tensors and what a fit sets back at the end; yield the function that does so at any time.

    A copy of the module would not do: compiled networks and what a subclass holds do not copy safely.
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
    """Keep Lightning from announcing every probe."""
    import logging
    import warnings

    logger = logging.getLogger("pytorch_lightning.utilities.rank_zero")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="pytorch_lightning")
            yield
    finally:
        logger.setLevel(level)
