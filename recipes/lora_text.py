"""LoRA of a GPT-2-shaped network on English text: cost beside plain LoRA training, and what four chains gain.

The network is transformers' `GPT2ForSequenceClassification` with GPT-2's vocabulary of 50,257 and eight layers of width
288 (22.5 million weights), made from its configuration: nothing is downloaded. The text is the documentation in the
source code of installed packages, by paragraphs of 12 to 80 words; a word's token is its checksum. All of the network
is trained to tell apart torch, NumPy, scikit-learn and Matplotlib (the trunk). Then LoRA (rank 8 in the attention of
the last layer) and a new head learn four other packages from 100 paragraphs each, by three methods of equal cost in
network passes: one network by AdamW, four of them averaged, and four chains of SGHMC from the trunk
(`bayesianize(net, LoraConfig(…))`), at temperature 0.02, so a cold ensemble: at 1 the prior's heat in 12,000 directions
outweighs 400 paragraphs. The texts, so the figures, differ a little between versions of the packages.

Cost: a step of `Trainer.fit` with all callbacks beside one of plain Lightning with AdamW on the same batches, in CPU
seconds of one thread, measured in turns. The chains share their batch and the fixed weights (`shared_batch=True`,
`chain_execution="vmap"`), so all below the adapters is computed once for all of them. With adapters in all layers
nothing is shared, and four chains cost four networks. Bytes: a sample's file beside the sampled numbers. Memory: the
module's tensors with four chains beside those of one network.

Measured: a step of one chain costs 0.99 (on a busier machine 1.13), of four chains 1.79 (1.94) of plain LoRA's; a
sample's file has 1.019 times the sampled numbers' bytes, and the module of four chains 1.003 times one network's. The
quick setting is for these figures: in its few steps the trunk learns too little to help, and all methods stay near
chance on the new classes (accuracy 0.23 to 0.27 of four, NLL 1.57 of one network, 1.43 of four, 1.50 of the samples).
"""

import ast
import copy
import importlib.util
import itertools
import re
import statistics
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_sgmcmc import SGHMC, BayesianModule, Categorical, bayesianize
from lightning_sgmcmc.callbacks import (
    BayesianModelAverage,
    PosteriorDashboard,
    RunSummary,
    SampleCollector,
    SamplingSchedule,
    WarmStart,
)
from lightning_sgmcmc.datamodules import DatasetDataModule
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.results import Row
from lightning_sgmcmc.recipes.shared.trainers import prepare_run, quiet_trainer, resumed_fit

TRUNK = ("torch", "numpy", "sklearn", "matplotlib")
NEW = ("torchvision", "torchmetrics", "wandb", "pytorch_lightning")
LENGTH, RANK = 32, 8
CHAINS, BATCH = 4, 16
LR, SAMPLER_LR, TEMPERATURE = 1e-3, 0.01, 0.02


class Setting(NamedTuple):
    """Sizes of a run: the network, paragraphs of each class, steps, samples, and rounds and steps of the timing."""

    vocabulary: int = 50_257
    width: int = 288
    layers: int = 8
    trunk: int = 1000
    train: int = 100
    test: int = 80
    trunk_steps: int = 120
    steps: int = 60
    samples: int = 5
    rounds: int = 2
    timed: int = 7


SETTINGS = {"quick": Setting(), "full": Setting(trunk_steps=1000, steps=400, samples=20, rounds=11)}


class Paragraphs(Dataset[Any]):
    """Rows of tokens with their labels, read in whole batches."""

    def __init__(self, ids: Tensor, labels: Tensor) -> None:
        self.columns = {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}

    def __len__(self) -> int:
        return len(self.columns["labels"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self.columns.items()}

    def whole_batch(self, indices: Any) -> dict[str, Tensor]:
        """Return the batch of these rows."""
        return {name: column[torch.as_tensor(indices)] for name, column in self.columns.items()}


def run(options: Options, setting: Setting | None = None) -> list[Row]:
    """Train the trunk, compare the methods on the new classes, and measure cost, bytes and memory."""
    prepare_run(options)
    setting = setting or SETTINGS[options.scale]
    pl.seed_everything(options.seed, verbose=False)
    trained = network(setting)
    texts, _ = data_of(TRUNK, setting.trunk, 0, setting)
    fit(Plain(trained, 3e-4), texts, setting.trunk_steps)
    weights = {name: tensor for name, tensor in trained.state_dict().items() if not name.startswith("score")}
    train, test = data_of(NEW, setting.train, setting.test, setting)
    rows = qualities(setting, weights, train, test, options)
    return rows + costs(setting, weights, train, options)


# -- texts ------------------------------------------------------------------------------------------------------------


def data_of(packages: Sequence[str], train: int, test: int, setting: Setting) -> tuple[Paragraphs, Paragraphs]:
    """Return training and test data with so many paragraphs of each package; neighbours in a file are in one part."""
    parts: tuple[list[tuple[list[str], int]], list[tuple[list[str], int]]] = ([], [])
    for label, package in enumerate(packages):
        found = list(itertools.islice(paragraphs(package), train + test))
        held_out = len(found) * test // (train + test)
        parts[0].extend((words, label) for words in found[held_out:])
        parts[1].extend((words, label) for words in found[:held_out])
    return tokens_of(parts[0], setting.vocabulary), tokens_of(parts[1], setting.vocabulary)


def paragraphs(package: str) -> Iterator[list[str]]:
    """Yield the different paragraphs of 12 to 80 words in the documentation strings of a package's source code."""
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    known = set()
    for path in sorted(Path(folders[0]).rglob("*.py")):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError):
            continue
        documented = (part for part in ast.walk(tree) if isinstance(part, ast.Module | ast.ClassDef | ast.FunctionDef))
        for text in (text for part in documented for text in re.split(r"\n\s*\n", ast.get_docstring(part) or "")):
            words = re.findall(r"[a-z]+", text.lower())
            if ">>>" not in text and 12 <= len(words) <= 80 and tuple(words) not in known:
                known.add(tuple(words))
                yield words


def tokens_of(labelled: Sequence[tuple[list[str], int]], vocabulary: int) -> Paragraphs:
    """Return the paragraphs' first words as tokens, by their checksums; 0 pads."""
    ids = torch.zeros(len(labelled), LENGTH, dtype=torch.int64)
    for place, (words, _) in enumerate(labelled):
        tokens = [zlib.crc32(word.encode()) % (vocabulary - 1) + 1 for word in words[:LENGTH]]
        ids[place, : len(tokens)] = torch.tensor(tokens)
    return Paragraphs(ids, torch.tensor([label for _, label in labelled]))


# -- networks and fits ------------------------------------------------------------------------------------------------


def network(setting: Setting, weights: "dict[str, Tensor] | None" = None) -> Any:
    """Return a GPT-2 with a head for four classes, with the trunk's weights if they are given."""
    from transformers import GPT2Config, GPT2ForSequenceClassification

    options: dict[str, Any] = {"num_labels": 4, "attn_implementation": "eager"}  # torch has no vmapped flash attention
    config = GPT2Config(
        vocab_size=setting.vocabulary,
        n_positions=LENGTH,
        n_embd=setting.width,
        n_layer=setting.layers,
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


def adapters(setting: Setting) -> Any:
    """Return the LoRA of the last layer, with a new head."""
    from peft import LoraConfig

    return LoraConfig(
        r=RANK,
        lora_alpha=2 * RANK,
        task_type="SEQ_CLS",
        target_modules=["c_attn"],
        layers_to_transform=[setting.layers - 1],
        fan_in_fan_out=True,
    )


class Plain(pl.LightningModule):
    """A network trained by AdamW as in plain Lightning."""

    def __init__(self, net: nn.Module, lr: float = LR) -> None:
        super().__init__()
        self.net = net
        self.lr = lr

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        return nn.functional.cross_entropy(self.net(**inputs).logits, batch["labels"])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.net.parameters() if p.requires_grad], lr=self.lr)


def plain_lora(setting: Setting, weights: dict[str, Tensor]) -> Plain:
    from peft import get_peft_model

    return Plain(get_peft_model(network(setting, weights), adapters(setting)))


def sampled_lora(setting: Setting, weights: dict[str, Tensor], seed: int, chains: int = CHAINS) -> BayesianModule:
    """Return the chains of the same network and adapters."""
    return bayesianize(
        network(setting, weights),
        adapters(setting),
        Categorical(),
        lr=SAMPLER_LR,
        sampler=SGHMC,
        temperature=TEMPERATURE,
        num_chains=chains,
        shared_batch=True,
        chain_execution="vmap",
        seed=seed,
    )


def fit(module: pl.LightningModule, data: Paragraphs, steps: int, *callbacks: pl.Callback) -> None:
    trainer = quiet_trainer(accelerator="cpu", max_steps=steps, max_epochs=-1, callbacks=list(callbacks))
    resumed_fit(trainer, module, DatasetDataModule(data, batch_size=BATCH, drop_last=True))


# -- quality ----------------------------------------------------------------------------------------------------------


def qualities(
    setting: Setting, weights: dict[str, Tensor], train: Paragraphs, test: Paragraphs, options: Options
) -> list[Row]:
    """Return accuracy and NLL of the methods on the new classes' test data, each after as many network passes."""
    members = []
    for member in range(CHAINS):
        torch.manual_seed(options.seed + member)
        module = plain_lora(setting, weights)
        fit(module, train, setting.steps)
        members.append(probabilities(module.net, test))
    torch.manual_seed(options.seed)
    single = plain_lora(setting, weights)
    fit(single, train, CHAINS * setting.steps)
    sampled = sampled_lora(setting, weights, options.seed)
    warm = setting.steps // 2
    every = max(1, (setting.steps - warm) // setting.samples)
    schedule = [WarmStart(lr=LR, steps=warm, early_stopping=None), SamplingSchedule(every_n_steps=every)]
    fit(sampled, train, setting.steps, *schedule, SampleCollector(options.out / "samples"))
    assert sampled.posterior is not None
    chains = sampled.posterior.predict(DataLoader(test, 100)).probabilities
    found = {
        "AdamW, one network": probabilities(single.net, test),
        "AdamW, the average of four": torch.stack(members).mean(0),
        "SGHMC, four chains": chains,
    }
    labels = test.columns["labels"]
    rows = []
    for name, p in found.items():
        rows.append(Row(name, "test accuracy", float((p.argmax(1) == labels).float().mean())))
        rows.append(Row(name, "test NLL", float(-p[torch.arange(len(p)), labels].log().mean())))
    numbers = sum(p.numel() for n, p in single.net.named_parameters() if p.requires_grad)
    sizes = [path.stat().st_size for path in (options.out / "samples").glob("sample-*.safetensors")]
    rows.append(Row("a sample's file", "bytes / (4 x sampled weights)", statistics.mean(sizes) / (4 * numbers)))
    return rows


def probabilities(net: nn.Module, test: Paragraphs) -> Tensor:
    """Return a network's class probabilities, shape (n, 4)."""
    net.eval()
    with torch.no_grad():
        batches = [{n: t for n, t in batch.items() if n != "labels"} for batch in DataLoader(test, 100)]
        return torch.cat([net(**batch).logits.softmax(1) for batch in batches])


# -- cost -------------------------------------------------------------------------------------------------------------


class Clock(pl.Callback):
    """Measures the mean CPU seconds of a step, from the ninth to the fifteenth.

    The library looks at the batches 1, 2, 4, 8, … of a fit by a pass of its own, which counts in no long run.
    """

    first = 8

    def __init__(self) -> None:
        self.start, self.seconds = 0.0, 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.first:
            self.start = time.process_time()
        self.seconds = (time.process_time() - self.start) / max(1, trainer.global_step - self.first)


def costs(setting: Setting, weights: dict[str, Tensor], train: Paragraphs, options: Options) -> list[Row]:
    """Return ratios of steps, measured in turns against drifts of the machine's speed, and of memory."""
    torch.set_num_threads(1)

    def seconds(make: Callable[[], pl.LightningModule], sampled: bool) -> float:
        clock = Clock()
        folder = options.out / "timed"
        own = [
            SamplingSchedule(every_n_steps=setting.timed + Clock.first),
            SampleCollector(folder),
            BayesianModelAverage(),
            RunSummary(),
        ]
        callbacks = [*own, PosteriorDashboard(figures=())] if sampled else []
        fit(make(), train, setting.timed + Clock.first, *callbacks, clock)
        return clock.seconds

    alternatives: dict[str, Callable[[], float]] = {
        "plain": lambda: seconds(lambda: plain_lora(setting, weights), False),
        "1 chain": lambda: seconds(lambda: sampled_lora(setting, weights, 0, 1), True),
        f"{CHAINS} chains": lambda: seconds(lambda: sampled_lora(setting, weights, 0, CHAINS), True),
    }
    taken: dict[str, list[float]] = {name: [] for name in alternatives}
    for turn in range(setting.rounds + 1):
        for name, measure in alternatives.items():
            once = measure()
            if turn > 0:  # the first round warms up
                taken[name].append(once)
    rows = []
    for name in list(alternatives)[1:]:
        ratio = statistics.median(a / b for a, b in zip(taken[name], taken["plain"], strict=True))
        rows.append(Row(f"SGHMC, {name}", "CPU seconds of a step / of plain LoRA's", ratio))
    alone, together = (_bytes_of(sampled_lora(setting, weights, 0, chains), train) for chains in (1, CHAINS))
    rows.append(Row(f"SGHMC, {CHAINS} chains", "bytes of the module / one network's", together / alone))
    return rows


def _bytes_of(module: BayesianModule, train: Paragraphs) -> int:
    """Return the bytes of a module's tensors once its chains are made."""
    made = copy.copy(module)
    made.configure_model()
    return sum(tensor.nbytes for tensor in made.state_dict().values())
