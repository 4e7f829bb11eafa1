"""A likelihood with arguments from the command line."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import Censored, HeteroscedasticGaussian, Posterior, Weibull
from lightning_sgmcmc.cli import main as sgmcmc
from lightning_sgmcmc.likelihoods import right_censored
from lightning_sgmcmc.namespace import pl

CONFIG = """
trainer:
  max_epochs: 2
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  callbacks:
    - class_path: lightning_sgmcmc.callbacks.SamplingSchedule
      init_args: {burn_in_steps: 2, every_n_steps: 1}
    - class_path: lightning_sgmcmc.callbacks.SampleCollector
      init_args: {dirpath: FOLDER}
model:
  class_path: lightning_sgmcmc.BayesianModule
  init_args:
    net: {class_path: torch.nn.Linear, init_args: {in_features: 3, out_features: 2}}
    likelihood: {class_path: lightning_sgmcmc.HeteroscedasticGaussian, init_args: {std: 0.5}}
    lr: 0.001
data:
  class_path: lightning_sgmcmc.datamodules.UCIRegressionDataModule
  init_args: {name: yacht, root: ROOT, batch_size: 18}
"""


@pytest.mark.filterwarnings("ignore")
def test_a_configured_likelihood(tmp_path: Path) -> None:
    draws = np.random.default_rng(0)
    x = draws.normal(size=(40, 3))
    np.savez(tmp_path / "yacht.npz", x=x, y=500 + x.sum(1), test_indices=np.arange(80).reshape(20, 4) % 40)
    text = CONFIG.replace("FOLDER", str(tmp_path / "samples")).replace("ROOT", str(tmp_path))
    (tmp_path / "config.yaml").write_text(text)
    sgmcmc(["fit", "--config", str(tmp_path / "config.yaml"), "--seed_everything=1"])
    posterior = Posterior.load(tmp_path / "samples")
    assert posterior.model is not None
    likelihood = posterior.model.likelihood
    assert isinstance(likelihood, HeteroscedasticGaussian)
    assert likelihood.std == 0.5
    low, high = posterior.predict(posterior.inputs(x)).interval(0.9)
    assert (high > low).all()
    assert 450 < float(low.mean()) < float(high.mean()) < 550, "in the target's own units"


class Durations(pl.LightningDataModule):
    """Durations, of which some have not ended."""

    def train_dataloader(self) -> Any:
        x, time = torch.randn(20, 3), torch.rand(20) + 0.1
        return DataLoader(TensorDataset(x, right_censored(time, time < 0.8)), 5)


@pytest.mark.filterwarnings("ignore")
def test_a_configured_likelihood_within_another(tmp_path: Path) -> None:
    inner = "{class_path: lightning_sgmcmc.Weibull, init_args: {concentration: 2.0, learned: true}}"
    own = f"likelihood: {{class_path: lightning_sgmcmc.Censored, init_args: {{likelihood: {inner}}}}}"
    lines = (
        CONFIG.replace("FOLDER", str(tmp_path / "samples")).replace("out_features: 2", "out_features: 1").splitlines()
    )
    text = "\n".join(f"    {own}" if "likelihood:" in line else line for line in lines)
    text = text[: text.index("data:")] + f"data: {{class_path: {__name__}.Durations}}\n"
    (tmp_path / "config.yaml").write_text(text)
    sgmcmc(["fit", "--config", str(tmp_path / "config.yaml"), "--seed_everything=1"])
    likelihood = Posterior.load(tmp_path / "samples").model.likelihood  # type: ignore[union-attr]
    assert isinstance(likelihood, Censored)
    assert isinstance(likelihood.likelihood, Weibull)
    assert likelihood.likelihood.concentration == 2.0
