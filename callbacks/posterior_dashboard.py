"""The dashboard of a running fit: scalars, figures, histograms and tables."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from lightning_sgmcmc.chains.callback import Place, Run, SamplerCallback, sampling_module
from lightning_sgmcmc.chains.chains import ChainModel
from lightning_sgmcmc.chains.samples import Drawing, PosteriorSample
from lightning_sgmcmc.chains.schedule import Schedule, schedule_of
from lightning_sgmcmc.chains.trainer import is_trial, log_interval, log_scalars, run_folder
from lightning_sgmcmc.checks import check_choice, check_count
from lightning_sgmcmc.evaluation.loader_average import Evaluation
from lightning_sgmcmc.figures.logging import log_figure, log_histogram, log_table
from lightning_sgmcmc.figures.samples import segments_figure
from lightning_sgmcmc.files import write_output
from lightning_sgmcmc.fit.results import CYCLE, NLL, PRIOR_NORM, STAGE_NAMES, RunHistory, cycle_spans
from lightning_sgmcmc.health.facts import prior_norm
from lightning_sgmcmc.namespace import pl, rank_zero_warn
from lightning_sgmcmc.posterior.segments import SegmentWalk
from lightning_sgmcmc.report import pictures as parts
from lightning_sgmcmc.seeding import derive_seed
from lightning_sgmcmc.tensors import mean_of

OF_CHAINS = ("schedule", "energy", "traces", "weights", "geometry", "temperatures", "contour")
PARTS = (*OF_CHAINS, "running", "reliability", "entropy", "segments", "chains", "histograms", "tables")
TRACED_WEIGHTS = 4
MOST_PLANNED = 4_000
"""Points of the picture of the schedule; shorter runs have one for each step."""
MOST_CHAINS = 16
"""With more chains, only the mean energy is logged."""


class PosteriorDashboard(SamplerCallback):
    """Shows a sampling run live in W&B, TensorBoard, MLflow or a notebook, and in files in the run's folder.

    Scalars, every `trainer.log_every_n_steps`: `sampler/lr` and `sampler/temperature` (with every sample too),
    `sampler/energy` (Ũ of the
    mini-batch, nats; with several chains their mean, and `sampler/energy_chain_0` and so on), `sampler/log_posterior`
    (-Ũ, up to a constant), `sampler/prior_norm` (‖θ‖²/(d·σ²) for a Gaussian prior: τ at equilibrium where the prior
    decides), `sampler/cycle`, and `sampler/gradient_multiplier` if one is set; with every sample `samples/count` and,
    where the samples' weights differ, `samples/weight_efficiency` (Σw)²/(S·Σw²), a share in (0, 1].

    Figures, at the end of each cycle (or as set by `every`) and of the fit:

    * `posterior/schedule`: step size and temperature by the schedule; `posterior/energy`: the mini-batches' NLL per
      example, without the prior's constant, and ‖θ‖²/(d·σ²), which is 1 under a Gaussian prior; `posterior/traces`:
      four single weights; all with the samples marked and every second cycle shaded;
    * `posterior/weights`, where weights differ: the normalised weights, and how many equal ones they are worth;
    * `posterior/geometry`: classical multidimensional scaling of the samples' weights, coloured by cycle or chain
      (networks with more than 1,024 weights use a random projection with distance errors of about 4 %);
    * `posterior/temperatures`: each tensor's temperatures against the target's, if the module's `health` has them;
    * `posterior/contour`: energies visited by a run with a `ContourGradient`, and the target's by the learned π;
      `posterior/multiplier`: κ against the energy, with the bouncy zone (κ < 0) marked;
    * `posterior/running`, a grid of every metric of the running average and the single samples; for classes also
      `posterior/reliability` and `posterior/entropy`: the distribution of the predictive entropy, also on
      out-of-distribution data. They need a `BayesianModelAverage`;
    * `posterior/segments`: error and NLL on the straight line between samples of one cycle, of two cycles and of two
      chains (BatchNorm's running statistics are interpolated too). It needs a `SampleCollector` and validation data;
    * `posterior/chains`, with several chains: their samples' energies, and the NLL of each chain's average and of
      the overall one. It adds the scalars `chains/rhat_energy`, `chains/ess_bulk_energy` and `chains/ess_tail_energy`
      (split R-hat and effective sample sizes by ArviZ; for one chain of its halves), the same for `…_prediction` (the
      worst over log p(y|x,θ) of 32 evaluation data), and the table `posterior/chain_table`.

    Histograms: `posterior/energy_histogram` (not where a callback changes the prior's scale, since energies then have
    several constants), `posterior/weight_histogram`, `posterior/entropy_histogram` and, for each
    out-of-distribution set, `posterior/entropy_histogram_…`. Tables: `posterior/sample_table`, `posterior/plan_table`
    and `posterior/metric_table`, single against averaged metrics. After `trainer.test`, those that depend on data are
    repeated on the test data as `posterior/test_…`; without a fit in this process, weights and geometry too.

    The loggers' x-axis is the trainer's global step. W&B receives images, histograms and tables, TensorBoard images,
    histograms and text, MLflow images by step and the newest tables as CSV. The newest of each is also in the run's
    folder (`energy.png`, `sample_table.csv`, …), with `history.json`: the scalars of the logged steps and the
    samples. Parts that cannot be drawn are omitted, and an error while drawing only warns. The callback does not
    change the chain. Files have 150 dots per inch (drawing stays cheap); `for_print=True` writes the last ones with
    300, and a PDF beside each.

    Args:
        every: when to draw, besides at the end: at each "sample", at the end of each "cycle", or only at the "end".
        every_n_samples: with "sample", at every n-th sample.
        figures: parts to draw, out of "schedule", "energy", "traces", "weights", "geometry", "temperatures", "contour",
            "running", "reliability", "entropy", "segments", "chains", "histograms" and "tables"; None draws all.
        geometry_samples: largest number of samples in the geometry; evenly spaced ones if there are more.
        segment_pairs: largest number of segments.
        segment_points: points on each segment.
        segment_batches: number of batches of evaluation data, the first ones, for each point.
        for_print: whether the figures at the end of a fit or test are PNG of 300 dots per inch, with PDF beside them.

    Raises:
        ValueError: for an argument out of range or an unknown figure.
    """

    place = Place.PICTURES

    def __init__(
        self,
        every: Literal["sample", "cycle", "end"] = "cycle",
        every_n_samples: int = 1,
        figures: Sequence[str] | None = None,
        geometry_samples: int = 200,
        segment_pairs: int = 4,
        segment_points: int = 11,
        segment_batches: int = 8,
        for_print: bool = False,
    ) -> None:
        check_choice("every", every, ("sample", "cycle", "end"))
        if isinstance(figures, str) or not isinstance(figures, Sequence | None):
            raise ValueError(f"figures should be a list of names, got {figures!r}: write {[str(figures)]}")
        for unknown in set(figures or ()) - set(PARTS):
            raise ValueError(f"figures has an unknown name, {unknown!r}: choose from {', '.join(PARTS)}")
        check_count("every_n_samples", every_n_samples, optional=False)
        if every_n_samples > 1 and every != "sample":
            raise ValueError(f"every_n_samples={every_n_samples} applies to every='sample', got every={every!r}")
        check_count("geometry_samples", geometry_samples, least=2)
        check_count("segment_pairs", segment_pairs)
        check_count("segment_points", segment_points, least=2)
        check_count("segment_batches", segment_batches)
        self.every = every
        self.every_n_samples = every_n_samples
        self.figures = tuple(PARTS if figures is None else figures)
        self.geometry_samples = geometry_samples
        self.for_print = for_print
        self._segment_options = (segment_pairs, segment_points, segment_batches)
        self.reset()

    def reset(self) -> None:
        self.history = RunHistory(max_sketches=self.geometry_samples if "geometry" in self.figures else 0)
        self._segments = SegmentWalk(*self._segment_options)
        self._last_step = 0
        self._cycle: int | None = None
        self._drawn_samples = 0
        self._sample_step = 0
        self._due = False
        self._drawing: Drawing | None = None
        self._folder: Path | None = None
        self._schedule: Schedule | None = None
        self._is_comparable = True
        self._warned: set[str] = set()

    # -- the scalars --------------------------------------------------------------------------------------------------

    def begin(self, run: Run, saved: dict[str, Any] | None) -> None:
        self._last_step = run.sampler.step_count
        self._interval = log_interval(run.trainer)
        self._folder = _folder(run.trainer)
        self._traced = _traced_weights(run.module)
        self._schedule = schedule_of(run.trainer)
        self._is_comparable = run.chains.claims.holder("draw scales") is None
        self._prior_norm = prior_norm(run.chains)
        own = [PRIOR_NORM] if self._prior_norm is not None else []
        if run.chains.observed.num_data > 1:  # an analytic density has no data
            own.append(NLL)
        self.history.trace([*self._traced, *own, CYCLE])

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        run = self.run
        step = run.sampler.step_count
        if step == self._last_step or (step != 1 and step % self._interval):
            return
        self._last_step = step
        group, progress = run.sampler.param_groups[0], run.chains.progress
        controls = [mean_of(group[name]) for name in ("lr", "temperature", "gradient_multiplier")]
        observed, gather = run.chains.observed, run.layout.gather
        energies, log_priors = gather(observed.energy), gather(observed.log_prior.reshape(-1))
        weights = (weight[index] for weight, index in self._traced.values())
        on_device = [energies.mean(), log_priors.mean(), *weights]
        energy, log_prior, *traces = torch.stack([value.detach().float() for value in on_device]).tolist()
        lr, temperature, multiplier = [progress.warm_lr or controls[0], *controls[1:]]
        if self._prior_norm is not None:
            peak, factor = self._prior_norm
            traces.append(peak - factor * log_prior)
        if NLL in self.history.trace_names:
            traces.append((energy + log_prior) / observed.num_data)
        traces.append(progress.cycle)
        self.history.warm_steps = progress.warm_steps
        self.history.add_scalars(step, (lr, temperature, energy), traces)
        scalars = {
            "sampler/lr": lr,
            "sampler/temperature": temperature,
            "sampler/energy": energy,
            "sampler/log_posterior": -energy,
            "sampler/cycle": progress.cycle,
        }
        if self._prior_norm is not None:
            scalars["sampler/prior_norm"] = traces[len(self._traced)]
        if progress.warm_lr is None:
            scalars |= {f"sampler/lr/{g['name']}": mean_of(g["lr"]) for g in run.sampler.param_groups if "name" in g}
        if 1 < len(energies) <= MOST_CHAINS:
            scalars |= {f"sampler/energy_chain_{chain}": value for chain, value in enumerate(energies.tolist())}
        if multiplier != 1:
            scalars["sampler/gradient_multiplier"] = multiplier
        log_scalars(trainer, scalars, trainer.global_step)

    def acts_in(self, step: int) -> bool:
        return self._due or step == 1 or step % self._interval == 0

    def on_posterior_samples(self, trainer: pl.Trainer, pl_module: ChainModel, drawing: Drawing) -> None:
        self._drawing = drawing

    def on_posterior_sample(self, trainer: pl.Trainer, pl_module: ChainModel, sample: PosteriorSample) -> None:
        parameters, drawing = sample.parameters, self._drawing
        if drawing is not None and drawing.on_cuda and trainer.is_global_zero and self.history.takes_sketch:
            parameters = drawing.host_copy(sample)().parameters  # one wait for all samples and tensors
        if drawing is not None and sample is drawing.samples[-1]:
            self._drawing = None
        self.history.add_sample(sample, parameters if trainer.is_global_zero else None)
        self._sample_step, count = trainer.global_step, self.history.samples.seen
        scalars: dict[str, float] = {"samples/count": count}
        if self._run is not None and sample.step % self._interval:  # else they are logged with the step
            group = self.run.sampler.param_groups[0]
            scalars |= {f"sampler/{name}": mean_of(group[name]) for name in ("lr", "temperature")}
        if self.history.has_weights:
            scalars["samples/weight_efficiency"] = self.history.weight_efficiency
        log_scalars(trainer, scalars, trainer.global_step)
        if self.every == "sample" and count % self.every_n_samples == 0:
            self._due = True

    # -- when to draw -------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        # Before the next step, when collector and evaluator have seen the sample, whatever their order.
        if not self._due and self.run.chains.progress.cycle == self._cycle:
            return
        ended = self.every == "cycle" and self._cycle is not None and self.history.samples.seen > self._drawn_samples
        if self._due or (ended and self.run.chains.progress.cycle != self._cycle):
            self._draw(trainer, sampling_module(pl_module, self), "val", self._sample_step)
        self._cycle = self.run.chains.progress.cycle

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._draw(trainer, sampling_module(pl_module, self), "val", trainer.global_step, self.for_print)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if trainer.is_global_zero and len(self.history.scalars):
            self._attempt("history.json", self._write_history)

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        module = sampling_module(pl_module, self)
        self._folder = _folder(trainer)
        if not self.history.samples.seen and module.posterior is not None and trainer.is_global_zero:
            for index, record in enumerate(module.posterior.records):  # of an earlier process's fit
                wanted = self.history.takes_sketch
                self.history.add_sample(record, module.posterior[index].parameters if wanted else {})
        self._draw(trainer, module, "test", trainer.global_step, self.for_print)

    # -- drawing ------------------------------------------------------------------------------------------------------

    def _draw(self, trainer: pl.Trainer, module: ChainModel, stage: str, step: int, for_print: bool = False) -> None:
        self._due = False
        self._drawn_samples = self.history.samples.seen
        if not trainer.is_global_zero:
            return
        evaluation = module.evaluations.get(stage)
        if evaluation is not None and not evaluation.members:
            evaluation = None
        prefix = "posterior/test_" if stage == "test" else "posterior/"
        planned: parts.Planned = []
        self._attempt("schedule", lambda: planned.extend(self._planned()))
        self.history.planned_cycles = cycle_spans([row[0] for row in planned], [row[3] for row in planned])
        for part, make in self._makers(trainer, module, evaluation, stage, planned):
            if part in self.figures:

                def draw(make: Callable[[], parts.Figures] = make) -> None:
                    for name, figure in make().items():
                        log_figure(trainer, prefix + name, figure, step, self._folder, for_print)

                self._attempt(part, draw)
        if "histograms" in self.figures:
            self._attempt("histograms", lambda: self._log_histograms(trainer, evaluation, stage, prefix, step))
        if "tables" in self.figures:
            self._attempt("tables", lambda: self._log_tables(trainer, evaluation, prefix, step))
        if stage == "val":
            self._attempt("history.json", self._write_history)

    def _makers(
        self,
        trainer: pl.Trainer,
        module: ChainModel,
        evaluation: Evaluation | None,
        stage: str,
        planned: parts.Planned,
    ) -> Iterator[tuple[str, Callable[[], parts.Figures]]]:
        """Yield each part's name and drawing function, for the chain and for the evaluation on a stage's data."""
        history = self.history
        if stage == "val" or not len(history.scalars):  # a test in the fit's process would draw the same again
            yield "schedule", lambda: parts.schedule(history, planned)
            yield "energy", lambda: parts.energy(history)
            yield "traces", lambda: parts.traces(history)
            yield "weights", lambda: parts.weights(history)
            yield "geometry", lambda: parts.geometry(history)
            yield "temperatures", lambda: parts.temperatures(module.health)
            own = mean_of(torch.as_tensor(module.temperature))
            yield "contour", lambda: parts.contour(module.contour, history.last_temperature(own))
        if evaluation is not None:
            yield "running", lambda: parts.running(evaluation)
            yield "reliability", lambda: parts.reliability_diagram(evaluation)
            yield "entropy", lambda: parts.entropy(evaluation, STAGE_NAMES[stage])
        yield "chains", lambda: self._compare_chains(trainer, evaluation)
        yield "segments", lambda: self._walk_segments(trainer, module, stage)

    def _planned(self) -> parts.Planned:
        """Return steps with step size, τ and cycle by the schedule; none if another callback sets the controls too."""
        if self._run is None or self._schedule is None or self.run.chains.claims.holder("set controls") is not None:
            return []
        last, warm = self.run.sampler.step_count, self.history.warm_steps
        grid = {int(step) for step in np.linspace(warm + 1, last, min(max(last - warm, 0), MOST_PLANNED))}
        drawn = {int(step) for step in self.history.samples.column(0)}
        steps = sorted(grid | {step for step in drawn if warm < step <= last})
        traced = self._schedule.trace([step - warm for step in steps], self.run.sampler.param_groups[0])
        return [(step, *values) for step, values in zip(steps, traced, strict=True)]

    def _compare_chains(self, trainer: pl.Trainer, evaluation: Evaluation | None) -> parts.Figures:
        log_scalars(trainer, parts.chain_scalars(self.history, evaluation), trainer.global_step)
        return parts.chains(self.history, evaluation)

    def _walk_segments(self, trainer: pl.Trainer, module: ChainModel, stage: str) -> parts.Figures:
        segments = self._segments.walk(trainer, module, module.posterior, stage)
        return {"segments": segments_figure(self._segments.positions, segments, STAGE_NAMES[stage])} if segments else {}

    def _log_histograms(
        self, trainer: pl.Trainer, evaluation: Evaluation | None, stage: str, prefix: str, step: int
    ) -> None:
        histograms = parts.chain_histograms(self.history, self._is_comparable) if stage == "val" else {}
        if evaluation is not None:
            histograms |= parts.entropy_histograms(evaluation, STAGE_NAMES[stage])
        for name, (values, label) in histograms.items():
            log_histogram(trainer, prefix + name, values, label, step, self._folder)

    def _log_tables(self, trainer: pl.Trainer, evaluation: Evaluation | None, prefix: str, step: int) -> None:
        tables = {"sample_table": parts.sample_table(self.history, evaluation, self._is_comparable)}
        if "chains" in self.figures:
            tables["chain_table"] = parts.chain_table(self.history, evaluation)
        if evaluation is not None:
            tables["metric_table"] = parts.metric_table(evaluation)
        plan = sampling_module(trainer.lightning_module, self).plan
        if plan is not None and prefix == "posterior/":
            tables["plan_table"] = (["quantity", "value"], [[*row] for row in plan.rows()])
        for name, (columns, rows) in tables.items():
            if rows:
                log_table(trainer, prefix + name, columns, rows, step, self._folder)

    def _write_history(self) -> None:
        if self._folder is not None:
            write_output(self._folder / "history.json", (json.dumps(self.history.as_json()) + "\n").encode())

    def _attempt(self, part: str, function: Callable[[], None]) -> None:
        """Run a function that may fail, with a warning: a figure must not end hours of sampling."""
        try:
            function()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            kind = f"{type(error).__name__} {getattr(error, 'errno', None) or error}"  # a full disk, whatever the file
            if not {part, kind} & self._warned:
                rank_zero_warn(f"PosteriorDashboard could not draw '{part}' ({reason}); the run continues without it.")
            self._warned |= {part, kind}

    def end(self) -> None:
        self._traced, self._drawing = {}, None

    def state(self) -> dict[str, Any]:
        return {"history": self.history.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history.load_state_dict(state_dict["history"])  # a test from a checkpoint shows it too
        self._drawn_samples = self.history.samples.seen


def _traced_weights(module: nn.Module) -> dict[str, tuple[Tensor, tuple[int, ...]]]:
    """Return, by name, up to four tensors and an index in each, spread over the network, the same in every run."""
    tensors = [(name, p) for name, p in module.named_parameters() if p.requires_grad and p.numel()]
    count = min(TRACED_WEIGHTS, len(tensors))
    traced: dict[str, tuple[Tensor, tuple[int, ...]]] = {}
    for turn in range(count):
        name, tensor = tensors[round(turn * (len(tensors) - 1) / max(count - 1, 1))]
        place = derive_seed(0, "trace", name) % tensor.numel()
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), tensor.shape))
        traced[f"{name}[{', '.join(map(str, index))}]"] = (tensor, index)
    return traced


def _folder(trainer: pl.Trainer) -> Path | None:
    """Return the run's folder; a trial run leaves no files."""
    folder = run_folder(trainer)
    return None if is_trial(trainer) else folder
