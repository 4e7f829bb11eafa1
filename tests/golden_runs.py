"""Checksums of whole runs, to show that a change leaves every bit where it was: `python -m tests.golden_runs`.

Each case is a short `Trainer.fit`; its checksum covers the final parameters and every sample (tensors, energies,
log-weights, bins), and its metrics are written beside it. Checksums depend on the machine, so the two commits to be
compared must run on the same one:

    git checkout OLD && python -m tests.golden_runs --out old.json
    git checkout NEW && python -m tests.golden_runs --against old.json
"""

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn

from lightning_sgmcmc import (
    SGHMC,
    SGLD,
    SGNHT,
    BayesianModule,
    Categorical,
    ChainStrategy,
    ContourRules,
    GaussianPrior,
    Posterior,
    UnderdampedLangevin,
    pSGLD,
)
from lightning_sgmcmc.callbacks import (
    EWSG,
    BayesianModelAverage,
    ChainHealth,
    ContourGradient,
    ControlVariates,
    CovarianceFriction,
    CyclicalSchedule,
    ReplicaExchange,
    RunSummary,
    SampleCollector,
    SamplingSchedule,
    VarianceReducedEnergy,
)
from lightning_sgmcmc.datamodules import DigitsDataModule
from tests.support.paths import RECIPE as MAIN_JOB


class Network(BayesianModule):
    """A small network with dropout, BatchNorm and a parameter of its own likelihood's kind."""

    def __init__(self, num_chains: int = 1, **options: Any) -> None:
        chosen: dict[str, Any] = {"sampler": SGHMC, "lr": 0.02, "seed": 3} | options
        super().__init__(likelihood=Categorical(), prior=GaussianPrior(std=1.0), num_chains=num_chains, **chosen)
        self.net = nn.Sequential(nn.Linear(64, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.1), nn.Linear(24, 10))


class Plain(BayesianModule):
    """A network whose log-likelihood of a datum depends on that datum alone."""

    def __init__(self, num_chains: int = 1, **options: Any) -> None:
        chosen: dict[str, Any] = {"sampler": SGLD, "lr": 0.02, "seed": 3} | options
        super().__init__(likelihood=Categorical(), num_chains=num_chains, **chosen)
        self.net = nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))


def checksum(tensors: Iterable[torch.Tensor], numbers: Iterable[Any] = ()) -> str:
    """Return a hash of the tensors' bytes and of the numbers."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    found.update(repr(list(numbers)).encode())
    return found.hexdigest()[:20]


def summary(folder: Path, model: pl.LightningModule | None, module: Any, trainer: pl.Trainer | None) -> dict[str, Any]:
    """Return what is compared of a run whose samples lie in a folder."""
    store = Posterior.load(folder, model=model).store
    records = [(s.step, s.cycle, s.chain, s.energy, s.log_weight, s.bin) for s in store]
    tensors = [t for s in store for t in (*s.parameters.values(), *s.buffers.values())]
    found: dict[str, Any] = {"samples": len(records), "draws": checksum(tensors, records)}
    if module is not None:
        found["parameters"] = checksum(module.state_dict().values())
    if trainer is not None:
        found["metrics"] = {name: float(value) for name, value in sorted(trainer.callback_metrics.items())}
    return found


def fit(folder: Path, module: Any, callbacks: Iterable[Any], ckpt_path: Any = None, **options: Any) -> pl.Trainer:
    """Run a fit on handwritten digits that draws a sample every tenth step."""
    chosen: dict[str, Any] = {
        "accelerator": "cpu",
        "max_steps": 60,
        "max_epochs": -1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    } | options
    trainer = pl.Trainer(
        callbacks=[
            SamplingSchedule(burn_in_steps=20, every_n_steps=10),
            SampleCollector(folder / "samples"),
            BayesianModelAverage(),
            *callbacks,
        ],
        **chosen,
    )
    trainer.fit(module, datamodule=DigitsDataModule(batch_size=64), ckpt_path=ckpt_path)
    return trainer


def run(folder: Path, module: Any, callbacks: Iterable[Any] = (), **options: Any) -> dict[str, Any]:
    """Run one fit; return its summary."""
    trainer = fit(folder, module, callbacks, **options)
    return summary(folder / "samples", type(module)(), module, trainer)


def main_job(folder: Path) -> dict[str, Any]:
    """The YAML that README runs."""
    from lightning_sgmcmc.cli.commands import main

    main(["fit", f"--config={MAIN_JOB}", f"--trainer.logger.save_dir={folder}"])
    (path,) = folder.glob("digits_csghmc/*/samples")
    found = summary(path, None, None, None)
    results = json.loads((path.parent / "results.json").read_text())
    return found | {
        "rows": [
            (row["method"], row["metric"], row["value"])
            for row in results["rows"]
            if row["method"] in ("single", "bma")
        ]
    }


def contour(**options: Any) -> ContourGradient:
    """Return a contour that learns its range from a warm-up."""
    return ContourGradient(ContourRules(zeta=2.0), num_bins=20, warm_up_steps=15, **options)


def stacked_contour(folder: Path) -> dict[str, Any]:
    """Four chains that learn one π, accumulation, clipping, health."""
    return run(
        folder,
        Network(4),
        [contour(interacting=True), ChainHealth()],
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        max_steps=60,
    )


def stacked_vmap(folder: Path) -> dict[str, Any]:
    """Four chains by vmap, each with a π of its own, energies of samples over all data."""
    return run(folder, Plain(4, chain_execution="vmap"), [contour(sample_energy="full")])


def samplers(folder: Path) -> dict[str, Any]:
    """One chain of each sampler, health beside it, and a cyclical schedule."""
    found = {}
    for kind in (SGLD, pSGLD, SGHMC, SGNHT, UnderdampedLangevin):
        lr = 0.005 if kind is UnderdampedLangevin else 0.02
        found[kind.__name__] = run(folder / kind.__name__, Network(sampler=kind, lr=lr), [ChainHealth()])
    return found


def ewsg(folder: Path) -> dict[str, Any]:
    """EWSG over control variates, and beside a contour."""
    one = run(folder / "one", Plain(2, sampler=SGHMC), [ControlVariates(), EWSG(num_proposals=1)])
    module = Plain(2, sampler=UnderdampedLangevin, lr=0.005)
    return {"cv": one, "vr": run(folder / "two", module, [EWSG(num_proposals=2), CovarianceFriction()])}


def exchange(folder: Path) -> dict[str, Any]:
    """Four chains at a ladder of temperatures, with less noise in their energies."""
    callbacks = [VarianceReducedEnergy(every_n_epochs=1), ReplicaExchange(temperatures=[1, 2, 4, 8])]
    return run(folder, Plain(4, sampler=SGHMC), callbacks)


def ranks_chains(folder: Path) -> dict[str, Any]:
    """Two processes with two chains each that learn one π."""
    strategy = ChainStrategy(start_method="fork")
    return run(folder, Network(2), [contour(interacting=True)], devices=2, strategy=strategy)


def ranks_data(folder: Path) -> dict[str, Any]:
    """One chain over two data-parallel processes."""
    return run(folder, Plain(), [ChainHealth()], devices=2, strategy="ddp_fork")


def resume(folder: Path) -> dict[str, Any]:
    """A run that stops in mid-epoch and continues from its checkpoint, with everything on."""

    def parts() -> list[Any]:
        saved = pl.callbacks.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=35, save_top_k=-1)
        return [contour(interacting=True), ChainHealth(), RunSummary(), saved]

    fit(folder, Network(2), parts(), max_steps=40, enable_checkpointing=True)
    module = Network(2)
    trainer = fit(folder, module, parts(), folder / "step=35.ckpt", max_steps=60, enable_checkpointing=True)
    return summary(folder / "samples", Network(), module, trainer)


def cyclical(folder: Path) -> dict[str, Any]:
    """The cyclical schedule, with exploration at temperature 0."""
    module = Network(2)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=60,
        max_epochs=-1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[
            CyclicalSchedule(num_cycles=2, exploration=0.5, samples_per_cycle=3),
            SampleCollector(folder / "samples"),
        ],
    )
    trainer.fit(module, datamodule=DigitsDataModule(batch_size=64))
    return summary(folder / "samples", Network(), module, trainer)


CASES: list[Callable[[Path], dict[str, Any]]] = [
    main_job,
    stacked_contour,
    stacked_vmap,
    samplers,
    ewsg,
    exchange,
    ranks_chains,
    ranks_data,
    resume,
    cyclical,
]


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """Return the places at which two summaries differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        names = sorted(set(old) | set(new))
        return [d for name in names for d in differences(old.get(name), new.get(name), f"{path}/{name}")]
    same = json.dumps(old) == json.dumps(new)  # as text, since a NaN equals nothing
    return [] if same else [f"{path}: {old} -> {new}"]


def main() -> int:
    """Run the cases; return 1 if they differ from recorded ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file to write")
    parser.add_argument("--against", type=Path, help="file of another commit to compare with")
    parser.add_argument("cases", nargs="*", help="names of cases; all if left out")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for case in CASES:
        if given.cases and case.__name__ not in given.cases:
            continue
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as folder:
            found[case.__name__] = json.loads(json.dumps(case(Path(folder))))
        print(case.__name__, json.dumps(found[case.__name__])[:200], flush=True)
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=2) + "\n")
    if given.against is None:
        return 0
    recorded = json.loads(given.against.read_text())
    different = differences({name: recorded[name] for name in found}, found)
    print("\n".join(different) or f"all {len(found)} cases are equal, bit for bit")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
