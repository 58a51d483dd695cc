"""Copies on the host: what is replayed is what was there when it was recorded."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instep.checkpoint import CheckpointStore
from instep.checkpoint.background import HostBuffers, Recorder, _Block
from instep.checkpoint.writer import BaseWriter
from instep.errors import CheckpointError, SettingError
from tests.helpers import gpu


def every_kind() -> dict[str, torch.Tensor]:
    tied = torch.randn(5, 7)
    return {
        "tied": tied,
        "tied.again": tied,
        "transposed": tied.t(),
        "overlapping": tied[1:3],
        "half": torch.randn(3).bfloat16(),
        "float8": torch.randn(3).to(torch.float8_e4m3fn),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "raw": torch.randn(2, 2, dtype=torch.complex128),
        "mask": torch.tensor([True, False, True]),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.empty(0, 4),
        "parameter": torch.nn.Parameter(torch.randn(2)),
    }


def write(tree: dict[str, Any], writer: BaseWriter) -> None:
    writer.tensors("model.safetensors", tree["tensors"], {"format": "pt"})
    writer.state("state", tree)
    writer.json("plain.json", tree["numbers"])


def files(store: CheckpointStore) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in store.scan()[0].path.iterdir() if path.name != "manifest.json"}


def test_a_replay_is_what_a_writer_would_have_written_then(tmp_path: Path) -> None:
    tree = {"tensors": every_kind(), "numbers": [1, 2], "betas": (0.9, 0.99)}
    direct, later = CheckpointStore(tmp_path / "direct"), CheckpointStore(tmp_path / "later")
    direct.save(1, lambda writer: write(tree, writer))
    recorder = Recorder(HostBuffers(), 0, 1)
    write(tree, recorder)
    for tensor in tree["tensors"].values():  # the training goes on
        tensor.detach().resolve_conj().zero_()
    tree["tensors"]["tied"].zero_()
    tree["numbers"].append(3)
    later.save(1, recorder.replay)
    assert files(later) == files(direct)
    read = later.read(later.scan()[0].path).tensors("model.safetensors")
    assert read["tied"] is read["tied.again"]
    assert read["raw"].dtype == torch.complex128


def test_memory_is_kept_and_grows() -> None:
    buffers = HostBuffers()

    def copy(*tensors: torch.Tensor) -> memoryview:
        return buffers.copy("a", tensors)

    first = torch.frombuffer(copy(torch.ones(100)), dtype=torch.float32)
    kept = buffers.bytes
    again = torch.frombuffer(copy(torch.zeros(60), torch.full((20,), 2.0)), dtype=torch.float32)
    assert again.data_ptr() == first.data_ptr()
    assert again.tolist() == [0.0] * 60 + [2.0] * 20
    assert buffers.bytes == kept == 400
    assert len(copy(torch.ones(200))) == 800
    assert buffers.bytes == 800
    buffers.copy("b", [torch.ones(1)])
    assert buffers.bytes == 804
    buffers.close()
    buffers.close()
    assert buffers.bytes == 0


def test_names_are_those_of_a_checkpoint() -> None:
    recorder = Recorder(HostBuffers(), 0, 1)
    recorder.json("a.json", 1)
    with pytest.raises(CheckpointError, match=r"a\.json was written twice"):
        recorder.state("a", 2)
    with pytest.raises(SettingError, match="cannot name a file"):
        recorder.json("../a.json", 1)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can leave memory out of a fork")
def test_forked_processes_do_not_share_the_memory() -> None:
    # Else every write to it, with loader workers alive, would first copy the page.
    content = HostBuffers().copy("a", [torch.ones(10)])
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, content)
            os._exit(1)
        except OSError as error:  # found by the system: reading it here would end the process
            os._exit(0 if error.errno == errno.EFAULT else 2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert os.write(writer, content) == 40
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("limit", [2**20, 0])
def test_memory_that_cannot_be_pinned_is_used_as_it_is(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[str] = []  # CUDA's last one, which its next kernel raises and forgets
    pinned: dict[int, int] = {}

    def register(address: int, size: int, flags: int) -> int:
        if 0 < size <= limit:
            pinned[address] = size
            return 0
        errors.append("invalid argument")
        return 1

    def kernel(*args: Any, **kwargs: Any) -> None:
        if errors:
            raise RuntimeError(errors.pop())

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=pinned.pop)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch, "zeros", kernel)
    for size in (0, 100):  # tensors without elements too
        block = _Block(size, pinned=True)
        kernel()
        assert len(pinned) == (limit > 0)
        block.close()
        assert pinned == {}


@pytest.mark.gpu
def test_the_device_may_go_on_at_once() -> None:
    buffers = HostBuffers()
    big, small = torch.full((2**24,), 3.0, device=gpu.DEVICE), torch.full((5,), 3.0)
    for _ in range(3):
        big.fill_(3.0)
        content = buffers.copy("a", [big, small])
        big.zero_()
        again = torch.full_like(big, 7.0)  # perhaps where something of the copy lived
        buffers.wait()
        read = torch.frombuffer(content, dtype=torch.float32)
        if gpu.on_device("that copies lie in pinned memory"):
            assert read.is_pinned()
        assert bool((read == 3.0).all())
        del again, read, content
    buffers.close()


@pytest.mark.gpu
@gpu.needs("CUDA runtime")
@pytest.mark.parametrize("size", [0, 5])
def test_memory_that_cannot_be_pinned_spoils_no_later_kernel(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.cuda.cudart()

    class Refusing:
        def cudaHostRegister(self, pointer: int, size: int, flags: int) -> Any:
            return real.cudaHostRegister(pointer, 0, flags)  # an invalid value

    monkeypatch.setattr(torch.cuda, "cudart", Refusing)
    buffers = HostBuffers()
    content = buffers.copy("a", [torch.ones(size, device="cuda")])
    assert torch.zeros(3, device="cuda").add_(1).tolist() == [1.0] * 3
    buffers.wait()
    assert bytes(content) == b"\0\0\x80?" * size
    del content
    buffers.close()
