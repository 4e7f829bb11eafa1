"""Parameter expansion: the same function, another prior, and samples that are the plain network's."""

import copy
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from lightning_sgmcmc import (
    SGHMC,
    SGLD,
    BayesianModule,
    Categorical,
    Gaussian,
    GaussianPrior,
    HierarchicalPrior,
    Posterior,
    expand,
)
from lightning_sgmcmc.callbacks import SWAG, BayesianModelAverage, ChainHealth, SampleCollector, SamplingSchedule
from lightning_sgmcmc.chains.execution import StatelessCall, network_state
from lightning_sgmcmc.expansion import collapse, collapsed, expansions_of, product, with_factors
from tests.support.comparisons import assert_same
from tests.support.problems import Data
from tests.support.trainers import quiet_trainer

PRIOR = {"*.original[1-9]*": 0.7, "*": 0.3}


def perceptron() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def convolutions() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (1, 4, 4)),
        nn.Conv2d(1, 4, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, groups=2),
        nn.BatchNorm2d(4),
        nn.Flatten(),
        nn.Linear(16, 3),
    )


def moved(network: nn.Module) -> nn.Module:
    """Move all parameters away from the identities."""
    with torch.no_grad():
        for p in network.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    return network


# -- the function -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [(1, 1), (2, 1), (0, 2), (1, 0)])
@pytest.mark.parametrize(("make", "inputs"), [(perceptron, 4), (convolutions, 16)])
def test_an_expanded_network_is_the_same_function_and_collapses(make: Any, inputs: int, depth: Any) -> None:
    plain, x = make().eval(), torch.randn(5, inputs)
    network = expand(make(), depth).eval()
    assert torch.equal(network(x), plain(x))  # products with identities
    moved(network)
    twin = collapse(network)
    torch.testing.assert_close(twin(x), network(x))
    assert not torch.allclose(network(x), plain(x))
    assert [(n, p.shape) for n, p in twin.named_parameters()] == [(n, p.shape) for n, p in plain.named_parameters()]
    assert [type(m) for m in twin.modules()] == [type(m) for m in plain.modules()]
    assert list(network_state(network)) == list(network_state(plain))
    torch.testing.assert_close(network(x), network(x))  # collapsing a copy leaves the network as it is
    assert len(expansions_of(network)) == len(expansions_of(make())) + sum(1 for p in plain.parameters() if p.dim() > 1)


def test_the_product_is_of_matrices() -> None:
    p, v, q, r = (torch.randn(shape) for shape in ((3, 3), (3, 2, 5), (2, 2), (2, 2)))
    expected = torch.einsum("oa,abk,bc,ci->oik", p, v, q, r)
    torch.testing.assert_close(product(v, [p], [q, r]), expected)
    stacked = torch.vmap(lambda *f: product(f[0], f[1:2], f[2:]))(*(t.expand(4, *t.shape) for t in (v, p, q, r)))
    torch.testing.assert_close(stacked, expected.expand(4, *expected.shape))


def test_a_sample_takes_the_place_of_the_product() -> None:
    network, x = moved(expand(perceptron())), torch.randn(5, 4)
    state = {name: torch.randn_like(tensor) for name, tensor in network_state(network).items()}
    plain = perceptron()
    plain.load_state_dict(state)
    before = network(x)
    assert torch.equal(StatelessCall(network, lambda m, x: m(x)).call(state, x), plain(x))
    assert torch.equal(network(x), before)
    whole = with_factors(state, network)
    assert whole.keys() == dict(network.named_parameters()).keys()
    assert torch.equal(torch.func.functional_call(network, whole, (x,)), plain(x))
    assert all(torch.equal(a, b) for a, b in zip(collapsed(whole, network).values(), state.values(), strict=True))


def test_frozen_layers_and_biases_stay() -> None:
    network = perceptron()
    network[0].requires_grad_(False)
    expand(network)
    assert {name for name, p in network.named_parameters() if p.requires_grad} == {
        "2.bias",
        *(f"2.parametrizations.weight.original{i}" for i in range(3)),
    }
    assert network[0].weight is dict(network.named_parameters())["0.weight"]


# -- refusals ---------------------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lora_A = nn.Linear(3, 2)


def tied() -> nn.Module:
    network = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    network[1].weight = network[0].weight
    return network


@pytest.mark.parametrize(
    ("network", "depth", "message"),
    [
        (perceptron, (0, 0), r"depth=\(0, 0\) expands nothing"),
        (perceptron, (1,), "depth must be two"),
        (perceptron, (-1, 1), r"depth\[0\] must be at least 0"),
        (lambda: nn.Sequential(nn.Tanh()), (1, 1), "nothing to expand"),
        (lambda: perceptron().requires_grad_(False), (1, 1), "nothing to expand"),
        (lambda: expand(perceptron()), (1, 1), "parametrization already"),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), (1, 1), "parametrization already"),
        (Adapted, (1, 1), "LoRA"),
        (tied, (1, 1), "'0.weight' and '1.weight' are one weight"),
    ],
)
def test_a_network_that_cannot_be_expanded_is_refused(network: Any, depth: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        expand(network(), depth)


def test_swag_is_refused() -> None:
    with pytest.raises(ValueError, match="without expand"):
        quiet_trainer(max_steps=10, callbacks=[SWAG()]).fit(module(), datamodule=Data())


# -- in a fit ---------------------------------------------------------------------------------------------------------


def module(chains: int = 1, plain: bool = False, **options: Any) -> BayesianModule:
    torch.manual_seed(0)
    x, _ = next(iter(_loader()))
    network = nn.Sequential(nn.Linear(x.shape[1], 6), nn.Tanh(), nn.Linear(6, 3))
    options = {"sampler": SGHMC, "lr": 0.005, "seed": 3, "prior": GaussianPrior(PRIOR if not plain else 0.3)} | options
    return BayesianModule(network if plain else expand(network), Categorical(), num_chains=chains, **options)


def _loader() -> Any:
    data = Data()
    data.setup("fit")
    return data.train_dataloader()


def fit(folder: Path, own: BayesianModule, ckpt: Any = None, steps: int = 16) -> Posterior:
    collector = SampleCollector(folder / "samples")
    checkpoints = pl.callbacks.ModelCheckpoint(
        folder, filename="{step}", every_n_train_steps=10, save_top_k=-1, enable_version_counter=False
    )
    schedule = SamplingSchedule(burn_in_steps=7, every_n_steps=3)
    callbacks = [schedule, collector, BayesianModelAverage(), ChainHealth(every_n_steps=2), checkpoints]
    quiet_trainer(max_steps=steps, enable_checkpointing=True, callbacks=callbacks).fit(
        own, datamodule=Data(), ckpt_path=ckpt
    )
    assert collector.posterior is not None
    return collector.posterior


@pytest.mark.parametrize(("chains", "execution"), [(1, "auto"), (2, "loop"), (2, "vmap"), (2, "unrolled")])
def test_a_store_is_the_plain_networks(chains: int, execution: Any, tmp_path: Path) -> None:
    own = module(chains, chain_execution=execution)
    posterior = fit(tmp_path / "expanded", own)
    plain = fit(tmp_path / "plain", module(chains, plain=True))
    sample, other = posterior.store[0], plain.store[0]
    shapes = [{name: tensor.shape for name, tensor in s.state.items()} for s in (sample, other)]
    assert shapes[0] == shapes[1]
    sizes = [
        {p.name: p.stat().st_size for p in (tmp_path / run / "samples").rglob("*.safetensors")}
        for run in ("expanded", "plain")
    ]
    assert sizes[0] == sizes[1]
    x, _ = next(iter(_loader()))
    loaded = Posterior.load(tmp_path / "expanded" / "samples")  # without the program
    assert not expansions_of(loaded._ready_model())
    torch.testing.assert_close(loaded.predict(x).probabilities, posterior.predict(x).probabilities)
    # The last sample is the last state.
    last = [s for s in posterior.store if s.chain == chains - 1][-1]
    with own.at_chain(chains - 1), torch.no_grad():
        own.eval()
        outputs = own.net(x)
    (network,) = list(posterior.networks())[len(posterior.store) - 1 :]
    assert last.step == 16
    torch.testing.assert_close(network(x), outputs)
    assert type(network[0]) is nn.Linear
    averaged = own.evaluations["val"]
    assert averaged.average is not None
    held = Data()
    held.setup("fit")
    inputs, labels = map(torch.cat, zip(*held.val_dataloader(), strict=True))
    each = loaded.predict(inputs).probabilities[torch.arange(len(labels)), labels].log()
    assert averaged.bma["nll"] == pytest.approx(-float(each.mean()), rel=1e-4)


def test_chains_start_with_weights_of_their_own() -> None:
    own = module(3)
    quiet_trainer(max_steps=1, callbacks=[SamplingSchedule(every_n_steps=1)]).fit(
        own, datamodule=Data()
    )  # one step of 0.005
    inner, matrix = own.net[0].parametrizations.weight.original0, own.net[0].parametrizations.weight.original1
    assert (inner[0] - inner[1]).abs().mean() > 0.1
    assert (inner[1] - inner[2]).abs().mean() > 0.1
    assert (matrix - torch.eye(6)).abs().max() < 0.2


@pytest.mark.parametrize("chains", [1, 2])
def test_a_fit_resumes_bit_for_bit_from_its_factors(chains: int, tmp_path: Path) -> None:
    whole = fit(tmp_path / "run", module(chains))
    samples = list(whole.store)
    again = fit(tmp_path / "run", module(chains), tmp_path / "run" / "step=10.ckpt")
    assert_same(samples, list(again.store))
    saved = torch.load(tmp_path / "run" / "step=10.ckpt", weights_only=False)["state_dict"]
    assert "net.0.parametrizations.weight.original2" in saved
    assert not any(name.endswith("plain") for name in saved)


def test_chains_start_from_plain_states(tmp_path: Path) -> None:
    samples = list(fit(tmp_path, module(plain=True)).store)
    own = module(chain_start=[samples[-1].state])
    own.lr = 0.0
    found = fit(tmp_path / "next", own, steps=10).store[0]
    for name, tensor in samples[-1].parameters.items():
        torch.testing.assert_close(found.parameters[name], tensor)


def test_a_stacked_chain_is_the_chain_alone(tmp_path: Path) -> None:
    states = [module(seed=s).net.state_dict() for s in range(2)]
    for state in states:
        for tensor in state.values():
            tensor.add_(0.1 * torch.randn(tensor.shape))
    options: dict[str, Any] = {"shared_batch": True}
    together = fit(tmp_path / "stack", module(2, chain_start=states, **options))
    alone = fit(tmp_path / "alone", module(1, chain_start=states[:1], **options))
    for one, other in zip(alone.store, [s for s in together.store if s.chain == 0], strict=True):
        for name, tensor in one.parameters.items():
            torch.testing.assert_close(other.parameters[name], tensor, rtol=1e-5, atol=1e-6)


def test_a_hierarchical_prior_has_a_scale_for_each_factor(tmp_path: Path) -> None:
    posterior = fit(tmp_path, module(prior=HierarchicalPrior()))
    assert "net.0.parametrizations.weight.original1" in posterior.store[0].scales


def test_a_module_with_an_expanded_network_copies() -> None:
    own, x = module(), torch.randn(3, 6)
    x, _ = next(iter(_loader()))
    assert torch.equal(copy.deepcopy(own).net(x), own.net(x))


# -- the law ----------------------------------------------------------------------------------------------------------

SIGMAS = {"p": 0.8, "v": 1.0, "q": 0.8}
NOISE, DATA, TARGET = 1.0, 2, 1.5


def exact_moments() -> tuple[float, float]:
    """Return E[w] and E[w²] under w = p·v·q, factors N(0, σ²), and DATA observations with mean TARGET, by quadrature.

    Given a = p·q the product is Gaussian, so only p and q are integrated over.
    """
    grid = torch.linspace(-6, 6, 601, dtype=torch.float64)
    density = torch.exp(-(grid**2) / 2)
    a = SIGMAS["p"] * grid[:, None] * SIGMAS["q"] * grid[None, :]
    prior, precision = (a * SIGMAS["v"]) ** 2, DATA / NOISE**2
    spread = prior + 1 / precision
    evidence = density[:, None] * density[None, :] * torch.exp(-(TARGET**2) / 2 / spread) / spread.sqrt()
    mean, variance = prior / spread * TARGET, prior / precision / spread
    weights = evidence / evidence.sum()
    return float((weights * mean).sum()), float((weights * (variance + mean**2)).sum())


@pytest.mark.slow
def test_the_product_of_a_linear_network_has_the_exact_law() -> None:
    """4,000 chains of a network with one weight; two moments within 5 standard errors and the step's bias of 2 %.

    False alarm: 1e-6. The prior of the product alone, and the plain Gaussian prior of its variance, are refused by the
    same numbers.
    """
    chains = 4000
    rule = expand(nn.Linear(1, 1, bias=False).double())
    factors = [p.detach().clone().expand(chains, *p.shape).contiguous() for p in rule.parameters()]
    generator = torch.Generator().manual_seed(0)
    places = [nn.Parameter(0.5 * torch.randn(f.shape, generator=generator, dtype=torch.float64)) for f in factors]
    (expansion,) = expansions_of(rule)
    scales = (SIGMAS["v"], SIGMAS["p"], SIGMAS["q"])
    sampler = SGLD(places, lr=0.006, num_data=1, seed=1)

    def weight() -> Tensor:
        return torch.vmap(expansion.of)(dict(zip(expansion.factors, places, strict=True))).flatten()

    for _ in range(1500):
        energy = DATA / NOISE**2 * (weight() - TARGET).square() / 2
        energy = energy.sum() + sum((p / s).square().sum() / 2 for p, s in zip(places, scales, strict=True))
        for place, gradient in zip(places, torch.autograd.grad(energy, places), strict=True):
            place.grad = gradient
        sampler.step()
    draws = weight().detach()
    for power, exact in enumerate(exact_moments(), 1):
        found = draws**power
        error = float(found.std()) / chains**0.5
        assert abs(float(found.mean()) - exact) < 5 * error + 0.02 * exact
        assert 5 * error + 0.02 * exact < 0.15
    variance = (SIGMAS["p"] * SIGMAS["v"] * SIGMAS["q"]) ** 2
    plain = variance / (variance + NOISE**2 / DATA) * TARGET
    assert abs(plain - exact_moments()[0]) > 0.1


def test_the_priors_variance_is_that_of_the_docstring() -> None:
    """m·n·σ_P²·σ_V²·σ_Q² for each entry, by 20,000 draws within 5 %; entries are uncorrelated, and tails are heavy."""
    rows, columns = 3, 2
    shapes = ((rows, columns), (rows, rows), (columns, columns))
    generator = torch.Generator().manual_seed(0)
    v, p, q = (torch.randn(20_000, *shape, generator=generator) for shape in shapes)
    drawn = torch.vmap(lambda v, p, q: product(v, [p], [q]))(0.5 * v, 0.7 * p, 0.7 * q).flatten(1)
    expected = rows * columns * 0.5**2 * 0.7**4
    covariance = torch.cov(drawn.T)
    assert (covariance.diagonal() / expected - 1).abs().max() < 0.08
    assert (covariance - covariance.diagonal().diag()).abs().max() < 0.08 * expected
    assert (drawn**4).mean() / drawn.square().mean() ** 2 > 4  # a Gaussian has 3


def test_gaussian_likelihoods_of_an_expanded_layer_are_planned_as_a_network(tmp_path: Path) -> None:
    """The exact plan of a linear regression is not that of its factors."""
    x = torch.randn(40, 3)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x[:, :1]), batch_size=20)
    own = BayesianModule(expand(nn.Linear(3, 1)), Gaussian(std=1.0), GaussianPrior(PRIOR), sampler=SGHMC, lr=0.01)
    quiet_trainer(max_steps=12, callbacks=[SamplingSchedule(every_n_steps=4)]).fit(own, data)
    assert own.plan is not None
    assert any("factors" in note for note in own.plan.notes)
    assert own.plan.disk_bytes == 3 * 16
