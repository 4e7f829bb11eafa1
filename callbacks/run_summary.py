"""The end of a run: five sentences and a table, `results.json`, `summary.txt` with all of it, and predictions."""

import io
import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_sgmcmc.chains.callback import Place, SamplerCallback, sampling_module
from lightning_sgmcmc.chains.chains import ChainModel
from lightning_sgmcmc.chains.schedule import is_optimization
from lightning_sgmcmc.chains.trainer import baseline_of, is_trial, run_folder
from lightning_sgmcmc.checks import check_choice
from lightning_sgmcmc.evaluation.loader_average import Evaluation
from lightning_sgmcmc.evaluation.sentences import Claim, advice_on, five_sentences, sampled_sentence
from lightning_sgmcmc.files import free_name, free_space, is_regular, replacing, warning_of_failed_writes, write_output
from lightning_sgmcmc.fit.results import (
    METHODS,
    NETWORKS,
    OPTIMIZED,
    STAGE_NAMES,
    SUMMARY,
    StoredEvaluation,
    keep_earlier_results,
    origin_of_run,
    per_datum,
    plain_console,
    read_health,
    shown_path,
    write_evaluation,
    write_results,
)
from lightning_sgmcmc.health.report import COLD, DEEP, POSTERIOR, SNAPSHOT, HealthReport
from lightning_sgmcmc.module import BayesianModule
from lightning_sgmcmc.namespace import pl, rank_zero_info, rank_zero_warn
from lightning_sgmcmc.plain import markdown_table
from lightning_sgmcmc.planning import RunPlan
from lightning_sgmcmc.planning.plan import with_article
from lightning_sgmcmc.posterior.disk import DiskStore
from lightning_sgmcmc.posterior.segments import scaling_of_run
from lightning_sgmcmc.predictions import ON_REQUEST, Prediction
from lightning_sgmcmc.process import printing_anything

IN_SHORT = ("guessing", "single", "first_cycle", "bma")
"""Columns of the printed table."""
NOT_MEASURED = "Predictions were not measured in the fit: posterior.evaluate(data) or trainer.test measures them."


class RunSummary(SamplerCallback):
    """Prints five sentences and a table at the end of a fit or test, and writes them to files.

    The sentences: how good is the model average, with an interval; is it better than its mean single sample and than
    the first cycle, by a paired bootstrap over the data; is it calibrated; did the run sample the posterior; what next,
    by `ChainHealth`'s findings and these data. The table compares the model average with guessing, with the mean single
    sample and with the average of the first cycle. Both need a `BayesianModelAverage`. Without validation data the
    fourth sentence is printed alone. It calls the samples of a baseline its networks, and those at temperature 0 states
    of an optimization.

    The files are `results.json`, `table.md` and `summary.txt`, which adds the plan, the findings and the best single
    sample, chosen on the same data. Those of another stage in the folder are kept: a test renames those of the fit to
    `results-val.json`, `table-val.md` and `summary-val.txt`.
    `results.json` also has the run's origin: command, versions, commit and machine. Results for each datum go to
    `evaluation-val.safetensors` and `evaluation-test.safetensors`, for `sgmcmc compare`. A `fast_dev_run` writes no
    files.

    Args:
        name: the run's name in `results.json`.
        show: what is printed: "summary", the sentences and the table; "all", what `summary.txt` has; or "none".

    Raises:
        ValueError: for an empty name, or another word for `show`.
    """

    place = Place.SUMMARY

    def __init__(self, name: str = "run", show: Literal["all", "summary", "none"] = "summary") -> None:
        if not isinstance(name, str) or not name.strip():
            raise ValueError(f"name must be a text for results.json, got {name!r}")
        check_choice("show", show, ("all", "summary", "none"))
        self.name = name
        self.show = show
        self._sentences: list[str] = []
        """Those of the last fit or test; `_ended` has the rest, which there is with an evaluation."""
        self._ended: _Ended | None = None
        self._seconds = 0.0
        self._start: float | None = None
        """When the present fit began to train; None for a fit that makes no step."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._start = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._start = time.monotonic()
        if trainer.is_global_zero:
            origin_of_run()  # before files change

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._start is None:  # a finished run: what a checkpoint has is of before the end, as without the weights
            return
        self._seconds = time.monotonic() - self._start
        self._finish(trainer, sampling_module(pl_module, self), "val")

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._finish(trainer, sampling_module(pl_module, self), "test")

    def _finish(self, trainer: pl.Trainer, module: ChainModel, stage: str) -> None:
        folder = run_folder(trainer)
        evaluation: Evaluation | None = module.evaluations.get(stage)
        if not trainer.is_global_zero:
            return
        if evaluation is None or not evaluation.members:
            if stage == "val" and not is_trial(trainer) and module.posterior:
                self._ended, self._sentences = None, [sampled_sentence(*_claim(trainer, module)), NOT_MEASURED]
                if self.show != "none":
                    self.print_last()
            return
        health, claim = _claim(trainer, module)
        what = _called(trainer, module, claim)
        sentences = five_sentences(evaluation, STAGE_NAMES[stage], health, claim)
        if not is_trial(trainer):
            rows = _rows(evaluation)
            results = {
                "recipe": self.name,
                "scale": "run",
                "seed": module.chains.seeds.run,
                "stage": stage,
                "samples": what,
                "kind": claim.kind,
                "sentences": sentences,
                "verdict": advice_on(evaluation, health, claim)._asdict(),
                "rows": rows,
                "seconds": round(self._seconds, 3),
                "plan": None if module.plan is None else module.plan.as_json(),
                "contour": None if module.contour is None else module.contour.as_json(),
                "origin": origin_of_run(),
            }
            with warning_of_failed_writes():
                keep_earlier_results(folder, results)
                write_results(folder, results, _markdown(rows))
                self._write_evaluation(folder, trainer, module, stage, claim.kind or what)
        title = _title(evaluation, what, stage) + (" (fast_dev_run: hardly trained)" if is_trial(trainer) else "")
        self._sentences = list(sentences.values())
        self._ended = _Ended(evaluation, title, folder, module.plan, health)
        if not is_trial(trainer):
            with warning_of_failed_writes():
                write_output(folder / SUMMARY, self._ended.text(self._sentences).encode())
        if self.show == "all":
            with printing_anything():
                print(self._ended.text(self._sentences), end="")
        elif self.show == "summary":
            self.print_last()

    def print_last(self, table: bool = True) -> None:
        """Print the sentences, and the table, of the last fit or test; nothing before one ended."""
        with printing_anything():
            for sentence in self._sentences:
                plain_console().print(sentence, highlight=False)
            if table and self._ended is not None:
                plain_console().print(self._ended.table(IN_SHORT))
                if (where := self._ended.folder / SUMMARY).exists():
                    plain_console().print(f"The rest is in {shown_path(where)}", highlight=False)

    def _write_evaluation(self, folder: Path, trainer: pl.Trainer, module: ChainModel, stage: str, kind: str) -> None:
        """Write the per-datum results, for `sgmcmc compare`."""
        evaluation, chains = module.evaluations[stage], module.chains
        columns, data = per_datum(evaluation, scaling_of_run(trainer, module))
        stored = StoredEvaluation(
            stage=stage,
            kind=kind,
            samples=len(evaluation.members),
            chains=len({member["chain"] for member in evaluation.members}),
            gradient_evaluations=chains.counters.gradient_evaluations * chains.layout.total_chains,
            seconds=round(self._seconds, 3),
            data=data,
            metrics=evaluation.bma,
            columns=columns,
        )
        write_evaluation(folder, stored)


def _rows(evaluation: Evaluation) -> list[dict[str, Any]]:
    """Return the rows of `results.json`; the error of a mean over single samples is their standard deviation."""
    rows: list[dict[str, Any]] = []
    deviations = evaluation.single_std
    for method, values in _columns(evaluation).items():
        for metric, value in values.items():
            error = deviations[metric] if method == "single" and math.isfinite(deviations[metric]) else None
            rows.append({"method": method, "metric": metric, "value": value, "error": error})
    efficiency = evaluation.weight_efficiency
    if efficiency is not None:
        rows.append({"method": "bma", "metric": "weight_efficiency", "value": efficiency, "error": None})
    return [row | {"paper": None, "paper_error": None} for row in rows]


def _columns(evaluation: Evaluation) -> dict[str, dict[str, float]]:
    """Return the metrics by method; those that are not known are omitted."""
    found = {
        "guessing": evaluation.guessing,
        "single": evaluation.single,
        "best_single": evaluation.best_single,
        "first_cycle": evaluation.first_cycle,
        "bma": evaluation.bma,
    }
    return {method: metrics for method, metrics in found.items() if metrics}


def _claim(trainer: pl.Trainer, module: ChainModel) -> tuple[HealthReport | None, Claim]:
    """Return the run's health report, of another process that with or beside its samples, and its claim."""
    health = module.health
    store = getattr(module.posterior, "store", None)
    if health is None and isinstance(store, DiskStore):
        health = read_health(store.path) or read_health(store.path.parent)
    baseline = baseline_of(trainer)
    if baseline is not None:
        return health, Claim(baseline, "its networks come from an optimization (temperature 0)", is_optimized=True)
    if is_optimization(trainer, module):
        chains = {record.chain for record in module.posterior.records} if module.posterior is not None else set()
        kind = DEEP if max(len(chains), module.chains.layout.total_chains) > 1 else SNAPSHOT
        return health, Claim(kind, "its states are those of an optimization (temperature 0)", is_optimized=True)
    if health is not None and health.kind is not None:
        return health, Claim(health.kind, health.reason)
    plan = module.plan
    if plan is not None and plan.kind is not None:
        if health is not None:
            expected = f"; the plan expects {with_article(POSTERIOR)}" if plan.kind.value == POSTERIOR else ""
            return health, Claim(None, health.reason + expected)
        cold = f"the target's temperature is {plan.temperature:.3g}, the posterior's 1"
        why = cold if plan.temperature < 1 else "by the plan, since it was not measured"
        return health, Claim(plan.kind.value, why)
    return health, Claim(None, "" if health is None else health.reason)


def _called(trainer: pl.Trainer, module: ChainModel, claim: Claim) -> str:
    """Return what the table calls the samples."""
    if baseline_of(trainer) is not None:
        return NETWORKS.format(kind=claim.kind)
    if is_optimization(trainer, module):
        return OPTIMIZED
    return "samples of a cold ensemble" if claim.kind == COLD else "posterior samples"


def _markdown(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        error = "" if row["error"] is None else f"{row['error']:.4f}"
        lines.append([row["method"], row["metric"], f"{row['value']:.4f}", error])
    return markdown_table(["method", "metric", "value", "error"], lines)


def _title(evaluation: Evaluation, what: str, stage: str) -> str:
    """Return what the table is of."""
    efficiency, count = evaluation.weight_efficiency, len(evaluation.members)
    named = what if count != 1 else re.sub(r"\b(sample|network|state)s\b", r"\1", what, count=1)
    effective = "" if efficiency is None else f" (effective sample size {efficiency * count:.1f})"
    return f"{count} {named}{effective} on the {STAGE_NAMES[stage]}"


@dataclass(frozen=True)
class _Ended:
    """What the end of a fit or test has to print beside its sentences."""

    evaluation: Evaluation
    title: str
    folder: Path
    plan: RunPlan | None
    health: HealthReport | None

    def table(self, methods: Sequence[str]) -> Any:
        """Return the table of some methods."""
        from rich.table import Table

        columns = {name: values for name, values in _columns(self.evaluation).items() if name in methods}
        table = Table(title=self.title)
        table.add_column("")
        for method in columns:
            table.add_column(METHODS[method].replace(" ", "\n", 1), justify="right")
        for metric in self.evaluation.bma:
            table.add_row(metric, *(f"{values[metric]:.4f}" if metric in values else "" for values in columns.values()))
        return table

    def text(self, sentences: Sequence[str]) -> str:
        """Return the content of `summary.txt`."""
        lines = [*sentences, ""]
        if self.health is not None and self.health.findings:
            lines += ["Findings, the most urgent first:", *(f"* {one.text}." for one in self.health.findings), ""]
        if self.plan is not None:
            rows = self.plan.rows()
            width = max(len(name) for name, _ in rows)
            lines += ["The plan:", *(f"{name:<{width}}  {value}" for name, value in rows)]
            lines += [f"* {note}" for note in self.plan.notes] + [""]
        with io.StringIO() as file:
            plain_console(file).print(self.table(tuple(METHODS)))
            if self.evaluation.best_single:
                file.write("The best single sample is chosen on the same data, which favours it.\n")
            return "\n".join(lines) + "\n" + file.getvalue()


# -- predictions -------------------------------------------------------------------------------------------------------

BasePredictionWriter = pl.callbacks.BasePredictionWriter


class PredictionWriter(BasePredictionWriter):
    """Writes the posterior predictive of `trainer.predict` to `predictions.safetensors` in the run's folder.

    It holds one tensor per part of the `Prediction` (`probabilities`, `entropy`, …), with the data along the first axis
    in the order of the loader. Rank 0 writes those of all ranks, each datum's once. Earlier predictions in the folder
    are kept as `predictions-1.safetensors`, ….

    Of a datamodule that names its rows, as `TableDataModule` does, `predictions.csv` has a line for each datum: the
    row's name in the table, in `row`, and the columns of `Prediction.to_pandas`.

    Args:
        original_units: whether predictions of standardised targets are in the data's units, as `Posterior.predict`
            returns them; otherwise in those of the standardised targets.
    """

    def __init__(self, original_units: bool = True) -> None:
        super().__init__("epoch")
        self.original_units = original_units

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self.original_units and isinstance(pl_module, BayesianModule) and pl_module.posterior is not None:
            pl_module.posterior = pl_module.posterior.standardised()

    def write_on_epoch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        predictions: Sequence[Any],
        batch_indices: Sequence[Any],
    ) -> None:
        folder = run_folder(trainer)
        parts = [p for p in tree_leaves(predictions) if isinstance(p, Prediction)]
        tensors = {}
        for part in parts[0].parts if parts else ():
            axis = 1 if part.startswith(ON_REQUEST) else 0
            tensors[part] = torch.cat([p.parts[part] for p in parts], axis).cpu().contiguous()
        rows, is_table = _row_names(trainer), all(part.dim() <= 2 for part in tensors.values())
        table = _table(parts) if rows is not None and is_table and parts else None
        if trainer.world_size > 1:
            tensors, table = _in_order(trainer, tensors, table, batch_indices)
        if not tensors or not trainer.is_global_zero:
            return
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "predictions.safetensors"
        if is_regular(path):
            path.rename(free_name(path))
        try:
            with replacing(path) as temporary:
                save_file(tensors, temporary)
        except SafetensorError as error:
            raise OSError(
                f"{path} could not be written: {error}{free_space(folder)}; free space, and predict again"
            ) from error
        rank_zero_info(f"Predictions for {len(next(iter(tensors.values())))} data: {path}")
        if table is None:
            return
        table.insert(0, "row", rows[: len(table)])
        path = folder / "predictions.csv"
        if is_regular(path):
            path.rename(free_name(path))
        write_output(path, table.to_csv(index=False).encode())


def _table(parts: Sequence[Prediction]) -> Any:
    """Return predictions as a data frame, None without pandas."""
    if find_spec("pandas") is None:
        return None
    import pandas

    return pandas.concat([part.to_pandas() for part in parts], ignore_index=True)


def _in_order(
    trainer: pl.Trainer, tensors: dict[str, Tensor], table: Any, batch_indices: Sequence[Any]
) -> tuple[dict[str, Tensor], Any]:
    """Return the predictions of all ranks on rank 0, each datum's once and in the order of the loader, else nothing."""
    places = [(loader, i) for loader, found in enumerate(batch_indices) for batch in found for i in batch]
    everyone: list[Any] | None = [None] * trainer.world_size if trainer.is_global_zero else None
    torch.distributed.gather_object((tensors, table, places), everyone)
    ranks = [rank for rank in everyone or () if rank[0]]
    if not ranks:
        return {}, None
    whole = {}
    for part in ranks[0][0]:
        whole[part] = torch.cat([own[part] for own, *_ in ranks], 1 if part.startswith(ON_REQUEST) else 0)
    rows = {place: row for row, place in enumerate(place for *_, own in ranks for place in own)}
    if not rows:
        rank_zero_warn("The loader's data have no positions, so the predictions are those of rank 0, then of rank 1, …")
        rows = {(0, row): row for row in range(sum(len(next(iter(own.values()))) for own, *_ in ranks))}
    order = [rows[place] for place in sorted(rows)]
    for part, tensor in whole.items():
        whole[part] = tensor[:, order] if part.startswith(ON_REQUEST) else tensor[order]
    if table is not None:
        import pandas

        table = pandas.concat([own for _, own, _ in ranks]).iloc[order]
    return whole, table


def _row_names(trainer: pl.Trainer) -> Any:
    """Return what the rows that a trainer predicts are called, (n,); None if its datamodule does not tell."""
    datamodule = getattr(trainer, "datamodule", None)
    names = getattr(datamodule, "row_names", None)
    tensors = getattr(getattr(trainer.predict_dataloaders, "dataset", None), "tensors", None)
    if datamodule is None or names is None or not tensors:
        return None
    pairs = zip(names, datamodule.splits, strict=True)  # a loader of another one's data has no names
    return next((own for own, split in pairs if split.inputs is tensors[0]), None)
