"""Samples in a folder: safetensors files and a manifest."""

import json
import os
import uuid
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from lightning_sgmcmc.chains.sample import PosteriorSample, SampleRecord, on_cpu, record_of
from lightning_sgmcmc.contour.learned import LearnedContour
from lightning_sgmcmc.files import flush, free_space, megabytes, write_atomically
from lightning_sgmcmc.posterior.aside import link_or_copy, next_aside, place_of
from lightning_sgmcmc.posterior.lock import unusable
from lightning_sgmcmc.posterior.store import SampleStore, TargetScaling

MANIFEST = "manifest.jsonl"
CONTOUR = "contour.safetensors"
FORMAT = "lightning-sgmcmc samples"
VERSION = 1
ORIGIN = ("step", "cycle", "chain", "energy", "log_weight", "bin", "comparable")
"""What a sample has of its record."""
LEAVE_OUT = "Posterior.load(…, skip_damaged=True) skips"


class DiskStore(SampleStore):
    """Samples in a folder: `sample-….safetensors` files and `manifest.jsonl`.

    A sample is written under a temporary name, flushed to disk and renamed, and only then recorded in the manifest.
    Every file in the manifest is therefore complete, whenever the process is killed. A truncated last line is ignored.
    Checksums in the manifest detect files that were damaged later. `contour.safetensors` stores the state learned by a
    contour sampler. An open store stays bound to its samples: those that a later fit moved aside are read from there.

    Args:
        path: an existing store's folder (see `create`).
        verify: whether to check each file's checksum on first read.
        skip_damaged: skip unreadable lines of the manifest (`damaged_lines`) instead of raising an error.

    Raises:
        FileNotFoundError: if there is no store.
        ValueError: if the manifest is damaged, has another format, or a newer version.
    """

    def __init__(self, path: str | Path, verify: bool = True, skip_damaged: bool = False) -> None:
        self.path = Path(path)
        self.verify = verify
        self.damaged_lines: list[int] = []
        """Numbers of the manifest's skipped lines, from 1."""
        self._skip_damaged = skip_damaged
        self._verified: set[str] = set()
        self.model_description: Any = None
        self.run_id: str | None = None
        """Identifies the run that wrote the store; None in stores of version 0.1.0."""
        self.records = []
        self.reload()

    @classmethod
    def create(
        cls, path: str | Path, model_description: Any = None, scaling: TargetScaling | None = None
    ) -> "DiskStore":
        """Create an empty store.

        Args:
            path: folder, created if needed; it must not contain a store.
            model_description: plain data that describe the network (see `lightning_sgmcmc.posterior.description`),
                or None.
            scaling: the scaling of the targets, or None.

        Raises:
            FileExistsError: if the folder contains a store.
        """
        path = Path(path)
        if (path / MANIFEST).exists():
            raise FileExistsError(f"{path} already contains a sample store: choose another folder")
        try:
            path.mkdir(parents=True, exist_ok=True)
            _write_manifest(path, model_description, scaling, uuid.uuid4().hex, [])
        except OSError as error:
            raise unusable(path, error) from error
        return cls(path)

    @property
    def contour(self) -> LearnedContour | None:  # type: ignore[override]
        """The state learned by a contour sampler at its last sample, None without one.

        Raises:
            ValueError: if the file is damaged.
        """
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
        manifest = self.path / MANIFEST
        if not manifest.is_file():
            raise FileNotFoundError(f"no sample store at {self.path}: there is no {MANIFEST}")
        lines = manifest.read_bytes().split(b"\n")
        complete = lines[:-1]  # the rest, after the last newline, is truncated
        try:
            header = json.loads(complete[0])
            newer = header["format"] == FORMAT and header["version"] > VERSION
            if header["format"] != FORMAT:
                raise ValueError
            self.model_description, self.run_id = header["model"], header.get("run")
            self.scaling = TargetScaling.from_plain(header.get("targets"))
        except (ValueError, TypeError, LookupError):
            raise ValueError(f"{manifest} is not the manifest of a sample store") from None
        if newer:
            raise ValueError(
                f"{manifest} has version {header['version']}, this library reads up to {VERSION}: update it"
            )
        self.records, self.damaged_lines = [], []
        for number, line in enumerate(complete[1:], start=2):
            try:
                self.records.append(SampleRecord(**json.loads(line)))
            except (ValueError, TypeError):
                self.damaged_lines.append(number)
        if self.damaged_lines and not self._skip_damaged:
            raise ValueError(
                f"line {self.damaged_lines[0]} of {manifest} is damaged, so it is not the manifest of a sample "
                f"store; {LEAVE_OUT} its sample"
            )
        contour = self.path / CONTOUR
        self._contour = contour.read_bytes() if contour.is_file() else None
        if self._has_own_constants():
            self.records = [replace(record, comparable=False) for record in self.records]

    def _has_own_constants(self) -> bool:
        """Return whether the records do not say that their weights compare only within a chain, but their contour does.

        Early versions did not record it. Weights normalised within chains are right for every contour, so a damaged
        file counts as that of chains with their own π.
        """
        records = self.records
        if any(not record.comparable for record in records) or len({record.chain for record in records}) < 2:
            return False
        if len({record.log_weight for record in records}) < 2:
            return False
        try:
            contour = self.contour
        except ValueError:
            return True
        return contour is not None and not contour.is_shared

    def append(self, sample: PosteriorSample) -> None:
        if any(r.step == sample.step and r.chain == sample.chain for r in self.records):
            raise ValueError(
                f"{self.path} already has a sample of step {sample.step}, chain {sample.chain}: start each run in a "
                "folder of its own"
            )
        name = f"sample-{sample.step:08d}-chain-{sample.chain:03d}.safetensors"
        sample = on_cpu(sample)
        tensors = {f"parameter.{k}": v.contiguous() for k, v in sample.parameters.items()}
        tensors |= {f"buffer.{k}": v.contiguous() for k, v in sample.buffers.items()}
        metadata = {
            k: str(v) for k, v in asdict(record_of(sample)).items() if k not in ("file", "checksum", "comparable")
        }
        metadata["names"] = json.dumps(list(tensors))  # safetensors does not preserve their order
        content = save(tensors, metadata)
        record = record_of(sample, name, _checksum(content))
        try:
            write_atomically(self.path / name, content)
            self._add_line(_line(record))
        except OSError as error:
            raise OSError(
                error.errno,
                f"the sample of step {sample.step} could not be written to {self.path / name} "
                f"({megabytes(len(content))}): {error.strerror}{free_space(self.path)}; the {len(self)} earlier "
                "samples are complete: free space, and resume from the last checkpoint",
            ) from error
        self.records.append(record)
        self._verified.add(name)

    def _add_line(self, line: str) -> None:
        with open(self.path / MANIFEST, "r+b") as manifest:
            content_end = _end_of_last_line(manifest)
            manifest.seek(content_end)
            manifest.truncate()
            manifest.write((line + "\n").encode())
            try:
                flush(manifest)
            except OSError:
                manifest.truncate(content_end)
                raise

    def __getitem__(self, index: int) -> PosteriorSample:
        record = self.records[index]
        path = place_of(self.path, record)
        try:
            content = path.read_bytes()
            if self.verify and record.file not in self._verified:
                _verify(path, content, record)
                self._verified.add(record.file)
            tensors = _in_order(load(content), content)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"the sample file {path} is missing or damaged: {error}; {LEAVE_OUT} it") from error
        parameters = {k.removeprefix("parameter."): v for k, v in tensors.items() if k.startswith("parameter.")}
        buffers = {k.removeprefix("buffer."): v for k, v in tensors.items() if k.startswith("buffer.")}
        own = {name: getattr(record, name) for name in ORIGIN}
        return PosteriorSample(**own, parameters=parameters, buffers=buffers)

    def shapes(self, index: int) -> dict[str, tuple[int, ...]]:
        with self._open(index) as file:
            keys = [key for key in file.keys() if key.startswith("parameter.")]  # noqa: SIM118, not a dictionary
            return {key.removeprefix("parameter."): tuple(file.get_slice(key).get_shape()) for key in keys}

    def parameters(self, index: int, names: Iterable[str]) -> dict[str, Tensor]:
        with self._open(index) as file:  # the others stay on disk
            return {name: file.get_tensor(f"parameter.{name}") for name in names}

    @contextmanager
    def _open(self, index: int) -> Iterator[Any]:
        path = place_of(self.path, self.records[index])
        try:
            with safe_open(path, framework="pt") as file:
                yield file
        except (FileNotFoundError, SafetensorError) as error:
            raise ValueError(f"the sample file {path} is missing or damaged: {error}") from error

    def keep(self, records: list[SampleRecord], retire: bool = False) -> None:
        """Drop all samples except those with the given records.

        Args:
            records: the records to keep.
            retire: keep the files of the dropped samples, so that `restore` can recover them.
        """
        chosen = {repr(r) for r in records}  # as text, since NaN is not equal to itself
        kept = [r for r in self.records if repr(r) in chosen]
        if len(kept) == len(self.records):
            return
        dropped = {r.file for r in self.records} - {r.file for r in kept}
        self._write_manifest(kept)
        if not retire:
            self.discard(dropped)

    def set_aside(self, records: list[SampleRecord]) -> Path | None:
        """Set the store to these samples, and move its others into a new folder beside it, which is a store too.

        At every moment each sample is complete in one of the two folders.

        Args:
            records: samples of this store, or retired ones.

        Returns:
            the new folder; None if the store has no others.
        """
        wanted = {repr(r) for r in records}
        others = [r for r in self.records if repr(r) not in wanted]
        aside = next_aside(self.path) if others else None
        if aside is not None:
            aside.mkdir()
            for record in others:
                if (self.path / record.file).is_file():
                    link_or_copy(self.path / record.file, aside / record.file)
            if self._contour is not None:
                write_atomically(aside / CONTOUR, self._contour)
            _write_manifest(aside, self.model_description, self.scaling, uuid.uuid4().hex, others)
        self._write_manifest(list(records))
        self.discard({path.name for path in self.path.glob("sample-*.safetensors")} - {r.file for r in records})
        return aside

    def discard(self, files: set[str]) -> None:
        """Delete sample files that are not in the manifest."""
        for file in files:
            (self.path / file).unlink(missing_ok=True)

    def _write_manifest(self, records: list[SampleRecord]) -> None:
        _write_manifest(self.path, self.model_description, self.scaling, self.run_id, records)
        self.records = records


def _write_manifest(
    path: Path, description: Any, scaling: TargetScaling | None, run_id: str | None, records: list[SampleRecord]
) -> None:
    header = {"format": FORMAT, "version": VERSION, "model": description, "run": run_id}
    if scaling is not None:
        header["targets"] = asdict(scaling)
    lines = [json.dumps(header), *(_line(r) for r in records)]
    write_atomically(path / MANIFEST, ("\n".join(lines) + "\n").encode())


def _line(record: SampleRecord) -> str:
    """Return a record's line of the manifest; versions before `comparable` read the line of an ordinary run too."""
    fields = asdict(record)
    if record.comparable:
        del fields["comparable"]
    return json.dumps(fields)


def _checksum(content: bytes) -> str:
    return f"{zlib.crc32(content):08x}"


def _verify(path: Path, content: bytes, record: SampleRecord) -> None:
    """Raise OSError if a file is not the one that was written, according to the record."""
    if record.checksum:
        if _checksum(content) != record.checksum:
            raise OSError("its checksum differs from the manifest's")
        return
    with safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
    if (metadata.get("step"), metadata.get("chain")) != (str(record.step), str(record.chain)):
        raise OSError(
            f"it holds step {metadata.get('step')}, chain {metadata.get('chain')}, but the manifest has step "
            f"{record.step}, chain {record.chain}"
        )


def _in_order(tensors: dict[str, Tensor], content: bytes) -> dict[str, Tensor]:
    """Return a file's tensors in the module's order."""
    length = int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8 : 8 + length]).get("__metadata__", {})
    return {
        name: tensors[name] for name in json.loads(metadata.get("names", "[]")) or sorted(tensors) if name in tensors
    }


def _end_of_last_line(file: Any, block: int = 4096) -> int:
    """Return the position after the last newline, reading from the end."""
    position = file.seek(0, os.SEEK_END)
    while position > 0:
        start = max(0, position - block)
        file.seek(start)
        found = file.read(position - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        position = start
    return 0
