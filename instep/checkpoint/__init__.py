"""The on-disk format: atomic, verified, without pickle. README.md says why and what can fail."""

from instep.checkpoint.encode import decode, encode
from instep.checkpoint.tensors import read_tensors, write_tensors

__all__ = ["decode", "encode", "read_tensors", "write_tensors"]
