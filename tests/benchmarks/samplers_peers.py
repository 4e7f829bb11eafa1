"""Our samplers beside blackjax's and posteriors': `python -m tests.benchmarks.samplers_peers`.

The ill-conditioned Gaussian with a noisy gradient and the conjugate regression with mini-batches of the recipe
`samplers_bench`: the same sampler, step size, friction, batch size, starts, chains and numbers of steps. Ours runs in
the light loop, in blocks that take turns with the peers' blocks; the first block, of burn-in and compiling, does not
count. Seconds are of the processor, one thread each, batches' draws included, so that other programs disturb little.

The peers' step sizes are those of U itself, which is the form of the light loop: ε of SGLD, h of a sampler with a
momentum, α = η/h (`peers/turns.py`). On the Gaussian each program's stationary variance is compared with that of its
own update rule (`peers/stationary.py`), so an error in this map would show. Rules differ: ours moves the place by the
new momentum, theirs by the old one; blackjax's SGHMC draws new momenta, and one batch, for each eight steps.

Needs uv, which makes the peers' environments in the user's cache.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_sgmcmc.recipes.samplers_bench.chains import error_of
from lightning_sgmcmc.recipes.samplers_bench.methods import FRICTION, METHODS
from lightning_sgmcmc.recipes.samplers_bench.problems import Gaussian, LinearRegression, Problem
from lightning_sgmcmc.simulation import sample_sum, simulate
from tests.benchmarks.samplers_light_loop import STEPS, Diagonal, Pause, PausedGradient, RegressionSum

PEERS = Path(__file__).parent / "peers"
sys.path.insert(0, str(PEERS))
from environments import PEERS as KNOWN  # noqa: E402
from environments import default_folder, prepare  # noqa: E402
from stationary import variance  # noqa: E402
from turns import Case  # noqa: E402

BATCH, EVERY = 25, 16
GAUSSIAN, REGRESSION = "Gaussian", "linear regression"


@dataclass(frozen=True)
class Comparison:
    """A sampler that a peer has too.

    Attributes:
        sampler: our name.
        problem: "Gaussian" or "linear regression".
        factor: the step over the largest stable one, see `METHODS`.
        compiled: whether the light loop compiles.
        noisy: whether the gradient has noise.
    """

    sampler: str
    problem: str
    factor: float
    compiled: bool = False
    noisy: bool = True


COMPARISONS = (
    Comparison("SGLD", GAUSSIAN, 0.2, compiled=True),
    Comparison("SGHMC", GAUSSIAN, 0.08, compiled=True),
    Comparison("SGHMC", GAUSSIAN, 0.2, compiled=True),
    Comparison("BAOAB", GAUSSIAN, 0.2, compiled=True),
    Comparison("SGNHT", GAUSSIAN, 0.08, compiled=True),
    Comparison("MCLMC", GAUSSIAN, 0.08, compiled=True, noisy=False),
    Comparison("SGLD", REGRESSION, 0.2, compiled=True),
    Comparison("SGHMC", REGRESSION, 0.08, compiled=True),
    Comparison("BAOAB", REGRESSION, 0.2, compiled=True),
    Comparison("SGNHT", REGRESSION, 0.08, compiled=True),
)


class PeerProcess:
    """A peer's worker."""

    def __init__(self, name: str, folder: Path) -> None:
        interpreter = prepare(next(peer for peer in KNOWN if peer.name == name), default_folder())
        self.name, self._file = name, folder / f"{name}.npy"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self._process = subprocess.Popen(
            [str(interpreter), str(PEERS / f"samplers_{name}.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder / f"{name}.log").open("w"),
            text=True,
            env=environment,
        )
        self.description = self.ask(do="describe")

    def ask(self, **request: Any) -> dict[str, Any]:
        """Return the answer to a request.

        Raises:
            RuntimeError: with the peer's error.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        if "error" in answer:
            raise RuntimeError(f"{self.name}: {answer['error']}")
        return answer

    def block(self) -> tuple[float, Tensor]:
        """Return the seconds of a step, and the places (S, C, d)."""
        answer = self.ask(do="block", steps=STEPS, every=EVERY, file=str(self._file))
        return answer["seconds"] / STEPS, torch.from_numpy(np.load(self._file))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@dataclass
class Blocks:
    """A program's blocks: the seconds of a step, and the places (S, C, d)."""

    seconds: list[float] = field(default_factory=list)
    places: list[Tensor] = field(default_factory=list)

    def errors(self, problem: Problem) -> list[float]:
        """Return the error of each block behind the first."""
        return [error_of(problem.observe(one), problem) for one in self.places[1:]]

    def error(self, problem: Problem) -> float:
        """Return the error of all blocks behind the first."""
        return error_of(problem.observe(torch.cat(self.places[1:])), problem)


def compare(
    one: Comparison, peers: list[PeerProcess], rounds: int, chains: int, folder: Path
) -> tuple[Problem, dict[str, Blocks]]:
    """Run a comparison and return its problem, and the programs' blocks."""
    problem = Gaussian("isotropic", 1.0) if one.problem == GAUSSIAN else LinearRegression(BATCH)
    start = problem.start(chains, torch.Generator().manual_seed(1))
    scale = problem._scale if isinstance(problem, Gaussian) and one.noisy else 0.0
    arrays = {"start": start.numpy(), "scale": np.float32(scale)}
    if isinstance(problem, Gaussian):
        arrays["variances"] = problem.variances.numpy()
    elif isinstance(problem, LinearRegression):
        arrays |= {"inputs": problem.data.x.numpy(), "targets": problem.data.y.numpy()}
    np.savez(folder / "arrays.npz", **arrays)
    case = Case(one.problem, one.sampler, step_of(one, problem), FRICTION, BATCH, 1, str(folder / "arrays.npz"))
    found = {"ours": Blocks()} | {peer.name: Blocks() for peer in peers}
    for peer in peers:
        peer.ask(do="start", case=asdict(case))
    began = time.process_time()

    def pause() -> None:
        nonlocal began
        found["ours"].seconds.append((time.process_time() - began) / STEPS)
        for peer in peers:
            seconds, places = peer.block()
            found[peer.name].seconds.append(seconds)
            found[peer.name].places.append(places)
        began = time.process_time()

    places = ours(one, problem, start, scale, (rounds + 1) * STEPS, pause)
    pause()
    found["ours"].places = list(places.split(STEPS // EVERY))
    return problem, found


def step_of(one: Comparison, problem: Problem) -> float:
    """Return ε of SGLD, or h² of a sampler with a momentum."""
    known = METHODS[one.sampler]
    lr = known.step_size(one.factor, problem.stiffness, 1)
    return lr**2 if known.timed else lr


def ours(one: Comparison, problem: Problem, start: Tensor, scale: float, steps: int, pause: Pause) -> Tensor:
    """Return our places (S, C, d); `pause` is called between two blocks of steps."""
    known = METHODS[one.sampler]
    lr = known.step_size(one.factor, problem.stiffness, 1)
    sampler = known.build(lr, 1)
    if isinstance(problem, LinearRegression):
        target, marks = RegressionSum(problem), range(EVERY, steps + 1, EVERY)
        options: dict[str, Any] = {"lr": lr, "num_steps": steps, "num_chains": len(start), "initial": start, "seed": 1}
        estimator = PausedGradient(BATCH, pause)
        return sample_sum(target, sampler, estimator, at_steps=marks, compile=one.compiled, **options).positions
    assert isinstance(problem, Gaussian)

    def at(step: int) -> float:  # asked for whole chunks of steps, as each begins
        if step > 1 and (step - 1) % STEPS == 0:
            pause()
        return lr

    return simulate(
        Diagonal(problem.variances),
        sampler,
        lr=at,
        num_steps=steps,
        num_chains=len(start),
        gradient_noise=scale,
        initial=start,
        keep_every=EVERY,
        compile=one.compiled,
        seed=1,
    ).positions


def spread(values: list[float], digits: int = 2) -> str:
    """Return the median, and the least and the largest in brackets."""
    middle, least, largest = (f"{one:.{digits}f}" for one in (statistics.median(values), min(values), max(values)))
    return f"{middle} ({least} to {largest})"


def variances_of(one: Comparison, problem: Problem, program: str, blocks: Blocks) -> tuple[str, str]:
    """Return the mean over coordinates of the stationary variance over the posterior's: by formula, and measured."""
    if not isinstance(problem, Gaussian):
        return "", ""
    exact = problem.variances.double()
    scale = problem._scale if one.noisy else 0.0
    step = step_of(one, problem)
    known = [variance(program, one.sampler, 1 / float(v), scale, step, FRICTION) / float(v) for v in exact]
    of_chains = (torch.cat(blocks.places[1:]).double().square().mean(0) / exact).mean(1)  # (C,)
    error = float(of_chains.std() / len(of_chains) ** 0.5)
    formula = "" if np.isnan(known).any() else "unstable" if np.isinf(known).any() else f"{np.mean(known):.3f}"
    measured = f"{float(of_chains.mean()):.3f} ± {error:.3f}" if np.isfinite(error) and error < 1e3 else "diverged"
    return formula, measured


HEADER = [
    "problem",
    "sampler",
    "program",
    "error",
    "posterior variance ratio, by the rule",
    "measured",
    "µs a step",
    "our error over it",
    "our time over it",
]


def rows_of(one: Comparison, problem: Problem, found: dict[str, Blocks]) -> list[list[str]]:
    """Return the rows of a comparison: ours, and each peer's."""
    rows = []
    for program, blocks in found.items():
        error = blocks.error(problem)
        ratios = ["", ""]
        if program != "ours":
            mine = found["ours"]
            both = zip(mine.errors(problem), blocks.errors(problem), strict=True)
            times = [a / b for a, b in zip(mine.seconds[1:], blocks.seconds[1:], strict=True)]
            ratios = [spread([a / b for a, b in both]) if np.isfinite(error) else "0", spread(times)]
        what = f"{one.sampler}, {one.factor:g}" + (", full gradient" if not one.noisy else "")
        label = program + (", compiled" if program == "ours" and one.compiled else "")
        shown = f"{error:.3f}" if np.isfinite(error) and error < 1e3 else "diverged"
        micro = f"{1e6 * statistics.median(blocks.seconds[1:]):.0f}"
        rows.append([one.problem, what, label, shown, *variances_of(one, problem, program, blocks), micro, *ratios])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--chains", type=int, default=16)
    parser.add_argument("--only", nargs="+", help="parts of the comparisons' names: samplers, or problems")
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument("--out", type=Path, help="write the rows and versions there as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        peers = [PeerProcess(peer, folder) for peer in ("blackjax", "posteriors")]
        versions = {name: v for peer in peers for name, v in peer.description["versions"].items()}
        for one in COMPARISONS:
            if options.only and not any(part in f"{one.problem}, {one.sampler}" for part in options.only):
                continue
            own = [peer for peer in peers if one.sampler in peer.description["samplers"]]
            chosen = Comparison(**asdict(one) | {"compiled": one.compiled and not options.eager})
            rows += rows_of(chosen, *compare(chosen, own, options.rounds, options.chains, folder))
            print(*("| " + " | ".join(row) + " |" for row in rows[-len(own) - 1 :]), sep="\n", flush=True)
            if options.out is not None:
                content = {"versions": versions, "header": HEADER, "rows": rows}
                options.out.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        for peer in peers:
            peer.close()
    print("\n| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER), sep="\n")
    print(*("| " + " | ".join(row) + " |" for row in rows), sep="\n")
    print(", ".join(f"{name} {version}" for name, version in versions.items()))


if __name__ == "__main__":
    main()
