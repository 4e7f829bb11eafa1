"""Ten stacked chains in one fit: `python -m tests.benchmarks.chains`.

MLP 784-100-10, batch 100. One `Trainer.fit` of 10 stacked chains against 10 fits of one chain each, and against a
bare loop of torch over 10 networks that does the same work: a batch of its own for each network, forward, backward and
the library's own update (SGHMC with its noise), without a trainer. Seconds a step of all ten, from the first to the
last step; the alternatives run in turns.
"""

import argparse
import statistics
import tempfile
import time

import pytorch_lightning as pl
import torch
from torch import nn

from lightning_sgmcmc import SGHMC, BayesianModule, Categorical
from lightning_sgmcmc.batches.loader import ResumableLoader
from lightning_sgmcmc.batches.orders import BatchOrder, OrderSpec
from lightning_sgmcmc.datamodules import TensorBatches
from lightning_sgmcmc.datamodules.base import evaluation_loader
from tests.benchmarks.networks import mlp
from tests.benchmarks.timing import interleaved, ratios
from tests.benchmarks.trainer_step import QUIET, Clock, all_callbacks

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


def run(rounds: int, steps: int, callbacks: bool) -> None:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--callbacks", action="store_true", help="collector, average and dashboard on")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    run(options.rounds, options.steps, options.callbacks)


if __name__ == "__main__":
    main()
