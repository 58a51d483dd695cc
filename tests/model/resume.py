"""Resume: where a run that was broken off goes on. The parts put together are the whole."""

from __future__ import annotations

from tests.model.trace import Event

BEFORE = "on_train_start"


def broken_off(whole: list[Event], at: int) -> list[Event]:
    """Return what is seen of a run up to an event that raises an exception."""
    return whole[: at + 1]


def resumed(whole: list[Event], at: int) -> list[Event]:
    """Return what is seen of a run that is started again with `ckpt_path="auto"` after it was broken off.

    It goes on behind its newest checkpoint, as if it had not been broken off. Without one it begins again.

    Args:
        whole: the events of the run that is not broken off.
        at: the number of the event that has raised an exception.
    """
    saves = [number for number, event in enumerate(whole[: at + 1]) if event.owner == "S"]
    if not saves:
        return whole
    saved, rest = whole[saves[-1]], whole[saves[-1] + 1 :]
    if rest[0].name == "on_validation_model_train":  # the validation was over, but for this
        rest = rest[1:]
    # The set-up is as before, but nothing is checked again: there is no sanity check.
    begin = [
        event._replace(step=saved.step, epoch=saved.epoch + saved.args[1], metrics=saved.metrics)
        for event in whole[: 1 + max(n for n, event in enumerate(whole) if event.name == BEFORE)]
        if event.owner in "CM"
    ]
    start = next((n for n, event in enumerate(begin) if event.name == "on_sanity_check_start"), None)
    if start is not None:
        begin = begin[:start] + [event for event in begin[start:] if event.name == BEFORE]
    within_epoch = not saved.args[1]
    if within_epoch:  # the epoch's first hook is called again
        begin += [
            Event(owner, "on_train_epoch_start", (), saved.step, saved.epoch, saved.metrics) for owner in ("C", "M")
        ]
    return begin + rest
