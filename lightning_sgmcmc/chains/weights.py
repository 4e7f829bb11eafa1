"""How much an example of a mini-batch counts, and whether what the likelihood counts in an epoch is N."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_sgmcmc import likelihoods
from lightning_sgmcmc.batches.inputs import fault_of_tokens
from lightning_sgmcmc.batches.loader import ChainBatches, flat_loaders
from lightning_sgmcmc.batches.rows import TrainingRows, contradiction, training_rows
from lightning_sgmcmc.chains.execution import cloned, evaluation_mode, undisturbed_generators
from lightning_sgmcmc.chains.layers import ForwardPasses, unlogged
from lightning_sgmcmc.chains.layout import ChainLayout
from lightning_sgmcmc.chains.stacked import StackedChains
from lightning_sgmcmc.model import EnergyModel, check_shape, overrides
from lightning_sgmcmc.namespace import pl, rank_zero_info, rank_zero_warn
from lightning_sgmcmc.tables import TargetScaling
from lightning_sgmcmc.tensors import exact_device, version_of

LAST = 64
"""The last batch that is looked at; the others are the first, the second, the fourth, and so on."""
MOST_TARGETS = 100_000
"""Numbers of a batch's targets above which they are not kept."""
ROUNDED, LEAST = 0.01, 1e-5
"""Difference of two log densities of one example, relative and in nats, that may come from rounding or padding."""
BY_OTHERS = 1e-3
"""The same of an example in two batches of one size, relative and in nats."""
OF_MASS = 2e-3
"""Difference from 1 of the sum of an example's class probabilities that may come from rounding."""
MOST_CLASSES = 10
"""Classes for each example of a batch above which their densities are not summed."""
SIGN_LOOKS = 3
"""Looks at log_likelihood's sign."""


class FirstBatches:
    """Looks at the batches 1, 2, 4, …, 64 of a fit: seven synchronizations with the device, and none later."""

    def __init__(self, model: EnergyModel, chains: StackedChains | None, are_rows: bool) -> None:
        self._model = model
        self._chains = chains
        self._passes = ForwardPasses(model, chains, are_rows)
        self._seen = 0
        self.counted: int | None = None
        """Data that the likelihood counts in the first batch."""
        self.has_missing = False
        """Whether a target of the batches looked at is not observed."""
        self._outputs = (math.inf, -math.inf)
        self._signs = (math.inf, -math.inf)
        self._is_own = (
            model.likelihood is None
            or overrides(model, "log_likelihood")
            or not type(model.likelihood).log_prob.__module__.startswith(f"{likelihoods.__name__}.")
        )
        self._looks_at_sign = SIGN_LOOKS if self._is_own else 0
        self.targets: list[Tensor] = []
        """The targets of the batches looked at, on the CPU; none if the likelihood does not see them."""

    @property
    def change_inputs(self) -> bool:
        """Whether the network changes its inputs in place, so that each chain needs a copy of a shared batch."""
        return self._passes.change_inputs

    @property
    def is_looking(self) -> bool:
        """Whether some of the coming batches are looked at."""
        return self._seen < LAST

    def takes(self, batch: Any) -> bool:
        """Return whether this batch is looked at; if so, check it before its energy is computed."""
        if self._seen >= LAST:
            return False
        self._seen += 1
        if self._seen & (self._seen - 1):
            return False
        self._passes.look(batch[0] if isinstance(batch, ChainBatches) else batch)
        if self.change_inputs:
            batch = ChainBatches(cloned([*batch])) if isinstance(batch, ChainBatches) else cloned(batch)
        low, high, target = check_batch(self._model, self._chains, batch)
        if self._seen == 1:
            _check_observed(self._model, target)
            _check_scaling(self._model, target)
            with at_first_chain(self._model, self._chains, batch) as first:
                each = self._model.log_likelihood(first)
                check_shape(each)
                _check_alone(self._model, first, each, self._is_own)
            self.counted = len(each)
        if self._is_own:
            with at_first_chain(self._model, self._chains, batch) as first:
                self._is_own = not _has_other_mass(self._model, first)
        observed = None if self._model.likelihood is None or target is None else self._model.likelihood.observed(target)
        self.has_missing |= observed is not None and not bool(observed.all())
        if isinstance(target, Tensor) and target.numel() <= MOST_TARGETS:
            self.targets.append(target.detach().cpu())
        self._outputs = (min(low, self._outputs[0]), max(high, self._outputs[1]))
        if self._seen == LAST and self._model.likelihood is not None:
            doubt = self._model.likelihood.doubt(*self._outputs)
            if doubt is not None:
                rank_zero_warn(f"In the first {LAST} batches {doubt}.")
        return True

    def after(self, log_likelihood: Tensor) -> None:
        """Check the sign of a batch's log-likelihoods, shape (…, n), of one or more chains."""
        if self._looks_at_sign == 0 or log_likelihood.numel() == 0:
            return
        least, most = torch.stack(log_likelihood.detach().aminmax()).tolist()
        low, high = self._signs = min(self._signs[0], least), max(self._signs[1], most)
        self._looks_at_sign = 0 if low <= 0 else self._looks_at_sign - 1
        if low > 0 and self._looks_at_sign == 0:
            rank_zero_warn(
                f"log_likelihood returned {low:.3g} to {high:.3g} for the first batches, all above 0, whereas the log "
                "of a probability is at most 0: if it is a loss, return its negative (only the log of a density may "
                "be above 0)."
            )


def check_batch(model: EnergyModel, chains: StackedChains | None, batch: Any) -> tuple[float, float, Tensor | None]:
    """Check a batch by the model's likelihood; return its smallest and largest output and its targets."""
    if model.likelihood is None or overrides(model, "log_likelihood"):
        return math.inf, -math.inf, None
    with at_first_chain(model, chains, batch) as first:
        _check_tokens(model, first)
        try:
            output, target = model.output_and_target(first)
        except RuntimeError as error:
            _explain(model, first, error)
            raise
        model.likelihood.check_target(output, target)  # which may use parameters of the likelihood
    if not isinstance(output, Tensor) or output.numel() == 0:
        return math.inf, -math.inf, target
    low, high = torch.stack(output.aminmax()).tolist()
    return low, high, target


def _explain(model: EnergyModel, batch: Any, error: RuntimeError) -> None:
    """Raise ValueError where a network's first linear layer takes another number of inputs than a batch has."""
    layer = next((layer for layer in model.modules() if isinstance(layer, nn.Linear)), None)
    inputs, _ = model.inputs_and_target(batch)
    if layer is None or not isinstance(inputs, Tensor) or inputs.dim() != 2 or "shapes" not in str(error):
        return
    if inputs.shape[1] != layer.in_features:
        raise ValueError(
            f"a batch has {inputs.shape[1]} inputs for each example, and the network's first linear layer takes "
            f"{layer.in_features}: make it nn.Linear({inputs.shape[1]}, {layer.out_features})"
        ) from error


@contextmanager
def at_first_chain(model: EnergyModel, chains: StackedChains | None, batch: Any) -> Iterator[Any]:
    """Within the context, which has the first chain's batch, the model is that chain in evaluation mode.

    Its buffers stay as they are.
    """
    at_first = chains.at(0) if chains is not None else nullcontext()
    with torch.no_grad(), unlogged(model), undisturbed_generators(model), evaluation_mode(model), at_first:
        held = [
            (part, key, f"{prefix}.{key}".lstrip("."), buffer, version_of(buffer), buffer.clone())
            for prefix, part in model.named_modules()
            for key, buffer in part._buffers.items()
            if buffer is not None
        ]
        yield batch[0] if isinstance(batch, ChainBatches) else batch
        for part, key, name, buffer, version, numbers in held:
            present = part._buffers[key]
            if present is buffer and version_of(buffer) == version:
                continue
            part._buffers[key] = buffer
            if present is None or not torch.equal(present, numbers):
                buffer.copy_(numbers)
                rank_zero_warn(
                    f"The network writes to the buffer '{name}' in evaluation mode too, so that one prediction changes "
                    "the next: write to it `if self.training`. Observers of quantisation are switched off by "
                    "net.apply(torch.ao.quantization.disable_observer)."
                )


def _check_alone(model: EnergyModel, batch: Any, each: Tensor, is_own: bool) -> None:
    """Warn if the log density of an example depends on the others in its batch: on their number, if it is a user's
    (`is_own`), else on their values, since a network rounds differently in a batch of another size."""
    count, half = len(each), len(each) // 2
    tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    if half == 0 or not tensors or any(leaf.shape[:1] != (count,) for leaf in tensors):
        return
    rows = torch.arange(count)[-half:]
    rows = rows if is_own else torch.cat([rows, torch.arange(count)[half:]])  # the second half twice
    try:
        part = pytree.tree_map(lambda leaf: leaf[rows.to(leaf.device)] if isinstance(leaf, Tensor) else leaf, batch)
        found = model.log_likelihood(part)
    except Exception:  # code for one size of batch is the user's right
        return
    if found.shape != rows.shape:
        return
    rounded, least = (ROUNDED, LEAST) if is_own else (BY_OTHERS, BY_OTHERS)
    differs = ~torch.isclose(found[-half:], each[-half:], rtol=rounded, atol=least, equal_nan=True)
    if bool(differs.any()) and torch.equal(model.log_likelihood(part), found):  # or else it draws numbers
        place = int(differs.nonzero()[0]) - half
        remedy = (
            f"in one of {half}: return each example's own log density, without a mean over the batch, since the energy "
            "adds the data up and scales them to N."
            if is_own
            else "among other examples, so predictions depend on what comes with them: pass batch_first=True to "
            "attention and recurrent layers of inputs (n, T, D), and do not normalise by the batch in evaluation mode "
            "(track_running_stats=False)."
        )
        rank_zero_warn(
            f"log_likelihood of the same example is {float(each[place]):.4g} in a batch of {count} and "
            f"{float(found[place]):.4g} {remedy}"
        )


def _has_other_mass(model: EnergyModel, batch: Any) -> bool:
    """Warn, and return True, if a user's densities of the first example's classes do not sum to 1."""
    if model.likelihood is None:
        return False
    try:
        each, terms, target = model.score(batch)
    except Exception:  # a log_likelihood of the user's may take other batches
        return False
    found = terms.get("probabilities", terms.get("dense_probabilities"))
    count, ignored = len(each), getattr(model.likelihood, "ignore_index", None)
    leaves, shape = pytree.tree_flatten(batch)
    if found is None or count == 0 or not any(leaf is target for leaf in leaves) or not isinstance(target, Tensor):
        return False
    classes, of_one = found.shape[-1], target[0].numel()
    if target.shape == found.shape:  # soft labels
        choices = torch.eye(classes, dtype=target.dtype, device=target.device)
    elif (of_one > 1 and ignored is None) or classes > MOST_CLASSES * count:
        return False
    else:
        choices = target.new_full((classes, of_one), 0 if ignored is None else ignored)
        choices[:, 0] = torch.arange(classes, device=target.device)
        choices = choices.view(classes, *target.shape[1:])

    def masses() -> Tensor:
        of_parts = []
        for part in choices.split(count):
            repeated = [
                leaf[:1].repeat(len(part), *[1] * (leaf.dim() - 1))
                if isinstance(leaf, Tensor) and leaf.shape[:1] == (count,)
                else leaf
                for leaf in leaves
            ]
            taken = [part if leaf is target else own for leaf, own in zip(leaves, repeated, strict=True)]
            of_parts.append(model.log_likelihood(pytree.tree_unflatten(taken, shape)))
        return torch.cat(of_parts).exp()

    try:
        total = float(masses().sum())
        is_one = abs(total - 1) <= OF_MASS or not math.isclose(total, float(masses().sum()))  # or it draws numbers
    except Exception:  # code for one size of batch is the user's right
        return False
    if not is_one:
        name = type(model if overrides(model, "log_likelihood") else model.likelihood).__name__
        rank_zero_warn(
            f"The densities of {name} sum to {total:.4g} over the {classes} classes of an example, and those of a "
            "likelihood to 1, so this is another loss (class weights, focal terms, label smoothing and margins do "
            "that): its samples are of no posterior, and what is called NLL is not the probabilities'. Use a "
            "likelihood of the library, and choose rare classes by their cost (docs/howto/decisions.md)."
        )
    return not is_one


def _check_observed(model: EnergyModel, target: Any) -> None:
    """Raise ValueError if no target of the first batch or of the training data in memory is observed."""
    dataset = getattr(getattr(getattr(model, "_trainer", None), "train_dataloader", None), "dataset", None)
    if model.likelihood is None or dataset is None:
        return
    for some in (target, (getattr(dataset, "tensors", None) or [None])[-1]):
        known = model.likelihood.observed(some) if isinstance(some, Tensor) and len(some) else None
        if known is None or bool(known.any()):
            return
    raise ValueError(
        f"{type(model.likelihood).__name__}: targets must be finite numbers or labels, and all {len(dataset)} of the "
        "training data are NaN or missing, so nothing would be learned: correct the targets"
    )


def _check_scaling(model: EnergyModel, target: Any) -> None:
    """Raise ValueError if the datamodule's scaling of the targets is not one of these targets."""
    scaling = TargetScaling.of_datamodule(getattr(getattr(model, "_trainer", None), "datamodule", None))
    if scaling is not None and model.likelihood is not None and isinstance(target, Tensor):
        model.likelihood.check_scaling(scaling.factor, target)


def _check_tokens(model: EnergyModel, batch: Any) -> None:
    """Raise if the targets of a causal language model are not the next tokens; warn of another network's."""
    likelihood = model.likelihood
    if not isinstance(likelihood, likelihoods.TokenCategorical) or overrides(model, "output_and_target"):
        return
    inputs, labels = model.inputs_and_target(batch)
    fault = fault_of_tokens(inputs, labels, likelihood.ignore_index, model.takes_next_tokens(batch))
    if fault is not None and model.accepted_arguments.shifts_labels:
        raise ValueError(f"TokenCategorical: {fault}")
    if fault is not None:
        rank_zero_warn(f"TokenCategorical: {fault}.")


# -- weights -----------------------------------------------------------------------------------------------------------


LEAST_SHARE = 0.8
"""A given N below this share of the rows that a likelihood counts raises an error at the first batch."""
TOLERANCE = 0.1
"""Relative difference between a given N and what an epoch counts (random crops differ between epochs)."""


class DataWeights:
    """The factor of a mini-batch's log-likelihood, with which every datum weighs the same.

        Ũ = -N·c·Σ_{i in B} log p(y_i|x_i,θ) - log p(θ)   for the data B of all micro-batches and ranks of a step

    c is 1/|B| where B is a random part of the data of a size that its position fixes, so that E[Ũ] = U. Elsewhere c =
    M/T for an epoch of M steps with T data, so that the mean of Ũ over an epoch is U. It also compares what the
    likelihood counts with N, at the first batch and over the first whole epoch.

    Args:
        is_given: whether the user passed N, which is believed where the loader does not show it.
    """

    def __init__(
        self, trainer: pl.Trainer, layout: ChainLayout, num_data: int, is_given: bool, first_batches: FirstBatches
    ) -> None:
        self._trainer = trainer
        self._layout = layout
        self._is_given = is_given
        self.num_data = num_data
        self.rows = training_rows(trainer)
        self.counts_rows = self.rows.is_observed
        """Whether the likelihood counts one datum for each row of the loader, as far as batches have shown."""
        self._first_batches = first_batches
        self._is_new = True
        self._is_compared = False
        self._said_short = False
        self._counted, self._batches, self._sizes = 0, 0, set[int]()
        """Data, batches and sizes of batches of this epoch so far, in this process."""
        self._measured: tuple[int, int] | None = None
        """Data and batches of a whole epoch of a stream with batches of different sizes."""
        self._means: dict[tuple[float, int], float | None] = {}

    def follow(self, num_data: int, rows: TrainingRows) -> None:
        """Take another N and the present rows, when an epoch begins."""
        agreed = self._is_given and self.rows.count == num_data
        self.num_data, self.rows = num_data, rows
        self.counts_rows = self.counts_rows and self.rows.is_observed
        if agreed and self.rows.count not in (num_data, None):
            raise ValueError(contradiction(num_data, self.rows.source, self.rows.count))
        self._counted, self._batches = 0, 0
        self._sizes.clear()
        self._means.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return what earlier batches have shown, by which later ones are weighed."""
        return {"counts_rows": self.counts_rows, "measured": self._measured}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        measured = state.get("measured", ())
        numbers = measured if isinstance(measured, list | tuple) else ()
        is_pair = len(numbers) == 2 and all(isinstance(number, int | float) for number in numbers)
        if "counts_rows" not in state or not (measured is None or is_pair):
            raise ValueError("the checkpoint is damaged in what its batches have shown: resume from another")
        self.counts_rows = self.counts_rows and bool(state["counts_rows"])
        self._measured = None if measured is None else (measured[0], measured[1])
        self._means.clear()

    # -- the weight of a batch ----------------------------------------------------------------------------------------

    def factor(self, batch_idx: int, candidates: int = 1) -> float | None:
        """Return c of Ũ/N times the step's micro-batches, whose gradients are averaged; None for 1/n, a mean."""
        if self._is_new and self._first_batches.counted is not None:
            self._look(self._first_batches.counted, batch_idx)
        if self._first_batches.has_missing and self.counts_rows:
            self._begin_missing()
        accumulated = self._trainer.accumulate_grad_batches
        batches = float(self._trainer.num_training_batches)
        if math.isinf(batches) and self._measured is not None:
            batches = self._measured[1]
        each = accumulated // candidates
        first = batch_idx - batch_idx % accumulated % each
        stop = int(min(first + each, first - first % accumulated + accumulated, batches))
        if self.counts_rows and self.rows.is_random:
            if stop - first <= 1:
                return None
            sizes = [self.rows.size_at(batch) for batch in range(first, stop)]
            known = [size for size in sizes if size is not None]
            if len(known) < len(sizes) or len(set(known)) <= 1:
                return None
            return (stop - first) / sum(known)
        if (batches, each) not in self._means:
            self._means[batches, each] = self._mean_size(batches, each)
        mean = self._means[batches, each]
        return None if mean is None else (stop - first) / mean

    def _mean_size(self, batches: float, each: int) -> float | None:
        """Return the mean number of an epoch's data in `each` micro-batches of this process; None if all are equal."""
        if self._measured is not None:
            return self._measured[0] / math.ceil(self._measured[1] / each)
        if math.isinf(batches):
            return None
        steps, sizes = math.ceil(batches / each), self.rows.sizes_of(int(batches))
        if not self.counts_rows:
            # An epoch may leave out rows: by drop_last, or limit_train_batches.
            come = min(1.0, batches / _epoch_length(self._trainer))
            if sizes is not None and self.rows.share:
                come = sum(sizes) / self.rows.share
            return self.num_data * come / self._layout.ranks_per_chain / steps
        if sizes is None:
            return None if self.rows.share is None else self.rows.share / steps
        if len({sum(sizes[first : first + each]) for first in range(0, len(sizes), each)}) == 1 == len(set(sizes)):
            return None
        return sum(sizes) / steps

    @property
    def differ_by_size(self) -> bool:
        """Whether a mean of steps' energies over an epoch is U only with the batches' sizes as weights."""
        return self._measured is None and (self.rows.dataset is None or (self.counts_rows and self.rows.is_random))

    def fresh_factor(self, rows: int) -> float | None:
        """Return the factor for a batch of random rows, see `factor`."""
        return None if self.counts_rows or self.rows.indices is None else len(self.rows.indices) / rows / self.num_data

    # -- what the likelihood counts -----------------------------------------------------------------------------------

    def _look(self, counted: int, batch_idx: int) -> None:
        """Compare what the likelihood counts in the first batch with the loader's rows."""
        self._is_new = False
        rows, batches = self.rows, self._trainer.num_training_batches
        size = rows.size_at(batch_idx)
        if self.num_data == batches > 1 and counted > 1 and rows.count is None:
            raise ValueError(
                f"num_data={self.num_data} is the number of batches, and each has {counted} data: pass the number of "
                "data"
            )
        if size is not None and size > 1 and counted == 1 and self.num_data > batches:
            raise ValueError(
                f"the log-likelihood of a batch of {size} rows is one number, shape (1,), so it would count as one "
                "datum: return one number for each datum, shape (n,)"
            )
        self._see(counted, batch_idx)
        is_counted = (self.counts_rows or not rows.is_observed) and not self._first_batches.has_missing
        count = rows.count if self._is_given and is_counted and size is not None and size > 1 else None
        if count is not None and not LEAST_SHARE * count <= self.num_data <= count:
            raise ValueError(contradiction(self.num_data, rows.source, count))
        if self._is_given and self.num_data < counted:
            raise ValueError(f"num_data={self.num_data}, but a batch has {counted} data: pass the number of data")

    def _see(self, counted: int, batch_idx: int) -> None:
        """Note whether the data that the likelihood counts in a batch are its rows."""
        rows, size = self.rows, self.rows.size_at(batch_idx)
        if rows.sizes is not None:  # an order may go backwards in other epochs
            are_rows = counted in rows.sizes
        elif size is not None:
            # A plain loader resumed within an epoch starts anew: a whole batch comes at the last one's place.
            are_rows = counted in (size, rows.batch_size)
        else:
            are_rows = rows.batch_size is None or counted <= rows.batch_size
        if (are_rows and not rows.whole) or not self.counts_rows:
            return
        if not self._is_given:
            raise ValueError(
                f"the log-likelihood counts {counted} data in a batch of {size or rows.batch_size} rows, so the number "
                f"of training data is not {rows.source} ({self.num_data}): pass num_data=…, the number of all that it "
                "counts in the training data (nodes, tokens, …), or return one number for each row"
            )
        self.counts_rows = False
        self._means.clear()

    def _begin_missing(self) -> None:
        """Weigh batches by an epoch's data, since unobserved targets in them do not count."""
        if not self._is_given:
            raise ValueError(
                f"targets of the training data are not observed (NaN, or the likelihood's missing=), so N is not "
                f"{self.rows.source} ({self.num_data}): pass num_data=…, the number of data with an observed target"
            )
        self.counts_rows = False
        self._means.clear()

    def add(self, counted: int, batch_idx: int, batches: int = 1) -> None:
        """Add what the likelihood counted in a batch, or in each of several from it on."""
        self._see(counted, batch_idx)
        self._counted += counted * batches
        self._batches += batches
        self._sizes.add(counted)

    def end_epoch(self) -> None:
        """Compare what the likelihood counted in the first whole epoch with N."""
        trainer = self._trainer
        batches = float(trainer.num_training_batches)
        seen, steps = trainer.fit_loop.batch_idx + 1, trainer.max_steps
        has_ended = not trainer.should_stop and (steps == -1 or trainer.global_step < steps)
        if has_ended and seen < batches < math.inf and not self._said_short:
            self._said_short = True
            rank_zero_warn(
                f"An epoch had {seen} batches, and the training loader's length or limit_train_batches says "
                f"{int(batches)}: the trainer validates after the last of these only, and a schedule is planned for "
                "all of them, so its last samples are missing. Let both be the true number."
            )
        if not trainer.is_last_batch or self._batches != trainer.fit_loop.batch_idx + 1:
            return
        if math.isfinite(batches) and not self._batches == batches == _epoch_length(trainer):
            return
        if self.rows.dataset is None and len(self._sizes) > 1:
            self._measured = (self._counted, self._batches)
            self._means.clear()
        if self._is_compared:
            return
        self._is_compared = True
        total, ranks = self._counted, self._layout.ranks_per_chain
        if ranks > 1:
            root = trainer.strategy.root_device
            number = torch.tensor([float(total)], dtype=torch.float64, device=exact_device(root))
            total = round(float(self._layout.mean_over_data(number)) * ranks)
        if self.rows.dataset is None:
            self._compare_stream(total)
        elif not self.rows.replacement:
            self._compare(total)

    def _compare(self, total: int) -> None:
        """Compare N with the data counted in an epoch over all rows of a data set."""
        rows, num_data = self.rows, self.num_data
        sizes = rows.sizes_of(self._batches)
        delivered = rows.share if sizes is None else sum(sizes)
        if delivered is None or rows.indices is None or not rows.is_observed or self._first_batches.has_missing:
            return  # a batch's log-likelihoods do not show how many targets are observed
        if self.counts_rows and self._counted == delivered:
            if self._is_given and rows.count is not None and num_data != rows.count:
                raise ValueError(contradiction(num_data, rows.source, rows.count))
            return
        if not self._is_given:
            raise ValueError(
                f"the likelihood counted {total} data in an epoch, but N is {num_data}, {rows.source}: pass "
                f"num_data=…, the number of data that it counts in all training data ({total}, if each epoch counts as "
                "many)"
            )
        # A short last batch that is left out counts too.
        whole = total * (rows.share or delivered) / delivered
        if abs(whole - num_data) > TOLERANCE * num_data:
            raise ValueError(
                f"the likelihood counted {total} data in an epoch, but num_data={num_data}: pass the number of data "
                "that it counts in all training data"
            )
        if total != num_data:
            rank_zero_info(f"The likelihood counted {total} data in the first epoch; N is {num_data}, as given.")

    def _compare_stream(self, total: int) -> None:
        """Compare N with the data counted in an epoch of a stream."""
        num_data, ranks = self.num_data, self._layout.ranks_per_chain
        workers = max(getattr(self._trainer.train_dataloader, "num_workers", 0), 1)
        copies = round(total / num_data)
        is_near = abs(total - copies * num_data) <= TOLERANCE * num_data  # batches may be left out
        if is_near and copies > 1 and copies in (workers, ranks, workers * ranks):
            which = f"{workers} workers" if copies == workers else f"{ranks} ranks"
            raise ValueError(
                f"an epoch of the stream had {total} data, {copies} times num_data={num_data}: each of {which} reads "
                "all data, so let its __iter__ yield a part (torch.utils.data.get_worker_info(), or "
                "datasets.distributed.split_dataset_by_node)"
            )
        groups = self._layout.total_chains // self._layout.num_chains
        if groups > 1 and abs(total * groups - num_data) <= TOLERANCE * num_data:
            raise ValueError(
                f"an epoch of the stream had {total} data for each chain, a {groups}th of num_data={num_data}: every "
                "chain needs all data, so divide the stream among the ranks of a chain alone (with strategy='chains', "
                "do not split it by node)"
            )
        if total != num_data:
            than = "more" if total > num_data else "fewer"
            rank_zero_warn(
                f"An epoch had {than} than num_data={num_data} data, {total} in {self._batches} batches: num_data is "
                "the number of different training data, to which the prior and the noise are scaled (if an epoch is no "
                "pass over the data, pass limit_train_batches)."
            )


def _epoch_length(trainer: pl.Trainer) -> float:
    """Return the batches of an epoch of all training loaders, without the trainer's limits; infinite if unknown."""
    lengths = [_length(loader) for loader in flat_loaders(trainer.train_dataloader)]
    ends_first = getattr(trainer.fit_loop._combined_loader, "_mode", None) == "min_size"
    return min(lengths) if ends_first else max(lengths)


def _length(loader: object) -> float:
    try:
        return len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return math.inf
