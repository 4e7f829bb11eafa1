"""The cost of a contour per step: `python -m tests.benchmarks.contour_step`.

One process runs SGHMC under `Trainer.fit` with a schedule, alternately with `ContourGradient` and without. With ζ = 0
the multiplier is 1, so both runs follow one path, while the contour does all of its work.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch

from lightning_sgmcmc import SGHMC, BayesianModule, Categorical, ContourRules
from lightning_sgmcmc.callbacks import ContourGradient, SamplerCallback, SamplingSchedule
from lightning_sgmcmc.datamodules import TensorBatches
from tests.benchmarks.timing import interleaved, ratios
from tests.benchmarks.trainer_step import CASES, _fit


def _run(case: str, data: TensorBatches, steps: int, make: Callable[[], list[SamplerCallback]]) -> float:
    build, _, batch, _ = CASES[case]
    module = BayesianModule(net=build(), likelihood=Categorical(), sampler=SGHMC, lr=0.001)
    return _fit(module, [SamplingSchedule(every_n_steps=steps), *make()], data, batch, steps)


def _contour(num_bins: int) -> list[SamplerCallback]:
    rules = ContourRules(zeta=0.0, min_multiplier=-5.0, max_multiplier=5.0)
    return [ContourGradient(rules, num_bins, first_edge=0.0, width=100.0)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the usual number of steps")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print("| network | bins | off µs | on µs | on/off | least | largest |")
    print("|---|---|---|---|---|---|---|")
    for case, (_, shape, batch, usual) in CASES.items():
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(batch * 60, *shape, generator=generator)
        data = TensorBatches(x, torch.randint(10, (batch * 60,), generator=generator))
        variants: dict[str, Callable[[], list[SamplerCallback]]] = {
            "off": list,
            "200": partial(_contour, 200),
            "100000": partial(_contour, 100_000),
        }
        steps = max(2, round(usual * 2 * options.scale))
        seconds = interleaved(
            {name: partial(_run, case, data, steps, make) for name, make in variants.items()}, options.rounds
        )
        for name in ("200", "100000"):
            middle, least, largest = ratios(seconds, name, "off")
            off, on = (sorted(seconds[key])[options.rounds // 2] * 1e6 for key in ("off", name))
            print(
                f"| {case} | {name} | {off:.0f} | {on:.0f} | {middle:.3f} | {least:.3f} | {largest:.3f} |", flush=True
            )


if __name__ == "__main__":
    main()
