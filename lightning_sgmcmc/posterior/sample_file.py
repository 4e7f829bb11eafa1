"""Bytes of a store's files: checksums, the order of tensors, the last line."""

import errno
import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from lightning_sgmcmc.chains.sample import PosteriorSample, SampleRecord, record_of
from lightning_sgmcmc.files import check_regular, parse_json

LARGE_SAMPLE = 2**28
"""Files above this size, in bytes, are checked before they are read."""


def sample_content(sample: PosteriorSample) -> bytes:
    """Return the content of a sample's file: tensors, and the rest of the sample as metadata."""
    parts = {"parameter": sample.parameters, "buffer": sample.buffers, "scale": sample.scales}
    tensors: dict[str, Tensor] = {}
    places: set[int] = set()
    for part, named in parts.items():
        for name, tensor in named.items():
            own = tensor.detach().cpu().contiguous()
            # safetensors refuses two names of one tensor.
            tensors[f"{part}.{name}"] = own.clone() if own.data_ptr() in places else own
            places.add(own.data_ptr())
    record = asdict(record_of(sample))
    metadata = {k: str(v) for k, v in record.items() if k not in ("file", "checksum", "comparable", "draw")}
    metadata["names"] = json.dumps(list(tensors))  # safetensors does not preserve their order
    return save(tensors, metadata)


def checksum(content: bytes) -> str:
    """Return the CRC-32 of a file's bytes in hexadecimal."""
    return f"{zlib.crc32(content):08x}"


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file, of which only the header is read; its name may be no UTF-8, which safetensors demands.

    Raises:
        OSError: if it is missing, a link or a device.
        SafetensorError: if it is damaged.
    """
    check_regular(path)
    name = str(path)
    if name == name.encode(errors="ignore").decode():
        with safe_open(path, framework="pt") as file:
            yield file
        return
    with open(path, "rb") as plain, safe_open(f"/dev/fd/{plain.fileno()}", framework="pt") as file:
        yield file


def read_sample_file(path: Path) -> bytes:
    """Return a sample file's content.

    Raises:
        OSError: if it is missing, a link or a device.
        SafetensorError: if it is large, and not as large as its header says.
    """
    check_regular(path)
    if path.stat().st_size > LARGE_SAMPLE:
        with opened(path):  # reads only the header
            pass
    return path.read_bytes()


class OpenFiles:
    """Sample files that are held open, so that they can be read after another process has deleted them.

    A copy in this process shares them; one in another process has none.
    """

    def __init__(self) -> None:
        self._descriptors: dict[str, int] = {}

    def hold(self, name: str, path: Path) -> None:
        """Open a file.

        Raises:
            OSError: if it is missing, a link or a device.
        """
        check_regular(path)
        self._descriptors[name] = os.open(path, os.O_RDONLY)

    def read(self, name: str) -> bytes | None:
        """Return a file's content; None if it is not held."""
        descriptor = self._descriptors.get(name)
        if descriptor is None:
            return None
        parts: list[bytes] = []
        position, size = 0, os.fstat(descriptor).st_size
        while position < size:
            part = os.pread(descriptor, size - position, position)  # at most 2 GB at a time
            if not part:
                raise OSError(errno.EIO, "it has become shorter")
            parts.append(part)
            position += len(part)
        return b"".join(parts)

    def close(self) -> None:
        """Close all files."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors = {}

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


def verify_content(path: Path, content: bytes, record: SampleRecord) -> None:
    """Raise OSError if a file is not the one that was written, according to the record."""
    if record.checksum:
        if checksum(content) != record.checksum:
            raise OSError("its checksum differs from the manifest's")
        return
    with opened(path) as file:
        metadata = file.metadata() or {}
    if (metadata.get("step"), metadata.get("chain")) != (str(record.step), str(record.chain)):
        raise OSError(
            f"it holds step {metadata.get('step')}, chain {metadata.get('chain')}, but the manifest has step "
            f"{record.step}, chain {record.chain}"
        )


def in_order(tensors: dict[str, Tensor], content: bytes) -> dict[str, Tensor]:
    """Return a file's tensors in the module's order."""
    length = int.from_bytes(content[:8], "little")
    names = parse_json(parse_json(content[8 : 8 + length]).get("__metadata__", {}).get("names", "[]"))
    return {name: tensors[name] for name in names or sorted(tensors) if name in tensors}


def end_of_last_line(file: Any, block: int = 4096) -> int:
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
