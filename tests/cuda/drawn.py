"""What samples of a fit on the device must be: on disk, in the running average, and in predictions."""

import dataclasses
import tempfile
from pathlib import Path

import torch

from lightning_sgmcmc import Posterior
from lightning_sgmcmc.posterior.disk import DiskStore
from tests.cuda.case import LOG_EVERY, Case, fit, loaders, network
from tests.cuda.stand_in import StandIn

SMALL = Case(blocks=1, precision="32-true", augment=False, schedule="sampling", steps=LOG_EVERY, chains=3)


def samples_are_the_chains_states(device: StandIn) -> None:
    """A thread writes what the chains were; one pass of all of them gives the average and the predictions of each."""
    with tempfile.TemporaryDirectory() as name:
        made = fit(device, SMALL, Path(name))
        module = made.module
        assert module.posterior is not None
        assert isinstance(module.posterior.store, DiskStore)
        stored = Posterior.load(Path(name) / "samples", net=network(SMALL))
        assert [record.chain for record in stored.records] == [0, 1, 2]
        for chain, sample in enumerate(stored):
            with module.at_chain(chain):
                for tensor_name, tensor in (*module.named_parameters(), *module.named_buffers()):
                    assert torch.equal(sample.state[tensor_name], tensor.detach().cpu()), tensor_name
        _, held_out = loaders(dataclasses.replace(SMALL, resident=False))
        inputs = [batch[0] for batch in held_out]
        expected = stored.predict(inputs, return_samples=True)
        average = module.evaluations["val"].average
        assert average is not None
        torch.testing.assert_close(average.terms["probabilities"], expected.probabilities, rtol=1e-5, atol=1e-6)

        served = Posterior.load(Path(name) / "samples", net=network(SMALL), device="cuda")
        on_device = [x.cuda() for x in inputs]
        found = served.predict(on_device, return_samples=True)
        assert found.probabilities.is_cuda
        torch.testing.assert_close(found.probabilities.cpu(), expected.probabilities, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(
            found.sample_probabilities.cpu(), expected.sample_probabilities, rtol=1e-5, atol=1e-6
        )
        device.record.clear()
        served.predict(on_device[0])
        again = device.record.clear()
        assert not again["transfers"], again["transfers"]
