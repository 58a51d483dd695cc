"""Pickles and YAML that nobody writes by accident."""

from __future__ import annotations

import json
import os
import struct
from random import Random

from tests.fuzz.child import MARKER
from tests.fuzz.values import NUMBERS, OBJECTS, TEXTS, drawn_texts, drawn_values

NAMES = [
    "os system",
    "posix system",
    "builtins eval",
    "builtins exec",
    "builtins getattr",
    "builtins __import__",
    "ctypes CDLL",
    "logging FileHandler",
    "antigravity x",
    "this s",
    "pathlib PosixPath",
    "collections OrderedDict",
    "torch Size",
    "torch load",
    "torch hub.load",
    "torch.serialization load",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_parameter",
    "torch._utils _rebuild_sparse_tensor",
    "torch._utils _rebuild_qtensor",
    "torch._utils _rebuild_nested_tensor",
    "torch._utils _rebuild_wrapper_subclass",
    "torch._utils _rebuild_meta_tensor_no_storage",
    "torch._utils _rebuild_device_tensor_from_numpy",
    "torch FloatStorage",
    "torch float32",
    "torch.storage UntypedStorage",
    "torch device",
    "torch Generator",
    "torch.distributed.checkpoint.metadata Metadata",
    "torch.distributed.checkpoint.metadata TensorProperties",
    "torch.distributed.checkpoint.filesystem _StorageInfo",
    "_codecs encode",
    "numpy.core.multiarray _reconstruct",
    "numpy dtype",
    "functools partial",
    "types FunctionType",
    "copyreg _reconstructor",
    "builtins object",
    f"{MARKER}_module Class",
    f"{MARKER}.sub thing",
    "deepspeed.runtime.zero.config ZeroStageEnum",
]


def pickled_text(rng: Random) -> bytes:
    """A text, as an opcode with its argument."""
    data = rng.choice([*TEXTS, *drawn_texts(0)]).encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def pickled_number(rng: Random) -> bytes:
    """A number, as an opcode with its argument."""
    value = rng.choice(NUMBERS)
    if isinstance(value, bool):
        return b"\x88" if value else b"\x89"
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data if len(data) < 256 else b"\x8b" + struct.pack("<i", len(data)) + data


def _name(rng: Random) -> bytes:
    module, name = rng.choice(NAMES).split(" ")
    stacked = b"X%s%sX%s%s\x93" % (_length(module), module.encode(), _length(name), name.encode())
    return stacked if rng.random() < 0.3 else f"c{module}\n{name}\n".encode()


def _length(text: str) -> bytes:
    return struct.pack("<I", len(text.encode()))


def pickle_bytes(rng: Random) -> bytes:
    """A whole pickle."""
    command = f"touch {MARKER}".encode()
    text = b"X" + struct.pack("<I", len(command)) + command
    bodies = [
        _name(rng) + b"(" + text + b"tR",
        _name(rng) + text + b"\x85R",
        _name(rng) + b")\x81}" + pickled_text(rng) + _name(rng) + b"sb",
        _name(rng) + b"}X\x09\0\0\0read_text" + _name(rng) + b"sb",  # an attribute of a class
        _name(rng) + b"N}X\x08\0\0\0__dict__" + _name(rng) + b"s\x86b",
        b"B" + struct.pack("<I", 2**32 - 1),
        b"\x8e" + struct.pack("<Q", rng.choice((2**33, 2**63 - 1))),
        b"\x8d" + struct.pack("<Q", 2**40),
        b"\x96" + struct.pack("<Q", rng.choice((10**9, 2**62))),
        b"\x8b" + struct.pack("<i", rng.choice((2**31 - 1, -1))),
        b"X" + struct.pack("<I", 2**32 - 1) + b"abc",
        b"]" * 100_000 + b"a" * 99_999,
        b"(" * 100_000,
        b"}" + b"X\x01\0\0\0a}" * 20_000 + b"s" * 20_000,
        _name(rng) + b"(" + pickled_number(rng) + pickled_number(rng) + b"tR",
        b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpu"
        + pickled_number(rng)
        + b"tQ"
        + pickled_number(rng)
        + b"("
        + pickled_number(rng)
        + b"t("
        + pickled_number(rng)
        + b"t\x89ccollections\nOrderedDict\n)RtR",
        b"I" + b"9" * rng.choice((5000, 200_000)) + b"\n",
        b"L" + b"9" * 5000 + b"L\n",
        b"V" + rng.randbytes(50) + b"\n",
        b"P" + MARKER.encode() + b"\n",
        b"\x82\x01",
        b"\x95" + struct.pack("<Q", 2**62) + b"N",
        b"".join(bytes([rng.randrange(256)]) for _ in range(60)),
    ]
    body = rng.choice(bodies)
    key = rng.choice((b"state_dict", b"model", b"weight", b"epoch"))
    if rng.random() < 0.5:
        body = b"}X" + struct.pack("<I", len(key)) + key + body + b"s"
    return b"\x80\x02" + body + b"."


def yaml_text(rng: Random, text: str) -> str | bytes:
    """A YAML file."""
    keys = [line.split(":")[0] for line in text.splitlines() if ":" in line and not line.startswith("#")] or ["a"]
    key = rng.choice(keys).strip() or "a"
    value = json.dumps(rng.choice(rng.choice((NUMBERS, TEXTS, OBJECTS, drawn_values(0)))))
    depth, count = rng.choice((100, 3000, 60_000)), rng.choice((2000, 20_000, 50_000))
    tag = rng.choice(
        (
            f"!!python/object/apply:os.system ['touch {MARKER}']",
            f"!!python/name:{MARKER}_module.x ''",
            f"!!python/module:{MARKER}_module ''",
            "!!python/object/new:ctypes.CDLL [x.so]",
            "!!binary 'a==='",
            "!!set {a, b}",
            "!!omap [a: 1]",
            "!!pairs [a: 1]",
            "!!timestamp '2001-99-99'",
            "2001-99-99",
            "!!int 'x'",
            "!!float 'y'",
            "!!null 'x'",
            "!!bool 'z'",
            "!!int ''",
            "0o9",
            "1:2:3:99",
            "1:" * 3000 + "1",
            "0x" + "f" * 9000,
            "9" * 9000,
            "!unknown x",
            "!!str [a]",
            "!!map [a]",
            "!!seq {a: 1}",
            "!!merge x",
            "=",
            "!!value x",
            "<<",
            ".inf",
            "-.NaN",
            "1e99999",
            "0b",
            "! x",
            "!<tag:yaml.org,2002:python/tuple> [1]",
            "!!python/tuple [1]",
            "!!float '1:' ",
            "-_",
            "0x_",
            "+.",
            "1:60:",
        )
    )
    bomb = "\n".join(
        [f"a0: &a0 [{', '.join(['x'] * 9)}]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12))]
    )
    merges = "\n".join(
        ["m0: &m0 {x: 1}", *(f"m{i}: &m{i} {{<<: [{', '.join([f'*m{i - 1}'] * 9)}]}}" for i in range(1, 9))]
    )
    texts: list[str | bytes] = [
        f"{text}\n{key}: {value}\n",
        f"{text}\n{key}: {tag}\n",
        f"{key}: {tag}\n",
        f"{text}\nx: {tag}\n",
        bomb,
        f"{text}\n{bomb}\n{key}: *a11\n",
        merges,
        f"{text}\n{merges}\n<<: *m8\n",
        "a: &a [*a]\n",
        f"{text}\n{key}: &x {{y: *x}}\n",
        f"{text}\n<<: {value}\n",
        f"{text}\n<<: [1, {{{key}: 2}}]\n",
        f"{key}: {'[' * depth}",
        f"{key}: {'[' * depth}{']' * depth}",
        "{a: " * depth + "1" + "}" * depth,
        "- " * depth + "x",
        "? " * depth + "x",
        f"{text}\n" + "\n".join(f"key{i}: {i}" for i in range(count)),
        "\n".join(f"? [{i}]\n: {i}" for i in range(200)),
        f"{text}\n? [a]\n: b\n",
        f"{text}\n? {{a: 1}}\n: b\n",
        f"{text}\n{text}",
        f"{key}: 1\n{key}: 2\n",
        f"{text}\n---\n{text}",
        "%YAML 3.7\n---\na: 1\n",
        "%TAG ! x\n---\n!a b",
        f"{key}: |\n" + "  x\n" * count,
        f"{key}: '" + "x" * 5_000_000 + "'",
        '"' + "\\x00" * 100 + '": 1',
        f"{text}\n{key}:\n  class_path: {MARKER}_module.Class\n",
        f"{key}: {{class_path: ctypes.CDLL, init_args: {{name: x}}}}",
        f"{text}\n? {'x' * 2000}\n: 1\n",
        f"{text}\n\x07: 1",
        f"{text}\n\ud800: 1",
        text.encode("utf-16"),
        text.encode("utf-32"),
        b"\xff\xfe" + text.encode(),
        b"\x00" * 50,
        os.fsencode(f"{text}\n") + rng.randbytes(40),
        "",
        "null",
        "[]",
        "- a\n- b",
        "x",
        "1",
        f"{text}\n{json.dumps(rng.choice(drawn_texts(0)))}: {value}\n",
        f"{key}: *nothing\n",
        "&a\n&b x",
        f"{key}: &a &b x",
        "\n".join(f"{key}: &n{i} {i}" for i in range(2000)),
        f"{key}: [" + "&a x," * count + "]",
        "{" * 3 + "a: b" + "}" * 3,
        f"{text}\nenv: {{A: {value}}}\n",
        "!!python/object/apply:time.sleep [100]",
    ]
    return rng.choice(texts)
