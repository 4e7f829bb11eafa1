"""Steps that `propose_lr` finds from wrong starts: `python -m tests.benchmarks.tune_starts --out FILE.jsonl`.

A small network on Digits, four samplers, a constant and a cyclical schedule. First a grid of step sizes, factors of
four apart, and of two and √2 around the best: each is a whole run from the network's start, which knows nothing of
`tune`. A run is wrecked if it does not end finite, or gains less than a quarter of the energy of chance, and heated if
`ChainHealth` finds heat. The best step of a constant schedule is the largest whose run is neither, since such a run is
for the posterior: a smaller step only leaves it colder (the plan's relaxation times), and a cold run predicts better
where the target is too hot for its data. That is a question of the temperature, not of the step. The best step of a
cyclical schedule, a cold ensemble by its length, is the largest of these up to which averages predict the validation
data as well as the best of them, up to one standard error of the paired difference, by the means of three runs at every
step that comes near, since a run's NLL depends on its seed by about a tenth. Then `propose_lr` starts from ten values
of lr between 10⁻⁶ and 10 times the best, evenly spaced in log(lr), and the run is made at every proposal.
"""

import argparse
import functools
import json
import logging
import math
import statistics
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sgmcmc import SGHMC, SGLD, SGNHT, BayesianModule, Categorical, GaussianPrior, UnderdampedLangevin, pSGLD
from lightning_sgmcmc.callbacks import BayesianModelAverage, ChainHealth, CyclicalSchedule, SamplingSchedule
from lightning_sgmcmc.chains.state import NonFiniteEnergyError
from lightning_sgmcmc.datamodules import DigitsDataModule
from lightning_sgmcmc.plain import markdown_table
from lightning_sgmcmc.tune import propose_lr
from tests.support.trainers import quiet_trainer

STEPS = 1600
"""Optimizer steps of a run; a probe has an eighth of them."""
CONTENDER = 1.125
"""A step whose first run's NLL is at most so many times the lowest may be the best of a cyclical schedule."""
LEAST_GAIN = 0.25
"""A run is wrecked if its average gains less than this share of the energy of chance."""
LEAST_LOSS = 0.002
"""As in `lightning_sgmcmc.tune.proposal`: a loss below this, in nats per example, is no difference."""
STARTS = [10 ** (7 * place / 9 - 6) for place in range(10)]
"""From 10⁻⁶ to 10 times the best step."""
SAMPLERS: dict[str, tuple[Any, float]] = {
    "SGLD": (SGLD, 0.25),
    "SGHMC": (functools.partial(SGHMC, friction=0.1), 0.03),
    "pSGLD": (pSGLD, 0.002),
    "BAOAB": (functools.partial(UnderdampedLangevin, friction=20.0, integrator="baoab"), 0.004),
    "SGNHT": (functools.partial(SGNHT, friction=0.1), 0.03),
}
"""Each with the middle of its grid."""
SCHEDULES: dict[str, Any] = {
    "constant": functools.partial(SamplingSchedule, burn_in_steps=STEPS // 2, every_n_steps=STEPS // 32),
    "cyclical": functools.partial(CyclicalSchedule, num_cycles=2, exploration=0.6, samples_per_cycle=5),
}


@dataclass(frozen=True)
class Outcome:
    """A run at one step size.

    Attributes:
        lr: the step size.
        log_density: of the average at each validation datum, None for a run that did not end finite.
        heat: kinds of the findings of heat.
    """

    lr: float
    log_density: Tensor | None
    heat: tuple[str, ...] = ()

    @property
    def nll(self) -> float:
        """Of the average on the validation data, in nats per example."""
        return math.inf if self.log_density is None else -float(self.log_density.mean())

    @property
    def wrecked(self) -> bool:
        """Whether it did not end finite, or is at chance."""
        return not self.nll < (1 - LEAST_GAIN) * math.log(10)

    def is_worse(self, other: "Outcome") -> bool:
        """Return whether its average is worse than another's, beyond one standard error."""
        if self.log_density is None or other.log_density is None:
            return self.log_density is None
        loss = other.log_density - self.log_density
        return float(loss.mean()) > max(float(loss.std()) / math.sqrt(len(loss)), LEAST_LOSS)


def module_of(sampler: str, lr: float, seed: int) -> BayesianModule:
    """Return the network 64-32-10 with its posterior."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    make = SAMPLERS[sampler][0]
    return BayesianModule(
        net=net, likelihood=Categorical(), prior=GaussianPrior("fan_in"), sampler=make, lr=lr, seed=seed
    )


def run(sampler: str, schedule: str, lr: float, seed: int) -> Outcome:
    """Make a whole run at a step size."""
    module = module_of(sampler, lr, seed)
    callbacks = [SCHEDULES[schedule](), BayesianModelAverage(), ChainHealth(every_n_steps=4, warn=False)]
    trainer = quiet_trainer(max_steps=STEPS, num_sanity_val_steps=0, check_val_every_n_epoch=1000, callbacks=callbacks)
    try:
        trainer.fit(module, datamodule=DigitsDataModule())
    except NonFiniteEnergyError:
        return Outcome(lr, None)
    evaluation = module.evaluations.get("val")
    average = None if evaluation is None else evaluation.average
    if average is None or module.health is None or not bool(average.log_density.isfinite().all()):
        return Outcome(lr, None)
    heat = tuple(finding.kind.value for finding in module.health.findings if finding.is_heat)
    return Outcome(lr, average.log_density.double().cpu(), heat)


def unheated(outcomes: list[Outcome]) -> list[Outcome]:
    """Return the runs that are neither wrecked nor heated; where every run that trains is heated, those."""
    trained = [one for one in outcomes if not one.wrecked]
    return [one for one in trained if not one.heat] or trained


def largest(outcomes: list[Outcome]) -> Outcome:
    """Return the run with the largest step below every heated or wrecked one."""
    fine = unheated(outcomes)
    limit = min((one.lr for one in outcomes if one not in fine and one.lr > fine[0].lr), default=math.inf)
    return max((one for one in fine if one.lr < limit), key=lambda one: one.lr)


def best_predicting(outcomes: list[Outcome]) -> Outcome:
    """Return the run with the largest step up to which runs predict as well as the best, beyond noise."""
    fine = unheated(outcomes)
    best = lowest = min(fine, key=lambda one: one.nll)
    for one in sorted(outcomes, key=lambda one: one.lr):
        if one.lr > lowest.lr:
            if one not in fine or one.is_worse(lowest):
                break
            best = one
    return best


def grid(sampler: str, schedule: str, seed: int) -> list[Outcome]:
    """Return the runs of the grid, by step size."""
    middle = SAMPLERS[sampler][1]
    found = {lr: run(sampler, schedule, lr, seed) for lr in (middle * 4.0**place for place in range(-3, 4))}
    for factor in (2, 2**0.5):
        for criterion in (largest, best_predicting):
            best = criterion(sorted(found.values(), key=lambda one: one.lr)).lr
            for lr in (best / factor, best * factor):
                if not any(math.isclose(lr, known, rel_tol=0.01) for known in found):
                    found[lr] = run(sampler, schedule, lr, seed)
    if schedule == "cyclical":
        found |= repeated(sampler, schedule, list(found.values()), seed)
    return sorted(found.values(), key=lambda one: one.lr)


def repeated(sampler: str, schedule: str, outcomes: list[Outcome], seed: int) -> dict[float, Outcome]:
    """Return the means of three runs, which differ by their seed, for the steps that may be the best."""
    fine = unheated(outcomes)
    lowest = min(one.nll for one in fine)
    means = {}
    for one in fine:
        if one.nll < CONTENDER * lowest:
            others = [run(sampler, schedule, one.lr, seed + more) for more in (1, 2)]
            densities = [each.log_density for each in (one, *others) if each.log_density is not None]
            mean = torch.stack(densities).mean(0) if len(densities) == 3 else None
            means[one.lr] = Outcome(one.lr, mean, tuple({kind for each in (one, *others) for kind in each.heat}))
    return means


def proposals(sampler: str, schedule: str, best: float, seed: int, starts: list[float]) -> Iterator[dict[str, Any]]:
    """Propose a step from every start, and make the run with it."""
    at = functools.cache(functools.partial(run, sampler, schedule, seed=seed))  # starts may lead to the same step
    for start in starts:
        module = module_of(sampler, best * start, seed)
        trainer = functools.partial(quiet_trainer, max_steps=STEPS, callbacks=[SCHEDULES[schedule]()])
        begun = time.monotonic()
        found = propose_lr(module, datamodule=DigitsDataModule(), make_trainer=trainer)
        seconds = time.monotonic() - begun
        outcome = at(found.lr)
        yield {
            "start": start,
            "lr": found.lr,
            "factor": found.lr / best,
            "limit": found.limit.value,
            "healthy": found.is_healthy,
            "nll": outcome.nll,
            "wrecked": outcome.wrecked,
            "heat": outcome.heat,
            "steps": found.steps_made,
            "seconds": seconds,
            "probes": [(probe.lr, probe.verdict, probe.nll) for probe in found.probes],
        }


def as_table(entries: list[dict[str, Any]]) -> str:
    """Return a line for each sampler and schedule, as Markdown."""
    titles = ["sampler", "schedule", "grid's best lr", "its NLL", "best NLL of the grid", "at lr"]
    titles += ["proposals over best: least", "median", "largest", "within 2", "None", "wrecked", "heated"]
    titles += ["median NLL", "worst", "seconds"]
    rows = []
    for entry in entries:
        made = entry["proposals"]
        factors = [one["factor"] for one in made]
        within = sum(0.5 / 1.01 <= factor <= 2 * 1.01 for factor in factors)
        shown = [entry["sampler"], entry["schedule"], f"{entry['best']:.3g}", f"{entry['nll']:.3f}"]
        shown += [f"{entry['predicting_nll']:.3f}", f"{entry['predicting']:.3g}"]
        shown += [f"{value:.2f}" for value in (min(factors), statistics.median(factors), max(factors))]
        shown += [f"{within} of {len(made)}", str(sum(one["lr"] is None for one in made))]
        shown += [str(sum(one["wrecked"] for one in made)), str(sum(bool(one["heat"]) for one in made))]
        nlls = [one["nll"] for one in made]
        shown += [f"{statistics.median(nlls):.3f}", f"{max(nlls):.3f}"]
        shown.append(f"{statistics.median(one['seconds'] for one in made):.0f}")
        rows.append(shown)
    return markdown_table(titles, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samplers", default="SGLD,SGHMC,pSGLD,BAOAB", help="comma-separated")
    parser.add_argument("--schedules", default="constant,cyclical", help="comma-separated")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=1, help="take every n-th start only")
    parser.add_argument("--out", type=Path, required=True, help="file of one line of JSON for each table's line")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in ("pytorch_lightning", "pytorch_lightning.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    lines = options.out.read_text().splitlines() if options.out.exists() else []
    entries = [json.loads(line) for line in lines]
    known = {(one["sampler"], one["schedule"], one["seed"]): one for one in entries}
    for sampler in options.samplers.split(","):
        for schedule in options.schedules.split(","):
            entry = known.get((sampler, schedule, options.seed))
            if entry is None:
                outcomes = grid(sampler, schedule, options.seed)
                predicting = best_predicting(outcomes)
                best = largest(outcomes) if schedule == "constant" else predicting
                entry = {"sampler": sampler, "schedule": schedule, "seed": options.seed, "best": best.lr}
                entry |= {"nll": best.nll, "predicting": predicting.lr, "predicting_nll": predicting.nll}
                entry |= {"grid": [(one.lr, one.nll, one.heat) for one in outcomes], "proposals": []}
                known[sampler, schedule, options.seed] = entry
                write(known, options.out)
            done = {one["start"] for one in entry["proposals"]}
            starts = [start for start in STARTS[:: options.every] if start not in done]
            for proposal in proposals(sampler, schedule, entry["best"], options.seed, starts):
                entry["proposals"].append(proposal)
                write(known, options.out)
            print(as_table([entry]).splitlines()[-1], flush=True)
    print(as_table([one for one in known.values() if one["proposals"]]))


def write(known: dict[Any, dict[str, Any]], path: Path) -> None:
    """Write all lines: a run that was stopped continues where it was."""
    path.write_text("".join(json.dumps(entry) + "\n" for entry in known.values()))


if __name__ == "__main__":
    main()
