"""A sampler's step against torch's SGD and the noise that must be drawn: `python -m tests.benchmarks.sampler_step`.

Prints, for networks of 80 thousand, 270 thousand and 11 million parameters, the time of a step over the time of the
step of the torch optimizer that it is at temperature 0 plus one `normal_` into a kept flat buffer of the parameters'
size, all in turns in one process. The noise is drawn in the step itself, not ahead in a thread, which this loop without
gradients would leave nothing to do beside.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any

import torch

from lightning_sgmcmc.samplers import SGHMC, SGLD, SGNHT, UnderdampedLangevin, pSGLD
from tests.benchmarks.networks import mlp, resnet18, resnet20
from tests.benchmarks.timing import interleaved, ratios, timed

NETWORKS = {"80k (MLP)": (mlp, 200), "270k (ResNet-20)": (resnet20, 60), "11M (ResNet-18)": (resnet18, 4)}
REFERENCES = {
    "SGD": torch.optim.SGD,
    "momentum SGD": functools.partial(torch.optim.SGD, momentum=0.9),
    "RMSprop": torch.optim.RMSprop,
}
SAMPLERS = {"SGLD": SGLD, "pSGLD": pSGLD, "SGHMC": SGHMC, "UnderdampedLangevin": UnderdampedLangevin, "SGNHT": SGNHT}


def _parameters(build: Callable[[], torch.nn.Module], device: str) -> list[torch.nn.Parameter]:
    parameters = list(build().to(device).parameters())
    for p in parameters:
        p.grad = torch.randn_like(p)
    return parameters


def _reference(
    build: Callable[[], torch.nn.Module], optimizer_class: Any, count: int, device: str
) -> Callable[[], float]:
    parameters = _parameters(build, device)
    optimizer = optimizer_class(parameters, lr=1e-4)
    buffer = torch.empty(sum(p.numel() for p in parameters), device=device)
    generator = torch.Generator(device=device).manual_seed(0)

    def step() -> None:
        optimizer.step()
        buffer.normal_(generator=generator)

    return lambda: _synchronised(step, count, device)


def _sampler(build: Callable[[], torch.nn.Module], sampler: Any, count: int, device: str) -> Callable[[], float]:
    optimizer = sampler(_parameters(build, device), lr=1e-4, num_data=50_000, noise_ahead=False)
    return lambda: _synchronised(optimizer.step, count, device)


def _synchronised(step: Callable[[], object], count: int, device: str) -> float:
    def finish() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    step()
    finish()
    seconds = timed(step, count - 1)
    finish()
    return seconds


def run(device: str = "cpu", rounds: int = 15) -> list[tuple[str, str, str, float, float, float]]:
    """Return rows of network, sampler, torch's optimizer, and the median, least and largest ratio."""
    rows = []
    for network, (build, count) in NETWORKS.items():
        count = count if device == "cpu" else 200
        alternatives = {
            **{name: _reference(build, optimizer, count, device) for name, optimizer in REFERENCES.items()},
            **{name: _sampler(build, sampler, count, device) for name, sampler in SAMPLERS.items()},
        }
        seconds = interleaved(alternatives, rounds)
        for name in SAMPLERS:
            reference = {"SGLD": "SGD", "pSGLD": "RMSprop"}.get(name, "momentum SGD")
            rows.append((network, name, reference, *ratios(seconds, name, reference)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print("| parameters | sampler | against | ratio | least | largest |\n|---|---|---|---|---|---|")
    for network, name, reference, median, least, largest in run(options.device, options.rounds):
        print(f"| {network} | {name} | {reference} + noise | {median:.2f} | {least:.2f} | {largest:.2f} |")


if __name__ == "__main__":
    main()
