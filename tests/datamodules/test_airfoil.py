"""Airfoil: the published split, standardised by its training part, and messages."""

from pathlib import Path

import numpy as np
import pytest
from sklearn.model_selection import train_test_split

from lightning_sgmcmc.datamodules import AirfoilDataModule

HEADER = "frequency,angle,length,velocity,thickness,target"


def write(folder: Path, rows: int = 1503, columns: int = 6, header: str = HEADER) -> np.ndarray:
    table = np.random.default_rng(0).normal(120, 7, (rows, columns))
    np.savetxt(folder / "airfoil.csv", table, delimiter=",", header=header, comments="")
    return table


def test_the_split_is_scikit_learns(tmp_path: Path) -> None:
    table = write(tmp_path)
    for seed in (0, 3):
        module = AirfoilDataModule(tmp_path, val_fraction=0.1, seed=seed)
        module.setup("fit")
        assert [len(part.targets) for part in module.splits] == [1082, 120, 301]
        assert module.target_mean is not None
        assert module.target_std is not None
        _, test = train_test_split(table, test_size=0.2, random_state=seed)
        back = module.splits[2].targets[:, 0].double() * module.target_std + module.target_mean
        assert back.numpy() == pytest.approx(test[:, 5], rel=1e-5)
        train = module.splits[0]
        assert train.inputs.mean(0).abs().max() < 1e-5
        assert train.targets.std(correction=0).item() == pytest.approx(1, abs=1e-5)


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"Airfoil is not at .*airfoil/airfoil\.csv: put the file there"):
        AirfoilDataModule(tmp_path).setup("fit")
    write(tmp_path, rows=20)
    with pytest.raises(ValueError, match=r"should have 1503 rows of 6 numbers, got \(20, 6\)"):
        AirfoilDataModule(tmp_path).setup("fit")
    (tmp_path / "airfoil.csv").write_text("frequency,angle\nloud,3\n")
    with pytest.raises(ValueError, match=r"is damaged .* replace it"):
        AirfoilDataModule(tmp_path).setup("fit")
