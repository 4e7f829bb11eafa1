"""How often ChainHealth is right: `python -m tests.benchmarks.verdict_rates --seeds 20 --out FILE.jsonl`.

Runs through `Trainer.fit` whose truth is known: right runs, on the conjugate model (whose exact temperature is within
12 % of the target's) and on small networks, must get no warning; wrong ones must get the right finding first.
"""

import argparse
import functools
import json
import re
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import BayesianModule, Categorical, GaussianPrior
from lightning_sgmcmc.callbacks import BayesianModelAverage, ChainHealth, CyclicalSchedule, SamplingSchedule
from lightning_sgmcmc.health.findings import FindingKind
from lightning_sgmcmc.health.report import HealthReport
from lightning_sgmcmc.samplers import SGHMC, SGLD, UnderdampedLangevin
from tests.support.problems import ConjugateRegression
from tests.support.trainers import quiet_trainer

PROBLEM = ConjugateRegression()
HEAT = (FindingKind.KINETIC, FindingKind.CONFIGURATIONAL, FindingKind.GRADIENT_NOISE)
UNDERDAMPED = functools.partial(UnderdampedLangevin, friction=10.0)


@dataclass(frozen=True)
class Case:
    """Runs of one kind.

    Attributes:
        name: what is right or wrong about them.
        run: returns the report of the run with a seed.
        expected: kinds of which one should come first; empty for a right run.
        kind: what the samples should be called, None if either will do.
    """

    name: str
    run: Callable[[int], HealthReport]
    expected: tuple[FindingKind, ...] = ()
    kind: str | None = None


def _conjugate(
    sampler: Any, lr: float, seed: int, steps: int = 1500, offset: float = 0.0, **options: Any
) -> HealthReport:
    """Return the report on conjugate regression, from the posterior's mean plus an offset."""
    module = PROBLEM.module(sampler=sampler, lr=lr, seed=seed, **options)
    with torch.no_grad():
        module.net.weight.add_(offset)
    burn_in = 0 if offset else 100
    schedule = SamplingSchedule(burn_in_steps=burn_in, every_n_steps=40)
    health = ChainHealth(every_n_steps=2, warn=False)
    trainer = quiet_trainer(
        max_steps=steps, check_val_every_n_epoch=10**6, callbacks=[schedule, BayesianModelAverage(), health]
    )
    data = PROBLEM.dataset()
    trainer.fit(module, PROBLEM.loader(50, seed), DataLoader(data, 200))
    assert module.health is not None
    return module.health


def _network(
    seed: int,
    lr: float = 0.01,
    std: float = 0.5,
    hidden: int = 8,
    num_data: int = 400,
    steps: int = 1500,
    dead: bool = False,
    schedule: Any = None,
    temperature: float = 1.0,
) -> HealthReport:
    """Return the report on three classes in two dimensions, labelled by a plane for each class."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_data + 200, 2, generator=generator)
    y = (x @ torch.tensor([[3.0, 0.0, -3.0], [0.0, 3.0, -3.0]])).argmax(1)
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(2, hidden), nn.ReLU(), nn.Linear(hidden, 3))
    if dead:
        with torch.no_grad():
            net[0].bias.fill_(-100.0)  # type: ignore[union-attr]
    prior = GaussianPrior({"*.0.bias": 100.0, "*": std}) if dead else GaussianPrior(std)
    module = BayesianModule(
        net=net, likelihood=Categorical(), prior=prior, sampler=SGHMC, lr=lr, seed=seed, temperature=temperature
    )
    train = TensorDataset(x[:num_data], y[:num_data])
    val = DataLoader(TensorDataset(x[num_data:], y[num_data:]), 200)
    schedule = SamplingSchedule(burn_in_steps=steps // 2, every_n_steps=25) if schedule is None else schedule
    health = ChainHealth(every_n_steps=2, warn=False)
    trainer = quiet_trainer(
        max_steps=steps, check_val_every_n_epoch=10**6, callbacks=[schedule, BayesianModelAverage(), health]
    )
    trainer.fit(module, DataLoader(train, 100, shuffle=True), val)
    assert module.health is not None
    return module.health


def cases(steps: int) -> list[Case]:
    """Return the cases, right ones first.

    Args:
        steps: optimizer steps of each run.
    """
    conjugate, network = (functools.partial(run, steps=steps) for run in (_conjugate, _network))
    cyclical = functools.partial(CyclicalSchedule, num_cycles=4, exploration=0.5, samples_per_cycle=3)
    return [
        Case("conjugate, SGLD, right", lambda s: conjugate(SGLD, 0.025, s), kind="posterior sample"),
        Case("conjugate, SGHMC, right", lambda s: conjugate(SGHMC, 0.004, s), kind="posterior sample"),
        Case("conjugate, underdamped, right", lambda s: conjugate(UNDERDAMPED, 0.0015, s), kind="posterior sample"),
        Case("conjugate, 2 chains, right", lambda s: conjugate(SGHMC, 0.004, s, num_chains=2), kind="posterior sample"),
        Case("network, relaxed, right", lambda s: _network(s, lr=0.05, steps=8 * steps)),
        Case("network, cyclical: a note", lambda s: network(s, std=3.0, schedule=cyclical()), kind="cold ensemble"),
        Case("conjugate, SGLD, lr 8 times", lambda s: conjugate(SGLD, 0.2, s), HEAT),
        Case("conjugate, SGHMC, lr 8 times", lambda s: conjugate(SGHMC, 0.03, s), HEAT),
        Case("conjugate, far start", lambda s: conjugate(SGLD, 5e-4, s, offset=1.0), (FindingKind.ENERGY, *HEAT)),
        Case(
            "network, wide prior, short",
            lambda s: network(s, lr=0.002, std=30.0),
            (FindingKind.RELAXATION, FindingKind.ENERGY),
            "cold ensemble",
        ),
        Case("network, dead", lambda s: network(s, dead=True), (FindingKind.AT_CHANCE,)),
        Case(
            "network, more heat than data",
            lambda s: network(s, lr=0.02, std=5.0, hidden=100, num_data=100),
            (FindingKind.TARGET, FindingKind.AT_CHANCE, FindingKind.ENERGY, FindingKind.RELAXATION),
        ),
    ]


def outcome(case: Case, seed: int) -> dict[str, Any]:
    """Return what the report of one run says: its problems, the most urgent first, and its name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = case.run(seed)
    problems = [finding.kind.value for finding in report.findings if finding.severity == "problem"]
    return {"case": case.name, "seed": seed, "problems": problems, "kind": report.kind}


def interval(count: int, runs: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return Clopper and Pearson's interval of a rate, of which `count` of `runs` independent runs were seen.

    >>> [round(end, 3) for end in interval(0, 30)]
    [0.0, 0.116]
    """
    from scipy.stats import binomtest

    found = binomtest(count, runs).proportion_ci(confidence, "exact")
    return float(found.low), float(found.high)


def rate(count: int, runs: int) -> str:
    """Return a rate and its interval in words."""
    if not runs:
        return "–"
    low, high = interval(count, runs)
    return f"{count / runs:.0%} ({low:.0%} to {high:.0%})"


def table(chosen: list[Case], outcomes: list[dict[str, Any]]) -> str:
    """Return for each case, and for right and wrong runs together, the rates of alarms, and of the right finding."""
    lines = ["| run | runs | warned | right finding first | right name | first findings |", "|---|---|---|---|---|---|"]
    groups = [(case.name, [case]) for case in chosen]
    groups += [("**all right runs**", [c for c in chosen if not c.expected])]
    groups += [("**all wrong runs**", [c for c in chosen if c.expected])]
    for name, cases_ in groups:
        runs = warned = right = named = 0
        seen: Counter[str] = Counter()
        for case in cases_:
            own = [one for one in outcomes if one["case"] == case.name]
            first = Counter(one["problems"][0] for one in own if one["problems"])
            runs, warned, seen = runs + len(own), warned + first.total(), seen + first
            right += sum(first[kind.value] for kind in case.expected)
            named += sum(case.kind is None or one["kind"] == case.kind for one in own)
        hit = rate(right, runs) if any(case.expected for case in cases_) else "–"
        kinds = ", ".join(f"{kind} {count}" for kind, count in seen.most_common())
        lines.append(f"| {name} | {runs} | {rate(warned, runs)} | {hit} | {named} | {kinds} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first_seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--only", default="", help="regular expression in the cases' names")
    parser.add_argument("--out", type=Path, required=True, help="file of one line of JSON for each run, added to")
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [case for case in cases(options.steps) if re.search(options.only, case.name)]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    outcomes = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    done = {(one["case"], one["seed"]) for one in outcomes}
    # Every case has a run before any has its second, so a table of a run that was stopped has all cases.
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for case in chosen:
            if (case.name, seed) in done:
                continue
            outcomes.append(outcome(case, seed))
            with options.out.open("a") as file:
                file.write(json.dumps(outcomes[-1]) + "\n")
    print(table(chosen, outcomes))


if __name__ == "__main__":
    main()
