"""The plan of a fit, from its trainer, its module and the curvature of a linear model, and its measured first steps."""

import copy
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sgmcmc.batches.rows import stream_of, training_rows
from lightning_sgmcmc.chains.callback import ChainSizes, PlannedSchedule, RunCost, SampledChains
from lightning_sgmcmc.chains.chains import ChainModel, sampler_of
from lightning_sgmcmc.chains.execution import state_of
from lightning_sgmcmc.chains.starts import keys_of
from lightning_sgmcmc.chains.state import Stage
from lightning_sgmcmc.chains.trainer import baseline_of, declared, fit_steps, is_trial, log_values, total_steps
from lightning_sgmcmc.evaluation.passes import has_fresh_batches, indices_of
from lightning_sgmcmc.expansion import expansions_of, is_expanded
from lightning_sgmcmc.likelihoods import Bernoulli, Categorical, Gaussian
from lightning_sgmcmc.model import overrides
from lightning_sgmcmc.namespace import pl, rank_zero_info, rank_zero_warn
from lightning_sgmcmc.planning import Blocks, ChainControls, PlanInputs, RunPlan, TensorFacts, blocks_of, make_plan
from lightning_sgmcmc.planning.plan import duration_sentence
from lightning_sgmcmc.priors import GaussianPrior, HierarchicalPrior, LaplacePrior, Prior, StudentTPrior
from lightning_sgmcmc.priors.centers import is_centered
from lightning_sgmcmc.priors.state import held_rows
from lightning_sgmcmc.samplers import Sampler
from lightning_sgmcmc.seeding import unchanged_generators
from lightning_sgmcmc.tensors import exact, widest

MOST_DATA = 2000
"""Data that are looked at; of more, this many, evenly spread."""
MOST_INPUTS = 1000
"""Inputs of a layer above which its directions are not computed."""
MOST_CLASSES = 16
"""Directions of similar curvature are planned together."""


def exact_directions(trainer: pl.Trainer, module: ChainModel, sampler: Sampler) -> dict[str, TensorFacts] | None:
    """Return the directions of the posterior of a linear regression by name, or None for another model or unknown data.

    With outputs W·x, noise σ and a prior of standard deviation s the weights have the precision P = XᵀX/σ² + I/s². In
    an eigenvector of P with eigenvalue p the chain moves as in a prior of variance 1/p around the posterior's mean.
    """
    layer = _linear(module)
    if layer is None or len(sampler.param_groups) != 1 or not has_fresh_batches(trainer):
        return None
    x, y = _data(trainer, module)
    if x is None or y is None or x.shape[1] != layer.in_features or y.shape[1] != layer.out_features:
        return None
    prior, likelihood = module.prior, module.likelihood
    assert isinstance(prior, GaussianPrior)
    assert isinstance(likelihood, Gaussian)
    names = {name.rsplit(".", 1)[-1]: name for name in module.chains.trainable}
    ones = layer.bias is not None
    inputs = torch.cat([x, torch.ones(len(x), 1, dtype=torch.float64)], 1) if ones else x
    scales = [1 / prior.scale_of(names["weight"], tuple(layer.weight.shape[-2:])) ** 2] * layer.in_features
    if ones:
        scales.append(1 / prior.scale_of(names["bias"], tuple(layer.bias.shape[-1:])) ** 2)
    scale = module.chains.observed.num_data / len(x) / likelihood.std**2
    precision = scale * inputs.T @ inputs + torch.tensor(scales, dtype=torch.float64).diag()
    mean = torch.linalg.solve(precision, scale * inputs.T @ y)  # (inputs, outputs)
    curvature, vectors = torch.linalg.eigh(precision)
    start = (_starts(module, names) - mean.T) @ vectors  # (chains, outputs, inputs)
    return _class_facts(curvature, start.square().mean((0, 1)), layer.out_features)


def _linear(module: ChainModel) -> nn.Linear | None:
    """Return the layer of a network that is one linear layer, all of whose weights are sampled."""
    own = ("log_likelihood", "output_and_target", "inputs_and_target", "forward")
    if any(overrides(module, name) for name in own):
        return None
    if type(module.likelihood) is not Gaussian or module.likelihood.learned:
        return None
    if type(module.prior) is not GaussianPrior or module.prior.center is not None:
        return None
    net = getattr(module, "net", None)
    layers = list(net) if type(net) is nn.Sequential else [net]
    if not layers or type(layers[-1]) is not nn.Linear or any(type(layer) is not nn.Flatten for layer in layers[:-1]):
        return None
    layer, chains = layers[-1], module.chains
    sampled = {name.rsplit(".", 1)[-1] for name in chains.trainable}  # of one layer, so without duplicates
    wanted = {"weight"} | ({"bias"} if layer.bias is not None else set())
    is_small = layer.in_features <= MOST_INPUTS
    return layer if is_small and sampled == wanted and not chains.sharing.names else None


def _data(trainer: pl.Trainer, module: ChainModel) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Return inputs and targets of the training data, double precision, without an effect on any generator."""
    rows = training_rows(trainer)
    count = len(indices_of(rows, "the plan"))
    places = torch.linspace(0, count - 1, min(count, MOST_DATA)).round().long().tolist()
    with unchanged_generators([module.device]):
        batch = next(iter(rows.loader(places, batch_size=len(places))))
    if not isinstance(batch, list | tuple) or len(batch) != 2 or not all(isinstance(part, Tensor) for part in batch):
        return None, None
    x, y = (part.detach().cpu().double().reshape(len(part), -1) for part in batch)  # targets may be (n,)
    return (x, y) if len(x) == len(y) and not bool(y.isnan().any()) else (None, None)


def _starts(module: ChainModel, names: dict[str, str]) -> Tensor:
    """Return the chains' weights, with the bias as a last column, shape (C, outputs, inputs)."""
    chains = module.chains
    tensors = [chains.trainable[names[name]].detach().cpu().double() for name in ("weight", "bias") if name in names]
    if chains.stacked is None:
        tensors = [tensor[None] for tensor in tensors]
    return torch.cat([tensor if tensor.dim() == 3 else tensor[..., None] for tensor in tensors], -1)


def _class_facts(curvature: Tensor, start: Tensor, outputs: int) -> dict[str, TensorFacts]:
    """Return the directions by classes of similar curvature; the slowest direction is alone."""
    logs = curvature.log()
    span = float(logs[-1] - logs[0]) + 1e-9
    place = 1 + ((logs - logs[0]) / span * MOST_CLASSES).long().clamp_max(MOST_CLASSES - 1)
    place[0] = 0
    found = {}
    for number in place.unique().tolist():
        own = place == number
        mean = float(curvature[own].mean())
        weighted = float((curvature[own] * start[own]).mean()) / mean  # the energy of the start is kept
        found[f"direction {number}"] = TensorFacts(int(own.sum()) * outputs, mean**-0.5, 0, weighted)
    return found


# -- plan --------------------------------------------------------------------------------------------------------------

TIMED = (20, 120)
"""The steps between which a step's duration is measured."""
WORTH_SAYING = 60.0
"""Seconds of a run from which its duration is printed."""


def schedule_of(trainer: pl.Trainer) -> PlannedSchedule | None:
    """Return the schedule of a run, None without one."""
    return next((found for c in declared(trainer) if (found := c.as_schedule()) is not None), None)


def plan_of(trainer: pl.Trainer, module: ChainModel) -> RunPlan | None:
    """Return the plan of a fit that is about to begin; None without a schedule or in a trial."""
    schedule = schedule_of(trainer)
    if schedule is None or is_trial(trainer):
        return None
    chains, sampler = module.chains, sampler_of(module)
    total = chains.layout.total_chains
    own_chains = (c.sampled_chains(total) for c in declared(trainer))
    sampled = next((found for found in own_chains if found is not None), SampledChains(total, 1.0, 1.0))
    blocks = _blocks(trainer, module, schedule, sampled)
    tensors, approximate = _tensors(module, sampler)
    shared = keys_of(module, chains.sharing.names)
    shared |= {name for expansion in expansions_of(module) for name in expansion.factors[1:]}  # which samples lack
    own = [tensor for key, tensor in module.state_dict().items() if key not in shared]
    facts = PlanInputs(
        chains=total,
        sampled_chains=sampled.number,
        num_data=chains.observed.num_data,
        temperature=_temperature(module, blocks),
        draws=None if blocks is None else chains.tags.draws * sum(map(schedule.draws, range(1, blocks.steps + 1))),
        classes=_classes(trainer, module),
        gradient_evaluations=None if blocks is None else _evaluations(trainer, module),
        disk_bytes_of_sample=_bytes(own) // chains.num_chains,
        memory_bytes=_memory(trainer, module, sampler, blocks),
        notes=tuple(_notes(trainer, module, sampler, approximate)),
        label=baseline_of(trainer),
        directions=exact_directions(trainer, module, sampler),
    )
    return make_plan(sampler, blocks, tensors, facts)


# -- controls ---------------------------------------------------------------------------------------------------------


def _blocks(
    trainer: pl.Trainer, module: ChainModel, schedule: PlannedSchedule, sampled: SampledChains
) -> Blocks | None:
    """Return the controls of the run's steps over all chains, None for a run without a known length."""
    chains, progress = module.chains, module.chains.progress
    groups = [{n: v for n, v in group.items() if n != "params"} for group in sampler_of(module).param_groups]
    shadow = SimpleNamespace(param_groups=groups)  # which a schedule may set without an effect on the sampler
    steps = fit_steps(trainer) - progress.warm_steps  # a warm start is not a sampler
    if steps < 1 or not math.isfinite(steps):
        return None

    known: dict[Any, ChainControls] = {}
    of_temperature: dict[Any, Tensor] = {}

    def controls(step: int) -> ChainControls:
        schedule.apply(step, module, shadow)
        present, is_sampling = [group["lr"] for group in groups], chains.progress.stage is Stage.SAMPLING
        numbers = (*present, temperature := groups[0]["temperature"])
        key = None if any(isinstance(value, Tensor) for value in numbers) else (*numbers, is_sampling)
        if (found := known.get(key)) is None:
            lrs = sampled.lr * torch.stack([_of_chains(lr, chains.num_chains) for lr in present])
            if (temperatures := of_temperature.get(None if key is None else temperature)) is None:
                temperatures = sampled.temperature * _of_chains(temperature, chains.num_chains)
            found = ChainControls(lrs, temperatures, is_sampling)
            if key is not None:
                known[key], of_temperature[temperature] = found, temperatures
        return found

    chains.progress = copy.copy(progress)
    try:
        blocks = blocks_of(int(steps), controls)
    finally:
        chains.progress = progress
    layout = chains.layout
    if layout.is_spread and layout.strategy is not None:
        device = module.device
        return replace(
            blocks,
            lrs=layout.gather(blocks.lrs.float().to(device), 2).cpu().double(),
            temperatures=layout.gather(blocks.temperatures.float().to(device), 1).cpu().double(),
        )
    return blocks


def _of_chains(value: Any, chains: int) -> Tensor:
    if isinstance(value, Tensor):
        return exact(value).cpu().reshape(-1).expand(chains)
    return torch.full((chains,), value, dtype=torch.float64)


def _temperature(module: ChainModel, blocks: Blocks | None) -> float:
    """Return the target's temperature: the mean over chains of the last sampling step."""
    if blocks is not None:
        sampling = [row for row, stage in zip(blocks.temperatures, blocks.is_sampling, strict=True) if stage]
        if sampling:
            return float(torch.stack(sampling).amax(0).mean())
    return float(exact(module.temperature).mean())


# -- tensors and their priors -----------------------------------------------------------------------------------------


def _tensors(module: ChainModel, sampler: Sampler) -> tuple[dict[str, TensorFacts], bool]:
    """Return the facts of the sampled tensors, and whether a prior's scale is approximate."""
    chains = module.chains
    groups = {p: i for i, group in enumerate(sampler.param_groups) for p in group["params"]}
    found, approximate, held = {}, False, held_rows(module)
    prior: Any = module.prior.given if isinstance(module.prior, HierarchicalPrior) else module.prior
    center = prior.center if isinstance(prior, GaussianPrior) else None
    for name, parameter in chains.trainable.items():
        shape = parameter.shape[1:] if chains.num_chains > 1 else parameter.shape
        std, is_exact = prior_std(module.prior, name, tuple(shape))
        approximate |= std is not None and not is_exact
        is_near = center is not None and is_centered(name, prior.centered)  # a start is near its centre
        start = 0.0 if is_near else float(widest(parameter.detach()).square().mean())
        numel = parameter.numel() // chains.num_chains
        if name in held:
            numel -= numel // shape[0]
        found[name] = TensorFacts(numel, std, groups.get(parameter, 0), start if math.isfinite(start) else 0.0)
    return found, approximate


def prior_std(prior: Prior, name: str, shape: Sequence[int]) -> tuple[float | None, bool]:
    """Return the standard deviation of a parameter's Gaussian prior, or the nearest to it, and whether that is exact.

    Student-t: the Gaussian with its curvature at the centre, s·√(ν/(ν+1)); Laplace: √2·s; hierarchical: its first
    scale.
    """
    if not isinstance(prior, GaussianPrior | HierarchicalPrior | LaplacePrior | StudentTPrior):
        return None, False
    scale = prior.scale_of(name, shape)
    if isinstance(prior, StudentTPrior):
        return scale * math.sqrt(prior.df / (prior.df + 1)), False
    if isinstance(prior, LaplacePrior):
        return scale * math.sqrt(2), False
    return scale, isinstance(prior, GaussianPrior)


def _notes(trainer: pl.Trainer, module: ChainModel, sampler: Sampler, approximate: bool) -> list[str]:
    notes = []
    if approximate:
        notes.append("The prior is planned as a Gaussian of the scale at its start, which is approximate.")
    if any(map(is_expanded, module.modules())):
        notes.append("The plan is for the factors of expanded weights, as if the prior alone decided them.")
    notes += filter(None, [sampler.plan_note()])
    if trainer.lr_scheduler_configs and not any(callback.sets_lr for callback in declared(trainer)):
        notes.append("A scheduler of torch sets lr; the plan has its first value.")
    notes += filter(None, [callback.plan_note() for callback in declared(trainer)])
    if hasattr(getattr(trainer, "datamodule", None), "append"):
        notes.append(f"The data may grow; the plan has N = {module.num_data:,}, that of the start.")
    rows = training_rows(trainer)
    if rows.count is not None and rows.count != module.num_data:
        notes.append(
            f"N = {module.num_data:,} as given, whereas the loader has {rows.count:,} rows: the first epoch compares N "
            "with what the likelihood counts."
        )
    if rows.in_order and float(trainer.num_training_batches) > 1:
        notes.append("The data come in the same order in every epoch (no shuffle=True); each weighs the same.")
        twice = (rows.share or 0) * module.chains.layout.ranks_per_chain - (rows.count or 0)
        if twice > 0:
            notes.append(
                f"The ranks do not divide the data: {twice} are taken twice in every epoch (pass shuffle=True)."
            )
    stream = stream_of(trainer)
    if stream is not None and not hasattr(stream, "set_epoch"):
        notes.append("The data are a stream without set_epoch(epoch), so epochs may repeat the first one's order.")
    return notes


# -- cost -------------------------------------------------------------------------------------------------------------


def _classes(trainer: pl.Trainer, module: ChainModel) -> int | None:
    """Return the number of classes: of the datamodule, else the outputs of the last linear layer; None also where the
    data are to choose the temperature, which is then not compared with guessing."""
    if any(callback.has_moved_target for callback in declared(trainer)):
        return None
    if isinstance(module.likelihood, Bernoulli):
        return 2
    if not isinstance(module.likelihood, Categorical):
        return None
    known = getattr(getattr(trainer, "datamodule", None), "num_classes", None)
    if isinstance(known, int) and known > 1:
        return known
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    return layers[-1].out_features if layers and layers[-1].out_features > 1 else None


def _evaluations(trainer: pl.Trainer, module: ChainModel) -> int | None:
    """Return the per-datum gradients of each chain, those of control variates included."""
    steps = int(total_steps(trainer))
    rows = training_rows(trainer)
    size, length = rows.batch_size, rows.count
    batches = float(trainer.num_training_batches)
    ranks = module.chains.layout.ranks_per_chain
    if not isinstance(size, int):
        return None
    data = steps * size * trainer.accumulate_grad_batches * ranks
    epochs = math.nan
    if math.isfinite(batches) and batches > 0:
        epochs = steps / max(math.ceil(batches / trainer.accumulate_grad_batches), 1)
        if trainer.max_steps < 0 and trainer.max_epochs is not None:
            epochs = trainer.max_epochs  # whose steps may differ in number
        if length is not None:
            data = round(epochs * min(length, batches * size * ranks))  # the last batch may be smaller
    for callback in declared(trainer):
        more = callback.added_gradients(RunCost(data, epochs, module.chains.observed.num_data))
        if more is None:
            return None
        data += more
    return data


def _bytes(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))


def _memory(trainer: pl.Trainer, module: ChainModel, sampler: Sampler, blocks: Blocks | None) -> int:
    """Return the bytes of parameters, buffers, gradients, sampler state, noise and what callbacks keep."""
    chains, parameters = module.chains, [p for group in sampler.param_groups for p in group["params"]]
    own = _bytes(parameters)
    sizes = ChainSizes(
        numel=sum(p.numel() for p in parameters) // chains.num_chains,
        parameters=own,
        tensors=_bytes(t for name, t in state_of(module).items() if name not in chains.sharing.names),
    )
    of_slices = chains.stacked is not None and chains.execution == "loop" and not chains.stacked.receives
    gradients = 1 + int(of_slices)  # each chain's own, and all together
    has_noise = blocks is None or bool((blocks.temperatures > 0).any())
    kept = sum(callback.memory(sizes) for callback in declared(trainer)) + (sampler.noise_bytes if has_noise else 0)
    return _bytes([*module.parameters(), *module.buffers()]) + (gradients + sampler.copies) * own + kept


class Planner:
    """Plans a fit at its start, prints the plan, and adds its duration once steps have been timed."""

    def __init__(self) -> None:
        self._begun: tuple[int, float] | None = None
        self._later: PlannedSchedule | None = None
        self.is_timing = False

    def begin(self, trainer: pl.Trainer, module: ChainModel) -> None:
        """Set `module.plan`, and print it on rank 0; an error warns, since a run that works must not stop for it."""
        schedule = schedule_of(trainer)
        if schedule is not None and not schedule.has_length:
            module.plan, self._later, self.is_timing = None, schedule, True
            return
        self._begun = self._later = None
        try:
            plan = plan_of(trainer, module)
        except Exception as error:
            rank_zero_warn(f"The run has no plan ({type(error).__name__}: {error}); it continues without one.")
            plan = None
        module.plan = plan
        self.is_timing = plan is not None and plan.steps is not None and plan.steps > TIMED[1]
        if plan is None:
            return
        log_values(trainer, "plan", {"kind": plan.name or "unknown", **plan.scalars()})
        rank_zero_info("\n".join(plan.sentences()))
        for sentence in plan.warnings:
            rank_zero_warn(f"RunPlan: {sentence}.")

    def after_step(self, trainer: pl.Trainer, module: ChainModel, step: int) -> None:
        """Time the first steps, or plan once the length is known; called after each of them while `is_timing`."""
        if self._later is not None:
            if self._later.has_length:
                self.begin(trainer, module)
        elif self._begun is None:
            if step >= TIMED[0]:
                self._begun = step, time.monotonic()
        elif step - self._begun[0] >= TIMED[1] - TIMED[0]:
            self.is_timing = False
            each, plan = (time.monotonic() - self._begun[1]) / (step - self._begun[0]), module.plan
            if plan is not None and plan.steps is not None:
                module.plan = replace(plan, seconds=each * plan.steps, seconds_per_step=each)
                if each * plan.steps >= WORTH_SAYING:
                    rank_zero_info(duration_sentence(each * plan.steps, each))
