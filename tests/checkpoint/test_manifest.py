from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from instep.checkpoint import FileRecord, Manifest
from instep.checkpoint.manifest import read_manifest
from instep.checkpoint.names import is_plain_name
from instep.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError, UnsavableStateError

MANIFEST = Manifest(
    step=1200,
    attempt=2,
    run_id="run é",
    world_size=4,
    created="2024-01-01T00:00:00+00:00",
    versions={"instep": "0.1.0"},
    files={"a.json": FileRecord(3, "ab"), "b.safetensors": FileRecord(2**27, "cd", ("01", "02"))},
    info={"kind": "full", "score": -0.0, "path": Path("x"), "nested": [1, None, {"mode": "min"}]},
)
HERE = Path("folder/manifest.json")


def test_a_manifest_survives_a_round_trip_through_bytes() -> None:
    assert Manifest.from_bytes(MANIFEST.to_bytes(), HERE) == MANIFEST


def test_nan_scores_are_strict_json_and_come_back() -> None:
    data = Manifest(**{**vars(MANIFEST), "info": {"score": float("nan")}}).to_bytes()

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    json.loads(data, parse_constant=refuse)
    assert math.isnan(Manifest.from_bytes(data, HERE).info["score"])


def test_a_manifest_is_json_that_people_can_read() -> None:
    body = json.loads(MANIFEST.to_bytes())
    assert body["step"] == 1200
    assert body["files"]["a.json"] == {"bytes": 3, "xxh3": "ab"}
    assert list(body)[-1] == "xxh3"


def test_every_flipped_bit_is_found() -> None:
    data = MANIFEST.to_bytes()
    for position in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            with pytest.raises(CorruptCheckpointError, match=r"folder/manifest\.json"):
                Manifest.from_bytes(bytes(damaged), HERE)


def test_every_truncation_and_an_addition_is_found() -> None:
    data = MANIFEST.to_bytes()
    for damaged in [*(data[:size] for size in range(len(data))), data + b"\n", b" " + data]:
        with pytest.raises(CorruptCheckpointError, match="cut short or damaged"):
            Manifest.from_bytes(damaged, HERE)


def sealed(body: Any) -> bytes:
    """What a program that knows the checksum can write."""
    from instep.checkpoint.hashing import digest

    text = json.dumps(body, indent=1).removesuffix("\n}").encode()
    return text + b',\n "xxh3": "' + digest(text).encode() + b'"\n}\n'


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a/../b", "a/.b", "a//b", "a/", ".hidden", "manifest.json", "", ".."]
)
def test_names_that_lead_out_of_the_folder_are_refused(name: str) -> None:
    body = json.loads(MANIFEST.to_bytes())
    del body["xxh3"]
    body["files"] = {name: {"bytes": 1, "xxh3": "ab"}}
    assert not is_plain_name(name)
    with pytest.raises(CorruptCheckpointError, match="leads out of the folder"):
        Manifest.from_bytes(sealed(body), HERE)


def test_a_newer_format_says_so() -> None:
    body = json.loads(MANIFEST.to_bytes())
    del body["xxh3"]
    with pytest.raises(CheckpointError, match="Upgrade instep"):
        Manifest.from_bytes(sealed({**body, "format_version": 99, "new": 1}), HERE)
    for wrong in ({"format_version": 1}, [1, 2], {**body, "files": 3}):
        with pytest.raises(CorruptCheckpointError, match="not a manifest"):
            Manifest.from_bytes(sealed(wrong), HERE)


def test_what_a_later_instep_adds_to_this_format_is_left_out() -> None:
    body = json.loads(MANIFEST.to_bytes())
    del body["xxh3"]
    for record in body["files"].values():
        record["new"] = 1
    assert Manifest.from_bytes(sealed({**body, "new": {"x": [1]}}), HERE) == MANIFEST


def test_a_folder_without_a_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(CheckpointNotFoundError, match=r"has no manifest\.json"):
            read_manifest(path)


@pytest.mark.parametrize("info", [{"score": torch.ones(1)}, {"score": object()}])
def test_info_is_json_only(info: Any) -> None:
    with pytest.raises(UnsavableStateError, match="the checkpoint's info"):
        Manifest(**{**vars(MANIFEST), "info": info}).to_bytes()
