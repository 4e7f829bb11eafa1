"""What a model of transformers means by its labels: shifted by causal models, not by others; nothing is downloaded.

Tokens are independent and uniform over 16, so no model has a negative log-likelihood below log 16 a token in
expectation: whoever sees the token that it predicts is far below.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_sgmcmc import BayesianModule, Categorical, GaussianPrior, Posterior, TokenCategorical
from lightning_sgmcmc.callbacks import BayesianModelAverage, SampleCollector, SamplingSchedule
from tests.support.trainers import quiet_trainer

transformers: Any = pytest.importorskip("transformers")

VOCABULARY, LENGTH, COUNT = 16, 6, 40
WIDTHS = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
DECODERS = {
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 8,
    "decoder_ffn_dim": 8,
}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def model(name: str) -> Any:
    """Return a small model of a class, with the configuration of that kind."""
    torch.manual_seed(0)
    kind, options = KINDS[name]
    return getattr(transformers, name)(getattr(transformers, kind)(vocab_size=VOCABULARY, **options)).eval()


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2LMHeadModel": ("GPT2Config", {"n_embd": 8, "n_layer": 1, "n_head": 2, **SPECIAL}),
    "OpenAIGPTLMHeadModel": ("OpenAIGPTConfig", {"n_embd": 8, "n_layer": 1, "n_head": 2}),
    "LlamaForCausalLM": ("LlamaConfig", WIDTHS | SPECIAL),
    "BertLMHeadModel": ("BertConfig", WIDTHS | {"is_decoder": True}),
    "RobertaForCausalLM": ("RobertaConfig", WIDTHS | SPECIAL | {"is_decoder": True}),
    "GPTJForCausalLM": ("GPTJConfig", {"n_embd": 8, "n_layer": 1, "n_head": 2, "rotary_dim": 4, **SPECIAL}),
    "BertForMaskedLM": ("BertConfig", WIDTHS),
    "BertForTokenClassification": ("BertConfig", WIDTHS | {"num_labels": VOCABULARY}),
    "GPT2ForTokenClassification": ("GPT2Config", {"n_embd": 8, "n_layer": 1, "n_head": 2, "num_labels": VOCABULARY}),
    "BartForCausalLM": ("BartConfig", {"d_model": 8, **DECODERS, **SPECIAL}),
    "XLNetLMHeadModel": ("XLNetConfig", {"d_model": 8, "n_layer": 1, "n_head": 2, "d_inner": 8}),
    "T5ForConditionalGeneration": (
        "T5Config",
        {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0},
    ),
    "BartForConditionalGeneration": ("BartConfig", {"d_model": 8, **DECODERS, **SPECIAL}),
}


def loader_of(batch: dict[str, Tensor]) -> Any:
    count = len(next(iter(batch.values())))
    return DataLoader([{name: t[i] for name, t in batch.items()} for i in range(count)], count)  # type: ignore[arg-type]


def tokens(seed: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (COUNT, LENGTH), generator=torch.Generator().manual_seed(seed))


def module_of(net: nn.Module) -> BayesianModule:
    return BayesianModule(net, TokenCategorical(), GaussianPrior(1.0), lr=1e-8)


@pytest.mark.parametrize("name", KINDS)
def test_the_energy_is_the_models_own_loss(name: str) -> None:
    """The sum over the tokens that count of the model's own loss, with some labels ignored: its convention is ours."""
    net = model(name)
    ids, labels = tokens(0)[:3], tokens(1)[:3]
    labels[0, :2] = labels[2, 3] = -100
    module = module_of(net)
    batch = {"input_ids": ids, "labels": labels}
    with torch.no_grad():
        each = module.log_likelihood(batch)
        own = net(**batch).loss
        _, target = module.output_and_target(batch)
    counted = (target != -100).sum()
    assert counted == (labels[:, 1:] if module.takes_next_tokens(batch) else labels).ne(-100).sum()
    assert float(-each.sum() / counted) == pytest.approx(float(own), rel=1e-5)


class Texts(Dataset[Any]):
    """Tokens, in the form that a test wants."""

    def __init__(self, form: str) -> None:
        self.ids, self.form = tokens(3), form
        self.mask = torch.ones_like(self.ids)
        self.mask[::2, 4:] = 0

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, i: int) -> Any:
        ids, mask = self.ids[i], self.mask[i]
        if self.form == "padded":  # with the pad's own label, as labels=input_ids.clone() has it
            ids = ids.where(mask > 0, 0)
            return {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}
        if self.form == "ignored":
            ids = ids.where(mask > 0, 0)
            return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
        named = {"input_ids": ids, "labels": ids.clone()}
        shifted = {"input_ids": ids[:-1], "labels": ids[1:]}
        pair = ({"input_ids": ids[:-1]}, ids[1:])
        return {"labels": named, "shifted": shifted, "pair": pair, "copy": ({"input_ids": ids}, ids)}[self.form]


def fitted(form: str, chains: int = 1) -> tuple[BayesianModule, dict[str, float]]:
    loader = DataLoader(Texts(form), 16)
    module = BayesianModule(
        model("GPT2LMHeadModel"), TokenCategorical(), GaussianPrior(0.5), lr=0.02, num_chains=chains
    )
    trainer = quiet_trainer(
        max_epochs=60,
        callbacks=[SamplingSchedule(burn_in_epochs=50, every_n_epochs=5), SampleCollector(), BayesianModelAverage()],
    )
    trainer.fit(module, loader, loader)
    return module, module.evaluations["val"].bma


@pytest.mark.slow
@pytest.mark.parametrize("chains", [1, 2])
@pytest.mark.parametrize("form", ["labels", "padded", "ignored", "pair"])
def test_nothing_is_learned_of_random_tokens(form: str, chains: int) -> None:
    """Tokens of other texts have log 16 in expectation; the next tokens' own NLL is that of 16, and not of a copy."""
    module, found = fitted(form, chains)
    assert found["accuracy"] < 0.5
    ids = tokens(9)
    posterior: Posterior | None = module.posterior
    assert posterior is not None
    p = posterior.predict({"input_ids": ids}).probabilities[:, :-1].double()
    nll = -p.gather(-1, ids[:, 1:, None]).log().mean()
    assert float(nll) > math.log(13) - 0.05, "uniform over 13 of the 16 tokens"


@pytest.mark.parametrize(
    ("form", "match"),
    [("shifted", "the labels are the next tokens already"), ("copy", "each target is the token at its own place")],
)
def test_labels_of_another_convention_are_refused(form: str, match: str) -> None:
    module = module_of(model("GPT2LMHeadModel"))
    with pytest.raises(ValueError, match=match):
        quiet_trainer(max_epochs=1, callbacks=[SamplingSchedule(every_n_epochs=1)]).fit(
            module, DataLoader(Texts(form), 16)
        )


def test_a_pair_is_taken_as_it_is() -> None:
    module, ids = module_of(model("GPT2LMHeadModel")), tokens(0)[:4]
    named = module.log_likelihood({"input_ids": ids, "labels": ids})
    pair = module.log_likelihood(({"input_ids": ids[:, :-1]}, ids[:, 1:]))
    torch.testing.assert_close(named, pair)


@pytest.mark.parametrize("name", ["T5ForConditionalGeneration", "BartForConditionalGeneration"])
def test_an_encoder_decoder_is_predicted_with_its_own_decoder_inputs(name: str) -> None:
    net = model(name)
    batch = {"input_ids": tokens(0)[:4], "labels": tokens(1)[:4]}
    module = module_of(net)
    trainer = quiet_trainer(max_epochs=1, callbacks=[SamplingSchedule(every_n_epochs=1), SampleCollector()])
    trainer.fit(module, loader_of(batch))
    assert module.posterior is not None
    with torch.no_grad():
        expected = module.net.eval()(**batch).logits.softmax(-1)
    torch.testing.assert_close(module.posterior.predict(batch).probabilities, expected, atol=1e-3, rtol=1e-2)
    with pytest.raises(ValueError, match="decodes a text of its own, and the batch has no 'decoder_input_ids'"):
        module.posterior.predict({"input_ids": batch["input_ids"]})


TWO = [("labels", "label"), ("labels", "y"), ("label", "target"), ("target", "y"), ("labels", "target", "y")]


@pytest.mark.parametrize("names", TWO)
def test_several_candidates_for_the_target_are_refused(names: tuple[str, ...]) -> None:
    class Named(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    batch = {"x": torch.zeros(4, 2)} | {name: torch.zeros(4).long() for name in names}
    match = f"a dict batch has {' and '.join(map(repr, names))}, each of which could be its target"
    module = BayesianModule(Named(2, 2), Categorical(), lr=1e-3)
    with pytest.raises(ValueError, match=match):
        quiet_trainer(max_epochs=1).fit(module, loader_of(batch))

    class Chosen(BayesianModule):
        def inputs_and_target(self, batch: Any) -> tuple[Any, Any]:
            return batch["x"], batch[names[-1]]

    chosen = Chosen(Named(2, 2), Categorical(), lr=1e-3)
    quiet_trainer(max_epochs=1, callbacks=[SamplingSchedule(every_n_epochs=1)]).fit(chosen, loader_of(batch))


def test_an_entry_that_forward_needs_is_no_candidate() -> None:
    class Both(nn.Linear):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return super().forward(x + y)

    module = BayesianModule(Both(2, 2), Categorical(), lr=1e-3)
    batch = {"x": torch.ones(4, 2), "y": torch.ones(4, 2), "label": torch.zeros(4).long()}
    inputs, target = module.inputs_and_target(batch)
    assert set(inputs) == {"x", "y"}
    assert target is batch["label"]
