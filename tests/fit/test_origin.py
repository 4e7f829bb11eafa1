"""Where a run comes from: no program of the working folder's `.git` runs, and no secret of the command line is kept."""

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pytorch_lightning.loggers import CSVLogger
from torch import nn

from lightning_sgmcmc import BayesianModule, Categorical
from lightning_sgmcmc.callbacks import BayesianModelAverage, RunSummary, SampleCollector, SamplingSchedule
from lightning_sgmcmc.files import MASK, text_without_secrets, without_secrets
from lightning_sgmcmc.fit import results as origin
from lightning_sgmcmc.report.page import write_report
from tests.support import small_run
from tests.support.trainers import quiet_trainer

Change = Callable[[Path, str], None]


def git(folder: Path, *command: str) -> None:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    said = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *said, *command], cwd=folder, check=True, capture_output=True, env=plain)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "unpacked"
    folder.mkdir()
    git(folder, "init")
    (folder / "a.txt").write_text("one\n")
    git(folder, "add", ".")
    git(folder, "commit", "-m", "first")
    return folder


def setting(*names: str, attributes: str = "") -> Change:
    """Let settings of the repository name the program."""

    def change(folder: Path, program: str) -> None:
        for name in names:
            git(folder, "config", name, program)
        if attributes:
            (folder / ".gitattributes").write_text(attributes)

    return change


def hooks(folder: Path, program: str) -> None:
    for name in ("post-index-change", "fsmonitor-watchman", "post-checkout", "reference-transaction", "pre-auto-gc"):
        hook = folder / ".git" / "hooks" / name
        hook.write_text(f"#!/bin/sh\n{program}\n")
        hook.chmod(0o755)
    os.utime(folder / "a.txt", (1, 1))  # git would write its index anew


def included(folder: Path, program: str) -> None:
    (folder / ".git" / "more").write_text(f'[core]\n\tfsmonitor = "{program}"\n')
    git(folder, "config", "include.path", "more")


def of_worktree(folder: Path, program: str) -> None:
    git(folder, "config", "extensions.worktreeConfig", "true")
    git(folder, "config", "--worktree", "core.fsmonitor", program)


def of_submodule(folder: Path, program: str) -> None:
    inner = folder / "inner"
    inner.mkdir()
    git(inner, "init")
    (inner / "b.txt").write_text("two\n")
    git(inner, "add", ".")
    git(inner, "commit", "-m", "inner")
    git(folder, "add", "inner")
    git(folder, "commit", "-m", "with a submodule")
    git(inner, "config", "core.fsmonitor", program)
    (inner / "b.txt").write_text("changed\n")


def lazy(folder: Path, program: str) -> None:
    """The tree is missing, and is to be fetched by a program of the configuration."""
    for name, value in (("url", str(folder)), ("promisor", "true"), ("uploadpack", program)):
        git(folder, "config", f"remote.origin.{name}", value)
    git(folder, "config", "extensions.partialClone", "origin")
    tree = subprocess.run(
        ["git", "rev-parse", "HEAD^{tree}"], cwd=folder, capture_output=True, text=True
    ).stdout.strip()
    (folder / ".git" / "objects" / tree[:2] / tree[2:]).unlink()
    git(folder, "config", "core.repositoryFormatVersion", "1")


def elsewhere(folder: Path, program: str) -> None:
    """`.git` is a file that names the folder."""
    (folder / ".git").rename(folder / "hidden")
    (folder / ".git").write_text("gitdir: hidden\n")
    git(folder, "config", "core.fsmonitor", program)


def bare(folder: Path, program: str) -> None:
    """The folder looks like a repository without files."""
    git(folder, "config", "core.fsmonitor", program)
    for part in (folder / ".git").iterdir():
        part.rename(folder / part.name)
    (folder / ".git").rmdir()


CHANGES: dict[str, Change] = {
    "fsmonitor": setting("core.fsmonitor"),
    "clean": setting("filter.x.clean", attributes="* filter=x\n"),
    "process": setting("filter.x.process", attributes="* filter=x\n"),
    "smudge and required": setting("filter.x.smudge", "filter.x.clean", attributes="*.txt filter=x\n"),
    "diff": setting("diff.external", "diff.x.command", "diff.x.textconv", attributes="* diff=x\n"),
    "ssh, pager, editor, askpass": setting(
        "core.sshCommand", "core.pager", "core.editor", "core.askPass", "pager.status"
    ),
    "alias": setting("alias.status", "alias.rev-parse", "alias.config"),
    "gitProxy and credential": setting("core.gitProxy", "credential.helper", "gpg.program"),
    "hooks": hooks,
    "include": included,
    "worktree": of_worktree,
    "submodule": of_submodule,
    "lazy fetch": lazy,
    "git file": elsewhere,
    "bare": bare,
}


@pytest.mark.parametrize("kind", CHANGES)
def test_no_program_of_the_repository_runs(
    kind: str, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = origin.commit(repository)
    assert head is not None
    assert len(head) == 40
    ran = tmp_path / "ran"
    CHANGES[kind](repository, f"touch {ran};cat")
    if (repository / "a.txt").exists() and kind != "bare":
        (repository / "a.txt").write_text("two\n")  # of the same size, so that git reads it
    ran.unlink(missing_ok=True)  # the commands of this test may have run it
    monkeypatch.chdir(repository)
    origin.origin_of_run.cache_clear()
    found = origin.origin_of_run()["commit"]
    origin.origin_of_run.cache_clear()
    assert not ran.exists()
    assert found is None or kind == "submodule" or found.startswith(head)


@pytest.mark.parametrize("name", ["GIT_EXTERNAL_DIFF", "GIT_SSH_COMMAND", "GIT_PAGER", "GIT_DIR", "GIT_CONFIG_COUNT"])
def test_settings_of_another_repository_do_not_matter(
    name: str, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a program that a git hook has started."""
    head = origin.commit(repository)
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "core.fsmonitor")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", f"touch {tmp_path / 'ran'}")
    monkeypatch.setenv(name, "1" if name == "GIT_CONFIG_COUNT" else f"touch {tmp_path / 'ran'};false")
    assert origin.commit(repository) == head
    assert not (tmp_path / "ran").exists()


def test_changes_are_named(repository: Path, tmp_path: Path) -> None:
    git(repository, "remote", "add", "origin", "https://example.org/a.git")
    head = origin.commit(repository)
    (repository / "a.txt").write_text("three\n")
    assert origin.commit(repository) == f"{head} with changes"
    git(repository, "config", "filter.lfs.clean", "git-lfs clean -- %f")
    assert origin.commit(repository) == f"{head}, changes not looked for"
    assert origin.commit(tmp_path) is None


# -- secrets ----------------------------------------------------------------------------------------------------------

SECRET = "s3cr3tABC"


@pytest.mark.parametrize(
    "arguments",
    [
        [f"--api_key={SECRET}"],
        ["--token", SECRET],
        [f"--trainer.logger.init_args.apiKey={SECRET}"],
        ["--password", SECRET, "--lr", "0.1"],
        [f"--db-password=has a space {SECRET}"],
        [f"+hf_token={SECRET}"],
        [f"WANDB_API_KEY={SECRET}"],
        [f"--url=https://me:{SECRET}@host/data"],
        [f"https://{SECRET}@host/x.git"],
        [f"--data=https://host/f?key={SECRET}&size=2"],
        [f"s3://bucket/f?X-Amz-Signature={SECRET}"],
        ["--header", f"Authorization: Bearer {SECRET}"],
        [f"--logger={{api_key: {SECRET}, name: a}}"],
        ["--logger", f'{{"client_secret": "{SECRET}"}}'],
        ["--x", f"hf_{SECRET}ABCDEFGHIJKL"],
        ["-password", SECRET],
    ],
)
def test_a_secret_of_the_command_line_is_masked(arguments: list[str]) -> None:
    kept = without_secrets(arguments)
    assert SECRET not in " ".join(kept)
    assert MASK in " ".join(kept)
    assert len(kept) == len(arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--num_tokens", "512", "--max_tokens=5", "--tokenizer", "bert-base", "--pad_token", "<pad>"],
        ["--sort_key", "name", "--keys=a", "--monkey", "3", "--mask_token=[MASK]"],
        ["fit", "--config", "a.yaml", "--model.lr=0.1", "--data=~/data", "x=1", "C:\\data", "https://host/a?size=2"],
        ["--use_auth_token", "--lr", "0.1"],
    ],
)
def test_other_arguments_stay(arguments: list[str]) -> None:
    assert without_secrets(arguments) == arguments


@pytest.mark.filterwarnings("ignore")
def test_no_file_of_a_run_has_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a fit with a logger and a report; `api_key` is also an argument of the user's module."""
    monkeypatch.setattr("sys.argv", ["train.py", f"--api_key={SECRET}", "--data", "x"])
    monkeypatch.setenv("TOKEN", SECRET)
    origin.origin_of_run.cache_clear()
    module = Own(api_key=SECRET, net=nn.Linear(2, 2), likelihood=Categorical(), lr=0.01)
    callbacks = [SamplingSchedule(every_n_steps=1), SampleCollector(), BayesianModelAverage(), RunSummary()]
    trainer = quiet_trainer(max_steps=2, callbacks=callbacks, logger=CSVLogger(tmp_path))
    trainer.fit(module, small_run.loader(), small_run.loader())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    origin.origin_of_run.cache_clear()
    (results,) = tmp_path.rglob("results.json")
    (results.parent / "config.yaml").write_text(f"model: {{api_key: {SECRET}}}\nlr: 0.1\n")
    page = write_report(results.parent).read_text()
    assert "train.py --api_key=HIDDEN --data x" in page
    assert "lr: 0.1" in page
    files = [path for path in tmp_path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert [file.name for file in files] == ["config.yaml"]


class Own(BayesianModule):
    """A user's module with a secret among its arguments."""

    def __init__(self, api_key: str, **options: Any) -> None:
        super().__init__(**options)
        self.api_key = api_key


@pytest.mark.parametrize(
    "text", ["a", "-", "- ", "token: ", "a ", "=", "://", "?sig=", "'password:", "hf_", "token  ", '"']
)
def test_a_long_text_takes_little_time(text: str) -> None:
    start = time.process_time()
    text_without_secrets(text * (2**18 // len(text)))
    assert time.process_time() - start < 5
