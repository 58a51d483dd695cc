"""`DataModule`: download, splits and loaders of the user's data in one object."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence, Sized
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset

from instep.distributed import send_to_device
from instep.errors import SettingError
from instep.types import Location, PathLike, StateDict
from instep.utils.hparams import HyperParameters

if TYPE_CHECKING:
    from torch.utils.data import Dataset

D = TypeVar("D", bound="DataModule")


class DataModule(HyperParameters):
    """Data of a run, from the download to the loaders, in one class.

    Override the methods that you need. Without an override of a loader method, there is no loader for its stage.
    `prepare_data` runs on one process (of each node, with `prepare_data_per_node`), so set attributes in `setup`, which
    runs on all processes.

    Attributes:
        trainer: the Trainer that uses the data, None outside of a run.
        prepare_data_per_node: whether `prepare_data` runs on one process of each node, or only on one of the whole job.

    Example:
        >>> import torch
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> class Squares(DataModule):
        ...     def __init__(self, length=100, batch_size=8):
        ...         super().__init__()
        ...         self.save_hyperparameters()
        ...
        ...     def setup(self, stage):
        ...         x = torch.arange(float(self.hparams.length)).unsqueeze(1)
        ...         self.data = TensorDataset(x, x**2)
        ...
        ...     def train_dataloader(self):
        ...         return DataLoader(self.data, batch_size=self.hparams.batch_size, shuffle=True)
        >>> data = Squares(batch_size=4)
        >>> data.setup("fit")
        >>> len(data.train_dataloader())
        25
    """

    def __init__(self) -> None:
        super().__init__()
        self.trainer: Any = None
        self.prepare_data_per_node = True

    # ---- preparing the data

    def prepare_data(self) -> None:
        """Download and prepare data on disk, before `setup`: on one process per node, see `prepare_data_per_node`."""

    def setup(self, stage: str) -> None:
        """Split data and build data sets. Called on every process.

        Args:
            stage: "fit", "validate", "test" or "predict".
        """

    def teardown(self, stage: str) -> None:
        """Clean up. Called on every process at the end of a run, also after an error."""

    def on_exception(self, exception: BaseException) -> None:
        """Called when a run ends by an exception."""

    # ---- loaders

    def train_dataloader(self) -> Any:
        """Return the training loader, or several loaders in a dict, list or `CombinedLoader`."""

    def val_dataloader(self) -> Any:
        """Return the validation loader, or a list of validation loaders."""

    def test_dataloader(self) -> Any:
        """Return the test loader, or a list of test loaders."""

    def predict_dataloader(self) -> Any:
        """Return the predict loader, or a list of predict loaders."""

    # ---- batches

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch before it goes to the device."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a batch to the device. Override this for types of batches that instep does not know."""
        return send_to_device(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch on the device, for instance to augment it there."""
        return batch

    def __str__(self) -> str:
        """Format the sizes of the data sets, by loader; "None" for loaders that cannot be made yet."""
        lines: list[str] = []
        for stage, name in (("Train", "train"), ("Validation", "val"), ("Test", "test"), ("Predict", "predict")):
            try:
                sizes = _sizes(getattr(self, f"{name}_dataloader")())
            except Exception:  # noqa: BLE001  before `setup` the user's method fails in whatever way
                sizes = "None"
            lines.append(f"{{{stage} dataloader: {sizes}}}")
        return os.linesep.join(lines)

    # ---- state of this object, in addition to the position in the data, which the Trainer keeps

    def state_dict(self) -> StateDict:
        """Return the state that a checkpoint keeps for this object: tensors and JSON values."""
        return {}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore the state that `state_dict` returned.

        Called in a resumed fit; also in an evaluation with the `ckpt_path` of a full checkpoint, if the class of its
        run's datamodule has the same name.
        """

    @classmethod
    def load_from_checkpoint(
        cls: type[D],
        checkpoint_path: Location,
        map_location: Any = None,
        hparams_file: PathLike | None = None,
        **kwargs: Any,
    ) -> D:
        """Make a datamodule from a checkpoint: pass the saved hyperparameters to `__init__`, then load its state.

        Args:
            checkpoint_path: a checkpoint folder of a fit with this datamodule.
            map_location: accepted for compatibility with Lightning, and ignored: the state is loaded to the CPU.
            hparams_file: a JSON or YAML file of hyperparameters that replace the saved ones.
            **kwargs: arguments of `__init__`, which take precedence over the saved ones. Pass here the objects that a
                checkpoint cannot hold.

        Raises:
            CheckpointError: the folder is not a checkpoint, does not verify, or lacks an argument.
        """
        # Imported late: the module belongs to the Trainer, on which this package must not depend
        from instep.trainer.weights import load_datamodule

        return load_datamodule(cls, checkpoint_path, hparams_file, kwargs)

    @classmethod
    def from_datasets(
        cls,
        train_dataset: Dataset[Any] | Sequence[Dataset[Any]] | Mapping[str, Dataset[Any]] | None = None,
        val_dataset: Dataset[Any] | Sequence[Dataset[Any]] | None = None,
        test_dataset: Dataset[Any] | Sequence[Dataset[Any]] | None = None,
        predict_dataset: Dataset[Any] | Sequence[Dataset[Any]] | None = None,
        batch_size: int = 1,
        num_workers: int = 0,
        **options: Any,
    ) -> DataModule:
        """Make a DataModule from data sets, each with a plain loader. Only the training data is shuffled.

        Args:
            train_dataset: one data set, or several in a list or dict.
            val_dataset: one data set, or several in a list.
            test_dataset: one data set, or several in a list.
            predict_dataset: one data set, or several in a list.
            batch_size: samples per process and batch. Passed to the constructor of a subclass too, if it accepts this.
            num_workers: worker processes per loader. Passed to the constructor of a subclass too, if it accepts this.
            **options: passed to the constructor of a subclass.

        Raises:
            SettingError: no data set was given.
        """
        given = {
            "train_dataloader": (train_dataset, True),
            "val_dataloader": (val_dataset, False),
            "test_dataloader": (test_dataset, False),
            "predict_dataloader": (predict_dataset, False),
        }
        if all(datasets is None for datasets, _ in given.values()):
            raise SettingError("from_datasets got no data set: give at least one of train, val, test and predict")

        parameters = inspect.signature(cls.__init__).parameters
        if cls is not DataModule:
            takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
            own = {"batch_size": batch_size, "num_workers": num_workers}
            options = {key: value for key, value in own.items() if takes_all or key in parameters} | options
        data = cls(**options)
        for name, (datasets, shuffle) in given.items():
            if datasets is not None:
                setattr(data, name, partial(_loaders, datasets, batch_size, num_workers, shuffle))
        return data


def _sizes(loaders: Any) -> str:
    """Format how many samples each loader reads, in Lightning's form; NA for data without a length."""
    if loaders is None:
        return "None"
    if isinstance(loaders, Mapping):
        return " ; ".join(f"{name}. {_sizes(loader)}" for name, loader in loaders.items())
    if isinstance(loaders, list | tuple):
        return " ; ".join(f"{number}. {_sizes(loader)}" for number, loader in enumerate(loaders, start=1))
    dataset = getattr(loaders, "dataset", None)
    return f"size={len(dataset) if isinstance(dataset, Sized) else 'NA'}"


def _loaders(datasets: Any, batch_size: int, num_workers: int, shuffle: bool) -> Any:
    """Make a plain loader of a data set. For a collection of data sets, return the same collection of loaders."""
    if isinstance(datasets, Mapping):
        return {name: _loader(dataset, batch_size, num_workers, shuffle) for name, dataset in datasets.items()}
    if isinstance(datasets, Sequence) and not hasattr(datasets, "__getitems__"):
        return [_loader(dataset, batch_size, num_workers, shuffle) for dataset in datasets]
    return _loader(datasets, batch_size, num_workers, shuffle)


def _loader(dataset: Any, batch_size: int, num_workers: int, shuffle: bool) -> DataLoader[Any]:
    shuffle = shuffle and not isinstance(dataset, IterableDataset)
    return DataLoader(dataset, batch_size, shuffle=shuffle, num_workers=num_workers)
