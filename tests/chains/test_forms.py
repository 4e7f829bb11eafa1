"""The forms in which all chains are one function: the same energies, gradients and statistics; which one is chosen."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_sgmcmc import SGHMC, BayesianModule, Categorical, GaussianPrior, HierarchicalPrior
from lightning_sgmcmc.batches.loader import ResumableLoader
from lightning_sgmcmc.callbacks import SamplingSchedule
from lightning_sgmcmc.chains import execution as forms
from lightning_sgmcmc.chains.execution import are_large, convolutions_of, unrolled_is_faster
from lightning_sgmcmc.datamodules import TensorBatches
from lightning_sgmcmc.priors import Prior
from tests.support.trainers import quiet_trainer

CHAINS = 3


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, padding=1, groups=2),
        nn.Flatten(),
        nn.Linear(100, 3),
    )


def fitted(execution: str, prior: Prior | None = None, compiled: bool = False, **options: Any) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    data = TensorBatches(torch.randn(24, 2, 5, 5, generator=generator), torch.randint(3, (24,), generator=generator))
    module = BayesianModule(
        net=network(),
        likelihood=Categorical(),
        sampler=SGHMC,
        lr=1e-3,
        num_chains=CHAINS,
        seed=2,
        chain_execution=execution,  # type: ignore[arg-type]
        compile=compiled,
        prior=prior,
    )
    trainer = quiet_trainer(max_steps=4, callbacks=[SamplingSchedule(every_n_steps=4)], **options)
    trainer.fit(module, ResumableLoader(data, 8))
    return {name: tensor.double() for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.1}, {"accumulate_grad_batches": 2}])
def test_all_forms_make_the_same_run(options: Any) -> None:
    """Parameters and BatchNorm's statistics after four steps with noise, equal up to rounding."""
    loop = fitted("loop", **options)
    for execution in ("vmap", "unrolled"):
        for name, tensor in fitted(execution, **options).items():
            torch.testing.assert_close(tensor, loop[name], rtol=1e-5, atol=1e-6, msg=f"{execution} {name}")


@pytest.mark.by_default("hierarchical")
@pytest.mark.parametrize(
    ("execution", "prior"),
    [("vmap", GaussianPrior(center="start")), ("unrolled", HierarchicalPrior())],
    ids=["centred", "hierarchical"],
)
def test_network_and_prior_are_one_graph(execution: str, prior: Prior, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo finds one function without a break in likelihood and prior, which makes the run of the loop."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: original(function, backend="eager", fullgraph=True))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = fitted(execution, prior, compiled=True)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    for name, tensor in fitted("loop", prior).items():
        torch.testing.assert_close(compiled[name], tensor, rtol=1e-5, atol=1e-6)


original = torch.compile


def test_the_faster_form_is_chosen_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the time of the convolutions, which run in either form as the network's do."""
    monkeypatch.setattr(forms, "_KNOWN", {})
    model = network()
    with convolutions_of(model) as found:
        model(torch.randn(8, 2, 5, 5))
    assert [c.groups for c in found] == [1, 2]
    model(torch.randn(8, 2, 5, 5))
    assert len(found) == 2
    device, calls = torch.device("cpu"), []

    def grouped_takes_longer(call: Any) -> float:
        call()
        calls.append(call)
        return 1.0 + len(calls) % 2  # apart is measured first

    assert not unrolled_is_faster([], CHAINS, device, grouped_takes_longer)
    assert not unrolled_is_faster(found, 16, device, grouped_takes_longer)
    assert not calls
    assert not unrolled_is_faster(found, CHAINS, device, grouped_takes_longer)
    assert len(calls) == 4
    assert not unrolled_is_faster(found, CHAINS, device, lambda call: pytest.fail("it is known"))
    assert unrolled_is_faster(found, 4, device, lambda call: 3.0 - grouped_takes_longer(call))
    assert not unrolled_is_faster(found, 5, device, lambda call: 0.0)  # the profiler sees no kernel


@pytest.mark.parametrize(
    ("layers", "image", "expected"),
    [([(1, 16), (16, 32)], 8, False), ([(16, 16)] * 8, 8, False), ([(3, 16), (16, 32), (32, 64)], 32, True)],
)
def test_large_convolutions_are_not_grouped_on_a_cpu(layers: list[tuple[int, int]], image: int, expected: bool) -> None:
    """By the mean of their multiplications with a batch of 50: 7.6e6, 7.4e6 and 4e8."""
    net = nn.Sequential(*[nn.Conv2d(*own, 3, padding=1) for own in layers])
    with convolutions_of(net) as found:
        net(torch.zeros(50, layers[0][0], image, image))
    assert are_large(found) is expected
