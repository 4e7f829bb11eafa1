"""The memory that predictions may take: what a system and its control groups say is free."""

from pathlib import Path

import pytest

from lightning_sgmcmc.process import UNKNOWN, free_host_memory

GB = 2**30


def system(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": f"MemTotal: 99999999 kB\nMemFree: 1 kB\nMemAvailable:   {8 * GB // 1024} kB\n"}
SECOND = "sys/fs/cgroup/"
FIRST = "sys/fs/cgroup/memory/"


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, UNKNOWN),
        (MEMINFO, 8 * GB),
        (MEMINFO | {"proc/self/cgroup": "0::/\n", SECOND + "memory.max": "max\n"}, 8 * GB),
        (  # of a container, which sees its own group as the root; 1 GB of what it uses is a cache of files
            MEMINFO
            | {"proc/self/cgroup": "0::/\n", SECOND + "memory.max": str(4 * GB), SECOND + "memory.current": str(3 * GB)}
            | {SECOND + "memory.stat": f"anon 5\ninactive_file {GB}\n"},
            2 * GB,
        ),
        (  # of a job, whose limit is that of the group above
            MEMINFO
            | {"proc/self/cgroup": "0::/slurm/job/step\n", SECOND + "slurm/job/step/memory.max": "max"}
            | {SECOND + "slurm/job/memory.max": str(3 * GB), SECOND + "slurm/job/memory.current": str(2 * GB)},
            GB,
        ),
        (
            MEMINFO
            | {"proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/a\n", "sys/fs/cgroup/cpu,memory/a/x": ""}
            | {"sys/fs/cgroup/cpu,memory/a/memory.limit_in_bytes": str(2 * GB)}
            | {"sys/fs/cgroup/cpu,memory/a/memory.usage_in_bytes": str(3 * GB)},
            0,
        ),
        (
            MEMINFO
            | {"proc/self/cgroup": "4:memory:/docker/abc\n", FIRST + "memory.limit_in_bytes": str(6 * GB)}
            | {FIRST + "memory.usage_in_bytes": str(5 * GB), FIRST + "memory.stat": f"total_inactive_file {2 * GB}"},
            3 * GB,
        ),
    ],
)
def test_the_least_of_the_system_and_its_groups(files: dict[str, str], free: int, tmp_path: Path) -> None:
    assert free_host_memory(system(tmp_path, files)) == free
