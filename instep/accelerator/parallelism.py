"""`ParallelismConfig`: sizes of a process mesh, with Accelerate's names."""

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
    """Sizes of the dimensions of the process mesh, for `Accelerator(parallelism_config=...)`.

    Args:
        dp_replicate_size: number of copies of the weights. Each copy belongs to its own group of processes.
        dp_shard_size: number of processes that shard the weights.
        tp_size: number of processes that split layers; the model's `parallelize` says how.
        cp_size: number of processes that share a sequence.

    Raises:
        SettingError: a size is below 1; or `dp_shard_size` is 1 although `dp_replicate_size` is above 1 and `tp_size`
            or `cp_size` is above 1.

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
        """Size of each dimension, with the names of `MeshStrategy`, in the order of the mesh."""
        return {name: getattr(self, f"{name}_size") for name in _ORDER}

    @property
    def total_size(self) -> int:
        """Number of processes."""
        return math.prod(self.sizes.values())

    @property
    def data_parallel_size(self) -> int:
        """Number of processes, or groups of processes, that each read different data."""
        return self.dp_replicate_size * self.dp_shard_size

    @property
    def non_data_parallel_size(self) -> int:
        """Number of processes that read the same data."""
        return self.tp_size * self.cp_size

    @property
    def dp_dim_names(self) -> list[str]:
        """Names of the dimensions larger than 1 whose processes read different data."""
        return self._active("dp_replicate", "dp_shard")

    @property
    def non_dp_dim_names(self) -> list[str]:
        """Names of the dimensions larger than 1 whose processes read the same data."""
        return self._active("tp", "cp")

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """Names of the dimensions larger than 1 that shard the weights."""
        return self._active("dp_shard", "cp")

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """Names of the dimensions larger than 1 over which a loss is averaged."""
        return self._active("dp_replicate", "dp_shard", "cp")

    @property
    def active_mesh_dims(self) -> list[str]:
        """Names of the dimensions larger than 1."""
        return self.dp_dim_names + self.non_dp_dim_names

    def _active(self, *names: str) -> list[str]:
        return [name for name in names if self.sizes[name] > 1]

    def _get_mesh(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Return names and sizes of the mesh's dimensions, in order."""
        names = tuple(name for name in _ORDER if self.sizes[name] > 1)
        return names, tuple(self.sizes[name] for name in names)

    def build_device_mesh(self, device_type: str) -> DeviceMesh | None:
        """Create torch's device mesh of these sizes, with the combined dimensions dp, dp_shard_cp and dp_cp.

        Collective.

        Args:
            device_type: such as "cuda" or "cpu".

        Returns:
            The mesh of all dimensions larger than 1; None if there is no such dimension.
        """
        from torch.distributed import device_mesh  # imported late: used only for a mesh

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
        """Return the strategy for this mesh: "ddp" if the weights are only replicated, else a `MeshStrategy`."""
        if self.active_mesh_dims in (["dp_replicate"], []):
            return "ddp"
        sizes = {"dp_replicate": self.dp_replicate_size, "dp_shard": self.dp_shard_size}
        return resolve_strategy("tp", self.total_size, options={**sizes, "cp": self.cp_size, "tp": self.tp_size})
