"""`instep.compat.accelerate`: programs of Accelerate run unmodified, with the numbers of a plain loop."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.fsdp import ShardingStrategy

from instep.compat.fsdp import FullyShardedDataParallelPlugin
from instep.errors import SettingError, UsageError
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
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)
losses = []
"""

PLAIN = """
for epoch in range(3):
    for index, (a, b) in enumerate(loader, 1):
        loss = (net(a) - b).square().mean()
        (loss / (1 if index == len(loader) and index % 2 else 2)).backward()  # the mean of a short window, too
        losses.append(loss.item())
        if index % 2 == 0 or index == len(loader):
            optimizer.step()
            optimizer.zero_grad()
"""

OF_ACCELERATE = """
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration

accelerator = Accelerator(
    gradient_accumulation_steps=2,
    dataloader_config=DataLoaderConfiguration(use_seedable_sampler=False),
    project_config=ProjectConfiguration(project_dir=sys.argv[1]),
)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
net, optimizer, loader, scheduler = accelerator.prepare(net, optimizer, loader, scheduler)
done = 0
if "resume" in sys.argv:
    accelerator.load_state(sys.argv[1] + "/state")
    done = 1
for epoch in range(done, 3):
    for index, (a, b) in enumerate(loader):
        with accelerator.accumulate(net):
            loss = (net(a) - b).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
        if "stop" in sys.argv and epoch == 1 and index == 1:
            accelerator.save_state(sys.argv[1] + "/state")
            sys.exit()
if accelerator.is_main_process:
    print(json.dumps(losses))
accelerator.end_training()
"""


def losses(tmp_path: Path, code: str, *words: str, ranks: int = 0, of_accelerate: bool = True) -> list[float]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT + code)
    launch = ["-m", "instep", "launch", "--as", "accelerate", "--devices", str(max(1, ranks))] if of_accelerate else []
    done = run_command([warm_python(), *launch, str(script), str(tmp_path), *words])
    assert done.returncode == 0, done.stdout
    return json.loads(done.stdout.splitlines()[-1]) if "[" in done.stdout else []


@pytest.mark.extras
def test_a_script_computes_what_torch_does_and_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    plain = losses(tmp_path, PLAIN + "print(json.dumps(losses))", of_accelerate=False)
    found = losses(tmp_path, OF_ACCELERATE)
    assert found == plain
    assert losses(tmp_path, OF_ACCELERATE, "stop") == []
    assert losses(tmp_path, OF_ACCELERATE, "resume") == found[7:]


def test_a_script_sees_on_two_ranks_what_one_process_sees(tmp_path: Path) -> None:
    code = """
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
accelerator = Accelerator()
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
optimizer, loader, scheduler = accelerator.prepare(optimizer, loader, scheduler)
seen = accelerator.gather_for_metrics(torch.cat([accelerator.gather_for_metrics(a) for a, b in loader])).sum()
assert AcceleratorState().distributed_type in (DistributedType.NO, DistributedType.MULTI_CPU)
optimizer.step()
scheduler.step()
if PartialState().is_main_process:
    print([round(x.sum().item(), 3), accelerator.num_processes, scheduler.last_epoch])
accelerator.end_training()
"""
    assert losses(tmp_path, code, ranks=2)[1:] == [2, 2]


@pytest.mark.dist
def test_the_main_process_may_save_alone(tmp_path: Path) -> None:
    code = """
from accelerate import Accelerator
accelerator = Accelerator()
net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
kept = {}
for epoch in range(2):
    for index, (a, b) in enumerate(loader):
        accelerator.backward((net(a) - b).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        kept[epoch, index] = net.module[0].weight.detach().clone()
        if accelerator.is_main_process and index == 1:
            accelerator.save_state(f"{sys.argv[1]}/alone-{epoch}")
            accelerator.save_state(f"{sys.argv[1]}/again-{epoch}")
    accelerator.save_state(f"{sys.argv[1]}/together-{epoch}")
last = len(loader) - 1
for name, place in (("alone-0", (0, 1)), ("together-0", (0, last)), ("again-1", (1, 1)), ("together-1", (1, last))):
    accelerator.load_state(f"{sys.argv[1]}/{name}")
    assert torch.equal(net.module[0].weight, kept[place]), name
    assert optimizer.state[net.module[0].weight]["step"] == place[0] * (last + 1) + place[1] + 1
if accelerator.is_main_process:
    print([1.0])
accelerator.end_training()
"""
    assert losses(tmp_path, code, ranks=2) == [1.0]
    ranks = {path.name: len([*path.glob("rank-0000?.json")]) for path in tmp_path.iterdir() if path.is_dir()}
    assert ranks == {
        f"{name}-{epoch}": count for name, count in (("alone", 1), ("again", 1), ("together", 2)) for epoch in (0, 1)
    }


@pytest.mark.extras
@pytest.mark.parametrize("seedable", [True, False])
def test_a_loader_with_a_batch_sampler_and_a_generator_of_its_own_keeps_its_order(seedable: bool) -> None:
    code = f"""
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from DOOR import Accelerator
from DOOR.utils import DataLoaderConfiguration

class Batches(BatchSampler):
    def set_epoch(self, epoch):
        pass

torch.manual_seed(5)
batches = Batches(RandomSampler(range(9), generator=torch.Generator().manual_seed(3)), 2, False)
accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler={seedable}))
loader = accelerator.prepare(DataLoader(torch.arange(9), batch_sampler=batches))
print([[batch.tolist() for batch in loader] for epoch in range(3)])
"""
    theirs, ours = (in_new_process(code.replace("DOOR", name)) for name in ("accelerate", "instep.compat.accelerate"))
    assert ours == theirs


@pytest.mark.campaign
def test_a_state_has_the_name_that_the_script_gave_it(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "note.txt").write_text("stays")
    in_new_process(f"""
import os
import torch
from instep.compat.accelerate import Accelerator
from instep.compat.accelerate.utils import ProjectConfiguration, set_module_tensor_to_device
accelerator = Accelerator(cpu=True, project_dir=ProjectConfiguration("."))
assert accelerator.project_dir == "."
loaders = [torch.utils.data.DataLoader(torch.arange(4)) for _ in range(2)]
model, other, *_ = accelerator.prepare(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1), *loaders)
averages = [torch.optim.swa_utils.AveragedModel(model) for _ in range(2)]
accelerator.register_for_checkpointing(*averages)  # two of one class each: Accelerate tells them apart by their order
accelerator.even_batches = False
os.chdir({str(tmp_path)!r})
for name in ("checkpoint-3", "checkpoint-3", "mine", "mine"):
    value = model.weight.detach() + 1
    set_module_tensor_to_device(model, "weight", "cpu", value=value, non_blocking=True, clear_cache=False)
    accelerator.save_state(name)
    set_module_tensor_to_device(model, "weight", "cpu", value=value - 7)
    accelerator.load_state(name)
    assert torch.equal(model.weight, value)
accelerator.end_training()
""")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names[:2] == ["checkpoint-3", "mine"]
    assert len(names) == 4
    assert (tmp_path / "mine" / "note.txt").exists()


@pytest.mark.campaign
def test_a_state_has_drawn_orders_only_if_orders_are_drawn(tmp_path: Path) -> None:
    in_new_process(f"""
import os
import torch
from instep.accelerator import Accelerator as Ours
from instep.compat.accelerate import Accelerator
from instep.compat.accelerate.utils import DataLoaderConfiguration

os.chdir({str(tmp_path)!r})
plain = Ours(cpu=True)
plain.prepare(Linear=torch.nn.Linear(1, 1))
plain.save_state("plain")
plain.free_memory()
other = Accelerator(cpu=True)
other.prepare(torch.nn.Linear(1, 1))
other.load_state("plain")  # which has no entry for orders
other.free_memory()
for seedable in (True, False):
    for kind in ("whole", "cut", "rest"):
        torch.manual_seed(5)
        config = DataLoaderConfiguration(False, None, True, seedable, 7)  # in Accelerate's order
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        assert accelerator.use_seedable_sampler is seedable and config.data_seed == 7
        loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(9), batch_size=2, shuffle=True))
        assert set(accelerator._states.registered) == (set() if seedable else {{"orders_of_the_data"}})
        if kind == "rest":
            torch.manual_seed(6)  # a resumed program draws other numbers
            accelerator.load_state(f"state-{{seedable}}")
            assert [batch.tolist() for batch in loader] == whole[2:]
        elif kind == "whole":
            whole = [batch.tolist() for batch in loader]
        else:
            for index, batch in enumerate(loader):
                if index == 1:
                    accelerator.save_state(f"state-{{seedable}}")
                    break
        accelerator.free_memory()
""")


def test_small_names_of_accelerate_take_what_they_take_there() -> None:
    from instep.compat.accelerate.state import GradientState
    from instep.compat.accelerate.utils.memory import should_reduce_batch_size

    assert GradientState(None).sync_gradients
    assert should_reduce_batch_size(MemoryError())
    assert not should_reduce_batch_size(RuntimeError("shapes differ"))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (None, 1)),
        ({"sharding_strategy": 2}, (False, 1)),
        ({"reshard_after_forward": "2"}, (False, 1)),
        ({"reshard_after_forward": "false"}, (False, 1)),
        ({"reshard_after_forward": ShardingStrategy.HYBRID_SHARD}, (None, "auto")),
        ({"sharding_strategy": None, "reshard_after_forward": True}, (True, 1)),
    ],
)
def test_a_kind_of_sharding_is_known_by_name_and_by_number(options: dict[str, Any], expected: Any) -> None:
    plugin = FullyShardedDataParallelPlugin(**options)
    assert (plugin.reshard_after_forward, plugin.dp_replicate) == expected


def test_what_fsdp2_cannot_do_is_an_error_or_a_warning() -> None:
    with pytest.raises(SettingError, match="use strategy='ddp'"):
        FullyShardedDataParallelPlugin(sharding_strategy="NO_SHARD")
    with pytest.warns(
        UserWarning, match=r"FSDP\(sharding_strategy='SHARD', auto_wrap_policy='NO_WRAP'\) has no effect"
    ):
        FullyShardedDataParallelPlugin("NO_WRAP", sharding_strategy="shard")


def test_what_instep_does_not_have_is_an_error_when_it_is_used() -> None:
    in_new_process("""
import importlib.metadata, importlib.util
from instep.compat import accelerate as door
door.install()
door.install()
import accelerate
from accelerate.utils import MegatronLMPlugin, is_megatron_lm_available, is_torch_version
assert accelerate.__version__ == importlib.metadata.version("accelerate") == door.VERSION
assert "huggingface" in importlib.metadata.metadata("accelerate")["Home-page"]
assert importlib.util.find_spec("accelerate").origin == "instep"
assert not is_megatron_lm_available() and is_torch_version(">=", "2.0") and not isinstance(1, MegatronLMPlugin)
for wrong in (lambda: MegatronLMPlugin(tp_degree=2), lambda: accelerate.Accelerator(megatron_lm_plugin=1)):
    try:
        wrong()
    except Exception as error:
        assert "egatron" in str(error) and "MeshStrategy" in str(error), error
    else:
        raise AssertionError
try:
    import accelerate.nothing
except ModuleNotFoundError as error:
    assert "accelerate.nothing is not there" in str(error)
""")


@pytest.mark.campaign
def test_the_plugin_of_fsdp_is_the_strategy_and_may_change_after_the_accelerator_is_made() -> None:
    in_new_process("""
import os, torch
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
from instep.compat.accelerate import Accelerator
from instep.compat.accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

plugin = FullyShardedDataParallelPlugin(  # as transformers gives it for `--fsdp "full_shard auto_wrap"`
    fsdp_version=1, auto_wrap_policy="TRANSFORMER_BASED_WRAP", transformer_cls_names_to_wrap="Linear,Linear",
    reshard_after_forward="shard_grad_op", sync_module_states=True, use_orig_params=True)
assert (plugin.wrap_policy, plugin.reshard_after_forward) == (("Linear", "Linear"), False)
accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
assert accelerator.distributed_type == DistributedType.FSDP and accelerator.state.fsdp_plugin is plugin
accelerator.state.fsdp_plugin.activation_checkpointing = True
net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
net, optimizer = accelerator.prepare(net, optimizer)
accelerator.backward(net(torch.ones(1, 2)).sum())
optimizer.step()
assert type(net[0].weight).__name__ == "DTensor" and accelerator.strategy_of(net).activation_checkpointing
""")


def test_a_program_that_has_accelerate_already_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from instep.compat import accelerate as door

    monkeypatch.setitem(sys.modules, "accelerate", sys)
    with pytest.raises(UsageError, match="imported already"):
        door.install()


TRAINER = """
import os, sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

set_seed(0)
config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                     attention_dropout=0.1)
data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 32, (30, 6))]

class Kill(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if "kill" in sys.argv and state.global_step == 7:
            os._exit(9)

arguments = TrainingArguments(sys.argv[1], num_train_epochs=3, save_steps=5, logging_steps=1, use_cpu=True,
    report_to=[], per_device_train_batch_size=4, gradient_accumulation_steps=2, disable_tqdm=True)
trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=data, callbacks=[Kill()])
trainer.train(resume_from_checkpoint="resume" in sys.argv)
print([row["loss"] for row in trainer.state.log_history if "loss" in row])
"""


@pytest.mark.extras
def test_a_trainer_of_transformers_computes_the_same_also_killed_and_resumed(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    script = tmp_path / "train.py"
    script.write_text(TRAINER)

    def run(folder: str, *words: str, by: tuple[str, ...] = ("-m", "instep.compat", "accelerate")) -> Any:
        done = run_command([sys.executable, *by, str(script), str(tmp_path / folder), *words], timeout_s=300.0)
        return done.returncode, done.stdout.splitlines()[-1:]

    whole = run("whole")
    assert whole == run("theirs", by=())
    assert whole[0] == 0
    assert run("killed", "kill")[0] == 9
    assert run("killed", "resume") == whole
