"""The benchmark against the peers: `python tests/benchmarks/peers/run.py --out DIR [--blocks 5] [--steps 300]`.

Run it in the project's environment, with uv on the path. It makes an environment for each peer (`environments.py`; kept
in the user's cache, or in --env-dir), starts one process for each peer, and in one run measures

* the time of a step over that of a bare torch SGD loop: MLP 784-100-10, batch 100, float32, one thread, 60,000
  synthetic data in memory, the same loader for all. Blocks of all methods take turns, round by round; each block stands
  between two blocks of the reference in its own process (JAX's process has none, so it is compared with the reference
  worker's in the same round). The table has the median ratio;
* the errors of the posterior's mean and covariance in a Bayesian linear regression whose posterior is known
  (`regression.py`), for N = 1,000 and 10,000, each method with its own default scale of the noise. A right method still
  shows the bias of step size and mini-batches: "SGLD written out" is that.

It writes `results.json` and `table.md`. Each peer is one file `worker_*.py`, ours is `ours.py`. For figures to publish,
run it on an otherwise idle machine.
"""

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
from pathlib import Path
from typing import Any

from environments import HERE, PEERS, Peer, default_folder, prepare

REFERENCE_ROW = "torch SGD, bare loop"
NUM_DATA = (1_000, 10_000)


class WorkerProcess:
    """A peer's process."""

    def __init__(self, peer: Peer, folder: Path, log: Path) -> None:
        self.peer = peer
        interpreter = prepare(peer, folder)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [str(interpreter), str(HERE / peer.script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
            )
        self.description = self.ask(do="describe")

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request; return the answer, which has an `error` if the worker failed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        return json.loads(line) if line else {"error": "the process ended, see its log"}

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()


def measure_times(workers: list[WorkerProcess], blocks: int, steps: int) -> list[dict[str, Any]]:
    """Return a row for each method; the first round warms up, and every other round goes backwards."""
    turns = [(worker, row) for worker in workers for row in worker.description.get("timings", [])]
    answers: dict[str, list[dict[str, Any]]] = {row: [] for _, row in turns}
    for block in range(blocks + 1):
        taken = {}
        for worker, row in turns if block % 2 == 0 else reversed(turns):
            taken[row] = worker.ask(do="time", row=row, steps=steps)
        for row, answer in taken.items():
            if "error" not in answer and answer["reference"] is None:
                answer["reference"] = taken[REFERENCE_ROW]["reference"]
            if block > 0:
                answers[row].append(answer)
        print(f"times: round {block} of {blocks} done", flush=True)
    return [{"method": row, **_summary(answers[row])} for _, row in turns]


def _summary(answers: list[dict[str, Any]]) -> dict[str, Any]:
    for answer in answers:
        if "error" in answer:
            return {"error": answer["error"]}
    ratios = [answer["seconds"] / answer["reference"] for answer in answers]
    return {
        "ratio": statistics.median(ratios),
        "least": min(ratios),
        "largest": max(ratios),
        "milliseconds": 1e3 * statistics.median(answer["seconds"] for answer in answers),
        "reference_milliseconds": 1e3 * statistics.median(answer["reference"] for answer in answers),
        "threads": statistics.median(answer["threads"] for answer in answers),
        "ratios": ratios,
    }


def measure_errors(workers: list[WorkerProcess], burn_in: int, steps: int) -> list[dict[str, Any]]:
    """Return a row for each method and number of data."""
    rows = []
    for num_data in NUM_DATA:
        for worker in workers:
            for row in worker.description.get("chains", []):
                answer = worker.ask(do="chain", row=row, num_data=num_data, burn_in=burn_in, steps=steps)
                rows.append({"method": row, "num_data": num_data, **answer})
                print(f"errors: {row}, N = {num_data} done", flush=True)
    return rows


def write_table(results: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    notes = results["notes"]
    lines = [
        "Time of a step over a bare torch SGD loop (MLP 784-100-10, batch 100, one thread, median of "
        f"{results['blocks']} blocks of {results['steps']} steps).",
        "",
        "| method | ratio | least | largest | ms a step | threads used | |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in results["times"]:
        note = notes.get(row["method"], "")
        if "error" in row:
            lines.append(f"| {row['method']} | failed | | | | | {row['error']} |")
            continue
        lines.append(
            f"| {row['method']} | {row['ratio']:.2f} | {row['least']:.2f} | {row['largest']:.2f} | "
            f"{row['milliseconds']:.3f} | {row['threads']:.2f} | {note} |"
        )
    lines += [
        "",
        f"Bayesian linear regression, d = 5, batch 100, lr 0.01, {results['chain_steps']} steps after a burn-in of "
        f"{results['burn_in']}; a right chain has 0, 1 and 0, but for step size and mini-batches (see SGLD written "
        "out). The error of the mean is the largest of a coordinate, in posterior standard deviations.",
        "",
        "| method | N | error of the mean | trace of the covariance over the true one | covariance error | |",
        "|---|---|---|---|---|---|",
    ]
    for row in results["errors"]:
        note = notes.get(row["method"], "")
        if "error" in row:
            lines.append(f"| {row['method']} | {row['num_data']} | failed | | | {row['error']} |")
            continue
        lines.append(
            f"| {row['method']} | {row['num_data']} | {row['mean_error']:.2f} | {row['trace_ratio']:.2f} ± "
            f"{row['trace_ratio_error']:.2f} | {row['covariance_error']:.2f} | {note} |"
        )
    lines += ["", "Versions: " + ", ".join(f"{name} {version}" for name, version in results["versions"].items()) + "."]
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--blocks", type=int, default=5, help="blocks of each method")
    parser.add_argument("--steps", type=int, default=300, help="steps in a block")
    parser.add_argument("--chain-steps", type=int, default=100_000, help="steps of the regression's chains, 0 for none")
    parser.add_argument("--burn-in", type=int, default=10_000, help="steps before them")
    parser.add_argument("--env-dir", type=Path, default=default_folder(), help="folder of the peers' environments")
    parser.add_argument("--only", nargs="*", choices=[peer.name for peer in PEERS], help="peers beside the reference")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    chosen = [peer for peer in PEERS if options.only is None or peer.name in ("reference", *options.only)]
    workers = [WorkerProcess(peer, options.env_dir, options.out / f"{peer.name}.log") for peer in chosen]
    failures = {w.peer.name: w.description["error"] for w in workers if "error" in w.description}
    for name, error in failures.items():
        print(f"{name} did not start: {error}", flush=True)
    results: dict[str, Any] = {
        "blocks": options.blocks,
        "steps": options.steps,
        "chain_steps": options.chain_steps,
        "burn_in": options.burn_in,
        "machine": {"processor": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()},
        "failures": failures,
        "versions": {k: v for worker in workers for k, v in worker.description.get("versions", {}).items()},
        "notes": {k: v for worker in workers for k, v in worker.description.get("notes", {}).items()},
        "times": measure_times(workers, options.blocks, options.steps),
        "errors": measure_errors(workers, options.burn_in, options.chain_steps) if options.chain_steps else [],
    }
    for worker in workers:
        worker.close()
    (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    table = write_table(results)
    (options.out / "table.md").write_text(table)
    print(table)


if __name__ == "__main__":
    main()
