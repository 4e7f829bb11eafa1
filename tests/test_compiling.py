"""`compile="auto"`: on for CUDA, and the network as it is where it does not compile."""

from typing import Any

import pytest
import torch

from lightning_sgmcmc import compiling
from lightning_sgmcmc.chains import energies
from tests.support.comparisons import assert_same
from tests.support.problems import Net
from tests.support.trainers import fit_chains, seeded

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def backend_of(error: Exception | None) -> Any:
    def backend(graph: Any, inputs: Any) -> Any:
        if error is not None:
            raise error
        return graph.forward

    return backend


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
