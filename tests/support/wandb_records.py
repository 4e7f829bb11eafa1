"""What W&B wrote on the disk."""

import json
import struct
import time
from pathlib import Path
from typing import Any

import pytest


def wandb_records(path: Path) -> list[Any]:
    """Read an offline `.wandb` file: LevelDB log blocks of 32 KiB behind a 7-byte header, holding protobuf records."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, joined, records = path.read_bytes(), 7, b"", []
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        joined += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # the whole record, or its last part
            record = Record()
            record.ParseFromString(joined)
            records.append(record)
            joined = b""
    return records


def finished_records(path: Path) -> list[Any]:
    """Read a `.wandb` file once W&B's own process has written its end, which may be after `wandb.finish` returns."""
    from google.protobuf.message import DecodeError

    deadline = time.monotonic() + 30
    while True:
        try:
            records = wandb_records(path)
        except DecodeError:  # cut short
            records = []
        if any(record.HasField("exit") for record in records) or time.monotonic() > deadline:
            return records
        time.sleep(0.2)


def wandb_row(record: Any) -> dict[str, Any]:
    """Return what one call logged: numbers by name, and dictionaries for W&B's own types."""
    row: dict[str, Any] = {}
    for item in record.history.item:
        first, *rest = list(item.nested_key) or [item.key]
        value = json.loads(item.value_json)
        if rest:
            row.setdefault(first, {})["/".join(rest)] = value
        else:
            row[first] = value
    return row


def contained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
