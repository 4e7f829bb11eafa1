"""The project in `user_project`, which `.ci/run` type-checks, does what its types promise."""

import copy
import pickle
from pathlib import Path

import pytest
import torch

from lightning_sgmcmc import ClassPrediction, RegressionPrediction
from tests.user_project import project


@pytest.mark.filterwarnings("ignore:With a plain DataLoader")
def test_a_project_runs(tmp_path: Path) -> None:
    accuracy, energies = project.classify(tmp_path)
    assert 0 <= accuracy <= 1
    assert len(energies) == 2
    found = project.regress(tmp_path / "regression")
    assert isinstance(found, RegressionPrediction)
    assert len(found) == 24
    assert found.sample_means.shape == (2, 24, 1)
    torch.testing.assert_close(found.mean, found.sample_means.mean(0))


def test_parts_of_a_prediction() -> None:
    parts = {"probabilities": torch.full((2, 4), 0.25), "entropy": torch.ones(2), "mutual_information": torch.zeros(2)}
    prediction = ClassPrediction(**parts)
    for twin in (copy.deepcopy(prediction), pickle.loads(pickle.dumps(prediction)), prediction.to("cpu")):
        assert isinstance(twin, ClassPrediction)
        assert twin.parts.keys() == parts.keys()
        assert all(torch.equal(twin.parts[name], part) for name, part in parts.items())
    assert prediction.replaced(entropy=torch.zeros(2)).entropy.sum() == 0
    assert len(prediction) == 2
    assert not hasattr(prediction, "std")
    with pytest.raises(AttributeError, match="'std': it has probabilities, entropy, mutual_information"):
        _ = prediction.std
    with pytest.raises(AttributeError, match="sample_probabilities was not requested: pass return_samples=True"):
        _ = prediction.sample_probabilities
    with pytest.raises(AttributeError, match="a ClassPrediction has no 'sample_means'"):
        _ = prediction.sample_means
