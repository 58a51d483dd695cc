"""`Line`: the checkpoints that lead to a run's current state, saved by the run itself or by runs that it continues.

Within a run the step only grows: if a run goes back to an earlier checkpoint while later ones exist, it continues as a
new run with a new id. So a run id and a step identify the point where a line branches off, and no clock is needed.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from instep.checkpoint.edge import list_of, text

if TYPE_CHECKING:
    from instep.checkpoint.manifest import Manifest

_LEADS_NOWHERE = ("weights", "exception")  # kinds from which `fit` does not resume by "auto" or "last"
_MOST = 256  # limit for the number of entries in `resumed_from`


def _place(value: object) -> bool:
    """Return True if a value is a pair of a run id and a step."""
    return isinstance(value, list | tuple) and len(value) == 2 and text(value[0]) and type(value[1]) is int


PLACES = list_of(_place)


@dataclass
class Line:
    """The checkpoints that lead to a run's current state.

    They are the run's own checkpoints, and those of earlier runs up to the steps at which the run continued them.

    Args:
        run_id: id of the run.
        resumed_from: pairs of run id and step: the checkpoint from which the run was resumed, then the one from which
            that checkpoint's run was resumed, and so on.
        serial: highest serial number of a save that the main process knows; the next save gets a higher one.

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
        """Return the line of the checkpoints that lead to the checkpoint with this manifest."""
        return cls(manifest.run_id, manifest.resumed_from, manifest.serial)

    def has(self, run_id: str, step: int) -> bool:
        """Return True if a checkpoint, given by its run id and step, belongs to the line."""
        return run_id == self.run_id or any(run_id == one and step <= up_to for one, up_to in self.resumed_from)

    def knows(self, run_id: str) -> bool:
        """Return True if `run_id` is the line's own run, or an earlier run that it continues."""
        return run_id == self.run_id or any(run_id == before for before, _ in self.resumed_from)

    @classmethod
    def resumed(cls, manifest: Manifest, beside: Iterable[Manifest]) -> Line:
        """Return the line for a run that is resumed from a checkpoint.

        Args:
            manifest: manifest of the checkpoint.
            beside: manifests of all checkpoints in the folders that the run reads and writes. If one of them has the
                same run id and a later step, the resumed run gets a new id, so that the later checkpoint is not part of
                its line.
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
