from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, TensorDataset

from instep import Trainer, TrainModule
from instep.callbacks import Callback, ModelCheckpoint
from instep.errors import SettingError
from instep.strategies import MeshStrategy, Precision
from instep.strategies.dtensors import gather_whole
from instep.strategies.fsdp import FSDPStrategy
from tests.helpers.spawn import run_ranks
from tests.strategies.tiny_gpt import LENGTH, VOCABULARY, WIDTH, Block, TinyGPT, Trained, loader, train
from tests.trainer.toys import QUIET


def tiny(seed: int = 1) -> TinyGPT:
    torch.manual_seed(seed)
    return TinyGPT(layers=2)


class Late(TinyGPT):
    """Built in `configure_model`, from torch's own layers and their own initial values."""

    def __init__(self, own_shards: bool = False) -> None:
        TrainModule.__init__(self)
        self.save_hyperparameters({"lr": 1e-3})
        self.own_shards = own_shards

    def configure_model(self) -> None:
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        if self.own_shards:
            strategy: Any = self.trainer.strategy
            fully_shard(self.blocks[1], mesh=strategy.dp_mesh)


class Quiet(Callback):
    def on_fit_start(self, trainer: Any, module: Any) -> None:
        # The compiler looks at .grad of what it traces, and silences that where nobody has changed the filters.
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")


CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "recomputed": {"activation_checkpointing": True},
    "reduced each time": {"accumulate_sharded": True},
    "kept": {"reshard_after_forward": False},
    "by class, prefetched": {"wrap": [Block], "forward_prefetch": 1, "backward_prefetch": 2},
    "by size, recomputed by name": {"wrap": 20_000, "activation_checkpointing": "Block"},
    "compiled": {"compile": {"backend": "eager"}, "wrap": lambda name, module: name == "blocks.0"},
}


@contextmanager
def counted(counts: dict[str, int]) -> Iterator[None]:
    """Count what FSDP sends."""
    names = {"all_gather_single": "gathers", "reduce_scatter_single": "scatters"}
    if not hasattr(dist, "all_gather_single"):  # what an older torch calls them
        names = {"all_gather_into_tensor": "gathers", "reduce_scatter_tensor": "scatters"}
    own = {name: getattr(dist, name) for name in names}

    def spy(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[names[name]] = counts.get(names[name], 0) + 1
            return own[name](*args, **kwargs)

        return call

    for name in names:
        setattr(dist, name, spy(name))
    try:
        yield
    finally:
        for name in names:
            setattr(dist, name, own[name])


def train_all() -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, options in CASES.items():
        counts: dict[str, int] = {}
        calls = 0

        def count(*_: Any) -> None:
            nonlocal calls
            calls += 1

        module: Any = tiny(1 + int(os.environ["RANK"]))  # the first rank's weights are everybody's
        module.blocks[0].up.register_forward_hook(count)
        with counted(counts):
            settings: dict[str, Any] = {"callbacks": [Quiet()], "num_sanity_val_steps": 0}
            trained = train(FSDPStrategy(**options), steps=4, module=module, **settings)
        parts = [part for part, it in module.named_modules() if isinstance(it, FSDPModule)]
        results[name] = (trained, counts, calls, parts)
    results["late"] = train(FSDPStrategy(), steps=3, module=Late())
    results["late, meta"] = train(FSDPStrategy(meta_init=True), steps=3, module=Late())
    results["late, own"] = train(FSDPStrategy(), steps=3, module=Late(own_shards=True))
    results["manual"] = train_manually("fsdp", 4)
    results["evaluated"] = evaluate_between()
    results["replayed"] = replay()
    results["skipped"] = skip()
    results["mixed"] = train_mixed()
    results["methods"] = call_methods()
    return results


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(train_all, 2)


@pytest.fixture(scope="module")
def alone() -> Iterator[Trained]:
    with warnings.catch_warnings():
        yield train(steps=4, module=tiny())


def assert_same(got: Trained, expected: Trained) -> None:
    assert got.losses == pytest.approx(expected.losses, abs=1e-5)
    assert got.norms == pytest.approx(expected.norms, rel=1e-5)
    assert len(got.losses) > 1


@pytest.mark.dist
@pytest.mark.parametrize("name", CASES)
def test_losses_and_norms_are_those_of_one_process(name: str, ranks: list[dict[str, Any]], alone: Trained) -> None:
    for seen in ranks:
        assert_same(seen[name][0], alone)


@pytest.mark.dist
def test_options_do_what_they_say(ranks: list[dict[str, Any]]) -> None:
    parts = {name: ranks[0][name][3] for name in CASES}
    assert parts["default"] == parts["by class, prefetched"] == ["", "blocks.0", "blocks.1"]
    assert parts["by size, recomputed by name"] == ["", "blocks.0", "blocks.1"]
    assert parts["compiled"] == ["", "blocks.0"]
    gathers = {name: ranks[0][name][1]["gathers"] for name in CASES}
    reductions = {name: ranks[0][name][1]["scatters"] for name in CASES}
    # In 4 windows of 2 micro-batches, of 2 blocks and what is left.
    assert reductions["default"] == 4 * 3
    assert reductions["reduced each time"] == 8 * 3
    assert gathers["kept"] == 4 * 3
    assert gathers["default"] == 4 * (2 * 2 + 1)  # for the first forward and the last backward
    assert gathers["reduced each time"] == 8 * (2 * 2 + 1)
    calls = {name: ranks[0][name][2] for name in CASES}
    assert calls["recomputed"] == calls["by size, recomputed by name"] == calls["default"] + 4 * 2


@pytest.mark.dist
def test_modules_that_are_built_late(ranks: list[dict[str, Any]]) -> None:
    with warnings.catch_warnings():
        alone = train(steps=3, module=Late())
    for seen in ranks:
        for name in ("late", "late, meta", "late, own"):
            assert_same(seen[name], alone)


class Gan(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5))
        self.critic = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))
        self.losses: list[list[float]] = []

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(it.parameters(), lr=0.1) for it in (self.generator, self.critic)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        noise, real = batch
        first, second = self.optimizers()
        with self.toggled_optimizer(second):
            critic_loss = self.critic(self.generator(noise).detach()).mean() - self.critic(real).mean()
            second.zero_grad()
            self.manual_backward(critic_loss)
            second.step()
        with self.toggled_optimizer(first):
            loss = -self.critic(self.generator(noise)).mean()
            first.zero_grad()
            self.manual_backward(loss)
            first.step()
        both = torch.stack([critic_loss, loss]).detach()
        self.losses.append(self.all_gather(both).reshape(-1, 2).mean(0).tolist())


def train_manually(strategy: str, batch_size: int) -> list[list[float]]:
    torch.manual_seed(3)
    module = Gan()
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(32, 8, generator=generator), torch.randn(32, 5, generator=generator))
    Trainer(strategy=strategy, max_epochs=2, **QUIET).fit(module, DataLoader(data, batch_size))
    return module.losses


@pytest.mark.dist
def test_manual_optimization_under_fsdp_agrees_with_one_process(ranks: list[dict[str, Any]]) -> None:
    alone = torch.tensor(train_manually("auto", 8))
    assert len(alone) == 8
    for seen in ranks:
        torch.testing.assert_close(torch.tensor(seen["manual"]), alone, atol=1e-6, rtol=0)


def evaluate_between() -> dict[str, Any]:
    """Evaluation in all forms around training, and weights that are changed between two evaluations."""
    module = tiny()
    data = loader(16, batch_size=8, shuffle=False)
    trainer = Trainer(strategy="fsdp", max_steps=2, global_batch_size=16, **QUIET)
    before = trainer.validate(module, data, verbose=False)[0]["val_loss"]
    predictions: Any = trainer.predict(module, data)
    trainer.fit(module, loader())
    after = trainer.validate(module, data, verbose=False)[0]["val_loss"]
    another = Trainer(strategy=FSDPStrategy(), **QUIET).validate(module, data, verbose=False)[0]["val_loss"]
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    zeroed = trainer.validate(module, data, verbose=False)[0]["val_loss"]
    return {"before": before, "after": after, "another": another, "zeroed": zeroed, "shapes": predictions[0].shape}


@pytest.mark.dist
def test_evaluation_sees_the_weights_of_the_moment(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        got = seen["evaluated"]
        assert got["after"] < got["before"]
        assert got["another"] == got["after"]
        assert got["zeroed"] == pytest.approx(math.log(VOCABULARY), abs=1e-5)
        assert got["shapes"] == (8, LENGTH)


class Spoilt(TinyGPT):
    """The loss of a batch that is replayed, for want of samples on this rank, is nan, and so is its slope."""

    spoilt = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0])
        self.replayed = self.trainer._run.source.share.mine == 0
        logits = (logits - 1e6).sqrt() if self.spoilt and self.replayed else logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


def replay() -> list[Any]:
    ends = []
    for spoilt in (True, False):
        torch.manual_seed(1)
        module = Spoilt(layers=1)
        module.spoilt = spoilt
        Trainer(strategy="fsdp", max_epochs=1, **QUIET).fit(module, loader(5, batch_size=2))
        ends.append((module.replayed, module.blocks[0].up.weight.full_tensor().detach().clone()))  # type: ignore[union-attr]
    return ends


@pytest.mark.dist
def test_a_replayed_batch_adds_nothing_to_sharded_gradients(ranks: list[dict[str, Any]]) -> None:
    assert [seen["replayed"][0][0] for seen in ranks] == [False, True]
    for seen in ranks:
        (_, spoilt), (_, healthy) = seen["replayed"]
        assert spoilt.isfinite().all()
        assert torch.equal(spoilt, healthy)


class Broken(TinyGPT):
    def on_fit_start(self) -> None:
        warnings.filterwarnings("ignore", message="global_step 1 .* the loss is nan on rank 1")  # as it should

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (math.nan if batch_idx == 1 and self.global_rank else 1.0)


def skip() -> list[Any]:
    """A loss that is nan on one rank: its step is left out on all."""
    ends = []
    for strategy in ("fsdp", "ddp"):
        torch.manual_seed(1)
        module = Broken(layers=1)
        trained = train(strategy, steps=2, module=module, nonfinite="skip", gradient_clip_algorithm="value")
        ends.append((trained.losses, [float(gather_whole(p.detach()).square().mean()) for p in module.parameters()]))
    return ends


@pytest.mark.dist
def test_steps_that_are_not_finite_are_left_out(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        sharded, copies = seen["skipped"]
        assert sharded[1] == pytest.approx(copies[1], rel=1e-4)
        assert all(math.isfinite(value) for value in sharded[1])


def train_mixed() -> dict[str, Any]:
    seen: dict[str, Any] = {}

    def look(block: Any, args: Any) -> None:
        seen["weights"], seen["input"] = block.up.weight.dtype, args[0].dtype

    def trained(name: str, precision: Any = None, **options: Any) -> None:
        module: Any = tiny()
        module.blocks[0].register_forward_pre_hook(look)
        result = train(FSDPStrategy(**options), steps=3, module=module, precision=precision)
        weight: Any = module.blocks[0].up.weight
        seen[name] = (result.losses, seen["weights"], seen["input"], weight.dtype)

    trained("autocast", "bf16-mixed")
    trained("policy", mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    trained("true", "bf16-true")
    return seen


@pytest.mark.dist
def test_weights_are_gathered_in_the_precision_of_the_step(ranks: list[dict[str, Any]], alone: Trained) -> None:
    for seen in ranks:
        for name, stored in (("autocast", torch.float32), ("policy", torch.float32), ("true", torch.bfloat16)):
            losses, gathered, given, kept = seen["mixed"][name]
            assert (gathered, given, kept) == (torch.bfloat16, torch.bfloat16, stored), name
            assert losses == pytest.approx(alone.losses[:3], abs=0.05), name
            assert losses != pytest.approx(alone.losses[:3], abs=1e-6), name


class Encoder(TinyGPT):
    def encode(self, tokens: Tensor) -> Tensor:
        return self.norm(self.blocks[0](self.embedding(tokens)))


class Encoding(Callback):
    def on_train_end(self, trainer: Any, module: Any) -> None:
        with torch.no_grad():
            module.encoded = module.encode(torch.arange(LENGTH)[None]).shape
        module.full = trainer.strategy.full_model_state()


def call_methods() -> Any:
    module: Any = Encoder(layers=2)
    train(FSDPStrategy(forward_methods=["encode"]), steps=1, module=module, callbacks=[Encoding()])
    full = {name: type(it) for name, it in module.full.items()}
    tied = module.full and module.full["head.weight"] is module.full["embedding.weight"]
    return module.encoded, full, tied


@pytest.mark.dist
def test_other_methods_gather_too_and_the_whole_state_is_on_the_first_rank(ranks: list[dict[str, Any]]) -> None:
    names = set(TinyGPT(layers=2).state_dict())
    for rank, seen in enumerate(ranks):
        shape, full, tied = seen["methods"]
        assert shape == (1, LENGTH, WIDTH)
        assert set(full) == (names if rank == 0 else set())
        assert set(full.values()) <= {Tensor}
        assert tied if rank == 0 else not full


# ---- checkpoints


class Odd(TinyGPT):
    """With weights that cannot be shared out evenly, a buffer, and a frozen part."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(layers=1)
        self.probe = nn.Linear(WIDTH, 3)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("count", torch.zeros(5))
        self.position.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.count += 1
        return (
            super().training_step(batch, batch_idx)
            + self.scale.sum() * self.probe(self(batch[0]) @ self.head.weight).pow(2).mean()
        )


def save_and_resume(folder: Path, strategy: Any, checkpoint: Path | None = None) -> Trained:
    keep = ModelCheckpoint(dirpath=folder, every_n_train_steps=2, save_top_k=-1)
    strategy = FSDPStrategy(**strategy) if isinstance(strategy, dict) else strategy
    return train(strategy, steps=4, module=Odd(), callbacks=[keep], enable_checkpointing=True, ckpt_path=checkpoint)


def at_two(folder: Path) -> list[list[float]]:
    first = save_and_resume(folder / "first", {})
    middle = folder / "first" / "step-00000002-1"
    again = save_and_resume(folder / "again", {"activation_checkpointing": True}, middle)
    copies = save_and_resume(folder / "ddp", "ddp", middle)
    return [first.losses, again.losses, copies.losses]


def at_four(folder: Path) -> list[list[float]]:
    both = save_and_resume(folder / "four", {"dp_replicate": 2, "cpu_offload": True}, folder / "first/step-00000002-1")
    return [both.losses, save_and_resume(folder / "five", {}, folder / "plain/step-00000002-1").losses]


@pytest.mark.dist
def test_checkpoints_go_to_other_numbers_of_processes_and_strategies(tmp_path: Path) -> None:
    from instep.checkpoint import load_weights

    first, again, copies = run_ranks(at_two, 2, tmp_path)[0]
    assert again == first[2:]  # to the bit
    for name in ("model-00001-of-00002.safetensors", "optimizer-00000-of-00002.safetensors"):
        one, other = (load_file(tmp_path / it / "step-00000004-1" / name) for it in ("first", "again"))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
        assert one
    with warnings.catch_warnings():
        plain = save_and_resume(tmp_path / "plain", "auto")
        resumed = save_and_resume(tmp_path / "resumed", "auto", tmp_path / "first" / "step-00000002-1")
    copied, from_plain = run_ranks(at_four, 4, tmp_path)[0]
    for name, losses in {"plain": plain.losses[2:], "resumed": resumed.losses, "ddp": copies}.items():
        assert losses == pytest.approx(first[2:], abs=1e-5), name
    assert copied == pytest.approx(first[2:], abs=1e-5)
    assert from_plain == pytest.approx(first[2:], abs=1e-5)
    whole = load_weights(tmp_path / "first" / "step-00000004-1")
    for other in ("plain", "resumed", "ddp", "four", "five"):
        for name, value in load_weights(tmp_path / other / "step-00000004-1").items():
            # The bias of keys has no gradient but rounding errors, which AdamW makes as large as any; the count is of
            # micro-batches, of which fewer processes have more.
            if not name.endswith(("k.bias", "count")):
                torch.testing.assert_close(value, whole[name], atol=1e-5, rtol=0, msg=f"{other}: {name}")


def validate_files(folder: Path) -> list[float]:
    """The validation losses of weights of anybody's, of which each rank reads its boxes."""
    from instep.checkpoint.lazy import LazyTensor

    sizes: list[int] = []
    read = LazyTensor.read

    def spy(self: LazyTensor, box: Any = None) -> Tensor:
        got = read(self, box)
        sizes.append(got.numel())
        return got

    LazyTensor.read = spy  # type: ignore[method-assign]
    losses = []
    for name in ("one.safetensors", "several.safetensors.index.json"):
        sizes.clear()
        module = Late()
        trainer = Trainer(strategy=FSDPStrategy(meta_init=True), **QUIET)
        losses.append(
            trainer.validate(module, loader(16, shuffle=False), ckpt_path=folder / name, verbose=False)[0]["val_loss"]
        )
        assert sum(sizes) < 0.6 * sum(p.numel() for p in module.state_dict().values())
    return losses


@pytest.mark.dist
def test_plain_files_are_read_by_boxes(tmp_path: Path) -> None:
    module = Late()
    module.configure_model()
    state = {name: value for name, value in module.state_dict().items() if name != "head.weight"}
    save_file(state | {"head.weight": state["embedding.weight"].clone()}, tmp_path / "one.safetensors")
    names = sorted(load_file(tmp_path / "one.safetensors"))
    files = {name: f"{index % 2}.safetensors" for index, name in enumerate(names)}
    for file in set(files.values()):
        save_file({n: load_file(tmp_path / "one.safetensors")[n] for n in names if files[n] == file}, tmp_path / file)
    (tmp_path / "several.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    data = loader(16, shuffle=False)
    one = Trainer(**QUIET).validate(Late(), data, ckpt_path=tmp_path / "one.safetensors", verbose=False)
    alone = one[0]["val_loss"]
    for losses in run_ranks(validate_files, 2, tmp_path):
        assert losses == pytest.approx([alone, alone], abs=1e-5)


# ---- what is refused


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"wrap": 0}, "wrap"),
        ({"activation_checkpointing": 1.5}, "activation_checkpointing"),
        ({"dp_replicate": 0}, "dp_replicate"),
        ({"dp_replicate": "some"}, "dp_replicate"),
        ({"forward_prefetch": -1}, "forward_prefetch"),
        ({"backward_prefetch": 1.5}, "backward_prefetch"),
        ({"mp_policy": "bf16"}, "mp_policy"),
        ({"reshard_after_forward": 0.5}, "reshard_after_forward"),
        ({"reshard_after_forward": 1}, "reshard_after_forward"),
        ({"compile": "yes"}, "compile"),
        ({"forward_methods": "encode"}, "forward_methods"),
    ],
)
def test_wrong_options_of_fsdp_are_named(options: dict[str, Any], field: str) -> None:
    with pytest.raises(SettingError) as caught:
        FSDPStrategy(**options)
    assert caught.value.field == field


def test_options_of_other_packages_are_refused_with_the_replacement() -> None:
    with pytest.raises(SettingError, match=r"FSDPStrategy has no auto_wrap_policy: use wrap=\.\.\.") as caught:
        FSDPStrategy(auto_wrap_policy={nn.Linear})
    assert caught.value.field == "auto_wrap_policy"
    with pytest.raises(SettingError, match=r"MeshStrategy has no sharding_strategy: .* reshard_after_forward=False"):
        MeshStrategy(tp=2, sharding_strategy="SHARD_GRAD_OP")
    with pytest.raises(SettingError, match=r"option='warp' is not known.*Did you mean 'wrap'"):
        FSDPStrategy(warp="Block")
    with pytest.raises(SettingError, match="Did you mean 'pp_split'"):
        MeshStrategy(pp=2, pp_splits=["blocks.1"])


def test_copies_that_do_not_divide_the_processes() -> None:
    with pytest.raises(SettingError, match="3 copies of the weights cannot be spread evenly over 4"):
        FSDPStrategy(dp_replicate=np.int64(3)).check_world_size(4)


def test_a_device_without_collectives() -> None:
    with pytest.raises(SettingError, match="no such thing on mps"):
        FSDPStrategy().connect(torch.device("mps"), Precision("32-true", torch.device("cpu")))


class Scaled(Gan):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))


class Undefined(Late):
    def configure_model(self) -> None:
        super().configure_model()
        self.bare = Bare()


REFUSED: dict[str, tuple[dict[str, Any], Any, str]] = {
    "class": ({"wrap": "Blok"}, TinyGPT, r"wrap='Blok' is not known.*Did you mean 'Block'"),
    "recomputed class": ({"activation_checkpointing": "Mlp"}, TinyGPT, "activation_checkpointing='Mlp' is not known"),
    "tied": ({"wrap": "Embedding"}, TinyGPT, r"shard embedding apart from what shares its weights"),
    "own": ({}, Scaled, r"optimizes manually and has weights of its own \(scale\)"),
    "values": ({"meta_init": True}, Undefined, r"without values: bare\.weight"),
    "method": ({"forward_methods": ["encode"]}, TinyGPT, "forward_methods='encode': expected methods that TinyGPT has"),
    "copies": ({"dp_replicate": "auto"}, TinyGPT, "2 copies of the weights cannot be spread evenly over 1"),
    "group": ({"reshard_after_forward": 3}, TinyGPT, "reshard_after_forward=3"),
    "parts": ({"activation_checkpointing": True}, lambda: TinyGPT(layers=0), "True means the parts of wrap"),
}


def fit_refused() -> dict[str, str]:
    texts = {}
    for name, (options, kind, _) in REFUSED.items():
        module = kind()
        for attempt in (name, f"{name}, again"):  # a module that is cut up already
            trainer = Trainer(strategy=FSDPStrategy(**options), max_steps=1, **QUIET)
            try:
                trainer.fit(module, loader())
            except SettingError as error:
                texts[attempt] = str(error)
    return texts


def fit_again() -> list[str]:
    module, warned = TinyGPT(), []
    for precision in ("32-true", "32-true", "bf16-mixed"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            Trainer(strategy=FSDPStrategy(), precision=precision, max_steps=1, **QUIET).fit(module, loader())
        warned += [str(each.message) for each in caught if "an earlier run" in str(each.message)]
    return warned


@pytest.mark.dist
def test_settings_that_a_sharded_module_cannot_change_are_warned_about() -> None:
    ((warning,),) = run_ranks(fit_again, 1)
    assert warning == (
        "an earlier run has sharded this module, and it keeps precision=32-true. For another, make a new module"
    )


def brought() -> tuple[torch.dtype, torch.dtype]:
    module = Gan()
    module.register_buffer("scale", torch.ones(1))
    strategy = FSDPStrategy()
    strategy.connect(torch.device("cpu"), Precision("32-true", torch.device("cpu")))
    strategy.device = torch.float64  # type: ignore[assignment]  # in place of a device that a CPU lacks
    strategy.prepare_module(module)
    return module.scale.dtype, next(module.critic.parameters()).dtype


@pytest.mark.dist
def test_what_is_in_no_part_is_brought_to_the_device() -> None:
    assert run_ranks(brought, 1) == [(torch.float64, torch.float32)]


@pytest.mark.dist
def test_what_a_module_cannot_do_is_refused_before_training() -> None:
    import re

    (texts,) = run_ranks(fit_refused, 1)
    for name, (_, _, pattern) in REFUSED.items():
        for attempt in (name, f"{name}, again"):
            assert re.search(pattern, texts[attempt]), (attempt, texts[attempt])
