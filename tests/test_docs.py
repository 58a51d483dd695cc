"""Every block of code in the README and the guides runs, block after block, as a reader would type it.

What a block's language means here:

- `python`: runs, in the names of the page's earlier blocks and of `names`. One that begins with `# name.py` is a file
  of that name, which is run by itself, and which later blocks find.
- `sh`, `bash` and blocks of commands: `instep` runs on the pages of RUNS. Elsewhere its words go through the real
  parser (of `launch` and `slurm`: up to the start); of other programs file, target or extra must be there.
- `console`, or a block that begins with `$ `: a command, and its output. The output is compared where COMPARED says so;
  `...` stands for anything.
- `text`: has been printed by the page's blocks before.
- `yaml`: a file, as with python; a nameless one is checked as the launcher's config file.
- none, and no command: an example from another machine, which nobody can repeat here.

A block that cannot run here stands in LEFT_OUT, with the reason. A program that trains for long runs with the smaller
number of SHORTER.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.torch_version import TorchVersion
from torch.utils.data import DataLoader, TensorDataset

from instep import Accelerator, Trainer, TrainModule
from instep.cli.main import find, load, main, make_parser
from instep.strategies import DDPStrategy, registry
from tests.helpers.spawn import run_command
from tests.helpers.warm import warm_python
from tests.launch.ways import UNLAUNCHED

REPO = Path(__file__).parent.parent
PAGES = (
    "README.md",
    "AGENTS.md",
    "CONTRIBUTING.md",
    *(f"instep/{room}/README.md" for room in ("callbacks", "loggers", "strategies")),
    *(str(path.relative_to(REPO)) for path in sorted((REPO / "docs").rglob("*.md"))),
)
FURTHER = ("docs/scale/", "docs/command/")  # `make test-all` runs these blocks: they start programs
PROGRAMS = ("bash", "gcloud", "instep", "make", "mpirun", "pip", "python", "srun", "tensorboard", "torchrun")
NO_CLUSTER = "needs a cluster; tests/launchers/test_ray.py runs it"
NO_XLA = "needs torch_xla; tests/strategies/test_xla.py runs the like"
LEFT_OUT = {  # by page and the block's first line
    ("docs/index.md", "$ python train.py"): "it is killed: tests/checkpoint/test_kill_anywhere.py runs the like",
    ("docs/porting/accelerate.md", "from accelerate import Accelerator"): "test_scripts_become_those_beside_them",
    ("docs/porting/lightning.md", "import lightning as L"): "the same",
    (
        "docs/train/finetuning.md",
        "from peft import LoraConfig, get_peft_model",
    ): "tests/trainer/test_adapters.py runs the like",
    ("docs/train/search.md", "import ray.tune"): "starts a cluster; tests/examples/test_ray_search.py runs the like",
    ("docs/train/search.md", "import wandb"): "needs W&B's server",
    ("docs/start/install.md", "python3 -m venv .venv"): "makes an environment",
    ("docs/scale/hardware.md", "# SM_HOSTS is a JSON list"): "needs SageMaker's variables",
    ("docs/scale/hardware.md", "gcloud compute tpus tpu-vm ssh NAME"): "Google's own tool, and machines of theirs",
    ("docs/scale/hardware.md", "pip install torch --index-url"): "needs an XPU",
    ("docs/scale/launching.md", "instep launch [OPTIONS] SCRIPT [ARGUMENTS]"): "says what stands where; no command",
    ("docs/scale/clusters.md", "#SBATCH --nodes=2"): "needs SLURM; tests/launchers/test_slurm.py runs one",
    ("docs/scale/clusters.md", "from instep.launch.engine import LaunchSpec"): NO_CLUSTER,
    ("docs/scale/xla.md", "# xla_train.py"): NO_XLA,
    ("docs/scale/xla.md", "from instep.strategies import XLAStrategy"): NO_XLA,
    ("docs/scale/xla.md", "import torch_xla"): NO_XLA,
}
if find_spec("hydra") is None:  # an environment that was made before: make installs it
    LEFT_OUT["docs/scale/hydra.md", "# hydra_train.py"] = "needs hydra-core"
    LEFT_OUT["docs/scale/hydra.md", "python hydra_train.py"] = "the same"
if find_spec("optuna") is None:  # the same
    LEFT_OUT["docs/train/search.md", "import optuna"] = "needs optuna"
if find_spec("bitsandbytes") is None:  # an extra of the development environment
    LEFT_OUT["docs/scale/precision.md", "import bitsandbytes as bnb"] = "needs bitsandbytes"
    LEFT_OUT["docs/scale/quantization.md", "from instep.big_models import BnbQuantizationConfig"] = "the same"
if find_spec("peft") is None or find_spec("transformers") is None or find_spec("bitsandbytes") is None:  # the same
    LEFT_OUT["docs/scale/big_models_training.md", "# lora.py"] = "needs peft and transformers"
    LEFT_OUT["docs/scale/quantization.md", "# qlora.py"] = "needs peft, transformers and bitsandbytes"
try:
    import torchao.quantization  # noqa: F401
except ImportError:  # it is not there, or needs a newer torch
    LEFT_OUT["docs/scale/quantization.md", "# quantize.py"] = "needs torchao"
    LEFT_OUT["docs/scale/quantization.md", "Int8Tensor Parameter"] = "the same"
    LEFT_OUT["docs/scale/quantization.md", "import torch"] = "the same"
    LEFT_OUT["docs/train/finetuning.md", "import torch"] = "the same"
if TorchVersion(torch.__version__) < "2.13":
    LEFT_OUT["docs/scale/pipelines.md", "# pipe.py"] = "pp needs torch 2.13"
RUNS = (
    "docs/observe/runs.md",
    "docs/command/checkpoints.md",
    "docs/recover/checkpoints.md",
    "docs/command/config_trainer.md",
)
COMPARED = (  # what their commands print does not depend on the machine
    "INSTEP_PRECISION=bf16-mixed instep config show --config cpu",
    "instep launch --config run.yaml train.py",
    "instep launch --fsdp_offload_params true train.py",
    "instep checkpoint diff instep_runs/version_0/checkpoints/step-00000020-1 "
    "instep_runs/version_0/checkpoints/step-00000060-1",
)
COMPLETE = (  # pages of docs/train that take nothing for granted
    *("callbacks", "data", "data_at_scale", "debug", "evaluation"),
    *("manual_optimization", "metrics", "modules", "optimization"),
)
ARGUMENTS = {("docs/command/config_trainer.md", "train.py"): "fit --data.batch_size=16 --stop.patience=5 --note=own"}
SHORTER = {("docs/start/quickstart.md", "train.py"): ("max_epochs=60", "max_epochs=6")}  # a guide trains for minutes
SWEEP = ("finished 0.03 8", "running 0.03 32", "failed 0.3 8", "finished 0.003 32")  # of the guide to runs
DIVISION = {  # of a run's data, as `streams/ledger` writes it
    "step": 0, "epoch": 0, "batch": 0, "accumulate": 1, "seed": 0, "done": 0, "length": 60_000, "shuffle": True,
    "world_size": 2, "batch_size": 64, "drop_last": False, "even": True, "frozen": False, "order": None,
    "batches": 469, "epoch_batches": 469,
}  # fmt: skip
FILES = {  # what a page takes for granted
    "docs/observe/runs.md": {
        f"instep_runs/version_{number}/{file}": text
        for number, (state, lr, batch) in enumerate(map(str.split, SWEEP))
        for file, text in (
            ("status.json", json.dumps({"status": state.replace("finished", "done"), "host": "n1", "pid": 1})),
            ("hparams.yaml", f"lr: {lr}\nbatch: {batch}\n"),
            ("metrics.csv", "step,val_loss,val_acc\n1,0.5,0.5\n"),
            ("samples.jsonl", json.dumps(DIVISION)),
        )
    },
    "docs/porting/accelerate.md": {"train.py": ""},
    "docs/porting/fabric.md": {"train.py": ""},
    "docs/recover/hangs.md": {"train.py": ""},
    "docs/scale/hardware.md": {"train.py": ""},
    "docs/command/cli.md": {"train.py": ""},
    "docs/scale/clusters.md": {"train.py": ""},
    "docs/scale/restarts.md": {"train.py": ""},
    "docs/scale/launching.md": {"run.yaml": "# of a launch\nprecision: bf61\nmax_restarts: -1\n"},
    "docs/scale/deepspeed.md": {"zero3.json": '{"zero_optimization": {"stage": 3}}', "a.json": "{}"},
    "docs/scale/xla.md": {"xla_train.py": ""},
}


class MyModule(TrainModule):
    """What a guide calls `MyModule(lr)`, and `model`."""

    def __init__(self, lr: float = 0.01, outputs: int = 1) -> None:
        super().__init__()
        self.lr = lr
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, outputs)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.head(self.body(batch[0])).square().mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.head(self.body(batch[0])).square().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def _batches(size: int = 3) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(96.0).reshape(24, 4)), batch_size=size)


train_loader = _batches()  # for programs that import it


def names(page: str) -> dict[str, Any]:
    """What the page's blocks find beside what they make themselves."""
    found: dict[str, Any] = {"__name__": "a_page"}
    if page in ("README.md", "docs/command/config_trainer.md") or Path(page).stem in COMPLETE:  # these are complete
        return found
    found |= {"F": F, "os": os, "signal": signal, "sys": sys, "torch": torch}
    found |= {"DDPStrategy": DDPStrategy, "Trainer": Trainer, "TrainModule": TrainModule}
    found |= {"MyModule": MyModule, "train_loader": _batches(), "val_loader": _batches()}
    found |= {"model": MyModule(), "wider_model": MyModule(outputs=3)}
    if page in ("docs/train/accelerator.md", "docs/train/accelerator_more.md"):
        pairs, model = TensorDataset(torch.ones(24, 2), torch.ones(24, 1)), nn.Linear(2, 1)
        found |= {"Accelerator": Accelerator, "DataLoader": DataLoader, "model": model}
        found |= {"optimizer": torch.optim.SGD(model.parameters(), 0.1)}
        found |= {"train": DataLoader(pairs, batch_size=3), "test": DataLoader(pairs, batch_size=3)}
    return found


@dataclass(frozen=True)
class Block:
    language: str
    code: str

    @property
    def first(self) -> str:
        return self.code.partition("\n")[0]

    @property
    def kind(self) -> str:
        """`python`, `commands`, `console`, `text`, `yaml`, `toml`, or nothing."""
        if self.language == "console" or (not self.language and self.first.startswith("$ ")):
            return "console"
        if self.language in ("sh", "bash") or (not self.language and self.first.split()[0] in PROGRAMS):
            return "commands"
        return self.language

    @property
    def file(self) -> str | None:
        """The name of the file that it is."""
        named = re.fullmatch(r"# ([\w.]+\.\w+)", self.first)
        return named and named[1]


def blocks(page: str) -> list[Block]:
    text = re.sub(r"^(`{3,})\{.*?^\1$", "", (REPO / page).read_text(), flags=re.MULTILINE | re.DOTALL)  # Sphinx's own
    found = [Block(*match) for match in re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)]
    assert 2 * len(found) == len(re.findall(r"^\s*```", text, re.MULTILINE)), "a block is indented, or has no end"
    return found


def reason(page: str, block: Block) -> str | None:
    """Why it is left out, if it is."""
    return next((why for (of, first), why in LEFT_OUT.items() if of == page and block.first.startswith(first)), None)


@pytest.fixture
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A page may add strategies and signal handlers."""
    for name in UNLAUNCHED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.usefixtures("_as_before")
@pytest.mark.filterwarnings(
    "ignore:there is a validation",
    "ignore:the configured optimizer takes the place",
    "ignore:instep.compat.lightning:FutureWarning",
    "ignore:The given buffer is not writable:UserWarning",  # of torch 2.9's export
)
@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=pytest.mark.campaign) if p.startswith(FURTHER) else p for p in PAGES]
)
def test_every_block_of_a_page_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in FILES.get(page, {}).items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    known, printed = names(page), ""
    for block in blocks(page):
        if reason(page, block) is not None:
            continue
        if block.file is not None:
            code = block.code
            if (page, block.file) in SHORTER:
                old, new = SHORTER[page, block.file]
                assert old in code
                code = code.replace(old, new)
            Path(block.file).write_text(code)
            if block.file.endswith(".py") and "DeepSpeedStrategy" not in block.code:  # as in _do
                words = [block.file, *ARGUMENTS.get((page, block.file), "").split()]
                printed += _run(words, tmp_path)
        elif block.kind == "python":
            printed += _do(block.code, known, page, tmp_path)
        elif block.kind in ("commands", "console"):
            printed += _commands(page, block, capsys)
        elif block.kind == "yaml":
            Path("config.yaml").write_text(block.code)
            assert main(["config", "validate", "config.yaml"]) == 0
        elif block.kind == "text":
            _compare(block.code, (printed + capsys.readouterr().out).replace(f"{tmp_path}/", ""))
        else:
            assert block.kind in ("", "toml"), f"```{block.language}: nobody knows how to check that: see test_docs.py"
        printed += capsys.readouterr().out


@pytest.mark.deepspeed
@pytest.mark.usefixtures("_as_before")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_the_blocks_of_deepspeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = "docs/scale/deepspeed.md"
    known = names(page)
    for name, text in FILES.get(page, {}).items():
        Path(name).write_text(text)
    found = [block for block in blocks(page) if block.kind == "python" and "DeepSpeedStrategy" in block.code]
    for block in found:
        if block.file is None:
            exec(compile(block.code, page, "exec"), known)
        else:
            Path(block.file).write_text(block.code)
            _run([block.file], tmp_path)
    assert found


def test_what_is_left_out_is_there() -> None:
    left = [(page, reason(page, block)) for page in PAGES for block in blocks(page)]
    assert len([why for _, why in left if why]) == len(LEFT_OUT), "one of LEFT_OUT names no block, or two"
    commands = [line.removeprefix("$ ") for page in PAGES for block in blocks(page) for line in block.code.splitlines()]
    assert set(COMPARED) <= set(commands)
    for where in (*RUNS, *FILES, *(page for page, _ in ARGUMENTS)):
        assert where in PAGES


@pytest.mark.parametrize("page", ["docs/porting/accelerate.md", "docs/porting/lightning.md"])
def test_scripts_become_those_beside_them(page: str) -> None:
    from instep.cli.migrate.rewrite import migrate  # late: needs libcst

    theirs, ours = [block.code for block in blocks(page) if block.language == "python"][:2]
    new, findings, _ = migrate(theirs)
    assert new == ours
    assert {finding.kind for finding in findings} == {"note"}


def test_the_messages_in_troubleshooting_are_the_programs() -> None:
    page = (REPO / "docs/reference/troubleshooting.md").read_text()
    messages = re.findall(r"^### `(.+)`$", page, re.MULTILINE)
    assert 25 <= len(messages) == page.partition("## Messages of torch")[0].count("\n### ")
    texts = "\n".join(text for path in sorted((REPO / "instep").rglob("*.py")) for text in _texts(path))
    for message in messages:
        parts = [re.escape(part) for part in message.split("...") if part]
        assert re.search(".*".join(parts), texts), f"nothing prints {message!r}"


def _texts(path: Path) -> Iterator[str]:
    """Yield the texts of a module, each in one line; `...` stands for what an f-string fills in."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "..." for part in node.values]
            yield "".join(map(str, parts)).replace("\n", " ")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value.replace("\n", " ")


def _do(code: str, known: dict[str, Any], page: str, folder: Path) -> str:
    if "_launcher(" not in code:
        if "DeepSpeedStrategy" not in code:  # see test_the_blocks_of_deepspeed
            exec(compile(code, page, "exec"), known)
        return ""
    (folder / "notebook.py").write_text(f"from tests.test_docs import MyModule, train_loader\n\n{code}")
    return _run(["notebook.py"], folder)  # it forks, which a process that has trained cannot


def _run(words: list[str], folder: Path) -> str:
    env = {**UNLAUNCHED, "PYTHONPATH": os.pathsep.join((str(folder), str(REPO)))}
    done = run_command([warm_python(), *words], cwd=folder, env=env)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _commands(page: str, block: Block, capsys: pytest.CaptureFixture[str]) -> str:
    lines = block.code.replace("\\\n", " ").splitlines()
    if block.kind == "console":
        commands = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        if commands[0] in COMPARED:
            capsys.readouterr()
            _command(page, commands[0], run=True)
            printed = capsys.readouterr()
            _compare("\n".join(lines[1:]), (printed.out + printed.err).replace(f"{REPO}/", ".../"))
            return ""
    else:
        commands = [line for line in lines if line.strip() and not line.startswith("#")]
    for command in commands:
        _command(page, command, run=page in RUNS)
    return ""


def _command(page: str, line: str, run: bool) -> None:
    words = shlex.split(line, comments=True)
    with pytest.MonkeyPatch.context() as patch:
        while "=" in words[0]:
            patch.setenv(*words.pop(0).split("=", 1))
        program, *rest = words
        if program == "instep":
            _instep(rest, line, run, compared=line in COMPARED)
        elif program in ("srun", "mpirun"):  # their options, then a command
            start = next(number for number, word in enumerate(rest) if word in PROGRAMS)
            _command(page, shlex.join(rest[start:]), run=False)
        elif program == "python":
            assert rest[0] == "-m" or Path(rest[0]).exists() or (REPO / rest[0]).exists(), line
        elif program == "torchrun":
            from torch.distributed.run import get_args_parser

            get_args_parser().parse_args(rest)
        elif program == "make":
            assert re.search(rf"^{rest[0]}:", (REPO / "Makefile").read_text(), re.MULTILINE), line
        elif program == "pip":
            extras = (several for word in rest for several in re.findall(r"instep\[([\w,]+)\]", word))
            project = (REPO / "pyproject.toml").read_text()
            assert rest[0] == "install", line
            for extra in (one for several in extras for one in several.split(",")):
                assert re.search(rf"^{extra} = \[", project, re.MULTILINE), line
        else:
            beside = Path(sys.executable).with_name(Path(program).name)
            assert beside.exists() or shutil.which(program), line


def _instep(words: list[str], line: str, run: bool, compared: bool) -> None:
    command = find(words)
    assert command is not None, line
    if compared:
        with contextlib.suppress(SystemExit):  # of an example of a mistake
            main(words)
        return
    if command in (("launch",), ("slurm",)):
        with contextlib.redirect_stderr(io.StringIO()) as said:
            code = main([words[0], "--dry-run", *words[1:]])
        assert code == 0 or "this process sees no such device" in said.getvalue(), f"{line}\n{said.getvalue()}"
    elif run:
        assert main(words) == 0, line
    elif (rest := words[len(command) :]) and command not in (("fit",), ("validate",), ("predict",)):
        make_parser(command, load(command)).parse_args(rest[: rest.index("--")] if "--" in rest else rest)


def _compare(expected: str, printed: str) -> None:
    """`...` stands for anything, and spaces are as they come."""
    pattern = ".*".join(re.escape(" ".join(part.split())) for part in expected.split("..."))
    text = " ".join(printed.split())
    assert re.search(pattern.replace(r"\ .*", r"\ ?.*").replace(r".*\ ", r".*\ ?"), text), f"{expected}\n{printed}"
