# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {name: python3, display_name: Python 3, language: python}
# ---

# %% [markdown]
# # Tables with intervals
#
# This tutorial predicts a number with an interval, checks that the interval covers what it promises, and repairs
# it with a guarantee. The data are the 442 diabetes patients that scikit-learn ships: ten measurements, and how
# far the disease went a year later.

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
from sklearn.datasets import load_diabetes
from torch import nn

from lightning_sgmcmc import SGHMC, BayesianModule, GaussianPrior, HeteroscedasticGaussian
from lightning_sgmcmc.callbacks import (
    BayesianModelAverage,
    ChainHealth,
    DeepEnsemble,
    SampleCollector,
    SamplingSchedule,
)
from lightning_sgmcmc.datamodules import TableDataModule

logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)  # without Lightning's greetings
os.chdir(tempfile.mkdtemp())  # runs write files
torch.set_num_threads(1)
BLUE, ORANGE, BLACK = "#0072B2", "#E69F00", "#000000"  # Okabe and Ito
pl.seed_everything(0, verbose=False)

# %% [markdown]
# ## The table
#
# `TableDataModule` takes arrays, or a pandas frame and the target's column. `task` says what the target is. It splits
# at random and standardises by the training part. Predictions come back in the target's units.

# %%
frame = load_diabetes(as_frame=True).frame
data = TableDataModule(frame, target="target", task="regression", batch_size=222, val_fraction=0.25, test_fraction=0.25)
data.setup("fit")
print(data.num_data, "training data; target:", f"{data.target_mean:.0f} ± {data.target_std:.0f}")

# %% [markdown]
# ## A network with two outputs
#
# `HeteroscedasticGaussian` takes a mean and a scale (by softplus) for each example, so some patients may have
# wider intervals than others. Four chains of `SGHMC` at temperature 1 sample the posterior of the network's
# weights.


# %%
def fit(schedule, steps, lr=0.02, **options):
    module = BayesianModule(
        net=nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 2)),
        likelihood=HeteroscedasticGaussian(),
        prior=GaussianPrior(std="fan_in"),
        sampler=functools.partial(SGHMC, friction=0.05),
        lr=lr,
        num_chains=4,
        **options,
    )
    trainer = pl.Trainer(
        max_steps=steps,
        accelerator="cpu",
        callbacks=[schedule, SampleCollector(in_memory=True), BayesianModelAverage(scores=True), ChainHealth()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        check_val_every_n_epoch=100,
    )
    trainer.fit(module, datamodule=data)
    trainer.test(module, datamodule=data, verbose=False)
    return module


module = fit(SamplingSchedule(burn_in_steps=400, every_n_steps=20), steps=1200)
print(f"{module.health.kind}: {module.health.reason}")
print("findings:", [finding.sentence for finding in module.health.findings] or "none")
print("next:", module.health.advice or "nothing to do")

# %% [markdown]
# ## Predictions with intervals

# %%
test = data.splits[2]
target = test.targets[:, 0] * data.target_std + data.target_mean
prediction = module.posterior.predict(test.inputs)
low, high = prediction.interval(0.9)
table = pd.DataFrame(
    {
        "true": target,
        "mean": prediction.mean[:, 0],
        "5 %": low[:, 0],
        "95 %": high[:, 0],
        "of the model": prediction.epistemic[:, 0],
    }
)
table.head().round(0)

# %% [markdown]
# "of the model" is the part of the uncertainty that more data would remove (a standard deviation): the samples'
# disagreement. The rest is noise in the patients themselves.

# %%
order = prediction.mean[:, 0].argsort()
place = range(len(order))
fig, ax = plt.subplots(figsize=(7, 3.6), layout="constrained")
ax.fill_between(place, low[order, 0], high[order, 0], color=BLUE, alpha=0.25, label="90 % interval")
ax.plot(place, prediction.mean[order, 0], color=BLUE, label="mean")
ax.plot(place, target[order], "o", color=BLACK, markersize=3, label="patients")
ax.set(xlabel="test patients, by predicted mean", ylabel="progression")
ax.legend(frameon=False, loc="upper left")

# %% [markdown]
# A new patient is a row of a frame, in the table's units and with its columns in any order: the posterior knows names
# and scaling, also after `Posterior.load` in another program.

# %%
patient = frame.drop(columns="target").iloc[[0]]
print(f"{module.posterior.predict(patient).mean.item():.0f} for {frame['target'][0]:.0f}")

# %% [markdown]
# ## Do the intervals cover?
#
# Of 110 patients, a 90 % interval should contain about 99; by chance 93 to 104 (95 %). `coverage_90` of the
# evaluation is the share, `crps` scores the whole distribution (lower is better).
#
# An ensemble of four networks with as many gradients is compared with it. It has the same prior as weight decay.

# %%
ensemble = fit(DeepEnsemble(), steps=1200)


def row(run):
    metrics = run.evaluations["test"].bma
    return {name: metrics[name] for name in ("rmse", "nll", "crps", "coverage_90", "coverage_50")}


pd.DataFrame({"posterior, 160 draws": row(module), "ensemble of four": row(ensemble)}).T.round(3)

# %% [markdown]
# ## A guarantee: conformal intervals
#
# Coverage of the posterior holds if the model is right. `conformal` scales the intervals so that they cover 90 %
# of new patients like the validation ones, whatever the model. It costs nothing but the validation data.

# %%
rows = {}
for name, run in {"posterior": module, "ensemble": ensemble}.items():
    own = run.posterior.predict(test.inputs).interval(0.9)
    sets = run.posterior.conformal(data, level=0.9).predict(test.inputs)
    for kind, (a, b) in {"own interval": own, "conformal": (sets.low, sets.high)}.items():
        inside = ((target >= a[:, 0]) & (target <= b[:, 0])).float().mean()
        rows[f"{name}, {kind}"] = {"covered": float(inside), "mean width": float((b - a).mean())}
pd.DataFrame(rows).T.round(3)

# %% [markdown]
# Read both columns together: an interval that covers more because it is wider has gained nothing. Both methods
# are honest after the conformal step; what is left to compare is the width.
