"""A user's mistakes at the command line: one sentence, an exit code, and no folder."""

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_sgmcmc.checks import check_number
from lightning_sgmcmc.cli import main
from lightning_sgmcmc.cli.exits import FAILED, MISTAKE, NO_SAMPLES, NoSamplesError, one_sentence
from tests.support.paths import RECIPE

TEXT = Path(RECIPE).read_text()
SCHEDULE = re.findall(r"    - class_path: lightning_sgmcmc.callbacks.CyclicalSchedule\n.*\n", TEXT)[0]

CONFIGURATIONS = {
    "a misspelt argument": (
        TEXT.replace("temperature:", "temprature:"),
        "model: BayesianModule has no argument 'temprature'; did you mean 'temperature'?",
    ),
    "a misspelt argument of a callback": (
        TEXT.replace("num_cycles: 8", "num_cycle: 8"),
        "trainer.callbacks: CyclicalSchedule has no argument 'num_cycle'; did you mean 'num_cycles'?",
    ),
    "a misspelt option of the trainer": (
        TEXT.replace("max_epochs:", "max_epoch:"),
        "a configuration has no key 'trainer.max_epoch'; did you mean 'trainer.max_epochs'?",
    ),
    "an unknown section": (TEXT + "\nmodule: 1\n", "a configuration has no key 'module'; did you mean 'model'?"),
    "a misspelt callback": (
        TEXT.replace("callbacks.CyclicalSchedule", "callbacks.CyclicSchedule"),
        "trainer.callbacks: there is no class lightning_sgmcmc.callbacks.CyclicSchedule; did you mean "
        "'CyclicalSchedule'?",
    ),
    "a misspelt sampler": (
        TEXT.replace("samplers.SGHMC", "samplers.SGHMCC"),
        "model.sampler: there is no class lightning_sgmcmc.samplers.SGHMCC; did you mean 'SGHMC'?",
    ),
    "a sampler without its package": (
        TEXT.replace("lightning_sgmcmc.samplers.SGHMC", "SGHMCC"),
        "model.sampler: 'SGHMCC' is not the path of a class, such as lightning_sgmcmc.SGHMC",
    ),
    "a key twice": (
        TEXT + "trainer:\n  max_epochs: 3\n",
        f"run.yaml, line {TEXT.count(chr(10)) + 1}: the key 'trainer' is there twice, so its first value would not "
        "count: join the two",
    ),
    "a module that is not there": (
        TEXT.replace("torchvision.ops.MLP", "mynet.Net"),
        "model.net: mynet.Net cannot be imported: No module named 'mynet'",
    ),
    "a network as the model": (
        TEXT.replace("lightning_sgmcmc.BayesianModule", "torch.nn.Linear"),
        "model: torch.nn.Linear is not a BayesianModule",
    ),
    "a value of another type": (
        TEXT.replace("lr: 0.2", "lr: fast"),
        "model.lr must be a number or a list or a mapping, got 'fast'",
    ),
    "a value out of range": (
        TEXT.replace("lr: 0.2", "lr: -1"),
        "lr must be a finite number and not negative, got -1.0",
    ),
    "a callback's value out of range": (
        TEXT.replace("exploration: 0.7", "exploration: 2"),
        "exploration must be in [0, 1), got 2.0",
    ),
    "no data": (
        re.sub(r"data:\n.*\n.*\n", "", TEXT),
        "the configuration has no data: pass --config FILE (`sgmcmc example` prints one)",
    ),
    "no schedule": (
        TEXT.replace(SCHEDULE, ""),
        "SampleCollector would never see a sample: add a CyclicalSchedule or a SamplingSchedule, which decide when "
        "samples are drawn",
    ),
    "too few steps": (
        TEXT.replace("max_epochs: 400", "max_epochs: 1"),
        "cycle 1 of 8 has 0 sampling steps for samples_per_cycle=3: 13 steps in all make cycles of 2, and "
        "exploration=0.7 leaves only the end of each; train longer, or take fewer cycles, fewer samples or less "
        "exploration",
    ),
    "a network of another input size": (
        TEXT.replace("in_channels: 64", "in_channels: 32"),
        "a batch has 64 inputs for each example, and the network's first linear layer takes 32: make it "
        "nn.Linear(64, 100)",
    ),
    "no mapping": ("- 1\n", "run.yaml holds a list, but a configuration has keys and values (model, data, trainer)"),
    "an empty file": ("", "run.yaml holds nothing, but a configuration has keys and values (model, data, trainer)"),
    "no YAML": ("model:\n  [1\ndata: x\n", "run.yaml, line 3 is not YAML: expected ',' or ']', but got ':'"),
}


@pytest.fixture
def sentence(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs a command, and returns the sentence that the user sees."""

    def run(*arguments: str) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main([*arguments])
        assert end.value.code == MISTAKE
        said = capsys.readouterr().err
        assert "Traceback" not in said
        assert "usage:" not in said
        own = [line for line in said.splitlines() if line.startswith("sgmcmc")]
        assert len(own) == 1
        assert said.rstrip().endswith((own[0], "(--debug shows where it was raised)"))
        return own[0]

    return run


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.filterwarnings("ignore")
def test_a_wrong_configuration(name: str, sentence: Callable[..., str]) -> None:
    text, expected = CONFIGURATIONS[name]
    Path("run.yaml").write_text(text)
    said = sentence("fit", "--config", "run.yaml", "--trainer.enable_progress_bar=false")
    assert said.replace("addmm: ", "") == f"sgmcmc fit: {expected}"  # which torch 2.6 does not write
    assert [path.name for path in Path.cwd().iterdir()] == ["run.yaml"]


FIT = ("fit", "--config", RECIPE)
COMMANDS = [
    ((), "sgmcmc: a command is missing: choose from fit, "),
    (("fitt",), "sgmcmc: there is no command 'fitt': choose from fit, validate, test, predict, plan, tune, report, "),
    (("fit",), "sgmcmc fit: the configuration has no data and no model: pass --config FILE"),
    (("fit", "--config", "no.yaml"), "sgmcmc fit: there is no file no.yaml to configure the run: `sgmcmc example > "),
    ((*FIT, "--nonsense"), "sgmcmc fit: unrecognized arguments: --nonsense"),
    (("fit", RECIPE), f"sgmcmc fit: unrecognized arguments: {RECIPE}; a configuration is passed as --config {RECIPE}"),
    ((*FIT, "--ckpt_path=no.ckpt"), "sgmcmc fit: --ckpt_path=no.ckpt does not exist: pass a checkpoint, or --resume"),
    ((*FIT, f"--ckpt_path={RECIPE}"), f"sgmcmc fit: --ckpt_path={RECIPE} is not a complete checkpoint"),
    ((*FIT, "--resume", "--ckpt_path=last"), "sgmcmc fit: --resume finds the checkpoint itself: pass either "),
    ((*FIT, "--trainer.precision=8"), "sgmcmc fit: trainer.precision must be one of [64, 32, 16] or one of ["),
    (
        (*FIT, "--trainer.logger.save_dir=/proc/runs"),
        "sgmcmc fit: the run's folder /proc/runs/digits_csghmc/version_0 cannot be written (",
    ),
    (
        (*FIT, "--data=lightning_sgmcmc.datamodules.CovertypeDataModule", "--data.root=nowhere"),
        "sgmcmc fit: ",
    ),
    (("test", "--config", RECIPE), "sgmcmc test: no run in runs/digits_csghmc has posterior samples: run sgmcmc fit "),
    (("predict", "--config", RECIPE), "sgmcmc predict: no run in runs/digits_csghmc has posterior samples: run "),
    (("test", "--config", RECIPE, "--resume"), "sgmcmc test: --resume continues a fit, so it has no effect in test"),
    (
        ("test", "--config", RECIPE, "--auto"),
        "sgmcmc test: --auto is an option of fit and plan, so it has no",
    ),
    (("plan", "--config", RECIPE, "--baselines"), "sgmcmc plan: --baselines is an option of fit, so it has no effect "),
    ((*FIT, "--objective=ood"), "sgmcmc fit: --objective is an option of --auto: add --auto"),
    (
        ("test", "--config", RECIPE, "--trainer.callbacks=lightning_sgmcmc.callbacks.RunSummary"),
        "sgmcmc test: no run in runs/digits_csghmc has posterior samples: run sgmcmc fit ",
    ),
    (
        ("plan", "--config", RECIPE, "--model.net.init_args.in_channels=5"),
        "sgmcmc plan: a batch has 64 inputs for each example, and the network's first linear layer takes 5: make it ",
    ),
    (("report", "nowhere"), "sgmcmc report: there is no folder nowhere: pass a run's folder"),
    (("compare", "nowhere", "."), "sgmcmc compare: there is no folder nowhere: pass a run's folder"),
    (("report", "."), "sgmcmc report: . holds no run: neither it nor a subfolder has "),
    (
        ("example", "no"),
        "sgmcmc example: there is no example 'no': choose from digits_auto, digits_csghmc, digits_csghmc_contour",
    ),
    (("recipe", "no"), "sgmcmc recipe: NAME must be one of "),
    (("recipe", "covertype_logistic", "--data-root=nowhere"), "sgmcmc recipe: "),
    (("recipe", "logistic_ess", "--data-root=nowhere"), "sgmcmc recipe: the table 'australian' is not at nowhere/"),
]


@pytest.mark.parametrize(("arguments", "expected"), COMMANDS, ids=[" ".join(part) for part, _ in COMMANDS])
@pytest.mark.filterwarnings("ignore")
def test_a_wrong_command(arguments: tuple[str, ...], expected: str, sentence: Callable[..., str]) -> None:
    said = sentence(*arguments)
    assert said.startswith(expected)
    assert len(said) < 1000
    assert list(Path.cwd().iterdir()) == []


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([*FIT, "--debug", "--model.init_args.lr=-1"])
    assert end.value.code == MISTAKE
    said = capsys.readouterr().err
    assert "Traceback (most recent call last)" in said
    assert "in check_number" in said


def test_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    """Before the first step every error of a usual type is a mistake; after it, a foreign one keeps its traceback."""

    def code(fault: Callable[[], None], steps: int) -> object:
        with pytest.raises(SystemExit) as end, one_sentence("sgmcmc fit", steps=lambda: steps):
            fault()
        return end.value.code

    def no_sample() -> None:
        raise NoSamplesError("no sample")

    def foreign() -> None:
        math.sqrt(-1)

    def ours() -> None:
        check_number("lr", -1)

    assert code(no_sample, steps=9) == NO_SAMPLES
    assert code(foreign, steps=0) == MISTAKE
    with pytest.raises(ValueError, match="math domain error"):
        code(foreign, steps=9)
    with pytest.raises(AttributeError):
        code(lambda: "text".missing, steps=0)  # type: ignore[attr-defined]
    capsys.readouterr()
    assert code(ours, steps=9) == FAILED
    assert capsys.readouterr().err.startswith("sgmcmc fit: lr must be a finite number and not negative, got -1\n")
