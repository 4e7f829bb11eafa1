"""Small runs with one fault each, and the same runs with the fault mended, for the health pages."""

import contextlib
import functools
import html
import logging
import re
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

warnings.filterwarnings("ignore", module="tqdm|pytorch_lightning")

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import rank_zero_only
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from docs.hooks.pictures import BLUE, ORANGE, PAGE, picture
from lightning_sgmcmc import SGHMC, BayesianModule, Gaussian, GaussianPrior, NonFiniteEnergyError
from lightning_sgmcmc.batches import ResumableLoader
from lightning_sgmcmc.callbacks import BayesianModelAverage, ChainHealth, SampleCollector, SamplingSchedule
from lightning_sgmcmc.chains.schedule import Schedule
from lightning_sgmcmc.datamodules import TensorBatches

NOISE = 0.3
OURS = re.compile(r"^(ChainHealth|RunPlan|ContourGradient|PosteriorDashboard|In the first|An epoch|log_likelihood|lr=0|"
                  r"gradient_clip_val|The training loader|With a plain|Only the first|drop_last|At twice)")  # fmt: skip
"""How the library's own warnings begin."""


class Kept(pl.Callback):
    """Keeps the energy of each step, a line for each chain, and one weight of each."""

    def __init__(self) -> None:
        self.energies: list[Tensor] = []
        self.weights: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.energies.append(module.chains.observed.energy.detach().clone())
        first = next(iter(module.chains.trainable.values())).detach()
        self.weights.append(first.reshape(module.chains.num_chains, -1)[:, 0].clone())


def right_answer(data: Any) -> Tensor:
    """Return the mean of the posterior of a regression on all of its data."""
    x, y = data[range(len(data))]
    return torch.linalg.solve(x.T @ x / NOISE**2 + torch.eye(x.shape[1]), x.T @ y / NOISE**2).T


def curves(count: int = 100, features: int = 10, outputs: int = 8, seed: int = 0) -> TensorBatches:
    """Return waves with noise, to be fitted by bumps: a regression whose posterior is a Gaussian."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(count, generator=generator) * 2 - 1
    bumps = torch.exp(-0.5 * ((x[:, None] - torch.linspace(-1, 1, features)) * features / 2) ** 2)
    y = torch.sin(4 * x[:, None] + torch.arange(outputs)) + NOISE * torch.randn(count, outputs, generator=generator)
    return TensorBatches(bumps, y)


def fit(
    data: Any = None,
    net: Any = None,
    lr: float = 0.1,
    steps: int = 400,
    burn_in: int = 100,
    batch_size: int = 100,
    every: int = 10,
    val: Any = None,
    callbacks: Any = (),
    start: Any = None,
    trainer: dict[str, Any] | None = None,
    module: Any = BayesianModule,
    **options: Any,
) -> BayesianModule:
    """Fit quietly; return the module with `kept`, its energies and weights, and `said`, the run's warnings."""
    torch.manual_seed(0)
    data = curves() if data is None else data
    net = nn.Linear(data[[0]][0].shape[1], 8, bias=False) if net is None else net
    if start is not None:
        for parameter in net.parameters():
            parameter.data.copy_(torch.as_tensor(start))
    settings = {"likelihood": Gaussian(std=NOISE), "prior": GaussianPrior(std=1.0), "seed": 0}
    settings["sampler"] = functools.partial(SGHMC, friction=0.1)
    run = module(net=net, lr=lr, **(settings | options))
    kept, schedule = Kept(), SamplingSchedule(burn_in_steps=burn_in, every_n_steps=every)
    own = [SampleCollector(in_memory=True), BayesianModelAverage(), ChainHealth(every_n_steps=2), kept]
    schedules = [] if any(isinstance(c, Schedule) for c in callbacks) else [schedule]
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "num_sanity_val_steps": 0}
    quiet |= {"max_steps": steps, "accelerator": "cpu", "enable_model_summary": False} | (trainer or {})
    loader = data if hasattr(data, "batch_sampler") else ResumableLoader(data, batch_size=batch_size)
    evaluation = None if val is None else DataLoader(TensorDataset(*val[range(len(val))]), batch_size=len(val))
    level = logging.getLogger("pytorch_lightning").level
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fitter = pl.Trainer(
            callbacks=[*schedules, *own, *callbacks], default_root_dir=folder, check_val_every_n_epoch=10**6, **quiet
        )
        with contextlib.suppress(NonFiniteEnergyError):
            fitter.fit(run, loader, evaluation)
    logging.getLogger("pytorch_lightning").setLevel(level)
    run.__dict__["said"] = [str(w.message) for w in said if OURS.match(str(w.message))]
    run.__dict__["kept"] = kept
    return run


Panel = Callable[[Any, Any, Any], None]
"""Draws the faulty and the mended run on axes."""


def shown(before: Any, after: Any, begins: str, panel: Panel | None = None) -> str:
    """Return both runs as HTML: a picture, the faulty run's warning, and what the mended run says instead.

    Args:
        before: the faulty run.
        after: the mended run.
        begins: first words of the warning.
        panel: the left half of the picture; None draws the energies.

    Raises:
        AssertionError: if the faulty run does not warn so, or the mended run does.
    """
    if rank_zero_only.rank:
        return ""  # of several processes the first one warns
    found = [sentence for sentence in before.said if sentence.startswith(begins)]
    assert found, f"the run has no warning that begins with {begins!r}, but {before.said}"
    assert not any(sentence.startswith(begins) for sentence in after.said), after.said

    def draw(left: Any, right: Any) -> None:
        (panel or energies)(left, before, after)
        temperatures(right, before, after)

    parts = [picture(draw, f"The run that warns '{begins} …' and the mended run", 7.0, 2.5, columns=2)]
    for name, said in (("Before", [found[0]]), ("After the fix", after.said or [verdict(after)])):
        text = html.escape(f"{name}. " + " ".join(said))
        parts.append(f'<pre style="white-space:pre-wrap">{text}</pre>')
    return "\n".join(parts)


def verdict(module: Any) -> str:
    """Return what the samples of a run without a warning are."""
    if module.health is None or module.health.kind is None:
        return "No warning."
    return f"No warning. The samples are called a {module.health.kind} ({module.health.reason})."


def energies(axes: Any, before: Any, after: Any) -> None:
    """Draw the energy of each step and chain."""
    top = 0.0
    for name, module, colour in (("before", before, ORANGE), ("after the fix", after, BLUE)):
        values = torch.stack(module.kept.energies).double()
        size = max(1, len(values) // 200)
        for chain in range(values.shape[1]):
            label = name if chain == 0 else None
            axes.plot(range(1, len(values) + 1, size), values[::size, chain], color=colour, lw=0.7, label=label)
        top = max(top, float(values.max()) / max(float(values.abs().median()), 1.0))
    if top > 50:
        axes.set_yscale("symlog", linthresh=100)
        axes.yaxis.get_major_locator().set_params(numticks=6)
    axes.set(xlabel="step", ylabel="energy (nats)")
    axes.legend(fontsize="small")


def averages(axes: Any, before: Any, after: Any) -> None:
    """Draw the NLL of the average of so many samples on the validation data."""
    for name, module, colour in (("before", before, ORANGE), ("after the fix", after, BLUE)):
        values = [member["nll"] for member in module.evaluations["val"].running]
        axes.plot(range(1, len(values) + 1), values, color=colour, label=name)
    axes.set(xlabel="samples in the average", ylabel="NLL (nats per example)")
    axes.legend(fontsize="small")


def first_weights(axes: Any, before: Any, after: Any) -> None:
    """Draw one weight of each chain."""
    for name, module, colour in (("before", before, ORANGE), ("after the fix", after, BLUE)):
        for chain, line in enumerate(torch.stack(module.kept.weights).T):
            axes.plot(line[::2], color=colour, lw=0.7, label=name if chain == 0 else None)
    axes.set(xlabel="every second step", ylabel="one weight of each chain")
    axes.legend(fontsize="small")


def bins(axes: Any, before: Any, after: Any) -> None:
    """Draw the energies of the second half of the steps, and the extent of the contour's bins."""
    for name, module, colour, row in (("before", before, ORANGE, 0.0), ("after the fix", after, BLUE, 1.0)):
        values = torch.stack(module.kept.energies).flatten()
        values = values[len(values) // 2 :]
        partition = module.contour.partition
        axes.plot(values, row + 0.15 + 0.4 * torch.rand(len(values)), ".", color=colour, markersize=2, label=name)
        axes.plot([partition.first_edge, partition.last_edge], [row, row], "|-", color=colour, markersize=10)
    axes.set(xlabel="energy (nats); lines: the bins", yticks=[], ylim=(-0.3, 2.3))
    axes.legend(fontsize="small", loc="upper right", ncols=2)


def temperatures(axes: Any, before: Any, after: Any) -> None:
    """Draw the temperatures of all tensors together, over the target's, with intervals."""
    axes.axvspan(0.8, 1.2, color=PAGE, alpha=0.12, lw=0)
    names = []
    for name, module, colour in (("before", before, ORANGE), ("after", after, BLUE)):
        for kind in ("kinetic", "configurational"):
            row, report = -len(names), module.health
            names.append(f"{kind},\n{name}")
            value, interval = (None, None) if report.total is None else report.total.measured(kind)
            if value is None or interval is None:
                axes.text(1.0, row, "not measurable", ha="center", va="center", fontsize="small")
                continue
            ends = (interval[0], value, interval[1])
            low, value, high = (min(max(each / report.temperature, 0.02), 50.0) for each in ends)
            axes.plot([low, high], [row, row], color=colour)
            axes.plot(value, row, "o", color=colour, markersize=4)
    axes.set_yticks([-row for row in range(len(names))], names, fontsize="small")
    axes.set_xscale("log")
    marks = [0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50]
    axes.set_xticks(marks, [f"{mark:g}" for mark in marks])
    axes.set_xticks([], minor=True)
    axes.set(xlabel="temperature over the target's", ylim=(-3.6, 0.6))
    ends = [float(x) for line in axes.get_lines() for x in line.get_xdata()]
    axes.set_xlim(min([0.4, *ends]) * 0.9, max([2.2, *ends]) * 1.1)


torch.set_num_threads(1)
