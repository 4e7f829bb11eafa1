"""Keeps posterior samples, on disk or in memory."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.utilities.rank_zero import rank_zero_info

from lightning_sgmcmc.callbacks.base import SamplerCallback, bayesian, require_schedule
from lightning_sgmcmc.callbacks.run_folder import newest_store, run_folder
from lightning_sgmcmc.description import NotDescribableError, describe
from lightning_sgmcmc.module import BayesianModule
from lightning_sgmcmc.posterior import Posterior
from lightning_sgmcmc.store import MANIFEST, DiskStore, MemoryStore, PosteriorSample, SampleStore


class SampleCollector(SamplerCallback):
    """Keeps the samples as they are drawn; afterwards `collector.posterior` and `pl_module.posterior` hold them.

    On disk, every sample is complete and safe before the next step (see `DiskStore`). A new fit into a folder that
    holds samples moves those aside (`samples-1`, `samples-2`, …); a fit from a checkpoint goes on with them, without
    the samples that were drawn after the checkpoint, since they are drawn again.

    Args:
        dirpath: folder of the store; None is `samples` in the run's folder. For `trainer.test` and `trainer.predict`
            without a fit, None is the newest run's.
        in_memory: keep the samples in the host's memory, and in the checkpoints, in place of the disk.
        every_n_samples: thinning: keep every n-th sample of each chain.
        max_samples: limit: keep the newest so many, over all chains.

    Raises:
        ValueError: for an argument out of range; at setup, if no schedule would draw a sample.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        in_memory: bool = False,
        every_n_samples: int = 1,
        max_samples: int | None = None,
    ) -> None:
        if in_memory and dirpath is not None:
            raise ValueError(
                f"in_memory=True keeps no files, so dirpath={str(dirpath)!r} has no meaning: leave one out"
            )
        if every_n_samples < 1:
            raise ValueError(f"every_n_samples must be at least 1, got {every_n_samples}")
        if max_samples is not None and max_samples < 1:
            raise ValueError(f"max_samples must be at least 1, got {max_samples}")
        self.dirpath = Path(dirpath) if dirpath is not None else None
        self.in_memory = in_memory
        self.every_n_samples = every_n_samples
        self.max_samples = max_samples
        self.posterior: Posterior | None = None
        self._store: SampleStore | None = None
        self._seen: Counter[int] = Counter()
        self._restored: dict[str, Any] | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            require_schedule(trainer, self)
            return
        if self._store is None and not self.in_memory:
            path = self.dirpath or newest_store(trainer)
            if path is not None and (path / MANIFEST).exists():
                rank_zero_info(f"Samples of the posterior: {path}")
                self._store = DiskStore(path)
        if self._store is not None:
            self._publish(bayesian(pl_module, self))

    def reset(self) -> None:
        self._restored = None
        self._seen = Counter()

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        module = bayesian(pl_module, self)
        if self._restored is not None:
            self._resume(trainer)
        elif self.in_memory or trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._store = MemoryStore()  # a trial run must not move real samples aside
        else:
            path = self.dirpath or run_folder(trainer) / "samples"
            if trainer.is_global_zero:
                _move_aside(path)
                DiskStore.create(path, _description(module))
            trainer.strategy.barrier("sample store")
            self._store = DiskStore(path)
        self._publish(module)

    def _resume(self, trainer: pl.Trainer) -> None:
        assert self._restored is not None
        restored, self._restored = self._restored, None
        self._seen = Counter(restored["seen"])
        if self.in_memory:
            self._store = MemoryStore()
            for sample in restored["samples"]:
                self._store.append(PosteriorSample(**sample))
            return
        path = self.dirpath or Path(restored["path"])
        store = DiskStore(path)
        known = [r for r in store.records if r.step <= restored["last_step"]]
        if len(known) < restored["count"]:
            raise ValueError(
                f"the checkpoint knows {restored['count']} samples in {path}, and {len(known)} of them are there: put "
                "the folder back, or start a new run"
            )
        trainer.strategy.barrier("read the store before it is cut")
        if trainer.is_global_zero:
            store.keep(known)
        trainer.strategy.barrier("sample store")
        store.reload()
        self._store = store

    def on_posterior_sample(self, trainer: pl.Trainer, pl_module: BayesianModule, sample: PosteriorSample) -> None:
        index = self._seen[sample.chain]
        self._seen[sample.chain] += 1
        if (index + 1) % self.every_n_samples:
            return
        store = self._store
        assert store is not None
        if isinstance(store, DiskStore) and not trainer.is_global_zero:
            return
        store.append(sample)
        if self.max_samples is not None and len(store) > self.max_samples:
            store.keep(store.records[-self.max_samples :])

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.strategy.barrier("all samples are written")
        if isinstance(self._store, DiskStore):
            self._store.reload()

    def _publish(self, module: BayesianModule) -> None:
        assert self._store is not None
        self.posterior = module.posterior = Posterior(self._store, module)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"seen": dict(self._seen)}
        if isinstance(self._store, MemoryStore):
            state["samples"] = [vars(sample) for sample in self._store]
        elif isinstance(self._store, DiskStore):
            records = self._store.records
            state["path"] = str(self._store.path)
            state["count"] = len(records)
            state["last_step"] = records[-1].step if records else 0
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = state_dict


def _move_aside(path: Path) -> None:
    """Rename a folder that holds a store, so that a new one can be made there."""
    if not (path / MANIFEST).exists():
        return
    number = 1
    while (aside := path.with_name(f"{path.name}-{number}")).exists():
        number += 1
    path.rename(aside)
    rank_zero_info(f"Samples of an earlier run were in {path}; they are in {aside} now")


def _description(module: BayesianModule) -> Any:
    try:
        return describe(module)
    except NotDescribableError as error:
        rank_zero_info(
            f"The sample store does not describe its network ({error}): load it by Posterior.load(path, model=…)"
        )
        return None
