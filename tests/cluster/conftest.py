"""A real Slurm and real hosts on one machine, brought up for the tests marked `cluster` and taken down after them.

They need root and some packages: `tests/cluster/lab/install.sh` installs those (Debian, Ubuntu), and runs by itself where
MPSHARD_LAB_INSTALL=1 says so. Where the lab cannot be, its tests are skipped, with the reason; where it was asked for so, they fail.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

LAB = Path(__file__).parent / "lab"
ASKED = os.environ.get("MPSHARD_LAB_INSTALL") == "1"
give_up = pytest.fail if ASKED else pytest.skip


def script(name: str, lab: Path, *arguments: str) -> None:
    """Run a script of the lab. Where the lab was asked for its failure is the test's; elsewhere a reason to skip."""
    done = subprocess.run([LAB / name, *arguments], env=os.environ | {"LAB_DIR": str(lab)}, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, timeout=600, check=False)
    if done.returncode:
        give_up(f"{name} does not work here: {' '.join(done.stdout.split()[-40:])}")


def need(lab: Path, *programs: str) -> None:
    """Give up unless this is root and the programs are there."""
    if os.geteuid():
        give_up("needs root")
    path = os.environ["PATH"] + ":/usr/sbin:/sbin"
    if not all(shutil.which(program, path=path) for program in programs) and ASKED:
        script("install.sh", lab)
    if missing := [program for program in programs if not shutil.which(program, path=path)]:
        give_up(f"needs {', '.join(missing)}: tests/cluster/lab/install.sh")


@pytest.fixture(scope="session")
def lab() -> Iterator[Path]:
    """A folder that daemons accept: pytest's own are nobody's but root's."""
    folder = Path(tempfile.mkdtemp(prefix="mpshard-lab-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class Slurm:
    """A cluster of two nodes, n0 and n1, with two cores each."""

    conf: Path

    @property
    def env(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.conf)}

    def run(self, *command: str, cwd: Path | None = None, **env: str) -> str:
        """Standard output of a Slurm command that must succeed."""
        return subprocess.run(command, env=os.environ | self.env | env, cwd=cwd, check=True, capture_output=True, text=True,
                              timeout=120).stdout.strip()


@pytest.fixture(scope="session")
def slurm(lab: Path) -> Iterator[Slurm]:
    need(lab, "slurmctld", "slurmd", "srun", "munged")
    try:
        script("slurm_up.sh", lab, "2", "2")
        yield Slurm(lab / "slurm" / "slurm.conf")
    finally:
        script("slurm_down.sh", lab)


@dataclass(frozen=True)
class Hosts:
    """Two hosts, h0 and h1, each with its own network, processes and shared memory; they see our files."""

    folder: Path

    @property
    def env(self) -> dict[str, str]:
        """Makes launchers of both MPIs start ranks through the lab's ssh."""
        agent = str(self.folder / "ssh")
        return {"PRTE_MCA_plm_ssh_agent": agent, "HYDRA_LAUNCHER": "ssh", "HYDRA_LAUNCHER_EXEC": agent}

    def inside(self, host: str, *command: str) -> list[str]:
        """The command that runs a command on a host."""
        return [str(self.folder / "hx"), host, *command]

    def link(self, host: int, up: bool) -> None:
        """Cut a host's cable, or mend it."""
        subprocess.run(["ip", "link", "set", f"mpshard{host}", "up" if up else "down"], check=True)


@pytest.fixture(scope="session")
def hosts(lab: Path) -> Iterator[Hosts]:
    need(lab, "sshd", "ip", "nsenter", "unshare")
    try:
        script("hosts_up.sh", lab, "2")
        yield Hosts(lab / "hosts")
    finally:
        script("hosts_down.sh", lab)
