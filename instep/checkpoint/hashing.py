"""What a file must be: its size and checksums, taken while the data passes by."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from instep.utils.regular_files import open_regular

CHUNK_BYTES = 64 * 2**20  # a part of a large file can be verified by itself in these pieces

Data: TypeAlias = "bytes | bytearray | memoryview"


@dataclass(frozen=True)
class FileRecord:
    """What a file must be.

    Args:
        bytes: its size.
        xxh3: xxh3-128 in hex. Over the content up to 64 MiB; of a larger file, over its chunks' digests joined, so that
            one pass over the data gives both.
        chunks: xxh3-128 of each 64 MiB in hex; empty for a file of one chunk.
    """

    bytes: int
    xxh3: str
    chunks: tuple[str, ...] = ()


class Hasher:
    """The record of a file from its content in order, piece by piece."""

    def __init__(self) -> None:
        import xxhash  # late: `instep.trainer` imports this package, most programs never hash

        self._new = xxhash.xxh3_128
        self._chunk = self._new()
        self._filled = 0
        self._done: list[bytes] = []
        self.bytes = 0

    def update(self, data: Data) -> None:
        view = memoryview(data)
        self.bytes += len(view)
        while len(view) > 0:
            if self._filled == CHUNK_BYTES:
                self._done.append(self._chunk.digest())
                self._chunk, self._filled = self._new(), 0
            piece = view[: CHUNK_BYTES - self._filled]
            self._chunk.update(piece)
            self._filled += len(piece)
            view = view[len(piece) :]

    def record(self) -> FileRecord:
        digests = [*self._done, self._chunk.digest()]
        if len(digests) == 1:
            return FileRecord(self.bytes, digests[0].hex())
        whole = self._new(b"".join(digests)).hexdigest()
        return FileRecord(self.bytes, whole, tuple(digest.hex() for digest in digests))


def digest(data: Data) -> str:
    """The xxh3-128 of some bytes, in hex."""
    import xxhash  # late, see Hasher

    return xxhash.xxh3_128(data).hexdigest()


def hash_file(path: Path) -> FileRecord:
    """The record of a file as it is on the disk."""
    hasher = Hasher()
    buffer = memoryview(bytearray(4 * 2**20))
    with open_regular(path) as file:
        while size := file.readinto(buffer):
            hasher.update(buffer[:size])
    return hasher.record()
