"""What `Posterior.predict` costs against bare forward passes of as many networks, on one thread of a CPU.

    python -m tests.benchmarks.predict [--rounds 7] [--samples 6]

A row has the milliseconds of the bare passes, and the ratios to it of `predict`, of its network passes alone, and of
the same passes by `torch.vmap`, the way of a GPU: median (least to largest) over rounds in which all take turns.
"""

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import Tensor, nn

from lightning_sgmcmc import BayesianModule, Categorical, Posterior
from lightning_sgmcmc.chains import together
from lightning_sgmcmc.chains.samples import PosteriorSample
from lightning_sgmcmc.chains.together import States, TogetherCall
from lightning_sgmcmc.posterior.store import MemoryStore
from lightning_sgmcmc.recipes.shared.resnet import resnet20
from tests.benchmarks.timing import interleaved, ratios, timed


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 10))


def small_perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 2))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "20-50-2": (small_perceptron, (20,)),
    "784-400-400-10": (perceptron, (784,)),
    "ResNet-20": (resnet20, (3, 32, 32)),
}


def posterior_of(networks: list[nn.Module], make: Callable[[], nn.Module]) -> Posterior:
    """Return the posterior whose samples are these networks."""
    store = MemoryStore()
    for step, network in enumerate(networks):
        parameters = {f"net.{name}": p.detach() for name, p in network.named_parameters()}
        buffers = {f"net.{name}": b for name, b in network.named_buffers()}
        store.append(PosteriorSample(step, 0, 0, 0.0, parameters=parameters, buffers=buffers))
    return Posterior(store, BayesianModule(net=make(), likelihood=Categorical()))


@torch.no_grad()
def measure(name: str, batch: int, samples: int, rounds: int) -> str:
    """Return a row of the table."""
    make, shape = NETWORKS[name]
    networks = [make().eval() for _ in range(samples)]
    posterior, x = posterior_of(networks, make), torch.randn(batch, *shape)
    template = make().eval()
    states = States([{**dict(n.named_parameters()), **dict(n.named_buffers())} for n in networks])
    alone, at_once = (TogetherCall(template, lambda net, x: net(x)) for _ in range(2))

    def vmapped() -> list[Tensor]:
        return at_once._at_once(states, (x,))

    calls: dict[str, Callable[[], object]] = {
        "bare": lambda: [network(x) for network in networks],
        "predict": lambda: posterior.predict(x),
        "passes": lambda: list(alone(states, x)),
        "vmap": vmapped,
    }
    vmapped()
    once = timed(calls["bare"], 2)
    count = max(1, int(0.05 / once))
    seconds = interleaved({name: lambda call=call: timed(call, count) for name, call in calls.items()}, rounds)  # type: ignore[misc]
    shown = " | ".join("{:.2f} ({:.2f} to {:.2f})".format(*ratios(seconds, one, "bare")) for one in list(calls)[1:])
    return f"| {name} | {batch} | {statistics.median(seconds['bare']) * 1e3:.3g} | {shown} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--samples", type=int, default=6)
    options = parser.parse_args()
    torch.set_num_threads(1)
    assert not together.runs_at_once(torch.device("cpu"))
    print(f"| network | batch | {options.samples} bare passes, ms | predict | its passes | vmap |")
    print("|---|---|---|---|---|---|")
    for name in NETWORKS:
        for batch in (1, 100):
            print(measure(name, batch, options.samples, options.rounds), flush=True)


if __name__ == "__main__":
    main()
