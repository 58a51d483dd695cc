"""Quantized models: the same bits from a file, a model and a checkpoint; training beside them; errors."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from instep import PartialState, TrainModule
from instep.big_models import BnbQuantizationConfig, TorchAoConfig, init_empty_weights, load_and_quantize_model
from instep.callbacks import ModelCheckpoint
from instep.checkpoint import load_weights
from instep.checkpoint.tensors import content_sum
from instep.checkpoint.weights import write_plain
from instep.errors import CheckpointError, Preempted, SettingError, UsageError
from tests.helpers import gpu
from tests.helpers.spawn import run_ranks
from tests.trainer.resuming import StopAt
from tests.trainer.toys import assert_same, quiet

pytest.importorskip(
    "torchao.quantization", reason="torchao is not installed, or needs a newer torch", exc_type=ImportError
)
BNB = pytest.mark.bitsandbytes
FOUR: dict[str, Any] = {"load_in_4bit": True, "bnb_4bit_compute_dtype": "fp32"}
NF4 = {**FOUR, "bnb_4bit_quant_type": "nf4"}
KINDS: dict[str, tuple[Callable[[], Any], float]] = {  # and the relative error of the output that is allowed
    "int8": (lambda: "int8", 0.01),
    "int8_dynamic": (lambda: TorchAoConfig("int8_dynamic"), 0.02),
    "int4": (lambda: TorchAoConfig("int4"), 0.15),
    "fp8": (lambda: TorchAoConfig("fp8"), 0.06),
    "bnb 8 bit": (lambda: BnbQuantizationConfig(load_in_8bit=True, torch_dtype="fp32"), 0.02),
    "nf4": (lambda: BnbQuantizationConfig(**NF4), 0.2),
    "nf4 twice": (lambda: BnbQuantizationConfig(**NF4, bnb_4bit_use_double_quant=True), 0.2),
    "fp4": (lambda: BnbQuantizationConfig(**FOUR), 0.25),
}
EVERY = [pytest.param(kind, marks=() if kind in ("int8", "int8_dynamic", "int4", "fp8") else BNB) for kind in KINDS]


class Net(nn.Module):
    """A small language model with tied embeddings."""

    first: Any
    second: Any

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(50, 64)
        self.first, self.second = nn.Linear(64, 128), nn.Linear(128, 64, bias=False)
        self.head = nn.Linear(64, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("places", torch.arange(3))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.second(self.first(self.embedding(tokens)).relu()))


def empty() -> Net:
    with init_empty_weights():
        return Net().eval()


def save(model: nn.Module, path: Path) -> Path:
    write_plain({name: value for name, value in model.state_dict().items() if name != "head.weight"}, path)
    return path


TOKENS = torch.arange(20).view(2, 10)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", EVERY)
def test_a_model_has_the_same_bits_from_weights_a_file_and_a_state_dict(kind: str, tmp_path: Path) -> None:
    make, error = KINDS[kind]
    plain = Net().eval()
    expected = plain(TOKENS)
    model = load_and_quantize_model(empty(), make(), save(plain, tmp_path / "float.safetensors"))
    with torch.no_grad():
        got = model(TOKENS)
    assert 0 < (got - expected).norm() / expected.norm() < error
    assert model.head.weight is model.embedding.weight
    assert type(model.head) is nn.Linear
    assert torch.equal(load_and_quantize_model(Net().eval(), make())(TOKENS), got)
    state = model.state_dict()
    assert {type(value) for value in state.values()} == {Tensor}

    again = load_and_quantize_model(empty(), make(), save(model, tmp_path / "quantized.safetensors"))
    assert torch.equal(again(TOKENS), got)
    assert_same(dict(again.state_dict()), dict(state))
    other = load_and_quantize_model(Net(seed=1).eval(), make())
    assert not torch.equal(other(TOKENS), got)
    other.load_state_dict(state)
    assert torch.equal(other(TOKENS), got)
    with pytest.raises(RuntimeError, match=r"first\.weight"):
        other.load_state_dict({"first.weight": plain.first.weight.detach()}, strict=False)
    assert torch.equal(other(TOKENS), got), "float weights are never written into quantized ones"


def test_quantizing_holds_one_float_weight_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stack() -> nn.Sequential:
        return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(24)))

    path, seen = save(stack(), tmp_path / "stack.safetensors"), []
    quantize = TorchAoConfig.quantize

    def watched(*args: Any) -> nn.Linear:
        made = quantize(*args)  # the float weight and what came of it are both there now
        seen.append(anonymous_bytes())
        return made

    with init_empty_weights():
        model = stack()
    load_and_quantize_model(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), "int8")  # torchao, with all it loads
    monkeypatch.setattr(TorchAoConfig, "quantize", watched)
    before = anonymous_bytes()
    model = load_and_quantize_model(model, "int8", path)
    one = 1024 * 1024 * 4
    assert max(*seen, anonymous_bytes()) - before < 24 * one / 4 + 5 * one  # of 100 MB of float weights


def anonymous_bytes() -> int:
    """Bytes of this process that are in no file."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def test_skipped_modules_are_not_quantized_and_kept_ones_stay_float32() -> None:
    config = TorchAoConfig("int8", torch_dtype="bf16", skip_modules=["second"], keep_in_fp32_modules=["embedding"])
    model = load_and_quantize_model(Net(), config)
    assert isinstance(model.head, nn.Linear)
    assert type(model.second.weight) is nn.Parameter
    assert (model.second.weight.dtype, model.embedding.weight.dtype) == (torch.bfloat16, torch.float32)
    assert {type(layer.weight).__name__ for layer in (model.first, model.head)} == {"Int8Tensor"}
    with pytest.warns(UserWarning, match="no module secnod"):
        load_and_quantize_model(Net(), TorchAoConfig("int8", skip_modules=["secnod"]))
    layers = nn.Sequential(nn.MultiheadAttention(16, 2), nn.Linear(16, 16))
    attention = load_and_quantize_model(layers, TorchAoConfig("int8", skip_modules=[]))
    x = torch.rand(3, 1, 16)
    assert attention[0](x, x, x)[0].shape == x.shape  # whose own linear layer is not called, and stays as it is


def test_modules_on_the_disk_stay_float_and_are_read_from_the_checkpoint(tmp_path: Path) -> None:
    path = save(Net(), tmp_path / "float.safetensors")
    expected = load_and_quantize_model(empty(), TorchAoConfig("int8", skip_modules=["second", "head"]), path)
    places = {"": "cpu", "second": "disk"}
    model = load_and_quantize_model(empty(), "int8", path, device_map=places)
    assert model.second.weight.is_meta
    assert type(model.first.weight) is not nn.Parameter
    with torch.no_grad():
        assert torch.equal(model(TOKENS), expected(TOKENS))
    with pytest.raises(SettingError, match=r"would offload quantized layers, .* first"):
        load_and_quantize_model(empty(), "int8", path, device_map="auto", max_memory={"cpu": 16_000, "disk": "1GB"})
    half = TorchAoConfig("int8", torch_dtype="bf16")
    with pytest.raises(SettingError, match=r"second\.weight is for the disk, .*offload_folder"):
        load_and_quantize_model(empty(), half, path, device_map=places)
    written = load_and_quantize_model(empty(), half, path, device_map=places, offload_folder=tmp_path / "offloaded")
    with torch.no_grad():
        assert written(TOKENS).dtype == torch.bfloat16


# ---- errors


def test_errors_come_before_anything_is_changed(tmp_path: Path) -> None:
    path = save(Net(), tmp_path / "float.safetensors")
    small = save(load_and_quantize_model(Net(), "int8"), tmp_path / "int8.safetensors")
    cases: list[tuple[Any, Any, type[Exception], str]] = [
        ("int8", None, SettingError, "on the meta device .* weights_location"),
        ("int5", path, SettingError, "'int5' is not known.*Did you mean 'int8'"),
        (None, path, SettingError, "needs a quantization_config"),
        ({"load_in_8bit": True}, path, SettingError, "needs a quantization_config"),
        (TorchAoConfig("int8", skip_modules=["first", "second", "head"]), path, SettingError, "no layer to quantize"),
        ("fp8", small, CheckpointError, r"first quantized in another way .*weight\.qdata is int8.* Nothing was loaded"),
        ("int8", save(nn.Linear(64, 128), tmp_path / "foreign.safetensors"), CheckpointError, "does not hold places"),
    ]
    if not torch.cuda.is_available():
        cases.append(("fp8_dynamic", path, SettingError, "layer first.* cannot be quantized so: .*CUDA"))
    cut = Path(tmp_path / "cut.safetensors")
    cut.write_bytes(path.read_bytes()[:-8])
    cases.append(("int8", cut, CheckpointError, "cut"))
    for config, location, error, text in cases:
        model = empty()
        with pytest.raises(error, match=text):
            load_and_quantize_model(model, config, location)
        assert all(parameter.is_meta for parameter in model.parameters())
        assert type(model.first) is nn.Linear
    quantized = load_and_quantize_model(Net(), "int8")
    with pytest.raises(SettingError, match="is quantized already"):
        load_and_quantize_model(quantized, "int8")
    settings: list[tuple[dict[str, Any], str]] = [
        ({}, "exactly one"),
        ({"load_in_8bit": True, "load_in_4bit": True}, "exactly one"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf5"}, "Did you mean 'nf4'"),
        ({"load_in_4bit": True, "bnb_4bit_compute_dtype": "int8"}, "'bf16'"),
        ({"load_in_8bit": True, "skip_modules": "lm_head"}, "a list of names"),
    ]
    for wrong, text in settings:
        with pytest.raises(SettingError, match=text):
            BnbQuantizationConfig(**wrong)


@BNB
def test_what_a_file_says_of_sizes_is_not_believed(tmp_path: Path) -> None:
    """Bitsandbytes' kernels would read beyond the weight."""
    config = BnbQuantizationConfig(**NF4)
    state = load_and_quantize_model(Net(), config).state_dict()
    name = next(name for name in state if "first.weight.quant_state" in name)
    said = bytes(state[name].tolist())
    for old, new in ((b"[128, 64]", b"[128, 99]"), (b'"blocksize": 64', b'"blocksize": 32'), (b"{", b"[")):
        assert old in said
        bad = {**state, name: torch.frombuffer(bytearray(said.replace(old, new)), dtype=torch.uint8)}
        del bad["head.weight"]
        write_plain(bad, path := tmp_path / f"{len(list(tmp_path.iterdir()))}.safetensors")
        with pytest.raises(CheckpointError, match=r"first quantized in another way"):
            load_and_quantize_model(empty(), config, path)


# ---- training


class Adapted(nn.Module):
    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.down, self.up = nn.Linear(layer.in_features, 4, bias=False), nn.Linear(4, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


class QLoRA(TrainModule):
    checkpoint_filter = "trainable"

    def __init__(self, kind: str = "int8", seed: int = 0, offloaded: Path | None = None) -> None:
        """`offloaded`: weights of which a layer stays on the disk."""
        super().__init__()
        net = (Net(seed) if offloaded is None else empty()).requires_grad_(False)
        places = None if offloaded is None else {"": "cpu", "second": "disk"}
        self.net = load_and_quantize_model(net, KINDS[kind][0](), offloaded, places)
        torch.manual_seed(7)
        self.net.first = Adapted(self.net.first)
        if offloaded is None:
            self.net.second = Adapted(self.net.second)

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(tokens).flatten(0, 1), tokens.flatten())

    validation_step = training_step

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


def fit(root: Path, module: QLoRA, *callbacks: Any, **settings: Any) -> dict[str, Tensor]:
    """Train on 4 batches an epoch for 2 epochs; return the weights of the last checkpoint."""
    tokens: Any = torch.randint(0, 50, (16, 10), generator=torch.Generator().manual_seed(1))
    saver = ModelCheckpoint(save_last=True)
    common: dict[str, Any] = {
        "max_epochs": 2,
        "default_root_dir": root,
        "trigger_every": 1,
        "enable_checkpointing": True,
    }
    trainer = quiet(**common, **settings, callbacks=[saver, *callbacks])
    try:
        trainer.fit(module, DataLoader(tokens, 4, shuffle=True), DataLoader(tokens, 8), ckpt_path="auto")
    except Preempted:
        assert callbacks
    return load_weights(saver.last_model_path)


TRAINED = [kind for kind in EVERY if kind.values[0] in ("int8", "fp8", "bnb 8 bit", "nf4 twice")]


@pytest.mark.parametrize("kind", TRAINED)
def test_a_stopped_run_over_a_quantized_model_goes_on_with_the_same_bits(kind: str, tmp_path: Path) -> None:
    first = QLoRA(kind)
    base = {name: value.clone() for name, value in first.state_dict().items()}
    whole = fit(tmp_path / "whole", first)
    assert whole.keys() == {name for name, p in first.named_parameters() if p.requires_grad} | {"net.places"}
    for name, value in first.state_dict().items():
        assert torch.equal(value, base[name]) == (name not in whole or "places" in name), name
    fit(tmp_path / "parts", QLoRA(kind), StopAt(5))
    assert_same(fit(tmp_path / "parts", QLoRA(kind)), whole)
    with pytest.raises(CheckpointError, match="are not those of that run"):
        fit(tmp_path / "whole", QLoRA(kind, seed=1))


def test_activations_that_are_rounded_pass_no_gradient(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"passes no gradient on.*TorchAoConfig\('int8'\)"):
        fit(tmp_path, QLoRA("int8_dynamic"))


def train_on_ranks(root: Path, kinds: list[str]) -> list[dict[str, int]]:
    rank = PartialState().process_index
    weights = []
    for kind in kinds:  # the ranks begin with other weights and must end with those of the first
        module = QLoRA(kind, seed=rank)
        fit(root / kind.replace(" ", "_"), module, strategy="ddp", devices="auto")
        weights.append({name: content_sum(value) for name, value in module.state_dict().items()})
    module = QLoRA(kinds[0], offloaded=root / "float.safetensors")
    fit(root / "offloaded", module, strategy="ddp", devices="auto")
    weights.append({name: content_sum(p) for name, p in module.named_parameters() if p.requires_grad})
    with pytest.raises(SettingError, match="'fsdp' cuts weights up"):
        fit(root / "fsdp", QLoRA(kinds[0]), strategy="fsdp", devices="auto")
    return weights


@pytest.mark.dist
@pytest.mark.parametrize("kinds", [["int8", "fp8"], pytest.param(["nf4 twice", "bnb 8 bit"], marks=BNB)])
def test_two_ranks_train_over_one_quantized_model(kinds: list[str], tmp_path: Path) -> None:
    save(Net(), tmp_path / "float.safetensors")
    first, second = run_ranks(train_on_ranks, 2, tmp_path, kinds)
    assert first == second


# ---- CUDA


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [*EVERY, "fp8_dynamic"])
def test_a_model_is_quantized_on_cuda(kind: str, tmp_path: Path) -> None:
    make, error = KINDS.get(kind, (lambda: TorchAoConfig("fp8_dynamic"), 0.1))
    if kind == "fp8_dynamic" and (gpu.DEVICE == "cpu" or torch.cuda.get_device_capability() < (8, 9)):
        pytest.skip("needs a CUDA device of compute capability 8.9")
    config = make() if not isinstance(make(), str) else TorchAoConfig(make())
    config.torch_dtype = torch.bfloat16
    plain = Net().eval().to(torch.bfloat16).to(gpu.DEVICE)
    model = load_and_quantize_model(empty(), config, save(Net(), tmp_path / "float.safetensors"))
    assert {value.device.type for value in model.parameters()} == {gpu.DEVICE}
    with torch.no_grad():
        got, expected = model(TOKENS.to(gpu.DEVICE)), plain(TOKENS.to(gpu.DEVICE))
    assert 0 < (got - expected).norm() / expected.norm() < error + 0.02
    again = load_and_quantize_model(empty(), config, save(model, tmp_path / "quantized.safetensors"))
    with torch.no_grad():
        assert torch.equal(again(TOKENS.to(gpu.DEVICE)), got)
