"""What ranks send, hold and read as their number W grows: real gloo ranks of a CPU, and W up to 64 on a line.

    python -m tests.benchmarks.ranks [--parameters 1e7] [--layouts 2,1 4,1 4,2]

A layout is W and the ranks that share a chain. Each rank has one chain of SGHMC, whose state S is its parameters and
momenta. Messages and bytes are what rank 0 gives to torch.distributed and takes from it; memory is rank 0's largest
while it saves or loads a checkpoint, beyond that before, in multiples of S.
"""

import argparse
import multiprocessing
import pickle
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_sgmcmc import SGHMC, BayesianModule, ChainStrategy, Gaussian
from lightning_sgmcmc.callbacks import SampleCollector, SamplingSchedule
from lightning_sgmcmc.datamodules import DatasetDataModule
from tests.support.trainers import quiet_trainer

STEPS, EVERY = 8, 4
UP_TO = (2, 4, 8, 16, 32, 64)
COUNTED = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "_broadcast_coalesced", "gather"),
    *("send", "recv", "all_gather_object", "gather_object", "broadcast_object_list"),
)


def network(parameters: int) -> nn.Module:
    width = max(int((parameters / 2) ** 0.5), 4)
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))


def memory(reset: bool = False) -> tuple[int, int]:
    """Return the bytes in memory now, and the most since the last reset, without pages of files."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return tuple(int(lines[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))  # type: ignore[return-value]


def nbytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, list | tuple) and value and all(isinstance(one, Tensor) for one in value):
        return sum(one.nbytes for one in value)
    try:
        return len(pickle.dumps(value))
    except Exception:  # a group
        return 0


class Watch(pl.Callback):
    """Counts what rank 0 exchanges in steps, drawings and checkpoints, and what it holds while it saves and loads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.phase, self.depth = "step", 0
        self.messages, self.bytes, self.peaks = Counter[str](), Counter[str](), Counter[str]()

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        for name in COUNTED:
            setattr(dist, name, self._counted(name, getattr(dist, name)))
        trainer.save_checkpoint = self._within("checkpoint", trainer.save_checkpoint)  # type: ignore[method-assign]
        connector = trainer._checkpoint_connector
        connector.resume_start = self._within("load", connector.resume_start)  # type: ignore[method-assign]
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if hasattr(callback, "_pass_samples_on"):
                callback._pass_samples_on = self._within("drawing", callback._pass_samples_on)

    def _counted(self, name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self.depth += 1
            try:
                return own(*arguments, **named)
            finally:
                self.depth -= 1
                if not self.depth:
                    self.messages[self.phase] += 1
                    self.bytes[self.phase] += sum(nbytes(one) for one in arguments)

        return call

    def _within(self, phase: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self.phase, before = phase, memory(reset=True)[0]
            result = own(*arguments, **named)
            self.peaks[phase] = max(self.peaks[phase], memory()[1] - before)
            self.phase = "step"
            return result

        return call

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.messages.clear(), self.bytes.clear()

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.is_global_zero:
            torch.save([dict(self.messages), dict(self.bytes), dict(self.peaks)], self.path)


def fit(folder: Path, parameters: int, ranks: int, sharing: int, resume: bool = False) -> Any:
    generator = torch.Generator().manual_seed(0)
    net = network(parameters)
    x = torch.randn(64, 8, generator=generator)
    rows = torch.utils.data.TensorDataset(x, torch.zeros(64, net[-1].out_features))  # type: ignore[index, arg-type]
    checkpoints = pl.callbacks.ModelCheckpoint(folder, "{step}", every_n_train_steps=EVERY, save_top_k=-1)
    trainer = quiet_trainer(
        max_steps=STEPS + EVERY * resume,
        devices=ranks,
        strategy=ChainStrategy(sharing, start_method="fork"),
        enable_checkpointing=True,
        callbacks=[
            SamplingSchedule(every_n_steps=EVERY),
            SampleCollector(folder / "samples"),
            checkpoints,
            Watch(folder / "found"),
        ],
    )
    module = BayesianModule(net=net, likelihood=Gaussian(std=1.0), sampler=SGHMC, lr=1e-6, seed=0)
    data = DatasetDataModule(rows, batch_size=8)
    trainer.fit(module, datamodule=data, ckpt_path=folder / f"step={STEPS}.ckpt" if resume else None)
    return torch.load(folder / "found")


def measured(folder: Path, parameters: int, ranks: int, sharing: int, found: Any) -> None:
    """Put what a layout takes into a queue."""
    folder.mkdir()
    torch.set_num_threads(1)
    saving = fit(folder, parameters, ranks, sharing)
    found.put((saving, fit(folder, parameters, ranks, sharing, resume=True)[2]["load"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=1e7)
    parser.add_argument("--layouts", nargs="*", default=["2,1", "4,1", "4,2"])
    given = parser.parse_args()
    parameters = sum(p.numel() for p in network(int(given.parameters)).parameters())
    own, context = 8 * parameters, multiprocessing.get_context("spawn")
    print(f"P = {parameters:.3g}, S = {own / 1e6:.4g} MB\n")
    print("| W | ranks of a chain | step | drawing | checkpoint | memory of saving | memory of loading |")
    print("|---|---|---|---|---|---|---|")
    alone: dict[int, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for layout in given.layouts:
            ranks, sharing = map(int, layout.split(","))
            queue = context.Queue()
            path = Path(folder) / layout.replace(",", "x")
            process = context.Process(target=measured, args=(path, int(given.parameters), ranks, sharing, queue))
            process.start()
            (messages, sizes, peaks), load = queue.get()
            process.join()
            times = {"step": STEPS, "drawing": STEPS // EVERY, "checkpoint": STEPS // EVERY}
            cells = [f"{messages.get(n, 0) / t:.3g}; {sizes.get(n, 0) / t / 1e6:.3g} MB" for n, t in times.items()]
            held = 1 + peaks["checkpoint"] / own
            print(f"| {ranks} | {sharing} | {' | '.join(cells)} | {held:.2f} S | {load / own:.2f} S |", flush=True)
            if sharing == 1:
                alone[ranks] = [sizes.get(n, 0) / t / 1e6 for n, t in times.items()] + [held]
    if len(alone) > 1:
        extrapolate(alone)


def extrapolate(alone: dict[int, list[float]]) -> None:
    """Print what more ranks take, on the line through the first and the last of those that were measured."""
    (first, low), *_, (last, high) = sorted(alone.items())
    print("\n| W | a step | a drawing | a checkpoint | memory of saving |\n|---|---|---|---|---|")
    for ranks in UP_TO:
        at = [a + (b - a) * (ranks - first) / (last - first) for a, b in zip(low, high, strict=True)]
        print(f"| {ranks} | {' | '.join(f'{value:.3g} MB' for value in at[:3])} | {at[3]:.2f} S |")


if __name__ == "__main__":
    main()
