"""Gradient estimators: of all data, of a uniform batch, of a chosen batch, with control variates.

For posteriors that are sums (`lightning_sgmcmc.simulation.finite_sums`) and the light loop on them
(`lightning_sgmcmc.simulation.subsampled_chains`). An estimator is a description; `begin` creates the state of one run.
The cost counts evaluations of one datum's gradient for one chain, including those of every candidate batch and the
passes of snapshots and calibrations.

Batches are drawn uniformly and independently at every step, and within a batch with replacement too, so that
one of size b has 1/b of the covariance of a single datum's gradient. One generator per purpose serves all chains.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import get_args

from lightning_sgmcmc.checks import check_choice, check_count, check_number
from lightning_sgmcmc.samplers import UnderdampedLangevin
from lightning_sgmcmc.simulation.gradient_runs import Gradients, OfAllData, OfBatches, SumRun, WithFriction
from lightning_sgmcmc.subsampling.ewsg import Guess


class GradientEstimator(ABC):
    """Describes how to estimate a gradient; it has no state."""

    @abstractmethod
    def begin(self, run: SumRun) -> Gradients:
        """Return the gradients of a run.

        Raises:
            ValueError: for a sampler or a temperature that the estimator does not support.
        """


@dataclass(frozen=True)
class FullGradient(GradientEstimator):
    """∇U from all data; N evaluations per step."""

    def begin(self, run: SumRun) -> Gradients:
        return OfAllData(run)


@dataclass(frozen=True)
class UniformGradient(GradientEstimator):
    """The gradient of a uniformly drawn batch; b evaluations a step.

    Args:
        batch_size: b.
    """

    batch_size: int = 1

    def __post_init__(self) -> None:
        check_count("batch_size", self.batch_size)

    def begin(self, run: SumRun) -> "OfBatches":
        return OfBatches(run, self.batch_size)


@dataclass(frozen=True)
class ControlVariateGradient(GradientEstimator):
    """The gradient of a uniform batch with a control variate (SVRG-LD, if the sampler is SGLD).

        g(θ) = g_B(θ) - g_B(θ_q) + ∇U(θ_q)

    θ_q is each chain's own snapshot, taken at regular passes. A snapshot costs N evaluations, in addition to the steps.

    Args:
        batch_size: b.
        refresh_every_passes: passes between snapshots, of N/b steps each.
        stored: whether each datum's gradient at the snapshot counts as stored, N·d numbers per chain. Then a step
            costs b evaluations; otherwise it is recomputed, and a step costs 2b.

    Source: Dubey et al. 2016, Algorithm 2 (SVRG-LD); Li et al. 2021 (EWSG), section 5.1.
    """

    batch_size: int = 1
    refresh_every_passes: float = 1.0
    stored: bool = True

    def __post_init__(self) -> None:
        check_count("batch_size", self.batch_size)
        _check_passes("refresh_every_passes", self.refresh_every_passes)

    def begin(self, run: SumRun) -> "OfBatches":
        return OfBatches(run, self.batch_size, refresh=self.refresh_every_passes, stored=self.stored)


@dataclass(frozen=True)
class ExponentialGradient(GradientEstimator):
    """The gradient of a batch chosen by a Metropolis chain on its index (EWSG); (M+1)·b evaluations per step.

    The index chain restarts at each step, from a uniform batch. With no proposals it is `UniformGradient`, bit for bit.

    Args:
        batch_size: b.
        num_proposals: M.
        guess: approximation of the momentum after the step, see `lightning_sgmcmc.subsampling.Guess`.
        control_variate: corrects the gradients of all candidates, with the same batch size; None corrects none.

    Source: Li et al. 2021 (EWSG), Algorithm 1 and appendices D and E.
    """

    batch_size: int = 1
    num_proposals: int = 1
    guess: Guess = "unchanged"
    control_variate: ControlVariateGradient | None = None

    def __post_init__(self) -> None:
        check_count("batch_size", self.batch_size)
        check_count("num_proposals", self.num_proposals, least=0)
        check_choice("guess", self.guess, get_args(Guess))
        if self.control_variate is not None and self.control_variate.batch_size != self.batch_size:
            raise ValueError(
                f"the control variate's batch_size={self.control_variate.batch_size} is not the candidates' "
                f"{self.batch_size}"
            )

    def begin(self, run: SumRun) -> "OfBatches":
        if run.rule.plain_law(run.group) is None:
            raise ValueError(
                f"{type(run.rule).__name__} has no step law of the form that EWSG's weights need: use SGLD, "
                "SGHMC, SGNHT or UnderdampedLangevin"
            )
        if not run.group["temperature"] > 0:
            raise ValueError("EWSG matches the law of a step, and temperature=0 has none: keep it positive")
        variate = self.control_variate
        return OfBatches(
            run,
            self.batch_size,
            self.num_proposals,
            self.guess,
            refresh=variate.refresh_every_passes if variate is not None else None,
            stored=variate.stored if variate is not None else True,
        )


@dataclass(frozen=True)
class CalibratedFriction(GradientEstimator):
    """A batch's gradient, and a friction that cancels the heating by batch noise (EWSG-VR, with `ExponentialGradient`).

    The friction Γ = γ·I + h·cov/(2τ) follows from the moments of uniform batches' gradients. These are computed from
    all data at calibrations, which cost N evaluations, and updated by each step's batch in between. The sampler
    receives it as `UnderdampedLangevin.extra_drag`; EWSG's weights still use γ. An Euler step needs h·Γ below 2.

    As printed, Algorithm 2 spends every L-th pass only on calibration, so that with the paper's L = 1 it never
    samples. Here L passes of steps follow each calibration, whose own pass is additional.

    Args:
        gradient: gradient estimator of the steps, without control variates, whose moments would differ.
        calibrate_every_passes: L.
        matrix: whether to use the full covariance for each chain, or its diagonal.
        stored: whether each datum's gradient at the calibration counts as stored, N·d numbers per chain;
            otherwise that of the chosen batch is recomputed, for b more evaluations per step.

    Raises:
        ValueError: for gradients with control variates.

    Source: Li et al. 2021 (EWSG), appendix F and Algorithm 2.
    """

    gradient: UniformGradient | ExponentialGradient
    calibrate_every_passes: float = 1.0
    matrix: bool = True
    stored: bool = True

    def __post_init__(self) -> None:
        _check_passes("calibrate_every_passes", self.calibrate_every_passes)
        if not isinstance(self.gradient, UniformGradient | ExponentialGradient):
            raise ValueError(
                f"friction is calibrated for UniformGradient or ExponentialGradient, not {type(self.gradient).__name__}"
            )
        if isinstance(self.gradient, ExponentialGradient) and self.gradient.control_variate is not None:
            raise ValueError("friction is calibrated for plain batches: omit the control variate")

    def begin(self, run: SumRun) -> Gradients:
        if not isinstance(run.rule, UnderdampedLangevin):
            raise ValueError(f"calibrated friction needs UnderdampedLangevin, got {type(run.rule).__name__}")
        if not run.group["temperature"] > 0:
            raise ValueError("calibrated friction divides by 2τ: keep the temperature positive")
        inner = self.gradient.begin(run)
        return WithFriction(run, inner, self.calibrate_every_passes, self.matrix, self.stored)


def _check_passes(name: str, value: float) -> None:
    check_number(name, value)
    if not value > 0:
        raise ValueError(f"{name} must be positive, got {value}")
