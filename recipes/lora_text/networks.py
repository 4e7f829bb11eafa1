"""The network, its adapters, and fits of them by plain Lightning and by chains."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sgmcmc import SGHMC, BayesianModule, Categorical, bayesianize
from lightning_sgmcmc.datamodules import DatasetDataModule
from lightning_sgmcmc.namespace import pl
from lightning_sgmcmc.recipes.lora_text.settings import Settings
from lightning_sgmcmc.recipes.lora_text.texts import Paragraphs
from lightning_sgmcmc.recipes.shared.trainers import quiet_trainer, resumed_fit


def network(settings: Settings, weights: dict[str, Tensor] | None = None) -> Any:
    """Return a GPT-2 with a head for four classes, with the trunk's weights if they are given."""
    from transformers import GPT2Config, GPT2ForSequenceClassification

    options: dict[str, Any] = {"num_labels": 4, "attn_implementation": "eager"}  # torch has no vmapped flash attention
    config = GPT2Config(
        vocab_size=settings.vocabulary,
        n_positions=settings.length,
        n_embd=settings.width,
        n_layer=settings.layers,
        n_head=6,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        **options,
    )
    made = GPT2ForSequenceClassification(config)
    if weights is not None:
        made.load_state_dict(weights, strict=False)
    return made


def adapters(settings: Settings) -> Any:
    """Return the LoRA of the last layer, with a new head."""
    from peft import LoraConfig

    return LoraConfig(
        r=settings.rank,
        lora_alpha=2 * settings.rank,
        task_type="SEQ_CLS",
        target_modules=["c_attn"],
        layers_to_transform=[settings.layers - 1],
        fan_in_fan_out=True,
    )


class Plain(pl.LightningModule):
    """A network trained by AdamW as in plain Lightning."""

    def __init__(self, net: nn.Module, lr: float) -> None:
        super().__init__()
        self.net = net
        self.lr = lr

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        return nn.functional.cross_entropy(self.net(**inputs).logits, batch["labels"])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.net.parameters() if p.requires_grad], lr=self.lr)


def plain_lora(settings: Settings, weights: dict[str, Tensor]) -> Plain:
    from peft import get_peft_model

    return Plain(get_peft_model(network(settings, weights), adapters(settings)), settings.lr)


def sampled_lora(settings: Settings, weights: dict[str, Tensor], seed: int, chains: int) -> BayesianModule:
    """Return the chains of the same network and adapters."""
    return bayesianize(
        network(settings, weights),
        adapters(settings),
        Categorical(),
        lr=settings.sampler_lr,
        sampler=SGHMC,
        temperature=settings.temperature,
        num_chains=chains,
        shared_batch=True,
        chain_execution="vmap",
        seed=seed,
    )


def fit(module: pl.LightningModule, data: Paragraphs, steps: int, batch: int, *callbacks: pl.Callback) -> None:
    trainer = quiet_trainer(accelerator="cpu", max_steps=steps, max_epochs=-1, callbacks=list(callbacks))
    resumed_fit(trainer, module, DatasetDataModule(data, batch_size=batch, drop_last=True))


def probabilities(net: nn.Module, test: Paragraphs) -> Tensor:
    """Return a network's class probabilities, shape (n, 4)."""
    net.eval()
    with torch.no_grad():
        batches = [{n: t for n, t in batch.items() if n != "labels"} for batch in DataLoader(test, 100)]
        return torch.cat([net(**batch).logits.softmax(1) for batch in batches])
