"""The padding row of an embedding is no parameter: it stays at its value, and the law is that of the other rows."""

import copy
import math
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import BayesianModule
from lightning_sgmcmc.callbacks import ChainHealth, SampleCollector, SamplingSchedule
from lightning_sgmcmc.likelihoods import Categorical, Gaussian
from lightning_sgmcmc.priors import FlatPrior, GaussianPrior, HierarchicalPrior, LaplacePrior, Prior, StudentTPrior
from lightning_sgmcmc.priors.state import sampled_columns, with_row, without_row
from lightning_sgmcmc.reference.problem import Problem
from lightning_sgmcmc.samplers import MCLMC, SGHMC, SGLD, SGNHT, UnderdampedLangevin, pMCLMC, pSGLD
from tests.support.trainers import quiet_trainer

WORDS, PAD, N, STD = 5, 2, 42, 0.5
generator = torch.Generator().manual_seed(3)
IDS = torch.randint(0, WORDS, (N, 4), generator=generator)
COUNTS = torch.stack([(word == IDS).sum(1) for word in range(WORDS) if word != PAD], 1).double()
Y = COUNTS.float() @ torch.tensor([[1.0], [-0.5], [0.2], [0.0]]) + STD * torch.randn(N, 1, generator=generator)


class Sum(nn.Module):
    """The sum of embeddings, so the padding row's value, zero, does not count; `tied` adds a use of all rows."""

    def __init__(self, bag: str = "", width: int = 1, tied: bool = False) -> None:
        super().__init__()
        self.words = (
            nn.EmbeddingBag(WORDS, width, padding_idx=PAD, mode=bag)
            if bag
            else nn.Embedding(WORDS, width, padding_idx=PAD)
        )
        self.tied = nn.Linear(width, WORDS, bias=False) if tied else None
        if self.tied is not None:
            self.tied.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        found = self.words(ids)
        found = found if found.dim() == 2 else found.sum(1)
        return found if self.tied is None else self.tied(found)


def fitted(net: nn.Module, steps: int = 40, callbacks: tuple[Any, ...] = (), **options: Any) -> BayesianModule:
    likelihood = Categorical() if isinstance(net, Sum) and net.tied is not None else Gaussian(STD)
    target = IDS[:, 0] if isinstance(likelihood, Categorical) else Y
    settings: dict[str, Any] = {"sampler": SGLD, "lr": 0.05, "likelihood": likelihood}
    module = BayesianModule(net, **(settings | options))
    schedule = SamplingSchedule(burn_in_steps=steps // 4, every_n_steps=2)
    trainer = quiet_trainer(max_steps=steps, callbacks=[schedule, SampleCollector(in_memory=True), *callbacks])
    trainer.fit(module, DataLoader(TensorDataset(IDS, target), 8, shuffle=True))
    return module


MEMBERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "embedding": (Sum, {}),
    "bag, sum": (lambda: Sum("sum"), {}),
    "bag, mean": (lambda: Sum("mean"), {}),
    "two chains in a loop": (Sum, {"num_chains": 2, "chain_execution": "loop", "sampler": SGHMC}),
    "two chains by vmap": (Sum, {"num_chains": 2, "chain_execution": "vmap", "sampler": SGHMC}),
    "pSGLD": (Sum, {"sampler": pSGLD, "num_chains": 2}),
    "underdamped": (Sum, {"sampler": UnderdampedLangevin, "num_chains": 3}),
    "SGNHT": (Sum, {"sampler": SGNHT}),
    "MCLMC": (lambda: nn.Sequential(Sum(width=2), Mean()), {"sampler": MCLMC}),
    "pMCLMC, rows": (Sum, {"sampler": pMCLMC, "num_chains": 2, "chain_execution": "vmap"}),
    "tied": (lambda: Sum(width=3, tied=True), {"num_chains": 2}),
    "hierarchical": (Sum, {"prior": HierarchicalPrior(every_n_steps=3)}),
    "hierarchical, chains": (Sum, {"prior": HierarchicalPrior(every_n_steps=3), "num_chains": 2}),
    "Laplace prior": (Sum, {"prior": LaplacePrior()}),
    "Student prior": (Sum, {"prior": StudentTPrior(), "num_chains": 2, "chain_execution": "vmap"}),
    "centre": (Sum, {"prior": GaussianPrior(1.0, center="start"), "num_chains": 2}),
}


@pytest.mark.parametrize("member", MEMBERS)
def test_the_padding_row_stays(member: str) -> None:
    make, options = MEMBERS[member]
    module = fitted(make(), **options)
    name = next(name for name, _ in module.named_parameters() if name.endswith("words.weight"))
    states = torch.stack([sample.parameters[name] for sample in module.posterior])
    assert states[:, PAD].abs().max() == 0
    assert states.std(0).gt(0).sum() == states[0].numel() - states.shape[-1]
    texts, padding = IDS[:5], torch.full((5, 7), PAD)
    means = [module.posterior.predict(x) for x in (texts, torch.cat([texts, padding], 1))]
    key = "probabilities" if hasattr(means[0], "probabilities") else "mean"
    torch.testing.assert_close(getattr(means[0], key), getattr(means[1], key))


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1, keepdim=True)


@pytest.mark.parametrize(
    ("sampler", "lr", "steps"),
    [
        (SGLD, 0.01, 420),
        pytest.param(MCLMC, 0.05, 2500, marks=pytest.mark.slow),
        pytest.param(UnderdampedLangevin, 0.02, 2500, marks=pytest.mark.slow),
    ],
)
def test_the_law_is_the_conjugate_one_of_the_other_rows(sampler: Any, lr: float, steps: int) -> None:
    options: dict[str, Any] = {"sampler": sampler, "lr": lr, "num_chains": 32, "chain_execution": "vmap"}
    module = BayesianModule(Sum(), Gaussian(STD), **options)
    schedule = SamplingSchedule(burn_in_steps=steps // 3, every_n_steps=steps // 15)
    trainer = quiet_trainer(max_steps=steps, callbacks=[schedule, SampleCollector(in_memory=True)])
    trainer.fit(module, DataLoader(TensorDataset(IDS, Y), N))
    draws = torch.stack([without_row(s.parameters["net.words.weight"], PAD)[:, 0] for s in module.posterior]).double()
    precision = COUNTS.T @ COUNTS / STD**2 + torch.eye(WORDS - 1, dtype=torch.float64)
    mean = torch.linalg.solve(precision, COUNTS.T @ Y[:, 0].double() / STD**2)
    std = precision.inverse().diagonal().sqrt()
    error = std / math.sqrt(len(draws) / 4)  # draws of a chain are correlated
    assert (draws.mean(0) - mean).abs().div(error).max() < 4.5
    torch.testing.assert_close(draws.std(0), std, rtol=0.25, atol=0)


class OwnPrior(Prior):
    """Shapes as a user's prior gets them."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def log_prob(self, parameters: Any) -> Tensor:
        self.shapes.append(tuple(parameters["net.words.weight"].shape))
        return -sum(p.square().sum() for p in parameters.values()) / 2


PRIORS: dict[str, Any] = {
    "Gaussian": lambda state: GaussianPrior(0.7),
    "by fan-in": lambda state: GaussianPrior("fan_in"),
    "centred": lambda state: GaussianPrior(0.7, center=state),
    "hierarchical": lambda state: HierarchicalPrior(),
    "hierarchical, centred": lambda state: HierarchicalPrior(center=state),
    "Laplace": lambda state: LaplacePrior(0.7),
    "Student": lambda state: StudentTPrior(3.0, 0.7),
    "flat": lambda state: FlatPrior(),
    "own": lambda state: OwnPrior(),
}


@pytest.mark.parametrize("prior", PRIORS)
def test_the_prior_is_that_of_the_network_without_the_row(prior: str) -> None:
    """Its density, in each way to compute it, is that of a network whose table is one row shorter."""
    torch.manual_seed(0)
    net = nn.Module()
    net.words = nn.Embedding(WORDS, 3, padding_idx=PAD)
    short = nn.Module()
    short.words = nn.Embedding(WORDS - 1, 3)
    center = {"words.weight": torch.randn(WORDS, 3)}
    of_short = {"words.weight": without_row(center["words.weight"], PAD)}
    with torch.no_grad():
        net.words.weight[PAD] = 7.0
        short.words.weight.copy_(without_row(net.words.weight, PAD))
    found, expected = (
        BayesianModule(n, Gaussian(), PRIORS[prior](c), num_data=1).log_prior()
        for n, c in ((net, center), (short, of_short))
    )
    torch.testing.assert_close(found, expected)
    if found.requires_grad:
        found.backward()
        expected.backward()
        assert net.words.weight.grad[PAD].abs().max() == 0
        torch.testing.assert_close(without_row(net.words.weight.grad, PAD), short.words.weight.grad)


@pytest.mark.parametrize("execution", ["loop", "vmap"])
@pytest.mark.parametrize("prior", ["Gaussian", "hierarchical", "hierarchical, centred", "own"])
def test_the_reference_is_the_gradient_of_its_own_energy(prior: str, execution: Any) -> None:
    net = Sum(width=2, tied=True)
    own = PRIORS[prior](copy.deepcopy(net).state_dict())
    module = BayesianModule(net, Categorical(), own, chain_execution=execution)
    problem = Problem(module, (IDS, IDS[:, 0]), N, 2, "same", 0, torch.float64)
    row = (
        problem.initial + 0.3 * torch.randn(problem.initial.shape, generator=torch.Generator().manual_seed(1)).double()
    )
    assert row.shape == (2, 2 * (WORDS - 1))
    _, gradient = problem.energy(row)
    for i in range(row.shape[1]):
        step = torch.zeros_like(row)
        step[:, i] = 1e-6
        numeric = (problem.energy(row + step)[0] - problem.energy(row - step)[0]) / 2e-6
        torch.testing.assert_close(gradient[:, i], numeric, rtol=1e-5, atol=1e-5)
    sample = problem.sample(row[0], 1.0, 1, 0)
    assert sample.parameters["net.words.weight"].shape == (WORDS, 2)
    assert sample.parameters["net.words.weight"][PAD].abs().max() == 0


class Sees(pl.Callback):
    """Keeps what ChainHealth counts as coordinates."""

    def __init__(self, health: ChainHealth) -> None:
        self.health = health

    def on_train_batch_end(self, *_: Any) -> None:
        assert self.health._observer is not None
        self.numels = self.health._observer._numels


@pytest.mark.parametrize("chains", [1, 2])
def test_the_kinetic_temperature_counts_sampled_entries(chains: int) -> None:
    health = ChainHealth(every_n_steps=2)
    sees = Sees(health)
    net = nn.Sequential(Sum(width=2), Mean())
    fitted(net, 12, (health, sees), sampler=SGHMC, num_chains=chains)
    assert sees.numels == [2 * (WORDS - 1)]


def masked(net: Any) -> None:
    mask = torch.ones_like(net.words.weight)
    mask[0] = 0
    net.words.weight.register_hook(lambda gradient: gradient * mask)


def zeroed_in_place(net: Any) -> None:
    net.words.weight.register_hook(lambda gradient: gradient[0].zero_() and None)


def accumulated(net: Any) -> None:
    net.words.weight.register_post_accumulate_grad_hook(lambda parameter: None)


def full_backward(net: Any) -> None:
    net.words.register_full_backward_hook(lambda layer, given, found: None)


HOOKS = [
    (masked, "'net.words.weight' has a hook"),
    (zeroed_in_place, "'net.words.weight' has a hook"),
    (lambda net: net.words.weight.register_hook(lambda g: g.clamp(-1, 1)), "'net.words.weight' has a hook"),
    (accumulated, "register_post_accumulate_grad_hook"),
    (full_backward, "'net.words' has a backward hook"),
]


@pytest.mark.parametrize("chains", [1, 2])
@pytest.mark.parametrize(("hook", "words"), HOOKS)
def test_a_hook_that_changes_gradients_is_refused(hook: Any, words: str, chains: int) -> None:
    net = Sum()
    hook(net)
    with pytest.raises(ValueError, match=words):
        fitted(net, num_chains=chains)


def test_the_reference_refuses_a_hook() -> None:
    net = Sum()
    masked(net)
    with pytest.raises(ValueError, match="has a hook"):
        Problem(BayesianModule(net, Gaussian()), (IDS, Y), N, 1, "same", 0, None)


def test_a_hook_that_observes_gradients_is_kept() -> None:
    net, seen = Sum(), []
    net.words.weight.register_hook(lambda gradient: seen.append(float(gradient.norm())))
    fitted(net, 4)
    assert len(seen) >= 4


@pytest.mark.parametrize("chains", [1, 2])
def test_pruned_entries_follow_the_prior_and_predictions_leave_them_out(chains: int) -> None:
    net = nn.Sequential(nn.Embedding(WORDS, 3), nn.Flatten(), nn.Linear(12, 1))
    prune.random_unstructured(net[2], "weight", 0.5)
    module = fitted(net, 60, num_chains=chains)
    before = module.posterior.predict(IDS[:5]).mean
    for sample in module.posterior:
        weight = sample.parameters["net.2.weight_orig"]
        weight[sample.buffers.get("net.2.weight_mask", net[2].weight_mask)[..., :1, :].reshape(weight.shape) == 0] += (
            9.0
        )
    torch.testing.assert_close(module.posterior.predict(IDS[:5]).mean, before)


@pytest.mark.parametrize("wrap", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_parametrised_layers_run_beside_a_padding_row(wrap: Any) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(Sum(width=3), wrap(nn.Linear(3, 1)))
    module = fitted(net, 12, num_chains=2, lr=0.01)
    assert all(s.parameters["net.0.words.weight"][PAD].abs().max() == 0 for s in module.posterior)


def test_rows_go_and_come_back() -> None:
    table = torch.arange(24.0).reshape(2, 4, 3)
    for row in range(4):
        short = without_row(table, row, 1)
        assert torch.equal(with_row(short, row, table[:, row], 1), table)
        flat = torch.cat([table.reshape(2, -1)[:, part] for part in sampled_columns({"a": table}, {"a": row}, 1)], 1)
        assert torch.equal(flat, short.reshape(2, -1))
