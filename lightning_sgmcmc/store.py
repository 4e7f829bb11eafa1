"""Where posterior samples are kept: in memory, or one safetensors file each beside a manifest."""

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

MANIFEST = "manifest.jsonl"
FORMAT = "lightning-sgmcmc samples"
VERSION = 1


@dataclass
class PosteriorSample:
    """One draw from the posterior: a chain's parameters and buffers, and where in the run they come from.

    Attributes:
        step: optimizer steps made when it was drawn.
        cycle: index of the cycle, from 0 (0 throughout without cycles).
        chain: global index of the chain.
        energy: the step's mini-batch estimate Ũ of the potential energy (before the step's update), in nats.
        log_weight: log of its importance weight, up to a constant; 0 where samples are equally weighted.
        parameters: all parameters of this chain's module by name, without a chain axis.
        buffers: all buffers likewise (BatchNorm's running statistics, ...).
    """

    step: int
    cycle: int
    chain: int
    energy: float
    log_weight: float = 0.0
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)

    @property
    def state(self) -> dict[str, Tensor]:
        """Parameters and buffers together."""
        return {**self.parameters, **self.buffers}


@dataclass(frozen=True)
class SampleRecord:
    """What the manifest says of one sample (see `PosteriorSample`), and the name of its file ("" in memory)."""

    step: int
    cycle: int
    chain: int
    energy: float
    log_weight: float
    file: str = ""


class SampleStore(ABC):
    """An ordered collection of samples with a record of each."""

    records: list[SampleRecord]

    @abstractmethod
    def append(self, sample: PosteriorSample) -> None:
        """Add a sample at the end."""

    @abstractmethod
    def __getitem__(self, index: int) -> PosteriorSample: ...

    def shapes(self, index: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a sample's parameters by name."""
        return {name: tuple(tensor.shape) for name, tensor in self[index].parameters.items()}

    def parameters(self, index: int, names: Iterable[str]) -> dict[str, Tensor]:
        """Return some of a sample's parameters."""
        parameters = self[index].parameters
        return {name: parameters[name] for name in names}

    @abstractmethod
    def keep(self, records: list[SampleRecord]) -> None:
        """Drop all samples but those with the given records."""

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[PosteriorSample]:
        return (self[index] for index in range(len(self)))


class MemoryStore(SampleStore):
    """Samples in the host's memory."""

    def __init__(self) -> None:
        self.records = []
        self._samples: list[PosteriorSample] = []

    def append(self, sample: PosteriorSample) -> None:
        self._samples.append(_on_cpu(sample))
        self.records.append(_record(sample))

    def __getitem__(self, index: int) -> PosteriorSample:
        return self._samples[index]

    def keep(self, records: list[SampleRecord]) -> None:
        wanted = {repr(r) for r in records}
        self._samples = [s for s, r in zip(self._samples, self.records, strict=True) if repr(r) in wanted]
        self.records = [r for r in self.records if repr(r) in wanted]


class DiskStore(SampleStore):
    """Samples in a folder: `sample-….safetensors` files and `manifest.jsonl`.

    A sample is written under a temporary name, flushed to the disk and renamed, and only then named by a line of the
    manifest; so what the manifest names is complete, whenever the process is killed. A last line cut short is ignored.

    Args:
        path: an existing store's folder (see `create`).

    Raises:
        FileNotFoundError: if there is no store.
        ValueError: if the manifest is not one of ours or of a newer version.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.model_description: Any = None
        self.records = []
        self.reload()

    @classmethod
    def create(cls, path: str | Path, model_description: Any = None) -> "DiskStore":
        """Make an empty store.

        Args:
            path: folder, made if needed; it must not hold a store yet.
            model_description: plain data that describe the network (see `lightning_sgmcmc.description`), or None.

        Raises:
            FileExistsError: if the folder holds a store.
        """
        path = Path(path)
        if (path / MANIFEST).exists():
            raise FileExistsError(f"{path} holds a sample store already")
        path.mkdir(parents=True, exist_ok=True)
        header = {"format": FORMAT, "version": VERSION, "model": model_description}
        _write_atomically(path / MANIFEST, (json.dumps(header) + "\n").encode())
        return cls(path)

    def reload(self) -> None:
        """Read the manifest anew."""
        manifest = self.path / MANIFEST
        if not manifest.is_file():
            raise FileNotFoundError(f"no sample store at {self.path}: there is no {MANIFEST}")
        lines = manifest.read_bytes().split(b"\n")
        complete = lines[:-1]  # what follows the last newline was cut short
        try:
            header = json.loads(complete[0])
            newer = header["format"] == FORMAT and header["version"] > VERSION
            if header["format"] != FORMAT:
                raise ValueError
            records = [] if newer else [SampleRecord(**json.loads(line)) for line in complete[1:]]
            self.model_description = header["model"]
        except (ValueError, TypeError, LookupError):
            raise ValueError(f"{manifest} is not the manifest of a sample store") from None
        if newer:
            raise ValueError(f"{manifest} has version {header['version']}, this library reads up to {VERSION}")
        self.records = records

    def append(self, sample: PosteriorSample) -> None:
        name = f"sample-{sample.step:08d}-chain-{sample.chain:03d}.safetensors"
        record = _record(sample, name)
        sample = _on_cpu(sample)
        tensors = {f"parameter.{k}": v.contiguous() for k, v in sample.parameters.items()}
        tensors |= {f"buffer.{k}": v.contiguous() for k, v in sample.buffers.items()}
        metadata = {key: str(value) for key, value in asdict(record).items() if key != "file"}
        _write_atomically(self.path / name, save(tensors, metadata))
        with open(self.path / MANIFEST, "r+b") as manifest:
            content_end = _end_of_last_line(manifest)
            manifest.seek(content_end)
            manifest.truncate()
            manifest.write((json.dumps(asdict(record)) + "\n").encode())
            try:
                _flush(manifest)
            except OSError:
                manifest.truncate(content_end)
                raise
        self.records.append(record)

    def __getitem__(self, index: int) -> PosteriorSample:
        record = self.records[index]
        path = self.path / record.file
        try:
            tensors = load_file(path)
        except (FileNotFoundError, SafetensorError) as error:
            raise ValueError(f"the sample file {path} is missing or damaged: {error}") from error
        parameters = {k.removeprefix("parameter."): v for k, v in tensors.items() if k.startswith("parameter.")}
        buffers = {k.removeprefix("buffer."): v for k, v in tensors.items() if k.startswith("buffer.")}
        return PosteriorSample(
            record.step, record.cycle, record.chain, record.energy, record.log_weight, parameters, buffers
        )

    def shapes(self, index: int) -> dict[str, tuple[int, ...]]:
        with self._open(index) as file:
            keys = [key for key in file.keys() if key.startswith("parameter.")]  # noqa: SIM118, not a dictionary
            return {key.removeprefix("parameter."): tuple(file.get_slice(key).get_shape()) for key in keys}

    def parameters(self, index: int, names: Iterable[str]) -> dict[str, Tensor]:
        with self._open(index) as file:  # the others stay on the disk
            return {name: file.get_tensor(f"parameter.{name}") for name in names}

    @contextmanager
    def _open(self, index: int) -> Iterator[Any]:
        path = self.path / self.records[index].file
        try:
            with safe_open(path, framework="pt") as file:
                yield file
        except (FileNotFoundError, SafetensorError) as error:
            raise ValueError(f"the sample file {path} is missing or damaged: {error}") from error

    def keep(self, records: list[SampleRecord]) -> None:
        wanted = {repr(r) for r in records}  # as text, since a NaN among the numbers equals nothing
        kept = [r for r in self.records if repr(r) in wanted]
        if len(kept) == len(self.records):
            return
        header = {"format": FORMAT, "version": VERSION, "model": self.model_description}
        lines = [json.dumps(header), *(json.dumps(asdict(r)) for r in kept)]
        _write_atomically(self.path / MANIFEST, ("\n".join(lines) + "\n").encode())
        for file in {r.file for r in self.records} - {r.file for r in kept}:
            (self.path / file).unlink(missing_ok=True)
        self.records = kept


def _record(sample: PosteriorSample, file: str = "") -> SampleRecord:
    return SampleRecord(sample.step, sample.cycle, sample.chain, sample.energy, sample.log_weight, file)


def _on_cpu(sample: PosteriorSample) -> PosteriorSample:
    parameters = {k: v.detach().to("cpu", copy=True) for k, v in sample.parameters.items()}
    buffers = {k: v.detach().to("cpu", copy=True) for k, v in sample.buffers.items()}
    return PosteriorSample(
        sample.step, sample.cycle, sample.chain, sample.energy, sample.log_weight, parameters, buffers
    )


def _write_atomically(path: Path, content: bytes) -> None:
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            _flush(file)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    _flush_folder(path.parent)


def _flush(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _flush_folder(path: Path) -> None:
    if os.name != "posix":  # elsewhere folders cannot be opened
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _end_of_last_line(file: Any, block: int = 4096) -> int:
    """Return the position behind the last newline, reading from the end."""
    position = file.seek(0, os.SEEK_END)
    while position > 0:
        start = max(0, position - block)
        file.seek(start)
        found = file.read(position - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        position = start
    return 0
