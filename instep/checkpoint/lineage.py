"""Lines of checkpoints: which checkpoints in a folder belong to a run, and which to the runs that it continues.

Within a run the step only grows: if a run goes back to an earlier checkpoint while later ones exist, it continues as a
new run. So a run id and a step say where a line branches off another one, and no clock is needed.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from instep.checkpoint.edge import list_of, text

if TYPE_CHECKING:
    from instep.checkpoint.manifest import Manifest

_LEADS_NOWHERE = ("weights", "exception")  # kinds that no run could have resumed from instead
_MOST = 256  # most origins in a manifest; there is one for each time that a run went back


def _place(value: object) -> bool:
    """Return True if a value is a pair of run and step, as a manifest stores it."""
    return isinstance(value, list | tuple) and len(value) == 2 and text(value[0]) and type(value[1]) is int


PLACES = list_of(_place)


@dataclass
class Line:
    """Line of a run's saves: its own, and those of earlier runs up to the step at which it continued them.

    Args:
        run_id: the run.
        resumed_from: run and step of the checkpoint from which it was last resumed, followed by those of earlier runs,
            newest first.
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
        """Return the line that ends with a checkpoint."""
        return cls(manifest.run_id, manifest.resumed_from, manifest.serial)

    def has(self, run_id: str, step: int) -> bool:
        """Return True if a checkpoint of that run and step belongs to the line."""
        if run_id == self.run_id:
            return True
        return any(run_id == before and step <= up_to for before, up_to in self.resumed_from)

    def knows(self, run_id: str) -> bool:
        """Return True if a run is the line's own, or one that the line continued at some step."""
        return run_id == self.run_id or any(run_id == before for before, _ in self.resumed_from)

    @classmethod
    def resumed(cls, manifest: Manifest, beside: Iterable[Manifest]) -> Line:
        """Return the line of a run that is resumed from a checkpoint.

        Args:
            manifest: manifest of the checkpoint.
            beside: manifests of the checkpoints in the folders that the run reads and writes. If one of them has the
                same run and a later step, a new run begins, and later checkpoints are not part of its line.
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
