# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {name: python3, display_name: Python 3, language: python}
# ---

# %% [markdown]
# # From YAML to report
#
# This tutorial makes a run from a configuration file, without Python code: look at the plan, fit, test in a new
# process, compare two runs, and write a report. The notebook calls the command line; in a terminal omit the `!`.

# %%
import json
import os
import tempfile
from pathlib import Path

os.chdir(tempfile.mkdtemp())  # runs write files
os.environ |= {"OMP_NUM_THREADS": "1", "COLUMNS": "90", "NO_COLOR": "1", "TERM": "dumb"}
os.environ.pop("FORCE_COLOR", None)  # notebooks set it

# %% [markdown]
# ## A configuration
#
# `sgmcmc example` prints one to start from. `sgmcmc recipe` lists others.

# %%
# !sgmcmc example > run.yaml
file = Path("run.yaml")
file.write_text(file.read_text().replace("max_epochs: 200", "max_epochs: 60\n  enable_progress_bar: false"))
print(file.read_text())

# %% [markdown]
# To be quick, this page takes 60 epochs in place of 200. Any value can also be changed on the command line.
#
# ## The plan
#
# It costs no training, and says what the run will be. `AutoSampling` takes a preconditioned sampler whose steps
# depend on the gradients, so relaxation times are unknown before the run.

# %%
# !sgmcmc plan --config run.yaml 2> plan.err

# %% [markdown]
# ## The fit
#
# `--baselines` also trains a single network (`sgd`) and four (`ensemble`) at the same cost. What the run prints
# besides its result goes to `fit.err` here.

# %%
# !sgmcmc fit --config run.yaml --baselines > fit.out 2> fit.err
lines = Path("fit.out").read_text().splitlines()
print(*lines, sep="\n")

# %% [markdown]
# Five sentences are about the test data. The fourth says what the samples are: a cold ensemble, for prediction. The
# table compares at equal cost, on the same data. What the run warned of:

# %%
lines = Path("fit.err").read_text().splitlines()
warned = [line.split("Warning: ")[-1] for line in lines if "RunPlan:" in line or "ChainHealth:" in line]
print(*warned or ["nothing"], sep="\n")

# %% [markdown]
# ## What it wrote

# %%
run = Path("runs/digits_auto/version_0")
print(run, *sorted(path.name if path.is_file() else path.name + "/" for path in run.iterdir()), sep="\n  ")

# %% [markdown]
# ## A new process
#
# `test` reads the draws from the disk. Its numbers are those of the fit.

# %%
# !sgmcmc test --config run.yaml > test.out 2> test.err
results = [json.loads((run / name).read_text())["rows"] for name in ("results.json", "test/results.json")]
own = [row for row in results[0] if row["method"] == "bma"]
assert own == [row for row in results[1] if row["method"] == "bma"]
print("the same to the last digit:", {row["metric"]: round(row["value"], 4) for row in own})

# %% [markdown]
# ## Compare runs
#
# A smaller network, and then both side by side: `compare` prints paired intervals of the differences from the
# first run, and the cost.

# %%
# !sgmcmc fit --config run.yaml --model.net.init_args.hidden_channels='[20, 10]' > small.out 2> small.err
# !sgmcmc compare runs/digits_auto/version_0 runs/digits_auto/version_1 2> compare.err

# %% [markdown]
# ## The report
#
# One HTML page, without a script and without a network.

# %%
# !sgmcmc report runs/digits_auto/version_0 2> report.err
print(f"{(run / 'report.html').stat().st_size / 1e6:.1f} MB")

# %% [markdown]
# ## When something is wrong
#
# A mistake is one sentence, and the exit code is 2. Nothing was run.
# [Resume, failures and clusters](../../howto/resume/#exit-codes) has all codes.

# %%
# !sgmcmc fit --config run.yaml --model.lr=-1 2> wrong.err; echo "exit code $?"; tail -2 wrong.err
