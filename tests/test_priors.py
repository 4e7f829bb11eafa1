"""Log densities of the priors against torch.distributions; scales by fan-in, centres, and what is refused."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser
from safetensors.torch import save_file
from torch import Tensor, distributions, nn
from torch.utils.data import TensorDataset

from lightning_sgmcmc import (
    SGLD,
    BayesianModule,
    Categorical,
    Gaussian,
    GaussianPrior,
    HierarchicalPrior,
    LaplacePrior,
    Prior,
    ResumableLoader,
    StudentTPrior,
)
from lightning_sgmcmc.callbacks import SampleCollector, SamplingSchedule
from tests.support.small_run import COUNT, loader
from tests.support.trainers import quiet_trainer

SCALES = {"*.bias": 10.0, "net.0.*": 0.5, "*": 1.3}
OF_NAME = {"net.0.weight": 0.5, "net.0.bias": 10.0, "net.2.weight": 1.3, "net.2.bias": 10.0, "log_std": 1.3}
SHAPES = {"net.0.weight": (4, 3), "net.0.bias": (4,), "net.2.weight": (2, 4), "net.2.bias": (2,), "log_std": ()}


def parameters(dtype: torch.dtype = torch.float64, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (2 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()
        for name, shape in SHAPES.items()
    }


def reference(density: Callable[[float], Any], scales: dict[str, float], values: dict[str, Tensor]) -> Tensor:
    return torch.stack([density(scales[name]).log_prob(value).sum() for name, value in values.items()]).sum()


def normal(scale: float) -> Any:
    return distributions.Normal(torch.tensor(0.0, dtype=torch.float64), scale)


def laplace(scale: float) -> Any:
    return distributions.Laplace(torch.tensor(0.0, dtype=torch.float64), scale)


def student_t(scale: float) -> Any:
    return distributions.StudentT(torch.tensor(2.5, dtype=torch.float64), 0.0, scale)


def student_t_prior(scale: Any) -> StudentTPrior:
    return StudentTPrior(df=2.5, scale=scale)


FAMILIES = [
    pytest.param(GaussianPrior, normal, id="Gaussian"),
    pytest.param(LaplacePrior, laplace, id="Laplace"),
    pytest.param(student_t_prior, student_t, id="StudentT"),
]


@pytest.mark.parametrize("upstream", [1.0, -0.02])
@pytest.mark.parametrize("scale", [0.7, SCALES], ids=["one-scale", "groups"])
@pytest.mark.parametrize(("make", "density"), FAMILIES)
def test_density_and_gradient(make: Any, density: Any, scale: Any, upstream: float) -> None:
    scales = OF_NAME if scale is SCALES else dict.fromkeys(SHAPES, 0.7)
    values = parameters()
    log_prob = make(scale).log_prob(values)
    expected = reference(density, scales, values)
    assert log_prob.shape == ()
    torch.testing.assert_close(log_prob, expected, rtol=1e-12, atol=1e-12)
    found = torch.autograd.grad(upstream * log_prob, list(values.values()))
    wanted = torch.autograd.grad(upstream * expected, list(values.values()))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def gaussian_of(scale: Any) -> Callable[..., Tensor]:
    def log_prob(*tensors: Tensor) -> Tensor:
        return GaussianPrior(scale).log_prob(dict(zip(SHAPES, tensors, strict=True)))

    return log_prob


@pytest.mark.parametrize("scale", [0.7, SCALES], ids=["one-scale", "groups"])
def test_gaussian_gradcheck(scale: Any) -> None:
    """The hand-written backward by finite differences."""
    assert torch.autograd.gradcheck(gaussian_of(scale), tuple(parameters().values()))


@pytest.mark.parametrize("scale", [0.7, SCALES])
def test_gaussian_gradgradcheck(scale: Any) -> None:
    """Second derivatives, for Hessians and Fisher products of the potential."""
    assert torch.autograd.gradgradcheck(gaussian_of(scale), tuple(parameters().values()))


def test_gaussian_at_zero_has_a_gradient() -> None:
    """... where the gradient of a norm would be NaN."""
    value = torch.zeros(5, requires_grad=True)
    GaussianPrior().log_prob({"w": value}).backward()  # type: ignore[no-untyped-call]
    assert torch.equal(value.grad, torch.zeros(5))  # type: ignore[arg-type]


@pytest.mark.parametrize(("make", "density"), FAMILIES)
def test_float32_is_near_float64(make: Any, density: Any) -> None:
    values = parameters(torch.float32)
    found = make(SCALES).log_prob(values)
    assert found.dtype == torch.float32
    expected = reference(density, OF_NAME, {name: value.double() for name, value in values.items()})
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)


def test_gaussian_is_weight_decay() -> None:
    """The gradient of -log p/N is θ/(N·std²), SGD's weight decay."""
    value = torch.randn(6, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(-GaussianPrior(0.3).log_prob({"w": value}) / 40, value)
    torch.testing.assert_close(gradient, value.detach() / (40 * 0.3**2))


@pytest.mark.parametrize(("make", "density"), FAMILIES)
def test_the_first_pattern_that_matches_wins(make: Any, density: Any) -> None:
    one, two = torch.tensor([1.5], dtype=torch.float64), torch.tensor([-0.5], dtype=torch.float64)
    values = {"a.bias": one, "a.weight": two}
    bias_first = make({"*.bias": 3.0, "a.*": 0.5}).log_prob(values)
    all_first = make({"a.*": 0.5, "*.bias": 3.0}).log_prob(values)
    expected = density(3.0).log_prob(one) + density(0.5).log_prob(two)
    torch.testing.assert_close(bias_first, expected.squeeze(), rtol=1e-12, atol=0)
    torch.testing.assert_close(all_first, density(0.5).log_prob(torch.cat([one, two])).sum(), rtol=1e-12, atol=0)


def test_patterns_tell_case_and_are_whole_names() -> None:
    prior = GaussianPrior({"Net.*": 2.0, "bias": 3.0, "net.[01].bias": 4.0, "*": 5.0})
    names = ["Net.w", "net.w", "bias", "x.bias", "net.1.bias", "net.2.bias"]
    assert [prior.scale_of(name) for name in names] == [2.0, 5.0, 3.0, 5.0, 4.0, 5.0]


@pytest.mark.parametrize(("make", "density"), FAMILIES)
def test_a_parameter_without_pattern_is_refused(make: Any, density: Any) -> None:
    prior = make({"*.bias": 1.0})
    prior.log_prob({"a.bias": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"prior's (std|scale) has no pattern for the parameter 'a\.weight': add one"):
        prior.log_prob({"a.bias": torch.zeros(2), "a.weight": torch.zeros(2)})


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf, {"*": 1.0, "x": -2.0}])
@pytest.mark.parametrize(("make", "density"), FAMILIES)
def test_bad_scales_are_refused(make: Any, density: Any, scale: Any) -> None:
    value = scale["x"] if isinstance(scale, dict) else scale
    with pytest.raises(ValueError, match=rf"prior's (std|scale) must be a positive number, got {value}"):
        make(scale)


@pytest.mark.parametrize("df", [0.0, -1.0, math.nan, math.inf])
def test_bad_degrees_of_freedom_are_refused(df: float) -> None:
    with pytest.raises(ValueError, match=r"prior's df must be in \(0, inf\), got"):
        StudentTPrior(df=df)


@pytest.mark.parametrize(
    ("make", "density"),
    FAMILIES,
)
def test_one_prior_for_two_networks(make: Any, density: Any) -> None:
    """Networks of the same names and other sizes, one after the other."""
    prior = make(0.7)
    for size in (3, 30, 5):
        value = torch.full((size,), 0.2, dtype=torch.float64)
        expected = density(0.7).log_prob(value).sum()
        torch.testing.assert_close(prior.log_prob({"w": value}), expected, rtol=1e-12, atol=0)


def test_repr_names_the_scale() -> None:
    assert repr(GaussianPrior(2.0)) == "GaussianPrior(std=2.0)"
    assert repr(LaplacePrior({"a": 1.0, "*": 2})) == "LaplacePrior(scale={'a': 1.0, '*': 2.0})"


# -- scales by fan-in -------------------------------------------------------------------------------------------------


def test_fan_in_is_torchs_and_patterns_mix() -> None:
    """std = gain/√fan_in for tensors with a fan, 1 for those without, and numbers where a pattern gives one."""
    layers = {"a": torch.nn.Linear(7, 4), "b": torch.nn.Conv2d(3, 5, (2, 4)), "c": torch.nn.BatchNorm1d(6)}
    values = {f"{k}.{n}": p.detach() for k, layer in layers.items() for n, p in layer.named_parameters()}
    values["s"] = torch.tensor(0.3)
    prior = GaussianPrior({"*.bias": 2.0, "*": "fan_in"}, gain=1.0)
    stds = {name: prior.scale_of(name, value.shape) for name, value in values.items()}
    for name in ("a.weight", "b.weight"):
        fan, _ = torch.nn.init._calculate_fan_in_and_fan_out(values[name])
        assert stds[name] == pytest.approx(fan**-0.5)
    assert [stds[name] for name in ("a.bias", "b.bias", "c.weight", "c.bias", "s")] == [2.0, 2.0, 1.0, 2.0, 1.0]
    expected = reference(normal, stds, {name: value.double() for name, value in values.items()})
    torch.testing.assert_close(prior.log_prob(values), expected.float())
    stacked = {name: torch.stack([value, 2 * value]) for name, value in values.items()}
    each = [prior.log_prob({name: value[c] for name, value in stacked.items()}) for c in range(2)]
    torch.testing.assert_close(prior.log_prob_of_chains(stacked), torch.stack(each))
    # Names and sizes alike, and another shape: the fan is another.
    turned = {name: value.T if name == "a.weight" else value for name, value in values.items()}
    assert prior.log_prob(turned) != prior.log_prob(values)


# -- centres ----------------------------------------------------------------------------------------------------------

CENTRE = {name: torch.full(shape, 0.1 * (i + 1)) for i, (name, shape) in enumerate(SHAPES.items())}


def test_centred_density_gradient_and_chains() -> None:
    values = parameters()
    prior = GaussianPrior(SCALES, center=CENTRE, centered=["net.*"])
    centre = {name: c if name.startswith("net.") else torch.zeros(()) for name, c in CENTRE.items()}
    shifted = {name: value - centre[name] for name, value in values.items()}
    expected = reference(normal, OF_NAME, shifted)
    found = prior.log_prob(values)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    both = [torch.autograd.grad(-0.3 * one, list(values.values())) for one in (found, expected)]
    torch.testing.assert_close(*both, rtol=1e-12, atol=1e-12)
    stacked = {name: torch.stack([value, -value]).detach() for name, value in values.items()}
    each = [prior.log_prob({name: value[c] for name, value in stacked.items()}) for c in range(2)]
    torch.testing.assert_close(prior.log_prob_of_chains(stacked), torch.stack(each), rtol=1e-12, atol=1e-12)


def test_second_derivatives_of_a_centred_and_a_hierarchical_density() -> None:
    for prior in (GaussianPrior(SCALES, center=CENTRE), HierarchicalPrior("layer", nu=0.7, std="fan_in")):
        own = {f"prior_state.{name}": 1.7 * tensor for name, tensor in prior.initial_state(parameters()).items()}

        def log_prob(*tensors: Tensor, prior: Any = prior, own: dict[str, Tensor] = own) -> Tensor:
            return prior.log_prob(dict(zip(SHAPES, tensors, strict=True)) | own)  # type: ignore[no-any-return]

        assert torch.autograd.gradcheck(log_prob, tuple(parameters().values()))
        assert torch.autograd.gradgradcheck(log_prob, tuple(parameters().values()))


@pytest.mark.parametrize("groups", ["tensor", "layer", "all", ["*.bias", "*"]])
def test_hierarchical_density(groups: Any) -> None:
    """log N(θ; 0, v·std²) + log InvGamma(v; ν·d/2, ν·d/2) + log v, the last for the density of log v."""
    values, v, nu = parameters(), torch.tensor([1.7, 0.4, 2.2, 0.9, 1.1], dtype=torch.float64), 0.7
    prior = HierarchicalPrior(groups, nu=nu, std=SCALES)
    groups_of = {name: prior.group_of(name) for name in SHAPES}
    of_group = dict(zip(dict.fromkeys(groups_of.values()), v, strict=False))
    stds = {name: OF_NAME[name] * float(of_group[groups_of[name]].sqrt()) for name in SHAPES}
    expected = reference(normal, stds, values)
    for group, variance in of_group.items():
        half = nu / 2 * sum(values[name].numel() for name in SHAPES if groups_of[name] == group)
        gamma = distributions.InverseGamma(*torch.tensor([half, half], dtype=torch.float64))
        expected = expected + gamma.log_prob(variance) + variance.log()
    state = {"prior_state.variance": v[: len(of_group)]}
    found = prior.log_prob(values | state)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    both = [torch.autograd.grad(one, list(values.values())) for one in (found, expected)]
    torch.testing.assert_close(*both, rtol=1e-12, atol=1e-12)
    stacked = {name: torch.stack([value, 0.5 * value]).detach() for name, value in (values | state).items()}
    each = [prior.log_prob({name: value[c] for name, value in stacked.items()}) for c in range(2)]
    torch.testing.assert_close(prior.log_prob_of_chains(stacked), torch.stack(each), rtol=1e-12, atol=1e-12)
    scales = prior.scales(values | state)
    assert {name: float(scale) for name, scale in scales.items()} == pytest.approx(stds)


def regression(prior: Any, **options: Any) -> BayesianModule:
    torch.manual_seed(3)
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
    return BayesianModule(net=net, likelihood=Categorical(), prior=prior, num_data=COUNT, seed=1, **options)


@pytest.mark.parametrize(("chains", "execution"), [(1, "loop"), (2, "loop"), (2, "vmap")])
def test_at_temperature_0_a_centre_is_weight_decay_towards_it(chains: int, execution: str) -> None:
    """Each chain is SGD on mean NLL + ‖θ - θ_start‖²/(2·N·std²), from its own start."""
    std, lr, steps = 0.2, 0.3, 6
    module = regression(
        GaussianPrior(std, center="start"),
        lr=lr,
        temperature=0.0,
        num_chains=chains,
        shared_batch=True,
        chain_execution=execution,
    )
    starts = []
    module.configure_model()
    for chain in range(chains):
        with module.at_chain(chain):
            starts.append(copy.deepcopy(module.net))
    quiet_trainer(max_steps=steps).fit(module, loader())
    batches = list(loader()) * 2
    for chain, net in enumerate(starts):
        origin = [p.detach().clone() for p in net.parameters()]
        for x, y in batches:
            decay = sum((p - c).square().sum() for p, c in zip(net.parameters(), origin, strict=True))
            loss = torch.nn.functional.cross_entropy(net(x), y) + decay / (2 * COUNT * std**2)
            gradients = torch.autograd.grad(loss, list(net.parameters()))
            with torch.no_grad():
                for p, g in zip(net.parameters(), gradients, strict=True):
                    p -= lr * g
        with module.at_chain(chain):
            torch.testing.assert_close(list(module.net.parameters()), list(net.parameters()), rtol=1e-4, atol=1e-6)


def test_a_centre_from_a_file_is_that_of_the_state(tmp_path: Path) -> None:
    """... of a checkpoint, a network's own state dict, and a sample; the representation names the content."""
    module = regression(None)
    state = module.net.state_dict()
    torch.save({"state_dict": module.state_dict(), "epoch": 3}, tmp_path / "run.ckpt")
    torch.save(state, tmp_path / "net.pt")
    save_file(
        {f"parameter.net.{n}": t for n, t in state.items()} | {"buffer.x": torch.ones(2)}, tmp_path / "s.safetensors"
    )
    named = {name: 2 * p.detach() for name, p in module.named_parameters()}
    found = [
        GaussianPrior(0.5, center=tmp_path / file).log_prob(named) for file in ("run.ckpt", "net.pt", "s.safetensors")
    ]
    expected = GaussianPrior(0.5).log_prob({name: p.detach() for name, p in module.named_parameters()})
    assert found == [expected] * 3
    texts = [repr(GaussianPrior(0.5, center=source)) for source in (state, str(tmp_path / "net.pt"))]
    assert texts[0] == texts[1]
    assert texts[0].startswith("GaussianPrior(std=0.5, center=<4 tensors, crc32 ")
    assert texts[0] != repr(GaussianPrior(0.5, center={name: tensor + 1e-6 for name, tensor in state.items()}))


MISTAKES: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: GaussianPrior("fan-in"), TypeError, "std must be a number or 'fan_in', got 'fan-in' of type str for '*'"),
    (lambda: LaplacePrior("fan_in"), TypeError, "scale must be a number, got 'fan_in' of type str for"),  # type: ignore[arg-type]
    (lambda: GaussianPrior("fan_in", gain=0), ValueError, "the prior's gain must be positive, got 0"),
    (lambda: GaussianPrior("fan_in").scale_of("a"), ValueError, "depends on the shape of 'a': pass shape=…"),
    (lambda: GaussianPrior(center="there.ckpt"), ValueError, "center='there.ckpt' is no file: pass the path of a ch"),
    (lambda: GaussianPrior(center=3), TypeError, "must be 'start', a state dict .* or the path of a file .*, got 3"),  # type: ignore[arg-type]
    (lambda: GaussianPrior(center={"a": 1.0}), TypeError, "got a mapping with 'a': float"),
    (lambda: GaussianPrior(center={}), ValueError, "the prior's center has no tensors"),
    (lambda: GaussianPrior(center={"a": torch.tensor(math.nan)}), ValueError, "NaN or infinite numbers in 'a'"),
    (lambda: GaussianPrior(centered=["a"]), ValueError, "needs a centre: pass center='start' or a state dict"),
    (lambda: GaussianPrior(center="start", centered="a*"), TypeError, "must be a list of name patterns .*got 'a\\*'"),
    (lambda: HierarchicalPrior("tensors"), ValueError, "groups must be 'tensor' or 'layer' or 'all', got 'tensors'"),  # type: ignore[arg-type]
    (lambda: HierarchicalPrior([]), TypeError, "groups must be 'tensor', 'layer', 'all' or a list of name patterns"),
    (lambda: HierarchicalPrior(nu=0), ValueError, "the prior's nu must be positive, got 0"),
    (lambda: HierarchicalPrior(every_n_steps=0), ValueError, "the prior's every_n_steps must be at least 1, got 0"),
    (lambda: HierarchicalPrior(std=-1.0), ValueError, "the prior's std must be a positive number, got -1.0"),
]


@pytest.mark.parametrize(("make", "error", "sentence"), MISTAKES)
def test_mistakes_are_refused_at_once(make: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        make()


SHAPE = {"net.0.weight": torch.zeros(2, 3, 2), "0.bias": torch.zeros(3), "2.weight": torch.zeros(2, 3)}


@pytest.mark.parametrize(
    ("prior", "sentence"),
    [
        (
            GaussianPrior(center={"net.0.weight": torch.zeros(3, 2)}),
            r"has no tensor for the parameter 'net\.0\.bias' \(it",
        ),
        (
            GaussianPrior(center=SHAPE),
            r"shape \(2, 3, 2\) for 'net\.0\.weight', and the parameter has \(3, 2\) \(stacked ch",
        ),
        (
            GaussianPrior(center="start", centered=["head.*"]),
            r"centered has the pattern 'head\.\*', which no trainable",
        ),
        (HierarchicalPrior(["*.bias"]), r"groups have no pattern for the parameter 'net\.0\.weight': add one, or '\*'"),
        (HierarchicalPrior(["*", "*.bias"]), r"groups never uses the pattern '\*\.bias', because '\*' comes before it"),
    ],
)
def test_a_prior_that_does_not_suit_the_network_is_refused_at_setup(prior: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        quiet_trainer(max_steps=1).fit(regression(prior), loader())


def test_yaml_makes_the_priors(tmp_path: Path) -> None:
    """By the parser of the command line; what `repr` shows is what was written."""
    path = tmp_path / "state.pt"
    torch.save({"a": torch.ones(2)}, path)
    given: list[tuple[str, dict[str, Any], str]] = [
        ("GaussianPrior", {"std": {"*.bias": 1.0, "*": "fan_in"}, "gain": 1.0}, "std={'*.bias': 1.0, '*': 'fan_in'}"),
        ("GaussianPrior", {"std": 0.1, "center": str(path), "centered": ["a"]}, "center=<1 tensors, crc32"),
        ("HierarchicalPrior", {"groups": ["*.bias", "*"], "nu": 2}, "groups=['*.bias', '*'], nu=2, every_n_steps=20"),
        ("HierarchicalPrior", {"groups": "layer", "std": "fan_in", "center": "start"}, "groups='layer'"),
    ]
    for name, options, text in given:
        parser = ArgumentParser()
        parser.add_argument("--prior", type=Prior)
        config = parser.parse_object({"prior": {"class_path": f"lightning_sgmcmc.{name}", "init_args": options}})
        assert text in repr(parser.instantiate_classes(config).prior)


class Near(Prior):
    """Weights near 1, precision 100."""

    def log_prob(self, parameters: Any) -> Tensor:
        return sum((-50 * (p - 1).square().sum() for p in parameters.values()), torch.zeros(()))


class OfTheModule(BayesianModule):
    def log_prior(self) -> Tensor:
        return super().log_prior() + 0.0


class OfThoseTrained(BayesianModule):
    def log_prior(self) -> Tensor:
        return self.prior.log_prob({name: p for name, p in self.named_parameters() if p.requires_grad})


class OfPhysics(BayesianModule):
    """The output's derivative is 1, at ten points: the same density."""

    def log_prior(self) -> Tensor:
        points = torch.linspace(-1, 1, 10)[:, None].requires_grad_()
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(self(points).sum(), points, create_graph=True)
        return -5 * (slope - 1).square().sum()


@pytest.mark.by_default("OfPhysics-auto", "OfThoseTrained-auto")
@pytest.mark.parametrize("execution", ["auto", "vmap"])
@pytest.mark.parametrize("kind", [OfTheModule, OfThoseTrained, OfPhysics])
def test_log_prior_of_a_module_is_in_the_posterior_of_all_chains(kind: Any, execution: Any) -> None:
    x = torch.linspace(-2, 2, 20)[:, None]
    net = nn.Linear(1, 1, bias=False)
    options = {"num_chains": 2, "chain_execution": execution, "seed": 0, "sampler": SGLD, "lr": 0.05}
    module = kind(net, Gaussian(), Near(), **options)
    samples = SampleCollector(in_memory=True)
    trainer = quiet_trainer(max_steps=600, callbacks=[SamplingSchedule(burn_in_steps=100, every_n_steps=2), samples])
    trainer.fit(module, ResumableLoader(TensorDataset(x, 0.3 * x), batch_size=20, seed=0))
    assert samples.posterior is not None
    draws = torch.stack([network.weight.detach() for network in samples.posterior.networks()])
    data = float(x.square().sum())
    mean, std = (100 + 0.3 * data) / (100 + data), (100 + data) ** -0.5
    assert float(draws.mean()) == pytest.approx(mean, abs=5 * std / 10)  # some hundred independent draws
    assert float(draws.std()) == pytest.approx(std, rel=0.35)
