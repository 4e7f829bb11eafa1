import pytorch_lightning as pl
import torch
from torch import nn

from lightning_sgmcmc import BayesianModule, Categorical
from lightning_sgmcmc.callbacks import recommended
from lightning_sgmcmc.datamodules import DigitsDataModule


class Classifier(BayesianModule):
    def __init__(self, width: int = 100) -> None:
        super().__init__(likelihood=Categorical())
        self.net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


pl.seed_everything(0)
data = DigitsDataModule()
module = Classifier()
trainer = pl.Trainer(max_epochs=60, callbacks=recommended())
trainer.fit(module, datamodule=data)

test = data.splits[2]
probabilities = module.posterior.predict(test.inputs).probabilities
