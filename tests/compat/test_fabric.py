"""`instep.compat.fabric`: programs of Lightning Fabric run unmodified, with the numbers of a plain loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from instep.compat import fabric_wrappers
from instep.compat.fabric import Fabric
from instep.errors import CheckpointError, CorruptCheckpointError, UnsavableStateError, UsageError
from tests.helpers.spawn import run_command
from tests.helpers.warm import warm_python
from tests.test_public_names import in_new_process

SCRIPT = """
import json, sys
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(3)
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
x = torch.randn(40, 4)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)
losses = []
"""

PLAIN = """
for epoch in range(3):
    for index, (a, b) in enumerate(loader):
        loss = (net(a) - b).square().mean()
        (loss / 2).backward()
        losses.append(loss.item())
        if index % 2:
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
print(json.dumps(losses))
"""

OF_FABRIC = """
import lightning as L
from lightning.fabric.loggers import CSVLogger
from lightning.fabric.strategies import DDPStrategy, SingleDeviceStrategy

fabric = L.Fabric(accelerator="cpu", devices=int(sys.argv[2]), loggers=CSVLogger(sys.argv[1] + "/logs"))
fabric.launch()
assert isinstance(fabric.strategy, (DDPStrategy, SingleDeviceStrategy))
net, optimizer = fabric.setup(net, optimizer)
loader = fabric.setup_dataloaders(loader)
state = {"net": net, "optimizer": optimizer, "schedule": schedule, "loader": loader, "epoch": 0, "index": 0}
path = sys.argv[1] + "/state.ckpt"
if "resume" in sys.argv:
    assert fabric.load(path, state) == {}
for epoch in range(state["epoch"], 3):
    for index, (a, b) in enumerate(loader, state["index"]):
        with fabric.no_backward_sync(net, enabled=not index % 2):
            loss = (net(a) - b).square().mean()
            fabric.backward(loss / 2)
        losses.append(loss.item())
        if index % 2:
            fabric.clip_gradients(net, optimizer, max_norm=1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if "stop" in sys.argv and epoch == 1 and index == 1:
            fabric.save(path, state | {"epoch": 0, "index": 0})
            fabric.save(path, state | {"epoch": 1, "index": 2})  # in its place
            sys.exit()
    state["index"] = 0
    fabric.log("loss", loss, step=epoch)
seen = fabric.all_gather(torch.tensor(float(fabric.global_rank)))
if fabric.is_global_zero:
    print(json.dumps(losses))
    print(json.dumps([seen.tolist(), fabric.world_size]))
"""


def output(tmp_path: Path, code: str, *words: str, of_fabric: bool = True) -> list[str]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT + code)
    launch = ["-m", "instep.compat", "fabric"] if of_fabric else []
    done = run_command([warm_python(), *launch, str(script), str(tmp_path), *words])
    assert done.returncode == 0, done.stdout
    return [line for line in done.stdout.splitlines() if line.startswith("[")]


def test_a_script_computes_what_torch_does_and_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    plain = json.loads(output(tmp_path, PLAIN, of_fabric=False)[0])
    assert json.loads(output(tmp_path, OF_FABRIC, "1")[0]) == plain
    assert (tmp_path / "logs/lightning_logs/version_0/metrics.csv").read_text().startswith("step,loss\n0,")
    assert output(tmp_path, OF_FABRIC, "1", "stop") == []
    assert sorted(path.name for path in tmp_path.glob("state*")) == ["state.ckpt"]
    assert json.loads(output(tmp_path, OF_FABRIC, "1", "resume")[0]) == plain[7:]


@pytest.mark.extras
@pytest.mark.dist
def test_a_script_that_asks_for_two_ranks_gets_them(tmp_path: Path) -> None:
    assert json.loads(output(tmp_path, OF_FABRIC, "2")[1]) == [[0.0, 1.0], 2]


def test_load_verifies_fills_objects_and_returns_the_rest(tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu")
    first = nn.Linear(2, 2)
    model, optimizer = fabric.setup(first, torch.optim.Adam(first.parameters()))
    fabric.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    path = tmp_path / "a.pth"
    fabric.save(
        path, {"model": model, "optimizer": optimizer, "rows": 3, "note": "x"}, {"model": lambda k, v: k != "no"}
    )
    saved = torch.load(path)
    assert torch.equal(saved["model"]["weight"], first.weight)
    assert list(saved) == ["model", "optimizer", "rows", "note"]
    with pytest.raises(
        UnsavableStateError, match=r"[^.\n]\. Give tensors, .*, not objects such as \['code'\] \(object\);"
    ) as e:
        fabric.save(path, {"model": model, "kind": torch.float16, "code": object()})
    assert "\x1b" not in str(e.value)
    other = nn.Linear(2, 2)
    state = {"model": other, "optimizer": torch.optim.Adam(other.parameters()), "rows": 0}
    assert fabric.load(path, state) == {"note": "x"}
    assert state["rows"] == 3
    assert torch.equal(other.weight, first.weight)
    assert state["optimizer"].state[other.weight]["step"] == 1
    with pytest.raises(KeyError, match="has no 'other'"):
        fabric.load(path, {"other": 1})
    third = nn.Linear(2, 2)
    torch.save(saved["model"], tmp_path / "raw.pth")
    fabric.load_raw(tmp_path / "raw.pth", third)
    assert torch.equal(third.weight, first.weight)
    weights, stored = first.weight.detach().numpy().tobytes(), path.read_bytes()
    assert stored.count(weights) == 1
    path.write_bytes(stored.replace(weights, weights[:-1] + bytes([weights[-1] ^ 1])))
    with pytest.raises(CorruptCheckpointError):
        fabric.load(path, state)


def test_a_sharded_model_is_saved_whole(tmp_path: Path) -> None:
    path = str(tmp_path / "a.ckpt")
    in_new_process(f"""
import os, torch
from instep.compat.fabric import Fabric

os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
fabric = Fabric(accelerator="cpu", strategy="fsdp")
fabric.launch()
net = torch.nn.Linear(2, 2)
before = net.weight.detach().clone()
model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
fabric.backward(model(torch.ones(1, 2)).sum())
optimizer.step()
after = net.weight.full_tensor().detach().clone()
fabric.save({path!r}, {{"model": model, "optimizer": optimizer, "epoch": 2}})
optimizer.step()
saved = torch.load({path!r})
assert torch.equal(saved["model"]["weight"], after) and not torch.equal(before, after)
state = {{"model": model, "optimizer": optimizer, "epoch": 0}}
assert fabric.load({path!r}, state) == {{}} and state["epoch"] == 2
assert torch.equal(net.weight.full_tensor(), after)
assert torch.equal(optimizer.state[net.weight]["momentum_buffer"].full_tensor(), torch.ones(2, 2))
""")


def test_what_instep_does_not_have_is_an_error_when_it_is_used() -> None:
    in_new_process("""
import importlib.metadata
from instep.compat import fabric as door
door.install()
import lightning, lightning_fabric
from lightning.fabric.plugins import BitsandbytesPrecision, TorchCollective
from lightning.fabric.utilities.imports import _TORCH_GREATER_EQUAL_2_4
assert lightning.fabric.Fabric is lightning.Fabric is lightning_fabric.Fabric is door.Fabric
assert lightning.__version__ == importlib.metadata.version("lightning") == door.VERSION
assert not isinstance(1, BitsandbytesPrecision) and _TORCH_GREATER_EQUAL_2_4
class Own(TorchCollective):
    pass
for wrong in (BitsandbytesPrecision, Own):
    try:
        wrong("nf4")
    except Exception as error:
        assert "takes the place of lightning" in str(error) and "lightning.fabric.plugins" in str(error), error
    else:
        raise AssertionError
""")


def test_methods_of_a_spread_module_go_through_the_strategy() -> None:
    seen: list[torch.dtype] = []

    class Net(nn.Linear):
        def loss(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(x.dtype)
            return self(x).sum()

    fabric, inner = Fabric(accelerator="cpu", precision="bf16-mixed"), Net(2, 2)
    model = fabric_wrappers._FabricModule(nn.Sequential(inner), fabric.setup(nn.Linear(2, 2))._strategy, inner)
    with pytest.raises(RuntimeError, match="mark_forward_method"):
        model.loss(torch.ones(1, 2))
    model.mark_forward_method("loss")
    assert model.loss(torch.ones(1, 2)).dtype == torch.float32
    assert seen[-1] == torch.bfloat16  # mixed precision casts inputs too
    assert "forward" not in vars(inner)
    assert list(model.state_dict()) == ["weight", "bias"]
    assert model.module is inner
    with pytest.raises(UsageError, match="plugins"):
        Fabric(plugins=[object()])
    with pytest.raises(TypeError, match="in `setup`; got SGD as a model"):
        fabric.setup(torch.optim.SGD(inner.parameters()), inner)


class RunsCode:
    def __reduce__(self) -> Any:
        return print, ("code of a file ran",)


def test_a_file_of_torch_runs_no_code_whatever_is_asked(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    torch.save({"step": RunsCode()}, tmp_path / "file.pt")
    with pytest.raises(CheckpointError, match="without running code"):
        Fabric(accelerator="cpu").load(tmp_path / "file.pt", weights_only=False)
    assert "code of a file ran" not in capfd.readouterr().out
