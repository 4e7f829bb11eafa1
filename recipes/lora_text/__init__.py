"""LoRA of a GPT-2-shaped network on English text: cost compared with plain LoRA training, and what four chains gain.

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

Measured (full, one run): a step of one chain costs 0.99 (0.96 to 1.13 in other runs, the last on a busy machine), of
four 1.89 (1.79 to 1.94) of plain LoRA's; a sample's file has 1.019 times the sampled numbers' bytes, and the module of
four chains 1.003 times one network's. On 320 paragraphs of the new classes one network has an accuracy of 0.39 and an
NLL of 1.47, the average of four 0.37 and 1.36, and four chains 0.31 and 1.33. Four classes alike have 1.39, so the
trunk's 1,000 steps help little, and the recipe shows the cost and not the gain. The quick setting stays at chance.
"""

import statistics
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_sgmcmc.callbacks import SampleCollector, SamplingSchedule, WarmStart
from lightning_sgmcmc.namespace import pl
from lightning_sgmcmc.recipes.lora_text.costs import costs
from lightning_sgmcmc.recipes.lora_text.networks import Plain, fit, network, plain_lora, probabilities, sampled_lora
from lightning_sgmcmc.recipes.lora_text.settings import Settings
from lightning_sgmcmc.recipes.lora_text.texts import NEW, TRUNK, data_of
from lightning_sgmcmc.recipes.shared.jobs import run_jobs
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.results import Row
from lightning_sgmcmc.recipes.shared.settings import read_settings
from lightning_sgmcmc.recipes.shared.trainers import prepare_run

METHODS = ("AdamW, one network", "AdamW, the average of four", "SGHMC, four chains")


def run(options: Options) -> list[Row]:
    """Train the trunk, compare the methods on the new classes, and measure cost, bytes and memory."""
    settings = read_settings(Settings, options)
    weights = run_jobs(trunk, [()], options, settings)[()]
    jobs = [(method,) for method in options.chosen(METHODS)]
    found = run_jobs(quality, jobs, options, settings, weights)
    measured = run_jobs(cost, [()], options, settings, weights, in_turn=True)[()]
    return [row for rows in found.values() for row in rows] + measured


def trunk(settings: Settings, options: Options) -> dict[str, Tensor]:
    """Return the weights of the network after its training on the first packages."""
    prepare_run(options)
    pl.seed_everything(options.seed, verbose=False)
    net = network(settings)
    texts, _ = data_of(TRUNK, settings.trunk, 0, settings)
    fit(Plain(net, 3e-4), texts, settings.trunk_steps, settings.batch)
    return {name: tensor for name, tensor in net.state_dict().items() if not name.startswith("score")}


def quality(method: str, settings: Settings, weights: dict[str, Tensor], options: Options) -> list[Row]:
    """Return accuracy and NLL of a method on the new classes' test data; all make as many network passes."""
    prepare_run(options)
    train, test = data_of(NEW, settings.train, settings.test, settings)
    rows: list[Row] = []
    if method == "SGHMC, four chains":
        sampled = sampled_lora(settings, weights, options.seed, settings.chains)
        warm = settings.steps // 2
        every = max(1, (settings.steps - warm) // settings.samples)
        schedule = [WarmStart(lr=settings.lr, steps=warm, early_stopping=None), SamplingSchedule(every_n_steps=every)]
        fit(sampled, train, settings.steps, settings.batch, *schedule, SampleCollector(options.out / "samples"))
        assert sampled.posterior is not None
        p = sampled.posterior.predict(DataLoader(test, 100)).probabilities
        numbers = sum(tensor.numel() for tensor in sampled.posterior[0].own_state.values())
        sizes = [path.stat().st_size for path in (options.out / "samples").glob("sample-*.safetensors")]
        rows.append(Row("a sample's file", "bytes / (4 x sampled weights)", statistics.mean(sizes) / (4 * numbers)))
    else:
        alone = method == "AdamW, one network"
        members = []
        for member in range(1 if alone else settings.chains):
            torch.manual_seed(options.seed + member)
            module = plain_lora(settings, weights)
            fit(module, train, settings.steps * (settings.chains if alone else 1), settings.batch)
            members.append(probabilities(module.net, test))
        p = torch.stack(members).mean(0)
    labels: Any = test.columns["labels"]
    scores = [
        Row(method, "test accuracy", float((p.argmax(1) == labels).float().mean())),
        Row(method, "test NLL", float(-p[torch.arange(len(p)), labels].log().mean())),
    ]
    return scores + rows


def cost(settings: Settings, weights: dict[str, Tensor], options: Options) -> list[Row]:
    """Return ratios of steps and memory."""
    prepare_run(options)
    train, _ = data_of(NEW, settings.train, settings.test, settings)
    return costs(settings, weights, train, options.out)
