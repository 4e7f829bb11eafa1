"""The methods and networks of ICSGLD's Table 1, as modules and callbacks."""

import functools
from typing import Any, NamedTuple, Protocol

from torch import nn
from torch.optim.lr_scheduler import MultiStepLR

from lightning_sgmcmc import BayesianModule, Categorical, ContourRules, DecayingStepSize, GaussianPrior
from lightning_sgmcmc.callbacks import (
    SWAG,
    BayesianModelAverage,
    ContourGradient,
    CyclicalSchedule,
    ReplicaExchange,
    SampleCollector,
    SamplingSchedule,
    VarianceReducedEnergy,
)
from lightning_sgmcmc.chains.schedule import StepControls
from lightning_sgmcmc.compiling import Compile
from lightning_sgmcmc.namespace import pl
from lightning_sgmcmc.samplers import SGHMC
from lightning_sgmcmc.schedules import cyclical_lr_factor

METHODS = ("cycSGHMC×T4", "cycSWAG×T4", "M-SGD×P4", "reSGHMC×P4", "ICSGHMC×P4")
CHAINS = 4
CYCLES = 10
FLAT_END = 0.15
LR = 0.1
FRICTION = 0.1
WEIGHT_DECAY = 5e-4
LADDER = (1.0, 3.0, 9.0, 27.0)
CLAMP = 5.0
OOD = "ood"

Figures = tuple[float, float, float]


class Network(NamedTuple):
    """What the program sets for a network, and the paper's table.

    Attributes:
        first_edge, width: u_1 and Δu of the contour; m is 200.
        swap_barrier: nats by which a hot chain's energy should be lower for the coldest pair to swap.
        cosine: let ICSGHMC's step size follow one cosine, with noise from 80 % of the run on, where it stays constant.
        paper: accuracy in %, NLL summed over the test images and Brier score ×1000 of each method.
    """

    first_edge: float
    width: float
    swap_barrier: float
    cosine: bool = False
    paper: tuple[Figures, ...] = ()


RESNET_20 = ((75.41, 8437, 2.91), (75.46, 8419, 2.78), (76.01, 8175, 2.58), (76.15, 8196, 2.73), (76.34, 8076, 2.54))
RESNET_32 = ((77.93, 7658, 3.29), (77.91, 7656, 3.19), (78.41, 7501, 2.77), (78.57, 7454, 3.04), (78.72, 7406, 2.76))
RESNET_56 = ((81.23, 6770, 3.18), (81.14, 6744, 3.06), (81.03, 6847, 2.86), (81.11, 6915, 2.92), (81.51, 6630, 2.88))
WRN_16_8 = ((82.98, 6384, 2.17), (83.05, 6359, 2.04), (82.57, 6821, 1.77), (82.72, 6452, 1.92), (83.12, 6338, 1.83))
NETWORKS = {
    "ResNet-8": Network(100.0, 20.0, 30.0),
    "ResNet-20": Network(20_400.0, 200.0, 4000.0, paper=RESNET_20),
    "ResNet-32": Network(20_400.0, 200.0, 4000.0, paper=RESNET_32),
    "ResNet-56": Network(10_400.0, 200.0, 4000.0, paper=RESNET_56),
    "WRN-16-8": Network(120.0, 60.0, 1000.0, cosine=True, paper=WRN_16_8),
}
"""By name, see `resnet.NETWORKS`; ResNet-8 is ours, for quick runs."""


class Training(Protocol):
    """The settings that the methods read: those of the recipe `cifar100_uncertainty`."""

    @property
    def num_data(self) -> int: ...
    @property
    def epochs(self) -> int: ...
    @property
    def batch(self) -> int: ...
    @property
    def temperature(self) -> float: ...
    @property
    def samples(self) -> tuple[int, int]: ...
    @property
    def swag(self) -> tuple[int, int]: ...
    @property
    def zeta(self) -> float: ...
    @property
    def step_size(self) -> float: ...
    @property
    def attempts(self) -> int: ...
    @property
    def compile(self) -> Compile: ...


def milestones(epochs: int) -> list[int]:
    """Return the epochs at which step sizes fall to a fifth: 250 and 375 of 500."""
    return [epochs // 2, epochs * 3 // 4]


def contour_start(network: Network, epochs: int) -> int:
    """Return the last epoch without a contour: 375 of 500, with a cosine 400."""
    return epochs * (4 if network.cosine else 3) // (5 if network.cosine else 4)


def module_of(method: str, network: Network, net: nn.Module, setting: Training) -> BayesianModule:
    """Return the network, or the stack of chains, with its sampler and its step sizes.

    Args:
        method: its name.
        network: what is set for it.
        net: the network.
        setting: the recipe's settings.
    """

    class SteppedModule(BayesianModule):
        """Divides the step size by five at the milestones, with a scheduler of torch."""

        def configure_optimizers(self) -> Any:
            sampler = super().configure_optimizers()
            return {
                "optimizer": sampler,
                "lr_scheduler": MultiStepLR(sampler, milestones(setting.epochs), gamma=0.2),
            }

    stepped = method == "reSGHMC×P4" or (method == "ICSGHMC×P4" and not network.cosine)
    return (SteppedModule if stepped else BayesianModule)(
        net=net,
        likelihood=Categorical(),
        prior=GaussianPrior((setting.num_data * WEIGHT_DECAY) ** -0.5),
        sampler=functools.partial(SGHMC, friction=FRICTION),
        lr=LR,
        temperature=0.0 if method in ("M-SGD×P4", "cycSWAG×T4") else setting.temperature,
        num_data=setting.num_data,
        num_chains=1 if method.endswith("T4") else CHAINS,
        compile=setting.compile,
    )


class FlatEndedCycles(CyclicalSchedule):
    """Cycles of a cosine step size that stays constant in the sampling stage."""

    def controls(self, step: int) -> StepControls:
        controls, plan = super().controls(step), self.laid_out
        start = round(self.exploration * plan.period) + 1
        flat = cyclical_lr_factor(start, plan.period)
        return controls if plan.is_exploration(step) else controls._replace(lr_factor=flat)


def schedule_of(method: str, network: Network, setting: Training) -> pl.Callback:
    """Return the callback of a method's step sizes, noise and samples.

    Args:
        method: its name.
        network: what is set for it.
        setting: the recipe's settings.
    """
    if method == "cycSGHMC×T4":
        return FlatEndedCycles(CYCLES, 1 - FLAT_END, setting.samples[1])
    if method == "cycSWAG×T4":
        rank, draws = setting.swag
        flat = cyclical_lr_factor(round((1 - FLAT_END) * 10_000) + 1, 10_000)
        return SWAG(rank, draws, CYCLES, FLAT_END, flat)
    if method == "M-SGD×P4":
        return FlatEndedCycles(1, 1 - FLAT_END, setting.samples[0])
    last = setting.epochs - setting.epochs * 4 // 5
    if method == "ICSGHMC×P4" and network.cosine:
        return FlatEndedCycles(1, 1 - last / setting.epochs, last)
    return SamplingSchedule(burn_in_epochs=setting.epochs - last, every_n_epochs=1)


def callbacks_of(method: str, network: Network, setting: Training, unknown: Any) -> list[pl.Callback]:
    """Return the callbacks of a method: schedule, samples, average, and its own.

    Args:
        method: its name.
        network: what is set for it.
        setting: the recipe's settings.
        unknown: datamodule of the out-of-distribution images, or None.
    """
    average = BayesianModelAverage(ood=None if unknown is None else {OOD: unknown})
    callbacks = [schedule_of(method, network, setting), SampleCollector(in_memory=True), average]
    if method in ("reSGHMC×P4", "ICSGHMC×P4"):
        start = -(-(contour_start(network, setting.epochs) - 2) // 2) * 2  # an even epoch, as in the program
        callbacks.append(VarianceReducedEnergy(start, every_n_epochs=2))
    if method == "reSGHMC×P4":
        callbacks.append(replica_exchange(network, setting))
    if method == "ICSGHMC×P4":
        callbacks.append(interacting_contour(network, setting))
    return callbacks


def replica_exchange(network: Network, setting: Training) -> ReplicaExchange:
    """Return reSGHMC's callback, with the bias of the coldest pair as a variance of the energies' noise.

    Args:
        network: what is set for the network.
        setting: the recipe's settings.
    """
    coldness = (1 - 1 / LADDER[1]) / setting.temperature  # δ of the coldest pair
    variance = network.swap_barrier / coldness
    return ReplicaExchange(LADDER, every_n_steps=setting.attempts, noise_variance=variance, include_prior=False)


def interacting_contour(network: Network, setting: Training) -> ContourGradient:
    """Return ICSGHMC's callback.

    Args:
        network: what is set for the network.
        setting: the recipe's settings.
    """
    rules = ContourRules(
        zeta=setting.zeta,
        weighting="bin",
        weight_exponent=1 / setting.zeta,
        min_multiplier=-CLAMP,
        max_multiplier=CLAMP,
    )
    return ContourGradient(
        rules,
        num_bins=200,
        first_edge=network.first_edge,
        width=network.width,
        step_size=DecayingStepSize(setting.step_size, 0.0, 0.0),
        include_prior=False,
        warm_up_steps=(contour_start(network, setting.epochs) + 1) * -(-setting.num_data // setting.batch),
        interacting=True,
    )
