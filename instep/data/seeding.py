"""Random augmentation that a resumed run repeats bit for bit.

Random numbers for data are drawn in three places. In workers, each list of indices carries a seed, with which the
worker seeds its generators before it loads the batch. With `seed_samples`, the generators are seeded for every sample,
also in the main process, where the generators of the training are restored afterwards. Loaders that instep iterates as
they are draw in the main process from a separate stream (`RandomStream`), so that their numbers depend neither on the
training nor on how far ahead batches are read.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple

import torch

from instep.utils.seed import derive_seed


def seed_generators(seed: int) -> None:
    """Seed the CPU generators of Python, of numpy (if it is loaded) and of torch.

    This does not call `torch.manual_seed`, which also seeds accelerators: workers must not use accelerators.
    """
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


class RandomStream:
    """Context manager in which the process's CPU generators draw from a separate stream.

    Entering seeds the generators; leaving restores their previous states.

    Args:
        *parts: values from which every seed is derived.

    Example:
        >>> stream = RandomStream(0, "data")
        >>> before = torch.get_rng_state()
        >>> with stream.at(3):
        ...     first = torch.rand(1)
        >>> torch.equal(before, torch.get_rng_state())
        True
    """

    def __init__(self, *parts: int | str) -> None:
        self.parts = parts
        self.drew = False
        """Whether the code in the last watched `with` block drew random numbers from any generator."""
        self._seed = 0
        self._watch = False
        self._outside: tuple[Any, torch.Tensor, Any] | None = None
        self._numpy: Any = None

    def at(self, *parts: int | str, watch: bool = False) -> RandomStream:
        """Set the seed of the next `with` block, and return this object.

        Args:
            *parts: values from which the seed is derived, in addition to those of the stream.
            watch: whether to find out if the block draws random numbers.
        """
        self._seed = derive_seed(*self.parts, *parts)
        self._watch = watch
        return self

    def __enter__(self) -> RandomStream:
        numpy_generator = None
        if "numpy" in sys.modules:
            numpy = sys.modules["numpy"].random
            # the generator object is exchanged, since copying its state would take 40 us
            numpy_generator = numpy.get_bit_generator()
            self._numpy = self._numpy or numpy.MT19937(0)
            numpy.set_bit_generator(self._numpy)
        self._outside = (random.getstate(), torch.get_rng_state(), numpy_generator)
        seed_generators(self._seed)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._outside is not None
        if self._watch:
            after = _draw()
            seed_generators(self._seed)
            self.drew = after != _draw()
        python, cpu, numpy_generator = self._outside
        self._outside = None
        random.setstate(python)
        torch.set_rng_state(cpu)
        if numpy_generator is not None:
            sys.modules["numpy"].random.set_bit_generator(numpy_generator)


def _draw() -> tuple[Any, ...]:
    """Draw the next number from each generator."""
    numpy = (sys.modules["numpy"].random.random(),) if "numpy" in sys.modules else ()
    return random.random(), torch.rand((), dtype=torch.float64).item(), *numpy


class SeededBatch(list[Any]):
    """Indices of a batch, with the seed for loading it.

    Args:
        indices: the indices.
        seed: seed of the batch; with `per_sample`, the seed from which the seed of each sample is derived.
        per_sample: whether to seed each sample by its index.
    """

    __slots__ = ("per_sample", "seed")

    def __init__(self, indices: Sequence[Any] = (), seed: int = 0, per_sample: bool = False) -> None:
        super().__init__(indices)
        self.seed = seed
        self.per_sample = per_sample


class SeededIndex(NamedTuple):
    """Index of a sample with its seed, for a loader that does not form batches."""

    index: Any
    seed: int
    per_sample: bool


class SeededDataset:
    """Wrapper of a data set that seeds the random generators before loading, with the seeds that come with the indices.

    Args:
        dataset: a map-style data set.
        restore: whether to restore the process's generators after each batch, as the main process needs.
    """

    def __init__(self, dataset: Any, restore: bool) -> None:
        self.__dict__["_dataset"] = dataset
        self.__dict__["_block"] = RandomStream() if restore else nullcontext()
        self.__dict__["_many"] = getattr(dataset, "__getitems__", None)

    def __getitems__(self, batch: Any) -> Any:
        if not isinstance(batch, SeededBatch):
            return self._load(batch)
        with self._block:
            if batch.per_sample:
                # a stream may leave out bad samples; if it leaves out all, `_load` raises its error for the batch
                load: Any = getattr(self._dataset, "_instep_readable", self._load)
                parts = [self._load_seeded([index], _sample_seed(batch.seed, index), load) for index in batch]
                return [sample for part in parts for sample in part] or self._load(batch)
            return self._load_seeded(batch, batch.seed, self._load)

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, SeededIndex):
            return self._dataset[index]
        key, seed, per_sample = index
        with self._block:
            seed_generators(_sample_seed(seed, key) if per_sample else seed)
            return load_each(self._dataset, [key])[0]

    def _load_seeded(self, indices: Any, seed: int, load: Callable[[Any], Any]) -> Any:
        seed_generators(seed)
        return load(indices)

    def _load(self, indices: Any) -> Any:
        return load_each(self._dataset, indices) if self._many is None else self._many(list(indices))

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)  # a worker_init_fn may set attributes of the data set in its worker

    def __reduce__(self) -> tuple[Any, ...]:
        return SeededDataset, (self._dataset, isinstance(self._block, RandomStream))


def load_each(dataset: Any, indices: Any) -> list[Any]:
    """Load the samples with these indices. If the data set raises an error, the error gets a note with the index."""
    at = None
    try:
        return [dataset[at := index] for index in indices]
    except Exception as error:
        add_note(error, f"The data set raised this for sample {at!r}.")
        raise


def add_note(error: BaseException, text: str) -> None:
    """Add a line to an error's `__notes__`, which Python 3.11 and later show at the end of the traceback."""
    add: Any = getattr(error, "add_note", None)
    if add is not None:
        add(text)
    else:
        with suppress(AttributeError):  # raised if the error's class has __slots__; such an error gets no note
            error.__notes__ = [*getattr(error, "__notes__", ()), text]  # pyright: ignore[reportAttributeAccessIssue]


def _sample_seed(seed: int, index: Any) -> int:
    return derive_seed(seed, index if isinstance(index, int) else repr(index))


def seeded(batches: Iterator[Any], *parts: int | str, first: int, per_sample: bool, single: bool) -> Iterator[Any]:
    """Add a seed to each batch of indices.

    Args:
        batches: index lists, or single indices.
        *parts: values from which the seeds are derived.
        first: the index of the first batch in the epoch.
        per_sample: whether to seed each sample, instead of each batch.
        single: whether `batches` yields single indices.
    """
    whole = derive_seed(*parts)
    for number, indices in enumerate(batches, first):
        seed = whole if per_sample else derive_seed(*parts, number)
        yield SeededIndex(indices, seed, per_sample) if single else SeededBatch(indices, seed, per_sample)
