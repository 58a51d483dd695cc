"""Shards for tests: numbered records in each format."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

COUNTS = (13, 7, 30, 1)
FORMATS = ("jsonl", "txt", "parquet", "arrow", "ipc", "tar")


def write_shards(folder: Path, suffix: str, counts: Sequence[int] = COUNTS) -> list[Path]:
    """Write files whose records are numbered through; each has the number, a text and a list."""
    ends = list(accumulate(counts))
    paths = []
    for shard, (end, count) in enumerate(zip(ends, counts, strict=True)):
        rows = [{"n": n, "text": "x" * (n % 7), "ids": list(range(n % 5))} for n in range(end - count, end)]
        paths.append(folder / f"{shard:03d}.{suffix}")
        _write(paths[-1], rows)
    return paths


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    if path.suffix == ".jsonl":
        path.write_text("\n" + "\n\n".join(json.dumps(row) for row in rows) + "\n")  # blank lines are no records
    elif path.suffix == ".txt":
        path.write_text("\n".join(str(row["n"]) for row in rows))
    elif path.suffix == ".tar":
        write_tar(path, {f"{_folder(row['n'])}{row['n']:03d}": row["n"] for row in rows})
    else:
        _write_table(path, rows)


def _folder(number: int) -> str:
    return "deep/" + "long" * 30 + "/" if number % 3 == 0 else ""  # of more bytes than a header has for a name


def write_tar(path: Path, groups: dict[str, int]) -> None:
    with tarfile.open(path, "w") as archive:
        for key, number in groups.items():
            for name in ("txt", "seg.txt"):
                content = str(number).encode()
                member = tarfile.TarInfo(f"{key}.{name}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


def _write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist(rows)
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=4)
        return
    make = pa.ipc.new_file if path.suffix == ".arrow" else pa.ipc.new_stream
    with make(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=5)


def number(record: Any) -> int:
    """Return the number of a record of any format."""
    if isinstance(record, str):
        return int(record)
    if "txt" in record:
        assert record["txt"] == record["seg.txt"], record["__key__"]
        return int(record["txt"])
    return record["n"]
