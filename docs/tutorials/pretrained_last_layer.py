# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {name: python3, display_name: Python 3, language: python}
# ---

# %% [markdown]
# # Pretrained last layer
#
# This tutorial samples the last layer of a trained network on few data of new classes. The rest of the network is
# frozen, shared by all samples, and computed once, so the run costs what a linear model costs. You would take a
# ResNet from torchvision; to be quick, the notebook trains a small trunk itself: on the digits 0 to 4. The new
# classes are the digits 5 to 9, with ten images each.

# %%
import functools
import logging
import os
import tempfile
import warnings

warnings.filterwarnings("ignore", module="tqdm|pytorch_lightning")  # they are not about the run

import matplotlib.pyplot as plt
import pandas as pd
import pytorch_lightning as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from lightning_sgmcmc import SGHMC, Categorical, FeatureDataModule, GaussianPrior, Posterior, bayesianize
from lightning_sgmcmc.callbacks import ChainHealth, DeepEnsemble, SampleCollector, SamplingSchedule
from lightning_sgmcmc.datamodules import TableDataModule
from lightning_sgmcmc.diagnostics.scores import classification_metrics, out_of_distribution_metrics

logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)  # without Lightning's greetings
os.chdir(tempfile.mkdtemp())  # runs write files
torch.set_num_threads(1)
BLUE, ORANGE = "#0072B2", "#E69F00"  # Okabe and Ito
pl.seed_everything(0, verbose=False)

# %% [markdown]
# ## A trunk, trained on other classes

# %%
bunch = load_digits()
images, labels = torch.tensor(bunch.data, dtype=torch.float32) / 8 - 1, torch.tensor(bunch.target)
known, new = (labels < 5).nonzero()[:, 0], (labels >= 5).nonzero()[:, 0]

net = nn.Sequential(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU()), nn.Linear(32, 5))
optimizer = torch.optim.AdamW(net.parameters(), 2e-3)
for _ in range(15):
    for rows in known[torch.randperm(len(known))].split(50):
        optimizer.zero_grad()
        cross_entropy(net(images[rows]), labels[rows]).backward()
        optimizer.step()
trained = {name: value.clone() for name, value in net.state_dict().items() if name.startswith("0.")}
print(f"accuracy on the digits 0 to 4: {(net(images[known]).argmax(1) == labels[known]).float().mean():.3f}")

# %% [markdown]
# ## Ten images of each new class
#
# `splits` chooses the rows. The test data are all other images of the new classes.

# %%
shuffled = new[torch.randperm(len(new))]
few = torch.cat([shuffled[labels[shuffled] == digit][:10] for digit in range(5, 10)])
rest = shuffled[~torch.isin(shuffled, few)]
data = TableDataModule(
    images, (labels - 5).clamp_min(0), batch_size=50, standardise=False, splits=(few.numpy(), [], rest.numpy())
)

# %% [markdown]
# ## bayesianize
#
# `bayesianize(net, "last_layer")` marks the last layer as sampled and freezes the rest. By default its prior is
# centred at the network's weights. Here the layer is new, so the prior is centred at 0 and each chain draws its
# own start.
#
# `FeatureDataModule` runs the frozen layers once over all data.


# %%
def fit(schedule, steps, chains=4):
    fresh = nn.Sequential(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU()), nn.Linear(32, 5))
    fresh.load_state_dict(trained, strict=False)
    module = bayesianize(
        fresh,
        "last_layer",
        Categorical(),
        prior=GaussianPrior(std=1.0),
        chain_start="own",
        sampler=functools.partial(SGHMC, friction=0.1),
        lr=0.03,
        num_chains=chains,
    )
    trainer = pl.Trainer(
        max_steps=steps,
        accelerator="cpu",
        callbacks=[schedule, SampleCollector(schedule.__class__.__name__), ChainHealth()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=FeatureDataModule(module, data))
    return module


module = fit(SamplingSchedule(burn_in_steps=200, every_n_steps=20), steps=800)
print("\n".join(module.plan.sentences()))
print(f"measured: {module.health.kind}; findings:", [finding.text for finding in module.health.findings] or "none")

# %% [markdown]
# The run is a posterior sample, and `ChainHealth` still warns: with 50 data and 165 weights, this posterior is so
# broad that its samples predict little better than guesses. That is a property of the model and the data, not of
# the run. The average of the samples is far better than a sample, so this page keeps it. [Health](../../health/)
# has the fix for the other cases.
#
# ## For comparison: four optimized layers
#
# The same prior as weight decay, the same number of gradients, the same starts.

# %%
ensemble = fit(DeepEnsemble(), steps=800)
single = fit(DeepEnsemble(), steps=800, chains=1)


def scores(posterior):
    seen = posterior.predict(images[rest]).probabilities
    strange = posterior.predict(images[known]).probabilities
    found = classification_metrics(seen, labels[rest] - 5) | out_of_distribution_metrics(seen, strange)
    return {name: float(found[name]) for name in ("accuracy", "nll", "ece", "auroc")}


names = {"posterior, 120 draws": module, "ensemble of four": ensemble, "one layer": single}
pd.DataFrame({name: scores(run.posterior) for name, run in names.items()}).T.round(3)

# %% [markdown]
# `auroc` is how well the predictive entropy separates the digits 0 to 4, which the last layer has never seen, from
# the new classes: 0.5 is chance. That is where the posterior differs. Many layers fit 50 data, and the loss of a
# last layer has one optimum, at which all members of the ensemble end. On the new classes' own test data the
# ensemble is as good.

# %%
fig, axes = plt.subplots(1, 2, figsize=(8, 3), sharey=True, layout="constrained")
for ax, (name, run) in zip(axes, list(names.items())[:2], strict=True):
    for rows, label, colour in ((rest, "new classes, test", BLUE), (known, "digits 0 to 4", ORANGE)):
        entropy = run.posterior.predict(images[rows]).entropy
        ax.hist(entropy, bins=30, range=(0, 1.61), density=True, alpha=0.6, color=colour, label=label)
    ax.set(title=name, xlabel="predictive entropy (nats)")
axes[0].legend(frameon=False)

# %% [markdown]
# ## What is on the disk
#
# A sample has the last layer's weights only; the trunk is stored once. `Posterior.load` rebuilds the whole network
# in another program, and predicts from images, not from features:

# %%
posterior = Posterior.load("SamplingSchedule")
sizes = [f.stat().st_size for f in posterior.store.path.glob("sample-*")]
print(f"{len(sizes)} draws of {max(sizes) / 1e3:.1f} kB each")
assert torch.equal(posterior.predict(images[rest]).probabilities, module.posterior.predict(images[rest]).probabilities)

# %% [markdown]
# With a torchvision network the same lines are `net = resnet18(weights="DEFAULT"); net.fc = nn.Linear(512, 5);
# bayesianize(net, "last_layer", …)`. If the last layer alone is too little, pass `["layer4.*", "fc.*"]`, or
# "lora" for a language model.
