"""MNIST digits 0 to 4 by SGD, SGLD and interacting contour SGLD, which leaves its modes (ICSGLD, Figure 2).

`full` is the paper's setting, for a GPU: 30,596 images, two convolutions of 32 and 64 maps and two layers of 50, batch
2500, ε = 1e-6, τ = 0.1, weight decay 25 (a Gaussian prior of standard deviation 1/5), ζ = 3e4, m = 100,000, Δu = 10, ω
= min(0.01, 1/(k^0.6 + 100)), 500 epochs. The paper does not state the number of chains, and the authors' program runs
one; here there are 4. `quick` has the first 2,000 images as means of 2×2 pixels, a smaller network (8 and 16 maps, two
layers of 20), batch 500, 2,000 steps and 3 chains; τ, Δu and the prior's precision are smaller by 2,000/30,596, so that
they are the paper's for each image, ζ, m and ω are the paper's, and the step size is 3.3 times as large (lr = ε·N =
0.1) because the run is a third as long. SGLD is the sampler of all methods, at temperature 0 for SGD.

As in the authors' program the energy is the data's alone, the learning uses π(J), and κ has no limits; no run diverged
here. A bin next to a bin that was never visited has κ = 1 here; in the program it keeps the slope of the start.

The table counts round trips of the mini-batch's loss from below 0.05 nats an image to above 0.25 and back below 0.05,
in the second half of a run. The ± is the standard error over chains, which for ICSGLD are not independent. The pictures
show all losses, and the first chain of each method, from one start, on the plane of the first two singular vectors of
the centred paths (of a random projection of the weights that keeps distances to 4 %).

Measured (quick, seed 0, 117 s of processor time): round trips SGD 0, SGLD 0, ICSGLD 8.3 ± 1.8, with wide bins (below)
6.0 ± 1.0; largest loss in the second half 0.031 ± 0.006, 0.029 ± 0.004, 1.6 ± 0.2, 1.8 ± 0.1; range from 5 to 95 % of
its losses 0.015, 0.015, 0.07 ± 0.01, 0.21 ± 0.06; loss of the last 50 steps 0.0033, 0.0033, 0.006 ± 0.002, 0.11 ±
0.04; κ < 0 in 30 ± 4 % of ICSGLD's steps. SGD's and SGLD's losses only fall, ICSGLD's keep leaping: the paper's order.
At this temperature SGLD hardly differs from SGD. Earlier runs with other random numbers had 6.7 ± 2.0 and 10.7 ± 0.7
round trips, and with wide bins 6.7 ± 3.2 and 3.7 ± 2.

The paper's exact values on all 30,596 images, with quick's network and pixels and one chain for 6,000 steps: SGLD has
no round trip, and its largest loss in the second half is 0.08; ICSGLD has 11, its largest loss is 2.8, κ lies between
-23 and 26 and is negative in 31 % of the steps (30 to 36 % in the authors' logs); with κ limited to ±5 it has 11 too,
up to 1.6. So the published values reproduce Figure 2(a). But 1.6 % of these steps are above 0.25: the losses leap, are
below 0.1 again within 1 to 41 steps (mostly fewer than 10), and sink between leaps as SGLD's do (median 0.058 against
0.047). This is not a walk in energy: a batch's energy has a standard deviation of 200 nats, or 20 bins, so κ is hardly
related to the chain's position. It acts as noise on the step, which grows with the number of visits until the chain
leaves its mode.

"ICSGLD, wide bins" is ours: Δu and ζ ten times the paper's, so ζτ/Δu and the reward of a visit are the same, 10,000
bins, and κ limited to ±5 as in the authors' CIFAR program. Such chains stay at middle energies for hundreds of steps,
their range of losses is 3 times ICSGLD's, at the cost of accuracy (96.6 % against 98.3 at the end; samples would have
to be weighted). Their number of round trips varies much: 7 ± 1.5 in a run with 20,000 bins, which
differs in empty bins only; with κ limited to ±2 it was 3.7 ± 0.9, and at 30 times the paper's width 0 (1,600 steps,
90.6 %).

`full` has not been run, except for two steps of one chain: no GPU was available.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_sgmcmc import BayesianModule, Categorical, ContourRules, DecayingStepSize, GaussianPrior
from lightning_sgmcmc.callbacks import ContourGradient
from lightning_sgmcmc.datamodules import MNISTDataModule, Split
from lightning_sgmcmc.diagnostics.geometry import classical_scaling, squared_distances, weight_sketch
from lightning_sgmcmc.figures.canvas import save_figure
from lightning_sgmcmc.namespace import pl
from lightning_sgmcmc.recipes.shared.costs import forward_flops
from lightning_sgmcmc.recipes.shared.figures import energy_walk_figure, weight_paths_figure
from lightning_sgmcmc.recipes.shared.jobs import run_jobs
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.records import Recording
from lightning_sgmcmc.recipes.shared.results import Row, mean_row
from lightning_sgmcmc.recipes.shared.settings import read_settings
from lightning_sgmcmc.recipes.shared.trainers import quiet_trainer, resumed_fit, silence_lightning

WIDE = "ICSGLD, wide bins"
METHODS = ("SGD", "SGLD", "ICSGLD", WIDE)
CLASSES = 5
NUM_DATA = 30_596
STEP, TEMPERATURE, WEIGHT_DECAY = 1e-6, 0.1, 25.0
ZETA, WIDTH, NUM_BINS = 3e4, 10.0, 100_000
BROADER, FEWER, LIMIT = 10, 10_000, 5.0
LEARNING = DecayingStepSize(1, 0.6, 100, maximum=0.01)
LOW, HIGH = 0.05, 0.25


@dataclass(frozen=True)
class Settings:
    """Settings that differ between quick and full.

    Attributes:
        images: N: the first images of digits 0 to 4.
        pixels: width of the images; 14 means averages of 2×2 pixels, with a smaller network.
        batch: images per batch.
        epochs: epochs of a run.
        chains: chains of each method.
        lr: ε·N.
        snapshots: epochs between pictures of the weights.
    """

    images: int
    pixels: int
    batch: int
    epochs: int
    chains: int
    lr: float
    snapshots: int

    @property
    def share(self) -> float:
        """Share of the paper's data, by which energies, temperature and the prior's precision are scaled."""
        return self.images / NUM_DATA

    @property
    def work(self) -> float:
        """Gradient evaluations times the network's floating-point operations, over all methods and chains."""
        flops = forward_flops(functools.partial(network, self.pixels), (1, self.pixels, self.pixels))
        return float(len(METHODS) * self.chains * self.epochs * self.images * flops)


class Walk(NamedTuple):
    """A run of a method.

    Attributes:
        losses: loss of each step's mini-batch in nats per example, shape (steps, C).
        multipliers: κ of each step, shape (steps, C).
        sketches: of the weights at each snapshot, shape (snapshots, C, dimension).
        accuracies: of the last states on the test images, shape (C,).
    """

    losses: Tensor
    multipliers: Tensor
    sketches: Tensor
    accuracies: Tensor


class FirstDigits(MNISTDataModule):
    """The digits 0 to 4 of MNIST, for training and test.

    Args:
        root: folder of the data sets.
        setting: number and size of images, and the batch size.
    """

    def __init__(self, root: Path, setting: Settings) -> None:
        super().__init__(root, setting.batch, val_size=0, drop_last=True, device_resident=True)
        self.setting = setting

    def load(self) -> tuple[Split, Split, Split]:
        train, none, test = super().load()
        return self._chosen(train, self.setting.images), none, self._chosen(test, len(test.targets))

    def _chosen(self, part: Split, count: int) -> Split:
        found = (part.targets < CLASSES).nonzero().squeeze(1)[:count]
        images = part.inputs[found]
        if self.setting.pixels == 14:
            images = nn.functional.avg_pool2d(images.float(), 2).round().byte()
        return Split(images, part.targets[found])


def network(pixels: int) -> nn.Sequential:
    """Return the paper's network for 28 pixels: two convolutions and two layers of 50; for 14 a smaller one."""
    if pixels == 28:
        convolutions = [nn.Conv2d(1, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5), nn.ReLU()]
        convolutions.append(nn.MaxPool2d(2))
        features, hidden = 64 * 4 * 4, 50
    else:  # strides instead of pooling, which is slow on a CPU
        convolutions = [nn.Conv2d(1, 8, 4, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU()]
        features, hidden = 16 * 2 * 2, 20
    layers = [nn.Flatten(), nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()]
    return nn.Sequential(*convolutions, *layers, nn.Linear(hidden, CLASSES))


class Recorder(Recording, pl.Callback):
    """Keeps the loss and the multiplier of each step, and sketches of the weights."""

    recorded = ("losses", "multipliers", "sketches")

    def __init__(self, every_n_epochs: int) -> None:
        self.every = every_n_epochs
        self.losses: list[Tensor] = []
        self.multipliers: list[Tensor] = []
        self.sketches: list[Tensor] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        observed = pl_module.chains.observed
        # The data's part alone, as in the paper's figure.
        self.losses.append((observed.energy + observed.log_prior) / observed.num_data)
        multiplier = pl_module.sampler.param_groups[0].get("gradient_multiplier", 1.0)
        self.multipliers.append(torch.as_tensor(multiplier, dtype=torch.float64).expand(pl_module.num_chains).clone())

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch % self.every == 0:
            self._look(pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._look(pl_module)

    def _look(self, module: Any) -> None:
        sketches = []
        for chain in range(module.num_chains):
            with module.at_chain(chain):
                sketches.append(weight_sketch(dict(module.named_parameters())))
        self.sketches.append(torch.stack(sketches))


def run(options: Options) -> list[Row]:
    """Run all methods, return the table."""
    setting = read_settings(Settings, options)
    in_turn = options.full and torch.cuda.is_available()  # one device
    if not in_turn:
        data_of(setting, options)  # missing data raise at once
    methods = options.chosen(METHODS)
    jobs = [(method,) for method in reversed(methods)]  # the longest first
    walks = run_jobs(one, jobs, options, setting, in_turn=in_turn)
    return report({method: walks[method,] for method in methods}, options)


def report(walks: dict[str, Walk], options: Options) -> list[Row]:
    """Draw losses and paths, return the table."""
    losses = {method: walk.losses.tolist() for method, walk in walks.items()}
    save_figure(energy_walk_figure(losses, (LOW, HIGH), "loss (nats per image)"), options.out / "losses.png")
    save_figure(paths(walks), options.out / "paths.png")
    return [row for method, walk in walks.items() for row in rows_of(method, walk)]


def data_of(setting: Settings, options: Options) -> FirstDigits:
    """Return the data, read."""
    data = FirstDigits(options.data_root, setting)
    data.prepare_data()
    data.setup("fit")
    return data


def contour(method: str, setting: Settings) -> ContourGradient:
    """Return ICSGLD's callback with the paper's values, the widths scaled to the number of data; or with wide bins."""
    broader = BROADER if method == WIDE else 1
    width = WIDTH * broader * setting.share
    rules = ContourRules(
        zeta=ZETA * broader,
        scheme="scalable",
        weighting="bin",
        min_multiplier=-LIMIT if method == WIDE else None,
        max_multiplier=LIMIT if method == WIDE else None,
    )
    return ContourGradient(
        rules,
        num_bins=FEWER if method == WIDE else NUM_BINS,
        first_edge=width,
        width=width,
        step_size=LEARNING,
        include_prior=False,
        interacting=True,
    )


def one(method: str, setting: Settings, options: Options) -> Walk:
    """Run one method."""
    silence_lightning()
    pl.seed_everything(options.seed, verbose=False)
    data = data_of(setting, options)
    module = BayesianModule(
        net=network(setting.pixels),
        likelihood=Categorical(),
        prior=GaussianPrior((WEIGHT_DECAY * setting.share) ** -0.5),
        lr=setting.lr,
        temperature=0.0 if method == "SGD" else TEMPERATURE * setting.share,
        num_chains=setting.chains,
    )
    recorder = Recorder(setting.snapshots)
    trainer = quiet_trainer(
        accelerator=options.accelerator(),
        max_epochs=setting.epochs,
        callbacks=[contour(method, setting), recorder] if "ICSGLD" in method else [recorder],
    )
    resumed_fit(trainer, module, data)
    return Walk(
        torch.stack(recorder.losses).cpu(),
        torch.stack(recorder.multipliers).cpu(),
        torch.stack(recorder.sketches),
        torch.tensor(accuracies(module, data)),
    )


def accuracies(module: BayesianModule, data: FirstDigits) -> list[float]:
    """Return each chain's accuracy on the test images, in %."""
    test = data.splits[2]
    found = []
    for chain in range(module.num_chains):
        with module.at_chain(chain), torch.no_grad():
            batches = test.inputs.to(module.device).split(1000)
            predicted = torch.cat([module(data.transform()(batch)).argmax(1) for batch in batches])
        found.append(100 * float((predicted.cpu() == test.targets.cpu()).double().mean()))
    return found


def round_trips(losses: Sequence[float], low: float, high: float) -> int:
    """Return how often a walk went from below `low` to above `high` and back, on any path."""
    trips, was_low, is_high = 0, False, False
    for loss in losses:
        if loss < low:
            trips += was_low and is_high
            was_low, is_high = True, False
        elif loss > high:
            is_high = True
    return trips


def rows_of(method: str, walk: Walk) -> list[Row]:
    """Return a method's figures: means over its chains, with their standard errors."""
    later = walk.losses[len(walk.losses) // 2 :]
    half, end = walk.sketches[len(walk.sketches) // 2], walk.sketches[-1]
    low, high = later.quantile(torch.tensor([0.05, 0.95], dtype=later.dtype), dim=0)
    values = {
        f"round trips from below {LOW} to above {HIGH}, second half": [
            float(round_trips(chain, LOW, HIGH)) for chain in later.T.tolist()
        ],
        "largest loss, second half": later.amax(0).tolist(),
        "5 to 95 % range of losses, second half": (high - low).tolist(),
        f"share of steps above {HIGH}, second half": (later > HIGH).double().mean(0).tolist(),
        "median loss, second half": later.median(0).values.tolist(),
        "loss, mean of the last 50 steps": walk.losses[-50:].mean(0).tolist(),
        "accuracy at the end, test, %": walk.accuracies.tolist(),
        "way from half time to end / length of the weights": ((end - half).norm(dim=1) / half.norm(dim=1)).tolist(),
    }
    if "ICSGLD" in method:
        values["share of steps with κ < 0, second half"] = (
            (walk.multipliers[len(walk.losses) // 2 :] < 0).double().mean(0).tolist()
        )
    return [mean_row(method, metric, of_chains) for metric, of_chains in values.items()]


def paths(walks: dict[str, Walk]) -> Any:
    """Draw the first chain of each method, from a common start, on the plane with most of the paths' variance."""
    first = {method: walk.sketches[:, 0] for method, walk in walks.items()}
    coordinates, share = classical_scaling(squared_distances(torch.cat(list(first.values()))))
    places = coordinates.split([len(path) for path in first.values()])
    losses = {}
    for method, walk in walks.items():
        steps = torch.linspace(0, len(walk.losses) - 1, len(first[method])).long()
        losses[method] = walk.losses[steps, 0].tolist()
    return weight_paths_figure(
        {method: place.tolist() for method, place in zip(first, places, strict=True)},
        losses,
        share.tolist(),
        "loss (nats per image)",
    )
