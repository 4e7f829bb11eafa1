# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {name: python3, display_name: Python 3, language: python}
# ---

# %% [markdown]
# # Convert your module
#
# This tutorial takes a LightningModule with a habit or two of its own and samples it: a convolutional network,
# batches that are dicts, a metric that it logs, a layer that should not be sampled. It ends with a comparison at
# equal cost.

# %%
import functools
import logging
import os
import tempfile
import warnings

warnings.filterwarnings("ignore", module="tqdm|pytorch_lightning")  # they are not about the run

import pandas as pd
import pytorch_lightning as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_sgmcmc import BayesianModule, Categorical, FlatPrior, Posterior
from lightning_sgmcmc.callbacks import AutoSampling, BayesianModelAverage, ChainHealth, DeepEnsemble, SampleCollector
from lightning_sgmcmc.datamodules import DatasetDataModule
from lightning_sgmcmc.diagnostics.scores import classification_metrics

logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)  # without Lightning's greetings
os.chdir(tempfile.mkdtemp())  # runs write files
torch.set_num_threads(1)
pl.seed_everything(0, verbose=False)
QUIET = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}

# %% [markdown]
# ## Your data
#
# A torch data set whose items are dicts, as Hugging Face's are. `DatasetDataModule` makes loaders that resume
# exactly; a plain `DataLoader` works too.


# %%
class Digits(Dataset):
    def __init__(self, rows):
        bunch = load_digits()
        self.images = torch.tensor(bunch.images[rows], dtype=torch.float32)[:, None] / 8 - 1
        self.labels = torch.tensor(bunch.target[rows])

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return {"images": self.images[i], "labels": self.labels[i]}


rows = torch.randperm(1797, generator=torch.Generator().manual_seed(0)).numpy()
train, val, test = Digits(rows[:800]), Digits(rows[800:1000]), Digits(rows[1000:])
data = DatasetDataModule(train, val=val, batch_size=100)

# %% [markdown]
# ## Your module, before


# %%
class Before(pl.LightningModule):
    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, channels, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
        self.head = nn.Linear(9 * channels, 10)
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def forward(self, images):
        return self.head(self.body(images))

    def training_step(self, batch, batch_idx):
        return cross_entropy(self(batch["images"]), batch["labels"])

    def validation_step(self, batch, batch_idx):
        self.accuracy(self(batch["images"]), batch["labels"])
        self.log("accuracy", self.accuracy)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


# %% [markdown]
# ## After
#
# The base class changes, the likelihood replaces the loss, and `training_step` and `configure_optimizers` go. The
# dict needs nothing: its entries are passed to `forward` by name, and "labels" is the target. `validation_step`
# may stay: with one chain it sees the chain's current network. Evaluations of the average are
# `BayesianModelAverage`'s work.


# %%
class After(BayesianModule):
    def __init__(self, channels: int = 8, **options) -> None:
        super().__init__(likelihood=Categorical(), **options)
        self.body = nn.Sequential(nn.Conv2d(1, channels, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
        self.head = nn.Linear(9 * channels, 10)
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def forward(self, images):
        return self.head(self.body(images))

    def validation_step(self, batch, batch_idx):
        self.accuracy(self(batch["images"]), batch["labels"])
        self.log("accuracy", self.accuracy)


module = After()
trainer = pl.Trainer(
    max_epochs=100,
    check_val_every_n_epoch=20,
    enable_checkpointing=False,
    callbacks=[AutoSampling(), SampleCollector("samples"), BayesianModelAverage(), ChainHealth()],
    **QUIET,
)
trainer.fit(module, datamodule=data)
print(f"{len(module.posterior)} draws: {module.health.kind}, since {module.health.reason}")

# %% [markdown]
# `AutoSampling` makes a cold ensemble: draws for prediction, which scatter less than the posterior. The run says
# so itself.
#
# ## What you predict with
#
# `predict` takes a tensor, a dict, or a loader. Its result has more than probabilities: `mutual_information` is
# how much the samples disagree, in nats.

# %%
prediction = module.posterior.predict({"images": test.images})
uncertain = prediction.mutual_information.argsort(descending=True)[:3]
pd.DataFrame(
    {
        "true": test.labels[uncertain],
        "predicted": prediction.probabilities[uncertain].argmax(1),
        "probability": prediction.probabilities[uncertain].amax(1).round(decimals=3),
        "disagreement": prediction.mutual_information[uncertain].round(decimals=3),
    },
    index=[f"image {i}" for i in uncertain.tolist()],
)

# %% [markdown]
# ## The same cost, spent otherwise
#
# One network by AdamW for as many steps, and four for a quarter of them each. `DeepEnsemble` makes both, here
# with AdamW's decoupled weight decay in place of a prior.


# %%
def optimized(networks):
    other = After(lr=0.02, prior=FlatPrior(), num_chains=networks)
    pl.Trainer(
        max_epochs=100 // networks,
        enable_checkpointing=False,
        limit_val_batches=0,
        callbacks=[
            DeepEnsemble(optimizer=functools.partial(torch.optim.AdamW, weight_decay=0.1)),
            SampleCollector(in_memory=True),
        ],
        **QUIET,
    ).fit(other, datamodule=data)
    return other.posterior


def scores(posterior):
    probabilities = posterior.predict({"images": test.images}).probabilities
    return {name: float(value) for name, value in classification_metrics(probabilities, test.labels).items()}


table = pd.DataFrame(
    {
        "one draw (the last)": scores(module.posterior[-1:]),
        "average of the draws": scores(module.posterior),
        "one network": scores(optimized(1)),
        "ensemble of four": scores(optimized(4)),
    }
).T[["accuracy", "nll", "ece"]]
table.round(4)

# %% [markdown]
# 797 test data, one seed, 800 steps: the standard error of an NLL is about 0.01. In so short a run the average of
# the samples is no better than one network, and the code is what this page is about. The [equal-cost
# tables](../../equal_cost/) have longer runs on thirteen data sets, with intervals. Make this comparison on your own
# data before you decide.
#
# ## Load it elsewhere
#
# The samples are safetensors files. A class that a program can import is found by its name. This one is defined
# in the notebook, so the program passes a model like the trained one:

# %%
again = Posterior.load("samples", model=After())
assert torch.equal(again.predict({"images": test.images}).probabilities, prediction.probabilities)
print(len(again), "draws, the same predictions")

# %% [markdown]
# ## Leave a layer out
#
# `sampled=["head.*"]` samples the head only; the other weights stay as they are. This makes sense for trained
# weights: see [Pretrained last layer](../pretrained_last_layer/).
