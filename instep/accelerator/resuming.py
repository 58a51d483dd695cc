"""How a loader continues at the position that `load_state` restored, until the script uses a batch.

After a resume with K finished batches in the epoch, a script either uses the batches that the loader yields, or skips K
batches by itself (`if step < done: continue`, `itertools.islice`). Only a *use* of a batch shows which of the two the
script does. A use is a forward of a prepared model with gradients on, `accelerator.backward`, a step, or a change in
the gradient or value of a parameter that a prepared optimizer owns. Neither `next` nor a forward under `no_grad` is a
use. Until the first use, each pass begins at batch K again. A pass is in one of these states:

- offering, the first state: the pass yields batches K, K+1, ... and keeps a copy of each. After K batches without a use
  the state is "skipped"; if as many batches as allowed are kept before that, it is "repeating";
- repeating: the pass yields a copy of batch K again and again, and reads nothing. After K batches without a use the
  state is "skipped";
- skipped: the script has skipped K batches. The pass yields batch K and the other kept batches, then the later batches;
- straight: the pass yields the next batches in order. An evaluation then gets the batches before K too;
- used: the pass yields the batches after the used one in order.

The first use changes any state to "used". "Offering" changes to "straight" if the script holds all batches that it was
given (it reads ahead), or if a prepared model has evaluated a batch. So no used batch comes again, a batch that the
script skipped for another reason is left out, and a pass in which no batch is used has as many batches as a whole
epoch.

A script that holds several batches at its first use of a batch either reads ahead, or takes all batches of an
accumulation window together. Its calls of `accelerator.backward` show which batches are done. Without these calls, all
batches that it was given count as done, unless the script is always ahead by the same number.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from instep.distributed.nested import iter_leaves, map_leaves
from instep.errors import UsageError
from instep.types import ReadOnly, StateDict
from instep.utils.warn import warn_user

if TYPE_CHECKING:
    from instep.accelerator.loader import AcceleratedLoader
    from instep.data import PreparedLoader

_END = object()
_CONTAINERS = (tuple, list, dict, zip)
# Levels of references from a tensor in a nested batch to a `zip`: part of the batch, batch, tuple of the `zip`, `zip`.
_DEPTH = 4
_ADVICE = (
    "Leave the place to load_state, and take the script's own skipping out; or skip with "
    "accelerator.skip_first_batches(loader, n), which counts from the epoch's beginning"
)


class RestoredPlace:
    """Position in a loader's data that `load_state` restored: an epoch, and a number of finished batches.

    Args:
        state: saved state of the loader. A save before the first use of a batch writes this state again.
        epoch: epoch that the next pass continues or begins.
        batches: how many batches of the epoch are done, as counted by the processes that did them. Another number of
            processes may have had more or fewer samples per batch.
    """

    def __init__(self, state: StateDict, epoch: int, batches: int) -> None:
        self.state, self.epoch, self.batches = state, epoch, batches
        self.held: int = state.get("held", 1)
        """Number of batches that the script held when it first used one, in the run that saved the state."""

    def go(self, source: PreparedLoader) -> None:
        """Move the source to this position, from which an iteration over the data may have moved it away."""
        if self.state["source"] is not None:
            source.load_state_dict(self.state["source"])
        source.set_epoch(self.epoch)

    def next_epoch(self) -> RestoredPlace:
        """Return the position at the beginning of the next epoch."""
        epoch = self.epoch + 1
        return RestoredPlace({**self.state, "epoch": epoch, "source": None}, epoch, 0)


class Uses:
    """Reports the use of batches, by a forward or backward, to the passes that wait for their first use.

    Args:
        models: function that returns the prepared models with their wrappers, as the script calls them.
        parameters: function that returns the parameters of the prepared optimizers.
        loaders: function that returns the prepared loaders.

    Attributes:
        waits: whether `backward` must be reported.
        block: inside an `accumulate` block, the ids of its models, and whether a backward has run; later backwards in
            the block belong to the same batch. None outside of `accumulate`.
    """

    def __init__(
        self,
        models: Callable[[], Iterable[nn.Module]],
        parameters: Callable[[], Iterable[Tensor]],
        loaders: Callable[[], Iterable[AcceleratedLoader]],
    ) -> None:
        self.models, self._parameters, self._loaders = models, parameters, loaders
        self.waits = True
        self.block: tuple[tuple[int, ...], bool] | None = None

    def report_backward(self) -> None:
        """Report a backward on the current batches."""
        openings = self._openings()
        models, again = self.block or ((), False)
        for opening in openings:
            opening.use()
            if not again:
                opening.count_backward(models)
        self.block = self.block and (models, True)
        self.waits = bool(openings)

    def report_forward(self, active: AcceleratedLoader | None) -> None:
        """Report a forward of a prepared model on the current batches."""
        if torch.is_grad_enabled():
            for opening in self._openings():
                opening.use()
        elif active is not None and active.opening is not None:
            active.opening.evaluates = True

    def forget_beginnings(self) -> None:
        """Drop the restored positions of loaders that are not being iterated, if they are the beginning of an epoch.

        Called at the first use of a batch after `load_state`, since the training has then begun.
        """
        for loader in self._loaders():
            loader.forget_beginning()

    def marks(self) -> list[Any]:
        """Return values that change when a parameter or its gradient changes."""
        trained = [p for p in self._parameters() if p.requires_grad]
        return [(p._version, None if p.grad is None else (id(p.grad), p.grad._version)) for p in trained]

    def _openings(self) -> list[Opening]:
        return [loader.opening for loader in self._loaders() if loader.opening is not None]


class Opening:
    """Record of the first batches of a pass, until the script uses one of them.

    Args:
        loader: loader of the pass.
        uses: object that reports uses.
        raw: batches of the pass, before they are moved to the device.
        place: the restored position, or None.
        goes_on: whether the pass begins at the restored position, and not at a batch that the script has chosen.
        offers: whether the script may skip the finished batches itself.

    Attributes:
        rest: the batches after the first ones, on the device.
        used: whether one of the first batches was used.
        evaluates: whether a prepared model has run without gradients on a batch of the pass.
        held: how many batches the script held when it first used one.
        always_ahead: whether the script reads ahead, so that it always holds `held` - 1 batches that it has not used;
            None if this is not known yet.
        outlasts: whether the pass has ended, and the script still holds batches that it may use.
    """

    def __init__(
        self,
        loader: AcceleratedLoader,
        uses: Uses,
        raw: Iterator[Any],
        place: RestoredPlace | None,
        goes_on: bool,
        offers: bool,
    ) -> None:
        self.rest = loader.moved(raw)
        self.used = self.evaluates = False
        self.held = 1
        self.always_ahead: bool | None = None
        self.outlasts = False
        self._loader, self._uses, self._raw, self._place = loader, uses, raw, place
        self._goes_on = goes_on and place is not None and place.batches > 0
        self._offers = offers and self._goes_on
        self._warns = offers and goes_on and place is not None
        self._given: list[list[weakref.ref[Any]]] = []
        # batches that were yielded before the script had skipped all finished batches
        self._before: list[list[weakref.ref[Any]]] = []
        self._skipped = False
        self._hooks: list[Any] = []
        self._marks: list[Any] = []
        self._asked = 0  # how many batches the script has requested since the first use
        self._group = 1  # number of batches that the script got between two uses
        # ids of models that are trained together -> number of their backward calls on the batches that `_group` counts
        self._backwards_of = Counter[tuple[int, ...]]()
        self._sums = False  # whether one backward covers several batches
        uses.waits = True
        if place is not None:
            self._marks = uses.marks()
            self._watch_models()

    def _watch_models(self) -> None:
        watch = _ForwardWatch(self._loader, self._uses)
        for model in {id(model): model for model in self._uses.models()}.values():
            if not isinstance(model, torch.jit.ScriptModule):  # a ScriptModule accepts no hooks
                self._hooks.append(model.register_forward_pre_hook(watch))

    def stop_watching(self) -> None:
        """Remove the hooks from the models."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    is_empty: ReadOnly[bool] = ReadOnly(lambda o: not o._given, "Whether the pass has yielded no batch.")

    # ---- uses

    def look(self) -> bool:
        """Check whether the script has used a batch without a report; return True if a batch has been used."""
        loader = self._loader
        if not self.used and loader.opening is self:
            changed = self._place is not None and self._uses.marks() != self._marks
            if changed or loader.batches_done is not None:
                self.use()
        return self.used

    def use(self) -> None:
        """Record the first use of a batch.

        Raises:
            UsageError: a batch was yielded twice, and the script holds both copies.
        """
        if self.used:
            return
        self.used = True
        self.stop_watching()
        self.held = self._group = max(1, sum(map(_is_alive, self._given)))
        place = self._place
        if place is None:
            return
        self._loader.use_up(place)
        self._uses.forget_beginnings()
        if any(map(_is_alive, self._before)):
            gc.collect()  # a reference cycle may still hold batches that the script has dropped
        if any(map(_is_held, self._before)):
            raise UsageError(
                f"after load_state the script asked for {len(self._before) + len(self._given)} batches before it used "
                f"one. {place.batches} were done when the state was saved: it may have passed over those, so they were "
                f"given again; but it holds some of the first ones still. {_ADVICE}. A script that reads ahead needs "
                "DataLoaderConfiguration(restore_position=True)."
            )
        passed = sum(not _is_alive(batch) for batch in self._given[:-1])
        passed += len(self._before) if passed else 0
        if passed and self._warns:
            warn_user(
                f"after load_state the script passed over {passed} batches before it used one, and {place.batches} "
                f"batches of the epoch were done when the state was saved. {_ADVICE}"
            )

    def count_backward(self, models: tuple[int, ...]) -> None:
        """Count a backward of the models with these ids, which are trained together.

        Each batch that the script uses has one such backward.
        """
        self._backwards_of[models] += 1

    _backwards: ReadOnly[int] = ReadOnly(lambda o: max(o._backwards_of.values(), default=0))

    def end(self) -> None:
        """Warn if the script has skipped all batches of the pass."""
        self.stop_watching()
        if self._offers and not self.used and not self.evaluates and self._given and self._place is not None:
            warn_user(
                f"after load_state the script passed over all {len(self._before) + len(self._given)} batches of a "
                f"pass, and {self._place.batches} batches of the epoch were done when the state was saved: the next "
                f"pass begins there again. {_ADVICE}"
            )

    @property
    def ahead(self) -> int:
        """Number of batches that the script holds and has not used."""
        always = self.always_ahead and not self.outlasts
        # `always_ahead` is not known yet, so decide by whether the script has used the last batch that it got, or by
        # the previous pass
        if always is None:
            always = self._has_used if self._asked else self._loader.reads_ahead
        if always:
            return self.held - 1
        return max(0, self._group - self._backwards) if self._backwards and not self._sums else 0

    @property
    def is_unsure(self) -> bool:
        """Whether the script holds several batches, and it is unknown which of them it has used."""
        return self.used and self._group > 1 and not self._backwards and self._has_used and not self.ahead

    @property
    def _has_used(self) -> bool:
        """Whether the script has used a batch since it got the last one."""
        return self._loader.batches_done == self._loader.batch_idx + 1

    def _ask(self) -> bool:
        """Record that the script requests the next batch; return True if it has already used a batch of this pass."""
        if not self.look():
            return False
        self._asked += 1
        # The second request after the first use shows the kind of the script. A script that reads ahead has used a
        # batch since the request before. A script that takes several batches together has not.
        if self._asked == 2 and self.held > 1:
            self.always_ahead = self._has_used and not _is_alive(self._given[0])
        if not self._has_used:
            self._group += 1
            return True
        self._sums = self._sums or (self.always_ahead is False and 0 < self._backwards < self._group)
        self._group = 1
        self._backwards_of.clear()
        return True

    # ---- batches

    def batches(self) -> Iterator[tuple[int, Any]]:
        """Yield the first batches of the pass with their numbers. The later batches are in `rest`."""
        source = self._loader.source
        number = source.first_batch
        if self._offers:
            kept, number = yield from self._offer(number)
            while kept:
                raw, source.share = kept.pop(0)
                batch = self._give(self._moved(raw))
                del raw  # do not keep the batch in host memory while the script works with the moved batch
                yield number, batch
                number += 1
                self._ask()
        most = self._loader.most_kept
        while not self._is_over and (self.used or self._place is not None or len(self._given) < most):
            batch = next(self.rest, _END)
            if batch is _END:
                break
            yield number, self._give(batch)
            number += 1
            self._ask()
        else:
            return
        if self.used:
            # the last request found no batch, so it does not count
            self._group = self.held - 1 if self.always_ahead else self._group - 1
            self.outlasts = self.held > 1 and self._group > 0
        elif self._place is None:
            return
        elif self.evaluates and self._goes_on and not self._skipped:
            yield from self._before_place()
        else:
            self.outlasts = self._given != [] and self._reads_ahead(len(self._given))

    def _offer(self, first: int) -> Generator[tuple[int, Any], None, tuple[list[Any], int]]:
        """Yield copies of the first batches as long as the script may skip them.

        Return the kept batches that come next, and the index of the first of these batches.
        """
        assert self._place is not None
        kept: list[tuple[Any, Any]] = []
        source, most, passed = self._loader.source, self._loader.most_kept, 0
        while passed < self._place.batches:
            if passed == len(kept):
                raw = next(self._raw, _END) if passed < most else _END
                if raw is not _END:
                    kept.append((raw, source.share))
                elif not kept or self._reads_ahead(passed):  # no batch is left, or the script holds those that were
                    return [], first + passed
            at = passed if passed < len(kept) else 0
            raw, source.share = kept[at]
            yield first + at, self._give(self._moved(map_leaves(_copied, raw)))
            if self._ask() or self.evaluates:
                return kept[at + 1 :], first + at + 1
            passed += 1
        if self._reads_ahead(passed):
            return kept[passed:], first + passed
        self._skipped, self._before, self._given = True, self._given, []
        return kept, first

    def _before_place(self) -> Iterator[tuple[int, Any]]:
        """Yield the batches of the epoch before the restored position, since an evaluation needs all batches."""
        source = self._loader.source
        source.start_before()
        for number, batch in enumerate(self._loader.moved(iter(source))):
            yield number, self._give(batch)
            self._ask()

    @property
    def _is_over(self) -> bool:
        return self.used and (self.held == 1 or (self.always_ahead is True and self.held == 2))

    def _reads_ahead(self, passed: int) -> bool:
        """Return True if the script still holds the batches that it got, and therefore will probably use them."""
        assert self._place is not None
        if self._place.held > 1:
            return passed < self._place.held
        if passed < 2 or not all(map(_is_alive, self._given[:-1])):
            return False
        gc.collect()  # a reference cycle may still hold batches that the script has dropped
        return all(map(_is_held, self._given[:-1]))

    def _moved(self, raw: Any) -> Any:
        return next(self._loader.moved(iter([raw])))

    def _give(self, batch: Any) -> Any:
        if not self.used:
            # Make new tensor objects: if the data set itself stores its batches, the original objects stay alive after
            # the script has dropped them.
            batch = map_leaves(_alias, batch)
            self._given.append([weakref.ref(leaf) for _, leaf in iter_leaves(batch) if isinstance(leaf, Tensor)])
        return batch


class _ForwardWatch:
    """Forward pre-hook of prepared models that reports each forward.

    A pickled or copied model gets a hook that does nothing.
    """

    def __init__(self, loader: AcceleratedLoader, uses: Uses) -> None:
        self._loader, self._uses = loader, uses

    def __call__(self, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():  # torch.compile must not include this call in the graph
            self._uses.report_forward(self._loader.active)

    def __reduce__(self) -> Any:
        return _no_watch, ()


def _no_watch() -> Callable[..., None]:
    return _ignore


def _ignore(module: nn.Module, args: Any) -> None:
    """Do nothing. A copied model has this function as its forward hook."""


def most_kept(num_steps: int, held: int) -> int:
    """Return the largest number of batches that a resumed pass keeps, since the script may skip the finished ones.

    A pass without a restored position records at most this many batches, until the script uses one of them.

    Args:
        num_steps: number of batches in an accumulation window.
        held: how many batches the script held when it first used one.
    """
    return max(held, 2 * num_steps + 2)


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _alias(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) and not leaf.requires_grad else leaf


def _is_alive(batch: list[weakref.ref[Any]]) -> bool:
    return any(leaf() is not None for leaf in batch)


def _is_held(batch: list[weakref.ref[Any]]) -> bool:
    """Return True if the script itself holds a batch, and not only an iterator such as `enumerate(zip(a, b))`."""
    held = [leaf for leaf in (ref() for ref in batch) if leaf is not None]
    holders: list[Any] = held
    for _ in range(_DEPTH if held else 0):
        holders = [one for one in gc.get_referrers(*holders) if type(one) in _CONTAINERS and one is not holders]
        if any(type(one) is zip for one in holders):
            return any(type(one) is not zip for one in holders)
    return bool(held)
