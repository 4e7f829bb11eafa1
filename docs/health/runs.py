"""Small runs with one fault each, and the same runs after the cure, as pictures for the health pages."""

import contextlib
import functools
import html
import io
import logging
import tempfile
import warnings
from typing import Any

warnings.filterwarnings("ignore", module="tqdm|pytorch_lightning")

import pytorch_lightning as pl
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import SymmetricalLogLocator
from torch import nn

from lightning_sgmcmc import SGHMC, BayesianModule, Gaussian, GaussianPrior, NonFiniteEnergyError
from lightning_sgmcmc.callbacks import BayesianModelAverage, ChainHealth, SampleCollector, SamplingSchedule
from lightning_sgmcmc.datamodules import TableDataModule
from lightning_sgmcmc.silence import silenced

KINETIC, CONFIGURATIONAL, GREY = "#0072B2", "#E69F00", "#999999"  # Okabe and Ito
NOISE = 0.3


class Energies(pl.Callback):
    """Keeps the energy of each step, a line for each chain."""

    def __init__(self) -> None:
        self.lines: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.lines.append(module.chains.observed.energy.detach().clone())


def bumps(x: Any) -> Any:
    """Return ten bumps at each place, shape (n, 10)."""
    return torch.exp(-0.5 * ((x[:, None] - torch.linspace(-1, 1, 10)) / 0.2) ** 2)


def curve(count: int = 100, batch_size: int = 100) -> TableDataModule:
    """Return a regression on ten bumps, whose posterior is a Gaussian."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(count, generator=generator) * 2 - 1
    y = torch.sin(4 * x) + NOISE * torch.randn(count, generator=generator)
    return TableDataModule(bumps(x), y, batch_size, standardise=False, val_fraction=0, test_fraction=0)


def fit(
    data: Any = None,
    net: Any = None,
    lr: float = 0.04,
    steps: int = 500,
    burn_in: int = 125,
    batch_size: int = 100,
    start: float | None = None,
    every: int = 5,
    schedule: Any = None,
    trainer: dict[str, Any] | None = None,
    **options: Any,
) -> BayesianModule:
    """Fit quietly; return the module, with `module.energies` and its health."""
    torch.manual_seed(0)
    net = nn.Linear(10, 1, bias=False) if net is None else net
    if start is not None:
        for parameter in net.parameters():
            nn.init.constant_(parameter, start)
    settings = {"likelihood": Gaussian(std=NOISE), "prior": GaussianPrior(std=1.0), "seed": 0}
    module = BayesianModule(net=net, sampler=functools.partial(SGHMC, friction=0.1), lr=lr, **(settings | options))
    energies = Energies()
    schedule = SamplingSchedule(burn_in_steps=burn_in, every_n_steps=every) if schedule is None else schedule
    health = ChainHealth(every_n_steps=2)
    callbacks = [schedule, SampleCollector(in_memory=True), BayesianModelAverage(), health, energies]
    with silenced("pytorch_lightning"), tempfile.TemporaryDirectory() as folder:
        run = pl.Trainer(
            max_steps=steps,
            accelerator="cpu",
            callbacks=callbacks,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            check_val_every_n_epoch=10**6,
            **(trainer or {}),
        )
        with contextlib.suppress(NonFiniteEnergyError):
            run.fit(module, datamodule=curve(batch_size=batch_size) if data is None else data)
    module.__dict__["energies"] = torch.stack(energies.lines) if energies.lines else torch.empty(0, 1)
    return module


def words(module: Any, kind: str = "") -> str:
    """Return the finding of a kind, else the first one, or what the samples are."""
    found = sorted(module.health.findings, key=lambda finding: finding.kind.value != kind)
    if found:
        return f"ChainHealth: {found[0].text}."
    called = module.health.kind or "of a kind that was not measurable"
    return f"No finding. The samples are: {called} ({module.health.reason})."


def comparison(before: Any, after: Any, kind: str = "") -> str:
    """Return both runs as HTML: energies, temperatures, and the finding of a kind."""
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    axes = figure.subplots(2, 2, gridspec_kw={"height_ratios": [2, 1.4]}, squeeze=False)
    for column, (name, module) in enumerate((("before", before), ("after the cure", after))):
        upper, lower = axes[:, column]
        energies = module.energies
        for chain in range(energies.shape[1]):
            line = energies[:: max(1, len(energies) // 300), chain]
            upper.plot(range(0, len(energies), max(1, len(energies) // 300)), line, color="black", linewidth=0.6)
        upper.set(title=name, xlabel="step", ylabel="energy (nats)")
        if len(energies) and float(energies.max()) > 50 * abs(float(energies.median())) + 1e3:
            upper.set_yscale("symlog")
            locator = SymmetricalLogLocator(base=10, linthresh=1)
            locator.set_params(numticks=6)
            upper.yaxis.set_major_locator(locator)
        _temperatures(lower, module.health)
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg")
    svg = drawn.getvalue()[drawn.getvalue().index("<svg") :]
    svg = svg.replace("<svg ", "<svg style=max-width:100%;height:auto ", 1)
    parts = [f'<figure style="background:white;max-width:100%">{svg}</figure>']
    for name, module in (("Before", before), ("After the cure", after)):
        text = html.escape(f"{name}. {words(module, kind)}")
        parts.append(f'<pre style="white-space:pre-wrap">{text}</pre>')
    return "\n".join(parts)


def _temperatures(axes: Any, report: Any) -> None:
    target = report.temperature or 1.0
    axes.axvspan(0.8 * target, 1.2 * target, color="0.9")
    rows = [(name, entry) for name, entry in report.tensors.items()][:4]
    for row, (_, entry) in enumerate(rows):
        for kind, colour, shift in (("kinetic", KINETIC, 0.12), ("configurational", CONFIGURATIONAL, -0.12)):
            value, interval = entry.measured(kind)
            if value is not None and interval is not None:
                low, high = max(interval[0], target / 50), min(interval[1], target * 50)
                value = min(max(value, target / 50), target * 50)
                axes.plot([low, high], [row + shift] * 2, color=colour)
                axes.plot(value, row + shift, "o", color=colour, markersize=4, label=kind if row == 0 else None)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize="small")
    axes.set(xlabel="temperature (grey: the target ± 20 %)", ylim=(-0.6, max(len(rows), 1) - 0.4), xscale="log")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize="small")


logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
torch.set_num_threads(1)
