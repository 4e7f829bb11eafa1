"""The manifest of a store on disk: a line of JSON about the store, then one for each sample."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from typing import Any

from lightning_sgmcmc.chains.sample import SampleRecord
from lightning_sgmcmc.files import parse_json
from lightning_sgmcmc.tables import Columns

MANIFEST = "manifest.jsonl"
LARGEST_MANIFEST = 2**30
"""In bytes; ten thousand samples have about 2 MB."""
FORMAT = "lightning-sgmcmc samples"
VERSION = 2
"""Version 2 has tensors that all samples share; stores without any are of version 1."""
SAMPLE_NAME = re.compile(r"sample-[0-9]{8,20}-chain-[0-9]{3,20}(-draw-[0-9]{3,20})?\.safetensors")
"""Names of sample files. A manifest or a checkpoint can come from anywhere, so no other file is read or deleted."""
LARGEST_COUNT = 2**62


@dataclass
class Manifest:
    """What a manifest says.

    Attributes:
        model: the description of the network, or None.
        library: version of the library that wrote it, "" if it does not say.
        run: identifies the run that wrote it; None in version 0.1.0.
        columns: what inputs and targets are.
        records: of the samples.
        damaged_lines: numbers of the lines that are no records, from 1.
        shared: the checksum of the file with what all samples share, None without one.
    """

    model: Any = None
    library: str = ""
    run: str | None = None
    columns: Columns = field(default_factory=Columns)
    records: list[SampleRecord] = field(default_factory=list)
    damaged_lines: list[int] = field(default_factory=list)
    shared: str | None = None


def sample_name(step: int, chain: int, draw: int = 0) -> str:
    """Return the name of a sample's file."""
    return f"sample-{step:08d}-chain-{chain:03d}{f'-draw-{draw:03d}' if draw else ''}.safetensors"


def write_manifest(
    model: Any,
    run: str | None,
    records: Iterable[SampleRecord],
    columns: Columns | None = None,
    shared: str | None = None,
) -> bytes:
    """Return the content of a manifest."""
    number = 1 if shared is None else VERSION
    header = {"format": FORMAT, "version": number, "library": version("lightning-sgmcmc"), "model": model, "run": run}
    if shared is not None:
        header["shared"] = shared
    if columns is not None:
        header |= columns.as_plain()
    return "".join(f"{line}\n" for line in (json.dumps(header), *map(line_of, records))).encode()


def line_of(record: SampleRecord) -> str:
    """Return a record's line, without its end; versions before `comparable` and `draw` read that of an ordinary run."""
    fields = asdict(record)
    if record.comparable:
        del fields["comparable"]
    if not record.draw:
        del fields["draw"]
    return json.dumps(fields)


def parse_manifest(content: bytes, where: str) -> Manifest:
    """Return what a manifest says; an incomplete last line is ignored.

    Args:
        content: of the file.
        where: the file's name for messages.

    Raises:
        ValueError: if it is not a manifest, or has a newer version.
    """
    header, *lines = content.split(b"\n")[:-1] or [b""]
    try:
        known = parse_json(header)
        kind, number, model = known["format"], known["version"], known["model"]
        library, run, shared = known.get("library", ""), known.get("run"), known.get("shared")
        columns = Columns.from_plain(known)
    except (ValueError, TypeError, LookupError, AttributeError):
        raise ValueError(f"{where} is not the manifest of a sample store") from None
    if kind != FORMAT or not isinstance(number, int) or not all(isinstance(text, str | None) for text in (run, shared)):
        raise ValueError(f"{where} is not the manifest of a sample store")
    library = library if isinstance(library, str) and len(library) < 40 else ""
    if number > VERSION:
        writer = f" (lightning-sgmcmc {library} wrote it)" if library else ""
        raise ValueError(f"{where} has version {number}, this library reads up to {VERSION}: update it{writer}")
    manifest = Manifest(model, library, run, columns, shared=shared)
    seen: set[tuple[int, int, int]] = set()
    for index, line in enumerate(lines, start=2):
        try:
            manifest.records.append(_once(record_from(parse_json(line)), seen))
        except ValueError:
            manifest.damaged_lines.append(index)
    return manifest


def records_from(entries: Iterable[Any]) -> list[SampleRecord]:
    """Return the records with these fields; see `record_from`.

    Raises:
        ValueError: also if two are of one sample, which would count twice in every average.
    """
    seen: set[tuple[int, int, int]] = set()
    return [_once(record_from(entry), seen) for entry in entries]


def _once(record: SampleRecord, seen: set[tuple[int, int, int]]) -> SampleRecord:
    place = record.step, record.chain, record.draw
    if place in seen:
        raise ValueError("a sample is recorded twice: step {}, chain {}, draw {}".format(*place))
    seen.add(place)
    return record


def record_from(entry: Any) -> SampleRecord:
    """Return the record with these fields.

    Raises:
        ValueError: if a field is missing, unknown or has the wrong type, or the file's name is not a sample's.
    """
    if not isinstance(entry, Mapping):
        raise ValueError(f"a sample's record should be a dictionary, got a {type(entry).__name__}")
    counts: list[Any] = [entry.get(name) for name in ("step", "cycle", "chain")]
    numbers: list[Any] = [entry.get(name) for name in ("energy", "log_weight")]
    place, checksum, file = entry.get("bin"), entry.get("checksum", ""), entry.get("file")
    draw: Any = entry.get("draw", 0)
    if not all(map(_is_count, (*counts, draw))) or not (place is None or _is_count(place)):
        raise ValueError("a sample's step, cycle, chain, draw and bin should be integers, 0 or larger")
    if not all(isinstance(number, int | float) and not isinstance(number, bool) for number in numbers):
        raise ValueError("a sample's energy and log_weight should be numbers")
    if not isinstance(checksum, str) or not isinstance(file, str) or not SAMPLE_NAME.fullmatch(file):
        raise ValueError(f"{str(file)[:80]!r} is not the name of a sample's file")
    comparable = entry.get("comparable", True)
    if not isinstance(comparable, bool):
        raise ValueError("a sample's comparable should be true or false")
    if not entry.keys() <= SampleRecord.__dataclass_fields__.keys():
        raise ValueError("a sample's record has an unknown field")
    try:
        energy, log_weight = (float(number) for number in numbers)
    except OverflowError:
        raise ValueError("a sample's energy and log_weight should be numbers below 1e308") from None
    step, cycle, chain = counts
    return SampleRecord(step, cycle, chain, energy, log_weight, file, checksum, place, comparable, draw)


def with_own_constants(records: list[SampleRecord], has_own_contours: Callable[[], bool]) -> list[SampleRecord]:
    """Return the records, marked as comparable within a chain only if a contour for each chain weighs them.

    Early versions did not record it.
    """
    chains, weights = ({getattr(record, name) for record in records} for name in ("chain", "log_weight"))
    recorded = any(not record.comparable for record in records)
    if recorded or len(chains) < 2 or len(weights) < 2 or not has_own_contours():
        return records
    return [replace(record, comparable=False) for record in records]


def is_newer(library: str) -> bool:
    """Return whether a version of this library is newer than the installed one."""
    return _parts(library) > _parts(version("lightning-sgmcmc"))


def _parts(library: str) -> list[int]:
    return [int(number) for number in re.findall(r"[0-9]{1,9}", library)[:3]]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < LARGEST_COUNT
