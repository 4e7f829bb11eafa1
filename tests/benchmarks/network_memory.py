"""Memory of a large network's fit: `python -m tests.benchmarks.network_memory --numel 2e7`.

Prints the peak of resident memory in copies of all chains' parameters, for plain Lightning with torch's momentum SGD
and for samplers, each in a new process. It is counted over that of a process that has fitted a small network in the
same way, so the libraries' own memory is left out.
"""

import argparse
import os
import subprocess
import sys
import warnings
from pathlib import Path

import torch
from torch import nn

LIMITS = {"SGLD": -0.8, "SGHMC": 0.2, "pSGHMC": 2.0, "SGHMC, four chains": 0.4}
"""The most copies of the parameters beyond those of SGD with momentum; chains also hold prior gradients for a while."""
RUNS = ("plain", *LIMITS)
LAYERS, STEPS = 10, 4
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "1000000"}
"""For glibc, so that freed layers go back to the system at once, and the peak is not that of a fragmented heap."""


def memory(name: str) -> int:
    """Return a number of /proc/self/status in bytes, such as VmRSS or its peak VmHWM."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))


def network(numel: int) -> nn.Module:
    """A chain of square layers with about so many parameters together."""
    width = max(int((numel / LAYERS) ** 0.5), 4)
    layers = [nn.Linear(width, width, bias=False) for _ in range(LAYERS)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))


def fit(name: str, numel: int) -> int:
    """Fit a network for a few steps; return the number of parameters of all chains."""
    from pytorch_lightning import LightningModule

    from lightning_sgmcmc import SGHMC, SGLD, BayesianModule, Categorical, pSGHMC
    from tests.benchmarks.trainer_step import PlainModule
    from tests.support.trainers import quiet_trainer

    net = network(numel)
    width = net[0].in_features
    data = torch.utils.data.TensorDataset(torch.randn(32, width), torch.randint(0, width, (32,)))
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    rule, _, chains = name.partition(", ")
    module: LightningModule = PlainModule(net)
    if rule != "plain":
        sampler = {"SGLD": SGLD, "SGHMC": SGHMC, "pSGHMC": pSGHMC}[rule]
        count = 4 if chains else 1
        module = BayesianModule(
            net=net, likelihood=Categorical(), sampler=sampler, lr=1e-4, num_chains=count, shared_batch=True
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quiet_trainer(max_steps=STEPS).fit(module, loader)
    return sum(p.numel() for p in module.parameters())


def measure(name: str, numel: int) -> float:
    """Return the copies of the parameters at the peak of a fit in this process."""
    torch.set_num_threads(1)
    fit(name, 1000)
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    total = fit(name, numel)
    return (memory("VmHWM") - before) / (4 * total)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=float, default=2e7, help="parameters of a chain")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(measure(options.one, int(options.numel)))
        return
    print("| run | copies | at most |\n|---|---|---|", flush=True)
    plain = 0.0
    for name in options.runs:
        command = [sys.executable, "-m", "tests.benchmarks.network_memory", "--one", name, "--numel"]
        environment = os.environ | ALLOCATOR
        done = subprocess.run([*command, str(options.numel)], stdout=subprocess.PIPE, check=True, env=environment)
        copies = float(done.stdout.split()[-1])
        plain = copies if name == "plain" else plain
        limit = f"{plain + LIMITS[name]:.2f}" if name in LIMITS and plain else ""
        print(f"| {name} | {copies:.2f} | {limit} |", flush=True)


if __name__ == "__main__":
    main()
