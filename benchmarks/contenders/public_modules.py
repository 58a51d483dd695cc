"""The public LightningModules of `parity_lightning.py`: where each comes from, what it needs, and data for it.

Nothing of them is kept here. `build` runs in a process whose path begins with the copied files, so it imports them.
Loaders do not shuffle: the order of the data is fixed.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

PACKAGES = (
    "lightning", "pytorch_lightning", "torchmetrics", "torch_geometric", "pandas", "rdkit", "gluonts==0.14.4", "toolz",
    "utilsforecast", "narwhals", "pytz", "python-dateutil", "tzdata", "six", "astartes", "xarray", "psutil", "aiohttp",
    "multidict", "yarl", "frozenlist", "propcache", "aiosignal", "attrs", "aiohappyeyeballs", "pyparsing", "requests",
    "cloudpathlib", "configargparse", "scikit-base", "multiprocess", "dill",
)  # fmt: skip
"""What the modules import, beside torch and what instep's extras install."""

Loaders = tuple[Any, Any, Any]


@dataclass(frozen=True)
class Case:
    """One module of one repository.

    Args:
        name: of the case.
        repository: on GitHub.
        commit: of it.
        module: its LightningModule.
        files: what is copied of the repository, and where to.
        build: makes the module, its training loader, and its validation loader or None.
        written: files that take the place of the repository's, with their content: empty `__init__.py` where it imports
            parts that need more packages.
        stand_ins: packages that are imported and not used.
        first: changes made in both copies, because Lightning 2 does not run the module as it is: as `by_hand`.
        by_hand: changes made in the ported copy after `instep migrate --write`: file, what was there, what is.
        imports: the name under which the files import Lightning.
        logger: whether the module needs one.
    """

    name: str
    repository: str
    commit: str
    module: str
    files: dict[str, str]
    build: Callable[[], Loaders]
    written: tuple[tuple[str, str], ...] = ()
    stand_ins: tuple[str, ...] = ()
    first: tuple[tuple[str, str, str], ...] = ()
    by_hand: tuple[tuple[str, str, str], ...] = ()
    imports: str = "lightning"
    logger: bool = False


class Rows(Dataset[Any]):
    """Samples that are dicts, lists or other objects."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


def generator() -> torch.Generator:
    """Return the numbers that the data is made of."""
    return torch.Generator().manual_seed(0)


def images(count: int, *shape: int) -> TensorDataset:
    """Return images with classes."""
    numbers = generator()
    return TensorDataset(
        torch.rand(count, *shape, generator=numbers), torch.randint(0, 10, (count,), generator=numbers)
    )


def lightning_hydra_template() -> Loaders:
    """Make the module of lightning_hydra_template, and its data."""
    from mnist_module import MNISTLitModule
    from simple_dense_net import SimpleDenseNet

    scheduler = partial(torch.optim.lr_scheduler.ReduceLROnPlateau, mode="min", factor=0.1, patience=0)
    module = MNISTLitModule(SimpleDenseNet(), partial(torch.optim.Adam, lr=0.01), scheduler, compile=False)
    return module, DataLoader(images(320, 1, 28, 28), 32), DataLoader(images(64, 1, 28, 28), 32)


def pytorch_vae() -> Loaders:
    """Make the module of pytorch_vae, and its data."""
    from experiment import VAEXperiment
    from models import VanillaVAE

    params = {"LR": 0.005, "weight_decay": 0.0, "scheduler_gamma": 0.95, "kld_weight": 0.00025}
    module = VAEXperiment(VanillaVAE(3, 16), params)
    return module, DataLoader(images(32, 3, 64, 64), 8), None  # its validation draws pictures by torchvision


def pytorch_geometric() -> Loaders:
    """Make the module of pytorch_geometric, and its data."""
    from gin import Model
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader as GraphLoader

    numbers = generator()
    graphs = []
    for index in range(64):
        edges = torch.randint(0, 12, (2, 30), generator=numbers)
        graphs.append(Data(x=torch.randn(12, 8, generator=numbers), edge_index=edges, y=torch.tensor([index % 3])))
    return Model(8, 3), GraphLoader(graphs[:48], batch_size=8), GraphLoader(graphs[48:], batch_size=8)


def chemprop() -> Loaders:
    """Make the module of chemprop, and its data."""
    from chemprop import data, models
    from chemprop import nn as parts

    smiles = ("CCO", "CCN", "CCC", "c1ccccc1", "CC(=O)O", "CCCl", "CNC", "COC", "CC#N", "C1CCCCC1", "CO", "OCCO") * 4
    numbers = torch.randn(len(smiles), 1, generator=generator()).numpy()
    points = [data.MoleculeDatapoint.from_smi(smi, y) for smi, y in zip(smiles, numbers, strict=True)]
    loader = partial(DataLoader, batch_size=8, collate_fn=data.collate_batch)
    module = models.MPNN(
        parts.BondMessagePassing(d_h=32, dropout=0.1), parts.MeanAggregation(), parts.RegressionFFN(input_dim=32),
        batch_norm=True, warmup_epochs=1,
    )  # fmt: skip
    return module, loader(data.MoleculeDataset(points[:40])), loader(data.MoleculeDataset(points[40:]))


def gluonts() -> Loaders:
    """Make the module of gluonts, and its data."""
    from gluonts.torch.model.deepar.lightning_module import DeepARLightningModule

    sizes = {"freq": "D", "context_length": 12, "prediction_length": 4, "hidden_size": 16, "lags_seq": [1, 2, 7]}
    module = DeepARLightningModule(sizes, lr=0.01, patience=0)
    length, numbers = module.model._past_length, generator()
    rows = [
        {
            "feat_static_cat": torch.zeros(1, dtype=torch.long),
            "feat_static_real": torch.zeros(1),
            "past_time_feat": torch.randn(length, 1, generator=numbers),
            "past_target": torch.rand(length, generator=numbers) * 5,
            "past_observed_values": torch.ones(length),
            "future_time_feat": torch.randn(4, 1, generator=numbers),
            "future_target": torch.rand(4, generator=numbers) * 5,
            "future_observed_values": torch.ones(4),
        }
        for _ in range(40)
    ]
    return module, DataLoader(Rows(rows[:32]), 8), DataLoader(Rows(rows[32:]), 8)


def lag_llama() -> Loaders:
    """Make the module of lag_llama, and its data."""
    from gluonts.torch.distributions import StudentTOutput
    from lag_llama.gluon.lightning_module import LagLlamaLightningModule

    lags = [1, 2, 7]
    sizes = {
        "context_length": 12, "max_context_length": 32, "scaling": "mean", "input_size": 1, "n_layer": 2,
        "n_embd_per_head": 8, "n_head": 2, "lags_seq": lags, "distr_output": StudentTOutput(), "time_feat": False,
    }  # fmt: skip
    module = LagLlamaLightningModule(sizes, context_length=12, prediction_length=4, lr=0.01, aug_prob=0.5)
    length, numbers = 12 + max(lags), generator()
    rows = [
        {
            "past_target": torch.rand(length, generator=numbers) * 5,
            "past_observed_values": torch.ones(length),
            "future_target": torch.rand(4, generator=numbers) * 5,
            "future_observed_values": torch.ones(4),
        }
        for _ in range(40)
    ]
    return module, DataLoader(Rows(rows[:32]), 8), DataLoader(Rows(rows[32:]), 8)


def pytorch_forecasting() -> Loaders:
    """Make the module of pytorch_forecasting, and its data."""
    import pandas as pd
    from pytorch_forecasting.data import TimeSeriesDataSet
    from pytorch_forecasting.models.nbeats import NBeats

    values = torch.rand(4 * 60, generator=generator()).numpy()
    frame = pd.DataFrame(
        {"value": values, "time": list(range(60)) * 4, "group": [g for g in "abcd" for _ in range(60)]}
    )
    data = TimeSeriesDataSet(
        frame, time_idx="time", target="value", group_ids=["group"], max_encoder_length=12, max_prediction_length=4,
        time_varying_unknown_reals=["value"],
    )  # fmt: skip
    module = NBeats.from_dataset(
        data, learning_rate=0.01, widths=[16, 32], backcast_loss_ratio=0.1, log_interval=-1, dropout=0.1
    )
    loader = partial(data.to_dataloader, batch_size=32, num_workers=0)
    return module, loader(train=True, shuffle=False), loader(train=False)


def neuralforecast() -> Loaders:
    """Make the module of neuralforecast, and its data."""
    import pandas as pd
    from neuralforecast.models.nhits import NHITS
    from neuralforecast.tsdataset import TimeSeriesDataset, TimeSeriesLoader

    values = torch.rand(8 * 60, generator=generator()).numpy()
    days = pd.date_range("2020-01-01", periods=60)
    ids = [f"s{index}" for index in range(8) for _ in range(60)]
    data = TimeSeriesDataset.from_df(pd.DataFrame({"unique_id": ids, "ds": list(days) * 8, "y": values}))[0]
    module = NHITS(
        h=4, input_size=12, mlp_units=3 * [[16, 16]], max_steps=10, windows_batch_size=16, dropout_prob_theta=0.1,
        accelerator="cpu",
    )  # fmt: skip
    return module, TimeSeriesLoader(data, batch_size=2), None


def asteroid() -> Loaders:
    """Make the module of asteroid, and its data."""
    from asteroid.engine.system import System

    net = nn.Sequential(nn.Conv1d(1, 8, 5, padding=2), nn.PReLU(), nn.Conv1d(8, 2, 5, padding=2))
    numbers = generator()
    mixed, apart = torch.randn(48, 1, 200, generator=numbers), torch.randn(48, 2, 200, generator=numbers)
    train, val = TensorDataset(mixed[:40], apart[:40]), TensorDataset(mixed[40:], apart[40:])
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    train_loader, val_loader = DataLoader(train, 8), DataLoader(val, 8)
    config = {"net": {"channels": 8, "kernel": 5}, "rate": 8000}
    module = System(net, optimizer, nn.MSELoss(), train_loader, val_loader, scheduler, config)
    return module, None, None  # it has its own loaders


def schnetpack() -> Loaders:
    """Make the module of schnetpack, and its data."""
    from schnetpack.task import AtomisticTask, ModelOutput
    from torchmetrics import MeanAbsoluteError

    class Potential(nn.Module):
        """Energies from positions, and forces as their derivative."""

        required_derivatives = ("positions",)
        do_postprocessing = True

        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(15, 32), nn.SiLU(), nn.Linear(32, 1))

        def initialize_transforms(self, datamodule: Any) -> None:
            pass

        def forward(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            positions = inputs["positions"].requires_grad_()
            energy = self.net(positions.flatten(1)).squeeze(-1)
            (slope,) = torch.autograd.grad(energy.sum(), positions, create_graph=True)
            return {"energy": energy, "forces": -slope}

    def output(name: str, weight: float) -> Any:
        return ModelOutput(name, nn.MSELoss(), weight, {"mae": MeanAbsoluteError()})

    numbers = generator()
    rows = [
        {
            "positions": torch.randn(5, 3, generator=numbers),
            "energy": torch.randn((), generator=numbers),
            "forces": torch.randn(5, 3, generator=numbers),
            "_idx": index,
        }
        for index in range(48)
    ]
    module = AtomisticTask(
        Potential(), [output("energy", 0.1), output("forces", 0.9)], torch.optim.AdamW, {"lr": 0.01},
        torch.optim.lr_scheduler.ReduceLROnPlateau, {"factor": 0.5, "patience": 0}, "val_loss", warmup_steps=3,
    )  # fmt: skip
    return module, DataLoader(Rows(rows[:40]), 8), DataLoader(Rows(rows[40:]), 8)


CASES = (
    Case(
        "lightning-hydra-template",
        "ashleve/lightning-hydra-template",
        "bddbc24",
        "MNISTLitModule",
        {
            "src/models/mnist_module.py": "mnist_module.py",
            "src/models/components/simple_dense_net.py": "simple_dense_net.py",
        },
        lightning_hydra_template,
    ),
    Case(
        "PyTorch-VAE",
        "AntixK/PyTorch-VAE",
        "a6896b9",
        "VAEXperiment",
        {"experiment.py": "experiment.py", "utils.py": "utils.py", "models": "models"},
        pytorch_vae,
        first=tuple(
            (
                "experiment.py",
                f"def {step}_step(self, batch, batch_idx, optimizer_idx = 0):\n",
                f"def {step}_step(self, batch, batch_idx):\n        optimizer_idx = 0\n",
            )
            for step in ("training", "validation")
        ),
        stand_ins=("torchvision",),
        imports="pytorch_lightning",
    ),
    Case(
        "pytorch_geometric",
        "pyg-team/pytorch_geometric",
        "5c6461b23",
        "Model (examples/pytorch_lightning/gin.py)",
        {"examples/pytorch_lightning/gin.py": "gin.py"},
        pytorch_geometric,
        imports="pytorch_lightning",
    ),
    Case(
        "chemprop",
        "chemprop/chemprop",
        "9a0b47ad",
        "MPNN",
        {"chemprop": "chemprop"},
        chemprop,
        stand_ins=("astartes", "descriptastorus", "mordred", "cuik_molmaker"),
    ),
    Case(
        "gluonts",
        "awslabs/gluonts",
        "3d05d465f",
        "DeepARLightningModule",
        {"src/gluonts": "gluonts"},
        gluonts,
        written=(("gluonts/meta/_version.py", '__version__ = "0.16"\n'),),
        by_hand=(
            (
                "gluonts/torch/model/lightning_util.py",
                "    return trainer.fit_loop.epoch_loop.val_loop._data_source.is_defined()\n",
                "    return trainer.val_dataloaders is not None\n",
            ),
        ),
    ),
    Case(
        "lag-llama",
        "time-series-foundation-models/lag-llama",
        "013ff0c",
        "LagLlamaLightningModule",
        {
            "lag_llama/gluon/lightning_module.py": "lag_llama/gluon/lightning_module.py",
            "lag_llama/model": "lag_llama/model",
            "data/augmentations": "data/augmentations",
            "gluon_utils": "gluon_utils",
        },
        lag_llama,
    ),
    Case(
        "pytorch-forecasting",
        "sktime/pytorch-forecasting",
        "062aeb47",
        "NBeats",
        {"pytorch_forecasting": "pytorch_forecasting"},
        pytorch_forecasting,
    ),
    Case(
        "neuralforecast",
        "Nixtla/neuralforecast",
        "5ffa0d08",
        "NHITS",
        {
            **{f"neuralforecast/{name}": f"neuralforecast/{name}" for name in ("losses", "tsdataset.py", "utils.py")},
            **{
                f"neuralforecast/common/{name}.py": f"neuralforecast/common/{name}.py"
                for name in ("_base_model", "_modules", "_scalers", "enums")
            },
            "neuralforecast/models/nhits.py": "neuralforecast/models/nhits.py",
        },
        neuralforecast,
        written=(
            ("neuralforecast/__init__.py", ""),
            ("neuralforecast/common/__init__.py", ""),
            ("neuralforecast/models/__init__.py", ""),
        ),
        imports="pytorch_lightning",
    ),
    Case(
        "asteroid",
        "asteroid-team/asteroid",
        "92c8d83a",
        "System",
        {
            "asteroid/engine/system.py": "asteroid/engine/system.py",
            "asteroid/utils/generic_utils.py": "asteroid/utils/__init__.py",
        },
        asteroid,
        written=(("asteroid/__init__.py", ""), ("asteroid/engine/__init__.py", "")),
        imports="pytorch_lightning",
        logger=True,
    ),
    Case(
        "schnetpack",
        "atomistic-machine-learning/schnetpack",
        "4c967da8",
        "AtomisticTask",
        {"src/schnetpack/task.py": "schnetpack/task.py"},
        schnetpack,
        written=(("schnetpack/__init__.py", ""),),
        stand_ins=("schnetpack.model",),
        imports="pytorch_lightning",
    ),
)
