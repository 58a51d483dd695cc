from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from instep.errors import SettingError
from instep.strategies import DDPStrategy, Precision, Strategy, register_strategy, resolve_strategy, strategy_names
from instep.strategies import registry as room
from instep.strategies.gradients import Gradients
from tests.helpers.spawn import HANG_S
from tests.trainer.toys import Toy, loader, quiet


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    before = dict(room._registered)
    yield
    room._registered.clear()
    room._registered.update(before)


@pytest.mark.parametrize(
    ("name", "world_size", "kind"),
    [
        ("auto", 1, Strategy),
        ("auto", 2, DDPStrategy),
        ("ddp", 1, DDPStrategy),
        ("single_device", 1, Strategy),
        ("ddp_find_unused_parameters_true", 2, DDPStrategy),
        ("DDP", 2, DDPStrategy),
        ("Auto", 1, Strategy),
    ],
)
def test_names_of_strategies_give_their_classes(name: str, world_size: int, kind: type):
    assert type(resolve_strategy(name, world_size)) is kind


def test_options_by_name_and_instances_as_they_are():
    found = resolve_strategy("ddp_find_unused_parameters_false", 2)
    assert isinstance(found, DDPStrategy)
    assert found.find_unused_parameters is False
    mine = DDPStrategy(bucket_cap_mb=10)
    assert resolve_strategy(mine, 2) is mine


def test_unknown_names_and_wrong_kinds():
    with pytest.raises(SettingError, match="Did you mean 'fsdp'"):
        resolve_strategy("fsdpp", 1)
    with pytest.raises(SettingError, match=r"expected a name .* or an instep\.Strategy"):
        resolve_strategy(3, 1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(SettingError, match=r"write DDPStrategy\(\)"):
        quiet(strategy=DDPStrategy)


class Entry:
    """What an installed package declares."""

    dist = None

    def __init__(self, name: str, value: str, factory: Any = None) -> None:
        self.name, self.value, self._factory = name, value, factory

    def load(self) -> Any:
        return self._factory


def test_strategies_of_other_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    class Theirs(Strategy):
        name = "theirs"

    entries = [Entry("theirs", "a:Theirs", Theirs), Entry("twice", "a:X"), Entry("twice", "b:Y"), Entry("ddp", "c:Z")]
    monkeypatch.setattr(room, "entry_points", lambda group: entries if group == "instep.strategies" else [])
    assert type(resolve_strategy("theirs", 1)) is Theirs
    assert type(quiet(strategy="theirs").strategy) is Theirs
    assert type(resolve_strategy("ddp", 1)) is DDPStrategy
    assert strategy_names().count("ddp") == 1
    with pytest.raises(SettingError, match=r"several installed strategies: a:X \(of \?\) and b:Y"):
        resolve_strategy("twice", 1)
    with pytest.raises(SettingError, match="Did you mean 'theirs'"):
        quiet(strategy="their")


def test_every_name_of_ours_is_there() -> None:
    for file, kind, options in room._BUILT_IN.values():
        if file in ("deepspeed", "xla"):
            continue  # made without their packages only as far as these allow
        assert isinstance(getattr(import_module(f"instep.strategies.{file}"), kind)(**options), Strategy)


def test_a_strategy_is_loaded_when_it_is_used() -> None:
    code = (
        "import sys; from instep import Trainer; import instep.strategies; "
        "print([n for n in ('torch.distributed.fsdp', 'torch.distributed.tensor', 'torch.distributed.pipelining', "
        "'torch.distributed.checkpoint', 'deepspeed', 'torch_xla', 'torchao') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S)
    assert done.stdout == "[]\n", done.stdout + done.stderr


def test_one_process_strategies_refuse_more():
    with pytest.raises(SettingError, match="runs in one process, and this run has 2"):
        resolve_strategy("single_device", 2)


def test_a_registered_strategy_is_used_for_every_step():
    calls: list[str] = []

    class Counting(Strategy):
        name = "counting"

        def step_function(self, name: str) -> Any:
            step = super().step_function(name)

            def counted(*args: Any) -> Any:
                calls.append(name)
                return step(*args)

            return counted

        def teardown(self) -> None:
            calls.append("teardown")

    register_strategy("counting", Counting)
    assert "counting" in strategy_names()
    trainer = quiet(strategy="counting", max_epochs=1, limit_train_batches=1, num_sanity_val_steps=0)
    trainer.fit(Toy(), loader(), loader(3))
    assert calls == ["training_step", "validation_step", "teardown"]
    with pytest.raises(SettingError, match="registered already"):
        register_strategy("counting", Counting)
    with pytest.raises(SettingError, match="registered already"):
        register_strategy("Auto", Counting)  # built-in names may be given with capitals


def test_the_base_class_is_complete_for_one_device():
    strategy, module = Strategy(), Toy()
    strategy.connect(torch.device("cpu"), Precision("32-true", torch.device("cpu")))
    strategy.prepare_module(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    strategy.prepare_training(module, [optimizer])
    batch = next(iter(loader()))
    loss = strategy.step_function("training_step")(batch, 0)
    with strategy.no_sync():
        strategy.backward(loss)
    strategy.gradients.clip(list(module.parameters()), 1e-3)
    assert float(torch.nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])) <= 1.001e-3
    before = module.layer.weight.detach().clone()
    strategy.gradients.step(optimizer)
    assert not torch.equal(before, module.layer.weight)
    state = {name: value.clone() for name, value in strategy.model_state().items()}
    torch.nn.init.zeros_(module.layer.weight)
    strategy.load_model_state(state)
    assert torch.equal(module.layer.weight, state["layer.weight"])
    assert (strategy.data_rank, strategy.data_world_size) == (0, 1)
    strategy.teardown()
    strategy.teardown()


def test_ddp_in_one_process_is_the_module_itself():
    module = Toy()
    trainer = quiet(strategy="ddp", max_epochs=1)
    trainer.fit(module, loader())
    assert trainer.global_step == 4


class CountedSteps(Gradients):
    def step(self, optimizer, closure=None, **kwargs):
        self.strategy.steps += 1
        super().step(optimizer, closure, **kwargs)


class HalvedGradients(Strategy):
    """Overrides what a user's strategy would."""

    name = "halved"
    gradients_class = CountedSteps

    def __init__(self) -> None:
        self.backwards = self.steps = 0

    def backward(self, loss, *args, **kwargs):
        self.backwards += 1
        super().backward(loss / 2, *args, **kwargs)


def test_a_users_strategy_does_the_backward_and_the_step() -> None:
    strategy = HalvedGradients()
    quiet(strategy=strategy, max_steps=3).fit(Toy(), loader())
    assert (strategy.backwards, strategy.steps) == (3, 3)


def test_options_beside_a_name() -> None:
    found = resolve_strategy("ddp_find_unused_parameters_true", 2, options={"bucket_cap_mb": 7})
    assert isinstance(found, DDPStrategy)
    assert (found.ddp_options["bucket_cap_mb"], found.find_unused_parameters) == (7, True)
    with pytest.raises(SettingError, match="'single_device' cannot take the options comm_hook"):
        resolve_strategy("single_device", 1, options={"comm_hook": "fp16"})
    with pytest.raises(SettingError, match="give them to the strategy itself"):
        resolve_strategy(DDPStrategy(), 2, options={"comm_hook": "fp16"})


STRATEGIES = Path(room.__file__).parent


def strategy_classes() -> set[str]:
    """The names of all classes that are some special strategy."""
    nodes = (node for file in STRATEGIES.rglob("*.py") for node in ast.walk(ast.parse(file.read_text())))
    found = {node.name for node in nodes if isinstance(node, ast.ClassDef)}
    return {name for name in found if name.endswith("Strategy")} - {"Strategy"}


def branches_on_strategies(source: str, classes: set[str]) -> list[int]:
    """The lines that name a special strategy's class, or hold something called a strategy against a name."""
    lines: list[int] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Name, ast.Attribute, ast.alias)):
            name = (
                node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else node.name
            )
            if name in classes:
                lines.append(node.lineno)
        elif isinstance(node, (ast.Compare, ast.Match)):
            sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else [node.subject]
            constants = isinstance(node, ast.Match) or any(is_text(side) for side in sides)
            if any(isinstance(side, ast.Constant) and side.value == "auto" for side in sides):
                continue  # the name of no strategy: that none was chosen
            if constants and any("strategy" in ast.unparse(side) and not is_text(side) for side in sides):
                lines.append(node.lineno)
    return lines


def is_text(node: ast.AST) -> bool:
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return any(is_text(it) for it in node.elts)
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def test_nothing_outside_asks_which_strategy_it_has() -> None:
    classes = strategy_classes()
    assert {"DDPStrategy", "FSDPStrategy", "MeshStrategy", "DeepSpeedStrategy", "XLAStrategy"} <= classes
    for case in (
        "if isinstance(run.strategy, DDPStrategy): pass",
        "if type(it) is strategies.FSDPStrategy: pass",
        "if strategy.name == 'fsdp': pass",
        "if run.strategy_name in ('ddp', 'fsdp'): pass",
        "from instep.strategies import MeshStrategy",
        "match strategy:\n  case 'ddp': pass",
    ):
        assert branches_on_strategies(case, classes), case
    assert not branches_on_strategies("if state['strategy'] == run.strategy.name: pass", classes)
    package = STRATEGIES.parent
    found = [
        f"{file.relative_to(package)}:{line}"
        for file in package.rglob("*.py")
        # The second foretells what each needs; the third gives them other packages' names.
        if not {STRATEGIES, package / "cli" / "memory", package / "compat"} & set(file.parents)
        for line in branches_on_strategies(file.read_text(), classes)
    ]
    assert found == []
