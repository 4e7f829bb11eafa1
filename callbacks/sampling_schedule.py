"""Burn-in and thinning, with a constant, decaying or annealed step size."""

from typing import Any

import torch

from lightning_sgmcmc.callbacks.schedule import RunLength, Schedule, StepControls
from lightning_sgmcmc.chains.state import Stage
from lightning_sgmcmc.checks import check_count, check_kind, check_number
from lightning_sgmcmc.samplers.sampler import Control
from lightning_sgmcmc.schedules import Annealing, PolynomialDecay


class SamplingSchedule(Schedule):
    """One burn-in stage, then a sample at regular intervals of steps or epochs.

    The step size is the module's, decays as a·(b+k)^-γ, or is divided by a constant every epoch; the temperature may be
    divided likewise. Without `lr_decay` and `lr_annealing` torch's schedulers may set the step size.

    Args:
        burn_in_steps: optimizer steps before the first interval of `every_n_steps`.
        burn_in_epochs: the same in epochs; pass at most one of the two.
        every_n_steps: optimizer steps between samples.
        every_n_epochs: the same in epochs; pass exactly one of the two.
        burn_in_temperature: τ during burn-in (0 optimizes first); None uses the target's.
        temperature: τ of the target; None uses the module's.
        lr_decay: polynomial decay of the step size; parameter groups keep their ratios to the first.
        lr_annealing: divisor of the step size at every epoch.
        temperature_annealing: divisor of the temperature at every epoch.

    Raises:
        ValueError: for an argument out of range or a contradiction; at the start of the fit, if no sample would be
            drawn, or if epochs are requested and have no known length.

    Source: Welling & Teh 2011; Deng et al. 2020 (CSGLD), section 4.2.
    """

    def __init__(
        self,
        burn_in_steps: int | None = None,
        burn_in_epochs: int | None = None,
        every_n_steps: int | None = None,
        every_n_epochs: int | None = None,
        burn_in_temperature: float | None = None,
        temperature: float | None = None,
        lr_decay: PolynomialDecay | None = None,
        lr_annealing: Annealing | None = None,
        temperature_annealing: Annealing | None = None,
    ) -> None:
        if (every_n_steps is None) == (every_n_epochs is None):
            raise ValueError("pass exactly one of every_n_steps and every_n_epochs")
        if burn_in_steps is not None and burn_in_epochs is not None:
            raise ValueError("pass one of burn_in_steps and burn_in_epochs, not both")
        if lr_decay is not None and lr_annealing is not None:
            raise ValueError("pass one of lr_decay and lr_annealing, not both")
        for name, value, least in (
            ("burn_in_steps", burn_in_steps, 0),
            ("burn_in_epochs", burn_in_epochs, 0),
            ("every_n_steps", every_n_steps, 1),
            ("every_n_epochs", every_n_epochs, 1),
        ):
            check_count(name, value, least)
        check_number("burn_in_temperature", burn_in_temperature)
        check_number("temperature", temperature)
        check_kind("lr_decay", lr_decay, PolynomialDecay)
        check_kind("lr_annealing", lr_annealing, Annealing)
        check_kind("temperature_annealing", temperature_annealing, Annealing)
        self.burn_in_steps = burn_in_steps
        self.burn_in_epochs = burn_in_epochs
        self.every_n_steps = every_n_steps
        self.every_n_epochs = every_n_epochs
        self.burn_in_temperature = burn_in_temperature
        self.temperature = temperature
        self.lr_decay = lr_decay
        self.lr_annealing = lr_annealing
        self.temperature_annealing = temperature_annealing
        self._burn_in = 0
        self._every = 1
        self._steps_per_epoch = 0
        self._first_lr: Control = 1.0
        self._largest_lr = 1.0

    @property
    def sets_lr(self) -> bool:  # type: ignore[override]
        return self.lr_decay is not None or self.lr_annealing is not None

    def lay_out(self, length: RunLength) -> None:
        by_epoch = self.burn_in_epochs or self.every_n_epochs or self.lr_annealing or self.temperature_annealing
        if by_epoch and length.steps_per_epoch == 0:
            raise ValueError(
                "the training loader has no length, so epochs cannot be counted in steps: pass steps instead"
            )
        self._steps_per_epoch = length.steps_per_epoch
        self._first_lr, self._largest_lr = length.lr, float(torch.as_tensor(length.lr).max())
        if self.lr_decay is not None and self._largest_lr == 0:
            raise ValueError("lr_decay sets step sizes in proportion to the first one, which is 0: pass a positive lr")
        self._burn_in = self.burn_in_steps or (self.burn_in_epochs or 0) * length.steps_per_epoch
        self._every = self.every_n_steps or (self.every_n_epochs or 0) * length.steps_per_epoch
        if length.is_trial:
            self._burn_in, self._every = 0, 1
        if self._burn_in + self._every > length.steps:
            raise ValueError(
                f"no sample would be drawn: the run has {length.steps} steps, the first sample comes after "
                f"{self._burn_in} of burn-in and {self._every} more"
            )

    @property
    def first_sample(self) -> int:
        return self._burn_in + self._every

    def controls(self, step: int) -> StepControls:
        epoch = (step - 1) // self._steps_per_epoch if self._steps_per_epoch else 0
        burning_in = step <= self._burn_in
        cold = burning_in and self.burn_in_temperature is not None
        lr_factor = 1.0
        if self.lr_decay is not None:
            lr_factor = self.lr_decay(step) / self._largest_lr
        elif self.lr_annealing is not None:
            lr_factor = self.lr_annealing.factor(epoch)
        return StepControls(
            lr_factor,
            self.burn_in_temperature if cold else self.temperature,
            Stage.BURN_IN if burning_in else Stage.SAMPLING,
            1.0 if self.temperature_annealing is None else self.temperature_annealing.factor(epoch),
        )

    def _lr(self, group: dict[str, Any], step: int, controls: StepControls) -> Control:
        if self.lr_decay is None:
            return super()._lr(group, step, controls)
        return self.lr_decay(step) * (group["initial_lr"] / self._first_lr)  # type: ignore[no-any-return]

    def draws(self, step: int) -> bool:
        return step > self._burn_in and (step - self._burn_in) % self._every == 0
