"""A likelihood with arguments from the command line."""

from pathlib import Path

import numpy as np
import pytest

from lightning_sgmcmc import HeteroscedasticGaussian, Posterior
from lightning_sgmcmc.cli import main as sgmcmc

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
