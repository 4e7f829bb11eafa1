"""Samples that a later fit has moved aside: `samples-1`, `samples-2`, … beside `samples`."""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError

from lightning_sgmcmc.chains.sample import SampleRecord
from lightning_sgmcmc.files import flush, flush_folder, is_regular, read_regular
from lightning_sgmcmc.posterior.manifest import LARGEST_MANIFEST, MANIFEST
from lightning_sgmcmc.posterior.sample_file import checksum, opened

IDENTITY = ("step", "chain", "energy")
"""What a sample's file says of it and stays; its weight may be another one in the manifest (`set_log_weights`)."""


def aside_folders(path: Path) -> list[Path]:
    """Return the folders that later fits have moved aside from a store's, in the order of their numbers."""
    numbers = [
        folder.name.removeprefix(f"{path.name}-")
        for folder in path.parent.glob(f"{path.name}-*")
        if not folder.is_symlink()
    ]
    return [path.with_name(f"{path.name}-{number}") for number in sorted(int(n) for n in numbers if n.isdecimal())]


def home_of(path: Path, run: str | None) -> Path:
    """Return the folder of a run's manifest, which a later fit may have moved aside; `path` if it is nowhere."""
    for folder in (path, *aside_folders(path)):
        try:
            header = read_regular(folder / MANIFEST, LARGEST_MANIFEST).split(b"\n", 1)[0]
        except OSError:
            continue
        if run is not None and f'"run": "{run}"'.encode() in header:
            return folder
    return path


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
            metadata = content.metadata() or {}
    except (OSError, SafetensorError, RuntimeError):
        return False
    return all(metadata.get(name, str(getattr(record, name))) == str(getattr(record, name)) for name in IDENTITY)


def fill_aside(path: Path, aside: Path, files: Iterable[str]) -> None:
    """Create a folder with files of another one, without copying their content where possible; missing ones are left
    out. All of it is on the disk before this returns, so that the caller may delete the originals."""
    aside.mkdir()
    flush_folder(aside.parent)
    for file in files:
        if is_regular(path / file):
            _link_or_copy(path / file, aside / file)
    flush_folder(aside)


def _link_or_copy(source: Path, target: Path) -> None:
    """Give a file a second name, or copy it on a file system without hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
        with open(target, "r+b") as copied:
            flush(copied)
