"""The files of a store on disk: the manifest's lines, the samples' files, how both are written, and those set aside."""

import errno
import json
import math
import os
import re
import shutil
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any
from weakref import WeakSet

from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from lightning_sgmcmc.chains.samples import PosteriorSample, SampleRecord, record_of
from lightning_sgmcmc.files import (
    check_regular,
    flush,
    flush_folder,
    free_space,
    is_regular,
    megabytes,
    parse_json,
    read_regular,
    write_atomically,
)
from lightning_sgmcmc.plain import as_plain, check_known, from_plain
from lightning_sgmcmc.posterior.store import DTYPES
from lightning_sgmcmc.tables import Columns

MANIFEST = "manifest.jsonl"
LARGEST_MANIFEST = 2**30
"""In bytes; ten thousand samples have about 2 MB."""
FORMAT = "lightning-sgmcmc samples"
VERSION = 3
"""Version 3 has parameters in 16 bits, version 2 tensors that all samples share; other stores are of version 1."""
VERSIONS = (1, 2, 3)
"""Those that are read. A later release that changes the form begins from here."""
SAMPLE_NAME = re.compile(r"sample-[0-9]{8,20}-chain-[0-9]{3,20}(-draw-[0-9]{3,20})?\.safetensors")
"""Names of sample files. A manifest or a checkpoint can come from anywhere, so no other file is read or deleted."""
LARGEST_COUNT = 2**62


@dataclass
class Manifest:
    """What a manifest says: of the network, the library and the run that wrote it, the columns, the samples, the lines
    that are no records, from 1, and the checksum of the file with what all samples share, if there is one; how narrow
    parameters are, and the checksum of the file with their base, if so; and whether `resample` drew the samples."""

    model: Any = None
    library: str = ""
    run: str = ""
    columns: Columns = field(default_factory=Columns)
    records: list[SampleRecord] = field(default_factory=list)
    damaged_lines: list[int] = field(default_factory=list)
    shared: str | None = None
    dtype: str | None = None
    base: str | None = None
    resampled: bool | None = None


def sample_name(step: int, chain: int, draw: int = 0) -> str:
    """Return the name of a sample's file."""
    return f"sample-{step:08d}-chain-{chain:03d}{f'-draw-{draw:03d}' if draw else ''}.safetensors"


def write_manifest(known: Manifest) -> bytes:
    """Return the content of a manifest; the version is the oldest that can say it."""
    number = VERSION if known.dtype else 1 if known.shared is None else 2
    header = {"format": FORMAT, "version": number, "library": version("lightning-sgmcmc"), "model": known.model}
    header |= {"run": known.run}
    header |= {n: getattr(known, n) for n in ("shared", "dtype", "base", "resampled") if getattr(known, n) is not None}
    header |= as_plain(known.columns)
    return "".join(f"{line}\n" for line in (json.dumps(header), *map(line_of, known.records))).encode()


def line_of(record: SampleRecord) -> str:
    """Return a record's line, without its end and without what an ordinary run leaves at its default."""
    return json.dumps(as_plain(record))


def parse_manifest(content: bytes, where: str) -> Manifest:
    """Return what a manifest says; an incomplete last line is ignored."""
    foreign = ValueError(f"{where} is not the manifest of a sample store")
    header, *lines = content.split(b"\n")[:-1] or [b""]
    try:
        known = parse_json(header)
        kind, number, library = known["format"], known["version"], known.get("library", "")
    except (ValueError, TypeError, LookupError, AttributeError):
        raise foreign from None
    if kind != FORMAT or not isinstance(number, int):
        raise foreign
    library = library if isinstance(library, str) and len(library) < 40 else ""
    if number not in VERSIONS:
        remedy = "update it" if number > VERSION else "load it with the version that wrote it"
        writer = f" (lightning-sgmcmc {library} wrote it)" if library else ""
        raise ValueError(f"{where} has version {number}, this library reads up to {VERSION}: {remedy}{writer}")
    try:
        model, run, columns = known["model"], known["run"], from_plain(Columns, known)
        shared, dtype, base, resampled = (known.get(name) for name in ("shared", "dtype", "base", "resampled"))
    except (ValueError, TypeError, LookupError, AttributeError):
        raise foreign from None
    if not isinstance(run, str) or not all(isinstance(one, str | None) for one in (shared, base)):
        raise foreign
    if dtype not in (None, *DTYPES) or not isinstance(dtype, str | None) or resampled not in (None, True):
        raise foreign
    manifest = Manifest(model, library, run, columns, shared=shared, dtype=dtype, base=base, resampled=resampled)
    seen: set[tuple[int, int, int]] = set()
    for index, line in enumerate(lines, start=2):
        try:
            manifest.records.append(_record_from(parse_json(line), seen))
        except ValueError:
            manifest.damaged_lines.append(index)
    return manifest


def records_from(entries: Iterable[Any]) -> list[SampleRecord]:
    """Return the records with these fields."""
    seen: set[tuple[int, int, int]] = set()
    return [_record_from(entry, seen) for entry in entries]


def _record_from(entry: Any, seen: set[tuple[int, int, int]]) -> SampleRecord:
    """Return the record with these fields, and note its step, chain and draw, which no other record may have."""
    found: SampleRecord = from_plain(SampleRecord, entry, "a sample's record")
    check_known(SampleRecord, entry, "a sample's record")
    counts = (found.step, found.cycle, found.chain, found.draw, found.bin or 0)
    if not all(0 <= count < LARGEST_COUNT for count in counts):
        raise ValueError("a sample's step, cycle, chain, draw and bin should be integers, 0 or larger")
    if entry["energy"] is None or entry["log_weight"] is None:
        raise ValueError("a sample's energy and log_weight should be numbers")
    if not 0 <= found.temperature < math.inf:
        raise ValueError("a sample's temperature should be a number, 0 or larger")
    if not SAMPLE_NAME.fullmatch(found.file):
        raise ValueError(f"{found.file[:80]!r} is not the name of a sample's file")
    if not found.checksum:
        raise ValueError(f"the record of {found.file} has no checksum")
    place = found.step, found.chain, found.draw
    if place in seen:
        raise ValueError("a sample is recorded twice: step {}, chain {}, draw {}".format(*place))
    seen.add(place)
    return replace(
        found, energy=float(found.energy), log_weight=float(found.log_weight), temperature=float(found.temperature)
    )


def is_newer(library: str) -> bool:
    """Return whether a version of this library is newer than the installed one."""
    theirs, ours = (re.findall(r"[0-9]{1,9}", name)[:3] for name in (library, version("lightning-sgmcmc")))
    return list(map(int, theirs)) > list(map(int, ours))


# -- sample file -------------------------------------------------------------------------------------------------------

LARGE_SAMPLE = 2**28
"""Files above this size, in bytes, are checked before they are read."""
IN_METADATA = ("step", "cycle", "chain", "energy", "log_weight", "bin")


def sample_content(sample: PosteriorSample) -> bytes:
    """Return the content of a sample's file: tensors, and the rest of the sample as metadata."""
    tensors: dict[str, Tensor] = {}
    places: set[int] = set()
    for part, named in (("parameter", sample.parameters), ("buffer", sample.buffers), ("scale", sample.scales)):
        for name, tensor in named.items():
            own = tensor.detach().cpu().contiguous()
            # safetensors refuses two names of one tensor.
            tensors[f"{part}.{name}"] = own.clone() if own.data_ptr() in places else own
            places.add(own.data_ptr())
    metadata = {name: str(getattr(sample, name)) for name in IN_METADATA}
    metadata["names"] = json.dumps(list(tensors))  # safetensors does not preserve their order
    return save(tensors, metadata)


def checksum(content: bytes) -> str:
    """Return the CRC-32 of a file's bytes in hexadecimal."""
    return f"{zlib.crc32(content):08x}"


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file and read its header; its name may be no UTF-8, which safetensors demands."""
    check_regular(path)
    name = str(path)
    if name == name.encode(errors="ignore").decode():
        with safe_open(path, framework="pt") as file:
            yield file
        return
    with open(path, "rb") as plain, safe_open(f"/dev/fd/{plain.fileno()}", framework="pt") as file:
        yield file


def read_sample_file(path: Path) -> bytes:
    """Return a sample file's content."""
    check_regular(path)
    if path.stat().st_size > LARGE_SAMPLE:
        with opened(path):  # reads only the header
            pass
    return path.read_bytes()


class OpenFiles:
    """Sample files that are held open, so that they can be read after another process has deleted them; a copy in this
    process shares them, and one in another process has none."""

    _close = staticmethod(os.close)  # at the end of a program, modules may be gone before this

    def __init__(self) -> None:
        self._descriptors: dict[str, int] = {}

    def hold(self, name: str, path: Path) -> None:
        """Open a file."""
        check_regular(path)
        self._descriptors[name] = os.open(path, os.O_RDONLY)

    def read(self, name: str) -> bytes | None:
        """Return a file's content; None if it is not held."""
        descriptor = self._descriptors.get(name)
        if descriptor is None:
            return None
        content, size = bytearray(), os.fstat(descriptor).st_size
        while len(content) < size:
            part = os.pread(descriptor, size - len(content), len(content))  # at most 2 GB at a time
            if not part:
                raise OSError(errno.EIO, "it has become shorter")
            content += part
        return bytes(content)

    def close(self) -> None:
        """Close all files."""
        while self._descriptors:
            self._close(self._descriptors.popitem()[1])

    __del__ = close

    def __deepcopy__(self, memo: Any) -> "OpenFiles":
        return self

    def __reduce__(self) -> Any:
        return OpenFiles, ()


def most_open_files() -> int:
    """Return how many files a store may hold open: a quarter of what the system allows this process."""
    try:
        import resource
    except ImportError:  # not a POSIX system
        return 0
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4


def in_order(tensors: dict[str, Tensor], content: bytes) -> dict[str, Tensor]:
    """Return a file's tensors in the module's order."""
    length = int.from_bytes(content[:8], "little")
    names = parse_json(parse_json(content[8 : 8 + length]).get("__metadata__", {}).get("names", "[]"))
    return {name: tensors[name] for name in names or sorted(tensors) if name in tensors}


# -- writing -----------------------------------------------------------------------------------------------------------

LARGEST_WAITING = 2**30
"""Bytes that may wait for the thread; then the run waits until there is room."""

Job = Callable[[], Callable[[], None]]
"""Writes something; returns what to do in the run's thread once it is written."""


def write_sample(folder: Path, sample: PosteriorSample, earlier: int, with_line: bool = True) -> SampleRecord:
    """Write a sample's file and its line in the manifest, both flushed to the disk; return its record."""
    name = sample_name(sample.step, sample.chain, sample.draw)
    content = sample_content(sample)
    record = record_of(sample, name, checksum(content))
    try:
        write_atomically(folder / name, content)
        if with_line:
            add_line(folder / MANIFEST, line_of(record))
    except OSError as error:
        what = f"the sample of step {sample.step}", f"{folder / name} ({megabytes(len(content))})"
        raise unwritten(folder, *what, error, earlier) from error
    return record


def unwritten(folder: Path, what: str, where: str, error: OSError, earlier: int) -> OSError:
    """Return the error for a part of a store that could not be written."""
    remedy = f"the {earlier} earlier samples are complete: free space, and resume from the last checkpoint"
    if not (folder / MANIFEST).exists():
        remedy = f"the folder was deleted, with the {earlier} earlier samples: start a new run"
    reason = f"{error.strerror}{free_space(folder)}"
    return OSError(error.errno, f"{what} could not be written to {where}: {reason}; {remedy}")


def add_line(path: Path, line: str, block: int = 4096) -> None:
    """Add a line, or several, to a manifest, over a truncated last one."""
    check_regular(path)
    with open(path, "r+b") as manifest:
        end = manifest.seek(0, os.SEEK_END)
        while end > 0:  # read from the end, for the position after the last newline
            start = manifest.seek(max(0, end - block))
            found = manifest.read(end - start).rfind(b"\n")
            if found >= 0:
                end = start + found + 1
                break
            end = start
        manifest.seek(end)
        manifest.truncate()
        manifest.write((line + "\n").encode())
        try:
            flush(manifest)
        except OSError:
            manifest.truncate(end)
            raise


class BackgroundWriter:
    """Does the writing for a folder in a thread, one job after another; after a failure it does no further job."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="samples")  # whose jobs are done before Python exits
        self._waiting: deque[tuple[Future[Callable[[], None] | None], int]] = deque()
        self._finished: list[Callable[[], None]] = []
        self._error: Exception | None = None
        _WRITERS.add(self)

    def __len__(self) -> int:
        """Return the number of jobs that `settle` has not finished."""
        return len(self._waiting) + len(self._finished)

    def submit(self, job: Job, size: int) -> None:
        """Queue a job that holds `size` bytes; wait while more than `LARGEST_WAITING` bytes are waiting."""
        while self._waiting:
            if not self._waiting[0][0].done() and size + sum(own for _, own in self._waiting) <= LARGEST_WAITING:
                break
            self._take()
        self._raise()
        self._waiting.append((self._thread.submit(self._do, job), size))

    def _do(self, job: Job) -> Callable[[], None] | None:
        if self._error is not None:
            return None
        try:
            return job()
        except Exception as error:
            self._error = error
            return None

    def _take(self) -> None:
        finish = self._waiting[0][0].result()
        self._waiting.popleft()
        if finish is not None:
            self._finished.append(finish)

    def wait(self) -> None:
        """Return when no job is waiting or being done."""
        for future, _ in list(self._waiting):
            future.result()

    def settle(self) -> None:
        """Wait for all jobs, and finish those that succeeded in the calling thread."""
        while self._waiting:
            self._take()
        finished, self._finished = self._finished, []
        for finish in finished:
            finish()
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Wait for all jobs, and end the thread."""
        try:
            self.settle()
        finally:
            self._thread.shutdown()
            _WRITERS.discard(self)


_WRITERS: WeakSet[BackgroundWriter] = WeakSet()
"""The writers of this process."""


def wait_for_writers(folder: Path) -> None:
    """Return when everything that this process has drawn for a folder is written, or has failed."""
    for writer in list(_WRITERS):
        if writer.folder == folder.absolute():
            writer.wait()


# -- aside -------------------------------------------------------------------------------------------------------------

IDENTITY = ("step", "chain", "energy")
"""What a sample's file says of it and stays; its weight may be another one in the manifest (`set_log_weights`)."""


def aside_folders(path: Path) -> list[Path]:
    """Return the folders that later fits have moved aside from a store's, in the order of their numbers."""
    found = [folder for folder in path.parent.glob(f"{path.name}-*") if not folder.is_symlink()]
    numbers = [folder.name.removeprefix(f"{path.name}-") for folder in found]
    return [path.with_name(f"{path.name}-{number}") for number in sorted(int(n) for n in numbers if n.isdecimal())]


def home_of(path: Path, run: str | None) -> Path:
    """Return the folder of a run's manifest, which a later fit may have moved aside; `path` if it is nowhere."""
    return next((folder for folder in (path, *aside_folders(path)) if run is not None and is_of(folder, run)), path)


def is_of(folder: Path, run: str) -> bool | None:
    """Return whether a folder's manifest is a run's; None without one."""
    try:
        header = read_regular(folder / MANIFEST, LARGEST_MANIFEST).split(b"\n", 1)[0]
    except OSError:
        return None
    return f'"run": "{run}"'.encode() in header


def next_aside(path: Path) -> Path:
    """Return the next folder to move samples aside to; it does not exist yet."""
    last = [int(folder.name.removeprefix(f"{path.name}-")) for folder in aside_folders(path)][-1:]
    return path.with_name(f"{path.name}-{last[0] + 1 if last else 1}")


def place_of(path: Path, record: SampleRecord) -> Path:
    """Return a sample's file: the one in the folder `path`, or, if that is missing or another sample's, the one that a
    later fit has moved aside."""
    places = [folder / record.file for folder in (path, *aside_folders(path))]
    if len(places) == 1:
        return places[0]
    found = [place for place in places if _is_file_of(place, record)]
    if record.checksum and len(found) > 1:  # drawn again: equal tensors, with other bytes around them
        found = [place for place in found if checksum(place.read_bytes()) == record.checksum] or found
    return found[0] if found else places[0]


def _is_file_of(file: Path, record: SampleRecord) -> bool:
    if not is_regular(file):
        return False
    try:
        with opened(file) as content:
            return is_content_of(content, record)
    except (OSError, SafetensorError, RuntimeError):
        return False


def is_content_of(content: Any, record: SampleRecord) -> bool:
    """Return whether an opened file is a record's, by its metadata."""
    metadata = content.metadata() or {}
    return all(metadata.get(name, str(getattr(record, name))) == str(getattr(record, name)) for name in IDENTITY)


def state_of_file(path: Path) -> tuple[int, int, int]:
    """Return what changes where a file is replaced or written to."""
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def fill_aside(path: Path, aside: Path, files: Iterable[str]) -> None:
    """Create a folder with those files of another one that exist, as links where possible, all on the disk before this
    returns, so that the caller may delete the originals."""
    aside.mkdir()
    flush_folder(aside.parent)
    for file in files:
        if not is_regular(path / file):
            continue
        try:
            os.link(path / file, aside / file)
        except OSError:  # a file system without hard links
            shutil.copy2(path / file, aside / file)
            with open(aside / file, "r+b") as copied:
                flush(copied)
    flush_folder(aside)


# -- shared file -------------------------------------------------------------------------------------------------------

SHARED = "shared.safetensors"
BASE = "base.safetensors"
COMMON = {SHARED: "the weights that were not sampled", BASE: "the base of the samples' differences"}
"""Files that all samples need."""


def write_common(folder: Path, tensors: Mapping[str, Tensor], file: str = SHARED) -> str | None:
    """Write tensors of all samples, and return the checksum of their file; without any, write nothing and return
    None."""
    if not tensors:
        return None
    apart = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    content = save(apart)
    write_atomically(folder / file, content)
    return checksum(content)


def read_common(folder: Path, expected: str, file: str = SHARED) -> dict[str, Tensor]:
    """Return the tensors of all samples by name."""
    path = folder / file
    try:
        for place in (folder, *aside_folders(folder)):  # a later fit may have moved the store aside
            if is_regular(place / file) and checksum(content := read_sample_file(place / file)) == expected:
                return load(content)
        raise OSError("its checksum differs from the manifest's" if path.exists() else "there is no such file")
    except Exception as error:  # a damaged file can raise anything
        raise ValueError(
            f"{path}, {COMMON[file]}, is missing or damaged: {error}; without it no sample is a whole network, so "
            "restore the file"
        ) from error


def shared_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the shared tensors by name; only the file's header is read."""
    path = folder / SHARED
    try:
        with opened(path) as file:
            return {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    except Exception as error:
        raise ValueError(f"{path}, the weights that were not sampled, is missing or damaged: {error}") from error
