"""What ChainHealth costs a step: `python -m tests.benchmarks.chain_health`.

The seconds spent inside its hooks are summed over a fit and divided by the steps, reports apart, beside the seconds of
a whole step of the same fit. Waits for a device would be counted too, but there are none on a CPU.
"""

import argparse
import time
from typing import Any

import torch

from lightning_sgmcmc import SGHMC, SGLD, BayesianModule, Categorical, pSGLD
from lightning_sgmcmc.callbacks import ChainHealth, CyclicalSchedule
from lightning_sgmcmc.datamodules import TensorBatches
from tests.benchmarks.trainer_step import CASES, _fit


class TimedHealth(ChainHealth):
    """Adds up the seconds of its hooks."""

    def __init__(self) -> None:
        super().__init__(warn=False)
        self.in_steps = self.in_reports = 0.0

    def on_before_optimizer_step(self, *args: Any) -> None:
        start = time.perf_counter()
        super().on_before_optimizer_step(*args)
        self.in_steps += time.perf_counter() - start

    def on_train_batch_end(self, *args: Any) -> None:
        start = time.perf_counter()
        super().on_train_batch_end(*args)
        self.in_steps += time.perf_counter() - start

    def _report(self, *args: Any, **options: Any) -> None:
        start = time.perf_counter()
        super()._report(*args, **options)
        self.in_reports += time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the usual number of steps")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print("| network | sampler | step µs | ChainHealth µs a step | share | reports ms |")
    print("|---|---|---|---|---|---|")
    for case, (build, shape, batch, usual) in CASES.items():
        steps = max(2, int(usual * 4 * options.scale))
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(batch * 60, *shape, generator=generator)
        data = TensorBatches(x, torch.randint(10, (batch * 60,), generator=generator))
        for sampler in (SGLD, SGHMC, pSGLD):
            module = BayesianModule(net=build(), likelihood=Categorical(), sampler=sampler, lr=0.001)
            health = TimedHealth()
            schedule = CyclicalSchedule(num_cycles=1, exploration=0.0, samples_per_cycle=1)
            step = _fit(module, [schedule, health], data, batch, steps) * 1e6
            cost = health.in_steps / steps * 1e6
            print(
                f"| {case} | {sampler.__name__} | {step:.0f} | {cost:.1f} | {cost / step:.1%} | "
                f"{health.in_reports * 1e3:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
