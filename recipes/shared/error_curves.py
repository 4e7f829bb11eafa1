"""Test errors of chains along a run, and their picture."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_sgmcmc import BayesianModule, PosteriorSample
from lightning_sgmcmc.callbacks import SamplerCallback
from lightning_sgmcmc.datamodules import MNISTDataModule
from lightning_sgmcmc.figures.canvas import panels
from lightning_sgmcmc.namespace import pl
from lightning_sgmcmc.recipes.shared.figures import INTERVAL, draw_band
from lightning_sgmcmc.recipes.shared.records import Recording


class Curve(NamedTuple):
    """A chain's test errors in %: of its states while it burns in, of the running average, and of single samples; the
    first two with the epochs made."""

    burn_in: list[tuple[float, float]]
    average: list[tuple[float, float]]
    single: list[float]


class ErrorCurves(Recording, SamplerCallback):
    """Follows the test error of each chain, and of the average of its samples.

    Args:
        data: the datamodule with the test images.
        burn_in_epochs: epochs in which the chain's states are tested.
    """

    recorded = ("_lists", "_sums")

    def __init__(self, data: MNISTDataModule, burn_in_epochs: int) -> None:
        self.data = data
        self.burn_in_epochs = burn_in_epochs
        self._lists: list[tuple[list[Any], ...]] = []
        self._sums: list[Tensor] = []

    @property
    def curves(self) -> list[Curve]:
        """The chains' curves."""
        return [Curve(*lists) for lists in self._lists]

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        test, device = self.data.splits[2], pl_module.device
        self._batches = [self.data.transform()(part.to(device)) for part in test.inputs.split(1000)]
        self._targets = test.targets.to(device)
        self._lists = self._lists or [([], [], []) for _ in range(pl_module.num_chains)]
        self._sums = [total.to(device) for total in self._sums or [torch.zeros(())] * pl_module.num_chains]

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.current_epoch < self.burn_in_epochs:
            for chain, curve in enumerate(self.curves):
                curve.burn_in.append((passes(pl_module), self._error(self._probabilities(pl_module, chain))))

    def on_posterior_sample(self, trainer: pl.Trainer, pl_module: BayesianModule, sample: PosteriorSample) -> None:
        curve = self.curves[sample.chain]
        probabilities = self._probabilities(pl_module, sample.chain)
        total = self._sums[sample.chain] = self._sums[sample.chain] + probabilities
        curve.single.append(self._error(probabilities))
        curve.average.append((passes(pl_module), self._error(total)))

    def _probabilities(self, module: BayesianModule, chain: int) -> Tensor:
        """Return those of the chain's present state, which is the sample when one is drawn."""
        with module.at_chain(chain), torch.no_grad():
            return torch.cat([module(batch).softmax(1) for batch in self._batches])

    def _error(self, probabilities: Tensor) -> float:
        return 100 * float((probabilities.argmax(1) != self._targets).double().mean())


def passes(module: BayesianModule) -> float:
    """Return how many gradients a chain has computed, over N.

    Args:
        module: of the chain.
    """
    return module.gradient_evaluations / module.chains.observed.num_data


def deviation(values: list[float]) -> float:
    """Return the standard deviation of values.

    Args:
        values: at least two.
    """
    mean = sum(values) / len(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))


def learning_curves(curves: dict[str, list[Curve]]) -> Any:
    """Draw the error of the running average against epochs, after that of the states of the burn-in.

    Shades are 95 % intervals of the mean over repeats.

    Args:
        curves: those of each method's repeats.
    """
    from matplotlib.ticker import LogLocator, NullFormatter

    figure, ((whole, later),) = panels(1, 2, 7.5, 3.4)
    for index, (method, own) in enumerate(curves.items()):
        for axes, parts in ((whole, ("burn_in", "average")), (later, ("average",))):
            for part in parts:
                paths = torch.tensor([getattr(curve, part) for curve in own], dtype=torch.float64)
                place, errors = paths[0, :, 0].tolist(), paths[:, :, 1]
                style: dict[str, Any] = {"linestyle": ":", "marker": ""} if part == "burn_in" else {}
                draw_band(axes, place, errors, index, None if part == "burn_in" else method, **style)
    means = [line.get_ydata() for line in whole.get_lines()]
    whole.set_yscale("log")
    whole.set_ylim(0.8 * min(map(min, means)), 1.5 * max(map(max, means)))  # a band of few repeats may reach far
    whole.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    whole.yaxis.set_major_formatter("{x:g}")
    whole.yaxis.set_minor_formatter(NullFormatter())
    whole.set_title("states (dotted), and the average over samples", fontsize=9)
    later.set_title("the average over samples", fontsize=9)
    for axes in (whole, later):
        axes.set_xlabel("epochs")
    whole.set_ylabel(f"test error (%)\n{INTERVAL}")
    later.legend(fontsize=8)
    return figure
