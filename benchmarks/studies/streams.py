"""Samples per second of `StreamDataset`, beside the bare readers of its formats and other packages' streams.

    python benchmarks/studies/streams.py --folder DIR            # about 15 minutes, 3 GB of disk
    python benchmarks/studies/streams.py --folder DIR --quick    # 60 MB, one round

DIR gets the files, and keeps them for the next time. Each contender reads for some seconds in a fresh process, out of
the page cache, in another order in each round: all as lists of 64 samples in the main process. `instep`, `litdata` and
`webdataset` (in a buffer of 10,000) shuffle, the others cannot; `in_sequence` is instep without shuffling. A sample of
Parquet is a dict of its columns, one of tar a dict of bytes. `bare` is pyarrow's `iter_batches` and `to_pylist`, or
`tarfile` from end to end, in sequence. Packages that are missing are left out; `--packages DIR` is a further folder of
them.

Beside it: what the order of 100 million samples costs, and the time to the first sample after a resume in mid-epoch.

Lists of numbers are numpy arrays in both. With workers each one of `bare` has files of its own. Beside the samples a
second stands what one costs in the processor, workers included: on a machine that others use it says more.

The bar: 0.95 of `bare` with 0, 1 and 2 workers; seeks below 10 ms and 50 MB.
"""

from __future__ import annotations

import argparse
import gc
import io
import itertools
import os
import random
import resource
import sys
import tarfile
import time
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # of the harness, shared with the programs kept green

import harness

BATCH, BAR = 64, 0.95
OURS = ("bare", "instep", "in_sequence")  # need no further package
SHARDS = 10
SEEK_MS, SEEK_MB = 10, 50


def write_files(folder: Path, megabytes: int) -> None:
    """Write the shards of both formats: texts of about 2 kB with 32 numbers, and records of 4 kB with a class."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    dice = np.random.default_rng(0)
    words = np.array(["".join(map(chr, dice.integers(97, 123, dice.integers(2, 12)))) for _ in range(20_000)])
    rows = megabytes * 2**20 // 2300 // SHARDS
    for shard in range(SHARDS):
        path = folder / f"{shard:03d}.parquet"
        if not path.exists():
            numbers = range(shard * rows, (shard + 1) * rows)
            texts = [" ".join(words[dice.integers(0, len(words), 256)]) for _ in numbers]
            ids = list(dice.integers(0, 50_000, (rows, 32), dtype=np.int32))
            pq.write_table(pa.table({"n": list(numbers), "text": texts, "ids": ids}), path, row_group_size=2000)
    groups = megabytes * 2**20 // 6144 // SHARDS
    for shard in range(SHARDS):
        path = folder / f"{shard:03d}.tar"
        if path.exists():
            continue
        with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
            for number in range(shard * groups, (shard + 1) * groups):
                for name, content in (("bin", dice.bytes(4000)), ("cls", str(number % 1000).encode())):
                    member = tarfile.TarInfo(f"{number:08d}.{name}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))


def batches(samples: Iterable[Any]) -> Iterable[list[Any]]:
    """Cut samples into lists of 64."""
    iterator = iter(samples)
    return iter(lambda: list(itertools.islice(iterator, BATCH)), [])


def bare(kind: str, files: list[str], workers: int) -> Iterable[Any]:
    """Read with what the format's own library has; each of some workers reads files of its own."""
    if workers:
        from torch.utils.data import DataLoader, IterableDataset, get_worker_info

        class Own(IterableDataset[Any]):
            def __iter__(self) -> Any:
                worker: Any = get_worker_info()
                return iter(bare(kind, files[worker.id :: workers], 0))

        yield from DataLoader(Own(), None, num_workers=workers, collate_fn=list)
        return
    if kind == "parquet":
        import pyarrow.parquet as pq

        for file in files:
            for batch in pq.ParquetFile(file).iter_batches(BATCH):
                rows = batch.drop_columns(["ids"]).to_pylist()
                for row, ids in zip(rows, batch["ids"].flatten().to_numpy().reshape(-1, 32).copy(), strict=True):
                    row["ids"] = ids
                yield rows
        return

    def groups() -> Iterable[Any]:
        for file in files:
            with tarfile.open(file, "r:") as archive:
                group: dict[str, Any] = {}
                for member in archive:
                    key, _, name = member.name.partition(".")
                    if group and group["__key__"] != key:
                        yield group
                        group = {}
                    content = archive.extractfile(member)
                    assert content is not None
                    group.update({"__key__": key, name: content.read()})
                yield group

    yield from batches(groups())


def instep(kind: str, files: list[str], workers: int) -> Iterable[Any]:
    """Read as a Trainer does, shuffled in windows."""
    return stream_source(kind, files, workers)


def in_sequence(kind: str, files: list[str], workers: int) -> Iterable[Any]:
    """Read as a Trainer does, in the sequence of `bare`: what shuffling costs is not in it."""
    return stream_source(kind, files, workers, shuffle=False)


def stream_source(kind: str, files: list[str], workers: int, shuffle: bool = True) -> Any:
    """Make the source that a Trainer iterates."""
    from torch.utils.data import DataLoader

    from instep.data import StreamDataset, prepare_loader

    stream = StreamDataset(files, cache=Path(files[0]).parent / "cache")
    loader = DataLoader(stream, BATCH, shuffle=shuffle, num_workers=workers, collate_fn=list)
    return prepare_loader(loader, seed=int.from_bytes(os.urandom(4), "little"))


def datasets(kind: str, files: list[str], workers: int) -> Iterable[Any]:
    """Read with Hugging Face's datasets, streaming, in sequence."""
    from datasets import load_dataset
    from torch.utils.data import DataLoader

    name = {"tar": "webdataset"}.get(kind, kind)
    found: Any = load_dataset(name, data_files=files, split="train", streaming=True)
    return DataLoader(found, BATCH, num_workers=workers, collate_fn=list)


def litdata(kind: str, files: list[str], workers: int) -> Iterable[Any]:
    """Read with litdata, which reads Parquet as it lies, shuffled."""
    from litdata import StreamingDataLoader, StreamingDataset, index_parquet_dataset
    from litdata.streaming.item_loader import ParquetLoader

    folder = Path(files[0]).parent / "only_parquet"
    if not folder.exists():
        folder.mkdir()
        for file in files:
            os.link(file, folder / Path(file).name)
        index_parquet_dataset(str(folder))
    found = StreamingDataset(str(folder), item_loader=ParquetLoader(), shuffle=True)
    context: dict[str, Any] = {"multiprocessing_context": "forkserver"} if workers else {}  # its polars has threads
    return StreamingDataLoader(found, batch_size=BATCH, num_workers=workers, collate_fn=list, **context)


def webdataset(kind: str, files: list[str], workers: int) -> Iterable[Any]:
    """Read with webdataset, shuffled in a buffer."""
    import webdataset as wds  # pyright: ignore[reportMissingImports]

    found = wds.WebDataset(files, shardshuffle=len(files), empty_check=False).shuffle(10_000, initial=1000)
    return wds.WebLoader(found, batch_size=BATCH, num_workers=workers, collate_fn=list)


def torchdata(kind: str, files: list[str], workers: int) -> Iterable[Any]:
    """Read with torchdata's nodes, in sequence: the bare reader in their loader."""
    from torchdata.nodes import IterableWrapper, Loader, Prefetcher

    return Loader(Prefetcher(IterableWrapper(bare(kind, files, 0)), prefetch_factor=4))


READERS: dict[str, Callable[[str, list[str], int], Iterable[Any]]] = {
    "bare": bare, "instep": instep, "in_sequence": in_sequence, "datasets": datasets, "litdata": litdata,
    "webdataset": webdataset, "torchdata": torchdata,
}  # fmt: skip
ENTRANTS = {
    "parquet": [
        ("bare", 0), ("instep", 0), ("torchdata", 0), ("datasets", 0), ("litdata", 0), ("bare", 1), ("bare", 2),
        ("instep", 1), ("datasets", 1), ("litdata", 1), ("instep", 2), ("datasets", 2), ("litdata", 2),
        ("in_sequence", 0), ("in_sequence", 1), ("in_sequence", 2),
    ],
    "tar": [
        ("bare", 0), ("instep", 0), ("webdataset", 0), ("datasets", 0), ("bare", 1), ("instep", 1), ("webdataset", 1),
        ("datasets", 1), ("bare", 2), ("instep", 2), ("webdataset", 2), ("datasets", 2),
    ],
}  # fmt: skip


def evict(files: list[str]) -> None:
    """Put the files out of the page cache."""
    for file in files:
        with open(file, "rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Measure one thing, in a process of its own."""
    sys.path.extend(request["packages"])
    if request["what"] == "order":
        return measure_order()
    kind, files = request["kind"], request["files"]
    evict(files)
    if request["what"] == "resume":
        return measure_resume(kind, files, request["workers"])
    start = time.perf_counter()
    iterator = iter(READERS[request["what"]](kind, files, request["workers"]))
    count = len(next(iterator))
    first_s, begin, cpu_s, count = time.perf_counter() - start, time.perf_counter(), time.process_time(), 0
    end = begin + request["seconds"]
    for batch in iterator:
        count += len(batch)
        if (now := time.perf_counter()) > end:
            break
    else:
        now = time.perf_counter()
    cpu_s = time.process_time() - cpu_s
    del iterator  # its workers end, and are counted then
    gc.collect()
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_us = 1e6 * (cpu_s + children.ru_utime + children.ru_stime) / count
    return {"per_s": count / (now - begin), "cpu_us": cpu_us, "first_s": first_s, "samples": count}


def measure_order() -> dict[str, Any]:
    """Seek in the order of 100 million samples."""
    from instep.streams.order import WindowOrder

    def resident() -> int:
        return harness.resident_bytes()

    WindowOrder([10], 3, 0)[0:2]
    before, start = resident(), time.perf_counter()
    order = WindowOrder([100_000] * 1000, 10_000, 0, "order", 0, 0)
    first_ms = 1e3 * (time.perf_counter() - start)
    times = []
    for place in random.Random(0).sample(range(len(order) - BATCH), 200):
        start = time.perf_counter()
        assert len(order[place : place + BATCH]) == BATCH
        times.append(1e3 * (time.perf_counter() - start))
    return {
        "samples": len(order),
        "made_ms": round(first_ms, 2),
        "seek_ms": round(sorted(times)[len(times) // 2], 2),
        "slowest_seek_ms": round(max(times), 2),
        "megabytes": round((resident() - before) / 2**20, 1),
    }


def measure_resume(kind: str, files: list[str], workers: int) -> dict[str, Any]:
    """From a state in mid-epoch to the first batch, with the index there."""
    old = stream_source(kind, files, 0)
    state = old.state_dict(old.num_batches // 2)
    start = time.perf_counter()
    source = stream_source(kind, files, workers)
    source.load_state_dict(state)
    next(iter(source))
    first_s = time.perf_counter() - start
    source.close()
    return {"first_s": round(first_s, 3)}


def main() -> None:
    """Measure in turns, print a table and write the results."""
    args = parse_arguments()
    args.folder.mkdir(parents=True, exist_ok=True)
    write_files(args.folder, 60 if args.quick else args.megabytes)
    rounds, seconds = (1, 2.0) if args.quick else (args.rounds, args.seconds)
    request = {"packages": [str(folder) for folder in args.packages], "seconds": seconds}
    sys.path.extend(request["packages"])
    results: dict[str, Any] = {"order": harness.run_child(__file__, {**request, "what": "order"})}
    for kind, entrants in ENTRANTS.items():
        files = sorted(map(str, args.folder.glob(f"*.{kind}")))
        there = [each for each in entrants if each[0] in args.readers and (each[0] in OURS or find_spec(each[0]))]
        found: dict[tuple[str, int], list[dict[str, float]]] = {each: [] for each in there}
        stream_source(kind, files, 0)  # the index is made once, and kept
        for turn in range(rounds):
            for what, workers in random.Random(turn).sample(there, len(there)):
                asked = {**request, "what": what, "kind": kind, "files": files, "workers": workers}
                try:
                    answer = harness.run_child(__file__, asked)
                except (RuntimeError, SystemExit) as error:
                    print(f"{what} on {kind} with {workers} workers failed: {str(error)[-300:]}", flush=True)
                    continue
                found[what, workers].append(answer)
                print(f"{kind} {what} {workers}: {answer['per_s']:,.0f} samples/s", flush=True)
        table = [
            {"reader": what, "workers": workers, **{name: harness.spread([each[name] for each in answers], digits)
             for name, digits in (("per_s", 0), ("cpu_us", 1), ("first_s", 2))}}
            for (what, workers), answers in found.items()
            if answers
        ]  # fmt: skip
        ratios = {
            f"{what}, {workers} workers": {
                name: harness.spread([(mine[name] / theirs[name]) ** sign for mine, theirs in pairs])
                for name, sign in (("per_s", 1), ("cpu_us", -1))
            }
            for what in OURS[1:]
            for workers in (0, 1, 2)
            if (pairs := list(zip(found.get((what, workers), []), found.get(("bare", workers), []), strict=False)))
        }
        resumes = [
            {"workers": workers, **harness.run_child(__file__, {**request, "what": "resume", "kind": kind,
             "files": files, "workers": workers})}
            for workers in (0, 2)
        ]  # fmt: skip
        results[kind] = {
            "megabytes": round(sum(map(os.path.getsize, files)) / 2**20),
            "readers": table,
            "over_bare": ratios,
            "bar": BAR,
            "resume": resumes,
        }
    report(results)
    load = {"load_average": [round(each, 1) for each in os.getloadavg()], "rounds": rounds, "seconds": seconds}
    some = args.readers if len(args.readers) < len(READERS) else []
    name = "_".join(["streams", *(["quick"] if args.quick else []), *some])
    harness.write_results(args.out, name, {"machine": harness.machine(), **load, **results})


def report(results: dict[str, Any]) -> None:
    """Print the tables."""
    order = results["order"]
    print(
        f"order of {order['samples']:,} samples: a seek {order['seek_ms']} ms (bar {SEEK_MS}), {order['megabytes']} MB"
    )
    for kind in ENTRANTS:
        rows = [
            (row["reader"], row["workers"], f"{row['per_s']['median']:,.0f}", row["cpu_us"]["median"])
            for row in results[kind]["readers"]
        ]
        harness.print_table((kind, "workers", "samples/s", "CPU us/sample"), rows)
        for which, ratio in results[kind]["over_bare"].items():
            print(f"{which} over bare: { ({name: each['median'] for name, each in ratio.items()}) }")
        print(f"resume: {results[kind]['resume']}")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Samples per second of streams.")
    parser.add_argument("--folder", type=Path, required=True, help="of the files; filled where it is empty")
    parser.add_argument("--megabytes", type=int, default=1024, help="of each format (default: 1024)")
    parser.add_argument("--packages", type=Path, nargs="*", default=[], help="folders of further packages")
    parser.add_argument("--readers", nargs="+", choices=list(READERS), default=list(READERS), help="only some")
    parser.add_argument("--rounds", type=int, default=3, help="of all contenders (default: 3)")
    parser.add_argument("--seconds", type=float, default=8.0, help="that each one reads (default: 8)")
    parser.add_argument("--quick", action="store_true", help="60 MB of each format, 1 round, 2 seconds")
    harness.add_out(parser)
    return parser.parse_args()


if __name__ == "__main__":
    if "--child" in sys.argv:
        harness.answer(measure)
    else:
        main()
