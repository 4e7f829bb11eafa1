"""Chains as rows of one tensor: the same draws as tensor by tensor, whatever the rule and the groups."""

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_sgmcmc.samplers import (
    AMAGOLD,
    GGMC,
    MCLMC,
    SGHMC,
    SGLD,
    SGNHT,
    AdamSGLD,
    Sampler,
    ScaleAdaptedSGHMC,
    UnderdampedLangevin,
    noise,
    pMCLMC,
    pSGHMC,
    pSGLD,
)
from lightning_sgmcmc.samplers.rows import FlatParameters, clip_rows, coefficient, sghmc_step, sgld_step

RULES: list[Any] = [SGLD, pSGLD, AdamSGLD, SGHMC, pSGHMC, ScaleAdaptedSGHMC, SGNHT, MCLMC, pMCLMC, UnderdampedLangevin]
RULES += [functools.partial(UnderdampedLangevin, integrator=name) for name in ("baoab", "obabo", "ubu")]
RULES += [GGMC, AMAGOLD]
SHAPES = [(4, 3), (4,), (2, 4), ()]


def made(rule: Any, chains: int = 3, flat: bool = False, dtype: torch.dtype = torch.float32, **options: Any) -> Sampler:
    generator = torch.Generator().manual_seed(0)
    parameters = [
        nn.Parameter(torch.randn((chains, *shape) if chains > 1 else shape, generator=generator, dtype=dtype))
        for shape in SHAPES
    ]
    groups = [{"params": parameters[2:]}, {"params": parameters[:2], "lr": 0.02}]
    sampler: Sampler = rule(groups, **{"lr": 0.01, "num_data": 50, "num_chains": chains, "seed": 5} | options)
    if flat:
        flatten(sampler)
    return sampler


def flatten(sampler: Sampler) -> FlatParameters:
    sampler.flat = FlatParameters([group["params"] for group in sampler.param_groups], sampler.num_chains)
    return sampler.flat


def parameters_of(sampler: Sampler) -> list[Tensor]:
    return [p for group in sampler.param_groups for p in group["params"]]


def push(sampler: Sampler, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        for p in parameters_of(sampler):
            gradient = torch.randn(p.shape, generator=generator, dtype=p.dtype) + p.detach()
            if sampler.flat is None:
                p.grad = gradient
            else:
                sampler.flat.attach_gradients()
                assert p.grad is not None
                p.grad.copy_(gradient)
        sampler.step()


def assert_same(one: Sampler, other: Sampler) -> None:
    for a, b in zip(parameters_of(one), parameters_of(other), strict=True):
        assert torch.equal(a, b)
        assert one.state[a].keys() == other.state[b].keys()
        for name, value in one.state[a].items():
            assert torch.equal(value, other.state[b][name])


@pytest.mark.parametrize("chains", [1, 3])
@pytest.mark.parametrize("rule", RULES)
def test_rows_make_the_same_steps(rule: Any, chains: int) -> None:
    """Bit for bit over two groups, with controls for each chain, with and without noise, and through a saved state."""
    plain, rows = made(rule, chains), made(rule, chains, flat=True)
    for number, sampler in enumerate((plain, rows)):
        assert (sampler.flat is not None) == bool(number)
        push(sampler, 3)
        if chains > 1:
            sampler.set_control("gradient_multiplier", torch.tensor([0.5, 1.0, -1.0], dtype=torch.float64))
        push(sampler, 2, first=3)
        sampler.set_control("temperature", 0.0 if sampler.has_cold_limit else 2.0)
        push(sampler, 2, first=5)
        sampler.set_control("temperature", torch.tensor(0.5))
        push(sampler, 2, first=7)
    assert_same(plain, rows)
    continued = made(rule, chains, flat=True)
    for p, saved in zip(parameters_of(continued), parameters_of(plain), strict=True):
        p.data.copy_(saved.data)
    continued.load_state_dict(copy.deepcopy(rows.state_dict()))
    push(plain, 2, first=9)
    push(continued, 2, first=9)
    assert_same(plain, continued)


def test_a_replaced_gradient_counts() -> None:
    plain, rows = made(SGHMC), made(SGHMC, flat=True)
    for sampler in (plain, rows):
        push(sampler, 1)
        for p in parameters_of(sampler):
            assert p.grad is not None
            p.grad = 2 * p.grad  # as a user's hook may do
        sampler.step()
    assert_same(plain, rows)


def test_a_rule_for_whole_tensors_sees_tensors() -> None:
    """A subclass that normalises each tensor's gradient is no function of coordinates, although its base is."""

    class Normalised(SGLD):
        def update(self, group: Any, params: Any, grads: Any, noise: Any) -> None:
            super().update(group, params, [g / g.norm() for g in grads], noise)

    plain, rows = made(Normalised), made(Normalised, flat=True)
    push(plain, 3)
    push(rows, 3)
    assert_same(plain, rows)


def test_parameters_get_their_own_memory_back() -> None:
    sampler = made(SGHMC, flat=True)
    push(sampler, 2)
    before = [p.detach().clone() for p in parameters_of(sampler)]
    assert sampler.flat is not None
    sampler.flat.release()
    sampler.flat = None
    for p, value in zip(parameters_of(sampler), before, strict=True):
        assert p.untyped_storage().nbytes() == p.numel() * p.element_size()
        assert torch.equal(p, value)
        assert p.grad is None
    push(sampler, 1)


def test_rows_of_memory_that_is_shared_or_has_gaps_are_not_made() -> None:
    base = torch.randn(2, 3, 4)
    assert FlatParameters.suits([base, base.clone()], 1)
    assert FlatParameters.suits([base.mT], 1)
    assert not FlatParameters.suits([base, base], 1)
    assert not FlatParameters.suits([base[:, :2]], 1)
    assert not FlatParameters.suits([base[:1].expand(2, 3, 4)], 1)


@pytest.mark.parametrize("chains", [1, 2])
def test_parameters_in_any_order_of_memory_become_rows_for_a_fit(chains: int) -> None:
    """Of stacked chains each may lie channels last."""
    base = torch.randn(3, 2, 2)
    images = [torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last) for _ in range(chains)]
    given = [torch.stack([base.mT + c for c in range(chains)]), torch.stack(images)]
    parameters = [nn.Parameter(tensor if chains > 1 else tensor[0]) for tensor in given]
    before = [parameter.detach().clone() for parameter in parameters]
    strides = [parameter.stride() for parameter in parameters]
    flat = FlatParameters([parameters], chains)
    expected = torch.cat([tensor.reshape(chains, -1) for tensor in before], 1)
    assert torch.equal(flat.values, expected)
    flat.values.mul_(2)
    flat.release()
    assert [parameter.stride() for parameter in parameters] == strides
    assert all(torch.equal(now, 2 * then) for now, then in zip(parameters, before, strict=True))


def test_weights_that_lie_channels_last_become_rows_for_a_fit() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3)).to(memory_format=torch.channels_last)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    assert FlatParameters.suits(list(net.parameters()), 1)
    flat = FlatParameters([list(net.parameters())], 1)
    assert torch.equal(flat.values[0], torch.cat([tensor.flatten() for tensor in before.values()]))
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    assert net[0](x).is_contiguous(memory_format=torch.channels_last), "a convolution has the format of its input"
    flat.release()
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, before[name])
        assert tensor.stride() == before[name].stride()


@pytest.mark.parametrize("chains", [1, 3])
def test_fused_steps_are_those_of_the_rules(chains: int) -> None:
    """The functions that a GPU runs as one kernel, here as they are: equal up to rounding in float64."""
    each = torch.tensor([0.01, 0.02, 0.05][:chains], dtype=torch.float64)
    for rule in (SGLD, SGHMC):
        sampler = made(rule, chains, dtype=torch.float64)
        group = sampler.param_groups[0]
        kappa = torch.linspace(0.5, 2, chains, dtype=torch.float64)
        group.update({"lr": each, "gradient_multiplier": kappa, "temperature": 0.7})
        rows, grads, noise, momenta = torch.randn(4, chains, 7, dtype=torch.float64)
        param = nn.Parameter(rows.clone() if chains > 1 else rows[0].clone())
        controls = [coefficient(group[name], rows) for name in ("lr", "gradient_multiplier", "temperature")]
        if rule is SGHMC:
            sampler.state[param]["momentum_buffer"] = momenta.clone().view(param.shape)
            group["holds_velocity"] = True
            sghmc_step(rows, momenta, grads, noise, *controls, 50, group["friction"], 0.0)
        else:
            sgld_step(rows, grads, noise, *controls, 50)
        with torch.no_grad():
            sampler.update(group, [param], [grads.view(param.shape)], [noise.view(param.shape)])
        torch.testing.assert_close(param.detach().view(chains, -1), rows, rtol=1e-13, atol=1e-15)
        if rule is SGHMC:
            torch.testing.assert_close(
                sampler.state[param]["momentum_buffer"].view(chains, -1), momenta, rtol=1e-13, atol=1e-15
            )


def test_rows_are_clipped_by_their_own_norm() -> None:
    rows = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    clip_rows(rows, 1.0)
    torch.testing.assert_close(rows, torch.tensor([[0.6, 0.8], [0.3, 0.4], [0.0, 0.0]]))


def test_means_of_the_parameters_columns() -> None:
    sampler = made(SGLD, flat=True)
    assert sampler.flat is not None
    for group in sampler.flat.groups:
        rows = torch.rand(3, group.values.shape[1], generator=torch.Generator().manual_seed(0))
        expected = torch.stack([piece.reshape(3, -1).mean(1) for piece in group.pieces(rows)], 1)
        torch.testing.assert_close(group.means(rows), expected)
        sums = torch.zeros_like(rows)
        group.add_to_each(sums, expected)
        for column, piece in zip(expected.unbind(1), group.pieces(sums), strict=True):
            assert torch.equal(piece.reshape(3, -1), column[:, None].expand(3, piece[0].numel()))
        part = torch.zeros_like(rows[:, 3:9])
        group.add_to_each(part, expected, 3)
        assert torch.equal(part, sums[:, 3:9])


# -- noise in blocks ---------------------------------------------------------------------------------------------------


def in_blocks(monkeypatch: pytest.MonkeyPatch, chains: int) -> None:
    """Let noise of more than 100 numbers be drawn in blocks of 32 columns."""
    monkeypatch.setattr(noise, "WHOLE", 100)
    monkeypatch.setattr(noise, "ON_CPU", 32 * chains)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("chains", [1, 3])
@pytest.mark.parametrize("rule", RULES)
def test_noise_in_blocks_makes_the_same_steps(
    rule: Any, chains: int, flat: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, but for the order of a sum in pSGHMC: with groups, a held row, a tensor without a gradient, steps
    without noise, and momenta that are drawn."""
    monkeypatch.setattr("tests.samplers.test_rows.SHAPES", [(9, 7), (4,), (17, 5), (), (3,)])
    samplers = []
    for blocks in (False, True):
        if blocks:
            in_blocks(monkeypatch, chains)
        sampler = made(rule, chains, flat, noise_ahead=None)
        assert sampler._noise.is_large == (blocks and sampler.draws == 1)
        first = parameters_of(sampler)[0]
        sampler.hold({first: 2})
        push(sampler, 2)
        sampler.draw_momenta()
        sampler.set_control("temperature", torch.linspace(0.5, 1, chains))
        sampler.set_control("lr", torch.linspace(0.01, 0.02, chains))
        push(sampler, 2, first=2)
        if sampler.has_cold_limit:
            sampler.param_groups[0]["temperature"] = 0.0
            push(sampler, 2, first=4)
            sampler.set_control("temperature", 0.0)
            push(sampler, 2, first=6)
        sampler.set_control("temperature", 1.0)
        push(sampler, 2, first=8)
        if not flat:
            first.grad = None
            sampler.step()
        assert sampler._noise.in_blocks == sampler._noise.is_large
        samplers.append(sampler)
    whole, pieces = samplers
    if rule is pSGHMC:
        for a, b in zip(parameters_of(whole), parameters_of(pieces), strict=True):
            torch.testing.assert_close(a, b)
    else:
        assert_same(whole, pieces)
    states = (one.state_dict()["sampler"]["noise"]["generators"] for one in samplers)
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


def test_a_rule_of_a_users_own_gets_its_noise_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    in_blocks(monkeypatch, 1)

    class Own(SGLD):
        def update(self, group: Any, params: Any, grads: Any, noise: Any) -> None:
            assert all(one.shape == p.shape for one, p in zip(noise, params, strict=True))
            super().update(group, params, grads, noise)

    monkeypatch.setattr("tests.samplers.test_rows.SHAPES", [(40, 3), (4,), (2, 4), ()])
    own, plain = made(Own, 1), made(SGLD, 1)
    push(own, 3)
    push(plain, 3)
    assert_same(own, plain)
    assert (own._noise.in_blocks, plain._noise.in_blocks) == (False, True)
