# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {name: python3, display_name: Python 3, language: python}
# ---

# %% [markdown]
# # First posterior
#
# This tutorial samples a posterior that is known exactly, so you can compare the samples with it. You learn
# what a sample is, how to choose the length of a run, how to read the verdict, and what an ensemble of the same
# cost gives.
#
# The model is a regression on fixed bumps: $y = w \cdot \phi(x) + \text{noise}$ with ten weights $w$. With a
# Gaussian prior and Gaussian noise, its posterior is a Gaussian that a formula gives. A deep network has no such
# formula, and the code below would be the same.

# %%
import functools
import logging
import os
import tempfile
import warnings

warnings.filterwarnings("ignore", module="tqdm|pytorch_lightning")  # they are not about the run

import matplotlib.pyplot as plt
import pytorch_lightning as pl
import torch
from torch import nn

from lightning_sgmcmc import SGHMC, BayesianModule, Gaussian, GaussianPrior
from lightning_sgmcmc.callbacks import ChainHealth, DeepEnsemble, SampleCollector, SamplingSchedule
from lightning_sgmcmc.datamodules import TableDataModule

logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)  # without Lightning's greetings
os.chdir(tempfile.mkdtemp())  # runs write files
torch.set_num_threads(1)
BLUE, ORANGE, GREEN, BLACK = "#0072B2", "#E69F00", "#009E73", "#000000"  # Okabe and Ito
pl.seed_everything(0, verbose=False)

# %% [markdown]
# ## Data with a gap
#
# 100 points, none between 0.1 and 0.5. A good posterior is uncertain there.

# %%
NOISE, PRIOR = 0.3, 1.0
CENTRES = torch.linspace(-1, 1, 10)


def bumps(x):
    return torch.exp(-0.5 * ((x[:, None] - CENTRES) / 0.2) ** 2)


x = torch.rand(200) * 2 - 1
x = x[(x < 0.1) | (x > 0.5)][:100]
y = torch.sin(4 * x) + NOISE * torch.randn(len(x))
data = TableDataModule(bumps(x), y, batch_size=100, standardise=False, val_fraction=0, test_fraction=0)

# %% [markdown]
# ## The exact posterior
#
# Its covariance is $S = (\Phi^\top \Phi / s^2 + 1/\sigma^2)^{-1}$, and its mean is $S\, \Phi^\top y / s^2$.

# %%
phi = bumps(x)
covariance = torch.linalg.inv(phi.T @ phi / NOISE**2 + torch.eye(10) / PRIOR**2)
mean = covariance @ phi.T @ y / NOISE**2

# %% [markdown]
# ## The run
#
# * `SGHMC` is the sampler: SGD with momentum that adds the right noise to each step. `lr` means what it means for SGD.
# * `SamplingSchedule` throws the first 500 steps away and then takes a sample every 8 steps.
# * `num_chains=4` runs four independent copies from different starts. If they agree, the start is forgotten.
# * `ChainHealth` measures whether the chain has the temperature of the posterior, 1.


# %%
def fit(schedule, steps, chains=4, lr=0.04):
    module = BayesianModule(
        net=nn.Linear(10, 1, bias=False),
        likelihood=Gaussian(std=NOISE),
        prior=GaussianPrior(std=PRIOR),
        sampler=functools.partial(SGHMC, friction=0.05),
        lr=lr,
        num_chains=chains,
    )
    trainer = pl.Trainer(
        max_steps=steps,
        accelerator="cpu",
        callbacks=[schedule, SampleCollector(in_memory=True), ChainHealth()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=data)
    return module


module = fit(SamplingSchedule(burn_in_steps=500, every_n_steps=8), steps=2500)
print("\n".join(module.plan.sentences()))

# %% [markdown]
# The plan is known before the first step. A *relaxation time* is the number of steps after which the chain has
# forgotten where it was. A posterior needs about three; this run has more, so its averages are precise.
#
# ## The verdict

# %%
report = module.health
print("findings:", [finding.sentence for finding in report.findings] or "none")
print("next:", report.advice or "nothing to do")
print(f"{report.kind}: {report.reason}")

# %% [markdown]
# ## Samples and the true posterior
#
# A sample is one network. Two of its ten weights, with the ellipse that holds 90 % of the exact posterior:

# %%
weights = torch.stack([network.weight[0].detach() for network in module.posterior.networks()])
i, j = 5, 7  # bumps in the gap and beside it
angle = torch.linspace(0, 2 * torch.pi, 200)
part = covariance[[i, j]][:, [i, j]]
circle = torch.stack([angle.cos(), angle.sin()]) * 4.605**0.5
ellipse = mean[[i, j], None] + torch.linalg.cholesky(part) @ circle
inside = weights[:, [i, j]] - mean[[i, j]]
share = ((inside @ torch.linalg.inv(part)) * inside).sum(1).lt(4.605).float().mean()

fig, ax = plt.subplots(figsize=(6, 3.6), layout="constrained")
ax.plot(weights[:, i], weights[:, j], ".", color=BLUE, alpha=0.4, label="draws of four chains")
ax.plot(*ellipse, color=BLACK, label="exact posterior, 90 %")
ax.set(xlabel=f"weight {i}", ylabel=f"weight {j}", title=f"{share:.0%} of {len(weights)} draws are inside")
ax.legend(frameon=False)

# %%
error = (weights.mean(0) - mean) / covariance.diag().sqrt()
spread = weights.std(0) / covariance.diag().sqrt()
print(f"mean: off by at most {error.abs().max():.2f} posterior standard deviations")
print(f"standard deviation: {spread.min():.2f} to {spread.max():.2f} times the exact one")

# %% [markdown]
# ## The predictive, and an ensemble of the same cost
#
# `DeepEnsemble` as the schedule trains four networks by optimization, with the same prior as weight decay and the
# same number of gradients.

# %%
ensemble = fit(DeepEnsemble(), steps=2500)
grid = torch.linspace(-1, 1, 200)
exact_sd = ((bumps(grid) @ covariance) * bumps(grid)).sum(1).sqrt()

fig, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
names = ("posterior, 1,000 draws", "deep ensemble, 4 networks")
for ax, run, name, colour in zip(axes, (module, ensemble), names, (BLUE, ORANGE), strict=True):
    prediction = run.posterior.predict(bumps(grid))
    centre, sd = prediction.mean[:, 0], prediction.epistemic[:, 0]
    ax.fill_between(grid, centre - 2 * sd, centre + 2 * sd, color=colour, alpha=0.3, label=name)
    ax.plot(grid, centre, color=colour)
    for sign in (-2, 2):
        label = "exact ± 2 sd" if sign == 2 else None
        ax.plot(grid, bumps(grid) @ mean + sign * exact_sd, "--", color=BLACK, linewidth=1, label=label)
    ax.plot(x, y, "o", color="0.6", markersize=2)
    ax.set(xlabel="x", ylim=(-2.5, 2.5))
    ax.legend(frameon=False, loc="lower left")
    print(f"{name}: sd in the gap {sd[130]:.3f}, exact {exact_sd[130]:.3f}")

# %% [markdown]
# The posterior's band follows the exact one, also in the gap. The ensemble's members all end at the same optimum,
# since this loss has only one: its band has no width. For a deep network an ensemble's members differ, and then
# its band is wider, but nothing ties that width to the data. Where predictions of data like the training data are
# all you need, an ensemble is often as good; see [the equal-cost tables](../../equal_cost/).
#
# ## What if the run is too short?

# %%
short = fit(SamplingSchedule(burn_in_steps=0, every_n_steps=2), steps=60)
print(f"{short.plan.name}; {short.plan.relaxation_times:.2g} relaxation times")

# %% [markdown]
# The plan warns before the first step, with the number to change. [Health](../../health/) has a picture of
# each such run.
