"""A student has the average's predictive and its epistemic part, by `distill` and by a trainer of the user's own."""

import io
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import (
    BayesianModule,
    Categorical,
    Gaussian,
    MultiLabelBernoulli,
    PixelCategorical,
    Posterior,
    TokenCategorical,
)
from lightning_sgmcmc.posterior import Distillation
from lightning_sgmcmc.posterior.distillation import distillation_loss, prediction_of
from lightning_sgmcmc.posterior.store import MemoryStore, TargetScaling
from lightning_sgmcmc.predictions import ClassPrediction, RegressionPrediction
from tests.support.posteriors import filled, in_memory


def posterior_of(kind: str) -> Posterior:
    if kind == "classes":
        return in_memory(BayesianModule(net=nn.Linear(5, 3), likelihood=Categorical()))
    module = BayesianModule(net=nn.Linear(5, 2), likelihood=Gaussian(0.5, learned=True))
    store = filled(MemoryStore(), module)
    store.scaling = TargetScaling((3.0, -1.0), (2.0, 10.0))
    return Posterior(store, module)


def student(outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, outputs))


def data(count: int = 256, seed: int = 3) -> Tensor:
    return torch.randn(count, 5, generator=torch.Generator().manual_seed(seed))


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.reshape(-1), b.reshape(-1)]))[0, 1])


def test_a_student_of_classes() -> None:
    """It learns from inputs alone, predicts other inputs, and can be saved, loaded and exported."""
    posterior, new = posterior_of("classes"), data(seed=8)
    found = posterior.distill(student(4), DataLoader(data(1024), batch_size=128), epochs=20, lr=2e-2)
    teacher, own = posterior.predict(new), found.predict(new)
    assert isinstance(own, ClassPrediction)
    assert float((teacher.probabilities - own.probabilities).abs().sum(1).mean()) / 2 < 0.05
    assert correlation(teacher.mutual_information, own.mutual_information) > 0.85
    assert bool((own.mutual_information <= own.entropy).all())
    torch.testing.assert_close(
        torch.cat([p.probabilities for p in map(found.predict, new.split(100))]), own.probabilities
    )
    torch.testing.assert_close(found.predict(list(new.split(100))).mutual_information, own.mutual_information)
    file = io.BytesIO()
    torch.save(found, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    program = torch.export.export(again, (new,), strict=False).module()
    for part, name in zip(program(new), found.outputs, strict=True):
        torch.testing.assert_close(part, own.parts[name])


def test_a_student_of_numbers_in_the_datas_units() -> None:
    posterior, new = posterior_of("numbers"), data(seed=8)
    task = Distillation(posterior, student(6), lr=2e-2)
    loader = DataLoader(TensorDataset(data(1024), torch.zeros(1024)), batch_size=128)
    trainer = pl.Trainer(
        max_epochs=20, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False
    )
    trainer.fit(task, loader, DataLoader(TensorDataset(new, torch.zeros(256)), batch_size=64))
    assert float(trainer.callback_metrics["distill/val_predictive"]) < 0.1
    teacher, own = posterior.predict(new), task.student.predict(new)
    assert isinstance(own, RegressionPrediction)
    for name, limit in (("mean", 0.99), ("std", 0.85), ("epistemic_std", 0.85)):
        for column in range(2):
            assert correlation(teacher.parts[name][:, column], own.parts[name][:, column]) > limit
    assert float((own.std / teacher.std).log().abs().mean()) < 0.1


@pytest.mark.parametrize("kind", ["classes", "numbers"])
def test_the_loss_is_least_at_the_teachers_predictive(kind: str) -> None:
    """It is 0 there, and its gradient is that of a KL divergence."""
    if kind == "classes":
        output = torch.randn(7, 4, generator=torch.Generator().manual_seed(1))
        teacher: Any = prediction_of(output, 3)
    else:
        output = torch.randn(7, 6, generator=torch.Generator().manual_seed(1))
        teacher = prediction_of(output, None)
    output.requires_grad_()
    predictive, epistemic = distillation_loss(output, teacher, 2.0)
    assert float(predictive) == pytest.approx(0, abs=1e-5)
    assert float(epistemic) == pytest.approx(0, abs=1e-6)
    (gradient,) = torch.autograd.grad(predictive + epistemic, output)
    assert float(gradient.abs().max()) < 1e-5
    moved, _ = distillation_loss(output + 0.3 * torch.randn(output.shape), teacher, 2.0)
    assert float(moved) > 0
    if kind == "numbers":
        normal = torch.distributions.Normal
        other = output.detach() + 0.3
        theirs = prediction_of(other, None)
        kl = torch.distributions.kl_divergence(normal(teacher.mean, teacher.std), normal(theirs.mean, theirs.std))
        torch.testing.assert_close(distillation_loss(other, teacher, 0.0)[0], kl.sum(1).mean())


def at_places(inputs: int, outputs: int, image: bool) -> nn.Module:
    return nn.Conv2d(inputs, outputs, 1) if image else nn.Linear(inputs, outputs)


PLACES = {
    "pixels": (PixelCategorical(), True, 3, 4),
    "tokens": (TokenCategorical(), False, 3, 4),
    "fields": (Gaussian(0.5), True, 2, 6),
    "sequences": (Gaussian(0.5), False, 2, 6),
}


@pytest.mark.by_default("pixels", "tokens")
@pytest.mark.parametrize("kind", PLACES)
def test_a_student_of_places_is_that_of_each_place(kind: str) -> None:
    """A network of single places predicts a place of an image as an example of its own, and so does its student.

    The loss of an image is the sum of those of its places; a student that is trained comes near the teacher.
    """
    likelihood, image, outputs, wanted = PLACES[kind]
    torch.manual_seed(0)
    nets = [at_places(5, outputs, image) for _ in range(4)]
    posterior = Posterior.from_states(nets[0], [net.state_dict() for net in nets], likelihood)
    x = data(32 * 6).reshape(32, 2, 3, 5)
    x = x.permute(0, 3, 1, 2) if image else x.flatten(1, 2)
    own = nn.Sequential(at_places(5, 32, image), nn.Tanh(), at_places(32, wanted, image))
    start = own[2].weight.detach().clone()
    found = posterior.distill(own, DataLoader(x, batch_size=32), epochs=150, lr=3e-2)
    assert not torch.equal(own[2].weight, start)
    teacher, learned = posterior.predict(x), found.predict(x)
    assert {name: part.shape for name, part in learned.parts.items()} == {
        name: teacher.parts[name].shape for name in learned.parts
    }
    name = found.outputs[0]
    assert correlation(teacher.parts[name], learned.parts[name]) > 0.97

    def rows(part: Tensor) -> Tensor:
        """The places of all images, one after another."""
        return part.movedim(1, -1).flatten(0, -2) if image else part.flatten(0, -2)

    output = own(x).detach()
    whole = distillation_loss(output, teacher, 2.0, found.axis)
    flat = {name: (part.flatten() if part.dim() == x.dim() - 1 else rows(part)) for name, part in teacher.parts.items()}
    if found.classes is not None:  # the classes are last
        flat["probabilities"] = teacher.probabilities.flatten(0, -2)
    each = distillation_loss(rows(output), type(teacher)(**flat), 2.0)
    for one, other in zip(whole, each, strict=True):
        torch.testing.assert_close(one, 6 * other)


@pytest.mark.by_default("iterator", "float64")
@pytest.mark.parametrize("kind", ["list", "pairs", "iterator", "float64"])
def test_batches_are_read_in_every_epoch(kind: str) -> None:
    """Batches as other methods take them; a trainer reads a list as several loaders, and an iterator once."""
    torch.manual_seed(0)
    posterior = Posterior.from_states(nn.Linear(2, 1), [nn.Linear(2, 1) for _ in range(3)], Gaussian(0.5))
    x = torch.randn(20, 2)
    batches: dict[str, Any] = {"list": [x[:10], x[10:]], "pairs": [(x, x[:, :1])], "iterator": iter([x[:10], x[10:]])}
    batches["float64"] = DataLoader(TensorDataset(x.double()), batch_size=10)
    student = posterior.distill(nn.Linear(2, 3), batches[kind], epochs=200, lr=0.05, accelerator="cpu")
    torch.testing.assert_close(student.predict(x).mean, posterior.predict(x).mean, atol=0.02, rtol=0)
    for wrong in (x, TensorDataset(x), (x, x)):
        for call in (lambda given: posterior.distill(nn.Linear(2, 3), given), posterior.update_batch_norm):
            with pytest.raises(TypeError, match=f"got a {type(wrong).__name__}: pass a DataLoader"):
                call(wrong)


def test_what_cannot_be_distilled_is_refused() -> None:
    posterior, loader = posterior_of("classes"), DataLoader(data(8), batch_size=4)
    with pytest.raises(ValueError, match="3 classes need 4 outputs"):
        posterior.distill(student(3), loader, epochs=1)
    with pytest.raises(ValueError, match="2 numbers need 6 outputs"):
        posterior_of("numbers").distill(student(2), loader, epochs=1)
    with pytest.raises(ValueError, match="epochs"):
        posterior.distill(student(4), loader, epochs=0)
    labels = Posterior.from_states(nn.Linear(5, 2), [nn.Linear(5, 2).state_dict()], MultiLabelBernoulli())
    with pytest.raises(TypeError, match=r"these are a MultiLabelPrediction.*use posterior\.compress"):
        labels.distill(student(3), loader, epochs=1)
    field = nn.Conv2d(1, 1, 1)
    of_fields = Posterior.from_states(field, [field.state_dict()], Gaussian(std=1.0))
    with pytest.raises(ValueError, match=r"numbers \(4, 1, 2, 2\) need 3 times as many"):
        of_fields.distill(nn.Conv2d(1, 2, 1), DataLoader(torch.zeros(4, 1, 2, 2), batch_size=4), epochs=1)
    tokens = Posterior.from_states(nn.Linear(5, 2), [nn.Linear(5, 2).state_dict()], TokenCategorical())
    with pytest.raises(ValueError, match="may be on axis 1 or 2"):
        tokens.distill(nn.Linear(5, 3), DataLoader(torch.zeros(4, 3, 5), batch_size=4), epochs=1)
    with pytest.raises(RuntimeError, match="no samples"):
        Posterior(MemoryStore()).distill(student(4), loader)
