"""Both packages of Lightning: a program has the one that it imports, and a mixture is refused with the way out."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

needs_both = pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="needs the package lightning")

FIT = """
import torch
{imports}
from lightning_sgmcmc import BayesianModule, Categorical, Posterior
from lightning_sgmcmc.callbacks import BayesianModelAverage, ChainHealth, SampleCollector, SamplingSchedule
from lightning_sgmcmc.datamodules import DigitsDataModule


def main():
    module = BayesianModule(torch.nn.Linear(64, 10), Categorical(), lr=0.1, num_chains=2, seed=0)
    schedule = SamplingSchedule(burn_in_epochs=2, every_n_epochs=1)
    callbacks = [schedule, SampleCollector("samples"), ChainHealth(), BayesianModelAverage()]
    trainer = {package}.Trainer(max_epochs=4, callbacks=callbacks, accelerator="cpu", logger=False)
    trainer.fit(module, datamodule=DigitsDataModule())
    assert isinstance(module, {package}.LightningModule)
    loaded = Posterior.load("samples")
    print(type(trainer).__module__, len(loaded) == len(module.posterior) > 0)


if __name__ == "__main__":
    main()
"""


def run(program: str, folder: Path, chosen: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program as users do, with the variable if one is chosen."""
    environment = {name: value for name, value in os.environ.items() if name != "SGMCMC_LIGHTNING"}
    environment |= {} if chosen is None else {"SGMCMC_LIGHTNING": chosen}
    (folder / "program.py").write_text(program)
    return subprocess.run(
        [sys.executable, "program.py"], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


@needs_both
@pytest.mark.slow
@pytest.mark.parametrize(
    ("imports", "package", "chosen"),
    [
        ("import lightning as L", "L", None),
        ("import pytorch_lightning as pl", "pl", None),
        ("from lightning_sgmcmc.namespace import pl\nimport lightning as L", "L", "lightning"),
    ],
)
def test_a_program_has_the_package_that_it_imports(
    imports: str, package: str, chosen: str | None, tmp_path: Path
) -> None:
    done = run(FIT.format(imports=imports, package=package), tmp_path, chosen)
    name = "pytorch_lightning" if package == "pl" else "lightning.pytorch"
    assert done.stdout.split("\n")[-2:] == [f"{name}.trainer.trainer True", ""], done.stderr[-2000:]
    stored = b"".join(path.read_bytes() for path in (tmp_path / "samples").rglob("*") if path.is_file())
    assert len(stored) > 1000
    assert not re.search(rb"pytorch.lightning|lightning\.pytorch", stored)


@needs_both
@pytest.mark.slow
@pytest.mark.parametrize("part", ["Callback", "LightningDataModule"])
@pytest.mark.parametrize(
    ("first", "then", "remedy"),
    [
        ("lightning_sgmcmc", "lightning.pytorch", "SGMCMC_LIGHTNING=lightning"),
        ("lightning.pytorch, lightning_sgmcmc", "pytorch_lightning", "SGMCMC_LIGHTNING=pytorch_lightning"),
    ],
)
def test_a_mixture_is_refused(first: str, then: str, remedy: str, part: str, tmp_path: Path) -> None:
    program = f"""
import {first}
import {then} as other
import torch
from lightning_sgmcmc import BayesianModule, Categorical
from lightning_sgmcmc.callbacks import SampleCollector
from lightning_sgmcmc.datamodules import DigitsDataModule
from lightning_sgmcmc.namespace import pl

class Own(other.{part}):
    pass

is_data = {part == "LightningDataModule"}
data, callbacks = (Own(), []) if is_data else (DigitsDataModule(), [Own()])
module = BayesianModule(torch.nn.Linear(64, 10), Categorical(), lr=0.1)
pl.Trainer(max_epochs=1, callbacks=callbacks, logger=False).fit(module, datamodule=data)
"""
    done = run(program, tmp_path)
    assert done.returncode == 1
    last = done.stderr.strip().split("\n")[-1]
    assert last.startswith(f"TypeError: Own comes from {then}")
    assert remedy in last


def test_another_name_is_refused(tmp_path: Path) -> None:
    done = run("import lightning_sgmcmc", tmp_path, "pl")
    assert done.stderr.strip().endswith("ValueError: SGMCMC_LIGHTNING must be pytorch_lightning or lightning, got 'pl'")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pytorch_lightning", "lightning.pytorch"])
def test_a_command_may_name_either(name: str, tmp_path: Path) -> None:
    program = f"""
import contextlib
from lightning_sgmcmc.cli import main
with open("example.yaml", "w") as file, contextlib.redirect_stdout(file), contextlib.suppress(SystemExit):
    main(["example"])
main(["fit", "--config", "example.yaml", "--trainer.max_epochs=12", "--trainer.accelerator=cpu",
      "--trainer.logger={name}.loggers.CSVLogger", "--trainer.logger.save_dir=here",
      "--trainer.callbacks+={name}.callbacks.EarlyStopping", "--trainer.callbacks.monitor=val/nll"])
"""
    done = run(program, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert [*(tmp_path / "here").rglob("metrics.csv")]
