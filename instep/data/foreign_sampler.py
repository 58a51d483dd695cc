"""`ForeignOrder`: the order of an epoch, drawn from a user's sampler, the same on all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from instep.data.seeding import RandomStream
from instep.types import StateDict, Stateful
from instep.utils.seed import derive_seed


class ForeignOrder:
    """Callable that draws the whole order of an epoch from a sampler or batch sampler.

    All random numbers that the sampler draws, from the process's generators or its own, are derived from (seed, epoch).
    So the order can be drawn again after a resume, and it is the same on every rank. A sampler that derives its order
    itself returns it from a method `_instep_order_of(epoch, cycle)`.

    Args:
        sampler: a finite sampler or batch sampler.
    """

    def __init__(self, sampler: Iterable[Any]) -> None:
        self.sampler = sampler
        self.state_before: StateDict | None = None

    def __call__(self, seed: int, epoch: int, cycle: int) -> Sequence[Any] | torch.Tensor:
        if order_of := getattr(self.sampler, "_instep_order_of", None):
            return order_of(epoch, cycle)
        stateful = self.stateful
        if stateful is not None:
            self.state_before = stateful.state_dict()
        for generator in generators(self.sampler):
            generator.manual_seed(derive_seed(seed, "draw", epoch, cycle))
        with RandomStream(seed, "draw").at(epoch, cycle):
            items = list(self.sampler)
        return torch.tensor(items) if items and all(type(item) is int for item in items) else items

    @property
    def stateful(self) -> Stateful | None:
        """The sampler if it can save its state, else a batch sampler's inner sampler if that one can, else None."""
        return next((part for part in _parts(self.sampler) if isinstance(part, Stateful)), None)


def generators(sampler: Any) -> list[torch.Generator]:
    """Return the torch generators of a sampler and, for a batch sampler, of its inner sampler."""
    found = [getattr(part, "generator", None) for part in _parts(sampler)]
    return [generator for generator in found if isinstance(generator, torch.Generator)]


def is_distributed(sampler: Any) -> bool:
    """Return True if a sampler or its inner sampler divides the data over the ranks, as torch's DistributedSampler."""
    return any(hasattr(part, "num_replicas") for part in _parts(sampler))


def order_digest(order: Sequence[Any] | torch.Tensor) -> str:
    """Return a short digest of an order, by which ranks compare their orders."""
    raw = order.numpy().tobytes() if isinstance(order, torch.Tensor) else repr(order).encode()
    return hashlib.blake2b(raw, digest_size=8).hexdigest()


def _parts(sampler: Any) -> list[Any]:
    inner = getattr(sampler, "sampler", None)
    return [sampler] if inner is None else [sampler, inner]
