"""Lines of checkpoints: which of those in a folder belong to a run, and which to what it goes on from.

Within a run the step only grows: a run that goes back to an earlier checkpoint, while later ones of it are there, goes
on as a new run. So a run and a step say where a line left another one, and no clock is needed.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from instep.checkpoint.edge import list_of, text

if TYPE_CHECKING:
    from instep.checkpoint.manifest import Manifest

_LEADS_NOWHERE = ("weights", "exception")  # kinds that no run could have gone on from instead
_MOST = 256  # origins in a manifest: one for each time that a run was gone back to


def _place(value: object) -> bool:
    """Return True if a value is the run and the step of a checkpoint, as JSON has them."""
    return isinstance(value, list | tuple) and len(value) == 2 and text(value[0]) and type(value[1]) is int


PLACES = list_of(_place)


@dataclass
class Line:
    """Line of a run's saves: its own, and those of earlier runs up to where it went on from them.

    Args:
        run_id: the run.
        resumed_from: run and step of the checkpoint that it was resumed from last, then of the earlier runs that were
            gone back to, the newest first.
        serial: the highest serial number of a save that the main process knows of; the next save has a higher one.

    Example:
        >>> line = Line("b", (("a", 100),))
        >>> line.has("b", 400), line.has("a", 100), line.has("a", 200)
        (True, True, False)
    """

    run_id: str = field(default_factory=lambda: uuid.uuid4().hex[:16])
    resumed_from: tuple[tuple[str, int], ...] = ()
    serial: int = 0

    @classmethod
    def of(cls, manifest: Manifest) -> Line:
        """Return the line that a checkpoint is the end of."""
        return cls(manifest.run_id, manifest.resumed_from, manifest.serial)

    def has(self, run_id: str, step: int) -> bool:
        """Return True if a checkpoint of that run and step belongs to the line."""
        if run_id == self.run_id:
            return True
        return any(run_id == before and step <= up_to for before, up_to in self.resumed_from)

    def knows(self, run_id: str) -> bool:
        """Return True if a run is the line's own, or one that it went on from at some step."""
        return run_id == self.run_id or any(run_id == before for before, _ in self.resumed_from)

    @classmethod
    def resumed(cls, manifest: Manifest, beside: Iterable[Manifest]) -> Line:
        """Return the line of a run that goes on from a checkpoint.

        Args:
            manifest: the checkpoint's.
            beside: of the checkpoints in the folders that the run reads and writes. Where one of the same run is
                further, the run has been gone back to: a new one begins, and what lies ahead is no part of its line.
        """
        run, step = manifest.run_id, manifest.step
        earlier = [origin for origin in manifest.resumed_from if origin[0] != run]
        everything = [manifest, *beside]
        gone_back = any(
            other.run_id == run and other.step > step and other.info.get("kind") not in _LEADS_NOWHERE
            for other in everything
        )
        line = cls(resumed_from=((run, step), *earlier)[:_MOST], serial=max(one.serial for one in everything))
        if not gone_back:
            line.run_id = run
        return line
