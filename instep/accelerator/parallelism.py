"""`ParallelismConfig`: how processes are laid out, in Accelerate's words."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from instep.errors import SettingError
from instep.strategies import Strategy, resolve_strategy
from instep.utils.checks import at_least, check_fields

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_ORDER = ("dp_replicate", "dp_shard", "cp", "tp")  # order of a mesh's dimensions


@dataclass(frozen=True)
class ParallelismConfig:
    """Sizes of the dimensions that processes are laid out in; for `Accelerator(parallelism_config=...)`.

    Args:
        dp_replicate_size: groups of processes that hold copies of each other's weights.
        dp_shard_size: processes that cut the weights up.
        tp_size: processes that cut layers up; the model says how by its `parallelize`.
        cp_size: processes that share a sequence.

    Raises:
        SettingError: a size is below 1, or copies of cut layers are not cut up by `dp_shard_size` too.

    Example:
        >>> config = ParallelismConfig(dp_shard_size=4, tp_size=2)
        >>> config.total_size, config.active_mesh_dims
        (8, ['dp_shard', 'tp'])

    Source:
        Names and meaning are those of Hugging Face Accelerate's ParallelismConfig. Environment variables are not read.
    """

    dp_replicate_size: Annotated[int, at_least(1)] = 1
    dp_shard_size: Annotated[int, at_least(1)] = 1
    tp_size: Annotated[int, at_least(1)] = 1
    cp_size: Annotated[int, at_least(1)] = 1

    def __post_init__(self) -> None:
        check_fields(self)
        if self.non_data_parallel_size > 1 and self.dp_replicate_size > 1 and self.dp_shard_size == 1:
            raise SettingError(
                f"{self}: copies of layers or sequences that are cut up need dp_shard_size above 1 too",
                field="dp_shard_size",
                got=1,
            )

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each dimension, as `MeshStrategy` calls them, in the order of the mesh."""
        return {name: getattr(self, f"{name}_size") for name in _ORDER}

    @property
    def total_size(self) -> int:
        """The number of processes."""
        return math.prod(self.sizes.values())

    @property
    def data_parallel_size(self) -> int:
        """Processes, or groups of them, that read data of their own."""
        return self.dp_replicate_size * self.dp_shard_size

    @property
    def non_data_parallel_size(self) -> int:
        """Processes of one such group."""
        return self.tp_size * self.cp_size

    @property
    def dp_dim_names(self) -> list[str]:
        """The dimensions of more than one process that read data of their own."""
        return self._active("dp_replicate", "dp_shard")

    @property
    def non_dp_dim_names(self) -> list[str]:
        """The dimensions of more than one process that read the same data."""
        return self._active("tp", "cp")

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """The dimensions that cut the weights up."""
        return self._active("dp_shard", "cp")

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """The dimensions over which a loss is averaged."""
        return self._active("dp_replicate", "dp_shard", "cp")

    @property
    def active_mesh_dims(self) -> list[str]:
        """The dimensions of more than one process."""
        return self.dp_dim_names + self.non_dp_dim_names

    def _active(self, *names: str) -> list[str]:
        return [name for name in names if self.sizes[name] > 1]

    def _get_mesh(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Return names and sizes of the mesh's dimensions, in its order."""
        names = tuple(name for name in _ORDER if self.sizes[name] > 1)
        return names, tuple(self.sizes[name] for name in names)

    def build_device_mesh(self, device_type: str) -> DeviceMesh | None:
        """Make torch's mesh of these sizes, with the joint dimensions dp, dp_shard_cp and dp_cp. Collective.

        Args:
            device_type: "cuda" or "cpu", say.

        Returns:
            The mesh of the dimensions of more than one process; None where there is none.
        """
        from torch.distributed import device_mesh  # late: only who asks for a mesh pays for it

        if not self.active_mesh_dims:
            return None
        names, shape = self._get_mesh()
        mesh: Any = device_mesh.init_device_mesh(device_type, shape, mesh_dim_names=names)
        joint = {"dp": self.dp_dim_names, "dp_shard_cp": self.dp_shard_cp_dim_names, "dp_cp": self.dp_cp_dim_names}
        for name, parts in joint.items():
            if parts:
                mesh[parts]._flatten(name)
        return mesh

    def strategy(self) -> str | Strategy:
        """Return the strategy that lays processes out so: "ddp" for copies alone, else a `MeshStrategy`."""
        if self.active_mesh_dims in (["dp_replicate"], []):
            return "ddp"
        sizes = {"dp_replicate": self.dp_replicate_size, "dp_shard": self.dp_shard_size}
        return resolve_strategy("tp", self.total_size, options={**sizes, "cp": self.cp_size, "tp": self.tp_size})
