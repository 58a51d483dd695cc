from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from instep.checkpoint import read_tensors, write_tensors
from instep.checkpoint.hashing import hash_file
from instep.checkpoint.tensors import content_of
from instep.errors import CheckpointError, CorruptCheckpointError, UnsavableStateError
from tests.helpers import gpu

# fmt: off
DTYPES = [
    "float64", "float32", "float16", "bfloat16",
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
    "complex64",
    "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool",
    "complex128", "complex32", "float4_e2m1fn_x2",
]
# fmt: on
RAW = {"complex128", "complex32", "float4_e2m1fn_x2"}


def of_dtype(name: str, *shape: int) -> torch.Tensor:
    dtype = getattr(torch, name)
    count = torch.Size(shape).numel() * dtype.itemsize
    values = torch.arange(count, dtype=torch.uint8) % (2 if name == "bool" else 251)
    return values.view(dtype).reshape(shape)


def content(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_comes_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    if not hasattr(torch, name):
        pytest.skip(f"this torch has no {name}")
    tensors = {"x": of_dtype(name, 3, 4), "empty": of_dtype(name, 0, 2), "scalar": of_dtype(name)}
    write_tensors(tmp_path / "x", tensors)
    back = read_tensors(tmp_path / "x")
    assert back.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert back[key].dtype == tensor.dtype
        assert back[key].shape == tensor.shape
        assert content(back[key]) == content(tensor)
    if name not in RAW:
        assert content(load_file(tmp_path / "x")["x"]) == content(tensors["x"])


def test_views_are_written_as_they_look(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    tensors = {
        "transposed": base.t(),
        "strided": base[::2, 1::2],
        "expanded": torch.tensor([1.0]).expand(3, 2),
        "row": base[1],
        "channels_last": torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
        "conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
        "negative": torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
        "needs_grad": torch.ones(2, requires_grad=True) * 2,
        "parameter": torch.nn.Parameter(torch.ones(3)),
    }
    write_tensors(tmp_path / "x", tensors)
    back = read_tensors(tmp_path / "x")
    for key, tensor in tensors.items():
        assert torch.equal(back[key], tensor.detach()), key
        assert not back[key].requires_grad


def test_tied_tensors_are_stored_once_and_read_under_every_name(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.randn(100, 10))
    other = torch.randn(100, 10)
    tensors = {
        "embed": weight,
        "head": weight,
        "again": weight.data,
        "other": other,
        "part": weight[:50],
        "t": weight.t(),
    }
    record = write_tensors(tmp_path / "x", tensors)
    plain = load_file(tmp_path / "x")
    assert set(plain) == {"embed", "other", "part", "t"}
    assert record.bytes < 4 * (1000 + 1000 + 500 + 1000) + 1000
    back = read_tensors(tmp_path / "x")
    assert back.keys() == tensors.keys()
    assert back["embed"] is back["head"] is back["again"]
    assert all(torch.equal(back[key], tensors[key]) for key in tensors)


def test_empty_tensors_share_nothing(tmp_path: Path) -> None:
    write_tensors(tmp_path / "x", {"a": torch.zeros(0, 3), "b": torch.zeros(3, 0), "c": torch.zeros(0, 3)})
    assert {key: tuple(t.shape) for key, t in load_file(tmp_path / "x").items()} == {
        "a": (0, 3),
        "b": (3, 0),
        "c": (0, 3),
    }


@pytest.mark.gpu
def test_tensors_of_a_gpu_are_read_on_the_cpu(tmp_path: Path) -> None:
    weight = torch.randn(100, 10, device=gpu.DEVICE).bfloat16()
    write_tensors(tmp_path / "x", {"a": weight, "tied": weight, "t": weight.t(), "host": torch.ones(2)})
    back = read_tensors(tmp_path / "x")
    assert all(tensor.device.type == "cpu" for tensor in back.values())
    assert back["a"] is back["tied"]
    assert torch.equal(back["t"], weight.t().cpu())


def test_no_tensors_is_a_file_too(tmp_path: Path) -> None:
    write_tensors(tmp_path / "x", {})
    assert read_tensors(tmp_path / "x") == {}


def test_strange_names_and_metadata(tmp_path: Path) -> None:
    tensors = {'a"b\\n/é 😀': torch.ones(1), "": torch.zeros(2), "x" * 1000: torch.ones(3)}
    write_tensors(tmp_path / "x", tensors, {"note": "é\n"})
    assert read_tensors(tmp_path / "x").keys() == tensors.keys()
    with pytest.raises(UnsavableStateError, match="__metadata__"):
        write_tensors(tmp_path / "y", {"__metadata__": torch.ones(1)})
    assert not (tmp_path / "y").exists()


def test_every_tensor_is_aligned_to_its_element_size(tmp_path: Path) -> None:
    write_tensors(
        tmp_path / "x", {"a": torch.ones(3, dtype=torch.bool), "b": torch.ones(3).double(), "c": torch.ones(3).half()}
    )
    data = (tmp_path / "x").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    assert [header[key]["data_offsets"][0] for key in "bca"] == [0, 24, 30]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.dictionaries(
        st.text(alphabet=st.characters(codec="utf-8"), max_size=8).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(DTYPES[:20]), st.lists(st.integers(0, 4), max_size=3)),
        max_size=6,
    )
)
def test_any_tensors_come_back(
    tmp_path_factory: pytest.TempPathFactory, spec: dict[str, tuple[str, list[int]]]
) -> None:
    path = tmp_path_factory.mktemp("any") / "x"
    tensors = {name: of_dtype(dtype, *shape) for name, (dtype, shape) in spec.items()}
    record = write_tensors(path, tensors)
    assert record == hash_file(path)
    back = read_tensors(path)
    assert {key: (t.dtype, t.shape, content(t)) for key, t in back.items()} == {
        key: (t.dtype, t.shape, content(t)) for key, t in tensors.items()
    }


def test_what_was_read_does_not_depend_on_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write_tensors(path, {"a": torch.ones(100_000)})
    back = read_tensors(path)["a"]
    with open(path, "r+b") as file:
        file.truncate(10)
    assert float(back.sum()) == 100_000


@pytest.mark.parametrize("keep", [0, 5, 40, -1])
def test_a_cut_file_is_corrupt(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "x"
    write_tensors(path, {"a": torch.ones(10)})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CorruptCheckpointError, match="not a whole safetensors file"):
        read_tensors(path)


def test_metadata_that_does_not_fit_is_corrupt(tmp_path: Path) -> None:
    for number, metadata in enumerate(
        [{"instep.aliases": '{"b": "gone"}'}, {"instep.dtypes": '{"a": "load"}'}, {"instep.aliases": "["}]
    ):
        write_tensors(tmp_path / str(number), {"a": torch.ones(1)}, metadata)
        with pytest.raises(CorruptCheckpointError, match="does not fit its tensors"):
            read_tensors(tmp_path / str(number))


def test_a_file_is_never_overwritten(tmp_path: Path) -> None:
    write_tensors(tmp_path / "x", {"a": torch.ones(1)})
    with pytest.raises(CheckpointError, match="written twice in one save"):
        write_tensors(tmp_path / "x", {"a": torch.zeros(1)})
    assert float(read_tensors(tmp_path / "x")["a"]) == 1.0


def test_a_missing_file_is_an_error_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no-such"):
        read_tensors(tmp_path / "no-such")


def test_one_element_of_any_stride_is_written() -> None:
    """A view of one element counts as contiguous, whatever its stride."""
    rows = torch.arange(12.0).reshape(4, 3)
    for view in (rows[1:2, 0], rows[1:2, 1:2], rows[:, 2], rows[3]):
        assert bytes(content_of(view)) == view.numpy().tobytes()
