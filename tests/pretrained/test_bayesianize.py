"""Trained networks made Bayesian: what is sampled, where chains start, what a store rebuilds."""

import copy
import logging
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torchvision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import BayesianModule, ChainStrategy, Gaussian, Posterior, bayesianize
from lightning_sgmcmc.callbacks import BayesianModelAverage, SampleCollector, SamplingSchedule, WarmStart
from lightning_sgmcmc.datamodules import DatasetDataModule
from lightning_sgmcmc.posterior.classes import NotDescribableError
from lightning_sgmcmc.posterior.description import build, describe
from lightning_sgmcmc.pretrained.bayesianize import last_layer
from tests.pretrained.networks import Sentences, encoder, lora, resnet
from tests.support.paths import REPOSITORY
from tests.support.trainers import quiet_trainer

CHAINS = 4


def fitted(module: BayesianModule, data: Any, folder: Any = None, steps: int = 4, *more: Any) -> pl.Trainer:
    collector = SampleCollector(in_memory=True) if folder is None else SampleCollector(folder)
    callbacks = [*more, SamplingSchedule(every_n_steps=2), collector, BayesianModelAverage()]
    trainer = quiet_trainer(max_steps=steps, callbacks=callbacks)
    trainer.fit(module, data)
    return trainer


def sampled_names(module: nn.Module) -> list[str]:
    return [name for name, parameter in module.named_parameters() if parameter.requires_grad]


def test_lora_of_a_text_encoder(tmp_path: Path) -> None:
    """By loop and by vmap one run; its store loads, and predicts what the run's test has seen."""
    rows = Sentences()
    data = DatasetDataModule(rows, rows, rows, batch_size=8)
    posteriors = []
    for how in ("loop", "vmap"):
        module = bayesianize(encoder(), lora(), lr=0.01, seed=0, num_chains=CHAINS, chain_execution=how)
        before = {name: tensor.clone() for name, tensor in module.net.named_parameters()}
        trainer = fitted(module, data, tmp_path / how)
        trainer.test(module, data, verbose=False)
        assert module.posterior is not None
        posteriors.append(module.posterior)
    names = {name.removeprefix("net.") for name in sampled_names(module)}
    assert {name.split(".")[-1] if "classifier" in name else name.split(".")[-3] for name in names} == {
        "lora_A",
        "lora_B",
        "weight",
        "bias",
    }
    for one, same in zip(*posteriors, strict=True):
        for name, tensor in one.parameters.items():
            assert torch.allclose(tensor, same.parameters[name], atol=2e-5), name
            moved = not torch.equal(tensor, before[name.removeprefix("net.")])
            assert moved == (name.removeprefix("net.") in names), name
    loaded = Posterior.load(tmp_path / "vmap")
    predicted = loaded.predict(rows.inputs).probabilities
    assert torch.allclose(loaded.predict(data.test_dataloader()).probabilities, predicted, atol=1e-6)
    nll = -predicted[torch.arange(len(rows)), rows.labels].log().mean()
    assert module.evaluations["test"].bma["nll"] == pytest.approx(float(nll), rel=1e-4)


def test_the_prior_is_centred_where_the_chains_start() -> None:
    """log p of the start is that of a centred Gaussian at its centre, and all chains start there."""
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    start = copy.deepcopy(net[2].state_dict())
    data = DataLoader(TensorDataset(torch.randn(16, 3), torch.randint(2, (16,))), 8)
    module = bayesianize(net, prior=0.5, lr=0.1, num_chains=2, seed=0)
    starts: list[Tensor] = []

    class AtStart(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if not starts:
                for chain in range(2):
                    with pl_module.at_chain(chain), torch.no_grad():
                        starts.append(pl_module.log_prior())
                        assert all(torch.equal(pl_module.net[2].state_dict()[n], t) for n, t in start.items())

    fitted(module, data, None, 2, AtStart())
    at_centre = torch.distributions.Normal(0.0, 0.5).log_prob(torch.zeros(10)).sum()
    assert torch.allclose(torch.stack(starts), at_centre.expand(2))


def test_a_warm_start_and_a_noise_scale_of_the_likelihood() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    data = DataLoader(TensorDataset(torch.randn(16, 3), torch.randn(16, 1)), 8)
    module = bayesianize(net, "all", Gaussian(), lr=0.01, seed=0)
    fitted(module, data, None, 6, WarmStart(steps=2, early_stopping=None))
    assert module.posterior is not None
    assert len(module.posterior) == 2


@pytest.mark.parametrize(
    ("make", "layer"),
    [
        (lambda: torchvision.models.vit_b_16(), "heads.head"),
        (lambda: torchvision.models.mobilenet_v3_small(), "classifier.3"),
        (lambda: torchvision.models.squeezenet1_0(), "classifier.1"),
        (lambda: torchvision.models.segmentation.fcn_resnet50(weights_backbone=None), "classifier.4"),
        (lambda: encoder(), "classifier"),
    ],
)
def test_the_last_layer_by_its_name(make: Any, layer: str) -> None:
    with torch.device("meta"):
        assert last_layer(make()) == layer


class HeadFirst(nn.Module):
    """Defines its last layer first, under a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.answer = nn.Linear(4, 2)
        self.trunk = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.answer(self.trunk(x))


def test_the_last_layer_by_a_call(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "pytorch_lightning"):
        module = bayesianize(HeadFirst(), example=torch.zeros(1, 3))
    assert sampled_names(module) == ["net.answer.weight", "net.answer.bias"]
    assert "Sampled: 10 of 26 weights, in 'answer'; the others are fixed." in caplog.text


def test_weights_of_a_checkpoint(tmp_path: Path) -> None:
    """A Lightning checkpoint names the network by the module's attribute; others hold it alone."""
    trained = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    states = {
        "plain": trained.state_dict(),
        "lightning": {"state_dict": {f"model.{n}": t for n, t in trained.state_dict().items()}},
    }
    for name, state in states.items():
        torch.save(state, tmp_path / f"{name}.pt")
        for source in (tmp_path / f"{name}.pt", str(tmp_path / f"{name}.pt"), state):
            net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
            bayesianize(net, checkpoint=source)
            assert all(torch.equal(t, trained.state_dict()[n]) for n, t in net.state_dict().items())
    other = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    with pytest.raises(ValueError, match=r"checkpoint has '0.weight' of shape \(4, 3\), and the network's is \(5, 3\)"):
        bayesianize(other, checkpoint=states["plain"])
    with pytest.raises(ValueError, match=r"plain.pt' has no '2.weight' \(it has 0.weight"):
        bayesianize(nn.Sequential(nn.Identity(), nn.Tanh(), nn.Linear(3, 2)), checkpoint=tmp_path / "plain.pt")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        bayesianize(other, checkpoint=tmp_path / "none.ckpt")


def spread() -> nn.Module:
    net = nn.Linear(2, 2)
    net.hf_device_map = {"layers": 0, "head": "cpu"}  # type: ignore[assignment]
    return net


def tied() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1))


@pytest.mark.parametrize(
    ("make", "what", "message"),
    [
        (lambda: nn.Linear(2, 2), "head", "what must be 'last_layer' or 'lora' or 'all', got 'head'"),
        (lambda: nn.Linear(2, 2), 3, "what must be 'last_layer', 'lora', 'all', a LoraConfig or name patterns, got 3"),
        (lambda: nn.Sequential(nn.Linear(2, 2)), ["fc.*"], r"what: 'fc\.\*' matches no parameter of Sequential"),
        (nn.Tanh, "last_layer", "Tanh has no linear layer to sample"),
        (lambda: nn.Linear(2, 2), "lora", "does not know which layers of Linear to adapt: pass what=LoraConfig"),
        (spread, "all", "network has parts on 0, cpu, as device_map places them: load it without device_map"),
        (tied, "last_layer", "the last layer 'lm_head' shares its weight with another layer"),
        (lambda: "net.ckpt", "all", "weights alone do not describe a network: pass the network, and checkpoint="),
        (lambda: {}, "all", "network should be a torch module, got a dict"),
    ],
)
def test_what_cannot_be_made_bayesian(make: Any, what: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        bayesianize(make(), what)


def test_without_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match=r"this needs peft: pip install lightning-sgmcmc\[lora\]"):
        bayesianize(encoder(), "lora")


@pytest.mark.parametrize("name", ["DistilBert", "ModernBert"])
def test_layers_that_peft_does_not_know_are_asked_for(name: str) -> None:
    """With the line that the message has it works."""
    import peft
    import transformers

    sizes = {"DistilBert": {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 16}}.get(
        name, {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    )
    config = getattr(transformers, f"{name}Config")(vocab_size=30, pad_token_id=0, **sizes)
    model = getattr(transformers, f"{name}ForSequenceClassification")
    with pytest.raises(ValueError, match=f"does not know which layers of {name}For.* pass what=LoraConfig") as caught:
        bayesianize(model(config), "lora")
    _, _, given = str(caught.value).partition("what=LoraConfig")
    options = eval(f"dict{given.partition(']')[0]}])")
    assert options["task_type"] == "SEQ_CLS"
    names = sampled_names(bayesianize(model(config), peft.LoraConfig(**options)))
    assert any("lora_A" in one for one in names)
    assert all("lora_" in one or "classifier" in one for one in names)


# -- descriptions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [encoder, tied, lambda: encoder(attn_implementation="eager")])
def test_a_transformer_comes_back(make: Any) -> None:
    net = make().eval()
    twin = build(describe(net)).eval()
    twin.load_state_dict(net.state_dict())
    ids = torch.arange(6)[None]
    assert torch.equal(twin(ids).logits, net(ids).logits)
    assert twin.config._attn_implementation == net.config._attn_implementation


def test_adapters_on_any_network_come_back() -> None:
    from peft import LoraConfig, get_peft_model

    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    adapted = get_peft_model(net, LoraConfig(r=2, target_modules=["0"], use_rslora=True, modules_to_save=["2"]))
    nn.init.normal_(adapted.base_model.model[0].lora_B.default.weight)
    twin = build(describe(adapted))
    twin.load_state_dict(adapted.state_dict())
    x = torch.randn(5, 3)
    assert torch.equal(twin(x), adapted(x))


BERT = "transformers.models.bert.modeling_bert:BertModel"


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ({"class": BERT, "config": BERT, "attention": None, "arguments": {"dict": {}}}, "is not a Pre[Tt]rainedConfig"),
        (
            {"class": "transformers.pipelines:pipeline", "config": BERT, "attention": None, "arguments": {"dict": {}}},
            "has no networks that a store may name",
        ),
        (
            {
                "class": BERT,
                "config": "transformers.models.bert.configuration_bert:BertConfig",
                "attention": "owner/kernels",
                "arguments": {"dict": {}},
            },
            "the attention 'owner/kernels' is not part of transformers",
        ),
        (
            {
                "class": BERT,
                "config": "transformers.models.bert.configuration_bert:BertConfig",
                "attention": None,
                "arguments": {"dict": {"backbone": "owner/net"}},
            },
            "its backbone 'owner/net' would be downloaded",
        ),
        (
            {"peft": "LoraConfig", "adapter": "a", "arguments": {"dict": {"loftq_config": {}}}, "network": None},
            "only LoRA's arguments",
        ),
        (
            {"class": "transformers.models.bert.modeling_bert:BertLayer", "arguments": {}},
            "no networks that a store may",
        ),
    ],
)
def test_a_store_names_no_other_code(description: Any, message: str) -> None:
    with pytest.raises(NotDescribableError, match=message):
        build(description)


# -- the longer ones --------------------------------------------------------------------------------------------------


LOAD = """
    import sys, torch
    from lightning_sgmcmc import Posterior
    inputs = torch.load("inputs.pt")
    torch.save({name: Posterior.load(name).predict(x).probabilities for name, x in inputs.items()}, "found.pt")
    assert "tests" not in sys.modules
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["loop", "vmap"])
def test_stores_load_in_a_new_process_without_the_program(how: Any, tmp_path: Path) -> None:
    """Four chains of a resnet18's last layer and of a text encoder's adapters: fit, test, load, predict."""
    rows, images = Sentences(), torch.randn(12, 3, 32, 32)
    labelled = TensorDataset(images, torch.randint(3, (12,)))
    text = DatasetDataModule(rows, rows, rows, batch_size=8)
    runs: dict[str, tuple[BayesianModule, Any, Any]] = {
        "vision": (bayesianize(resnet(), **of(how)), DatasetDataModule(labelled, None, labelled, batch_size=6), images),
        "text": (bayesianize(encoder(0.1), "lora", **of(how)), text, rows.inputs),
    }
    expected = {}
    for name, (module, data, x) in runs.items():
        trainer = fitted(module, data, tmp_path / name)
        trainer.test(module, data, verbose=False)
        assert module.posterior is not None
        assert len(module.posterior) == 2 * CHAINS
        expected[name] = module.posterior.predict(x).probabilities
        assert torch.allclose(module.posterior.predict(data.test_dataloader()).probabilities, expected[name], atol=1e-5)
    torch.save({name: x for name, (_, _, x) in runs.items()}, tmp_path / "inputs.pt")
    subprocess.run([sys.executable, "-c", textwrap.dedent(LOAD)], cwd=tmp_path, check=True)
    found = torch.load(tmp_path / "found.pt")
    assert all(torch.allclose(found[name], expected[name], atol=1e-5) for name in expected)
    assert tmp_path != REPOSITORY


def of(how: str) -> dict[str, Any]:
    return {"lr": 0.01, "seed": 0, "num_chains": CHAINS, "chain_execution": how}


class Folded(pl.Callback):
    """Writes each rank's state at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        torch.save(pl_module.state_dict(), self.folder / f"rank{trainer.global_rank}.pt")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strategy", ["ddp_fork", "chains"])
def test_dict_batches_on_two_ranks(strategy: str, tmp_path: Path) -> None:
    """Two ranks share a chain's rows (ddp), or have two chains each, whose draws are those of one process."""
    rows = Sentences()
    chains = 2 if strategy == "chains" else 1
    kind: Any = strategy if strategy == "ddp_fork" else ChainStrategy(start_method="fork")
    module = bayesianize(encoder(), lora(), lr=0.01, seed=0, num_chains=chains)
    collected = [SamplingSchedule(every_n_steps=2), SampleCollector(tmp_path / "samples"), Folded(tmp_path)]
    trainer = quiet_trainer(max_steps=4, strategy=kind, devices=2, callbacks=[*collected, BayesianModelAverage()])
    trainer.fit(module, DatasetDataModule(rows, rows, batch_size=8 if chains > 1 else 4))
    states = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    alone = bayesianize(encoder(), lora(), lr=0.01, seed=0, num_chains=4 if chains > 1 else 1)
    fitted(alone, DatasetDataModule(rows, rows, batch_size=8))
    assert alone.posterior is not None
    store = Posterior.load(tmp_path / "samples")
    assert len(store) == len(alone.posterior)
    if chains == 1:
        assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
        return  # the ranks' batches are the halves of other batches than one process has
    mine = {(sample.step, sample.chain): sample for sample in alone.posterior}
    for sample in store:
        own = mine[sample.step, sample.chain]
        assert all(torch.allclose(t, own.parameters[name], atol=1e-5) for name, t in sample.parameters.items())


@pytest.mark.slow
def test_a_resumed_run_of_dict_batches_is_the_same_run(tmp_path: Path) -> None:
    rows = Sentences()

    def run(steps: int, path: Any = None) -> pl.Trainer:
        data = DatasetDataModule(rows, batch_size=8)
        module = bayesianize(encoder(0.1), lora(), lr=0.01, seed=0, num_chains=2)
        trainer = quiet_trainer(max_steps=steps)
        trainer.fit(module, data, ckpt_path=path)
        return trainer

    whole = run(7)
    run(3).save_checkpoint(tmp_path / "third.ckpt")
    resumed = run(7, tmp_path / "third.ckpt")
    state = resumed.lightning_module.state_dict()
    assert all(torch.equal(t, state[n]) for n, t in whole.lightning_module.state_dict().items())


def test_two_last_layers_of_timm_are_asked_for() -> None:
    """A head that distilled stayed as it was drawn, with half of the output."""
    import timm

    def make() -> Any:
        return timm.create_model("deit_tiny_distilled_patch16_224", num_classes=3, img_size=32, depth=1)

    with pytest.raises(ValueError, match=r"2 last layers, .*: pass what=\['head.\*', 'head_dist.\*'\]"):
        bayesianize(make())
    names = sampled_names(bayesianize(make(), ["head.*", "head_dist.*"]))
    assert names == [f"net.{head}.{name}" for head in ("head", "head_dist") for name in ("weight", "bias")]
    assert len(sampled_names(bayesianize(make(), "all"))) > 10
