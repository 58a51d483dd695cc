"""Trials: steps of a run that leave no trace. Callbacks use them to search for a learning rate or a batch size.

`snapshot.py` captures what steps change and restores it; `trial.py` runs the steps.
"""

from typing import TYPE_CHECKING

from instep.utils.imports import loads

if TYPE_CHECKING:
    from instep.trainer.trials.snapshot import Snapshot as Snapshot
    from instep.trainer.trials.trial import Trial as Trial

__all__, __getattr__, __dir__ = loads(__name__)
