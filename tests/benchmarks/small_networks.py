"""A step of small networks under a trainer, against plain Lightning, a block written by hand and blackjax's scan.

`python -m tests.benchmarks.small_networks [--chains 1 4] [--networks 8-50-1] [--peers]`
`python -m tests.benchmarks.small_networks --fits FILE` times whole fits of 60,000 steps, compiled and not.
`python -m tests.benchmarks.small_networks --variates [--networks 8-50-1] [--chains 1 4]` times steps of runs with
`ControlVariates`, a snapshot every epoch or every tenth, in Lightning's loop ("step") and in blocks.

Every alternative makes steps of SGLD with the same network, data, batches of 50 and number of chains, on one thread, in
turns; the table has the least processor time of a step, in µs. "loop" is `chain_execution="loop"`, each chain bit for
bit as alone; "traced" and "compiled" are the forms of blocks; "by hand" is the same step without a library, ten of them
unrolled in one compiled function; blackjax runs in an environment of its own, and its scan takes batches by random
places.
"""

import argparse
import json
import math
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_sgmcmc import SGLD, BayesianModule, Categorical, Gaussian, GaussianPrior, HierarchicalPrior
from lightning_sgmcmc.callbacks import EWSG, AutoSampling, ControlVariates, SampleCollector, SamplingSchedule
from lightning_sgmcmc.datamodules import DatasetDataModule
from lightning_sgmcmc.fit import block_runs
from tests.benchmarks.peers.environments import Peer, default_folder, prepare
from tests.benchmarks.timing import measure_quietly

N, BATCH, UNROLLED = 1_000, 50, 10
NETWORKS: dict[str, list[int]] = {"8-50-1": [8, 50, 1], "13-50-50-1": [13, 50, 50, 1], "784-100-10": [784, 100, 10]}
CNN = "CNN 8x8"
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def problem(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a network and its data."""
    torch.manual_seed(0)
    if name == CNN:
        net = nn.Sequential(
            nn.Conv2d(1, 8, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16, 10),
        )
        return net, torch.randn(N, 1, 8, 8), torch.randint(0, 10, (N,))
    widths = NETWORKS[name]
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    x = torch.randn(N, widths[0])
    y = torch.randint(0, 10, (N,)) if widths[-1] > 1 else x[:, :1].sin()
    return nn.Sequential(*layers[:-1]), x, y


def plain(name: str, epochs: int) -> float:
    """Return the seconds of plain Lightning's SGD."""
    net, x, y = problem(name)

    class Plain(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss = nn.functional.cross_entropy if y.dtype == torch.int64 else nn.functional.mse_loss
            return loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    trainer = pl.Trainer(max_epochs=epochs, **QUIET)
    data = DatasetDataModule(TensorDataset(x, y), batch_size=BATCH)
    begun = time.process_time()
    trainer.fit(Plain(), datamodule=data)
    return time.process_time() - begun


WITH: dict[str, dict[str, Callable[[], pl.Callback]]] = {
    "variates": {
        "snapshot every epoch": ControlVariates,
        "snapshot every 10 epochs": partial(ControlVariates, every_n_epochs=10),
    },
    "ewsg": {"EWSG(1)": partial(EWSG, 1)},
}
"""Callbacks of steps that are timed too."""


def ours(name: str, chains: int, form: str, epochs: int, acting: Callable[[], pl.Callback] | None = None) -> float:
    """Return the seconds of a fit in a form, with a callback of its steps if there is one."""
    net, x, y = problem(name)
    block_runs.FEWEST = math.inf if form == "step" else 0
    block_runs.WORTH_COMPILING = 0 if form == "compiled" else math.inf
    likelihood = Categorical() if y.dtype == torch.int64 else Gaussian(0.1)
    way = "loop" if form == "loop" else "auto"
    module = BayesianModule(
        net, likelihood, GaussianPrior(1.0), sampler=SGLD, lr=1e-3, num_chains=chains, seed=0, chain_execution=way
    )
    schedule = SamplingSchedule(burn_in_epochs=epochs // 2, every_n_epochs=max(1, epochs // 10))
    callbacks = [schedule, *([] if acting is None else [acting()]), SampleCollector(in_memory=True)]
    trainer = pl.Trainer(max_epochs=epochs, callbacks=callbacks, **QUIET)
    begun = time.process_time()
    trainer.fit(module, datamodule=DatasetDataModule(TensorDataset(x, y), batch_size=BATCH))
    return time.process_time() - begun


class OfFits:
    """The seconds of a step of some batches, from the difference of a long and a short fit; of each the least of all
    calls."""

    def __init__(self, fit: Callable[[int], float], epochs: int, each: int = 1) -> None:
        self._fit = fit
        self._each = each
        self._least = {epochs: math.inf, epochs // 4: math.inf}

    def __call__(self) -> float:
        for epochs, least in self._least.items():
            self._least[epochs] = min(least, self._fit(epochs))
        (long, of_long), (short, of_short) = self._least.items()
        return (of_long - of_short) / ((long - short) * N / BATCH / self._each)


def by_hand(name: str, chains: int) -> Callable[[], float]:
    """Return what times the step written by hand."""
    net, x, y = problem(name)
    shapes, of_classes = [parameter.shape for parameter in net.parameters()], y.dtype == torch.int64
    sizes = [shape.numel() for shape in shapes]

    def output(parts: list[Tensor], out: Tensor) -> Tensor:
        if name == CNN:
            out = nn.functional.max_pool2d(torch.relu(nn.functional.conv2d(out, *parts[:2])), 2)
            return torch.relu(nn.functional.conv2d(out, *parts[2:4])).flatten(1) @ parts[4].T + parts[5]
        for place in range(0, len(parts), 2):
            out = out @ parts[place].T + parts[place + 1]
            out = torch.relu(out) if place + 2 < len(parts) else out
        return out

    def loss(theta: Tensor, rows: Tensor, targets: Tensor) -> Tensor:
        out = output([part.view(shape) for part, shape in zip(theta.split(sizes), shapes, strict=True)], rows)
        if of_classes:
            fit = nn.functional.cross_entropy(out, targets, reduction="sum")
        else:
            fit = ((targets - out) ** 2).sum() / (2 * 0.1**2)
        return fit / BATCH + (theta**2).sum() / 2 / N

    gradient = torch.func.vmap(torch.func.grad(loss))
    lr = 1e-3
    scale = (2 * lr / N) ** 0.5

    def block(theta: Tensor, places: Tensor, noise: Tensor) -> Tensor:
        for k in range(UNROLLED):
            theta = theta - lr * gradient(theta, x[places[k]], y[places[k]]) + scale * noise[k]
        return theta

    compiled, theta = torch.compile(block, dynamic=False), 0.1 * torch.randn(chains, sum(sizes))

    def run(steps: int = 500) -> float:
        nonlocal theta
        begun = time.process_time()
        for _ in range(steps // UNROLLED):
            places = torch.randint(0, N, (UNROLLED, chains, BATCH))
            theta = compiled(theta, places, torch.randn(UNROLLED, chains, sum(sizes)))
        return (time.process_time() - begun) / steps

    run(3 * UNROLLED)
    return run


def blackjax(name: str, chains: int, interpreter: Path) -> float:
    """Return the seconds of a step of blackjax's scan."""
    _, x, y = problem(name)
    case = {"widths": NETWORKS.get(name), "chains": chains, "batch": BATCH, "lr": 1e-3, "steps": 500}
    with tempfile.TemporaryDirectory() as folder:
        np.savez(f"{folder}/arrays.npz", inputs=x.numpy(), targets=y.numpy())
        worker = Path(__file__).parent / "peers" / "small_blackjax.py"
        command = [str(interpreter), str(worker), json.dumps(case), f"{folder}/arrays.npz"]
        found = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(found.stdout)["seconds"])


def whole_fits(epochs: int = 3_000) -> dict[str, float]:
    """Return the processor seconds of fits of one network 8-50-1, compiled (a second time in a process) and not."""
    torch.manual_seed(0)
    x = torch.randn(1_200, 8)
    y = x[:, :1].sin() + 0.1 * torch.randn(1_200, 1)
    train, val = TensorDataset(x[:N], y[:N]), TensorDataset(x[N:], y[N:])

    def fit(kind: str, compile: Any) -> float:
        net = nn.Sequential(nn.Linear(8, 50), nn.ReLU(), nn.Linear(50, 1))
        prior = GaussianPrior(1.0) if kind == "AutoSampling" else HierarchicalPrior()
        module = BayesianModule(net, Gaussian(0.3), prior, lr=1e-3, seed=0, compile=compile)
        schedule = (
            AutoSampling() if kind == "AutoSampling" else SamplingSchedule(burn_in_epochs=1_500, every_n_epochs=150)
        )
        limit = {} if kind == "AutoSampling" else {"limit_val_batches": 0}  # it validates after each epoch
        trainer = pl.Trainer(max_epochs=epochs, callbacks=[schedule, SampleCollector(in_memory=True)], **QUIET, **limit)
        begun = time.process_time()
        trainer.fit(module, datamodule=DatasetDataModule(train, val=val, batch_size=BATCH))
        return time.process_time() - begun

    seconds = {}
    for kind in ("AutoSampling", "HierarchicalPrior"):
        seconds[f"{kind}, first fit"] = fit(kind, "auto")
        seconds[f"{kind}, compiled"] = fit(kind, "auto")
        seconds[f"{kind}, not compiled"] = fit(kind, False)
    return seconds


def lengths(epochs: int, chains: int) -> dict[str, int]:
    """Return the epochs of each form's longer fit, by its speed."""
    return {"loop": max(8, epochs // chains), "traced": epochs, "compiled": 5 * epochs}


def with_callback(kind: str, networks: list[str], chains: list[int], epochs: int, rounds: int) -> None:
    """Print the processor time of a step with a callback of a kind, in each form."""
    forms = {"step": epochs // 2, "traced": 5 * epochs, "compiled": 5 * epochs}
    each = 2 if kind == "ewsg" else 1
    print(f"| network | chains | with | {' | '.join(forms)} |\n" + "|---" * (3 + len(forms)) + "|")
    for name in networks:
        for number in chains:
            for label, acting in WITH[kind].items():
                ours(name, number, "compiled", 24, acting)  # compiles
                fits = [partial(ours, name, number, form, acting=acting) for form in forms]
                timed = [OfFits(fit, longest, each) for fit, longest in zip(fits, forms.values(), strict=True)]
                least = [min(run() for _ in range(rounds)) for run in timed]
                cells = " | ".join(f"{1e6 * seconds:,.0f}" for seconds in least)
                print(f"| {name} | {number} | {label} | {cells} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--chains", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--networks", nargs="+", default=[*NETWORKS, CNN])
    parser.add_argument("--epochs", type=int, default=80)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", action="store_true", help="install blackjax in an environment, and time it too")
    parser.add_argument("--fits", type=Path, help="time whole fits instead, and write them to this file")
    parser.add_argument("--variates", action="store_true", help="time steps with control variates instead")
    parser.add_argument("--ewsg", action="store_true", help="time steps with EWSG of one proposal instead")
    options = parser.parse_args()
    measure_quietly()
    if options.fits is not None:
        found = {name: round(seconds, 1) for name, seconds in whole_fits().items()}
        options.fits.write_text(json.dumps({"processor seconds": found}, indent=1) + "\n")
        print(options.fits.read_text())
        return
    if options.variates or options.ewsg:
        kind = "variates" if options.variates else "ewsg"
        with_callback(kind, options.networks, options.chains, options.epochs, options.rounds)
        return
    interpreter = (
        prepare(Peer("blackjax", "", ("blackjax==1.7.1",), uses_torch=False), default_folder())
        if options.peers
        else None
    )
    print("| network | chains | Lightning SGD | loop | traced | compiled | by hand | blackjax |\n" + "|---" * 8 + "|")
    for name in options.networks:
        for chains in options.chains:
            alternatives: dict[str, Callable[[], float]] = {
                "plain": OfFits(partial(plain, name), options.epochs),
                **{
                    form: OfFits(partial(ours, name, chains, form), lengths(options.epochs, chains)[form])
                    for form in ("loop", "traced", "compiled")
                },
            }
            alternatives["by hand"] = by_hand(name, chains)
            if interpreter is not None:
                alternatives["blackjax"] = lambda: blackjax(name, chains, interpreter)  # noqa: B023
            least = {key: math.inf for key in alternatives}
            ours(name, chains, "compiled", 8)  # compiles
            for _ in range(options.rounds):
                for key, run in alternatives.items():
                    found = run()
                    least[key] = found if isinstance(run, OfFits) else min(least[key], found)
            columns = ("plain", "loop", "traced", "compiled", "by hand", "blackjax")
            cells = [f"{1e6 * least[key]:,.0f}" if key in least else "" for key in columns]
            print(f"| {name} | {chains} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
