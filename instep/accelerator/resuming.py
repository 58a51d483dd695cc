"""The place that `load_state` restored in a loader, until the script uses it.

After K batches of an epoch a script either goes on with what the loader gives, or passes over K batches by itself
(`if step < done: continue`, `itertools.islice`). Only a *use* shows which: a forward of a prepared model with gradients
on, `accelerator.backward`, a step, or another gradient or value of a parameter that a prepared optimizer owns. Neither
`next` nor a forward under `no_grad` is one. Until the first use each pass begins at K again:

| state     | the next batch                              | what ends it                                             |
|-----------|---------------------------------------------|----------------------------------------------------------|
| offering  | K, K+1, ... in order, of which each is kept | K passed over: skipped. Enough kept: repeating           |
| repeating | a copy of K: nothing is read                | K passed over: skipped                                   |
| skipped   | K, then what was kept, then the others      | the end of the pass                                      |
| straight  | the next in order                           | the end; of an evaluation: then come those before K      |
| used      | after the used one the next in order        | the end of the pass                                      |

The first use makes any of them "used". Offering becomes straight where the script holds all that it was given (it
reads ahead), or a prepared model has evaluated a batch. So no used batch comes again, a batch that was passed over for
another reason is left out, and an unused pass has as many batches as a whole one.

A script that holds several batches at its first use reads ahead, or takes a window's batches at once. A pass of it
counts as done what was used of them, by its calls of `accelerator.backward`; without these what it was given, unless it
is always ahead by as many.
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
from instep.types import StateDict
from instep.utils.warn import warn_user

if TYPE_CHECKING:
    from instep.accelerator.loader import AcceleratedLoader
    from instep.data import PreparedLoader

_END = object()
_CONTAINERS = (tuple, list, dict, zip)
_DEPTH = 4  # from a tensor over its batch and the tuple of a zip to the zip itself
_ADVICE = (
    "Leave the place to load_state, and take the script's own skipping out; or skip with "
    "accelerator.skip_first_batches(loader, n), which counts from the epoch's beginning"
)


class RestoredPlace:
    """A loader's place as `load_state` restored it.

    Args:
        state: the loader's state, which a save before the first use writes again.
        epoch: the epoch that the next pass goes on with, or begins.
        batches: how many of its batches are done, in the count of those who did them: another number of processes may
            have taken more or fewer samples at once.
    """

    def __init__(self, state: StateDict, epoch: int, batches: int) -> None:
        self.state, self.epoch, self.batches = state, epoch, batches
        self.held: int = state.get("held", 1)
        """How many batches the script held at its first use, in the run that saved the state."""
        self._left = False  # a pass has moved the source from here

    def go(self, source: PreparedLoader) -> None:
        """Advance the source to this place."""
        if self._left and self.state["source"] is not None:
            source.load_state_dict(self.state["source"])
        self._left = True
        source.set_epoch(self.epoch)

    def next_epoch(self) -> RestoredPlace:
        """Return the place where the next epoch begins."""
        epoch = self.epoch + 1
        return RestoredPlace({**self.state, "epoch": epoch, "source": None}, epoch, 0)


class Uses:
    """Uses of a run's batches, reported to the passes that wait for their first one.

    Args:
        models: returns the prepared models, as they are called.
        parameters: returns the parameters of the prepared optimizers.
        loaders: returns the prepared loaders.

    Attributes:
        waits: whether `backward` has to be reported.
        block: under `accumulate` the ids of its models, and whether a backward was there; others there are of the same
            batch. None: elsewhere.
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
        """Report a backward on the batches in hand."""
        openings = self._openings()
        models, again = self.block or ((), False)
        for opening in openings:
            opening.use()
            if not again:
                opening.count_backward(models)
        self.block = self.block and (models, True)
        self.waits = bool(openings)

    def report_forward(self, active: AcceleratedLoader | None) -> None:
        """Report a forward of a prepared model on the batches in hand."""
        if torch.is_grad_enabled():
            for opening in self._openings():
                opening.use()
        elif active is not None and active.opening is not None:
            active.opening.evaluates = True

    def forget_beginnings(self) -> None:
        """Forget places at an epoch's beginning of the loaders that do not run: the training has begun."""
        for loader in self._loaders():
            loader.forget_beginning()

    def marks(self) -> list[Any]:
        """Return what changes when a parameter or its gradient does."""
        trained = [p for p in self._parameters() if p.requires_grad]
        return [(p._version, None if p.grad is None else (id(p.grad), p.grad._version)) for p in trained]

    def _openings(self) -> list[Opening]:
        return [loader.opening for loader in self._loaders() if loader.opening is not None]


class Opening:
    """The first batches of a pass, until one of them is used.

    Args:
        loader: whose pass it is.
        uses: what reports uses.
        raw: the pass's batches, before they are moved to the device.
        place: the restored place; None where there is none.
        goes_on: whether the pass begins there, and not where the script says.
        offers: whether the script may pass over what is done.

    Attributes:
        rest: the batches after these, on the device.
        used: whether one was used.
        evaluates: whether a prepared model has computed without gradients on a batch of the pass.
        held: how many batches the script held at the first use.
        always_ahead: whether it reads ahead, by one batch less than it held; None as long as that is not known.
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
        self._before: list[list[weakref.ref[Any]]] = []  # batches given before all finished ones were passed over
        self._skipped = False
        self._hooks: list[Any] = []
        self._marks: list[Any] = []
        self._asked = 0  # how often the script has asked for a batch since the first use
        self._group = 1  # batches that it was given between two uses
        self._backwards_of = Counter[tuple[int, ...]]()  # since it was given them; each of several models has its own
        self._sums = False  # one backward is for several of them
        uses.waits = True
        if place is not None:
            self._marks = uses.marks()
            self._watch_models()

    def _watch_models(self) -> None:
        watch = _ForwardWatch(self._loader, self._uses)
        for model in {id(model): model for model in self._uses.models()}.values():
            if not isinstance(model, torch.jit.ScriptModule):  # it takes no hooks
                self._hooks.append(model.register_forward_pre_hook(watch))

    def stop_watching(self) -> None:
        """Take the hooks off the models."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @property
    def is_empty(self) -> bool:
        """Whether the pass has given nothing."""
        return not self._given

    # ---- uses

    def look(self) -> bool:
        """Look for a use that nothing has reported; return whether there was one."""
        loader = self._loader
        if not self.used and loader.opening is self:
            changed = self._place is not None and self._uses.marks() != self._marks
            if changed or loader.batches_done is not None:
                self.use()
        return self.used

    def use(self) -> None:
        """Use the batch in hand, for the first time.

        Raises:
            UsageError: a batch was given twice, and the script holds both.
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
            gc.collect()  # a cycle of references may hold the batches
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
        """Count a backward of some models, which have one for each batch that was used."""
        self._backwards_of[models] += 1

    @property
    def _backwards(self) -> int:
        return max(self._backwards_of.values(), default=0)

    def end(self) -> None:
        """Warn where a whole pass was passed over."""
        self.stop_watching()
        if self._offers and not self.used and not self.evaluates and self._given and self._place is not None:
            warn_user(
                f"after load_state the script passed over all {len(self._before) + len(self._given)} batches of a "
                f"pass, and {self._place.batches} batches of the epoch were done when the state was saved: the next "
                f"pass begins there again. {_ADVICE}"
            )

    @property
    def ahead(self) -> int:
        """How many batches the script holds that it has not used."""
        always = self.always_ahead and not self.outlasts
        if always is None:  # as in the pass before; or it was given one, and used one
            always = self._has_used if self._asked else self._loader.reads_ahead
        if always:
            return self.held - 1
        return max(0, self._group - self._backwards) if self._backwards and not self._sums else 0

    @property
    def is_unsure(self) -> bool:
        """Whether the script holds several batches, and nobody knows which ones it has used."""
        return self.used and self._group > 1 and not self._backwards and self._has_used and not self.ahead

    @property
    def _has_used(self) -> bool:
        """Whether the script has used something since it was given the last batch."""
        return self._loader.batches_done == self._loader.batch_idx + 1

    def _ask(self) -> bool:
        """Take note that the script asks for the next batch; return whether it has used one."""
        if not self.look():
            return False
        self._asked += 1
        if self._asked == 2 and self.held > 1:  # where it takes several at once, this one was given and not used
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
        """Yield the first batches with their numbers; the others are in `rest`."""
        source = self._loader.source
        number = source.first_batch
        if self._offers:
            kept, number = yield from self._offer(number)
            while kept:
                raw, source.share = kept.pop(0)
                batch = self._give(self._moved(raw))
                del raw  # a batch that the script passes over is kept by nobody
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
            self._group = self.held - 1 if self.always_ahead else self._group - 1  # this one was not given
            self.outlasts = self.held > 1 and self._group > 0
        elif self._place is None:
            return
        elif self.evaluates and self._goes_on and not self._skipped:
            yield from self._before_place()
        else:
            self.outlasts = self._given != [] and self._reads_ahead(len(self._given))

    def _offer(self, first: int) -> Generator[tuple[int, Any], None, tuple[list[Any], int]]:
        """Yield batches that the script may pass over; return the later batches, and the first one's number."""
        assert self._place is not None
        kept: list[tuple[Any, Any]] = []
        source, most, passed = self._loader.source, self._loader.most_kept, 0
        while passed < self._place.batches:
            if passed == len(kept):
                raw = next(self._raw, _END) if passed < most else _END
                if raw is not _END:
                    kept.append((raw, source.share))
                elif self._reads_ahead(passed):
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
        """Yield the epoch's batches before the place: an evaluation sees them all."""
        source = self._loader.source
        source.start_before()
        for number, batch in enumerate(self._loader.moved(iter(source))):
            yield number, self._give(batch)
            self._ask()

    @property
    def _is_over(self) -> bool:
        return self.used and (self.held == 1 or (self.always_ahead is True and self.held == 2))

    def _reads_ahead(self, passed: int) -> bool:
        """Return whether the script holds what it was given, and will use it."""
        assert self._place is not None
        if self._place.held > 1:
            return passed < self._place.held
        if passed < 2 or not all(map(_is_alive, self._given[:-1])):
            return False
        gc.collect()  # a cycle of references may hold the batches
        return all(map(_is_held, self._given[:-1]))

    def _moved(self, raw: Any) -> Any:
        return next(self._loader.moved(iter([raw])))

    def _give(self, batch: Any) -> Any:
        if not self.used:
            batch = map_leaves(_alias, batch)  # data that keeps its batches does not hold this one
            self._given.append([weakref.ref(leaf) for _, leaf in iter_leaves(batch) if isinstance(leaf, Tensor)])
        return batch


class _ForwardWatch:
    """Forward pre-hook of the prepared models; a copy of a model gets one that does nothing."""

    def __init__(self, loader: AcceleratedLoader, uses: Uses) -> None:
        self._loader, self._uses = loader, uses

    def __call__(self, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():  # a compiled branch would stay
            self._uses.report_forward(self._loader.active)

    def __reduce__(self) -> Any:
        return _no_watch, ()


def _no_watch() -> Callable[..., None]:
    return _ignore


def _ignore(module: nn.Module, args: Any) -> None:
    """Do nothing."""


def most_kept(num_steps: int, held: int) -> int:
    """Return how many batches are kept until the script either skips the finished ones or does not."""
    return max(held, 2 * num_steps + 2)


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _alias(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) and not leaf.requires_grad else leaf


def _is_alive(batch: list[weakref.ref[Any]]) -> bool:
    return any(leaf() is not None for leaf in batch)


def _is_held(batch: list[weakref.ref[Any]]) -> bool:
    """Return True if the script holds a batch; `enumerate(zip(a, b))` alone keeps its first one to its end."""
    held = [leaf for leaf in (ref() for ref in batch) if leaf is not None]
    holders: list[Any] = held
    for _ in range(_DEPTH if held else 0):
        holders = [one for one in gc.get_referrers(*holders) if type(one) in _CONTAINERS and one is not holders]
        if any(type(one) is zip for one in holders):
            return any(type(one) is not zip for one in holders)
    return bool(held)
