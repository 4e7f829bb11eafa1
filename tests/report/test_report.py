"""The report of a run, opened in a real browser."""

import base64
import functools
import html
import io
import json
import math
import re
import shutil
import subprocess
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from lightning_sgmcmc import figures
from lightning_sgmcmc.chains.samples import PosteriorSample
from lightning_sgmcmc.cli.commands import main
from lightning_sgmcmc.diagnostics.draws import chain_diagnostics, correlation_time, rhat_limit
from lightning_sgmcmc.figures.canvas import METRIC_LABELS
from lightning_sgmcmc.posterior.disk import DiskStore
from lightning_sgmcmc.report import RunError, write_report
from lightning_sgmcmc.report.run_record import find_run
from tests.support.faults import limited_files
from tests.support.paths import RECIPE

HOSTILE = "<img src=x onerror=alert(1)></style><script>alert(2)</script>\"'&"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="there is no chromium to open the page in")
WIDTHS = (400, 1200)


class Page(HTMLParser):
    """What a page holds."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.tables: list[list[list[str]]] = []
        self.text = ""
        self._in_cell = False
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        self._in_cell = tag in ("td", "th")

    def handle_data(self, data: str) -> None:
        self.text += f"{data}\n"
        if self._in_cell:
            self.tables[-1][-1][-1] += data

    def handle_endtag(self, tag: str) -> None:
        self._in_cell = False

    def values(self, tag: str, name: str) -> list[str]:
        return [value for t, n, value in self.attributes if (t, n) == (tag, name)]

    def table(self, *header: str) -> list[list[str]]:
        """Return the rows under the first header of this kind."""
        rows, *_ = [t[i + 1 :] for t in self.tables for i, row in enumerate(t) if row == list(header)]
        return rows


def browse(page: Path, folder: Path, *options: str) -> str:
    """Open a page in a headless browser."""
    assert BROWSER is not None
    still = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    command = [BROWSER, "--headless", *still.split(), "--disable-component-update", "--disable-sync"]
    command += [f"--user-data-dir={folder / 'browser'}", *options, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def measure(page: Path, folder: Path) -> dict[int, dict[str, Any]]:
    """Return what the browser makes of a page in frames of several widths, with everything unfolded."""
    source = html.escape(page.read_text(encoding="utf-8"), quote=True)
    frames = "".join(f'<iframe width="{w}" height="900" style="border:0" srcdoc="{source}"></iframe>' for w in WIDTHS)
    script = """
    addEventListener("load", () => {
      const found = [...document.querySelectorAll("iframe")].map(frame => {
        const page = frame.contentDocument;
        page.querySelectorAll("details").forEach(d => { d.open = true; });
        return {width: page.documentElement.clientWidth, scroll: page.documentElement.scrollWidth,
                images: [...page.images].map(i => [i.complete, i.naturalWidth, i.getBoundingClientRect().width]),
                rows: page.querySelectorAll("table tbody tr").length, title: page.title};
      });
      document.body.innerHTML = "<pre>" + JSON.stringify(found) + "</pre>";
    });"""
    wrapper = folder / "frames.html"
    wrapper.write_text(f"<!DOCTYPE html><body>{frames}<script>{script}</script></body>", encoding="utf-8")
    found = re.search(r"<pre>(.*)</pre>", browse(wrapper, folder, "--virtual-time-budget=10000", "--dump-dom"))
    assert found is not None
    return dict(zip(WIDTHS, json.loads(html.unescape(found[1])), strict=True))


def check_layout(page: Path, folder: Path) -> None:
    """Assert that nothing overflows, and that every picture is decoded and fits."""
    expected = Page(page)
    for width, found in measure(page, folder).items():
        assert found["scroll"] <= found["width"] <= width
        assert len(found["images"]) == expected.tags["img"]
        assert all(done and natural > 100 and 100 < shown <= width for done, natural, shown in found["images"])
        assert found["rows"] == expected.values("th", "scope").count("row")


@functools.cache
def picture() -> bytes:
    """Return a PNG file's content."""
    file = io.BytesIO()
    figures.energy_figure([1, 2], [3.0, 4.0], [2], [4.0]).savefig(file)
    return file.getvalue()


def energy(chain: int, draw: int, shift: float) -> float:
    generator = torch.Generator().manual_seed(100 * chain + draw)
    return 16000 + shift * chain + torch.randn((), generator=generator).item()


def made_run(folder: Path, chains: int = 3, draws: int = 12, shift: float = 0.0, weighted: bool = False) -> Path:
    """Write a run's folder with all its parts."""
    folder.mkdir(parents=True)
    store = DiskStore.create(folder / "samples")
    samples = []
    for draw in range(draws):
        for chain in range(chains):
            noise = torch.randn(4, generator=torch.Generator().manual_seed(7 * draw + chain))
            log_weight = float(-draw) if weighted else 0.0
            sample = PosteriorSample(10 * draw + 10, draw // 3, chain, energy(chain, draw, shift), log_weight)
            sample.parameters = {"net.weight": noise[:3].reshape(1, 3), "likelihood.log_std": noise[3]}
            store.append(sample)
            samples.append({n: getattr(sample, n) for n in ("step", "cycle", "chain", "energy", "log_weight")})
    rows = [
        {"method": method, "metric": metric, "value": value, "error": 0.01 if method == "single" else None}
        for method, values in (("single", (0.9, 0.31)), ("bma", (0.95, 0.2)))
        for metric, value in zip(("accuracy", "nll"), values, strict=True)
    ]
    results = {"recipe": "my recipe", "scale": "run", "seed": 3, "stage": "test", "rows": rows, "seconds": 125.4}
    scalars = {"sampler/lr": [0.1] * 30, "sampler/temperature": [1.0] * 30, "sampler/energy": [float("nan")] * 30}
    history = {"steps": list(range(30)), "scalars": scalars, "samples": samples}
    tensor = {"numel": 3, "kinetic": 1.5, "kinetic_interval": [1.4, 1.6]}
    tensor |= {"configurational": 1.02, "configurational_interval": [0.9, 1.1]}
    health = {"step": 120, "verdict": "warning"}
    health["findings"] = [{"kind": "kinetic temperature", "sentence": "kinetic temperature is high: take a smaller lr"}]
    health |= {"temperature": 1.0, "tensors": {"net.weight": tensor}, "gradient_noise_share": {"net.weight": 0.25}}
    health |= {"energy": {"mean": 16000.0, "std": 2.0, "expected": [15990.0, 16010.0]}}
    for name, content in (("results", results), ("history", history), ("health", health)):
        (folder / f"{name}.json").write_text(json.dumps(content))
    (folder / "hparams.yaml").write_text("lr: 0.2\nsampler: SGHMC\n")
    for name in ("reliability.png", "something_new.png"):
        (folder / name).write_bytes(picture())
    return folder


@needs_browser
def test_a_real_run_in_a_real_browser(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["fit", "--config", RECIPE, "--trainer.max_epochs=16", "--trainer.enable_progress_bar=false"])
    capsys.readouterr()
    main(["report", "runs"])
    path = Path("runs/digits_csghmc/version_0/report.html").resolve()
    assert str(path.relative_to(Path.cwd())) in capsys.readouterr().out
    page = Page(path)
    results = json.loads((path.parent / "results.json").read_text())
    value = {(row["method"], row["metric"]): row["value"] for row in results["rows"]}
    header = ("model average", "mean single sample", "first cycle", "guessing")
    rows = page.table("metric", *header, "change")
    names = {METRIC_LABELS[name]: name for name in ("accuracy", "nll", "brier", "ece", "entropy")}
    assert {row[0] for row in rows} == set(names)
    for label, average, single, first, guess, _ in rows:
        metric = names[label]
        if ("guessing", metric) in value:
            assert float(guess) == pytest.approx(value["guessing", metric], abs=5e-5)
        assert float(first) == pytest.approx(value["first_cycle", metric], abs=5e-5)
        assert float(single.split(" ± ")[0]) == pytest.approx(value["single", metric], abs=5e-5)
        assert float(average.partition(" [")[0]) == pytest.approx(value["bma", metric], abs=5e-5)
        if metric in ("accuracy", "nll", "brier"):
            low, high = map(float, average.partition(" [")[2].rstrip("]").split(", "))
            assert low < value["bma", metric] < high
    records = DiskStore(path.parent / "samples").records
    rows = page.table("sample", "step", "cycle", "chain", "energy (nats)", "log weight", "weight")
    assert [int(row[1]) for row in rows] == [r.step for r in records]
    kept = [p for p in path.parent.glob("*.png") if "entropy_histogram" not in p.name]  # as "entropy" says the same
    assert page.tags["img"] == len(kept) >= 5
    assert page.tags["details"] == 7 + 5, (
        "the folded parts; the validation data's results, the samples, the tensors' plan and two files"
    )
    shown, _, hidden = path.read_text().partition('<details class="part">')
    assert shown.count("<img") == 4
    assert hidden.count("<img") == page.tags["img"] - 4
    parts = ("In five sentences", "<h2>Results</h2>", "model average</th>", "<h2>Health</h2>", "<img")
    assert [*parts] == sorted(parts, key=shown.index), "quality and its intervals come before health and pictures"
    for known in (
        "Command of this run",
        "Commit of the working folder",
        "Version of torch",
        torch.__version__.partition("+")[0],
    ):
        assert known in page.text, "what is needed to repeat the run"
    assert "sgmcmc fit --config config.yaml" in page.text

    dom = browse(path, tmp_path, "--dump-dom")
    assert dom.count("<table>") == page.tags["table"] == 5, (
        "the tensors' plan, results of the test and validation data, the samples, the chain"
    )
    assert "model average" in dom
    check_layout(path, tmp_path)
    screenshot = tmp_path / "page.png"
    browse(path, tmp_path, "--window-size=1200,1600", f"--screenshot={screenshot}")
    from matplotlib.image import imread

    shot = imread(screenshot)
    assert shot.shape[1] == 1200
    assert shot[..., :3].std() > 0.05, "something is to be seen"


@needs_browser
def test_long_names_and_many_columns_stay_in_their_boxes(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", shift=5.0, weighted=True)
    long = "x" * 300
    methods = [f"method {i} with a long name" for i in range(6)]
    rows = [
        {
            "method": m,
            "metric": f"metric {j} {long[:40]}",
            "value": 0.5,
            "error": 0.1,
            "paper": 0.6,
            "paper_error": None,
        }
        for m in methods
        for j in range(8)
    ]
    (run / "results.json").write_text(json.dumps({"recipe": long, "rows": rows}))
    health = json.loads((run / "health.json").read_text())
    health["findings"] = [{"kind": "energy", "sentence": long}]
    health["tensors"] = {f"{long}.{i}": health["tensors"]["net.weight"] for i in range(60)}
    (run / "health.json").write_text(json.dumps(health))
    (run / "config.yaml").write_text(f"key: {long * 3}\n")
    check_layout(write_report(run), tmp_path)


def test_needs_nothing_from_outside(tmp_path: Path) -> None:
    path = write_report(made_run(tmp_path / "run"))
    page = Page(path)
    assert page.tags["script"] == page.tags["link"] == page.tags["iframe"] == 0
    assert page.values("a", "href") == [], "the folded parts are the table of contents"
    sources = page.values("img", "src")
    # reliability and the unknown one are the run's, energy and schedule and the chains' energies are drawn for it
    assert len(sources) == 5
    from matplotlib.image import imread

    for source in sources:
        assert source.startswith("data:image/png;base64,")
        assert imread(io.BytesIO(base64.b64decode(source.split(",")[1]))).shape[1] > 300
    assert all(page.values("img", "alt"))
    assert "url(" not in path.read_text()
    assert "http" not in path.read_text().replace("http-equiv", "")


def test_what_the_tables_say(tmp_path: Path) -> None:
    page = Page(write_report(made_run(tmp_path / "run", chains=3)))
    assert page.table("metric", "model average", "mean single sample", "change") == [
        ["accuracy", "0.9500", "0.9000 ± 0.0100", "+0.0500 better"],
        ["NLL (nats per example)", "0.2000", "0.3100 ± 0.0100", "−0.1100 better"],
    ]
    for text in ("2 min 5 s", "kinetic temperature is high: take a smaller lr", "All 36 samples have equal weight."):
        assert text in page.text
    ((name, count, kinetic, configurational, share),) = page.table(
        "tensor", "elements", "kinetic temperature", "configurational temperature", "share of gradient noise"
    )
    assert (name, count, kinetic) == ("net.weight", "3", "1.5000 [1.4000, 1.6000]")
    assert (configurational, share) == ("1.0200 [0.9000, 1.1000]", "0.2500")
    assert page.values("td", "class").count("bad") == 1, "the kinetic temperature is off, the other is not"
    chains = page.table("chain", "samples", "mean energy (nats)", "standard deviation")
    assert [row[:2] for row in chains] == [["0", "12"], ["1", "12"], ["2", "12"]]
    expected = torch.tensor([energy(0, draw, 0.0) for draw in range(12)]).mean()
    assert float(chains[0][2].replace(",", "")) == pytest.approx(expected.item(), abs=0.06)


@pytest.mark.slow
def test_rhat_tells_chains_that_mix_from_those_that_do_not(tmp_path: Path) -> None:
    """Energies of three chains of 100 draws, standard normal and shifted by five from chain to chain."""
    header = ("quantity", "split R-hat", "bulk ESS", "tail ESS")
    rhat = {}
    for shift in (0.0, 5.0):
        path = write_report(made_run(tmp_path / f"run {shift}", draws=100, shift=shift))
        rows = Page(path).table(*header)
        assert [row[0] for row in rows] == ["energy", "likelihood.log_std"]
        rhat[shift] = float(rows[0][1])
        assert ("The chains disagree on energy" in path.read_text()) == (shift > 0)
    assert rhat[0.0] < 1.05 < 2 < rhat[5.0]
    page = Page(write_report(tmp_path / "run 0.0", tmp_path / "page.html", ["net.*"]))
    assert [row[0] for row in page.table(*header)] == ["energy", "net.weight (the worst of 3 elements)"]
    one = Page(write_report(made_run(tmp_path / "one", chains=1)))
    assert one.table(*header)
    assert "With one chain, R-hat compares its halves" in one.text


@pytest.mark.by_default("3-12", "2-40")
@pytest.mark.parametrize(
    ("chains", "draws", "rho"), [(1, 24, 0.0), (2, 6, 0.0), (3, 12, 0.0), (4, 100, 0.0), (2, 40, 0.6)]
)
def test_false_alarms_of_rhat_are_as_rare_as_said(chains: int, draws: int, rho: float) -> None:
    """Of 400 sets of draws at a rate of 5 % (so that some are expected), at most 36, which is 20 expected and 3.7
    standard deviations (itself a false-alarm rate of 3e-4 where the rate is exact). The draws are independent, or
    stationary chains with the autocorrelation ρ, for which the limit of independent ones alarms in most sets."""
    generator = np.random.default_rng(0)
    values = np.empty((400, chains, draws))
    values[..., 0] = generator.normal(size=(400, chains))
    for draw in range(1, draws):
        noise = generator.normal(size=(400, chains))
        values[..., draw] = rho * values[..., draw - 1] + math.sqrt(1 - rho**2) * noise
    time = correlation_time(np.moveaxis(values, 0, -1))  # by all sets, as by the predictions of many data
    limit = rhat_limit(chains, draws, 0.05, time)
    assert limit < (1.06 if draws == 100 and not rho else 2)
    found = np.array([chain_diagnostics(each).rhat for each in values])
    assert (found > limit).sum() <= 36
    if rho:
        assert (found > rhat_limit(chains, draws, 0.05)).mean() > 0.3
        apart = values + 2 * np.arange(chains)[:, None]
        assert chain_diagnostics(apart[0]).rhat > rhat_limit(chains, draws, 0.05, time), "modes apart"


def test_weights(tmp_path: Path) -> None:
    """Log-weights -0, -1, …, -11: (Σw)²/Σw² = (1+e⁻¹)/(1-e⁻¹) = 2.16 but for terms of e⁻¹²."""
    page = Page(write_report(made_run(tmp_path / "run", chains=1, weighted=True)))
    assert "2.2 of 12" in page.text
    assert "The weights are concentrated: the effective sample size of 12 samples is 2.2." in page.text


def test_a_run_without_settings_and_its_baselines(tmp_path: Path) -> None:
    """A run whose prior's scale changes, in classification, compared with a network and an ensemble of equal cost."""
    command = ["fit", "--config", str(Path(RECIPE).with_name("digits_auto.yaml")), "--baselines"]
    main([*command, "--trainer.max_epochs=20", "--trainer.enable_progress_bar=false"])
    main(["report", "runs"])
    path = Path("runs/digits_auto/version_0/report.html")
    page, results = Page(path), json.loads((path.parent / "results.json").read_text())
    header = ("metric", "model average", "mean single sample", "one network", "ensemble of 4", "guessing")
    rows = {row[0]: row for row in page.table(*header)}
    for place, method in ((1, "bma"), (3, "sgd"), (4, "ensemble")):
        value = next(r["value"] for r in results["rows"] if (r["method"], r["metric"]) == (method, "accuracy"))
        found, low, high = map(float, re.findall(r"[\d.]+", rows["accuracy"][place]))
        assert low < found == pytest.approx(value, abs=5e-5)
        assert found < high < 1.0
    compared = page.table("minus the model average", "NLL", "error", "Brier")
    assert [row[0] for row in compared] == ["one network", "ensemble of 4"]
    errors = {m: 1 - float(rows["accuracy"][p].partition(" ")[0]) for p, m in ((1, "bma"), (3, "sgd"))}
    assert float(compared[0][2].partition(" ")[0].replace("−", "-")) == pytest.approx(
        errors["sgd"] - errors["bma"], abs=2e-4
    )

    (entry,) = [
        one
        for one in yaml.safe_load((path.parent / "auto.yaml").read_text())["trainer"]["callbacks"]
        if one["class_path"].endswith("AutoSampling")
    ]
    ((*_, (_, last)),) = entry["init_args"]["prior_scales"]
    assert last != 0.3, "the run chose another scale than it started with"
    assert f"Gaussian, std {last:.3g} at the end, 0.3 at the start" in page.text
    assert results["origin"]["date"] in page.text
    for absent in ("unknown", "HierarchicalPrior", "results-val.json", "weight_efficiency", "Finished", "Scale"):
        shown = page.text.partition("Repeat this run")[0]
        assert absent not in shown, "code names, and what is not known"
    titles = page.values("img", "alt")
    assert "Energies of the samples" not in titles
    assert not (path.parent / "energy_histogram.png").exists(), "energies of several priors"
    assert page.tags["figure"] == len(titles) == len(set(titles)), "every picture has a title"
    assert "energy (nats)" not in page.text
    assert "cycle is shaded" not in page.text, "there are no cycles"
    assert "Healthy" not in page.text
    assert page.values("div", "class").count("verdict good") == 0


def test_the_date_is_that_of_the_run_and_not_of_its_copy(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    results = json.loads((run / "results.json").read_text())
    (run / "results.json").write_text(json.dumps(results | {"origin": {"date": "2001-02-03"}}))
    text = Page(write_report(run)).text
    assert re.findall(r"\d{4}-\d\d-\d\d", text) == ["2001-02-03"], "the files were written today"


def test_beside_the_paper(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    rows = [
        {"method": m, "metric": "error", "value": v, "error": 0.1, "paper": p, "paper_error": e}
        for m, v, p, e in (("cSGLD", 5.25, 5.29, 0.15), ("SGLD", 5.4, None, None))
    ]
    (run / "results.json").write_text(json.dumps({"recipe": "cifar", "rows": rows}))
    assert Page(write_report(run)).table("method", "ours", "paper") == [
        ["cSGLD", "5.2500 ± 0.1000", "5.2900 ± 0.1500"],
        ["SGLD", "5.4000 ± 0.1000", "–"],
    ]


@pytest.mark.parametrize("is_hot", [True, False])
def test_a_problem_is_beside_what_the_samples_are(tmp_path: Path, is_hot: bool) -> None:
    """A right configurational temperature shows nothing where the kinetic one is far off."""
    run = made_run(tmp_path / "run")
    health = json.loads((run / "health.json").read_text())
    health |= {"kind": "posterior sample", "reason": "the configurational temperature is 1"}
    if not is_hot:
        health["findings"] = []
    (run / "health.json").write_text(json.dumps(health))
    text = Page(write_report(run)).text
    assert ("not shown to be a posterior sample" in text) == is_hot
    assert ("a posterior sample: the configurational temperature is 1" in text) == (not is_hot)


@pytest.mark.parametrize("kept", ["results.json", "history.json", "health.json", "samples"])
def test_any_part_may_be_missing(tmp_path: Path, kept: str) -> None:
    run = made_run(tmp_path / "run")
    for path in list(run.iterdir()):
        if path.name != kept:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    page = Page(write_report(run))
    assert page.tags["section"] >= 2
    assert ("No posterior samples were found" in page.text) == (kept in ("results.json", "health.json"))
    assert page.tags["img"] == {"history.json": 3, "samples": 1}.get(kept, 0)


def test_text_is_escaped(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    honest = Page(write_report(run)).tags
    rows = [{"method": HOSTILE, "metric": HOSTILE, "value": 1.0}]
    (run / "results.json").write_text(json.dumps({"recipe": HOSTILE, "seed": HOSTILE, "scale": HOSTILE, "rows": rows}))
    health = json.loads((run / "health.json").read_text())
    health["findings"] = [{"kind": "energy", "sentence": HOSTILE}]
    health["tensors"] = {HOSTILE: health["tensors"]["net.weight"]}
    (run / "health.json").write_text(json.dumps(health))
    (run / "config.yaml").write_text(f"{HOSTILE}\n")
    (run / "hparams.yaml").write_text(f"? {HOSTILE!r}\n: {HOSTILE!r}\n")
    (run / "reliability.png").rename(run / f"reliability{HOSTILE.replace('/', '')}.png")
    path = write_report(run)
    page = Page(path)
    assert page.tags["script"] == 0
    assert page.tags["img"] == honest["img"]
    assert page.tags["style"] == 1
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert page.text.count("alert(2)") >= 6


def test_the_newest_of_several_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import os

    for number, time in ((9, 3000), (10, 2000), (2, 1000)):
        run = made_run(tmp_path / "runs" / f"version_{number}", chains=1)
        for path in run.rglob("*"):
            os.utime(path, (time, time))
    main(["report", str(tmp_path / "runs"), "--output", str(tmp_path / "page.html")])
    printed = capsys.readouterr().out
    assert "holds 3 runs; this is the newest with samples: " in printed
    assert "version_9" in printed
    assert "runs/version_9" in (tmp_path / "page.html").read_text()
    assert not list((tmp_path / "runs").rglob("*.html"))
    # A later run without a sample: it failed, or evaluated the samples of another.
    later = made_run(tmp_path / "runs" / "version_11", chains=1)
    shutil.rmtree(later / "samples")
    (later / "samples").mkdir()
    (later / "samples" / "manifest.jsonl").write_text('{"format": "lightning-sgmcmc samples"}\n')
    assert find_run(tmp_path / "runs") == (tmp_path / "runs" / "version_9", 4)


DAMAGES: dict[str, Any] = {
    "results.json": ["", "[]", "{", '{"rows": 3}', '{"rows": [{"method": "a"}]}', b"\xff\xfe"],
    "history.json": [
        '{"steps": [1], "scalars": {"sampler/lr": []}}',
        '{"steps": [1], "traces": {"cycle": [[]]}}',
        '{"steps": "a"}',
    ],
    "health.json": ['{"tensors": []}', '{"findings": [3]}', "null"],
    "samples/manifest.jsonl": [
        "",
        "nonsense\n",
        '{"format": "lightning-sgmcmc samples", "version": 9, "model": null}\n',
    ],
}


@pytest.mark.parametrize(("file", "content"), [(f, c) for f, contents in DAMAGES.items() for c in contents])
def test_damage_is_one_sentence(
    tmp_path: Path, file: str, content: str | bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made_run(tmp_path / "run", chains=1, draws=2)
    (run / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SystemExit) as end:
        main(["report", str(run)])
    assert end.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("sgmcmc report: ")
    assert Path(file).name in message
    assert message.count("\n") == 1
    assert not (run / "report.html").exists()


def test_other_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    run = made_run(tmp_path / "run", chains=1, draws=2)
    for arguments, message in (
        ([str(tmp_path / "nowhere")], "there is no folder"),
        ([str(tmp_path / "file")], "is a file, not a run's folder"),
        ([str(tmp_path / "empty")], "holds no run"),
        ([str(run), "--parameters", "bias"], "no parameter matches 'bias': choose from "),
        ([str(run), "--output", str(tmp_path / "no" / "page.html")], "page.html"),
    ):
        with pytest.raises(SystemExit) as end:
            main(["report", *arguments])
        assert end.value.code == 2
        assert message in capsys.readouterr().err
    for name in ("reliability.png", "samples/sample-00000010-chain-000.safetensors"):
        (run / name).write_bytes(b"\x89PNG cut short")
    page = Page(write_report(run))
    assert "Damaged pictures are omitted: reliability.png." in page.text
    assert "sample-00000010-chain-000.safetensors is missing or damaged" in page.text
    with pytest.raises(RunError, match="sample-00000010"):
        write_report(run, parameters=["net.*"])


def test_a_full_disk_leaves_the_earlier_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, page = made_run(tmp_path / "run", chains=1, draws=2), tmp_path / "page.html"
    page.write_text("earlier")
    with limited_files(100), pytest.raises(SystemExit) as end:
        main(["report", str(run), "--output", str(page)])
    assert end.value.code == 2
    assert f"sgmcmc report: {page}: File too large\n" in capsys.readouterr().err
    assert page.read_text() == "earlier"


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["report", "--help"])
    assert end.value.code == 0
    assert "--output FILE" in capsys.readouterr().out
