"""What plans predict against what fits measure: `python -m tests.benchmarks.plan_accuracy --out DIR`.

Each setting is a fit of a small network. The plan predicts the configurational temperature that `ChainHealth` measures,
and the relaxation times of the stage of sampling, which the correlation of the weights at its ends measures. Writes
plan_accuracy.md, .json and .png.
"""

import argparse
import functools
import json
import logging
import math
import statistics
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from lightning_sgmcmc import (
    SGHMC,
    SGLD,
    SGNHT,
    BayesianModule,
    Categorical,
    Gaussian,
    GaussianPrior,
    UnderdampedLangevin,
)
from lightning_sgmcmc.batches import ResumableLoader
from lightning_sgmcmc.callbacks import ChainHealth, CyclicalSchedule, SamplerCallback, SamplingSchedule
from lightning_sgmcmc.chains.state import Stage
from lightning_sgmcmc.datamodules import TensorBatches
from lightning_sgmcmc.health.estimates import ANCHORED, PLAIN
from lightning_sgmcmc.plain import markdown_table

LANGEVIN_FRICTION = 40.0
SAMPLERS: dict[str, Any] = {
    "SGLD": SGLD,
    "SGHMC": functools.partial(SGHMC, friction=0.1),
    "Euler": functools.partial(UnderdampedLangevin, friction=LANGEVIN_FRICTION),
    "BAOAB": functools.partial(UnderdampedLangevin, friction=LANGEVIN_FRICTION, integrator="baoab"),
    "SGNHT": functools.partial(SGNHT, friction=0.1),
}
FRICTIONS = {"SGLD": 1.0, "SGHMC": 0.1, "SGNHT": 0.1}
BATCH = 100


@dataclass(frozen=True)
class Setting:
    """A fit of a network from weights at half the prior's scale or less."""

    sampler: str
    data: str
    num_data: int
    prior_std: float
    schedule: str
    steps: int
    lr: float
    temperature: float = 1.0


def data(kind: str, count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    if kind == "digits":
        x, y = load_digits(return_X_y=True)
        order = torch.randperm(len(x), generator=generator)[:count]
        return torch.tensor(x / 16).float()[order], torch.tensor(y).long()[order]
    x = torch.randn(count, 8, generator=generator)
    teacher = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    with torch.no_grad():
        for p in teacher.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / math.sqrt(p.shape[-1]))
        y = teacher(x) + torch.randn(count, 1, generator=generator)
    return x, y


def network(kind: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    if kind == "digits":
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)), Categorical()
    return nn.Sequential(nn.Linear(8, 50), nn.Tanh(), nn.Linear(50, 1)), Gaussian(std=1.0)


def schedule(name: str, steps: int) -> pl.Callback:
    if name == "cyclical":
        return CyclicalSchedule(num_cycles=2, exploration=0.3, samples_per_cycle=1)
    if name == "cold start":
        burn = steps // 2
        return SamplingSchedule(burn_in_steps=burn, every_n_steps=(steps - burn) // 4, burn_in_temperature=0.0)
    return SamplingSchedule(burn_in_steps=steps // 4, every_n_steps=(steps - steps // 4) // 4)


class Ends(SamplerCallback):
    """Keeps the weights when the last stage of sampling begins and ends."""

    def __init__(self) -> None:
        self.first: Tensor | None = None
        self._was_sampling = False

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        sampling = pl_module.chains.progress.stage is Stage.SAMPLING
        if sampling and not self._was_sampling:
            self.first = weights(pl_module)
        self._was_sampling = sampling


def weights(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().double().reshape(-1) for p in module.parameters()])


def measured_temperature(health: ChainHealth) -> float:
    """Return the configurational temperature about the state at the stage's start, of all tensors together.

    `ChainHealth` reports it, or the one about 0 where that is precise enough.
    """
    assert health._observer is not None
    seen = health._observer.observations([0.0] * 100)
    shares = torch.tensor(seen.numels).double() / sum(seen.numels)
    rows = (seen.values[:, PLAIN] - seen.values[:, ANCHORED]) @ shares
    return seen.temperature * float((rows * seen.counts).sum() / seen.counts.sum())


def run(setting: Setting) -> dict[str, Any]:
    """Fit, and return the predicted and the measured numbers."""
    x, y = data(setting.data, setting.num_data)
    net, likelihood = network(setting.data)
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(min(1.0, 0.5 * setting.prior_std / float(p.square().mean().sqrt())))
    module = BayesianModule(
        net=net,
        likelihood=likelihood,
        prior=GaussianPrior(setting.prior_std),
        sampler=SAMPLERS[setting.sampler],
        lr=setting.lr,
        temperature=setting.temperature,
        num_data=setting.num_data,
        seed=0,
    )
    loader = ResumableLoader(TensorBatches(x, y), batch_size=BATCH)
    ends, health_callback = Ends(), ChainHealth(every_n_steps=2, warn=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=setting.steps,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[schedule(setting.schedule, setting.steps), health_callback, ends],
    )
    begun = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, loader)
    plan, health = module.plan, module.health
    assert plan is not None
    assert health is not None
    assert health.total is not None
    assert ends.first is not None
    last = weights(module)
    ratio = float(last @ ends.first / (ends.first @ ends.first))
    return {
        **asdict(setting),
        "predicted": plan.configurational_temperature,
        "measured": measured_temperature(health_callback),
        "reported": health.total.configurational,
        "kinetic": health.total.kinetic,
        "noise": max(health.gradient_noise_share.values()),
        "predicted_relaxation": plan.sampling_relaxation_times,
        # With less the noise of the weights hides it, and after more nothing of the start is left.
        "measured_relaxation": -math.log(ratio) if 0.05 < ratio < 0.8 else None,
        "kind": None if plan.kind is None else plan.kind.value,
        "seconds": time.monotonic() - begun,
    }


CASES = (
    ("digits", 400, 0.15, "cyclical"),
    ("digits", 400, 0.3, "cold start"),
    ("digits", 1600, 0.1, "cyclical"),
    ("digits", 400, 0.1, "constant"),
    ("digits", 1600, 0.1, "cold start"),
    ("teacher", 400, 0.3, "cold start"),
    ("teacher", 1600, 0.1, "constant"),
)
"""Data, N, prior std and schedule."""
STEPS = 500


def lr_for(sampler: str, num_data: int, effective: float) -> float:
    """Return the lr whose steps cover `effective`/(N·std²) relaxation times each."""
    if sampler in FRICTIONS:
        return effective * FRICTIONS[sampler]
    return LANGEVIN_FRICTION * effective / num_data


def settings() -> list[Setting]:
    """Return the settings: every sampler with every case, the step size in rotation."""
    found = []
    for number, sampler in enumerate(SAMPLERS):
        for place, (kind, count, std, name) in enumerate(CASES):
            lr = lr_for(sampler, count, (0.04, 0.06, 0.09)[(number + place) % 3])
            found.append(Setting(sampler, kind, count, std, name, STEPS, lr))
    return found


def error(row: dict[str, Any], name: str, truth: str = "measured") -> float | None:
    """Return the relative error of a prediction."""
    if row[name] is None or row[truth] is None:
        return None
    return abs(row[name] - row[truth]) / max(abs(row[truth]), 1e-9)


def median_error(rows: list[dict[str, Any]], name: str, truth: str = "measured") -> float:
    """Return the median relative error of a prediction."""
    return statistics.median([value for row in rows if (value := error(row, name, truth)) is not None])


def as_table(rows: list[dict[str, Any]]) -> str:
    """Return the settings with predicted and measured numbers, as Markdown."""
    names = ["sampler", "data", "num_data", "prior_std", "schedule", "lr", "predicted", "measured"]
    names += ["predicted_relaxation", "measured_relaxation", "noise", "kind"]
    titles = ["sampler", "data", "N", "prior std", "schedule", "lr", "T planned", "T measured"]
    titles += ["relaxation planned", "relaxation measured", "noise share", "kind"]
    return markdown_table(titles, [[_shown(row[name]) for name in names] for row in rows])


def _shown(value: Any) -> str:
    return "" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw predicted against measured temperatures and relaxation times."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9.5, 4.6), constrained_layout=True)
    panels = (
        ("predicted", "measured", "configurational temperature"),
        ("predicted_relaxation", "measured_relaxation", "relaxation times of the last stage"),
    )
    for axis, (name, truth, title) in zip(axes, panels, strict=True):
        kept = [row for row in rows if row[name] is not None and row[truth] is not None and row[truth] > 0]
        for sampler in SAMPLERS:
            own = [row for row in kept if row["sampler"] == sampler]
            axis.scatter([row[truth] for row in own], [row[name] for row in own], s=28, label=sampler, alpha=0.8)
        ends = [min(min(r[name], r[truth]) for r in kept) * 0.7, max(max(r[name], r[truth]) for r in kept) * 1.4]
        axis.plot(ends, ends, color="0.6", linewidth=1, zorder=0)
        axis.set(xscale="log", yscale="log", xlabel="measured", ylabel="planned", xlim=ends, ylim=ends)
        axis.set_title(f"{title}\nmedian error {median_error(kept, name, truth):.0%} of {len(kept)}", fontsize=9)
    axes[0].legend(fontsize=7)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the table, the numbers and the picture")
    parser.add_argument("--every", type=int, default=1, help="take every n-th setting only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in ("pytorch_lightning", "pytorch_lightning.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    options.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for setting in settings()[:: options.every]:
        rows.append(run(setting))
        print(" ".join(f"{name}={_shown(value)}" for name, value in rows[-1].items()), flush=True)
        (options.out / "plan_accuracy.json").write_text(json.dumps(rows, indent=1) + "\n")
    write(rows, options.out)


def write(rows: list[dict[str, Any]], out: Path) -> None:
    """Write table and picture."""
    draw(rows, out / "plan_accuracy.png")
    summary = [
        f"{len(rows)} settings. Median relative error of the configurational temperature: "
        f"{median_error(rows, 'predicted'):.1%}.",
    ]
    (out / "plan_accuracy.md").write_text("\n".join([*summary, "", as_table(rows)]))
    print("\n".join(summary))


if __name__ == "__main__":
    main()
