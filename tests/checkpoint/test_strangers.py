"""Files that somebody else made: what they say of themselves is never believed, and what they name is never called."""

from __future__ import annotations

import contextlib
import copyreg
import io
import json
import os
import pickle
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from instep.checkpoint import CheckpointStore, load_weights, merge
from instep.checkpoint.foreign.pickles import Record, read_pickle, records_in
from instep.checkpoint.hashing import digest, hash_file
from instep.cli.main import main
from instep.errors import CheckpointError, CorruptCheckpointError
from tests.checkpoint.helpers import path_of, value_of, writes

WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(3)}


# ---- what lies where a file should


def pipe(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**33)


@pytest.mark.parametrize("make", [pipe, endless, sparse])
def test_no_regular_manifest_beside_a_good_checkpoint(
    make: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = CheckpointStore(tmp_path)
    good = store.save(1, writes(1.0))
    bad = tmp_path / "step-00000009-1"
    bad.mkdir()
    make(bad / "manifest.json")
    assert main(["checkpoint", "ls", str(tmp_path)]) == main(["checkpoint", "verify", str(tmp_path)]) == 1
    assert "step-00000009-1" in capsys.readouterr().out
    with pytest.warns(UserWarning, match="step-00000009-1"):
        assert path_of(store.resolve("auto")) == good
    with pytest.raises(CheckpointError):
        store.read(bad)


@pytest.mark.parametrize("make", [pipe, endless])
@pytest.mark.parametrize("name", ["trainer.json", "model.safetensors"])
def test_no_regular_file_in_a_checkpoint(make: Callable[[Path], None], name: str, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    path = store.save(1, writes(1.0))
    (path / name).unlink()
    make(path / name)
    assert [name in problem for problem in store.verify(path)] == [True]
    for verify in (True, False):
        with pytest.raises(CheckpointError, match=name):
            value_of(store.read(path, verify=verify))


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors", "hub/model.safetensors.index.json", "zero/latest"])
def test_no_regular_foreign_file(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    pipe(file)
    with pytest.raises(CheckpointError):
        load_weights(file)


def test_a_link_to_a_foreign_file_is_followed(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "1"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    save_file(WEIGHTS, blobs / "0123")
    (snapshot / "model.safetensors").symlink_to(blobs / "0123")
    (snapshot / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(WEIGHTS, "model.safetensors")})
    )
    for name in ("model.safetensors", "model.safetensors.index.json"):
        assert load_weights(snapshot / name).keys() == WEIGHTS.keys()


# ---- names


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "linked/x.safetensors", "a\0b", "", ".", 3, None])
def test_an_index_names_files_of_its_folder_alone(name: Any, tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "x.safetensors")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "linked").symlink_to(tmp_path)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match=r"leads out of its folder|weight_map"):
        load_weights(index)
    with pytest.raises(CheckpointError, match=r"leads out of its folder|weight_map"):
        merge(index, tmp_path / "out.safetensors")


def test_latest_names_a_folder_within(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "zero").mkdir()
    for name in (b"../elsewhere", b"\xff\xfe", b"/", b"x" * 2**17):
        (tmp_path / "zero" / "latest").write_bytes(name)
        with pytest.raises(CheckpointError, match="latest"):
            load_weights(tmp_path / "zero")


# ---- pickles


class _Calls:
    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call


SETS_AN_ATTRIBUTE = b"\x80\x02cpathlib\nPosixPath\nN}U\tread_textctorch\nSize\ns\x86b."


@pytest.mark.parametrize(
    "data",
    [
        SETS_AN_ATTRIBUTE,
        b"\x80\x02Nr\xff\xff\xff\x1f.",  # a memo of 4 GB
        b"\x80\x04\x8e\xff\xff\xff\xff\x03\x00\x00\x00.",  # a text of 16 GB
        b"\x80\x02" + b"".join([b")", *[b"\x85q\x00h\x00\x86"] * 60]) + b"}q\x01(h\x00K\x01u.",
        b"\x80\x04]\x94h\x00a.",  # a list within itself
        pickle.dumps(_Calls(os.system, ("true",))),
        b"",
        b"\x80\x02",
    ],
)
def test_a_foreign_description_that_is_no_description_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(data)
    before = Path.read_text
    with pytest.raises(CheckpointError, match="does not describe a checkpoint"):
        load_weights(tmp_path)
    assert Path.read_text is before
    assert "read_text" not in vars(type(tmp_path))


def test_a_pickle_makes_records_alone() -> None:
    value = read_pickle(pickle.dumps({"p": Path("a"), "t": (1, 2.5, None), "s": {b"x"}}, protocol=4))
    assert type(value["p"]) is Record
    assert (value["t"], value["s"]) == ((1, 2.5, None), {b"x"})
    [made, keyed] = read_pickle(b"\x80\x02](cos\nsystem\n)\x81}U\x01aK\x01sb}(U\x01bK\x02ue.")
    assert (made.name, made.args, made.state, keyed) == ("os.system", (), {"a": 1}, {"b": 2})


_happened: list[Any] = []


class Watched:
    """What a pickle would use, if it could: each way to it is written down."""

    def __new__(cls, *args: Any, **keywords: Any) -> Any:
        _happened.append(("new", args, keywords))
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        _happened.append(state)

    @staticmethod
    def run(*args: Any) -> None:
        _happened.append(args)


_NAME = f"c{__name__}\nWatched\n".encode()
_NESTED = f"\x8c{chr(len(__name__))}{__name__}\x8c\x0bWatched.run\x93".encode("latin1")
_TUPLES = b")" + b"\x85" * 3 * 10**5
HOSTILE = {
    "reduce": _NAME + b")R.",
    "reduce of a nested name": _NESTED + b")R.",
    "reduce of what was made": _NAME + b")R)R.",
    "reduce of a text": b"U\x05printU\x01a\x85R.",
    "reduce of a persistent id": _NAME + b"Q)R.",
    "newobj": _NAME + b")\x81.",
    "newobj of what was made": _NAME + b")R)\x81.",
    "newobj of a list": b"])\x81.",
    "newobj with keywords": _NAME + b")}\x92.",
    "obj": b"(" + _NAME + b"o.",
    "inst": f"(i{__name__}\nWatched\n.".encode(),
    "state": _NAME + b")R}U\x01aK\x01sb.",
    "state of a name": _NAME + b"}U\x01aK\x01sb.",
    "state of a dict": b"}}U\x09__class__" + _NAME + b"sb.",
    "slots of a dict": b"}N}U\x09__class__" + _NAME + b"s\x86b.",
    "slots of a list": b"]N}U\x06append" + _NAME + b"s\x86b.",
    "slots of what was made": _NAME + b")RN}U\x0c__setstate__" + _NAME + b"s\x86b}b.",
    "slots of a persistent id": b"NQN}U\x04name" + _NAME + b"s\x86b.",
    "extension": b"\x82\xf0)R.",
    "long extension": b"\x84\xf0\x00\x00\x00)R.",
    "buffer": b"\x97.",
    "read-only buffer": b"C\x01a\x98.",
    "bytearray": b"\x96\x00\x00\x00\x00\x00\x01\x00\x00.",
    "memo": b"Nr\xff\xff\xff\x7f.",
    "memo that is not there": b"h\x01.",
    "import": b"cantigravity\nfly\n)R.",
    "items of a name": _NAME + b"U\x01aK\x01s.",
    "entries of a text": b"U\x01aK\x01a.",
    "key without a value": b"}(K\x01u.",
    "key that is a list": b"}]K\x01s.",
    "deep key": b"}" + _TUPLES + b"K\x01s.",
    "deep keys": b"}(" + _TUPLES + b"K\x01u.",
    "deep key of a whole dict": b"(" + _TUPLES + b"K\x01d.",
    "deep member": b"\x8f(" + _TUPLES + b"\x90.",
    "deep frozen member": b"(" + _TUPLES + b"\x91.",
    "deep": _TUPLES + b".",
    "more than there is": b"00.",
    "nothing": b"",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_that_a_pickle_names_is_run_imported_or_changed(name: str, tmp_path: Path) -> None:
    copyreg.add_extension(__name__, "Watched", 240)
    copyreg._extension_cache[240] = Watched  # type: ignore[attr-defined]  # as after the first use of it
    sys.modules.pop("antigravity", None)
    before = dict(vars(Watched))
    try:
        with contextlib.suppress(Exception):
            assert all(type(record) is Record for record in records_in(read_pickle(b"\x80\x05" + HOSTILE[name])))
        (tmp_path / ".metadata").write_bytes(b"\x80\x05" + HOSTILE[name])
        with pytest.raises(CheckpointError, match="does not describe a checkpoint"):
            load_weights(tmp_path)
    finally:
        copyreg.remove_extension(__name__, "Watched", 240)
    assert not _happened
    assert dict(vars(Watched)) == before
    assert "antigravity" not in sys.modules


# ---- files of torch.save


def torch_file(path: Path, value: Any, change: Callable[[str, bytes], tuple[bytes, int]] | None = None) -> Path:
    """A file of torch.save, with records changed."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    with zipfile.ZipFile(buffer) as old, zipfile.ZipFile(path, "w") as new:
        for entry in old.infolist():
            data, kind = old.read(entry), zipfile.ZIP_STORED
            if change is not None:
                data, kind = change(entry.filename, data)
            new.writestr(entry.filename, data, compress_type=kind)
    return path


def deflated(name: str, data: bytes) -> tuple[bytes, int]:
    return (b"\0" * 2**24 if name.endswith("data/0") else data), zipfile.ZIP_DEFLATED


def shorter(name: str, data: bytes) -> tuple[bytes, int]:
    return (data[:4] if name.endswith("data/0") else data), zipfile.ZIP_STORED


def wants_memory(name: str, data: bytes) -> tuple[bytes, int]:
    call = b"\x80\x02cbuiltins\nbytearray\n\x8a\x05\x00\x00\x00\x00\x7f\x85R."
    return (call if name.endswith("data.pkl") else data), zipfile.ZIP_STORED


def longer(name: str, data: bytes) -> tuple[bytes, int]:
    return (data + b"\0" * 64 if name.endswith("data/0") else data), zipfile.ZIP_STORED


def long_version(name: str, data: bytes) -> tuple[bytes, int]:
    return (data * 2**17 if name.endswith("/version") else data), zipfile.ZIP_STORED


@pytest.mark.parametrize("ending", [".ckpt", ".pt"])
@pytest.mark.parametrize("change", [deflated, shorter, longer, long_version, wants_memory])
def test_a_file_of_torch_save_fits_its_size(change: Any, ending: str, tmp_path: Path) -> None:
    whole = torch_file(tmp_path / f"whole{ending}", {"state_dict": WEIGHTS})
    assert load_weights(whole).keys() == WEIGHTS.keys()
    path = torch_file(tmp_path / f"x{ending}", {"state_dict": WEIGHTS}, change)
    with pytest.raises(CorruptCheckpointError, match=r"is not a whole file of torch\.save"):
        load_weights(path)
    assert main(["checkpoint", "convert", str(path), str(tmp_path / "out")]) == 1


def test_expanded_tensors_are_read(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1).expand(2, 3)}, tmp_path / "x.pt")
    assert load_weights(tmp_path / "x.pt")["a"].shape == (2, 3)


@pytest.mark.parametrize("states", [[{"items": 1}], [{"items": 1}, {"_metadata": {}}]])
def test_no_attribute_stands_before_a_method(states: list[Any], tmp_path: Path) -> None:
    built = b"".join(pickle.dumps(state, 2)[2:-1] + b"b" for state in states)
    made = b"\x80\x02ccollections\nOrderedDict\n)R" + built + b"."
    torch_file(tmp_path / "x.pt", {}, lambda name, data: (made if name.endswith("data.pkl") else data, 0))
    with pytest.raises(CorruptCheckpointError, match=r"is not a whole file of torch\.save: ValueError"):
        load_weights(tmp_path / "x.pt")


@pytest.mark.parametrize("zipped", [True, False])
def test_no_tensor_reaches_beyond_its_storage(zipped: bool, tmp_path: Path) -> None:
    torch.save({"a": torch.ones(4)}, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    of_four, of_a_thousand = b"QK\x00K\x04\x85", b"QK\x00M\xe8\x03\x85"
    content = (tmp_path / "x.pt").read_bytes()
    assert content.count(of_four) == 1
    if zipped:
        torch_file(
            tmp_path / "x.pt", {"a": torch.ones(4)}, lambda name, data: (data.replace(of_four, of_a_thousand), 0)
        )
    else:
        (tmp_path / "x.pt").write_bytes(content.replace(of_four, of_a_thousand))
    with pytest.raises(CorruptCheckpointError, match=r"is not a whole file of torch\.save"):
        load_weights(tmp_path / "x.pt")


@pytest.mark.parametrize(
    "content",
    [
        {"epoch": float("nan")},
        {"epoch": 10**400},
        {"epoch": "3"},
        {"global_step": -1},
        {"hyper_parameters": [1]},
        {"hparams_name": 3},
        {"state_dict": {3: torch.ones(1)}},
        {"state_dict": None},
    ],
    ids=str,
)
def test_a_lightning_file_of_wrong_kinds(
    content: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"state_dict": WEIGHTS, **content}, tmp_path / "x.ckpt")
    assert main(["checkpoint", "convert", str(tmp_path / "x.ckpt"), str(tmp_path / "out")]) == 1
    assert "x.ckpt" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["x.ckpt"]


# ---- headers


@pytest.mark.parametrize(
    "entry",
    [
        {"shape": [-2, -3]},
        {"shape": [2, 2**62, 2**62]},
        {"shape": [2.0, 3]},
        {"dtype": "F99"},
        {"dtype": "onnx"},
        {"data_offsets": [0, 2**62]},
        {"data_offsets": [24, 0]},
        {"data_offsets": [0]},
        {"data_offsets": [True, 24]},
    ],
    ids=str,
)
def test_a_header_fits_its_file(entry: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    header = {"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24], **entry}}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 24)
    with pytest.raises(CorruptCheckpointError, match="safetensors file"):
        load_weights(file)
    with pytest.raises(CorruptCheckpointError, match="safetensors file"):
        merge(file, tmp_path / "out.safetensors")


# ---- resealed manifests


def reseal(folder: Path, change: Callable[[dict[str, Any]], Any] = lambda _: None) -> None:
    """Change a manifest so that it fits itself and the files as they are."""
    path = folder / "manifest.json"
    body = json.loads(path.read_bytes().rpartition(b',\n "xxh3": "')[0] + b"\n}")
    for name in body["files"]:
        record = hash_file(folder / name)
        body["files"][name] = {"bytes": record.bytes, "xxh3": record.xxh3}
    change(body)
    text = json.dumps(body, indent=1).removesuffix("\n}")
    path.write_text(f'{text},\n "xxh3": "{digest(text.encode())}"\n}}\n')


@pytest.mark.parametrize(
    "change",
    [
        {"step": "1"},
        {"step": -1},
        {"step": 10**30},
        {"world_size": None},
        {"versions": []},
        {"created": 3},
        {"info": {"score": "high", "monitor": "x"}},
        {"info": {"kind": 3}},
        {"info": {"epoch": {"$": "float", "v": "nan"}}},
        {"files": {"x": 3}},
        {"files": {"x": {"bytes": -1, "xxh3": "0"}}},
        {"files": {"x": {"bytes": 1, "xxh3": "0", "chunks": 7}}},
        {"format_version": "1"},
        {"format_version": None},
    ],
    ids=str,
)
def test_a_manifest_of_wrong_kinds_does_not_matter_beside_a_good_one(change: dict[str, Any], tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    good = store.save(1, writes(1.0))
    bad = store.save(2, writes(2.0))
    reseal(bad, lambda body: body.update(change))
    with pytest.raises(CorruptCheckpointError, match="is not a manifest"):
        store.read(bad)
    with pytest.warns(UserWarning, match="is not a manifest"):
        assert path_of(store.resolve("last")) == good
    assert main(["checkpoint", "ls", str(tmp_path)]) == 1


@pytest.mark.parametrize(
    "text", ["[" * 5_000 + "]" * 5_000, '{"a": 1, "a": 2}', '{"a": NaN}', "\xff", "[1", '{"v": 1e999}', "1" * 5_000]
)
def test_a_state_that_is_no_json(text: str, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    path = store.save(1, writes(1.0))
    (path / "optimizer.json").write_bytes(text.encode("latin1"))
    reseal(path)
    with pytest.raises(CorruptCheckpointError):
        store.read(path).state("optimizer")
    assert main(["checkpoint", "show", str(path)]) == 1
