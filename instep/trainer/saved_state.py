"""What `trainer.json` must hold, checked once where it is read: a checkpoint may be anybody's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from instep.checkpoint import Reader


def weights_state(reader: Reader) -> dict[str, Any]:
    """What a checkpoint says beside the weights, for a module that takes those alone.

    Raises:
        CheckpointNotFoundError: it has no `trainer.json`.
        CorruptCheckpointError: it does not hold what it must.
    """
    return _checked(reader, full=False)


def full_state(reader: Reader) -> dict[str, Any]:
    """What a checkpoint says of a run that goes on from it; raises like `weights_state`."""
    return _checked(reader, full=True)


def _checked(reader: Reader, full: bool) -> dict[str, Any]:
    # Late: only a run with checkpoints pays for it.
    from instep.checkpoint.edge import reading
    from instep.checkpoint.schema import (
        anything,
        check,
        count,
        flag,
        list_of,
        mapping,
        named,
        none_or,
        text,
    )

    state = reader.state("trainer")
    with reading(reader.path / "trainer.json", "is not the state of a run"):
        needed = {
            **dict.fromkeys(("epoch", "global_step", "world_size"), count),
            **dict.fromkeys(("hyper_parameters", "user"), named),
            "hparams_name": none_or(text),
        }
        if full:
            needed |= {
                **dict.fromkeys(("data_world_size", "seed"), count),
                **dict.fromkeys(("run_id", "strategy"), text),
                **dict.fromkeys(("callbacks", "loggers", "position", "scaler"), mapping),
                "schedulers": list_of(named),
                "scheduler_kinds": list_of(text),
                **dict.fromkeys(("datamodule", "metrics"), anything),
            }
        check(state, needed, "it", {"run_folder": none_or(text), "resumed_with": none_or(named)})
        if full:
            numbers = ("epoch", "batch", "window_batch", "global_step", "earlier_batches", "nonfinite_steps")
            flags = ("validated", "epoch_ended", "skipped_rest")
            kinds = {**dict.fromkeys(numbers, count), **dict.fromkeys(flags, flag)}
            check(state["position"], {}, "its position", kinds)
    return state


def rank_state(reader: Reader, name: str) -> dict[str, Any]:
    """What one rank saved of itself; raises like `weights_state`.

    Args:
        reader: the checkpoint.
        name: "rank-00000" and so on.
    """
    from instep.checkpoint.edge import reading  # late, as above
    from instep.checkpoint.schema import anything, check, count, flag, list_of, mapping, named

    state = reader.state(name)
    with reading(reader.path / f"{name}.json", "is not the state of a rank"):
        needed = {"rng": mapping, "metric_states": named, "data_rank": count, "counts": flag}
        check(state, needed, "it", {"strategy": mapping, "log": list_of(mapping), "data": anything})
    return state
