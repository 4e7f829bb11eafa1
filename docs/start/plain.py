import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from lightning_sgmcmc.datamodules import DigitsDataModule


class Classifier(pl.LightningModule):
    def __init__(self, width: int = 100) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return cross_entropy(self(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)


pl.seed_everything(0)
data = DigitsDataModule()
module = Classifier()
trainer = pl.Trainer(max_epochs=60)
trainer.fit(module, datamodule=data)

test = data.splits[2]
with torch.no_grad():
    probabilities = module(test.inputs).softmax(-1)
