"""The Accelerator's loop: a training that a user writes by hand, its states, and how scripts go on from them.

A script is started several times, and killed each time but the last. `run` returns what is seen of all starts.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from tests.model.data import Batch, Data, Dealt, Order
from tests.model.optimization import RATE, sample_weights

WAYS = ("nothing", "range", "skip_first_batches", "continue", "islice", "count")
"""How a script goes on after `load_state`. It has saved its own counters: the epoch, and how many batches it has done.

"nothing": `for epoch in range(loader.next_epoch, epochs)`, and nothing is skipped.
"range": `for epoch in range(its epoch, epochs)`, and nothing is skipped.
"skip_first_batches": its first epoch goes over `accelerator.skip_first_batches(loader, done)`.
"continue": `if epoch == its epoch and index < done: continue`.
"islice": its first epoch goes over `islice(loader, done, None)`.
"count": it begins at epoch 0, and passes over as many batches as were done in the whole run.
"""


@dataclass(frozen=True)
class Start:
    """One start of the script.

    Attributes:
        batches: it is killed after training on so many; None: it comes to its end.
        load: None: load the newest state. A number: go back to the state that was saved as the so manieth, if it is
            still there. Without any state the script begins anew.
        way: one of WAYS.
        before: what it does with the loader before it trains: "peek" takes one batch, "evaluate" goes over all of them
            without gradients, "evaluate_rest" leaves out those that are done, by `skip_first_batches`, and "save" saves
            the state again.
        unaware: where a state was saved at the end of an epoch, its counters name this epoch and all its batches; else
            they name the next epoch.
        ranks: how many there are.
    """

    batches: int | None = None
    load: int | None = None
    way: str = "nothing"
    before: tuple[str, ...] = ()
    unaware: bool = False
    ranks: int = 1


@dataclass(frozen=True)
class Loop:
    """A script.

    Attributes:
        starts: how it is started.
        train: the training data.
        val: data that is evaluated; None: there is none.
        epochs: how many it trains.
        accumulate: `gradient_accumulation_steps`.
        by_hand: it counts the batches of a window itself, without `accelerator.accumulate`.
        num_items: it gives `backward` the number of samples.
        zero_first: it calls `zero_grad` at the beginning of each batch, not at the end.
        scheduler: "halves" halves the rate when it steps, "steps" is a StepLR that halves it at each second step, and
            "plateau" a ReduceLROnPlateau of patience 1, whose value stays the same; "cycle" is a OneCycleLR of
            `cycle_steps`; None: none.
        cycle_steps: after so many steps the OneCycleLR has its last rate, and keeps it.
        steps_by_epoch: it calls `scheduler.step()` after each epoch, not after each batch.
        step_scheduler_with_optimizer: as the Accelerator takes it.
        adjust_scheduler: as the GradientAccumulationPlugin takes it.
        val_every: evaluate after so many batches of an epoch; None: after each epoch.
        val_breaks: leave an evaluation within an epoch after its first batch.
        sync_with_dataloader: as the GradientAccumulationPlugin takes it: False lets a window go on in the next epoch.
        sync_each_batch: the same. It changes nothing that is seen.
        second: a second model, with an optimizer of its own, trains on the same batches: under the "same" accumulate,
            or in an "own" one. A batch counts once. None: there is none.
        ahead: the script asks for the next batch before it trains on one. It changes nothing that is seen.
        save_every: save after so many batches of an epoch; None: not within epochs.
        save_at_steps: of these save only where gradients were synchronized.
        save_epochs: save after each epoch.
        explicit: it gives `save_state` and `load_state` always the same folder, in place of automatic names. A number
            is added, and nothing is deleted.
        total_limit: as ProjectConfiguration takes it.
        restore_position: as DataLoaderConfiguration takes it.
        sets_epoch: it calls `loader.set_epoch(epoch)` before each epoch.
        split_batches: as DataLoaderConfiguration takes it, like the next one.
        dispatch_batches: True reads on rank 0; None what is no map-style data; False has each rank read its part.
        even_batches: the same. False: a rank that has no samples left ends before the others, and repeats no batch.
            They train under `join_uneven_inputs`, where it waits, and takes over what it has missed.
    """

    starts: tuple[Start, ...] = (Start(),)
    train: Data = field(default_factory=lambda: Data(6))
    val: Data | None = None
    epochs: int = 2
    accumulate: int = 1
    by_hand: bool = False
    num_items: bool = False
    zero_first: bool = False
    scheduler: str | None = None
    cycle_steps: int = 4
    steps_by_epoch: bool = False
    step_scheduler_with_optimizer: bool = True
    adjust_scheduler: bool = False
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False
    second: str | None = None
    ahead: bool = False
    val_every: int | None = None
    val_breaks: bool = False
    save_every: int | None = None
    save_at_steps: bool = True
    save_epochs: bool = False
    explicit: bool = False
    total_limit: int | None = None
    restore_position: bool | str = "auto"
    sets_epoch: bool = False
    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True


class Seen(NamedTuple):
    """Something that is seen of a script.

    Attributes:
        name: "start", "loaded", "peeked", "evaluated", "batch", "update", "second" for the update of a second model,
            "done", "gathered", "saved" or "warned".
        args: samples, weights, rates and counters.
    """

    name: str
    args: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.name}{self.args}"


class Place(NamedTuple):
    """Where the loader of a run stands: the epoch, how many of its batches are done, and how many samples.

    Batches stay counted as they were done: by another number of ranks each may have had more or fewer samples.
    """

    epoch: int
    done: int = 0
    samples: int = 0


class State(NamedTuple):
    """What a state holds.

    Attributes:
        number: it was saved as the so manieth of all starts.
        place: where the loader stands.
        epoch: the script's counter of epochs.
        done: the script's counter of batches in this epoch.
        at_end: this epoch has no more batches.
        total: the script's counter of batches in the whole run.
        step: optimizer steps.
        rate_steps: steps of the scheduler.
        ranks: of the start that saved it.
        run: which run it belongs to. One that goes back to a state before its newest step is a new run from there.
        origins: the runs that this one went on from, and up to which step they belong to it.
    """

    number: int
    place: Place
    epoch: int
    done: int
    at_end: bool
    total: int
    step: int
    rate_steps: int
    ranks: int
    run: int
    origins: tuple[tuple[int, int], ...]


class Killed(Exception):
    """The end of a start."""


def run(case: Loop, order: Order | None = None, rank: int = 0) -> list[Seen]:
    """Return all that is seen of all starts.

    Args:
        case: the script.
        order: the order of the training samples where they are shuffled.
        rank: on which it is seen.
    """
    folder: dict[int, State] = {}
    saves: list[int] = []
    seen: list[Seen] = []
    for start in case.starts:
        mine = rank < start.ranks  # else another rank's view is not kept
        this = Run(
            case,
            start,
            order or case.train.in_sequence,
            rank if mine else 0,
            folder,
            saves,
            seen if mine else [],
        )
        try:
            this.go()
        except Killed:
            pass
    return seen


@dataclass
class Run:
    """One start.

    Attributes:
        folder: the states that are there, in the order of their saving.
        restored: where `load_state` was. It stays until the script uses a batch: a look at one is no use.
        next_epoch: of the loader. Each pass over it is the next epoch.
        epoch, done, total: the script's counters; `done` are batches of this epoch.
        trained: batches of this start.
        window: the batches of a window that may go on in the next epoch.
    """

    case: Loop
    start: Start
    order: Order
    rank: int
    folder: dict[int, State]
    saves: list[int]
    seen: list[Seen]
    restored: Place | None = None
    place: Place = field(default_factory=lambda: Place(0))
    next_epoch: int = 0
    epoch: int = 0
    done: int = 0
    at_end: bool = False
    total: int = 0
    trained: int = 0
    window: list[Dealt] = field(default_factory=list)
    step: int = 0
    rate_steps: int = 0
    run: int = 0
    origins: tuple[tuple[int, int], ...] = ()

    def note(self, name: str, *args: Any) -> None:
        self.seen.append(Seen(name, args))

    def batches(self, place: Place) -> list[Dealt]:
        """Return the batches of an epoch. Those before a place after another number of ranks have no samples here."""
        done, left = self.parts(place)
        return [*(done if self.is_dealt_alike(place) else [Dealt((), ())] * place.done), *left]

    def parts(self, place: Place) -> tuple[list[Dealt], list[Dealt]]:
        """Return the batches before and after a place. After a state of another number of ranks both are dealt anew."""
        order, data = self.order(place.epoch), self.case.train
        if self.is_dealt_alike(place):
            whole = self.deal(data, order)
            return whole[: place.done], whole[place.done :]
        return self.deal(data, order[: place.samples]), self.deal(data, order[place.samples :])

    def is_dealt_alike(self, place: Place) -> bool:
        """Return whether as many batches have as many samples here as where the state was saved."""
        whole = self.deal(self.case.train, self.order(place.epoch))
        return place.done <= len(whole) and place.samples == count(whole[: place.done])

    def deal(self, data: Data, order: list[int]) -> list[Dealt]:
        """Deal an epoch out to the ranks."""
        ranks, whole = self.start.ranks, data.kind == "list"
        if self.case.split_batches and not whole:
            data = replace(data, batch_size=data.batch_size // ranks)
        if data.kind not in ("map", "batches") and ranks > 1 and self.case.dispatch_batches is False:
            return data.deal(order, ranks, "join")
        if not whole:
            return data.deal_samples(order, ranks)
        batches = data.batches(order)  # rank 0 reads them, and each rank gets one
        steps = [batches[start : start + ranks] for start in range(0, len(batches), ranks)]
        return [
            Dealt((*step, *[step[0]] * (ranks - len(step))), tuple(rank < len(step) for rank in range(ranks)))
            for step in steps
        ]

    # ---- the script

    def go(self) -> None:
        case, start = self.case, self.start
        self.note("start")
        loaded = self.load()
        first, done = self.epoch, self.done
        if self.at_end and not start.unaware:
            first, done = first + 1, 0
        for act in start.before if loaded else ():
            self.look(act)
        begin = {"nothing": self.loader_epoch, "count": 0}.get(start.way, first) if loaded else 0
        to_pass = self.total
        for epoch in range(begin, case.epochs):
            if case.sets_epoch:
                self.set_epoch(epoch)
            self.epoch, self.done, self.at_end = epoch, 0, False
            passes, by_accelerate = 0, False
            if loaded and start.way == "count":
                passes = self.done = min(to_pass, len(self.batches(self.begins_at(0, False))))
                to_pass -= passes
            elif loaded and epoch == first:
                self.done = done
                if start.way in ("skip_first_batches", "continue", "islice"):
                    passes, by_accelerate = done, start.way == "skip_first_batches"
            before = self.trained
            self.train_epoch(*self.begin_pass(passes, by_accelerate))
            if self.trained == before:
                continue
            self.at_end = True
            if case.steps_by_epoch and not (self.window and case.step_scheduler_with_optimizer):
                self.step_scheduler(1)  # not within a window
            if case.val_every is None:
                self.evaluate(breaks=False)
            if case.save_epochs:
                self.save()
        self.note("end", self.step, self.rate)

    def train_epoch(self, place: Place, begin: int, first: int) -> None:
        """Train on the batches of an epoch from `first` on, in a pass that begins at `begin`.

        Windows begin at multiples of their length, or where a pass does; the last one of an epoch may be shorter. They
        are counted as if all samples before had been dealt to this number of ranks.
        """
        case, epoch, batches = self.case, place.epoch, self.batches(place)
        earlier = place.samples - count(batches[: place.done])  # that others have done
        shift = earlier and earlier // (case.train.batch_size * self.start.ranks) - place.done
        opens = max(begin, first - (first + shift) % case.accumulate) if case.sync_with_dataloader else first
        left_out = first - opens
        for index in range(first, len(batches)):
            syncs = (index + 1 + shift) % case.accumulate == 0 or index + 1 == len(batches)
            self.window = [*self.window, batches[index]]
            if not case.sync_with_dataloader:
                syncs = len(self.window) == case.accumulate
            before = len(self.seen)
            self.train_batch(
                epoch, batches[opens : index + 1] if case.sync_with_dataloader else self.window, left_out, syncs
            )
            if not (case.even_batches or batches[index].counts[self.rank]):
                del self.seen[before:]
            if syncs:
                opens, left_out, self.window = index + 1, 0, []
            done = index + 1 if case.by_hand else opens  # an open window is begun again
            self.restored = None
            samples = earlier + count(batches[:done])
            self.place = Place(epoch, done, samples) if done < len(batches) else Place(epoch + 1)
            self.done, self.at_end = self.done + 1, index + 1 == len(batches)
            self.total, self.trained = self.total + 1, self.trained + 1
            if case.val_every is not None and self.done % case.val_every == 0:
                self.evaluate(case.val_breaks)
            if case.save_every is not None and self.done % case.save_every == 0 and (syncs or not case.save_at_steps):
                self.save()
            if self.trained == self.start.batches:
                raise Killed

    def train_batch(self, epoch: int, window: list[Dealt], left_out: int, syncs: bool) -> None:
        """Train on the last batch of a window. Gradients are clipped, and optimizer and scheduler step, at its end.

        A window's first batches that the script has left out still count in the mean, where samples are counted.
        """
        case, trained = self.case, window[left_out:]
        self.note("batch", epoch, self.own(window[-1]), syncs or case.by_hand)
        norm = None
        if syncs:
            weights = weights_by_hand(trained, case.accumulate, case.num_items)
            if not case.by_hand and case.sync_with_dataloader:
                used = {sample for dealt in trained for sample in dealt.samples}
                all_weights = sample_weights(trained if case.num_items else window)
                weights = tuple(pair for pair in all_weights if pair[0] in used)
            self.note("update", weights, self.rate)
            if case.second is not None:
                self.note("second", weights)
            self.step += 1
            norm = round(sum(weight**2 for _, weight in weights) ** 0.5, 3)
        if not case.steps_by_epoch and (syncs or not (case.by_hand or case.step_scheduler_with_optimizer)):
            self.step_scheduler(len(window) if case.adjust_scheduler and case.step_scheduler_with_optimizer else 1)
        self.note("done", self.step, norm)

    def evaluate(self, breaks: bool) -> None:
        """Evaluate: `gather_for_metrics` gives each sample once. So sums of batches add up to that of all samples."""
        val = self.case.val
        if val is not None:
            batches = self.deal(val, val.in_sequence())[: 1 if breaks else None]
            samples = tuple(sample for dealt in batches for sample in dealt.samples)
            self.note("gathered", samples, sum(samples))

    def own(self, dealt: Dealt) -> Batch | None:
        """Return this rank's batch; None for one that does not count, and may be any."""
        return dealt.batches[self.rank] if dealt.counts[self.rank] else None

    def given(self, batches: list[Dealt]) -> tuple[Batch | None, ...]:
        """Return this rank's batches of these: with `even_batches=False` it gets none where it has no samples."""
        return tuple(self.own(dealt) for dealt in batches if self.case.even_batches or dealt.counts[self.rank])

    # ---- the scheduler

    def step_scheduler(self, steps: int) -> None:
        self.rate_steps += steps

    @property
    def rate(self) -> float:
        steps = self.rate_steps
        if self.case.scheduler is None:
            return RATE
        if self.case.scheduler == "halves":
            return round(RATE / 2**steps, 6)
        if self.case.scheduler == "steps":
            return round(RATE / 2 ** (steps // 2), 6)
        if self.case.scheduler == "plateau":  # the first value is the best one
            return round(RATE / 2 ** (max(0, steps - 1) // 2), 6)
        last = self.case.cycle_steps - 1  # up to RATE, and down again; past its end it keeps its last rate
        top, low, steps = (last + 1) / 2 - 1, RATE / 10, min(steps, last)
        if steps <= top:
            return round(low + (RATE - low) * steps / top, 6)
        return round(RATE - (RATE - low / 10) * (steps - top) / (last - top), 6)

    # ---- the loader

    @property
    def loader_epoch(self) -> int:
        """`loader.next_epoch`: the epoch that the next pass begins, or goes on with."""
        return self.next_epoch if self.restored is None else self.restored.epoch

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass this epoch. A restored place in another epoch is given up."""
        if self.restored is None or self.restored.epoch != epoch:
            self.restored, self.place = None, Place(epoch)
        self.next_epoch = epoch

    def begins_at(self, passes: int, by_accelerate: bool) -> Place:
        """Return the place where the next pass begins: the restored one, unless the script goes elsewhere."""
        place = self.restored
        if place is None:
            return Place(self.next_epoch)
        goes_on = passes == place.done if by_accelerate else self.case.restore_position is not False
        return place if goes_on else Place(place.epoch)

    def begin_pass(self, passes: int, by_accelerate: bool) -> tuple[Place, int, int]:
        """Begin a pass over the loader; return its place, the batch it begins at, and the one that is used first.

        Args:
            passes: batches that the script passes over before it uses one.
            by_accelerate: by `skip_first_batches`, which counts from the epoch's beginning.
        """
        this, place, first = self.begins_at(passes, by_accelerate), self.restored, passes
        begin = passes if by_accelerate else 0
        self.next_epoch = this.epoch + 1
        length = len(self.batches(this))
        if place is not None and by_accelerate:
            self.warn_if(passes != place.done)
        elif place is not None and self.case.restore_position == "auto":
            begin, first = place.done, max(passes, place.done)
            self.warn_if(passes > place.done and (place.done > 0 or passes < length))
        elif place is not None and self.case.restore_position is True:
            begin, first = place.done, place.done + passes
        if place is None:
            self.place = Place(this.epoch + 1) if first >= length else Place(this.epoch, first)
        return this, begin, first

    def warn_if(self, condition: bool) -> None:
        """Warn that a script skips another number of batches than were done."""
        if condition:
            self.note("warned")

    def look(self, act: str) -> None:
        """Do something before the training: the place stays."""
        place = self.begins_at(self.done, by_accelerate=act == "evaluate_rest")
        batches = self.batches(place)
        if act == "peek":
            self.note("peeked", self.own(batches[place.done]) if place.done < len(batches) else None)
        elif act == "evaluate":
            done, left = self.parts(place)
            self.note("evaluated", self.given([*left, *done]))
        elif act == "evaluate_rest":
            self.warn_if(self.restored is not None and self.restored.done != self.done)
            self.note("evaluated", self.given(batches[self.done :]))
        else:
            self.save()

    # ---- states

    def save(self) -> None:
        """Save a state. With a limit the oldest of this run are deleted, and none of another."""
        number = len(self.saves)
        self.saves.append(number)
        place = self.place if self.restored is None else self.restored
        counters = (self.epoch, self.done, self.at_end, self.total, self.step, self.rate_steps, self.start.ranks)
        self.folder[number] = State(number, place, *counters, self.run, self.origins)
        if self.case.total_limit is not None and not self.case.explicit:
            own = [number for number, state in self.folder.items() if self.owns(state)]
            for oldest in own[: -self.case.total_limit]:
                del self.folder[oldest]
        self.note("saved", tuple(self.folder))

    def owns(self, state: State) -> bool:
        """Return whether a state belongs to this run, or to what it went on from."""
        return state.run == self.run or any(state.run == run and state.step <= step for run, step in self.origins)

    def load(self) -> bool:
        """Load a state, if there is one: the newest, or the one that is asked for."""
        if not self.folder:
            return False
        state = self.folder.get(-1 if self.start.load is None else self.start.load) or [*self.folder.values()][-1]
        self.restored, self.next_epoch = state.place, state.place.epoch
        if state.ranks != self.start.ranks:
            epoch, done, _ = state.place
            if done and len(self.batches(state.place)) == done:  # with drop_last
                self.restored, self.next_epoch = Place(epoch + 1), epoch + 1
        self.epoch, self.done, self.at_end, self.total = state.epoch, state.done, state.at_end, state.total
        self.step, self.rate_steps = state.step, state.rate_steps
        self.run, self.origins = state.run, state.origins
        if any(later.run == state.run and later.step > state.step for later in self.folder.values()):
            self.run, self.origins = len(self.saves), ((state.run, state.step), *state.origins)
        self.note("loaded", state.number, self.step, self.loader_epoch)
        return True


def count(batches: list[Dealt]) -> int:
    """Return how many samples there are in batches."""
    return sum(len(dealt.samples) for dealt in batches)


def weights_by_hand(window: list[Dealt], accumulate: int, num_items: bool) -> tuple[tuple[int, float], ...]:
    """Return what each sample counts where windows do not end with an epoch: a batch counts as one of a full window.

    With a number of items the mean is over those of all batches. A window over two epochs may have a sample twice.
    """
    weights: dict[int, float] = {}
    for dealt in window:
        for sample in dealt.samples:
            share = 1 / count(window) if num_items else 1 / accumulate / len(dealt.samples)
            weights[sample] = weights.get(sample, 0.0) + share
    return tuple((sample, round(weight, 5)) for sample, weight in sorted(weights.items()))
