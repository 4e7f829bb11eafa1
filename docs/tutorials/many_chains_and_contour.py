# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {name: python3, display_name: Python 3, language: python}
# ---

# %% [markdown]
# # Many chains and contour
#
# This tutorial shows what several chains tell you that one cannot, and how a contour brings chains over barriers
# that they do not cross by themselves. Part one is a network under a trainer. Part two is a density whose truth
# is known.

# %%
import functools
import logging
import os
import tempfile
import warnings

warnings.filterwarnings("ignore", module="tqdm|pytorch_lightning")  # they are not about the run

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytorch_lightning as pl
import torch
from torch import nn

from lightning_sgmcmc import (
    SGHMC,
    BayesianModule,
    Contour,
    ContourRules,
    EnergyPartition,
    Gaussian,
    GaussianPrior,
)
from lightning_sgmcmc.callbacks import BayesianModelAverage, ChainHealth, SampleCollector, SamplingSchedule
from lightning_sgmcmc.datamodules import TableDataModule
from lightning_sgmcmc.simulation import ContourRun, simulate
from lightning_sgmcmc.simulation.targets import GaussianMixture

logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)  # without Lightning's greetings
os.chdir(tempfile.mkdtemp())  # runs write files
torch.set_num_threads(1)
BLUE, ORANGE, GREEN, BLACK = "#0072B2", "#E69F00", "#009E73", "#000000"  # Okabe and Ito
pl.seed_everything(0, verbose=False)

# %% [markdown]
# ## Four chains in one fit
#
# `num_chains=4` runs four copies of the network, each with its own start, batches and noise. The code is that of
# one network.

# %%
x = torch.linspace(-1, 1, 60)[:, None]
y = torch.sin(3 * x[:, 0]) + 0.2 * torch.randn(60)
data = TableDataModule(x, y, batch_size=60, standardise=False, val_fraction=0.2, test_fraction=0)


def fit(steps, chains):
    module = BayesianModule(
        net=nn.Sequential(nn.Linear(1, 10), nn.Tanh(), nn.Linear(10, 1)),
        likelihood=Gaussian(std=0.2),
        prior=GaussianPrior(std=1.0),
        sampler=functools.partial(SGHMC, friction=0.1),
        lr=0.01,
        num_chains=chains,
    )
    trainer = pl.Trainer(
        max_steps=steps,
        accelerator="cpu",
        callbacks=[
            SamplingSchedule(burn_in_steps=steps // 4, every_n_steps=steps // 40),
            SampleCollector(in_memory=True),
            BayesianModelAverage(),
            ChainHealth(),
        ],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        check_val_every_n_epoch=steps,
    )
    trainer.fit(module, datamodule=data)
    return module


module = fit(1000, chains=4)
print(f"{module.health.kind or 'not known'}: {module.health.reason}")
print("findings:", [finding.sentence for finding in module.health.findings] or "none")
print("next:", module.health.advice or "nothing to do")

# %% [markdown]
# ## Do they agree?
#
# Chains from different starts that agree have forgotten their starts. Compare *predictions*, not weights: hidden
# units may be exchanged without changing the network, so weights never agree.

# %%
curves, weights = ({c: [] for c in range(4)} for _ in range(2))
with torch.no_grad():
    for draw, network in zip(module.posterior, module.posterior.networks(), strict=True):
        curves[draw.chain].append(network(x)[:, 0])
        weights[draw.chain].append(float(draw.parameters["net.0.weight"][0, 0]))

fig, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
for c, colour in enumerate((BLUE, ORANGE, GREEN, "#CC79A7")):
    axes[0].plot(x[:, 0], torch.stack(curves[c]).mean(0), color=colour, label=f"chain {c}")
    axes[1].plot(weights[c], ".-", color=colour, linewidth=0.8)
axes[0].plot(x[:, 0], y, "o", color="0.6", markersize=2)
axes[0].set(xlabel="x", title="mean prediction of each chain")
axes[0].legend(frameon=False)
axes[1].set(xlabel="draw", title="one weight: chains are in different places")

# %%
run = module.health.run
print(f"R-hat of the predictions {run.rhat:.3f}; effective draws {run.ess:.0f} of {len(module.posterior)}")
module.posterior.summary()

# %% [markdown]
# ## The same cost in one chain
#
# One chain with four times the steps makes as many gradients. On 12 validation data its average is as good, but
# nothing shows that it has seen all there is. R-hat of the energy and of the predictions is near 1 above, and
# R-hat of single weights is not: that is the exchange of hidden units, and not a problem. Values of the predictions'
# R-hat above about 1.1 ask for a longer run.

# %%
one = fit(4000, chains=1)
pd.DataFrame(
    {name: r.evaluations["val"].bma for name, r in {"four chains": module, "one long chain": one}.items()}
).T.round(3)

# %% [markdown]
# ## A barrier
#
# Some densities have regions that a chain does not leave. Here are two, 40 % and 60 % of the mass, with a barrier
# of twelve nats between them.

# %%
target = GaussianMixture.two_modes()  # 0.4·N(-6, 1) + 0.6·N(4, 1)
plain = simulate(target, lr=0.1, num_steps=20_000, num_chains=10, keep_every=20)
contour = ContourRun(Contour(EnergyPartition(first_edge=2.0, width=1.0, num_bins=50), ContourRules(zeta=0.75)))
flat = simulate(target, lr=0.1, num_steps=20_000, num_chains=10, contour=contour, keep_every=20)

# %% [markdown]
# Both runs made as many gradients. A contour learns the density's histogram of energies and flattens it: the
# chain walks over the barrier, and each sample gets a weight that corrects for that.

# %%
grid = np.linspace(-11, 9, 400)
density = sum(p * np.exp(-((grid - m) ** 2) / 2) / (2 * np.pi) ** 0.5 for p, m in ((0.4, -6), (0.6, 4)))
weights = flat.log_weights.exp()
fig, axes = plt.subplots(2, 2, figsize=(9, 5), layout="constrained")
for column, (name, r, w, colour) in enumerate(
    (("SGLD", plain, None, ORANGE), ("contour SGLD", flat, weights.flatten().numpy(), BLUE))
):
    places = r.positions[..., 0]
    axes[0, column].plot(places.reshape(len(places), -1)[:, :3], linewidth=0.6)
    axes[0, column].set(title=f"{name}: three of ten chains", xlabel="kept step", ylabel="x")
    axes[1, column].hist(places.flatten().numpy(), bins=60, weights=w, density=True, color=colour, alpha=0.5)
    axes[1, column].plot(grid, density, color=BLACK, linewidth=1, label="truth")
    axes[1, column].set(xlabel="x", ylabel="density")
axes[1, 0].legend(frameon=False)

# %%
means = {
    "truth": float(target.mean),
    "SGLD, ten chains": float(plain.positions.mean()),
    "contour SGLD, ten chains": float((weights * flat.positions[..., 0]).sum() / weights.sum()),
}
pd.DataFrame({"mean of x": means}).round(2)

# %% [markdown]
# Ten chains of SGLD stay where they start, so their mean depends on the starts. R-hat would show it: chains that
# disagree are the symptom.
#
# ## Should your network have a contour?
#
# Under a trainer it is one callback, `ContourGradient(ContourRules(zeta=…), num_bins=100, warm_up_steps=2000)`,
# and `interacting=True` lets all chains learn one histogram. For networks, weights vary over so many nats that
# only tempered weights are usable, and the gain is smaller than on this density: the
# [theory](../../theory/modes/#when-it-pays) says why. More chains are the first thing to try.
