"""Damages one file of a folder, as its kind allows: bytes, JSON, safetensors, pickles, zips, YAML, or the entry itself.

A mutation is a function of a path and a generator; the same generator gives the same bytes.
"""

from __future__ import annotations

import io
import json
import os
import pickletools
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from instep.checkpoint.hashing import digest, hash_file
from instep.checkpoint.names import MANIFEST
from tests.fuzz import hostile
from tests.fuzz.values import NUMBERS, OBJECTS, TEXTS, drawn_texts, drawn_values

Mutation = Callable[[Path, Random], None]
_SEAL = b',\n "xxh3": "'  # the last entry of a manifest
_DEEP = "a value that is put in as text, since json itself cannot write it"


def damage(root: Path, rng: Random, files: Callable[[Path], bool] = lambda _: True) -> str:
    """Damage one to three files of a folder.

    Args:
        root: the folder; no file of it is a link.
        rng: decides.
        files: which ones.

    Returns:
        What was done, for people.
    """
    done = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        found = sorted(it for it in root.rglob("*") if _is_small(it) and files(it))
        if not found:
            break
        path = rng.choice(found)
        mutation = rng.choice(_mutations(path))
        mutation(path, rng)
        done.append(f"{mutation.__name__} {path.relative_to(root)}")
    return ", ".join(done)


def _is_small(path: Path) -> bool:
    return not path.is_symlink() and path.is_file() and path.stat().st_size < 2**24


def _mutations(path: Path) -> list[Mutation]:
    aware: list[Mutation] = []
    if path.name == MANIFEST:
        aware = [manifest_json]
    elif path.suffix == ".json" or path.name.startswith(".lease-"):
        aware = [json_tree]
    elif path.suffix == ".safetensors":
        aware = [safetensors_header]
    elif path.name == ".metadata":
        aware = [pickle_stream, hostile_pickle]
    elif zipfile.is_zipfile(path):
        aware = [zip_pickle, zip_pickle, zip_records]
    elif path.suffix in (".yaml", ".yml"):
        return [text_bytes, hostile_yaml, hostile_yaml, hostile_yaml]
    elif path.name == "latest":
        aware = [pointer]
    return [*aware * 4, raw_bytes, raw_bytes, entry]


# ---- bytes


def raw_bytes(path: Path, rng: Random) -> None:
    """Flips, cuts, splices, and numbers over lengths."""
    path.write_bytes(_bytes(path.read_bytes(), rng))


def text_bytes(path: Path, rng: Random) -> None:
    """The same, where a few characters are of the format."""
    data = bytearray(path.read_bytes())
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(data) + 1)
        data[at:at] = rng.choice(
            (b"[", b"]", b"{", b"}", b"&a ", b"*a", b"!!", b":", b"\t", b"- ", b"\0", b"\xff", b"|")
        )
    path.write_bytes(bytes(data))


def _bytes(data: bytes, rng: Random) -> bytes:
    some = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(some) + 1)
        way = rng.randrange(7)
        if way == 0 and at < len(some):
            some[at] ^= 1 << rng.randrange(8)
        elif way == 1:
            del some[at:]
        elif way == 2:
            del some[at : at + rng.randint(1, 40)]
        elif way == 3:
            some[at:at] = rng.randbytes(rng.randint(1, 40))
        elif way == 4:
            other = rng.randrange(len(some) + 1)
            some[at:at] = some[other : other + rng.randint(1, 200)]
        elif way == 5:
            at = rng.choice((0, at, max(0, len(some) - 22)))
            number = rng.choice((0, 1, 2**16 - 1, 2**31 - 1, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1))
            packed = struct.pack("<Q", number)[: rng.choice((1, 2, 4, 8))]
            some[at : at + len(packed)] = packed
        else:
            at = rng.randrange(len(some) + 1)
            some[at:at] = bytes([rng.choice((0, 0xFF, 0x80))]) * rng.randint(1, 400)
    return bytes(some)


# ---- entries


def entry(path: Path, rng: Random) -> None:
    """Another kind of entry in its place, or none."""
    outside = path.parents[0]
    while not (outside / "outside").is_dir():
        outside = outside.parent
    content = path.read_bytes()
    path.unlink()
    way = rng.randrange(9)
    if way == 0:
        os.mkfifo(path)
    elif way == 1:
        path.symlink_to("/dev/zero")
    elif way == 2:
        (outside / "linked").write_bytes(content)
        path.symlink_to(outside / "linked")
    elif way == 3:
        path.symlink_to(path.name)
    elif way == 4:
        path.mkdir()
    elif way == 5:
        path.write_bytes(b"")
    elif way == 6:
        path.write_bytes(content)
        os.truncate(path, 2**40)  # takes no room
    elif way == 7:
        path.symlink_to("/etc/passwd")


def pointer(path: Path, rng: Random) -> None:
    """A file with the name of another one."""
    text = rng.choice([*TEXTS, *drawn_texts(0)])
    path.write_bytes(rng.choice((text.encode("utf-8", "surrogatepass"), b"\xff\xfe", rng.randbytes(20))))


# ---- JSON


def json_tree(path: Path, rng: Random) -> None:
    """Other values, keys and depths in a JSON file."""
    try:
        tree = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return raw_bytes(path, rng)
    path.write_bytes(_json(tree, rng))


def manifest_json(path: Path, rng: Random) -> None:
    """The same in a manifest, whose own seal is made again."""
    try:
        body = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return raw_bytes(path, rng)
    body.pop("xxh3", None)
    write_manifest(path, _json(body, rng))


def write_manifest(path: Path, body: bytes) -> None:
    """Seal the text of a manifest, as `Manifest.to_bytes` does."""
    text = body.rstrip().removesuffix(b"}").rstrip()
    path.write_bytes(text + _SEAL + digest(text).encode() + b'"\n}\n')


def reseal(folder: Path) -> None:
    """Make the sizes and checksums of a manifest fit the files again, where there still is one."""
    path = folder / MANIFEST
    try:
        if path.is_symlink() or not path.is_file() or path.stat().st_size > 2**26:
            return
        body = json.loads(path.read_bytes())
        body.pop("xxh3", None)
        for name, record in body["files"].items():
            file = folder / name
            if file.is_file() and not file.is_symlink() and file.stat().st_size < 2**30:
                found = hash_file(file)
                record.update({"bytes": found.bytes, "xxh3": found.xxh3})
                record.pop("chunks", None)
        write_manifest(path, json.dumps(body, indent=1).encode())
    except (ValueError, KeyError, AttributeError, TypeError, OSError, RecursionError):
        return  # the manifest itself is what was damaged


def safetensors_header(path: Path, rng: Random) -> None:
    """Other values in the header, or another length of it."""
    data = path.read_bytes()
    try:
        size = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8 : 8 + size])
    except (struct.error, ValueError, RecursionError):
        return raw_bytes(path, rng)
    notes = header.get("__metadata__")
    if isinstance(notes, dict) and notes and rng.random() < 0.3:  # texts that are JSON again
        key = rng.choice(sorted(notes))
        try:
            notes[key] = _json(json.loads(notes[key]), rng).decode("utf-8", "replace")
        except (ValueError, RecursionError, TypeError):
            notes[key] = rng.choice(TEXTS)
        text = json.dumps(header).encode()
    else:
        text = _json(header, rng)
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


def _json(tree: Any, rng: Random) -> bytes:
    deep = ""
    for _ in range(rng.choice((1, 1, 2, 4))):
        places = list(_places(tree))
        if not places:
            break
        inside, key = rng.choice(places)
        way = rng.randrange(9)
        if way <= 3:
            inside[key] = _odd(rng)
        elif way == 4:
            other, at = rng.choice(places)
            inside[key], other[at] = other[at], inside[key]
            if _is_circular(tree):
                inside[key], other[at] = other[at], inside[key]
        elif way == 5:
            del inside[key]
        elif way == 6 and isinstance(inside, dict):
            inside[str(rng.choice([*TEXTS, *drawn_texts(0)]))] = inside.pop(key)
        elif way == 7 and isinstance(inside[key], dict):
            inside[key] |= {rng.choice(TEXTS): _odd(rng)}
        elif way == 8:
            inside[key] = _DEEP
            depth = rng.choice((200, 990, 5000, 100_000))
            deep = rng.choice(("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth, "1" * depth))
        else:
            inside[key] = [inside[key]] * rng.choice((1, 2, 1000))
    text = json.dumps(tree)
    return (text.replace(f'"{_DEEP}"', deep) if deep else text).encode("utf-8", "surrogatepass")


def _odd(rng: Random) -> Any:
    return json.loads(json.dumps(rng.choice(rng.choice((NUMBERS, TEXTS, OBJECTS, drawn_values(0))))))


def _places(tree: Any) -> Any:
    """Each (container, key) of a tree."""
    found = [tree] if isinstance(tree, (dict, list)) else []
    for inside in found:  # grows
        for key in list(inside) if isinstance(inside, dict) else range(len(inside)):
            yield inside, key
            if isinstance(inside[key], (dict, list)):
                found.append(inside[key])


def _is_circular(tree: Any) -> bool:
    try:
        json.dumps(tree)
    except ValueError:
        return True
    return False


# ---- pickles and zips


def pickle_stream(path: Path, rng: Random) -> None:
    """Other names, numbers and lengths in a pickle."""
    path.write_bytes(_pickle(path.read_bytes(), rng))


def hostile_pickle(path: Path, rng: Random) -> None:
    """A pickle that nobody writes by accident."""
    path.write_bytes(hostile.pickle_bytes(rng))


def _pickle(data: bytes, rng: Random) -> bytes:
    try:
        steps = list(pickletools.genops(data))
    except Exception:
        return _bytes(data, rng)
    some = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        index = rng.randrange(len(steps))
        code, value, at = steps[index]
        end = steps[index + 1][2] if index + 1 < len(steps) else len(data)
        if len(some) != len(data):
            break  # places have moved
        name = code.name
        if name == "GLOBAL":
            some[at:end] = f"c{rng.choice(hostile.NAMES)}\n".encode().replace(b" ", b"\n")
        elif name in ("BININT", "BININT1", "BININT2", "LONG1"):
            some[at:end] = hostile.pickled_number(rng)
        elif name in ("BINUNICODE", "SHORT_BINUNICODE", "BINPUT", "BINGET", "LONG_BINPUT", "LONG_BINGET", "MEMOIZE"):
            some[at:end] = rng.choice((hostile.pickled_text(rng), b"r\xff\xff\xff\x7f", b"j\xff\xff\xff\x7f", b""))
        elif name in ("REDUCE", "BUILD", "TUPLE", "EMPTY_TUPLE", "EMPTY_DICT", "MARK", "BINPERSID", "NEWTRUE"):
            some[at:end] = rng.choice((b"R", b"b", b"t", b")", b"}", b"(", b"Q", b"N", b"0", b"2", b"\x81", b"]"))
        else:
            at = rng.randrange(len(data))
            some[at] = rng.randrange(256)
    return bytes(some)


def zip_pickle(path: Path, rng: Random) -> None:
    """Another pickle in a file of torch.save."""

    def change(name: str, data: bytes) -> bytes:
        if not name.endswith("data.pkl"):
            return data
        return hostile.pickle_bytes(rng) if rng.random() < 0.3 else _pickle(data, rng)

    _rewrite(path, change)


def zip_records(path: Path, rng: Random) -> None:
    """Records that are missing, compressed, cut, doubled, or of another name."""
    method = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2))

    def change(_: str, data: bytes) -> bytes | None:
        way = rng.randrange(8)
        return None if way == 0 else _bytes(data, rng) if way == 1 else b"" if way == 2 else data

    rename = rng.choice(TEXTS).replace("\0", "") if rng.random() < 0.2 else ""
    _rewrite(path, change, method, rename[:200].encode("utf-8", "replace").decode())


def _rewrite(
    path: Path, change: Callable[[str, bytes], bytes | None], method: int = zipfile.ZIP_STORED, rename: str = ""
) -> None:
    out = io.BytesIO()
    try:
        with zipfile.ZipFile(path) as old, zipfile.ZipFile(out, "w", method) as new:
            for name in old.namelist():
                data = change(name, old.read(name))
                if data is not None:
                    new.writestr(f"{name}{rename}" if rename else name, data)
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, ValueError, zlib.error):
        return  # damaged before
    path.write_bytes(out.getvalue())


def hostile_yaml(path: Path, rng: Random) -> None:
    """YAML that nobody writes by accident, beside or instead of what is there."""
    text = hostile.yaml_text(rng, path.read_text(encoding="utf-8", errors="replace"))
    path.write_bytes(text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text)


def copy(source: Path, target: Path) -> None:
    """A folder or a file, as it is."""
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
    else:
        shutil.copy(source, target)
