"""Whether one run gives the probabilities of AutoSampling's "nll" and tells novelty as "ood" does, at equal cost.

    python -m tests.benchmarks.both_objectives --root DIR [--seeds 3] [--sets digits,mnist,covertype] [--keep DIR]

Each row is a data set of recipe `equal_cost` and a way to use its budget of gradients. `NLL` is of test data by the
samples that predict. The other columns are AUROC of the mutual information, and of the entropy, of the samples that
the row takes for uncertainty. Far novelty are letters (for covertype two held-out types, for other tables noise); near
novelty are the test images after a quarter turn. `hot last 0.3` is a run whose last 30 % sample at temperature 1 under
the tight prior of "ood", and `hot first` one that has them after the warm-up; only the cold samples predict.
"""

import argparse
import functools
import logging
import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_sgmcmc import BayesianModule, Posterior
from lightning_sgmcmc.callbacks import AutoSampling, SampleCollector
from lightning_sgmcmc.chains.samples import Drawing, PosteriorSample
from lightning_sgmcmc.chains.schedule import RunLength, StepControls
from lightning_sgmcmc.chains.state import Stage
from lightning_sgmcmc.diagnostics.decisions import stacking_weights, window_weights
from lightning_sgmcmc.diagnostics.scores import detection_metrics, predictive_entropy
from lightning_sgmcmc.namespace import pl
from lightning_sgmcmc.recipes.equal_cost.methods import METHODS, Fit, setting_of
from lightning_sgmcmc.recipes.equal_cost.problems import Problem
from lightning_sgmcmc.recipes.equal_cost.settings import Settings
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.settings import read_settings
from lightning_sgmcmc.schedules import WarmUpAndDecay
from tests.benchmarks.small_networks import QUIET

COLD_STD, TIGHT_STD = 0.3, 0.2
SHARES = (0.3, 0.5)


@dataclass(frozen=True)
class Parts(WarmUpAndDecay):
    """A warm-up, then a cold and a hot stage in either order, each with a step size that falls by a cosine."""

    share: float
    hot_first: bool

    @property
    def switch(self) -> int:
        """The last step of the earlier stage."""
        hot = round(self.share * self.total_steps)
        return self.warm_steps + hot if self.hot_first else self.total_steps - hot

    def is_hot(self, step: int) -> bool:
        return (step > self.warm_steps) and (step <= self.switch) == self.hot_first

    def lr_factor(self, step: int) -> float:
        if step <= self.warm_steps:
            return super().lr_factor(step)
        begin, end = (self.warm_steps, self.switch) if step <= self.switch else (self.switch, self.total_steps)
        elapsed = (step - begin - 1) / (end - begin)
        return (0.1 + 0.45 * (math.cos(math.pi * elapsed) + 1)) * min(1.0, (step - begin) / 30)

    @functools.cached_property
    def draw_steps(self) -> tuple[int, ...]:
        """Of both stages, each as many as its share of the steps; one is at the switch."""
        first = round(self.num_draws * (self.switch - self.warm_steps) / (self.total_steps - self.warm_steps))
        ends = [(self.warm_steps, self.switch, first), (self.switch, self.total_steps, self.num_draws - first)]
        return tuple(begin + round((j + 1) * (end - begin) / n) for begin, end, n in ends for j in range(n))


class Both(AutoSampling):
    """AutoSampling with a hot stage before or after its cold one."""

    def __init__(self, share: float, hot_first: bool) -> None:
        super().__init__(prior_std=TIGHT_STD if hot_first else None)
        self.share, self.hot_first = share, hot_first

    def plan_over(self, steps: int, length: RunLength) -> WarmUpAndDecay:
        return Parts(steps, self.warm_up, self.num_draws, self.share, self.hot_first)

    def controls(self, step: int) -> StepControls:
        found = super().controls(step)
        if found.stage is Stage.SAMPLING and self.laid_out.is_hot(step):  # type: ignore[attr-defined]
            return found._replace(temperature=1.0)
        return found

    def on_posterior_samples(self, trainer: pl.Trainer, pl_module: Any, drawing: Drawing) -> None:
        if not self.laid_out.is_hot(drawing.samples[0].step):  # type: ignore[attr-defined]
            super().on_posterior_samples(trainer, pl_module, drawing)

    def on_posterior_sample(self, trainer: pl.Trainer, pl_module: Any, sample: PosteriorSample) -> None:
        self.chosen.setdefault(sample.chain, [(0, self._start_std)])
        plan: Any = self.laid_out
        if not plan.is_hot(sample.step):
            super().on_posterior_sample(trainer, pl_module, sample)
        if sample.step == plan.switch:
            self._choose(pl_module, sample, COLD_STD if self.hot_first else TIGHT_STD)


def fit_of(row: str, problem: Problem, settings: Settings) -> Fit:
    if row.startswith("hot"):
        _, order, share = row.split()
        module = BayesianModule(net=problem.net(), likelihood=problem.likelihood())
        return Fit(module, [Both(float(share), order == "first")], problem.steps, validates=True)
    return METHODS[row](problem, setting_of(settings, problem.data_name, row))


FITS = ("auto", "auto_ood", "ensemble", *(f"hot {order} {share}" for order in ("last", "first") for share in SHARES))


def probabilities(row: str, problem: Problem, settings: Settings) -> dict[str, Any]:
    """Fit, and return the steps (S,) and each sample's probabilities of the data, (S, n, K), with the targets."""
    pl.seed_everything(problem.seed, verbose=False)
    fit = fit_of(row, problem, settings)
    collector = SampleCollector(in_memory=True)
    trainer = pl.Trainer(
        max_steps=fit.steps,
        max_epochs=-1,
        callbacks=[*fit.callbacks, collector],
        num_sanity_val_steps=0,
        limit_val_batches=None if fit.validates else 0,
        check_val_every_n_epoch=10**6,
        **QUIET,
    )
    trainer.fit(fit.module, datamodule=problem)
    posterior = collector.posterior
    assert isinstance(posterior, Posterior)
    val, test = problem.splits[1:]
    parts = {"val": val.inputs, "test": test.inputs, "far": problem.unknown}
    if problem.setting["source"] in ("digits", "mnist"):
        side = math.isqrt(test.inputs[0].numel())
        parts["near"] = test.inputs.reshape(-1, 1, side, side).rot90(1, (2, 3)).reshape(test.inputs.shape)
    found: dict[str, Any] = {
        name: posterior.predict(x, return_samples=True).sample_probabilities for name, x in parts.items()
    }
    hot = [row.startswith("hot") and fit.callbacks[0].laid_out.is_hot(r.step) for r in posterior.records]  # type: ignore[attr-defined]
    steps = [record.step for record in posterior.records]
    return found | {"y_val": val.targets, "y_test": test.targets, "steps": steps, "hot": torch.tensor(hot)}


def kept(row: str, problem: Problem, settings: Settings, folder: Path | None) -> dict[str, Any]:
    """Return what `probabilities` does, from a file if there is one."""
    file = None if folder is None else folder / f"{problem.data_name} {row} {problem.seed}.pt"
    if file is not None and file.is_file():
        loaded: dict[str, Any] = torch.load(file)
        return loaded
    found = probabilities(row, problem, settings)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(found, file)
    return found


def weights_of(found: dict[str, Any]) -> Tensor:
    """Return AutoSampling's weights of the samples that are not hot, 0 for others."""
    cold = (~found["hot"]).nonzero()[:, 0]
    logs = found["val"][cold].double().clamp_min(1e-8)[:, torch.arange(len(found["y_val"])), found["y_val"]].log()
    steps = [found["steps"][index] for index in cold.tolist()]
    weights = torch.zeros(len(found["hot"])).double()
    weights[cold] = stacking_weights(logs, window_weights(logs, steps))
    return weights


def even(where: Tensor) -> Tensor:
    return where.double() / where.sum()


def scores(found: dict[str, Any], predicts: Tensor, tells: Tensor) -> list[float]:
    """Return NLL by some weights, and by others AUROC of mutual information and entropy of each kind of novelty."""
    mean = torch.einsum("s,snk->nk", predicts, found["test"].double())
    numbers = [-float(mean.gather(1, found["y_test"][:, None]).clamp_min(1e-12).log().mean())]
    parts = {}
    for name in ("test", "far", "near"):
        if name in found:
            each = found[name].double()
            entropy = predictive_entropy(torch.einsum("s,snk->nk", tells, each))
            parts[name] = (entropy - tells @ predictive_entropy(each), entropy)
    for name in ("far", "near"):
        for place in (0, 1):
            auroc = detection_metrics(parts["test"][place], parts[name][place])["auroc"] if name in parts else math.nan
            numbers.append(float(auroc))
    return [*numbers, 1 / float(predicts.square().sum()), 1 / float(tells.square().sum())]


def rows(runs: dict[str, dict[str, Any]]) -> dict[str, list[float]]:
    """Return the rows of one data set and seed."""
    found = {}
    for name, run in runs.items():
        every = torch.ones(len(run["hot"]))
        if name == "auto":
            weights = weights_of(run)
            found["auto"] = scores(run, weights, weights)
            found["auto, uncertainty by even weights"] = scores(run, weights, even(every))
        elif name.startswith("hot"):
            found[name] = scores(run, weights_of(run), even(run["hot"]))
        else:
            found[name] = scores(run, even(every), even(every))
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path("data"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sets", default="digits,mnist,covertype")
    parser.add_argument("--fits", default=",".join(FITS))
    parser.add_argument("--keep", type=Path)
    chosen = parser.parse_args()
    for name in ("pytorch_lightning", "lightning_sgmcmc"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    settings = read_settings(Settings, Options(out=chosen.root, data_root=chosen.root, full=True))
    columns = ("data", "uses", "NLL", "MI far", "entropy far", "MI near", "entropy near", "ESS predict", "ESS tell")
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|", flush=True)
    for data in chosen.sets.split(","):
        found: list[dict[str, list[float]]] = []
        for seed in range(chosen.seeds):
            problem = Problem(data, settings.sets[data], chosen.root, seed)
            problem.setup("fit")
            runs = {row: kept(row, problem, settings, chosen.keep) for row in chosen.fits.split(",")}
            found.append(rows(runs))
        for row in found[0]:
            means = torch.tensor([one[row] for one in found]).double().mean(0).tolist()
            cells = [*(f"{value:.4f}" for value in means[:5]), *(f"{value:.0f}" for value in means[5:])]
            print(f"| {data} | {row} | {' | '.join(cells).replace('nan', '')} |", flush=True)


if __name__ == "__main__":
    main()
