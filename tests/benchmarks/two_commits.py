"""A step of two commits side by side, in turns: `python -m tests.benchmarks.two_commits OLD NEW`.

OLD and NEW are checkouts, each with its environment in `.venv`. Each case runs in a process of its own checkout; the
processes take turns with blocks of steps, so that a drift of the machine's speed hits both alike. The cases use only
what every version has: a fit by SGHMC with schedule, collector and model average on.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.benchmarks.timing import ratios

CASES = ("mlp", "mlp, four chains", "mlp, four chains, two micro-batches", "resnet20")
STEPS = {"resnet20": 12}

WORKER = """
import json, sys, time, warnings, logging
warnings.filterwarnings("ignore")
logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
import pytorch_lightning as pl, torch
from torch import nn
from lightning_sgmcmc import SGHMC, BayesianModule, Categorical, ResumableLoader
from lightning_sgmcmc.callbacks import BayesianModelAverage, SampleCollector, SamplingSchedule
from lightning_sgmcmc.datamodules import TensorBatches
case, steps, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
sys.path.insert(0, ".")
from tests.benchmarks.networks import mlp, resnet20
torch.set_num_threads(1)
torch.manual_seed(0)
small = case != "resnet20"
batch, shape = (100, (784,)) if small else (128, (3, 32, 32))
data = TensorBatches(torch.randn(batch * 40, *shape), torch.randint(10, (batch * 40,)))
module = BayesianModule(net=(mlp if small else resnet20)(), likelihood=Categorical(), sampler=SGHMC, lr=0.01, seed=0,
                        num_chains=4 if "four" in case else 1)

class Turns(pl.Callback):
    start = None
    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step % steps or trainer.fit_loop.epoch_loop._should_accumulate():
            return
        if self.start is not None:
            print(json.dumps((time.perf_counter() - self.start) / steps), flush=True)
        if not sys.stdin.readline():
            trainer.should_stop = True
        self.start = time.perf_counter()

trainer = pl.Trainer(accelerator="cpu", max_steps=10**6, max_epochs=-1, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, accumulate_grad_batches=2 if "micro" in case else 1,
    callbacks=[SamplingSchedule(burn_in_steps=10**5, every_n_steps=10**5), SampleCollector(folder),
               BayesianModelAverage(), Turns()])
trainer.fit(module, ResumableLoader(data, batch))
"""


def worker(checkout: Path, case: str, steps: int, folder: str) -> subprocess.Popen[str]:
    """Start a fit that makes a block of steps for each line that it reads."""
    command = [str(checkout / ".venv" / "bin" / "python"), "-c", WORKER, case, str(steps), folder]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, cwd=checkout, text=True, **pipes)


def compare(old: Path, new: Path, case: str, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of a step in each round, by commit."""
    with tempfile.TemporaryDirectory() as folder:
        workers = {
            name: worker(path, case, STEPS.get(case, 200), f"{folder}/{name}")
            for name, path in (("old", old), ("new", new))
        }
        seconds: dict[str, list[float]] = {name: [] for name in workers}
        try:
            for turn in range(rounds + 1):
                for name in list(workers)[:: 1 if turn % 2 else -1]:
                    process = workers[name]
                    assert process.stdin is not None
                    assert process.stdout is not None
                    process.stdin.write("go\n")
                    process.stdin.flush()
                    line = process.stdout.readline()
                    while line and not line[0].isdigit():  # what Lightning prints
                        line = process.stdout.readline()
                    if turn > 0:
                        seconds[name].append(float(json.loads(line)))
        finally:
            for process in workers.values():
                process.kill()
    return seconds


def main() -> int:
    """Print a table: the median step of each commit, and the ratio of the same rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    print("| case | old ms | new ms | new/old | least | largest |\n|---|---|---|---|---|---|")
    for case in CASES:
        seconds = compare(given.old.resolve(), given.new.resolve(), case, given.rounds)
        middle = {name: sorted(values)[len(values) // 2] * 1e3 for name, values in seconds.items()}
        ratio = " | ".join(f"{value:.3f}" for value in ratios(seconds, "new", "old"))
        print(f"| {case} | {middle['old']:.3f} | {middle['new']:.3f} | {ratio} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
