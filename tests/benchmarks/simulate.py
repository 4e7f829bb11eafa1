"""The light loop against blackjax's scan: `python -m tests.benchmarks.simulate`.

SGLD and contour SGLD on a mixture of two Gaussians in the plane. blackjax (JAX on a CPU) runs one chain in a compiled
scan, which keeps every place; ours runs 1 to 1,000 chains in compiled blocks and keeps every thousandth. One thread
each, in turns. Needs uv, which makes blackjax's environment in the user's cache.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from lightning_sgmcmc.contour import Contour, ContourRules, DecayingStepSize
from lightning_sgmcmc.contour.partition import EnergyPartition
from lightning_sgmcmc.simulation import ContourRun, simulate
from lightning_sgmcmc.simulation.loop import CHUNK
from lightning_sgmcmc.simulation.targets import GaussianMixture

PEERS = Path(__file__).parent / "peers"
CHAINS = (1, 10, 100, 1000)
TARGET = GaussianMixture([0.5, 0.5], [[-2.0, 0.0], [2.0, 0.0]])
CONTOUR = ContourRun(Contour(EnergyPartition(2.0, 0.25, 50), ContourRules(0.75)), DecayingStepSize(0.01, 0, 0))
LR = 0.05


def ours(name: str, chains: int, scale: float) -> float:
    """Return chain-steps a second from the second chunk of steps to the last, so that compiling does not count."""
    contour = CONTOUR if name == "CSGLD" else None
    steps = max(20, int(scale * 300 / (1 + chains / 30))) * CHUNK
    times: list[float] = []

    def lr(k: int) -> float:
        if k % CHUNK == 1 and k > CHUNK:
            times.append(time.perf_counter())
        return LR

    simulate(TARGET, lr=lr, num_steps=steps, num_chains=chains, contour=contour, keep_every=1000, compile=True, seed=1)
    return chains * (len(times) - 1) * CHUNK / (times[-1] - times[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the usual number of steps")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sys.path.insert(0, str(PEERS))
    from environments import PEERS as KNOWN
    from environments import default_folder, prepare

    interpreter = prepare(next(peer for peer in KNOWN if peer.name == "blackjax"), default_folder())
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(
        [str(interpreter), str(PEERS / "mixture_blackjax.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    rates: dict[tuple[str, int], list[float]] = {}
    theirs: dict[str, list[float]] = {"SGLD": [], "CSGLD": []}
    for turn in range(options.rounds + 1):
        for name, measured in theirs.items():
            print(name, file=process.stdin, flush=True)
            answer = json.loads(process.stdout.readline())
            found = {chains: ours(name, chains, options.scale) for chains in CHAINS}
            if turn > 0:
                measured.append(answer)
                for chains, rate in found.items():
                    rates.setdefault((name, chains), []).append(rate)
    process.stdin.close()
    process.wait()
    print("| sampler | chains | ours, million chain-steps a second | over blackjax's one chain | least | largest |")
    print("|---|---|---|---|---|---|")
    for name, reference in theirs.items():
        print(f"| {name} | blackjax, 1 | {statistics.median(reference) / 1e6:.2f} | 1 | | |")
        for chains in CHAINS:
            ratios = [a / b for a, b in zip(rates[name, chains], reference, strict=True)]
            middle = statistics.median(rates[name, chains]) / 1e6
            print(
                f"| {name} | {chains} | {middle:.2f} | {statistics.median(ratios):.2f} | {min(ratios):.2f} | "
                f"{max(ratios):.2f} |"
            )


if __name__ == "__main__":
    main()
