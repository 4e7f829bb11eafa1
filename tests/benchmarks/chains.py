"""Ten stacked chains in one fit: `python -m tests.benchmarks.chains` (CPU) or `… --device cuda`.

CPU: MLP 784-100-10, batch 100. One `Trainer.fit` of 10 stacked chains against 10 fits of one chain each, and against a
bare loop of torch over 10 networks that does the same work: a batch of its own for each network, forward, backward and
the library's own update (SGHMC with its noise), without a trainer. Seconds a step of all ten, from the first to the
last step; the alternatives run in turns.

CUDA: ResNet-20, batch 128, bfloat16, data on the device. 4 and 16 compiled stacked chains with all callbacks against
plain Lightning with SGD on one eager network of the same kind.
"""

import argparse
import statistics
import tempfile
import time
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn

from lightning_sgmcmc import SGHMC, BayesianModule, Categorical
from lightning_sgmcmc.batches.loader import ResumableLoader
from lightning_sgmcmc.batches.order import BatchOrder, OrderSpec
from lightning_sgmcmc.datamodules import TensorBatches
from lightning_sgmcmc.datamodules.augmentation import Augmentation
from lightning_sgmcmc.datamodules.loading import evaluation_loader
from tests.benchmarks.networks import mlp, resnet20
from tests.benchmarks.timing import interleaved, ratios
from tests.benchmarks.trainer_step import QUIET, Clock, PlainModule, all_callbacks

CHAINS = 10
BATCH = 100


def data() -> TensorBatches:
    generator = torch.Generator().manual_seed(0)
    count = BATCH * 60
    return TensorBatches(torch.randn(count, 784, generator=generator), torch.randint(10, (count,), generator=generator))


def fit(dataset: TensorBatches, chains: int, steps: int, callbacks: bool) -> float:
    """Return the seconds a step of a fit."""
    clock = Clock()
    module = BayesianModule(net=mlp(), likelihood=Categorical(), sampler=SGHMC, lr=0.01, num_chains=chains, seed=1)
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            accelerator="cpu",
            max_steps=steps + 5,
            callbacks=[*(all_callbacks(folder) if callbacks else []), clock],
            **QUIET,
        )
        held_out = TensorBatches(*(tensor[:BATCH] for tensor in dataset.tensors))
        trainer.fit(module, ResumableLoader(dataset, BATCH), evaluation_loader(held_out, BATCH))
    return clock.per_step


def bare(dataset: TensorBatches, chains: int, steps: int) -> float:
    """Return the seconds a step of a loop over networks, each with a batch and a sampler of its own."""
    networks = [mlp() for _ in range(chains)]
    count = len(dataset)
    samplers = [
        SGHMC(net.parameters(), lr=0.01, num_data=count, seed=1, first_chain=chain)
        for chain, net in enumerate(networks)
    ]
    orders = [BatchOrder(OrderSpec(count, BATCH, 1, chain)) for chain in range(chains)]
    images, labels = dataset.tensors
    decay = 1 / count
    start = 0.0
    for step in range(steps + 5):
        if step == 5:
            start = time.perf_counter()
        for net, sampler, order in zip(networks, samplers, orders, strict=True):
            index = order.indices(step)
            loss = nn.functional.cross_entropy(net(images[index]), labels[index])
            loss = loss + decay / 2 * sum(p.square().sum() for p in net.parameters())
            sampler.zero_grad()
            loss.backward()
            sampler.step()
    return (time.perf_counter() - start) / steps


def on_cpu(rounds: int, steps: int, callbacks: bool) -> None:
    dataset = data()
    seconds = interleaved(
        {
            "stacked": lambda: fit(dataset, CHAINS, steps, callbacks),
            "separate": lambda: CHAINS * statistics.mean(fit(dataset, 1, steps, callbacks) for _ in range(2)),
            "bare": lambda: bare(dataset, CHAINS, steps),
        },
        rounds,
    )
    for name, values in seconds.items():
        print(f"{name}: {statistics.median(values) * 1e3:.2f} ms a step of {CHAINS} chains")
    for reference in ("separate", "bare"):
        middle, least, largest = ratios(seconds, "stacked", reference)
        print(f"stacked/{reference}: {middle:.3f} ({least:.3f} to {largest:.3f})")


def fit_on_cuda(chains: int | None, steps: int) -> float:
    """Return the seconds a step of stacked chains with everything on, or (None) of plain SGD on one eager network."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (50_000, 3, 32, 32), dtype=torch.uint8, generator=generator).cuda()
    augmentation = Augmentation(lambda x: x.float() / 255, padding=4, flip=True, erasing=0.5)
    dataset = TensorBatches(images, torch.randint(10, (50_000,), generator=generator).cuda(), transform=augmentation)
    held_out = TensorBatches(*(t[:1000] for t in dataset.tensors), transform=lambda x: x.float() / 255)
    clock = CudaClock()
    with tempfile.TemporaryDirectory() as folder:
        module: Any
        callbacks: list[pl.Callback] = []
        if chains is None:
            module = PlainModule(resnet20())
        else:
            module = BayesianModule(
                net=resnet20(), likelihood=Categorical(), sampler=SGHMC, lr=0.1, num_chains=chains, compile=True
            )
            callbacks = all_callbacks(folder)
        trainer = pl.Trainer(
            accelerator="gpu",
            devices=1,
            precision="bf16-mixed",
            max_steps=steps + WARM_UP,
            callbacks=[*callbacks, clock],
            **QUIET,
        )
        loader = ResumableLoader(dataset, 128, drop_last=True)
        trainer.fit(module, loader, evaluation_loader(held_out, 500))
    return clock.seconds / steps


WARM_UP = 30


class CudaClock(pl.Callback):
    """Seconds from the end of the warm-up to the end of the last step but one, the device waited for at both."""

    def __init__(self) -> None:
        self.start = self.seconds = 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step in (WARM_UP, trainer.max_steps):
            torch.cuda.synchronize()
            self.seconds = time.perf_counter() - self.start
            self.start = time.perf_counter()


def on_cuda(rounds: int, steps: int) -> None:
    alternatives = {"plain": None, "4 chains": 4, "16 chains": 16}
    seconds = interleaved(
        {name: lambda chains=chains: fit_on_cuda(chains, steps) for name, chains in alternatives.items()},  # type: ignore[misc]
        rounds,
    )
    for name, values in seconds.items():
        print(f"{name}: {statistics.median(values) * 1e3:.2f} ms a step")
    for name in ("4 chains", "16 chains"):
        middle, least, largest = ratios(seconds, name, "plain")
        print(f"{name}/plain: {middle:.3f} ({least:.3f} to {largest:.3f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--callbacks", action="store_true", help="CPU: collector, average and dashboard on")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.device == "cuda":
        on_cuda(options.rounds, options.steps)
    else:
        on_cpu(options.rounds, options.steps, options.callbacks)


if __name__ == "__main__":
    main()
