"""Samples in a folder of safetensors files and a manifest, written at once or by a thread beside the run."""

import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from lightning_sgmcmc.chains.samples import HostCopies, PosteriorSample, SampleRecord
from lightning_sgmcmc.contour.contour import ContourState
from lightning_sgmcmc.contour.learned import LearnedContour
from lightning_sgmcmc.files import (
    flush_folder,
    free_space,
    is_regular,
    make_folder,
    patiently,
    read_regular,
    remove_left_over,
    write_atomically,
)
from lightning_sgmcmc.namespace import rank_zero_info
from lightning_sgmcmc.posterior import manifest
from lightning_sgmcmc.posterior.lock import StoreLock, is_in_use, unusable
from lightning_sgmcmc.posterior.manifest import BackgroundWriter, Manifest, wait_for_writers, write_sample
from lightning_sgmcmc.posterior.store import Narrow, SampleStore
from lightning_sgmcmc.tables import Columns

CONTOUR = "contour.safetensors"
ORIGIN = ("step", "cycle", "chain", "energy", "log_weight", "bin", "comparable", "draw", "temperature")
"""What a sample has of its record."""
LARGEST_CONTOUR = 2**30  # bytes; a million bins of one chain have 16 MB
SURPLUS = 20
"""`keep_newest` leaves up to 1/20 more samples in the manifest than it keeps."""
MOST_TRIES = 100
"""Times that the manifest is read again when a fit has deleted samples meanwhile."""
OF_A_STORE = ("manifest.", "sample-", "shared.", "base.", "contour.", "calibration.", "novelty")
"""How the names of a store's entries begin."""
LEAVE_OUT = "Posterior.load(…, skip_damaged=True) skips"


class DiskStore(SampleStore):
    """Samples in a folder: `sample-….safetensors` files and `manifest.jsonl`.

    A sample is written under a temporary name, flushed to disk and renamed, and only then recorded in the manifest.
    Every file in the manifest is therefore complete, whenever the process is killed. A truncated last line is ignored.
    Checksums in the manifest detect files that were damaged later. `contour.safetensors` stores the state learned by a
    contour sampler. An open store stays bound to its samples: those that a later fit moved aside are read from there.

    A running fit may queue samples (`append_later`), which a thread copies from the device and writes. Whoever reads
    the records waits until these are on the disk, so a checkpoint refers to no other samples. An error of the thread is
    raised by the next `append_later`, and by every reader until `close`.

    Args:
        path: an existing store's folder (see `create`).
        skip_damaged: skip unreadable lines of the manifest (`damaged_lines`) instead of raising an error.

    Raises:
        FileNotFoundError: if there is no store.
        ValueError: if the manifest is damaged, or has another format or version.
    """

    def __init__(self, path: str | Path, skip_damaged: bool = False) -> None:
        self.path = Path(path).absolute()  # the working folder may change
        self.skips_damaged = skip_damaged
        self._verified: dict[str, object] = {}
        """The state of each file when its checksum was compared."""
        self._held = manifest.OpenFiles()
        self._dropped: list[SampleRecord] = []
        """Records that `keep_newest` has dropped and the manifest still contains."""
        self._manifest = Manifest()
        self._places: set[tuple[int, int, int]] = set()
        self._contour: bytes | None = None
        self._shared: dict[str, Tensor] | None = None
        self._narrow: Narrow | None = None
        self._writer: BackgroundWriter | None = None
        self.unrecorded: list[SampleRecord] | None = None
        """The records of samples that this process has written and the first one is to record (`share_writing`)."""
        self._records: list[SampleRecord] = []
        self.reload()

    @property
    def records(self) -> list[SampleRecord]:
        """The samples' records, once all of them are on the disk."""
        self._settle()
        return self._records

    @records.setter
    def records(self, records: list[SampleRecord]) -> None:
        self._records = records

    @property
    def model_description(self) -> Any:
        """Plain data that describe the network, or None."""
        return self._manifest.model

    @property
    def run_id(self) -> str:
        """Identifies the run that wrote the store."""
        return self._manifest.run

    @property
    def damaged_lines(self) -> list[int]:
        """Numbers of the manifest's skipped lines, from 1."""
        return self._manifest.damaged_lines

    @property
    def written_by_newer(self) -> str:
        """A clause for messages if a newer version of this library wrote the store, else ""."""
        library = self._manifest.library
        if not manifest.is_newer(library):
            return ""
        return f"; lightning-sgmcmc {library} wrote the store, and this version is older: update it"

    @classmethod
    def create(
        cls,
        path: str | Path,
        model_description: Any = None,
        columns: Columns | None = None,
        shared: Mapping[str, Tensor] | None = None,
        narrow: Narrow | None = None,
        resampled: bool = False,
    ) -> "DiskStore":
        """Create an empty store.

        Args:
            path: folder, created if needed; it must not contain a store.
            model_description: plain data of the network (see `lightning_sgmcmc.posterior.description`), or None.
            columns: what inputs and targets are.
            shared: the tensors that all samples have in common, by name, which are not sampled.
            narrow: how parameters are stored in 16 bits; None stores them as they are.
            resampled: whether samples were drawn by their weights.

        Raises:
            FileExistsError: if the folder contains a store.
        """
        path = Path(path)
        if (path / manifest.MANIFEST).exists():
            raise FileExistsError(f"{path} already contains a sample store: choose another folder")
        try:
            make_folder(path)
            said = Manifest(model_description, run=uuid.uuid4().hex, columns=columns or Columns())
            said.shared, said.resampled = manifest.write_common(path, shared or {}), resampled or None
            if narrow is not None:
                said.dtype, said.base = narrow.dtype, manifest.write_common(path, narrow.base, manifest.BASE)
            write_atomically(path / manifest.MANIFEST, manifest.write_manifest(said))
        except OSError as error:
            raise unusable(path, error) from error
        return cls(path)

    @property
    def contour(self) -> LearnedContour | None:  # type: ignore[override]
        """The state learned by a contour sampler at its last sample, None without one.

        Raises:
            ValueError: if the file is damaged.
        """
        self._settle()
        if self._contour is None:
            return None
        try:
            return LearnedContour.from_bytes(self._contour)
        except ValueError as error:
            raise ValueError(
                f"{self.path / CONTOUR} cannot be read: {error}; the weights stored with the samples do not need it"
            ) from error

    @contour.setter
    def contour(self, contour: LearnedContour | None) -> None:
        self._contour = None if contour is None else contour.to_bytes()
        if self._contour is None:
            (self.path / CONTOUR).unlink(missing_ok=True)
        else:
            write_atomically(self.path / CONTOUR, self._contour)

    def reload(self) -> None:
        """Read the manifest and the contour again."""
        self._settle()
        wait_for_writers(self.path)
        path = self.path / manifest.MANIFEST
        if not os.path.lexists(path):
            raise FileNotFoundError(f"no sample store at {self.path}: there is no {manifest.MANIFEST}")
        try:
            content = read_regular(path, manifest.LARGEST_MANIFEST)
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from error
        self._manifest = manifest.parse_manifest(content, str(path))
        self.columns, self.is_resampled = self._manifest.columns, self._manifest.resampled is True
        self.records, self._dropped = self._manifest.records, []
        if self.damaged_lines and not self.skips_damaged:
            raise ValueError(
                f"line {self.damaged_lines[0]} of {path} is damaged, so it is not the manifest of a sample "
                f"store{self.written_by_newer}; {LEAVE_OUT} its sample"
            )
        try:
            self._contour = read_regular(self.path / CONTOUR, LARGEST_CONTOUR)
        except FileNotFoundError:
            self._contour = None
        except OSError:
            self._contour = b""  # a link or a device, which is no contour
        self._places = _places_of(self.records)

    def hold(self) -> None:
        """Keep the sample files open if a fit is running in the folder, since its `max_samples` deletes the oldest."""
        for _ in range(MOST_TRIES):
            files = [record.file for record in self.records]
            if not is_in_use(self.path):
                # A fit that has just ended may have deleted the oldest since the manifest was read.
                if not files or os.path.lexists(manifest.place_of(self.path, self.records[0])):
                    return
                self.reload()
                if files == [record.file for record in self.records]:
                    return  # reading the sample says what is wrong
                continue
            held = manifest.OpenFiles()
            try:
                for record in self.records[: manifest.most_open_files()]:
                    held.hold(record.file, manifest.place_of(self.path, record))
            except OSError:
                held.close()
                self.reload()
                if files == [record.file for record in self.records]:
                    return  # reading the sample says what is wrong
                continue
            self._held = held
            return

    def append(self, sample: PosteriorSample) -> None:
        stored = self._stored(sample)
        self._take_place(sample)
        try:
            self._enter(write_sample(self.path, stored, len(self.records), self.unrecorded is None))
        except OSError:
            self._places = _places_of(self.records)  # so that it can be appended again
            raise

    @property
    def narrow(self) -> Narrow | None:
        dtype, base = self._manifest.dtype, self._manifest.base
        if dtype is not None and self._narrow is None:
            tensors = {} if base is None else manifest.read_common(self.path, base, manifest.BASE)
            self._narrow = Narrow(dtype, tensors)
        return self._narrow

    def _stored(self, sample: PosteriorSample) -> PosteriorSample:
        return sample if self.narrow is None else self.narrow.narrowed(sample)

    def _read(self, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        return parameters if self.narrow is None else self.narrow.widened(parameters)

    def _take_place(self, sample: PosteriorSample) -> None:
        """Note that the store has a sample, or is about to."""
        if _place_of(sample) in self._places:
            raise ValueError(
                f"{self.path} already has a sample of step {sample.step}, chain {sample.chain}: start each run in a "
                "folder of its own"
            )
        self._places.add(_place_of(sample))

    def _enter(self, record: SampleRecord) -> None:
        """Add the record of a sample that is written."""
        records = self._records if self.unrecorded is None else self.unrecorded
        records.append(record)  # the getter would settle again

    def share_writing(self, shares: bool = True) -> None:
        """Let this process write the files of samples that are appended, and the first process of the run the manifest
        (`record`); or end it."""
        self.unrecorded = [] if shares else None

    def take_written(self) -> list[SampleRecord]:
        """Return the records of the files that this process has written since the last call, once they are on the
        disk."""
        self._settle()
        written, self.unrecorded = self.unrecorded or [], []
        return written

    def record(self, records: Sequence[SampleRecord]) -> None:
        """Add samples to the manifest whose files are written, by this process or others."""
        if not records:
            return
        path = self.path / manifest.MANIFEST
        try:
            manifest.add_line(path, "\n".join(map(manifest.line_of, records)))
        except OSError as error:
            what = f"the samples of step {records[0].step}"
            raise manifest.unwritten(self.path, what, str(path), error, len(self._records)) from error
        self._records += records
        self._places |= _places_of(records)

    def __getitem__(self, index: int) -> PosteriorSample:
        record = self.records[index]
        path = manifest.place_of(self.path, record)
        try:
            content = self._held.read(record.file)
            state = "held" if content else manifest.state_of_file(path)
            content = content or manifest.read_sample_file(path)
            self._verify(record, content, state)
            tensors = manifest.in_order(load(content), content)
        except Exception as error:  # a damaged file can raise anything: an odd header, a type that torch does not know
            raise ValueError(self._unreadable(path, error, f"; {LEAVE_OUT} it")) from error
        parts = [
            {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
            for start in ("parameter.", "buffer.", "scale.")
        ]
        own = {name: getattr(record, name) for name in ORIGIN}
        return PosteriorSample(
            **own, parameters=self._read(parts[0]), buffers=parts[1], scales=parts[2], shared=self.shared
        )

    def _verify(self, record: SampleRecord, content: bytes, state: object) -> None:
        """Compare a file's checksum, unless the file is as it was when that was done."""
        if self._verified.get(record.file) != state:
            if manifest.checksum(content) != record.checksum:
                raise OSError("its checksum differs from the manifest's")
            self._verified[record.file] = state

    @property
    def shared(self) -> dict[str, Tensor]:
        """What is not sampled, by name: read once, and the same tensors in all samples."""
        if self._shared is None:
            expected = self._manifest.shared
            self._shared = {} if expected is None else manifest.read_common(self.path, expected)
        return self._shared

    def shared_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of what is not sampled, by name."""
        return {} if self._manifest.shared is None else manifest.shared_shapes(self.path)

    def _unreadable(self, path: Path, error: Exception, remedy: str) -> str:
        """Return the sentence on a sample that cannot be read."""
        is_present = manifest.is_of(manifest.home_of(self.path, self.run_id), self.run_id)
        if is_present is None:
            remedy = "; the samples were moved or deleted after they were opened: load them from their new place"
        elif not is_present:
            remedy = "; another run has written there since the samples were opened: load the posterior again"
        elif not path.exists() and is_in_use(self.path):
            remedy = "; a fit is running there, whose max_samples deletes the oldest samples: load the posterior again"
        return f"the sample file {path} is missing or damaged: {error}{remedy}"

    def shapes(self, index: int) -> dict[str, tuple[int, ...]]:
        held = self._held.read(self.records[index].file)
        if held is not None:
            named = {n.partition(".")[::2]: tuple(tensor.shape) for n, tensor in load(held).items()}
            return {name: shape for (part, name), shape in named.items() if part == "parameter"}
        with self._open(index) as file:
            keys = [key for key in file.keys() if key.startswith("parameter.")]  # noqa: SIM118, not a dictionary
            return {key.removeprefix("parameter."): tuple(file.get_slice(key).get_shape()) for key in keys}

    def parameters(self, index: int, names: Iterable[str]) -> dict[str, Tensor]:
        held = self._held.read(self.records[index].file)
        if held is not None:
            tensors = load(held)
            return self._read({name: tensors[f"parameter.{name}"] for name in names})
        with self._open(index) as file:  # the others stay on disk; a tensor that is not copied keeps the file mapped
            return self._read({name: file.get_tensor(f"parameter.{name}").clone() for name in names})

    @contextmanager
    def _open(self, index: int) -> Iterator[Any]:
        record = self.records[index]
        path = manifest.place_of(self.path, record)
        try:
            state = manifest.state_of_file(path)
            if self._verified.get(record.file, state) != state:
                self._verify(record, manifest.read_sample_file(path), state)
            with manifest.opened(path) as file:
                if not manifest.is_content_of(file, record):
                    raise OSError("it is another sample's")
                yield file
        except (OSError, SafetensorError, KeyError, TypeError, RuntimeError) as error:
            raise ValueError(self._unreadable(path, error, "")) from error

    def set_log_weights(self, log_weights: Sequence[float]) -> None:
        pairs = zip(self.records, log_weights, strict=True)
        self._write_manifest([replace(record, log_weight=weight) for record, weight in pairs])

    def keep(self, records: list[SampleRecord]) -> None:
        chosen = {repr(r) for r in records}  # as text, since NaN is not equal to itself
        kept = [r for r in self.records if repr(r) in chosen]
        if len(kept) == len(self.records):
            return
        dropped = {r.file for r in self.records} - {r.file for r in kept}
        self._write_manifest(kept)
        self.discard(dropped)

    def keep_newest(self, count: int) -> set[str]:
        """Drop all samples except the newest; return the files that the manifest no longer has, for `discard`.

        The manifest is rewritten only after every `count / 20` dropped samples, so that a sample's cost does not grow
        with `count`; `trim` rewrites it at once.

        Args:
            count: the number of samples to keep.
        """
        surplus = max(len(self.records) - count, 0)
        self._dropped += self.records[:surplus]
        self._places -= _places_of(self.records[:surplus])
        del self.records[:surplus]
        return self.trim() if len(self._dropped) > count // SURPLUS else set()

    def trim(self) -> set[str]:
        """Remove all dropped samples from the manifest; see `keep_newest`."""
        if not self._dropped:
            return set()
        dropped = {r.file for r in self._dropped} - {r.file for r in self.records}
        self._write_manifest(self.records)
        return dropped

    def set_aside(self, records: list[SampleRecord]) -> Path | None:
        """Set the store to these samples, of its own or retired ones, and move its others into a new store beside it.

        At every moment each sample is complete in one of the two folders. The result is the new one, None without
        others.
        """
        wanted = {repr(r) for r in records}
        others = [r for r in self.records if repr(r) not in wanted]
        aside = manifest.next_aside(self.path) if others else None
        if aside is not None:
            manifest.fill_aside(self.path, aside, [*(record.file for record in others), *manifest.COMMON])
            if self._contour is not None:
                write_atomically(aside / CONTOUR, self._contour)
            write_atomically(aside / manifest.MANIFEST, self._content(others, uuid.uuid4().hex))
        self._write_manifest(list(records))
        self.discard({path.name for path in self.path.glob("sample-*.safetensors")} - {r.file for r in records})
        return aside

    def discard(self, files: set[str]) -> set[str]:
        """Delete sample files that are not in the manifest, and nothing else; return those that are left since another
        process has opened them, which Windows refuses."""
        left = set()
        for file in files:
            if manifest.SAMPLE_NAME.fullmatch(file) and is_regular(self.path / file):
                try:
                    (self.path / file).unlink(missing_ok=True)
                except PermissionError:
                    if os.name == "posix":
                        raise
                    left.add(file)
        return left

    def _content(self, records: Iterable[SampleRecord], run: str) -> bytes:
        said = replace(self._manifest, run=run, columns=self.columns, records=list(records))
        return manifest.write_manifest(said)

    def _write_manifest(self, records: list[SampleRecord]) -> None:
        write_atomically(self.path / manifest.MANIFEST, self._content(records, self.run_id))
        self.records, self._dropped, self._places = records, [], _places_of(records)

    # -- samples that a thread writes ---------------------------------------------------------------------------------

    @property
    def lags(self) -> bool:
        """Whether samples are queued whose records are not read yet."""
        return self._writer is not None and len(self._writer) > 0

    def append_later(self, sample: PosteriorSample, copy: Callable[[], PosteriorSample]) -> None:
        """Queue a sample on any device; `copy`, called in the thread, waits for it and returns the host's copy."""
        self._take_place(sample)
        writer = self._open_writer()
        earlier = len(self._records) + len(writer)
        size = sum(tensor.numel() * tensor.element_size() for tensor in sample.own_state.values())
        try:
            with_line = self.unrecorded is None
            writer.submit(
                lambda: partial(self._enter, write_sample(self.path, self._stored(copy()), earlier, with_line)), size
            )
        except OSError:
            self._places.discard(_place_of(sample))
            raise

    def set_contour_later(self, contour: LearnedContour) -> None:
        """Queue the state learned by a contour sampler."""
        copies = HostCopies(contour.state)

        def write() -> Callable[[], None]:
            content = LearnedContour(contour.contour, ContourState(*copies.wait())).to_bytes()
            write_atomically(self.path / CONTOUR, content)
            return partial(setattr, self, "_contour", content)

        self._open_writer().submit(write, 0)

    def _open_writer(self) -> BackgroundWriter:
        if self._writer is None:
            self._writer = BackgroundWriter(self.path)
        return self._writer

    def _settle(self) -> None:
        """Wait until all samples are on the disk."""
        if self._writer is not None:
            self._writer.settle()

    def close(self) -> None:
        """Wait for the queue, and end the thread; later samples begin another one."""
        writer, self._writer = self._writer, None
        if writer is None:
            return
        try:
            writer.close()
        finally:
            self._places = _places_of([*self.records, *(self.unrecorded or ())])

    def __getstate__(self) -> dict[str, object]:
        self._settle()
        return self.__dict__ | {"_writer": None}


def _place_of(one: PosteriorSample | SampleRecord) -> tuple[int, int, int]:
    return one.step, one.chain, one.draw


def _places_of(records: Iterable[SampleRecord]) -> set[tuple[int, int, int]]:
    return set(map(_place_of, records))


# -- the folder of a run -----------------------------------------------------------------------------------------------


def begin_store(
    path: Path,
    model_description: Any,
    columns: Columns | None = None,
    shared: Mapping[str, Tensor] | None = None,
    narrow: Narrow | None = None,
) -> StoreLock:
    """Create the empty store of a new run, and move the samples of an earlier run aside."""
    lock = StoreLock(path)
    remove_left_over(path)
    while (path / manifest.MANIFEST).exists():  # again if another fit has begun and ended between the two locks
        aside = manifest.next_aside(path)
        if os.name != "posix":  # Windows moves no folder with an open file, so another fit's either
            lock.release()
        try:
            patiently(partial(path.rename, aside))
        except PermissionError as error:
            raise PermissionError(
                error.errno,
                f"the samples of an earlier run in {path} cannot be moved to {aside} ({error.strerror}): close the "
                "programs that have one of its files open, or pass another dirpath",
            ) from error
        flush_folder(path.parent)
        rank_zero_info(f"The samples of an earlier run in {path} were moved to {aside}")
        lock.release()
        lock = StoreLock(path)
    DiskStore.create(path, model_description, columns, shared, narrow)
    return lock


@contextmanager
def whole_store(path: Path, *common: Any) -> Iterator[DiskStore]:
    """Create a store for samples that there are already. Its manifest names all of them, when the block has ended;
    after an error nothing of it is left, since some of them would load like all."""
    earlier = set(path.iterdir()) if path.is_dir() else set()
    store = DiskStore.create(path, *common)
    try:
        store.share_writing()
        yield store
        store.record(store.take_written())
        store.share_writing(False)
    except BaseException as error:
        left = [entry for entry in path.iterdir() if entry not in earlier and entry.name.startswith(OF_A_STORE)]
        for entry in sorted(left, key=lambda entry: entry.name != manifest.MANIFEST):
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        if isinstance(error, OSError) and error.errno is not None:
            raise OSError(
                error.errno,
                f"the samples could not be written to {path}: {os.strerror(error.errno)}{free_space(path)}; nothing "
                "of them is left there: free space, or pass another path",
            ) from error
        raise


def check_same_dtype(store: DiskStore, narrow: Narrow | None) -> None:
    """Raise if a run is to go on in a store whose samples have another dtype."""
    stored, given = (None if one is None else one.dtype for one in (store.narrow, narrow))
    if stored != given:
        raise ValueError(
            f"dtype={given!r} differs from that of the samples in {store.path}, {stored!r}: pass dtype={stored!r} "
            "to go on with them, or start a new run"
        )


def continue_store(path: Path, chosen: Callable[[DiskStore], list[SampleRecord]]) -> StoreLock:
    """Set a store to the samples that a run has drawn before it goes on, and move its others aside."""
    lock = StoreLock(path)
    remove_left_over(path)
    store = DiskStore(path)
    aside = store.set_aside(chosen(store))
    if aside is not None:
        rank_zero_info(f"{len(DiskStore(aside))} samples in {path} were drawn after the checkpoint: moved to {aside}")
    return lock
