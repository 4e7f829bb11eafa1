"""`compile="auto"`: on for CUDA, and the network as it is where it does not compile."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config

from lightning_sgmcmc import compiling
from lightning_sgmcmc.batches.loader import with_few_lengths
from lightning_sgmcmc.chains import energies, together
from lightning_sgmcmc.chains.execution import state_of
from lightning_sgmcmc.evaluation.scoring import Scorer
from lightning_sgmcmc.samplers import rows as fused
from tests.support.comparisons import assert_same
from tests.support.problems import Net
from tests.support.texts import LENGTHS, Config, batch_of, fit_texts
from tests.support.trainers import fit_chains, seeded

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def backend_of(error: Exception | None) -> Any:
    def backend(graph: Any, inputs: Any) -> Any:
        if error is not None:
            raise error
        return graph.forward

    return backend


def use(monkeypatch: pytest.MonkeyPatch, backend: Any) -> None:
    """Let `torch.compile` compile by a backend, for this test."""
    compile_ = torch.compile
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", lambda function, **o: compile_(function, **(o | {"backend": backend})))


class Counting:
    """A backend that runs graphs as they are, and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return graph.forward


def test_auto_compiles_on_cuda_where_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiling.is_compiled("auto", CPU) is False
    assert [compiling.is_compiled(choice, CPU) for choice in (True, False)] == [True, False]
    monkeypatch.setattr(compiling, "why_not_compiled", lambda kind: None)
    assert compiling.is_compiled("auto", CUDA) is True
    monkeypatch.setattr(compiling, "why_not_compiled", lambda kind: "Cannot find a working triton installation")
    with pytest.warns(UserWarning, match=r"^torch\.compile does not work here, .* slower .*: Cannot find a working"):
        assert compiling.is_compiled("auto", CUDA) is False


def test_why_it_does_not_compile_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_ = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, **o: compile_(function, backend=backend_of(OSError("no gcc\nat all")))
    )
    compiling.why_not_compiled.cache_clear()
    torch._dynamo.reset()
    reason = compiling.why_not_compiled("cpu")
    assert reason is not None
    assert "no gcc" in reason
    assert "\n" not in reason
    monkeypatch.undo()
    assert compiling.why_not_compiled("cpu") == reason
    compiling.why_not_compiled.cache_clear()


@pytest.mark.by_default("vmap")
@pytest.mark.parametrize("execution", ["loop", "vmap"])
def test_a_network_that_does_not_compile_runs_as_it_is(execution: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draws are those of compile=False, with one warning; compile=True raises."""
    compile_ = torch.compile
    failing = backend_of(NotImplementedError("no such operation"))
    monkeypatch.setattr(torch, "compile", lambda function, **o: compile_(function, backend=failing))

    def run(compiled: Any) -> Any:
        torch._dynamo.reset()
        return fit_chains(seeded(lambda: Net(2, compile=compiled, chain_execution=execution)), 10)

    right = run(False)
    assert_same(right, run("auto"))
    monkeypatch.setattr(energies, "is_compiled", lambda choice, device: choice is not False)  # as on CUDA
    with pytest.warns(UserWarning, match=r"torch\.compile fails on the network of Net, .*: .*no such") as said:
        found = run("auto")
    torch.testing.assert_close([one.state for one in found], [one.state for one in right])
    assert sum("torch.compile" in str(one.message) for one in said) == 1
    with pytest.raises(Exception, match="no such operation"):
        run(True)


def test_a_users_mistake_is_reported_as_without_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **o: compile_(function, backend="eager"))
    monkeypatch.setattr(energies, "is_compiled", lambda choice, device: choice is not False)

    class Wrong(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("my own mistake")

    with pytest.raises(ValueError, match=r"^my own mistake$"):
        fit_chains(seeded(lambda: Wrong(2)), 10)


@pytest.mark.skipif(
    not hasattr(config, "force_non_lazy_backward_lowering"),
    reason="this torch compiles a backward pass when it is used, and raises the error there",
)
@pytest.mark.parametrize("chains", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_backward_pass_that_does_not_compile_runs_as_it_is(chains: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch compiles it at its first use, after the forward pass has worked."""

    def broken(graph: Any, inputs: Any) -> Any:
        raise NotImplementedError("no such gradient")

    def run() -> Any:
        return fit_chains(seeded(lambda: Net(chains, compile="auto")), 10)

    right = run()
    use(monkeypatch, aot_autograd(fw_compiler=lambda graph, inputs: graph.forward, bw_compiler=broken))
    monkeypatch.setattr(energies, "is_compiled", lambda choice, device: choice is not False)  # as on CUDA
    with pytest.warns(UserWarning, match=r"torch\.compile fails on the network of Net, .*no such gradient"):
        found = run()
    torch.testing.assert_close([one.state for one in found], [one.state for one in right])


def test_a_later_shape_that_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call that fails runs as it is, and all after it; another error is the caller's."""
    backend = Counting()

    def second_fails(graph: Any, inputs: Any) -> Any:
        if backend.graphs:
            raise NotImplementedError("no such width")
        return backend(graph, inputs)

    def function(x: Tensor) -> Tensor:
        return x @ torch.ones(3, 2)

    use(monkeypatch, second_fails)
    call = compiling.compiled_if_possible("this", function, dynamic=False)
    assert call(torch.ones(4, 3)).shape == (4, 2)
    with pytest.raises(Exception, match="4"):
        call(torch.ones(4, 4))
    with pytest.warns(UserWarning, match=r"torch\.compile fails on this, .*no such width.*compile=False"):
        assert call(torch.ones(5, 3)).shape == (5, 2)
    assert call(torch.ones(4, 3)).shape == (4, 2)


def test_a_failed_call_holds_no_memory_while_the_function_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[weakref.ref[Tensor]] = []

    def compiled(x: Tensor) -> Tensor:
        activations = x + 1
        held.append(weakref.ref(activations))
        raise torch.OutOfMemoryError("out of memory")

    def function(x: Tensor) -> Tensor:
        assert [one() for one in held] == [None]
        return x

    monkeypatch.setattr(torch, "compile", lambda function, **o: compiled)
    with pytest.warns(UserWarning, match="out of memory"):
        compiling.compiled_if_possible("this", function)(torch.ones(2))


# -- how often --------------------------------------------------------------------------------------------------------


def graphs_of(make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> tuple[int, Any]:
    backend = Counting()
    with monkeypatch.context() as patch:
        use(patch, backend)
        made = make()
    return backend.graphs, made


@pytest.mark.slow
def test_texts_are_evaluated_in_few_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample's scores are those of the texts as they are; an output for each token keeps its length."""
    module, batches = fit_texts(Config(), False), [batch_of(length) for length in LENGTHS]
    state = {name: tensor.detach() for name, tensor in state_of(module.eval()).items()}
    right = Scorer(module)([state], batches)[0]
    monkeypatch.setattr(together, "runs_at_once", lambda device: True)
    graphs, found = graphs_of(lambda: Scorer(module, compiled=True)([state], batches)[0], monkeypatch)
    assert graphs == 4
    torch.testing.assert_close(found, right)
    tokens = batches[0] | {"labels": batches[0]["input_ids"]}
    assert with_few_lengths(tokens, module.net) is tokens


@pytest.mark.parametrize("chains", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_texts_of_any_length_compile_a_few_graphs(chains: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten lengths are padded to 32, 64, 128 and the 200 that the network takes, and the draws are the same."""
    right = fit_texts(Config(), False, chains)
    graphs, found = graphs_of(lambda: fit_texts(Config(), True, chains), monkeypatch)
    assert graphs == 4
    torch.testing.assert_close(found.state_dict(), right.state_dict())


def test_many_shapes_are_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network that does not say how long its texts may be gets them as they are."""
    with pytest.warns(
        UserWarning, match=r"shape of a batch.*pad_to_multiple_of.*drop_last=True.*compile=False"
    ) as said:
        graphs, _ = graphs_of(lambda: fit_texts(None, True, lengths=LENGTHS[:5]), monkeypatch)
    assert graphs == 5
    assert sum("pad_to_multiple_of" in str(one.message) for one in said) == 1


def test_fused_steps_are_compiled_once_for_all_widths_and_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second width is compiled for all that follow; a number of data, a step size or a temperature never is."""

    def steps() -> None:
        fused.compiled.cache_clear()
        for number in range(14):
            rows, grads, noise, momenta = torch.randn(4, 2, 10 + 7 * number)
            group = {"lr": 0.1 + number, "gradient_multiplier": 1.0, "temperature": 1.0 + number}
            controls = fused.coefficients(group, rows, 1000 + number)
            fused.compiled(fused.sgld_step)(rows, grads, noise, *controls)
            fused.compiled(fused.sghmc_step)(rows, momenta, grads, noise, *controls, 0.1, 0.0)
            fused.compiled(fused.clip_rows)(rows, 1.0)

    graphs, _ = graphs_of(steps, monkeypatch)
    fused.compiled.cache_clear()
    assert graphs == 2 * 3
