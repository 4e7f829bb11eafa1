"""Fits that would end well and be wrong: what the user does | the sentence that is raised, or shown once."""

import json
import math
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, DataLoader, Sampler, Subset, SubsetRandomSampler, TensorDataset

from lightning_sgmcmc import (
    SGHMC,
    BayesianModule,
    Bernoulli,
    Categorical,
    GaussianPrior,
    LaplacePrior,
    NonFiniteEnergyError,
    ResumableLoader,
    StudentTPrior,
    TokenCategorical,
)
from lightning_sgmcmc.callbacks import (
    BayesianModelAverage,
    CyclicalSchedule,
    RunSummary,
    SampleCollector,
    SamplingSchedule,
)
from lightning_sgmcmc.report import write_report
from tests.support.problems import Stream
from tests.support.small_run import BATCH, COUNT, data, loader, module, tensors
from tests.support.small_run import fit_every_step as fit
from tests.support.trainers import quiet_trainer

X, Y = tensors()
ALONE = "predictions depend on what comes with them"
LATER = torch.cat([torch.zeros(2 * BATCH), torch.ones(BATCH)])
"""1 for the data of the third batch, which is not among the batches 1, 2, 4, …"""


def binary(*layers: nn.Module, **options: Any) -> BayesianModule:
    return module(net=nn.Sequential(nn.Linear(2, 1), *layers), likelihood=Bernoulli(), **options)


class Function(nn.Module):
    """A network whose last function is no layer."""

    def __init__(self, function: Callable[[Tensor], Tensor], outputs: int) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(2, outputs), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


class Share(BayesianModule):
    """A log likelihood that is divided by the number of data in the batch."""

    def log_likelihood(self, batch: Any) -> Tensor:
        return -F.cross_entropy(self(batch[0]), batch[1], reduction="none") / len(batch[1])


class Mean(BayesianModule):
    """The mean over the batch, once for each datum."""

    def log_likelihood(self, batch: Any) -> Tensor:
        return -F.cross_entropy(self(batch[0]), batch[1]).expand(len(batch[1]))


class Auxiliary(nn.Linear):
    """Returns a second output in training mode, as networks with auxiliary heads do."""

    def __init__(self) -> None:
        super().__init__(2, 2)

    def forward(self, input: Tensor) -> Any:
        output = super().forward(input)
        return (output, output) if self.training else output


class Loss(BayesianModule):
    """Its log-likelihood has the sign of a loss."""

    def log_likelihood(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1], reduction="none")


class Own(Loss):
    """A log likelihood of the user's own that is right."""

    def log_likelihood(self, batch: Any) -> Tensor:
        return -super().log_likelihood(batch)


class Noisy(Loss):
    """A log likelihood of inputs with noise of its own."""

    def log_likelihood(self, batch: Any) -> Tensor:
        return -super().log_likelihood([batch[0] + torch.randn_like(batch[0]), batch[1]])


class Attention(nn.Module):
    """Attends over the examples of a batch instead of over their two places."""

    def __init__(self, batch_first: bool = False) -> None:
        super().__init__()
        self.grow, self.head = nn.Linear(1, 4), nn.Linear(4, 2)
        self.attention = nn.MultiheadAttention(4, 1, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        grown = self.grow(x[..., None])
        output: Tensor = self.head(self.attention(grown, grown, grown)[0].mean(1))
        return output


class Recurrent(nn.Module):
    """Passes its state from one example of the batch to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.RNN(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x[..., None])[0].mean(1)
        return output


def focal(each: Tensor) -> Tensor:
    return (1 - each.exp()).square() * each


class Focal(Categorical):
    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        return focal(super().log_prob(output, target))


class FocalModule(Own):
    def log_likelihood(self, batch: Any) -> Tensor:
        return focal(super().log_likelihood(batch))


class Weighted(Bernoulli):
    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        return super().log_prob(output, target) * (1 + 4 * target[:, 0])


class FocalTokens(TokenCategorical):
    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        each = -F.cross_entropy(output.movedim(-1, 1), target, reduction="none", ignore_index=self.ignore_index)
        return focal(each).sum(1)


class Mislabelled(Categorical):
    """A tenth of the labels are drawn at random: a density that is not that of the predicted probabilities."""

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        return (0.9 * super().log_prob(output, target).exp() + 0.05).log()


class Joined(BayesianModule):
    """Its batch is one of each of several loaders."""

    def inputs_and_target(self, batch: Any) -> tuple[Any, Any]:
        if isinstance(batch[0], Tensor):
            return super().inputs_and_target(batch)
        return torch.cat([x for x, _ in batch]), torch.cat([y for _, y in batch])


ONE = data()
TWICE = ConcatDataset([ONE, ONE])
SOFT = TensorDataset(X, F.one_hot(Y, 2).float())
TOKENS = TensorDataset(X[:, None].repeat(1, 4, 1), torch.stack([Y, Y, Y.new_full(Y.shape, -100), Y], 1))
"""Sequences of four tokens, whose third does not count."""


class Loader:
    """Counts its batches, and nothing else."""

    def __len__(self) -> int:
        return COUNT // BATCH

    def __iter__(self) -> Any:
        return iter(loader())


class Balanced(Sampler[int]):
    """Draws the rows of a rare class three times."""

    def __iter__(self) -> Any:
        return iter([*range(COUNT), 0, 1, 0, 1])


def softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


PATTERN = "which no trainable parameter matches (net.weight, net.bias, …): correct or remove it"
REFUSED: list[tuple[Callable[[], BayesianModule], Any, type[Exception], str]] = [
    *(
        (
            partial(module, net=Function(several, 2), num_chains=chains),
            None,
            TypeError,
            "and Categorical takes one tensor: return it alone, in training mode too, or override output_of(inputs)",
        )
        for several in (lambda x: (x, x), lambda x: [x], lambda x: {"a": x, "b": x})
        for chains in (1, 2)
    ),
    *(
        (module, DataLoader([(x, target) for x in X], BATCH), TypeError, f"the target of a batch is a {kind}, and Cat")
        for target, kind in (({"label": 1, "path": "a"}, "dict"), ("cat", "tuple of 8"))
    ),
    (lambda: module(net=Auxiliary()), None, TypeError, "the network returned a tuple of 2, and Categorical takes one"),
    (
        lambda: module(net=nn.Sequential(nn.Linear(2, 2), nn.Softmax(-1))),
        None,
        ValueError,
        "net ends in Softmax, which Categorical applies itself: it needs logits, so remove that layer",
    ),
    (
        lambda: module(net=nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Softmax(-1)))),
        None,
        ValueError,
        "net ends in Softmax, which Categorical applies itself",
    ),
    (
        lambda: module(net=Function(softmax, 2)),
        None,
        ValueError,
        "and each row sums to 1, but it needs logits: remove the softmax",
    ),
    (
        lambda: module(net=Function(softmax, 2), num_chains=2, chain_execution="vmap"),
        None,
        ValueError,
        "Categorical: the outputs lie in [0.",
    ),
    (
        lambda: module(net=nn.Linear(2, 1)),
        loader(y=0 * Y),
        ValueError,
        "Categorical: one logit makes every datum certain, so nothing would be learned: use Bernoulli",
    ),
    (
        lambda: binary(nn.Sigmoid()),
        None,
        ValueError,
        "net ends in Sigmoid, which Bernoulli applies itself: it needs logits, so remove that layer",
    ),
    (
        lambda: binary(),
        loader(y=Y * 2 - 1),
        ValueError,
        "Bernoulli: targets must be 0 or 1, got -1",
    ),
    (
        lambda: binary(),
        loader(y=Y - 2 * Y * LATER.long()),
        NonFiniteEnergyError,
        "the run stops before step 3 of chain 0, since Bernoulli: targets must be 0 or 1, got -1",
    ),
    (
        lambda: binary(),
        loader(y=Y * (1 - 0.7 * LATER)),
        NonFiniteEnergyError,
        "since Bernoulli: targets must be 0 or 1, got 0.3",
    ),
    (
        lambda: binary(num_chains=2, chain_execution="vmap"),
        loader(y=Y * (1 - 0.7 * LATER)),
        NonFiniteEnergyError,
        "since Bernoulli: targets must be 0 or 1, got 0.3",
    ),
    (
        lambda: binary(sampler=SGHMC, num_chains=2),
        loader(y=Y + 9 * LATER),
        NonFiniteEnergyError,
        "since Bernoulli: targets must be 0 or 1, got 9",
    ),
    (
        module,
        DataLoader(ONE, BATCH, sampler=Balanced()),
        ValueError,
        f"draws by a Balanced, some of {COUNT} rows 3 times in an epoch and others less often; if it balances classes",
    ),
    (
        lambda: module(num_data=3),
        Loader(),
        ValueError,
        "num_data=3 is the number of batches, and each has 8 data: pass the number of data",
    ),
    (
        lambda: module(num_data=3),
        DataLoader(Stream(data()), BATCH),
        ValueError,
        "num_data=3, but a batch has 8 data: pass the number of data",
    ),
    (
        lambda: module(prior=GaussianPrior({"*.wieght": 0.1, "*": 1.0})),
        None,
        ValueError,
        f"the prior's std has the pattern '*.wieght', {PATTERN}",
    ),
    (
        lambda: module(prior=LaplacePrior({"0.*": 0.1, "*": 1.0})),
        None,
        ValueError,
        f"the prior's scale has the pattern '0.*', {PATTERN}",
    ),
    (
        lambda: module(prior=GaussianPrior({"*": 1.0, "*.bias": 10.0})),
        None,
        ValueError,
        "the prior's std never uses the pattern '*.bias', because '*' comes before it and also matches 'net.bias': put",
    ),
    (
        lambda: module(prior=StudentTPrior(scale={"net.*": 1.0, "*.weight": 2.0}), num_chains=2),
        None,
        ValueError,
        "the prior's scale never uses the pattern '*.weight', because 'net.*' comes before it",
    ),
    (
        lambda: module(lr=[0.1, 0.2], num_chains=3),
        None,
        ValueError,
        "lr has 2 values, and the run has 3 chains: pass one for each",
    ),
    (
        lambda: module(temperature=(1.0, 2.0, 3.0), num_chains=2),
        None,
        ValueError,
        "temperature has 3 values, and the run has 2 chains: pass one for each",
    ),
]


@pytest.mark.parametrize(("make", "train", "error", "sentence"), REFUSED)
def test_refused(make: Callable[[], BayesianModule], train: Any, error: type[Exception], sentence: str) -> None:
    """Refused before the first sample of a wrong posterior."""
    torch.manual_seed(0)
    model = make()
    with pytest.raises(error) as caught:
        fit(model, train=train)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


WARNED: list[tuple[Callable[[], BayesianModule], Any, dict[str, Any], str]] = [
    (
        lambda: module(net=Function(torch.sigmoid, 1), likelihood=Bernoulli()),
        None,
        {"max_epochs": 22},
        "In the first 64 batches all outputs lie in [0.",
    ),
    (
        lambda: Loss(net=nn.Linear(2, 2), lr=0.01),
        None,
        {},
        "for the first batches, all above 0, whereas the log of a probability is at most 0: if it is a loss",
    ),
    (
        lambda: Loss(net=nn.Linear(2, 2), lr=0.01, num_chains=2, chain_execution="vmap"),
        None,
        {},
        "log_likelihood returned 0.",
    ),
    *[
        (
            lambda kind=kind, chains=chains: kind(net=nn.Linear(2, 2), lr=0.01, num_chains=chains),
            None,
            {},
            "return each example's own log density, without a mean over the batch",
        )
        for kind in (Share, Mean)
        for chains in (1, 2)
    ],
    (
        lambda: module(num_data=10),
        DataLoader(Stream(data()), BATCH),
        {},
        "An epoch had more than num_data=10 data, 24 in 3 batches",
    ),
    *[
        (
            lambda net=net, chains=chains: module(net=net(), num_chains=chains),
            None,
            {},
            ALONE,
        )
        for net in (
            Attention,
            Recurrent,
            lambda: nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False), nn.Linear(2, 2)),
        )
        for chains in (1, 2)
    ],
    *[
        (make, train, {}, sentence)
        for make, train, sentence in (
            (lambda: module(likelihood=Focal()), None, "The densities of Focal sum to 1."),
            (lambda: module(likelihood=Focal(), num_chains=2), None, "The densities of Focal sum to 1."),
            (
                lambda: FocalModule(net=nn.Linear(2, 2), likelihood=Categorical(), lr=0.01),
                None,
                "The densities of FocalModule sum to 1.",
            ),
            (lambda: module(likelihood=Focal()), DataLoader(SOFT, BATCH), "The densities of Focal sum to 1."),
            (
                lambda: module(net=nn.Linear(2, 1), likelihood=Weighted()),
                DataLoader(TensorDataset(X, Y[:, None].float()), BATCH),
                "The densities of Weighted sum to 0.",
            ),
            (
                lambda: module(net=nn.Linear(2, 3), likelihood=FocalTokens()),
                DataLoader(TOKENS, BATCH),
                "The densities of FocalTokens sum to 1.",
            ),
        )
    ],
    (
        module,
        DataLoader(data(), 9, drop_last=True),
        {},
        "drop_last=True leaves out the last 6 of 24 training data in every epoch, because the loader does not shuffle",
    ),
    *(
        (
            module,
            DataLoader(repeated, BATCH, shuffle=True),
            {},
            f"{more} of the {COUNT + more} training data that N counts",
        )
        for more, repeated in (
            (8, Subset(ONE, [*range(COUNT), *range(8)])),
            (COUNT, TWICE),
            (6, Subset(TWICE, range(COUNT + 6))),
            (6, ConcatDataset([Subset(ONE, range(20)), Subset(ONE, range(14, COUNT))])),
            (1, Subset(ONE, [*range(COUNT), -1])),
        )
    ),
    (
        module,
        DataLoader(data(), BATCH, sampler=SubsetRandomSampler([*range(COUNT), 0, 1])),
        {},
        f"2 of the {COUNT + 2} training data that N counts",
    ),
    (module, ResumableLoader(TWICE, BATCH), {}, f"{COUNT} of the {2 * COUNT} training data that N counts"),
    (
        lambda: Joined(net=nn.Linear(2, 2), likelihood=Categorical(), lr=0.01, num_data=COUNT),
        [loader(), loader()],
        {},
        "An epoch had more than num_data=24 data, 48 in 3 batches",
    ),
    (lambda: module(lr=0.0), None, {}, "lr=0: no parameter moves, so its samples all equal its start"),
    (lambda: module(lr=[0.0, 0.0], num_chains=2), None, {}, "lr=0: no parameter moves"),
    (
        lambda: module(temperature=0.0),
        None,
        {},
        "temperature=0 is optimization: the states that this run collects are not samples of the posterior",
    ),
    (
        module,
        None,
        {"callbacks": [CyclicalSchedule(1, 0.5, 1, temperature=0.0)]},
        "temperature=0 is optimization",
    ),
]


@pytest.mark.parametrize(("make", "train", "options", "sentence"), WARNED)
def test_warned_once(make: Callable[[], BayesianModule], train: Any, options: dict[str, Any], sentence: str) -> None:
    torch.manual_seed(0)
    model = make()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(model, train=train, **options)
    assert sum(sentence in str(warning.message) for warning in caught) == 1


class Scalar(BayesianModule):
    """A mean over the batch, as torch's losses return it."""

    def log_likelihood(self, batch: Any) -> Tensor:
        return -F.cross_entropy(self(batch[0]), batch[1])


def test_a_number_for_the_whole_batch_is_refused_in_validation_too() -> None:
    with pytest.raises(ValueError, match="must return one number per example"):
        fit(Scalar(net=nn.Linear(2, 2), lr=0.01), val=loader(), num_sanity_val_steps=1)


def test_validation_batches_of_several_lengths_end_a_fit_at_its_start() -> None:
    """Not at the first sample, after the burn-in."""
    model, parts = module(net=nn.Linear(2, 3), likelihood=TokenCategorical()), [TOKENS[i] for i in range(2 * BATCH)]
    val = DataLoader([*parts[:BATCH], *[(x[:3], y[:3]) for x, y in parts[BATCH:]]], BATCH)
    callbacks = [SamplingSchedule(burn_in_steps=2, every_n_steps=1), BayesianModelAverage()]
    trainer = quiet_trainer(max_epochs=1, callbacks=callbacks, num_sanity_val_steps=2)
    with pytest.raises(ValueError, match="cannot be joined: pad all batches to one length"):
        trainer.fit(model, DataLoader(TOKENS, BATCH), val)
    assert trainer.global_step == 0


class Augmented(TensorDataset):
    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        x, y = super().__getitem__(index)
        return x + torch.randn_like(x), y


@pytest.mark.parametrize("is_augmented", [True, False])
def test_validation_data_with_a_random_transform_are_named(is_augmented: bool) -> None:
    """As those of `random_split` of an augmented data set; fixed ones, of two loaders, are not."""
    val = [DataLoader(kind(X, Y), BATCH) for kind in (Augmented if is_augmented else TensorDataset, TensorDataset)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(module(), BayesianModelAverage(), val=val)
    assert sum("inputs differ from one sample's pass" in str(one.message) for one in caught) == is_augmented


def test_right_runs_are_not_suspected() -> None:
    """Logits within [0, 1] at the start, shuffled loaders that drop a batch, softmax's log and a density above 1."""
    torch.manual_seed(0)
    right: list[tuple[BayesianModule, Any]] = [
        (binary(lr=0.3, temperature=0.1, seed=0), loader(shuffle=True)),
        (module(), DataLoader(data(), 9, drop_last=True, shuffle=True)),
        (module(net=nn.Sequential(nn.Linear(2, 2), nn.LogSoftmax(-1))), loader()),
        (module(prior=GaussianPrior({"*.bias": 1.0, "*.weight": 2.0, "*": 3.0})), loader()),
        (module(num_data=COUNT), DataLoader(Stream(data()), BATCH)),
        (Own(net=nn.Linear(2, 2), lr=0.01), loader()),
        (Noisy(net=nn.Linear(2, 2), lr=0.01), loader()),
        (Noisy(net=nn.Linear(2, 2), likelihood=Categorical(), lr=0.01), loader()),
        (Own(net=nn.Linear(2, 2), likelihood=Categorical(), lr=0.01), loader()),
        (module(likelihood=Mislabelled()), loader()),
        (module(net=Attention(batch_first=True)), loader()),
        (module(net=nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2), nn.Dropout(0.5))), loader()),
        (module(), DataLoader(ConcatDataset([Subset(ONE, range(10)), Subset(ONE, range(10, COUNT))]), BATCH)),
    ]
    for model, train in right:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(model, train=train, max_epochs=22 if isinstance(model.likelihood, Bernoulli) else 3)
        texts = [str(warning.message) for warning in caught]
        doubts = ("first", "The densities", "same example", "An epoch", "repeat", "drop_last", "temperature=0")
        assert not [text for text in texts if any(doubt in text for doubt in doubts)], texts


def test_a_label_that_bernoulli_does_not_know_has_probability_zero() -> None:
    density = Bernoulli().log_prob(torch.zeros(4), torch.tensor([0.0, 1.0, 0.3, -1.0]))
    torch.testing.assert_close(density, torch.tensor([-math.log(2), -math.log(2), -math.inf, -math.inf]))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_states_of_an_optimization_are_called_so(
    temperature: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the table, in `results.json` and in the report."""
    callbacks = [SampleCollector(tmp_path / "sgmcmc" / "samples"), BayesianModelAverage(), RunSummary()]
    trainer = quiet_trainer(
        max_epochs=1, callbacks=[SamplingSchedule(every_n_steps=1), *callbacks], default_root_dir=tmp_path
    )
    trainer.fit(module(temperature=temperature), loader(), loader())
    name = "states of an optimization (temperature 0)" if temperature == 0 else "samples of a cold ensemble"
    assert f"3 {name} on" in " ".join(capsys.readouterr().out.split())
    assert json.loads((tmp_path / "sgmcmc" / "results.json").read_text())["samples"] == name
    page = write_report(tmp_path / "sgmcmc").read_text()
    assert ("not samples of a posterior" in page) == (temperature == 0)
