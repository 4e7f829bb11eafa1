"""UCI regression with NLL beside RMSE: sampled networks and an ensemble at equal cost, beside Deep Ensembles' table.

Networks with 50 hidden units and an output for the mean and one for the noise, as in the paper (Lakshminarayanan et al.
2017, Table 1), on the standard splits; RMSE and NLL are in the targets' own units. `ensemble` is forty networks (quick:
twenty) that AdamW trains with the prior as weight decay. `posterior` starts at five of them, and samples at temperature
1 with all data in each step; its time step follows from the noise that the optimized networks have found. The paper's
ensembles are five networks of 40 epochs.

Measured (quick: split 0 alone, 2026-11-24), RMSE and NLL of `posterior`: Boston 2.37, 3.02; Concrete 5.62, 2.84; Energy
1.44, 0.43; Kin8nm 0.075, -1.266; Power plant 4.12, 2.82; Wine 0.619, 0.812; Yacht 0.42, 0.29. `ensemble`: 2.38, 3.77;
5.69, 3.01; 1.71, 0.48; 0.086, -1.220; 4.23, 2.86; 0.613, 0.903; 0.50, 0.26, at 0.8 to 1.2 times the processor seconds.
The posterior has the lower NLL on six of seven tables, and a little more on Yacht (by 0.04). Its 90 % intervals cover
88 to 100 %, on Boston 76 %, the ensemble's 76 to 97 %. With the steps and networks of `full` (an earlier run of this
split) the posterior's NLL was 2.51 on Boston, 2.75 on Concrete and 0.24 on Energy, and elsewhere within 0.04 of these.
The paper's NLL, over twenty splits: 2.41, 3.06, 1.38, -1.20, 2.79, 0.94, 1.18. The other splits have not been run.

quick is the first split with half the steps (`python -m recipes uci_nll --data-root DIR`), full all twenty.
"""

from dataclasses import dataclass
from typing import Any

from lightning_sgmcmc.recipes.shared.jobs import run_jobs
from lightning_sgmcmc.recipes.shared.needs import require
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.regression import METHODS, Setting, fit_and_score, means
from lightning_sgmcmc.recipes.shared.results import Row, mean_row
from lightning_sgmcmc.recipes.shared.settings import read_settings


@dataclass(frozen=True)
class Settings:
    """Number of splits, and the network and training of both methods."""

    splits: int
    fit: Setting

    @property
    def work(self) -> float:
        """The steps of all splits' networks."""
        return float(self.splits * self.fit.steps)


PUBLISHED = {
    "boston-housing": ((3.28, 1.00), (2.41, 0.25)),
    "concrete": ((6.03, 0.58), (3.06, 0.18)),
    "energy": ((2.09, 0.29), (1.38, 0.22)),
    "kin8nm": ((0.09, 0.00), (-1.20, 0.02)),
    "power-plant": ((4.11, 0.17), (2.79, 0.04)),
    "wine-quality-red": ((0.64, 0.04), (0.94, 0.12)),
    "yacht": ((1.58, 0.48), (1.18, 0.21)),
}
"""RMSE and NLL of Deep Ensembles, in the targets' own units."""


def run(options: Options) -> list[Row]:
    """Run both methods on all tables and splits, return the table."""
    settings = read_settings(Settings, options)
    require(*(_data(table, 0, options) for table in PUBLISHED))
    splits, methods = options.repeated(settings.splits), options.chosen(METHODS)
    jobs = [(table, method, split) for table in PUBLISHED for split in splits for method in methods]
    outcomes = run_jobs(one, jobs, options, settings.fit)
    rows = []
    for table, published in PUBLISHED.items():
        for name, paper in zip(("rmse", "nll"), published, strict=True):
            for method in methods:
                known = paper if method == "ensemble" else (None, None)
                values = means([outcomes[table, method, s] for s in splits], name)
                rows.append(mean_row(method, f"{table}: {name.upper()}", values, *known))
            if len(methods) == 1:
                continue
            gains = [outcomes[table, "posterior", s][name] - outcomes[table, "ensemble", s][name] for s in splits]
            rows.append(mean_row("posterior - ensemble", f"{table}: {name.upper()}", gains))
        for method in methods:
            found_here = [outcomes[table, method, s] for s in splits]
            for name, label in (("coverage_90", "coverage of 90 % intervals"), ("seconds", "processor seconds")):
                rows.append(mean_row(method, f"{table}: {label}", means(found_here, name)))
    return rows


def one(table: str, method: str, split: int, setting: Setting, options: Options) -> dict[str, float]:
    """Fit and score one method on one split of a table."""
    return fit_and_score(lambda size: _data(table, split, options, size), method, setting, options.seed + split)


def _data(table: str, split: int, options: Options, batch_size: int = 100) -> Any:
    from lightning_sgmcmc.datamodules import UCIRegressionDataModule

    return UCIRegressionDataModule(table, options.data_root, split=split, batch_size=batch_size)
