"""Counts of how the house is cut, to compare two commits: core and guests, large classes, and files that data meets.

    python scripts/house.py             this checkout
    python scripts/house.py FOLDER      another one, with the guests that this one's pyproject.toml lists

What is a guest stands in the contract "The core names no guest" of pyproject.toml; the rest is the core. What a batch,
a loss and a save meet are the files in which a Python function runs, in a fit of six steps on the CPU that saves at its
end: a batch from the end of a step to the next `training_step`, a loss from there to the end of its step. A tensor's
way to the disk is the files on the stack where something is written, and a turn is a call there from a lower floor up.
"""

from __future__ import annotations

import ast
import sys
import tempfile
import threading
from collections import Counter
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import Any

import budgets
import tomllib

HERE = Path(__file__).parents[1]
LINTER = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
LAYERS, GUESTS = (next(c[key] for c in LINTER if key in c) for key in ("layers", "protected_modules"))
# Where guests stood before, in commits whose lists of files differ.
MOVED = {
    "instep.callbacks.guests": (
        *("batch_size_finder", "finetuning", "gradient_accumulation_scheduler", "image_sampler", "lambda_callback"),
        *("lr_finder", "on_exception_checkpoint", "optuna_pruning", "prediction_writer", "pruning", "quantization"),
        *("stochastic_weight_avg", "weight_averaging", "progress.rich_progress", "progress.tqdm_progress"),
        *(f"monitors.{n}" for n in ("device_stats_monitor", "gradient_monitor", "replica_check", "spike_detection")),
        "monitors.throughput_monitor",
    ),
    "instep.trainer.guests": ("replay",),
}
SAVED, BYTES = "save, all files entered", "tensor to disk, files on the stack of a write"
WRITES = ("write", "writelines", "fsync", "rename", "replace", "mkdir", "link")
STAYS = ("instep.big_models.materialize", "instep.big_models.deferred", "instep.big_models.quantized_state")


def is_guest(module: str) -> bool:
    """Return True if the contract lists a module, or where it stands now."""
    if module in STAYS:
        return False
    for new, names in MOVED.items():
        room = new.removesuffix(".guests")
        if module.removeprefix(f"{room}.") in names:
            return True
    return any(fnmatchcase(f"{module}.", f"{guest}.*" if "*" not in guest else f"{guest}.") for guest in GUESTS)


def module_of(path: str) -> str:
    """Return the module of a file below the package."""
    return f"instep.{path[:-3]}".replace("/", ".").removesuffix(".__init__")


def floor(module: str) -> int:
    """Return the number of a module's floor, the lowest 0."""
    rooms = [[room.strip() for room in row.replace(":", "|").split("|")] for row in reversed(LAYERS)]
    found = [number for number, row in enumerate(rooms) for room in row if f"{module}.".startswith(f"{room}.")]
    return found[0] if found else len(rooms)


def methods(tree: ast.Module) -> Counter[str]:
    """Count the methods of each class of a file."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return Counter(
        {c.name: sum(isinstance(b, ast.FunctionDef | ast.AsyncFunctionDef) for b in c.body) for c in classes}
    )


def watch(package: Path) -> dict[str, list[set[Any]]]:
    """Run a small fit and return the files and turns of a batch, a loss and a tensor on its way to the disk."""
    sys.path.insert(0, str(package.parent))
    import torch  # late: after the path

    from instep import Trainer, TrainModule
    from instep.callbacks import Callback, ModelCheckpoint

    root, part = f"{package}/", [""]
    found: dict[str, list[set[Any]]] = {}

    def look(frame: FrameType, event: str, called: Any) -> None:
        what = part[0]
        if what and event == "call" and frame.f_code.co_filename.startswith(root):
            found.setdefault(what, [set(), set()])[0].add(frame.f_code.co_filename.removeprefix(root))
        if what == SAVED and event == "c_call" and getattr(called, "__name__", "") in WRITES:
            files, turns = found.setdefault(BYTES, [set(), set()])
            stack = [each.f_code.co_filename for each, _ in walk_stack(frame)]
            way = [path.removeprefix(root) for path in stack[: stack.index(__file__)] if path.startswith(root)]
            files.update(way)
            turns.update((a, b) for b, a in pairwise(way) if floor(module_of(a)) < floor(module_of(b)))

    class Saver(ModelCheckpoint):
        def on_train_epoch_end(self, *arguments: Any) -> None:  # pyright: ignore
            part[0] = SAVED
            super().on_train_epoch_end(*arguments)
            part[0] = ""

    class Steps(Callback):
        def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:  # pyright: ignore
            part[0] = "batch" if trainer.global_step < 6 else ""

    class Module(TrainModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            part[0] = "loss"
            return model(batch).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    module = Module()
    module.model = model = torch.nn.Linear(4, 1)
    with tempfile.TemporaryDirectory() as folder:
        quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = Trainer(max_epochs=1, accelerator="cpu", callbacks=[Steps(), Saver(folder)], **quiet)
        threading.setprofile(look)
        sys.setprofile(look)
        trainer.fit(module, torch.utils.data.DataLoader(list(torch.randn(48, 4)), batch_size=8))  # pyright: ignore
        sys.setprofile(None)
        threading.setprofile(None)  # pyright: ignore[reportArgumentType]
    return found


def main() -> None:
    """Print the counts."""
    package = Path(sys.argv[1] if len(sys.argv) > 1 else HERE).resolve() / "instep"
    files, graph = budgets.read(package), budgets.imports(package, types=False)
    for name, guests in (("core", False), ("guests", True)):
        lines = [len(code) for path, (_, code) in files.items() if is_guest(module_of(path)) == guests]
        print(f"{name:10}{len(lines):5} files{sum(lines):8} code lines")
    print(f"{'all':10}{len(files):5} files{sum(len(code) for _, code in files.values()):8} code lines")
    print("largest classes:", *sum((methods(tree) for tree, _ in files.values()), Counter()).most_common(6))
    context = next(n for n in files["trainer/context.py"][0].body if getattr(n, "name", "") == "RunContext")
    print("fields of RunContext:", sum(isinstance(node, ast.AnnAssign) for node in context.body))  # pyright: ignore
    print("code lines of trainer/step.py:", len(files["trainer/step.py"][1]))
    named = sorted(f"{a} -> {b}" for a in graph for b in graph[a] if not is_guest(a) and is_guest(b))
    print(f"imports from core to guests: {len(named)}", *named, sep="\n  ")
    print("circles at run time:", [sorted(circle) for circle in budgets.circles(graph)])
    for what, (met, turns) in watch(package).items():
        print(f"{what}: {len(met)} files" + f", {len(turns)} turns up" * (what == BYTES), *sorted(met), sep="\n  ")


if __name__ == "__main__":
    main()
