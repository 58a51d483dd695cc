"""Ten public LightningModules trained by Lightning and, after `instep migrate --write`, by instep: the same losses.

Each module is taken from its repository at one commit, with the files that it needs. One copy of them stays as it is
and is trained by Lightning; `instep migrate --write` ports the other, the hand changes that `public_modules.py` lists
are made in it, and instep trains it. Both do two epochs of float32 on one process, with the same seed, over the same
synthetic data in a fixed order, in a process of their own each, with one thread. Compared are the loss of every
training batch, what was logged of the validations, and all weights at the end; the largest difference is reported,
relative where a value is larger than 1.

Before each batch the seed is set by its number, in both: the two draw a different number of random numbers around a
batch (a loader's seed), which is no part of the comparison. Packages that a file imports and the training does not
use are stood in for by empty modules, in both.

    pip install --target PACKAGES --no-deps lightning pytorch_lightning torchmetrics ...   # what --packages lists
    python benchmarks/studies/parity_lightning.py --packages PACKAGES

Repositories are cloned into `--sources` where they are not there.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import difflib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import types
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from contenders.public_modules import CASES, PACKAGES, Case
from harness import RESULTS, machine

EPOCHS, SEED, LIMIT = 2, 7, 1e-6


class _StandIn(types.ModuleType):
    """Module of a package that is imported and not used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *args, **kwargs: None})


class _StandIns(MetaPathFinder, Loader):
    def __init__(self, packages: tuple[str, ...]) -> None:
        self.packages = packages

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        found = any(fullname == name or fullname.startswith(f"{name}.") for name in self.packages)
        return ModuleSpec(fullname, self, is_package=True) if found else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def train(case: Case, framework: str, out: Path) -> None:
    """Train a module in this process and write what became of it."""
    import numpy as np

    torch.set_num_threads(1)
    sys.meta_path.insert(0, _StandIns(case.stand_ins))
    if framework == "lightning":
        from lightning.pytorch import Callback, Trainer, __version__

        if "pytorch_lightning" in case.imports:  # the same classes under the older name
            from pytorch_lightning import Callback, Trainer, __version__
    else:
        from instep import Callback, Trainer, __version__

    def seed(number: int) -> None:
        torch.manual_seed(number)
        random.seed(number)
        np.random.seed(number % 2**32)

    losses: list[float] = []

    class Record(Callback):  # pyright: ignore[reportGeneralTypeIssues]
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            seed(SEED + 1000 * trainer.current_epoch + batch_idx)

        def on_validation_batch_start(
            self, trainer: Any, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
        ) -> None:
            seed(SEED + 1000 * trainer.current_epoch + 500 + batch_idx)

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            losses.append(float(outputs["loss"] if isinstance(outputs, dict) else outputs))

    seed(SEED)
    module, train_loader, val_loader = case.build()
    seed(SEED)
    folder = tempfile.mkdtemp()
    trainer = Trainer(
        max_epochs=EPOCHS, accelerator="cpu", devices=1, logger=case.logger, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, callbacks=[Record()],
        default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(module, train_loader, val_loader)
    shutil.rmtree(folder, ignore_errors=True)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    weights = [tensor for tensor in module.state_dict().values() if torch.is_tensor(tensor)]
    flat = torch.cat([tensor.double().reshape(-1) for tensor in weights])
    torch.save(flat, out.with_suffix(".pt"))
    out.write_text(json.dumps({"losses": losses, "logged": logged, "weights": len(flat), "version": __version__}))


def difference(one: float, other: float) -> float:
    """Return how far two values are apart, relative to the larger one where that is above 1."""
    if one != one and other != other:
        return 0.0
    return abs(one - other) / max(1.0, abs(one), abs(other))


def edit(case: Case, changes: tuple[tuple[str, str, str], ...], folder: Path) -> None:
    """Make changes by hand: in a file, what is there, by what is to be."""
    for file, old, new in changes:
        text = (folder / file).read_text(encoding="utf-8")
        if text.count(old) != 1:
            raise SystemExit(f"{case.name}: {file} has {text.count(old)} places with {old!r}")
        (folder / file).write_text(text.replace(old, new), encoding="utf-8")


def copy(case: Case, sources: Path, folder: Path) -> str:
    """Copy what a case needs of its repository; return the commit."""
    checkout = sources / case.repository.partition("/")[2]
    if not checkout.is_dir():
        url = f"https://github.com/{case.repository}"
        subprocess.run(["git", "clone", "--quiet", url, str(checkout)], check=True)
        subprocess.run(["git", "-C", str(checkout), "checkout", "--quiet", case.commit], check=True)
    for source, target in case.files.items():
        place = folder / target
        place.parent.mkdir(parents=True, exist_ok=True)
        if (checkout / source).is_dir():
            shutil.copytree(checkout / source, place, ignore=shutil.ignore_patterns("__pycache__", "nursery", "mx"))
        else:
            shutil.copy(checkout / source, place)
    for name, text in case.written:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    edit(case, case.first, folder)
    head = subprocess.run(["git", "-C", str(checkout), "log", "-1", "--format=%h"], capture_output=True, text=True)
    return head.stdout.strip() or case.commit


def port(case: Case, folder: Path, env: dict[str, str]) -> dict[str, Any]:
    """Port a copy by `instep migrate --write` and by hand; return what that was."""
    files = [path for path in sorted(folder.rglob("*.py")) if "lightning" in path.read_text(encoding="utf-8")]
    before = {path: path.read_text(encoding="utf-8").splitlines() for path in files}
    command = [sys.executable, "-m", "instep", "migrate", "--write", *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if "Traceback" in done.stderr:
        raise SystemExit(f"{case.name}: instep migrate failed\n{done.stderr[-3000:]}")
    changed = 0
    for path, old in before.items():
        new = path.read_text(encoding="utf-8").splitlines()
        changed += sum(line.startswith("+ ") for line in difflib.ndiff(old, new))
    edit(case, case.by_hand, folder)
    todo = [line.partition("todo: ")[2][:200] for line in done.stdout.splitlines() if ": todo: " in line]
    return {
        "lines_by_migrate": changed,
        "todo_by_migrate": sorted(set(todo)),
        "by_hand": [{"file": file, "was": old, "is": new} for file, old, new in case.by_hand],
        "written": [name for name, _ in case.written],
        "stand_ins": list(case.stand_ins),
        "first_for_lightning_2": [{"file": file, "was": old, "is": new} for file, old, new in case.first],
    }


def compare(case: Case, sources: Path, packages: list[str]) -> dict[str, Any]:
    """Train a module in both frameworks and say how far apart they are."""
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        path = os.pathsep.join([*packages, *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        found: dict[str, Any] = {}
        results: dict[str, Any] = {}
        for framework in ("lightning", "instep"):
            folder = work / framework
            commit = copy(case, sources, folder)
            found |= {"repository": case.repository, "commit": commit, "module": case.module}
            if framework == "instep":
                found |= port(case, folder, env)
            out = work / f"{framework}.json"
            command = [sys.executable, str(Path(__file__)), "--run", case.name, framework, str(out)]
            here = env | {"PYTHONPATH": os.pathsep.join([str(folder), path])}
            done = subprocess.run(command, capture_output=True, text=True, env=here, cwd=folder, check=False)
            if done.returncode:
                return found | {"failed": framework, "error": done.stderr[-1500:]}
            results[framework] = json.loads(out.read_text())
            results[framework]["flat"] = torch.load(out.with_suffix(".pt"))
        one, other = results["lightning"], results["instep"]
        pairs = list(zip(one["losses"], other["losses"], strict=True))
        same = one["logged"].keys() & other["logged"].keys()
        scale = torch.maximum(one["flat"].abs(), other["flat"].abs()).clamp(min=1)
        found |= {
            "versions": {framework: result["version"] for framework, result in results.items()},
            "batches": len(pairs),
            "losses": {framework: result["losses"] for framework, result in results.items()},
            "logged": {name: [one["logged"][name], other["logged"][name]] for name in sorted(same)},
            "logged_in_one_only": sorted(one["logged"].keys() ^ other["logged"].keys()),
            "loss_difference": max(difference(*pair) for pair in pairs),
            "logged_difference": max((difference(one["logged"][n], other["logged"][n]) for n in same), default=0.0),
            "weights": one["weights"],
            "weights_difference": float(((one["flat"] - other["flat"]).abs() / scale).max()),
        }
        differences = (found["loss_difference"], found["logged_difference"], found["weights_difference"])
        return found | {"equal": max(differences) <= LIMIT}


def main() -> int:
    """Compare the cases, print a line for each and write all into a file of results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="*", help="names of modules; default: all")
    parser.add_argument("--sources", type=Path, default=Path("parity_sources"), help="folder of the repositories")
    parser.add_argument(
        "--packages", nargs="*", default=[], help="folders to import from; without one: what to install"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "parity_lightning.json")
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    by_name = {case.name: case for case in CASES}
    if args.run:
        train(by_name[args.run[0]], args.run[1], Path(args.run[2]))
        return 0
    if not args.packages:
        print(f"pip install --target PACKAGES --no-deps {' '.join(PACKAGES)}")
        return 2
    packages = [str(Path(folder).resolve()) for folder in args.packages]
    rows: dict[str, Any] = {}
    if args.cases and args.out.exists():
        rows = json.loads(args.out.read_text())["modules"]
    for name in args.cases or by_name:
        rows[name] = row = compare(by_name[name], args.sources.resolve(), packages)
        if "failed" in row:
            print(f"{name:28} FAILED in {row['failed']}: {row['error'].strip().splitlines()[-1][:300]}")
            if args.cases:
                print(row["error"])
        else:
            print(
                f"{name:28} {row['batches']:3} batches  loss {row['losses']['instep'][-1]:.6f}  "
                f"differences: losses {row['loss_difference']:.1e}, logged {row['logged_difference']:.1e}, "
                f"weights {row['weights_difference']:.1e}  by hand {len(row['by_hand'])}  "
                f"{'equal' if row['equal'] else 'DIFFERENT'}"
            )
        about = {"epochs": EPOCHS, "seed": SEED, "limit": LIMIT, **machine()}
        args.out.write_text(json.dumps({"about": about, "modules": rows}, indent=1) + "\n")
    return 0 if all(row.get("equal") for row in rows.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
