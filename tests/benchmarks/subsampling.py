"""EWSG (M=1) against the plain sampler at the same number of gradients: `python -m tests.benchmarks.subsampling`.

Both take the same batches under the trainer; EWSG makes one step of two of them, and so half as many. Beside it, what
the plain sampler with accumulation over two batches takes: as many steps as EWSG's, without a choice.
"""

import argparse
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn

from lightning_sgmcmc import BayesianModule, Categorical, UnderdampedLangevin
from lightning_sgmcmc.batches.loader import ResumableLoader
from lightning_sgmcmc.callbacks import EWSG, SamplingSchedule
from lightning_sgmcmc.datamodules import TensorBatches
from tests.benchmarks.networks import mlp, resnet20
from tests.benchmarks.timing import interleaved, ratios
from tests.benchmarks.trainer_step import QUIET, Clock

CASES: dict[str, tuple[Any, tuple[int, ...], int, int]] = {
    "logistic regression 54-2, batch 50": (lambda: nn.Linear(54, 2), (54,), 50, 1200),
    "MLP 784-100-10, batch 100": (mlp, (784,), 100, 600),
    "ResNet-20, batch 128": (resnet20, (3, 32, 32), 128, 12),
}
"""Network, shape of an input, batch size, batches."""


def seconds_per_batch(case: str, device: str, ewsg: bool = False, accumulated: int = 1) -> float:
    """Return what a mini-batch's gradient takes, with its share of the steps."""
    build, shape, batch, batches = CASES[case]
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(batch * 60, *shape, generator=generator).to(device)
    data = TensorBatches(inputs, torch.randint(2, (batch * 60,), generator=generator).to(device))
    module = BayesianModule(
        net=build(),
        likelihood=Categorical(),
        sampler=partial(UnderdampedLangevin, friction=1.0),
        lr=1e-4,
        num_chains=1,
        seed=0,
    )
    each = 2 if ewsg else accumulated
    clock = Clock()
    callbacks: list[pl.Callback] = [SamplingSchedule(every_n_steps=10), *([EWSG(1)] if ewsg else []), clock]
    trainer = pl.Trainer(
        accelerator=torch.device(device).type,
        devices=1,
        max_steps=batches // each + 5,
        accumulate_grad_batches=accumulated,
        callbacks=callbacks,
        **QUIET,
    )
    trainer.fit(module, ResumableLoader(data, batch))
    return clock.per_step / each


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print("| network | plain µs a batch | EWSG / plain | least | largest | accumulation / plain |")
    print("|---|---|---|---|---|---|")
    for case in CASES:
        runs = {
            "plain": partial(seconds_per_batch, case, options.device),
            "EWSG": partial(seconds_per_batch, case, options.device, ewsg=True),
            "accumulation": partial(seconds_per_batch, case, options.device, accumulated=2),
        }
        seconds = interleaved(runs, options.rounds)
        middle, least, largest = ratios(seconds, "EWSG", "plain")
        plain = sorted(seconds["plain"])[options.rounds // 2] * 1e6
        accumulated = ratios(seconds, "accumulation", "plain")[0]
        print(f"| {case} | {plain:.0f} | {middle:.3f} | {least:.3f} | {largest:.3f} | {accumulated:.3f} |")


if __name__ == "__main__":
    main()
