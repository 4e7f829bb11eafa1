"""Stores posterior samples, on disk or in memory."""

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning_sgmcmc.chains.callback import Place, SamplerCallback, sampling_module
from lightning_sgmcmc.chains.chains import ChainModel
from lightning_sgmcmc.chains.samples import Drawing, PosteriorSample, SampleRecord
from lightning_sgmcmc.chains.schedule import require_schedule
from lightning_sgmcmc.chains.trainer import is_finished, is_trial, run_folder
from lightning_sgmcmc.checks import check_count, check_flag
from lightning_sgmcmc.contour.learned import LearnedContour
from lightning_sgmcmc.files import is_regular, local_path
from lightning_sgmcmc.fit.checkpoints import check_common, mark_of_store
from lightning_sgmcmc.fit.folder import newest_store
from lightning_sgmcmc.fit.resume import check_resume
from lightning_sgmcmc.namespace import pl, rank_zero_info, rank_zero_warn
from lightning_sgmcmc.posterior.calibration import saved_calibration
from lightning_sgmcmc.posterior.description import description_for_store, model_of
from lightning_sgmcmc.posterior.disk import DiskStore, begin_store, check_same_dtype, continue_store
from lightning_sgmcmc.posterior.lock import StoreLock
from lightning_sgmcmc.posterior.manifest import MANIFEST, aside_folders, records_from
from lightning_sgmcmc.posterior.posterior import Posterior
from lightning_sgmcmc.posterior.predictive import check_fits
from lightning_sgmcmc.posterior.store import MemoryStore, Narrow, SampleStore, narrow_dtype
from lightning_sgmcmc.tables import Columns

LEVELS = 3
"""Folders above a checkpoint, and parts of a store's path, that are searched for a moved run's samples."""


class SampleCollector(SamplerCallback):
    """Stores samples as they are drawn; afterwards `collector.posterior` and `pl_module.posterior` provide them.

    On disk, every sample is complete and safe before the next step (see `DiskStore`); on CUDA a thread writes it while
    the device continues, and it is safe before the next checkpoint, and before anything in this process reads the
    samples. A new fit moves samples that are already in its folder aside (`samples-1`, `samples-2`, …). A fit from a
    checkpoint continues with them, except those drawn after the checkpoint, which it moves aside. It takes the samples
    beside the checkpoint, if there are any, so a copied or moved run uses its own. During a fit no other process can
    write to the folder.

    Args:
        dirpath: folder of the store; None uses `samples` in the run's folder; in `trainer.test` and
            `trainer.predict` without a fit, the newest run's.
        in_memory: store the samples in host memory, and in the checkpoints, instead of on disk.
        every_n_samples: thinning: keep every n-th sample of each chain.
        max_samples: limit: keep only the newest samples, this many over all chains.
        dtype: "bfloat16" or "float16" stores float32 parameters in half the bytes, see `Posterior.save`; None stores
            them as they are.

    Raises:
        ValueError: for an argument out of range; at setup, if no schedule would draw a sample; with a dtype, if sampled
            parameters are not float32; at the start of a fit from a checkpoint, if the folder holds other samples than
            the checkpoint's, or has them in another dtype.
        RuntimeError: at the start of a fit, if another process writes to the folder.
    """

    place = Place.STORE

    def __init__(
        self,
        dirpath: str | Path | None = None,
        in_memory: bool = False,
        every_n_samples: int = 1,
        max_samples: int | None = None,
        dtype: str | None = None,
    ) -> None:
        check_flag("in_memory", in_memory)
        if dirpath is not None and (not str(dirpath).strip() or Path(dirpath) == Path()):
            raise ValueError(
                f"dirpath={str(dirpath)!r} is the working folder, and samples need a folder of their own: pass "
                "dirpath='samples', or omit it to use the run's folder"
            )
        if in_memory and dirpath is not None:
            raise ValueError(
                f"in_memory=True writes no files, so dirpath={str(dirpath)!r} has no effect: pass only one of them"
            )
        check_count("every_n_samples", every_n_samples)
        check_count("max_samples", max_samples)
        remedy = "pass a local folder, and copy it afterwards"
        self.dirpath = None if dirpath is None else local_path(dirpath, "dirpath", remedy)
        self.in_memory = in_memory
        self.every_n_samples = every_n_samples
        self.max_samples = max_samples
        self.dtype = narrow_dtype(dtype)
        self.posterior: Posterior | None = None
        self._store: SampleStore | None = None
        self._drawing: Drawing | None = None
        self._writes = True
        """Whether this process writes the samples of the present drawing."""
        self._unrecorded: list[tuple[int, int, int]] = []
        """Step, chain and draw of the samples since the last exchange, where several processes write."""
        self._is_behind = False
        """Whether a thread still writes samples of the last step, which are to be exchanged."""
        self._contour: LearnedContour | None = None
        """The last one that the store was given."""
        self._lost: OSError | None = None
        """Why a sample of the fit that has ended is not on the disk."""
        self._lock: StoreLock | None = None
        self._seen: Counter[int] = Counter()
        self._restored: dict[str, Any] | None = None
        self._retired: set[str] = set()
        self._known_to_checkpoints: list[set[str]] = []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            require_schedule(trainer, self)
            return
        if self._store is None and not self.in_memory:
            path = check_common("the samples", lambda: self.dirpath or newest_store(trainer), mark_of_store)
            if path is not None and (path / MANIFEST).exists():
                rank_zero_info(f"Samples of the posterior: {path}")
                self._store = DiskStore(path)
                self._store.hold()
        if self._store is not None:
            self._publish(sampling_module(pl_module, self))
            if self.posterior is not None:
                self.posterior.calibration = saved_calibration(self._store)
            if stage == "predict":
                self._take_network(sampling_module(pl_module, self))

    def reset(self) -> None:
        self._restored = None
        self._seen = Counter()
        self._retired = set()
        self._known_to_checkpoints = []
        self._contour = self._lost = None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        module = sampling_module(pl_module, self)
        if is_finished(trainer) and self._store is not None:
            return  # no step follows, so the samples stay
        if self._restored is not None:
            check_resume(trainer, module)  # before the store is touched
            self._resume(trainer, module)
        elif self.in_memory or is_trial(trainer):
            self._store = MemoryStore(self._narrow())  # a trial run must not move real samples aside
        else:
            path = self.dirpath or run_folder(trainer) / "samples"
            self._lock = _on_rank_zero(trainer, lambda: _begin_store(path, trainer, module, self._narrow()))
            check_common("the samples' folder", lambda: path, mark_of_store)
            self._store = DiskStore(path)
        if isinstance(self._store, MemoryStore):
            self._store.columns = _columns(trainer)
        elif isinstance(self._store, DiskStore) and module.chains.layout.is_spread:
            self._store.share_writing()
        self._unrecorded, self._is_behind = [], False
        self._publish(module)

    def _resume(self, trainer: pl.Trainer, module: ChainModel) -> None:
        assert self._restored is not None
        restored, self._restored = self._restored, None
        seen = restored.get("seen")
        if not isinstance(seen, dict) or not all(isinstance(number, int) for pair in seen.items() for number in pair):
            raise ValueError(f"the checkpoint's count of samples is damaged ({str(seen)[:80]}): resume from another")
        self._seen = Counter(seen)
        if self.in_memory:
            self._store, shared = MemoryStore(self._narrow()), module.chains.sharing.tensors()
            for sample in restored["samples"]:
                self._store.append(PosteriorSample(**sample, shared=shared))
            return
        checkpoint = trainer.ckpt_path
        path = check_common("the samples", lambda: _find_store(restored, self.dirpath, checkpoint), mark_of_store)
        trainer.strategy.barrier("read the store before it is cut")
        before = DiskStore(path)
        before.columns.check(getattr(trainer, "datamodule", None))
        check_same_dtype(before, self._narrow())
        self._lock = _on_rank_zero(trainer, lambda: _continue_store(path, restored))
        self._store = DiskStore(path)

    def _narrow(self) -> Narrow | None:
        return None if self.dtype is None else Narrow(self.dtype)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == "validate":
            _warn_of_first_weights(sampling_module(pl_module, self), "validation_step")
            self._warn_of_later_samples(trainer)

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        _warn_of_first_weights(sampling_module(pl_module, self), "test_step")
        self._warn_of_later_samples(trainer)

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        model = None if self.posterior is None else self.posterior.model
        if model is not None and model is not pl_module:
            model.to(pl_module.device)
        self._warn_of_later_samples(trainer)

    def _warn_of_later_samples(self, trainer: pl.Trainer) -> None:
        """Warn if samples are evaluated that were drawn after the checkpoint whose weights are loaded."""
        restored, store = self._restored, self._store
        if not trainer.ckpt_path or restored is None or store is None or len(store) == 0:
            return
        if isinstance(store, DiskStore) and restored.get("run") not in (None, store.run_id):
            return
        last = restored.get("last_step", max((sample["step"] for sample in restored.get("samples", ())), default=0))
        later = sum(record.step > last for record in store.records)
        if later:
            until = len(store) - later
            own = (
                f"Of those until then, `posterior[:{until}].evaluate(data)`." if until else "None was drawn until then."
            )
            rank_zero_warn(
                f"{later} of the {len(store)} samples were drawn after step {last}, that of the last one in ckpt_path, "
                f"whose weights alone are loaded: averages are of all samples. {own}"
            )

    @property
    def reads_all_samples(self) -> bool:
        return isinstance(self._store, MemoryStore)

    def on_posterior_samples(self, trainer: pl.Trainer, pl_module: ChainModel, drawing: Drawing) -> None:
        layout = pl_module.chains.layout
        if self._is_behind:
            self._exchange()
        if isinstance(self._store, DiskStore) and self._store.lags and not layout.is_spread:
            self._drop_surplus()
        self._writes = drawing.is_own and layout.rank_in_chain == 0
        self._drawing = drawing if drawing.on_cuda else None

    def on_posterior_sample(self, trainer: pl.Trainer, pl_module: ChainModel, sample: PosteriorSample) -> None:
        index, drawing = self._seen[sample.chain], self._drawing
        self._seen[sample.chain] += 1
        if drawing is not None and sample is drawing.samples[-1]:
            self._drawing = None
        if (index + 1) % self.every_n_samples:
            return
        store, contour, is_spread = self._store, pl_module.contour, pl_module.chains.layout.is_spread
        assert store is not None
        on_disk = isinstance(store, DiskStore)
        copy = None if drawing is None or (on_disk and not self._writes) else drawing.host_copy(sample)
        if not isinstance(store, DiskStore):
            store.append(sample if copy is None else copy())
        elif self._writes and copy is not None:
            store.append_later(sample, copy)
        elif self._writes:
            store.append(sample)
        if on_disk and is_spread:
            self._unrecorded.append((sample.step, sample.chain, sample.draw))
        if on_disk and not trainer.is_global_zero:
            return
        if contour is not None and contour is not self._contour:
            if isinstance(store, DiskStore) and copy is not None:
                store.set_contour_later(contour)
            else:
                store.contour = contour
            self._contour = contour
        if not (isinstance(store, DiskStore) and (store.lags or is_spread)):
            self._drop_surplus()

    def end_posterior_samples(self, trainer: pl.Trainer, pl_module: ChainModel) -> None:
        """Record the samples of a step that several processes have written; those that a thread writes, later."""
        self._is_behind = bool(self._unrecorded)
        if self._is_behind and pl_module.device.type != "cuda":
            self._exchange()

    def _exchange(self) -> None:
        """Let the first process record what all have written, in the samples' order; all processes call it."""
        expected, self._unrecorded, self._is_behind = self._unrecorded, [], False
        if not expected or not isinstance(self._store, DiskStore):
            return
        everyone = self.run.layout.strategy.gather_plain(self._store.take_written())
        if everyone is not None:
            written = {(one.step, one.chain, one.draw): one for records in everyone for one in records}
            self._store.record([written[place] for place in expected])
            self._drop_surplus()

    def _drop_surplus(self) -> None:
        """Drop the oldest samples above the limit; this waits until the others are written."""
        if self.max_samples is None or self._store is None:
            return
        dropped = self._store.keep_newest(self.max_samples)
        if dropped and isinstance(self._store, DiskStore):
            self._discard(self._store, dropped)

    def _discard(self, store: DiskStore, dropped: set[str]) -> None:
        """Delete files of dropped samples, except those that one of the last two checkpoints refers to."""
        self._retired |= dropped
        wanted = set().union(*self._known_to_checkpoints)
        self._retired = self._retired & wanted | store.discard(self._retired - wanted)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._exchange()
        if isinstance(self._store, DiskStore) and trainer.is_global_zero:
            self._drop_surplus()
            self._store.close()
            self._retired |= self._store.trim()
        elif isinstance(self._store, DiskStore):
            self._store.close()
        trainer.strategy.barrier("all samples are written")
        module = sampling_module(pl_module, self)
        if self._store is not None and module.contour is not None and trainer.is_global_zero:
            self._store.contour = self._contour = module.contour
        if isinstance(self._store, DiskStore):
            self._store.reload()
            if trainer.is_global_zero:
                self._store.discard(self._retired)
        self._release()

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._release()  # a fit that makes no step has no end of training

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if isinstance(self._store, DiskStore):
            try:
                self._store.close()
            except OSError as error:
                self._lost = error  # the state that may be saved now would count the sample
                if error is not exception:
                    rank_zero_warn(str(error))
        self._release()

    def _release(self) -> None:
        self._drawing, self._unrecorded, self._is_behind = None, [], False
        if isinstance(self._store, DiskStore):
            self._store.share_writing(False)
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _publish(self, module: ChainModel) -> None:
        assert self._store is not None
        self.posterior = module.posterior = Posterior(self._store, module)

    def _take_network(self, module: ChainModel) -> None:
        """Let predictions have the store's network if the module's has other sizes, as evaluations of samples do."""
        store = self._store
        if not isinstance(store, DiskStore) or len(store) == 0 or self.posterior is None:
            return
        try:
            check_fits(store[0], module)
        except ValueError as error:
            found, _ = model_of(store)
            if found is None:
                return  # predictions raise this error
            rank_zero_info(f"Predictions take the network that {store.path} describes, since {error}")
            self.posterior.model = found

    def state_dict(self) -> dict[str, Any]:
        if self._lost is not None:
            raise self._lost
        self._exchange()
        if isinstance(self._store, DiskStore) and self._store.lags:
            self._drop_surplus()
        state: dict[str, Any] = {"seen": dict(self._seen)}
        if isinstance(self._store, MemoryStore):
            # The module's own state has what is not sampled.
            state["samples"] = [{n: v for n, v in vars(s).items() if n != "shared"} for s in self._store]
        elif isinstance(self._store, DiskStore):
            records = self._store.records
            state["path"] = self._store.path.absolute().as_posix()  # which other systems read too
            state["run"] = self._store.run_id
            state["count"] = len(records)
            state["last_step"] = records[-1].step if records else 0
            if self.max_samples is not None:
                state["records"] = [asdict(record) for record in records]
                self._known_to_checkpoints = [*self._known_to_checkpoints[-1:], {record.file for record in records}]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = state_dict


def _warn_of_first_weights(module: ChainModel, step: str) -> None:
    """Warn if a step of the user's evaluates a module with samples that has neither been fitted nor loaded."""
    seeds, posterior = module.chains.seeds, module.posterior
    if module.replaces(step) and posterior is not None and len(posterior) and not seeds.fits and not seeds.loads:
        name = type(module).__name__
        rank_zero_warn(
            f"{name}.{step} evaluates the weights that {name} was constructed with, and BayesianModelAverage the "
            f"samples: pass ckpt_path=… for weights of the fit, or remove {step}."
        )


# -- the folder of samples ---------------------------------------------------------------------------------------------


def _begin_store(path: Path, trainer: pl.Trainer, module: ChainModel, narrow: Narrow | None) -> StoreLock:
    """Create an empty store for a new run, and move the samples of an earlier run aside."""
    description = description_for_store(module)
    return begin_store(path, description, _columns(trainer), module.chains.sharing.tensors(), narrow)


def _find_store(saved: dict[str, Any], dirpath: Path | None, checkpoint: str | Path | None) -> Path:
    """Return the folder of a checkpoint's samples: the given one, one beside it (it may be moved), or the recorded."""
    _check_saved(saved)
    recorded = Path(saved["path"])
    if dirpath is not None:
        candidates = [dirpath]
    else:
        tails = [Path(*recorded.parts[-length:]) for length in range(1, min(LEVELS, len(recorded.parts) - 1) + 1)]
        folders = list(Path(checkpoint).absolute().parents)[:LEVELS] if checkpoint else []
        candidates = [folder / tail for folder in folders for tail in tails] + [recorded]
        candidates += [aside for candidate in candidates for aside in aside_folders(candidate)]
    foreign = None
    best = (-1, candidates[0] if dirpath is not None else recorded)
    for path in candidates:
        if not (path / MANIFEST).exists():
            continue
        store = DiskStore(path)
        if saved["run"] != store.run_id:
            foreign = path
            continue
        count = _samples_there(saved, store)
        if count >= saved["count"]:
            return path
        best = max(best, (count, path), key=lambda pair: pair[0])
    if best[0] < 0 and foreign is not None:
        stores = (aside for aside in aside_folders(foreign) if (aside / MANIFEST).exists())
        theirs = next((aside for aside in stores if DiskStore(aside).run_id == saved["run"]), None)
        remedy = f"pass dirpath='{theirs}', where its own are" if theirs else "pass the folder of its own as dirpath"
        raise ValueError(f"{foreign} holds the samples of another run than the checkpoint's: {remedy}")
    raise ValueError(
        f"the checkpoint refers to {saved['count']} samples in {best[1]}, which holds {max(best[0], 0)}: restore the "
        "folder, or start a new run"
    )


def _continue_store(path: Path, saved: dict[str, Any]) -> StoreLock:
    """Set a store to a checkpoint's samples, and move later ones aside."""
    return continue_store(path, lambda store: _records_of(saved, store))


def _on_rank_zero(trainer: pl.Trainer, function: Callable[[], Any]) -> Any:
    """Call a function on rank zero, and wait for it on all ranks; return its result there, None elsewhere."""
    result, error = None, None
    if trainer.is_global_zero:
        try:
            result = function()
        except Exception as raised:
            error = raised
    message = trainer.strategy.broadcast(None if error is None else str(error))
    if error is not None:
        raise error
    if message is not None:
        raise RuntimeError(f"rank 0 failed: {message}")
    return result


def _records_of(saved: dict[str, Any], store: DiskStore) -> list[SampleRecord]:
    if "records" in saved:
        records = records_from(saved["records"])
        _check_energies(records, store)
        return records
    return [record for record in store.records if record.step <= saved["last_step"]]


def _check_energies(records: list[SampleRecord], store: DiskStore) -> None:
    """Raise ValueError if a checkpoint's record of a sample has another energy than the store's."""
    energies = {record.file: record.energy for record in store.records}
    for record in records:
        energy = energies.get(record.file, record.energy)
        if repr(energy) != repr(record.energy):  # as text, since NaN is not equal to itself
            raise ValueError(
                f"the checkpoint's record of {record.file} has the energy {record.energy}, and that in {store.path} "
                f"{energy}: resume from another checkpoint, or start a new run"
            )


def _check_saved(saved: dict[str, Any]) -> None:
    """Raise ValueError unless a collector's state in a checkpoint has the right form."""
    kinds = {"path": str, "count": int, "last_step": int, "run": str, "records": list}
    given = {"records": []} | saved
    wrong = [name for name, kind in kinds.items() if not isinstance(given.get(name), kind)]
    if wrong:
        raise ValueError(f"the checkpoint's entry on its samples is damaged: {wrong[0]} is missing or has a wrong type")


def _samples_there(saved: dict[str, Any], store: DiskStore) -> int:
    """Return how many of a checkpoint's samples a store holds."""
    records = _records_of(saved, store)
    return sum(is_regular(store.path / r.file) for r in records) if "records" in saved else len(records)


def _columns(trainer: pl.Trainer) -> Columns:
    return Columns.of_datamodule(getattr(trainer, "datamodule", None))
