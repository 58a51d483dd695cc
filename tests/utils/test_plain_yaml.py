"""What a configuration may be, and that everything else is one error of ours, soon."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from instep.errors import SettingError
from instep.utils import plain_yaml
from instep.utils.plain_yaml import compose, load, read_text


def test_plain_yaml_reads_values_anchors_and_merges() -> None:
    text = "a: &x {b: 1e-5, c: [yes, ~, 0x10]}\nd: *x\ne: {<<: *x, b: 2}\nf: 2001-01-01\n'g': !!str 1\n"
    inner = {"b": 1e-5, "c": [True, None, 16]}
    assert load(text, "here") == {"a": inner, "d": inner, "e": {**inner, "b": 2}, "f": "2001-01-01", "g": "1"}
    assert compose("# nothing\n", "here") == (None, None)


BOMB = "\n".join(["a0: &a0 [x, x]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12))])
MERGES = "\n".join(["a0: &a0 {x: 1}", *(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}" for i in range(1, 9))])


@pytest.mark.parametrize(
    "text, said",
    [
        (BOMB, "more than 10,000 values"),
        (MERGES, "more than 10,000 values"),
        ("a: [" + "1, " * 4001 + "]", "4,000 in one list"),
        ("\n".join(f"k{i}: 1" for i in range(4001)), "4,000 in one list or mapping"),
        ("a: " + "[" * 3000, "nested more than 50 deep"),
        ("- " * 60_000 + "x", "nested more than 50 deep"),
        ("a: '" + "x" * 2**20 + "'", "more than 1,048,576 characters"),
        ("a: &x [*x]", "stands for nothing before it"),
        ("a: *x", "stands for nothing before it"),
        ("a: !!python/object/apply:os.system [true]", "the tag tag:yaml.org,2002:python/object/apply:os.system is not"),
        ("a: !!binary x", "is not read"),
        ("a: !!int x", "cannot be read"),
        ("a: !!bool z", "cannot be read"),
        ("a: !!float ''", "cannot be read"),
        ("a: 9" + "9" * 9000, "cannot be read"),
        ("? [a]\n: b", "is no YAML"),
        ("a: [1", "is no YAML"),
        ("a: 1\n---\nb: 2", "is no YAML"),
        ("\0", "is no YAML"),
    ],
)
def test_what_is_refused(text: str, said: str) -> None:
    with pytest.raises(SettingError, match=said) as caught:
        load(text, "x.yaml")
    assert str(caught.value).startswith("x.yaml")


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "missing", "large", "bytes", "nul"])
def test_files_that_are_not_read(kind: str, tmp_path: Path) -> None:
    path = tmp_path / ("a\0b" if kind == "nul" else "x.yaml")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    elif kind == "large":
        path.touch()
        os.truncate(path, plain_yaml.MAX_BYTES + 1)
    elif kind == "bytes":
        path.write_bytes(b"a: \xff")
    with pytest.raises(SettingError, match=r"x\.yaml|embedded null"):
        read_text(path)
