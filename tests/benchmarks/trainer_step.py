"""A step of `Trainer.fit` beside plain Lightning with torch's optimizer: `python -m tests.benchmarks.trainer_step`.

Fits of the same network on the same in-memory data by whole batches make one step each in turn, in threads of one
process, so that all meet the same machine; times are of the processor, without what happens once an epoch. They sample
the same posterior: plain Lightning has the weight decay that is the prior. "services" is plain Lightning with a logger,
a checkpoint and a progress bar; "sampler" is a fit of ours with nothing beside it, "everything" one with these
services, a schedule, samples, the model average, `ChainHealth`, the dashboard and the summary. The noise (one `normal_`
of the parameters' size, which takes its turns too) is taken off in the last columns, since no sampler can do without
it. C chains stand beside C times plain Lightning. `--profile` prints where the time of a fit with everything goes.
"""

import argparse
import contextlib
import cProfile
import io
import pstats
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import CSVLogger
from torch import nn

from lightning_sgmcmc import SGHMC, BayesianModule, Categorical, pSGHMC
from lightning_sgmcmc.batches.loader import ResumableLoader
from lightning_sgmcmc.callbacks import (
    BayesianModelAverage,
    ChainHealth,
    CyclicalSchedule,
    PosteriorDashboard,
    RunSummary,
    SampleCollector,
)
from lightning_sgmcmc.chains import weights
from lightning_sgmcmc.datamodules import TensorBatches
from lightning_sgmcmc.datamodules.base import evaluation_loader
from tests.benchmarks.networks import Transformer, mlp, resnet20, wide_mlp
from tests.benchmarks.timing import measure_quietly

Network = tuple[Callable[[], nn.Module], tuple[int, ...], int, int]
"""What makes it, the shape of a datum, the size of a batch, and the steps of a fit."""
CASES: dict[str, Network] = {
    "MLP 784-100-10, batch 100": (mlp, (784,), 100, 600),
    "ResNet-20, batch 128": (resnet20, (3, 32, 32), 128, 24),
}
LARGER: dict[str, Network] = {
    "MLP 784-400-400-10, batch 128": (wide_mlp, (784,), 128, 200),
    "ResNet-20 of 16x16, batch 128": (resnet20, (3, 16, 16), 128, 24),
    "transformer, 32 tokens, batch 16": (Transformer, (32,), 16, 80),
}
"""Networks that are not small."""
SAMPLERS: dict[str, tuple[Any, Any]] = {
    "SGHMC": (SGHMC, partial(torch.optim.SGD, lr=0.001, momentum=0.9, weight_decay=1e-4)),
    "pSGHMC": (pSGHMC, partial(torch.optim.Adam, lr=0.001, weight_decay=1e-4)),
}
"""By name: a sampler, and torch's optimizer of its kind."""
WARM_UP = 5


QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "log_every_n_steps": 50,
}
"""Options of a trainer that writes nothing."""


def all_callbacks(folder: str) -> list[pl.Callback]:
    """Return what a run has beside its sampler, with one sample at its end, kept below a folder."""
    return [
        CyclicalSchedule(num_cycles=1, exploration=0.0, samples_per_cycle=1),
        SampleCollector(folder + "/samples"),
        BayesianModelAverage(),
        PosteriorDashboard(figures=()),
        RunSummary(),
    ]


class Clock(pl.Callback):
    """Measures the seconds from the end of the warm-up to the end of the training, evaluations of samples included."""

    def __init__(self) -> None:
        self.start = 0.0
        self.seconds = 0.0
        self.steps = 0

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == WARM_UP:
            self.start = time.perf_counter()
        self.steps = trainer.global_step - WARM_UP
        self.seconds = time.perf_counter() - self.start

    @property
    def per_step(self) -> float:
        return self.seconds / self.steps


class PlainModule(pl.LightningModule):
    """The same network trained by one of torch's optimizers, by default SGD."""

    def __init__(self, net: nn.Module, optimizer: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.net = net
        self.optimizer = optimizer or partial(torch.optim.SGD, lr=0.01, momentum=0.9)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/nll", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())


def _fit(
    module: pl.LightningModule, callbacks: list[pl.Callback], data: TensorBatches, batch: int, steps: int
) -> float:
    clock = Clock()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=steps + WARM_UP,
        callbacks=[*callbacks, clock],
        **QUIET,
    )
    held_out = TensorBatches(*(tensor[:batch] for tensor in data.tensors))
    trainer.fit(module, ResumableLoader(data, batch), evaluation_loader(held_out, batch))
    return clock.per_step


# -- steps in turn -----------------------------------------------------------------------------------------------------


class Turns:
    """Lets functions in threads go on one after another, and measures the processor's seconds of each one's turns."""

    def __init__(self, names: list[str]) -> None:
        self.seconds: dict[str, list[float]] = {name: [] for name in names}
        self._ring = list(names)
        """The one whose turn it is, and the others in their order."""
        self._changed = threading.Condition()

    def run(self, functions: dict[str, Callable[[Callable[[], None]], None]]) -> None:
        """Run the functions, each of which is given what it calls at the end of a turn."""
        threads = [threading.Thread(target=self._in_turn, args=item) for item in functions.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _in_turn(self, name: str, function: Callable[[Callable[[], None]], None]) -> None:
        begun = 0.0

        def wait() -> None:
            nonlocal begun
            with self._changed:
                self._changed.wait_for(lambda: self._ring[0] == name)
            begun = time.thread_time()

        def pass_on() -> None:
            self.seconds[name].append(time.thread_time() - begun)
            with self._changed:
                self._ring.append(self._ring.pop(0))
                self._changed.notify_all()
            wait()

        torch.set_num_threads(1)  # holds for a thread
        wait()
        try:
            function(pass_on)
        finally:
            with self._changed:
                self._ring.remove(name)
                self._changed.notify_all()


class EndsTurn(pl.Callback):
    """Calls a function after each step."""

    def __init__(self, call: Callable[[], None], profile: cProfile.Profile | None = None) -> None:
        self._call = call
        self._profile = profile

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self._call()
        if self._profile is not None and trainer.global_step == WARM_UP:
            self._profile.enable()
        if self._profile is not None and trainer.global_step == trainer.max_steps:
            self._profile.disable()


class Case:
    """Fits of one network with one sampler and some chains."""

    def __init__(self, network: str, sampler: str, chains: int) -> None:
        self._build, shape, self._batch, self._steps = (CASES | LARGER)[network]
        self._sampler, self._optimizer = SAMPLERS[sampler]
        self._chains = chains
        count, generator = self._batch * (self._steps + WARM_UP), torch.Generator().manual_seed(0)
        x = torch.randn(count, *shape, generator=generator)
        if self._build is Transformer:
            x = torch.randint(Transformer.tokens, (count, *shape), generator=generator)
        self._data = TensorBatches(x, torch.randint(10, (count,), generator=generator))

    def seconds(self) -> dict[str, list[float]]:
        """Return the seconds of each step of each fit, those of plain Lightning times the number of chains."""
        fits = {"plain": self.plain, "services": self.services, "noise": self.noise, "sampler": self.sampler}
        fits["everything"] = self.everything
        turns, shown = Turns(list(fits)), io.StringIO()
        with contextlib.redirect_stderr(shown), contextlib.redirect_stdout(shown):
            turns.run(fits)
        for name, seconds in turns.seconds.items():
            each = self._chains if name in ("plain", "services") else 1
            turns.seconds[name] = [each * step for step in seconds[WARM_UP : WARM_UP + self._steps]]
        return turns.seconds

    def plain(self, after_step: Callable[[], None]) -> None:
        """Fit by torch's optimizer."""
        self._fit(PlainModule(self._build(), self._optimizer), [EndsTurn(after_step)])

    def services(self, after_step: Callable[[], None]) -> None:
        """The same with a logger, a checkpoint and a progress bar."""
        self._fit(PlainModule(self._build(), self._optimizer), [EndsTurn(after_step)], with_services=True)

    def _module(self) -> BayesianModule:
        sampler = partial(self._sampler, noise_ahead=False)
        return BayesianModule(self._build(), Categorical(), 1.0, sampler, lr=0.001, num_chains=self._chains, seed=0)

    def sampler(self, after_step: Callable[[], None]) -> None:
        """Fit by the sampler alone."""
        self._fit(self._module(), [EndsTurn(after_step)])

    def everything(self, after_step: Callable[[], None], profile: cProfile.Profile | None = None) -> None:
        """Fit with everything on."""
        with tempfile.TemporaryDirectory() as folder:
            own = [*all_callbacks(folder), ChainHealth(), EndsTurn(after_step, profile)]
            self._fit(self._module(), own, with_services=True)

    def noise(self, after_step: Callable[[], None]) -> None:
        """Draw the normal numbers of each step."""
        size = sum(p.numel() for p in self._build().parameters())
        buffer, generator = torch.empty(self._chains, size), torch.Generator()
        for _ in range(self._steps + WARM_UP):
            for row in buffer:
                row.normal_(generator=generator)
            after_step()

    def _fit(self, module: pl.LightningModule, callbacks: list[pl.Callback], with_services: bool = False) -> None:
        with tempfile.TemporaryDirectory() as folder:
            options = dict(QUIET)
            if with_services:
                options |= {"logger": CSVLogger(folder), "enable_checkpointing": True, "enable_progress_bar": True}
            steps = self._steps + WARM_UP
            trainer = pl.Trainer(accelerator="cpu", max_steps=steps, callbacks=callbacks, **options)
            held_out = TensorBatches(*(tensor[: self._batch] for tensor in self._data.tensors))
            loaders = ResumableLoader(self._data, self._batch), evaluation_loader(held_out, self._batch)
            trainer.fit(module, *loaders)


def main() -> None:
    known = CASES | LARGER
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--networks", nargs="+", default=[*LARGER], help=f"beginnings of {', '.join(known)}")
    parser.add_argument("--samplers", nargs="+", default=[*SAMPLERS], choices=SAMPLERS)
    parser.add_argument("--chains", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    weights.LAST = WARM_UP - 1  # the last batch that is looked at
    measure_quietly()
    head = "| network | sampler | chains | plain ms | noise ms | services | sampler | everything | sampler less noise |"
    print(f"{head} everything less noise |\n{'|---' * 10}|")
    chosen = [name for name in known if any(name.startswith(asked) for asked in options.networks)]
    for name, sampler, chains in ((n, s, c) for n in chosen for s in options.samplers for c in options.chains):
        case = Case(name, sampler, chains)
        if options.profile:
            profile = cProfile.Profile()
            case.everything(lambda: None, profile)
            pstats.Stats(profile).sort_stats("tottime").print_stats(40)
            continue
        seconds = case.seconds()
        for key in ("sampler", "everything"):
            pairs = zip(seconds[key], seconds["noise"], strict=True)
            seconds[f"{key} less noise"] = [step - noise for step, noise in pairs]
        cells = [f"{1e3 * statistics.median(seconds[key]):.2f}" for key in ("plain", "noise")]
        for key in ("services", "sampler", "everything", "sampler less noise", "everything less noise"):
            cells.append(f"{statistics.mean(seconds[key]) / statistics.mean(seconds['plain']):.3f}")
        print(f"| {name} | {sampler} | {chains} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
