"""UCI regression with NLL beside RMSE: sampled networks and a larger ensemble, beside Deep Ensembles' table.

Networks with 50 hidden units and an output for the mean and one for the noise, as in the paper (Lakshminarayanan et al.
2017, Table 1), on the standard splits; RMSE and NLL are in the targets' own units. `ensemble` is forty networks (quick:
twenty) that AdamW trains with the prior as weight decay. `posterior` starts at five of them, and samples at temperature
1 with all data in each step (at most 2,000); its time step follows from the noise that the optimized networks have
found. The paper's ensembles are five networks of 40 epochs.

Measured (full, 2026-11-27), means over twenty splits with standard errors: the posterior's NLL minus the ensemble's is
-0.18 ± 0.20 on Boston, -0.226 ± 0.034 on Concrete, -0.285 ± 0.028 on Energy, -0.051 ± 0.003 on Kin8nm, -0.056 ± 0.002
on Power plant, -0.128 ± 0.041 on Wine and +0.063 ± 0.019 on Yacht. Its RMSE is lower on Concrete, Energy, Kin8nm and
Power plant, and higher on Boston by 0.12 ± 0.04; on Wine one split of twenty has 3.97 where the ensemble has 0.6. Its
90 % intervals cover 84 to 98 %, the ensemble's 74 to 97 %. It takes 1.6 (Yacht) to 5 times (Kin8nm, Power plant) the
ensemble's processor seconds and 1.1 to 6.3 times its gradients: the two had equal times before the ensemble's networks
shared their steps.

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
