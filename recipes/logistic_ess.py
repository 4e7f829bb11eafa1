"""Effective sample sizes in Bayesian logistic regression: SGLD, SGHMC and their cyclical forms on three UCI tables.

Zhang et al. 2020 (cSG-MCMC), section 5.2 and Table 1: 5,000 samples after 1,000 of burn-in, median effective sample
size (ESS) over the coefficients. The paper states neither prior, batch size, step sizes, friction, cycles nor
estimator, and points at the settings of Li et al. 2016 (preconditioned SGLD). Those could not be had: this experiment
is not in that paper's published program, and we did not have its text. Tables, samples and burn-in are those of
Girolami and Calderhead 2011, from whom the prior's variance of 100 is. The rows "batches of 50", "all data" and "all
data and 4·lr" or "16·lr" are the nearest readings, ten chains each without a trainer. The table also has what the ESS
hides: the error of the chain's mean and covariance against a long full-gradient run, which importance sampling checks.

With a sample a step and exact gradients, SGLD's ESS is E·n only where variances are 1+E times too large (of a Gaussian;
batches add more), so the paper's 2,199 of 5,000 means 44 % or more, unless its samples are several steps apart; our
steps are limited to about 10 %. At equal bias a falling step is no gain on one mode: most of a cycle's samples come
from its small steps. The cyclical ones lead where the plain samplers' steps fall as k^-0.55, as in its mixture
experiment, from the cyclical ones' own first step ("falling"): but then a hundredfold smaller step is compared, not a
schedule.

Measured (full), the readings (ten chains; ESS on Australian, German, Heart, and variance / reference's): SGLD with all
data 145, 110, 221 (0.99, 1.01, 1.05), at 4·lr 628, 449, 1,072 (1.14, 1.12, 1.32), at 16·lr 5,000, 4,329, 5,000 (3.7,
6.5, 12.9); the paper has 1,676, 492, 2,199. SGHMC with all data 291, 187, 521 (0.99, 1.00, 1.00), at 16·lr 1,438,
1,014, 2,424 (1.09, 1.04, 1.37); the paper has 1,317, 2,007, 5,000. With batches of 50 at lr variances are 1.5 to 3.5
times too large. So the paper's figures are reached with all data and steps of 4 to 16 times ours; SGLD's variances are
then 1.1 to some 2 times too large. The factors 4 and 16 were chosen before these results.
The estimator is Geyer's initial monotone sequence in ArviZ (`method="mean"`, two halves of the chain). It stops at the
first negative lobe of the autocorrelation, so for SGHMC's oscillating chains the ESS is too low.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_sgmcmc import SGHMC, SGLD, BayesianModule, Bernoulli, GaussianPrior, PolynomialDecay, PosteriorSample
from lightning_sgmcmc.callbacks import CyclicalSchedule, SamplerCallback, SamplingSchedule
from lightning_sgmcmc.datamodules import UCIClassificationDataModule
from lightning_sgmcmc.diagnostics.draws import import_arviz, number
from lightning_sgmcmc.figures.canvas import save_figure
from lightning_sgmcmc.namespace import pl
from lightning_sgmcmc.recipes.shared.effective_sizes import PICTURES, Measures, Study
from lightning_sgmcmc.recipes.shared.jobs import run_jobs
from lightning_sgmcmc.recipes.shared.logistic import (
    LogisticPosterior,
    full_gradient_reference,
    importance_reference,
)
from lightning_sgmcmc.recipes.shared.needs import require
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.records import Recording
from lightning_sgmcmc.recipes.shared.results import Row
from lightning_sgmcmc.recipes.shared.settings import read_settings
from lightning_sgmcmc.recipes.shared.trainers import quiet_trainer, resumed_fit, silence_lightning
from lightning_sgmcmc.simulation import FullGradient, UniformGradient
from lightning_sgmcmc.simulation.finite_sums import LogisticRegressionSum
from lightning_sgmcmc.simulation.subsampled_chains import sample_sum


@dataclass(frozen=True)
class Reading:
    """Another reading of what the paper leaves open: batch size, and a factor on the step sizes."""

    batch: int
    factor: float


@dataclass(frozen=True)
class Settings:
    """The settings of `logistic_ess.yaml`.

    Attributes:
        repeats: chains of each sampler.
        other_steps: factors on the step sizes, one chain each.
        reference_steps, reference_chains, proposals: of the two references.
        samples, burn_in: of a chain.
        batch, prior_std: batch size, and standard deviation of the prior.
        cycles, exploration, decay: of the cyclical samplers, and the exponent of falling step sizes.
        readings, reading_chains: other batch sizes of the plain samplers, by name, and their chains side by side.
        lr: step sizes by table and sampler, in units of the mean potential; lr_0 of the cyclical ones.
    """

    repeats: int
    other_steps: tuple[float, ...]
    reference_steps: int
    reference_chains: int
    proposals: int
    samples: int
    burn_in: int
    batch: int
    prior_std: float
    cycles: int
    exploration: float
    decay: float
    readings: dict[str, Reading]
    reading_chains: int
    lr: dict[str, dict[str, float]]

    @property
    def work(self) -> float:
        """The steps of all chains."""
        chains = self.repeats + len(self.other_steps)
        return float(len(self.lr) * len(SAMPLERS) * chains * (self.samples + self.burn_in))


SAMPLERS = {"SGLD": SGLD, "cSGLD": SGLD, "SGHMC": SGHMC, "cSGHMC": SGHMC}  # SGHMC's friction is 0.1
FALLING, REFERENCE = "falling", "reference"


def run(options: Options) -> list[Row]:
    """Run all samplers on all tables."""
    torch.set_num_threads(1)
    silence_lightning()
    settings = read_settings(Settings, options)
    methods, seeds = options.chosen(SAMPLERS), options.seeds(settings.repeats)
    require(*(UCIClassificationDataModule(table, options.data_root) for table in settings.lr))
    readings = [(name, reading.factor) for name, reading in settings.readings.items()]
    jobs: list[tuple[str, str, str, float, int]] = []
    for table in settings.lr:
        jobs += [(table, method, "", 1.0, seed) for method in methods for seed in seeds]
        jobs += [(table, method, "", factor, options.seed) for method in methods for factor in settings.other_steps]
        plain = [method for method in methods if not method.startswith("c")]
        jobs += [(table, method, FALLING, 1.0, options.seed) for method in plain]
        jobs += [(table, method, *reading, options.seed) for method in plain for reading in readings]
        jobs.append((table, REFERENCE, "", 1.0, options.seed))
    found = run_jobs(one, jobs, options, settings)
    studies = [study(table, found, options.seed) for table in settings.lr]
    rows = [row for own in studies for row in own.rows()]
    for name, draw in PICTURES.items():
        save_figure(draw(studies), options.out / f"{name}.png")
    return rows


class Chain(NamedTuple):
    """What is kept of a chain: ESS, mean and standard deviation of each coefficient; the draws of a first repeat."""

    ess: Tensor
    mean: Tensor
    std: Tensor
    draws: Tensor | None


def one(table: str, method: str, variant: str, factor: float, seed: int, settings: Settings, options: Options) -> Any:
    """Return a chain, several chains of a reading, or a table's two references."""
    silence_lightning()
    data, posterior = load(table, settings, options.data_root)
    if method == REFERENCE:
        long = full_gradient_reference(posterior, settings.reference_steps, seed, settings.reference_chains)
        return long, importance_reference(posterior, settings.proposals, seed)
    lr = factor * settings.lr[table][f"c{method}" if variant == FALLING else method]
    if variant in settings.readings:
        chains = light_chains(posterior, method, lr, settings.readings[variant].batch, settings, seed)
        return [Chain(coefficient_ess(draws), draws.mean(0), draws.std(0), None) for draws in chains]
    draws = sample_chain(data, posterior.x.shape[1], method, lr, seed, settings, variant == FALLING)
    first = not variant and factor == 1 and seed == options.seed
    return Chain(coefficient_ess(draws), draws.mean(0), draws.std(0), draws if first else None)


class WeightCollector(Recording, SamplerCallback):
    """Keeps the samples' weight vectors in memory."""

    recorded = ("draws",)

    def __init__(self) -> None:
        self.draws: list[Tensor] = []

    def on_posterior_sample(self, trainer: pl.Trainer, pl_module: BayesianModule, sample: PosteriorSample) -> None:
        self.draws.append(sample.parameters["net.weight"].flatten())


def sample_chain(
    data: pl.LightningDataModule, features: int, method: str, lr: float, seed: int, settings: Settings, falling: bool
) -> Tensor:
    """Return the samples of a fit after burn-in, shape (samples, d), in float64.

    The plain samplers draw a sample at every step. A cycle draws one at every step of its sampling stage, so a cyclical
    run is longer by 1/(1-β): the number of samples is equal, as in the paper, and the cost is not. Its burn-in is a
    number of whole cycles. With
    `falling` a plain sampler's step size is lr·k^-0.55.
    """
    torch.manual_seed(seed)
    samples, burn_in = settings.samples, settings.burn_in
    module = BayesianModule(
        net=nn.Linear(features, 1, bias=False),
        likelihood=Bernoulli(),
        prior=GaussianPrior(settings.prior_std),
        sampler=SAMPLERS[method],
        lr=lr,
        seed=seed,
    )
    if method.startswith("c"):
        per_cycle = (burn_in + samples) // settings.cycles
        steps = settings.cycles * round(per_cycle / (1 - settings.exploration))
        schedule: SamplerCallback = CyclicalSchedule(settings.cycles, settings.exploration, per_cycle)
    else:
        decay = PolynomialDecay(lr, gamma=settings.decay) if falling else None
        steps, schedule = burn_in + samples, SamplingSchedule(burn_in, every_n_steps=1, lr_decay=decay)
    collector = WeightCollector()
    trainer = quiet_trainer(
        max_steps=steps,
        max_epochs=-1,
        accelerator="cpu",
        devices=1,
        callbacks=[schedule, collector],
    )
    resumed_fit(trainer, module, data)
    return torch.stack(collector.draws[-samples:]).double()


def light_chains(
    posterior: LogisticPosterior, method: str, lr: float, batch: int, settings: Settings, seed: int
) -> list[Tensor]:
    """Return the samples of many chains of a plain sampler without a trainer, each of shape (samples, d), in float64.

    Args:
        posterior: the target.
        method: the sampler.
        lr: its step size, in units of the mean potential.
        batch: data of a step, with replacement; as many as there are, or more, is the full gradient.
        settings: the recipe's.
        seed: of batches and noise.
    """
    total, last = len(posterior.y), settings.burn_in + settings.samples
    run = sample_sum(
        LogisticRegressionSum(posterior.x, posterior.y, posterior.std**2),
        SAMPLERS[method],
        FullGradient() if batch >= total else UniformGradient(batch),
        lr=lr / total,
        num_steps=last,
        at_steps=range(settings.burn_in + 1, last + 1),
        num_chains=settings.reading_chains,
        initial=torch.zeros(posterior.x.shape[1]).double(),
        seed=seed,
        dtype=torch.float64,
    )
    return list(run.positions.double().unbind(1))


def coefficient_ess(draws: Tensor) -> Tensor:
    """Return the ESS of each coefficient of a chain (n, d), shape (d,), at most n."""
    arviz = import_arviz()
    ess = [number(arviz.ess(column.numpy()[None], method="mean")) for column in draws.T]
    return torch.tensor(ess).clamp_max(len(draws))


# -- a table ----------------------------------------------------------------------------------------------------------


def load(table: str, settings: Settings, data_root: Path) -> tuple[pl.LightningDataModule, LogisticPosterior]:
    """Return a table with all its rows for training, and the posterior."""
    data = UCIClassificationDataModule(table, data_root, settings.batch, test_fraction=0.0, intercept=True)
    data.setup("fit")
    inputs, targets = data.splits[0].inputs.double(), data.splits[0].targets.double()
    return data, LogisticPosterior(inputs, targets, settings.prior_std)


def study(table: str, found: dict[Any, Any], seed: int) -> Study:
    """Return a table's measures.

    Args:
        table: its name.
        found: the outcomes of all jobs.
        seed: of the first repeat.
    """
    reference, check = found[table, REFERENCE, "", 1.0, seed]
    chains = {job[1:]: chain for job, chain in found.items() if job[0] == table and job[1] != REFERENCE}

    def measure(chain: Chain) -> Measures:
        median = float(chain.ess.quantile(0.5))
        return Measures(median, reference.mean_error(chain.mean), reference.variance_ratio(chain.std))

    study = Study(table=table, reference=reference, check=check)
    for (method, variant, factor, at), chain in chains.items():
        if not variant and factor == 1:
            study.repeats.setdefault(method, []).append(measure(chain))
            if at == seed:
                study.draws[method] = chain.draws
        elif not variant:
            study.other_steps.setdefault(method, []).append((factor, measure(chain)))
        else:
            own = chain if isinstance(chain, list) else [chain]
            study.readings[method, variant] = [measure(one) for one in own]
    first = next(iter(study.draws))
    order = chains[first, "", 1.0, seed].ess.argsort().tolist()
    study.typical, study.slowest = order[len(order) // 2], order[0]
    return study
