"""Trainers that are silent, and the fits that tests share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

from lightning_sgmcmc import SGHMC, BayesianModule, Categorical, ChainStrategy, Posterior
from lightning_sgmcmc.callbacks import (
    BayesianModelAverage,
    CyclicalSchedule,
    SampleCollector,
    SamplerCallback,
    SamplingSchedule,
)
from lightning_sgmcmc.chains.layout import ChainLayout
from lightning_sgmcmc.chains.samples import PosteriorSample
from lightning_sgmcmc.datamodules import DatasetDataModule
from tests.support.problems import (
    ACCELERATOR,
    BATCH,
    NUM_DATA,
    Array,
    ConjugateRegression,
    Data,
    Decoded,
    Net,
    data,
    network,
)
from tests.support.recorders import Draws


class StopAt(SamplerCallback):
    """Ends a fit after some epochs."""

    def __init__(self, epochs: int) -> None:
        self._epochs = epochs

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch + 1 == self._epochs:
            trainer.should_stop = True


def quiet_trainer(**options: Any) -> pl.Trainer:
    """Return a trainer, of the CPU by default, that writes and prints nothing unless told to."""
    alone = options.get("devices", 1) == 1 and isinstance(options.get("strategy", "auto"), str | OneOfMany)
    quiet = {
        "accelerator": ACCELERATOR if alone else "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": -1 if "max_steps" in options else None,
    }
    return pl.Trainer(**(quiet | options))


def seeded(make: Callable[[], BayesianModule]) -> BayesianModule:
    torch.manual_seed(0)
    return make()


def sample(
    problem: ConjugateRegression, steps: int, burn_in: int, every: int, batch_size: int, chains: int = 1, **options: Any
) -> Array:
    """Sample the posterior by `Trainer.fit`; return the draws, (S, D, d), one chain's after the other's.

    With several chains each has batches of its own, so their draws are independent. Options for the trainer are given
    as `trainer_…`. The seed is 0 unless it is given.
    """
    options = {"seed": 0} | options
    trainer_options = {k.removeprefix("trainer_"): v for k, v in options.items() if k.startswith("trainer_")}
    if chains > 1:
        options |= {
            "num_chains": chains,
            "chain_start": "same",
            "chain_execution": "vmap",
            "num_data": problem.num_data,
        }
    module = problem.module(**{k: v for k, v in options.items() if not k.startswith("trainer_")})
    draws = Draws()
    trainer = quiet_trainer(
        max_steps=steps,
        callbacks=[SamplingSchedule(burn_in_steps=burn_in, every_n_steps=every), draws],
        **trainer_options,
    )
    trainer.fit(module, problem.chain_loader(batch_size, chains) if chains > 1 else problem.loader(batch_size))
    return draws.array(chains)


def fit_chains(module: BayesianModule, steps: int = 20, callbacks: Any = (), **options: Any) -> list[PosteriorSample]:
    """Return the samples of every tenth step."""
    collector = SampleCollector(in_memory=True)
    trainer = quiet_trainer(
        max_steps=steps, callbacks=[SamplingSchedule(every_n_steps=10), collector, *callbacks], **options
    )
    trainer.fit(module, datamodule=Data())
    assert collector.posterior is not None
    return list(collector.posterior.store)


class OneOfMany(pl.strategies.SingleDeviceStrategy):
    """A process of a run with chains in others: this one holds chain `chain`."""

    def __init__(self, chain: int, total: int) -> None:
        super().__init__("cpu" if ACCELERATOR == "cpu" else "cuda:0")
        self._place = ChainLayout(chain, 1, 1, 1, 0, None)
        self.total = total

    def chain_layout(self, num_chains: int) -> ChainLayout:
        return self._place


def fit_in_layout(
    folder: Path,
    stacked: int,
    ranks: int,
    ranks_per_chain: int = 1,
    model: Any = Net,
    datamodule: pl.LightningDataModule | None = None,
    callbacks: Any = (),
    steps: int = 20,
    burn_in_steps: int | None = None,
    ckpt_path: Path | None = None,
    module_options: Any = (),
    **options: Any,
) -> tuple[list[PosteriorSample], pl.Trainer]:
    """Return the samples of every fifth step, of chains in a layout."""
    strategy = ChainStrategy(ranks_per_chain=ranks_per_chain, start_method="fork") if ranks > 1 else "auto"
    checkpoints = pl.callbacks.ModelCheckpoint(
        folder, filename="{step}", every_n_train_steps=10, save_top_k=-1, enable_version_counter=False
    )
    trainer = quiet_trainer(
        max_steps=steps,
        devices=ranks,
        strategy=strategy,
        enable_checkpointing=True,
        callbacks=[
            SamplingSchedule(burn_in_steps=burn_in_steps, every_n_steps=5),
            SampleCollector(folder / "samples"),
            BayesianModelAverage(),
            *callbacks,
            checkpoints,
        ],
        **options,
    )
    torch.manual_seed(0)
    trainer.fit(model(stacked, **dict(module_options)), datamodule=datamodule or Data(), ckpt_path=ckpt_path)
    return list(Posterior.load(folder / "samples", model=model()).store), trainer


def datamodule(kind: str) -> pl.LightningDataModule:
    if kind == "memory":
        return Data()
    train, val = Decoded(data(NUM_DATA, 0), True), Decoded(data(20, 1), False)
    module = DatasetDataModule(train, val, batch_size=BATCH, num_workers=int(kind.removeprefix("workers ")))
    module.val_dataloader = lambda: torch.utils.data.DataLoader(val, BATCH)  # type: ignore[method-assign]
    return module


Outcome = dict[str, Any]

SETTINGS: dict[str, dict[str, Any]] = {
    "epochs": {},
    "steps": {"max_steps": 21, "max_epochs": -1},
    "steps in mid-epoch": {"max_steps": 19, "max_epochs": -1},
    "validation in mid-epoch": {"val_check_interval": 3},
    "validation across epochs": {"val_check_interval": 5, "check_val_every_n_epoch": None},
    "validation seldom": {"check_val_every_n_epoch": 2},
    "accumulation": {"accumulate_grad_batches": 2},
    "accumulation and validation in mid-window": {
        "accumulate_grad_batches": 3,
        "val_check_interval": 2,
        "max_epochs": 4,
    },
    "part of the batches": {"limit_train_batches": 5},
    "everything": {
        "limit_train_batches": 7,
        "accumulate_grad_batches": 2,
        "val_check_interval": 3,
        "gradient_clip_val": 1.0,
        "precision": "bf16-mixed",
    },
}


def resumable_run(
    folder: Path, options: dict[str, Any], kind: str, *extra: pl.Callback, ckpt_path: Path | None = None, **fit: Any
) -> Outcome:
    """Fit; return everything that must not depend on stops."""
    torch.manual_seed(int.from_bytes(folder.name.encode()[-3:], "little"))  # what a new process happens to have
    module = BayesianModule(net=network(), likelihood=Categorical(), sampler=SGHMC, lr=0.05, seed=3)
    trainer = quiet_trainer(
        **({"max_epochs": 3, "num_sanity_val_steps": 0, "enable_checkpointing": True} | options),
        callbacks=[
            CyclicalSchedule(2, 0.4, 3),
            SampleCollector(folder / "samples"),
            BayesianModelAverage(),
            *extra,
        ],
        default_root_dir=folder,
    )
    trainer.fit(module, datamodule=datamodule(kind), ckpt_path=ckpt_path, **fit)
    posterior = Posterior.load(folder / "samples")
    return {
        "state": module.state_dict(),
        "sampler": module.sampler.state_dict(),
        "samples": [sample.state for sample in posterior],
        "records": posterior.records,
        "running": module.evaluations["val"].running,
        "members": module.evaluations["val"].members,
        "step": trainer.global_step,
    }
