"""Modules written for programs without instep, before and after a run."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from instep.errors import MissingPackageError, SettingError
from tests.trainer.toys import Toy, loader, quiet

SAMPLE = torch.arange(8.0).reshape(2, 4)


class Net(Toy):
    """Has a part that is in eval mode, one that draws numbers in training, and a hook of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.frozen = nn.Dropout(0.5), nn.BatchNorm1d(4).eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.layer(self.frozen(x)))

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch.float() if isinstance(batch, Tensor) else batch


def expected(module: nn.Module) -> Tensor:
    modes = [part.training for part in module.modules()]
    result = module.eval()(SAMPLE)
    for part, mode in zip(module.modules(), modes, strict=True):
        part.training = mode
    return result


@pytest.mark.parametrize("fitted", [False, True])
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*LeafSpec:FutureWarning")
def test_files_say_what_the_module_says(tmp_path: Path, fitted: bool):
    module = Net()
    trainer = quiet(max_epochs=1)
    if fitted:
        trainer.fit(module, loader())
    modes = [part.training for part in module.modules()]
    wanted = expected(module)

    buffer, file = BytesIO(), tmp_path / "new" / "net.pt2"
    program = module.to_exported_program(buffer, input_sample=SAMPLE.double())
    module.to_exported_program(file, input_sample={"x": SAMPLE})
    buffer.seek(0)
    for found in (program.module(), torch.export.load(buffer).module()):
        assert torch.equal(found(SAMPLE), wanted)
    assert torch.equal(torch.export.load(file).module()(x=SAMPLE), wanted)
    shapes = {"x": {0: torch.export.Dim("rows")}}
    assert (
        len(module.to_exported_program(input_sample=SAMPLE, dynamic_shapes=shapes).module()(SAMPLE.repeat(9, 1))) == 18
    )

    module.example_input_array = SAMPLE
    assert torch.equal(module.to_torchscript(tmp_path / "net.ts")(SAMPLE), wanted)
    assert torch.equal(torch.jit.load(tmp_path / "net.ts")(SAMPLE), wanted)
    traced = module.to_torchscript(method="trace", check_inputs=[SAMPLE + 1])
    assert torch.equal(traced(SAMPLE), wanted)

    assert [part.training for part in module.modules()] == modes
    assert module._trainer is (trainer if fitted else None)


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("instep.utils.imports.find_spec", lambda name: None)
    module = Net()
    with pytest.raises(MissingPackageError, match=r"to_onnx.. needs the package 'onnx'.*instep\[onnx\]"):
        module.to_onnx("net.onnx", SAMPLE)
    with pytest.raises(MissingPackageError, match="torch_tensorrt"):
        module.to_tensorrt("net.trt", SAMPLE)
    with pytest.raises(SettingError, match="neither `input_sample` nor"):
        module.to_exported_program()
    with pytest.raises(SettingError, match="requires either `example_inputs`"):
        module.to_torchscript(method="trace")
    with pytest.raises(SettingError, match="only supports 'script' or 'trace'"):
        module.to_torchscript(method="temp")


@pytest.mark.onnx
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("dynamo", [True, False])
def test_onnx_says_what_the_module_says(tmp_path: Path, dynamo: bool):
    runtime = pytest.importorskip("onnxruntime")
    module = Net()
    module.to_onnx(tmp_path / "net.onnx", SAMPLE, dynamo=dynamo)
    session = runtime.InferenceSession(tmp_path / "net.onnx", providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: SAMPLE.numpy()})
    assert torch.allclose(torch.from_numpy(found), expected(module), atol=1e-6)
    assert module.training
