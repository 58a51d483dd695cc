"""Reads the file of an offline W&B run: a LevelDB log after a header of seven bytes, of protobuf records."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK = 32768
_FULL, _LAST = 1, 4


def records(path: Path) -> Iterator[Any]:
    from wandb.proto import wandb_internal_pb2

    data = path.read_bytes()
    assert data[:4] == b":W&B"
    position, payload = 7, b""
    while position + 7 <= len(data):
        left = _BLOCK - position % _BLOCK
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        if kind == 0 and length == 0:
            position += left
            continue
        payload += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (_FULL, _LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(payload)
            payload = b""
            yield record


def read(path: Path) -> dict[str, Any]:
    """The run's id, project, name, config, history rows (without W&B's own keys), summary and exit code."""
    found: dict[str, Any] = {"config": {}, "history": [], "summary": {}, "exit_code": None}

    def items(updates: Any) -> dict[str, Any]:
        return {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in updates}

    for record in records(path):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            found |= {"id": record.run.run_id, "project": record.run.project, "name": record.run.display_name}
            found["started"] = record.run.start_time.ToNanoseconds()
            found["config"] |= items(record.run.config.update)
        elif kind == "config":
            found["config"] |= items(record.config.update)
        elif kind == "history":
            row = items(record.history.item)
            found["history"].append({key: value for key, value in row.items() if not key.startswith("_")})
        elif kind == "summary":
            found["summary"] |= items(record.summary.update)
        elif kind == "exit":
            found["exit_code"] = record.exit.exit_code
    return found


def read_all(folder: Path) -> list[dict[str, Any]]:
    """Every offline run below this folder, in the order of their start. Ends W&B's service: finished runs only."""
    import wandb

    # `finish()` returns before the service has written everything; its end waits for that.
    wandb.teardown()
    runs = [read(path) for path in folder.glob("wandb/offline-run-*/*.wandb")]
    return sorted(runs, key=lambda run: run["started"])
