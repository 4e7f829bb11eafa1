"""How time and memory grow with the data N and with the samples S, on one thread of a CPU (memory on Linux only).

    python -m tests.benchmarks.growth [--most 1e9]

Every row is a process of its own; its memory is the largest beyond that at its start.

* order: the first batch of 100 of an epoch, and one of the 1,000 after it, of one chain;
* own: a sample's own energy on a random batch of 100 of N data that nobody stores, the median of 20 samples;
* pass: log p(D|θ) of all N data at one state, in batches of 10,000, a datum;
* sums: what a new sample costs `Evaluation.single` and `weight_efficiency`, of five metrics, after S samples.
"""

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_sgmcmc import BayesianModule, Gaussian, ResumableLoader
from lightning_sgmcmc.batches import BatchOrder, OrderSpec
from lightning_sgmcmc.evaluation.loader_average import Evaluation
from lightning_sgmcmc.evaluation.passes import fresh_energies, full_energies
from tests.support.trainers import quiet_trainer

DATA = (10**6, 10**7, 10**8, 10**9)
OF_A_PASS = (10**6, 10**7)
SAMPLES = (10**2, 10**3, 10**4, 10**5)
METRICS = ("accuracy", "nll", "brier", "ece", "entropy")


class Rows(Dataset[Any]):
    """N rows that are computed when they are wanted."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        y = torch.tensor(indices, dtype=torch.float32)[:, None]
        return y.cos(), y.sin()


def as_it_is(batch: Any) -> Any:
    return batch


class AtTheEnd(pl.Callback):
    """Calls a function of trainer and module after the last step."""

    def __init__(self, function: Callable[[pl.Trainer, Any], Any]) -> None:
        self.function, self.found = function, ""

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        reset_peak()
        self.found = self.function(trainer, pl_module)


def order(count: int) -> str:
    made = BatchOrder(OrderSpec(count, 100, seed=0))
    start = time.perf_counter()
    made.indices(0)
    first = time.perf_counter()
    for batch in range(1, 1001):
        made.indices(batch)
    return f"{(first - start) * 1e3:.2f} ms, then {(time.perf_counter() - first) * 1e3:.1f} µs a batch"


def of_fit(count: int, batch_size: int, function: Callable[[pl.Trainer, Any], str]) -> str:
    module = BayesianModule(net=torch.nn.Linear(1, 1), likelihood=Gaussian(0.5), lr=1e-6)
    end = AtTheEnd(function)
    loader = ResumableLoader(Rows(count), batch_size, collate_fn=as_it_is)
    quiet_trainer(max_steps=1, callbacks=[end]).fit(module, loader)
    return end.found


def own(count: int) -> str:
    def median(trainer: pl.Trainer, module: Any) -> str:
        seconds = []
        for _ in range(20 if count < 10**8 else 3):
            start = time.perf_counter()
            fresh_energies(trainer, module.chains, module.sampler, True)
            seconds.append(time.perf_counter() - start)
        return f"{statistics.median(seconds) * 1e3:.1f} ms"

    return of_fit(count, 100, median)


def whole_pass(count: int) -> str:
    def of_datum(trainer: pl.Trainer, module: Any) -> str:
        start = time.perf_counter()
        full_energies(trainer, module.chains, True, "a benchmark")
        return f"{(time.perf_counter() - start) / count * 1e6:.2f} µs a datum"

    return of_fit(count, 10_000, of_datum)


def sums(count: int) -> str:
    evaluation = Evaluation()

    def add(place: int) -> None:
        evaluation.members.append({"chain": place % 4} | {name: float(place) for name in METRICS})
        evaluation.running.append({name: float(place) for name in METRICS})
        evaluation.log_weights.append(-1.0 / (1 + place % 7))

    for place in range(count):
        add(place)
    _ = evaluation.single, evaluation.weight_efficiency
    rounds = 50
    start = time.perf_counter()
    for place in range(count, count + rounds):
        add(place)
        _ = evaluation.single, evaluation.weight_efficiency
    return f"{(time.perf_counter() - start) / rounds * 1e6:.0f} µs a sample"


# -- a process for each ------------------------------------------------------------------------------------------------


PROCESS = Path("/proc/self")


def reset_peak() -> None:
    if (PROCESS / "clear_refs").exists():
        (PROCESS / "clear_refs").write_text("5")


def kilobytes(name: str) -> int:
    lines = (PROCESS / "status").read_text().splitlines() if (PROCESS / "status").exists() else []
    return next((int(line.split()[1]) for line in lines if line.startswith(name)), 0)


def measured(function: Callable[[int], str], count: int, queue: Any) -> None:
    torch.set_num_threads(1)
    reset_peak()
    before = kilobytes("VmRSS")
    found = function(count)
    queue.put(f"{found}; {(kilobytes('VmHWM') - before) / 1024:.0f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=float, default=max(DATA), help="the largest N")
    options = parser.parse_args()
    context: Any = multiprocessing.get_context("fork")
    for function, counts in ((order, DATA), (own, DATA), (whole_pass, OF_A_PASS), (sums, SAMPLES)):
        for count in counts:
            if count > options.most:
                continue
            queue = context.Queue()
            process = context.Process(target=measured, args=(function, count, queue))
            process.start()
            print(f"{function.__name__:10} {count:10.0e}  {queue.get()}", flush=True)
            process.join()


if __name__ == "__main__":
    main()
