"""Boots the guest and runs the tests of verbs in it: those in `inside`, and the suite of all endpoints.

Needs root, apt and QEMU: `.ci/run rdma` installs what is missing. In CI a guest that cannot be had is a failure.
"""

from __future__ import annotations

import compileall
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest
from guest.boot import Ended, boot, verdict
from guest.initrd import loading_order
from guest.packages import PYVERBS, Kernel, NoGuest, kernel, missing

pytestmark = pytest.mark.rdma

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
CONFORMANCE = sorted(file.name for file in (TESTS / "transfer").glob("test_conformance*.py"))
TESTS_INSIDE = ["tests/rdma/inside", *(f"tests/transfer/{name}" for name in CONFORMANCE)]
BOOT_S = 90.0
INSIDE_S = 220
WHOLE_S = 235.0


@pytest.fixture(scope="module")
def debian() -> Kernel:
    why = missing()
    if not why:
        try:
            return kernel()
        except NoGuest as problem:
            why = str(problem)
    if os.environ.get("CI"):
        pytest.fail(f"no guest: {why}")
    pytest.skip(f"no guest: {why}")


@dataclass(frozen=True)
class Report:
    """What pytest said in the guest: `outcomes` by test, and its output."""

    ended: Ended
    outcomes: dict[str, str]

    def __str__(self) -> str:
        rows = [f"{outcome:8} {name}" for name, outcome in self.outcomes.items() if outcome != "passed"]
        return "\n".join([self.ended.why, *rows, self.ended.tail()])


def test_modules_are_loaded_after_what_they_need(debian: Kernel) -> None:
    order = [file.stem.replace("-", "_") for file in loading_order(debian.modules, ["rdma_rxe", "ib_uverbs"])]
    assert order.index("ib_core") < order.index("ib_uverbs")
    assert order.index("udp_tunnel") < order.index("rdma_rxe")
    assert len(order) == len(set(order))
    with pytest.raises(KeyError):
        loading_order(debian.modules, ["no_such_module"])


def test_only_the_last_verdict_counts() -> None:
    assert verdict("guest: job ended with 0\nmore\nguest: job ended with 7\n") == 7
    assert verdict("it says guest: job ended with 0\n") is None
    assert verdict("") is None


def test_a_failure_inside_is_one_outside(debian: Kernel, tmp_path: Path) -> None:
    """And the host's files cannot be written to from inside, but for the one folder."""
    job = f"touch {shlex.quote(str(tmp_path.parent / 'not-here'))} && exit 9\ntouch /run/job/here\nexit 5\n"
    folder = tmp_path / "job"
    folder.mkdir()
    ended = boot(debian, job, folder, BOOT_S)
    assert ended.status == 5, ended.tail()
    assert (folder / "here").exists()
    assert not (tmp_path.parent / "not-here").exists()


def test_a_guest_that_hangs_is_ended(debian: Kernel, tmp_path: Path) -> None:
    ended = boot(debian, "sleep 1000\n", tmp_path, 8.0)
    assert ended.status is None
    assert "not done after" in ended.why


@pytest.mark.skipif(Path("/sys/class/infiniband_verbs").exists(), reason="this kernel has verbs")
def test_a_kernel_without_verbs_is_told_of(debian: Kernel, tmp_path: Path) -> None:
    """Debian's pyverbs on this machine itself, which has nothing to offer it."""
    (tmp_path / "pyverbs").symlink_to(PYVERBS)
    code = (
        "from mcjax.transfer.transports.rdma import RdmaEndpoint\n"
        "from mcjax.transfer.transports.secret import Secret\n"
        "RdmaEndpoint(Secret.random())"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT / 'src'}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert "TransportUnavailable: transport rdma: the kernel offers no RDMA verbs" in done.stderr


@pytest.mark.timeout(WHOLE_S + 60)
def test_verbs_in_the_guest(debian: Kernel, tmp_path: Path) -> None:
    """Every test inside passed, but for what the endpoint declares that it cannot; there were some of each file."""
    report = run_inside(debian, tmp_path)
    print(report)
    assert report.ended.status == 0, str(report)
    assert set(report.outcomes.values()) <= {"passed", "declared"}, str(report)
    assert "passed" in report.outcomes.values(), str(report)
    assert any("test_conformance" in name for name in report.outcomes), str(report)
    assert any("test_inside" in name for name in report.outcomes), str(report)


def run_inside(debian: Kernel, folder: Path) -> Report:
    (folder / "python").mkdir()
    # Only this of Debian's packages: the others would hide those of the running environment.
    (folder / "python" / "pyverbs").symlink_to(PYVERBS)
    # The guest cannot keep what it compiles, and each process in it would do so anew.
    for place in ("src/mcjax/transfer", "tests/transfer", "tests/rdma"):
        compileall.compile_dir(str(ROOT / place), quiet=2)
    ended = boot(debian, job(sys.executable), folder, WHOLE_S)
    return Report(ended, outcomes(folder / "report.xml"))


def job(python: str) -> str:
    """A device on the loopback interface, then pytest of this very environment."""
    environment = {
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "PYTHONPATH": f"/run/job/python:{ROOT / 'src'}:{Path(__file__).parent / 'inside'}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "OPENBLAS_NUM_THREADS": "1",
        "TMPDIR": "/run/tmp",
        "XDG_CACHE_HOME": "/run/tmp",
        "MCJAX_GUEST": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "MCJAX_CONFORMANCE": "small",
        **({"PYTHONPYCACHEPREFIX": sys.pycache_prefix} if sys.pycache_prefix else {}),
    }
    exports = "\n".join(f"export {name}={shlex.quote(value)}" for name, value in environment.items())
    options = [
        *("-p no:cacheprovider -p pytest_timeout -p nursery -o addopts= --strict-markers --timeout 200".split()),
        *("-v --tb=short --color no -o console_output_style=times --durations 15 -k rdma".split()),
    ]
    return f"""{exports}
rdma link add rxe0 type rxe netdev lo || exit 3
cd {shlex.quote(str(ROOT))}
exec timeout -k 5 {INSIDE_S} {shlex.quote(python)} -m pytest {shlex.join(options)} \\
    -m "not check_long and not slow" --junitxml /run/job/report.xml {" ".join(TESTS_INSIDE)}
"""


def outcomes(report: Path) -> dict[str, str]:
    """Test -> passed, failed, error, skipped, or declared: skipped since the kind says that it cannot do that. Empty
    where pytest did not come to its end."""
    if not report.is_file():
        return {}
    found: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {"failure": "failed", "error": "error", "skipped": "skipped"}
        said = [
            "declared" if " declares " in child.get("message", "") else kinds[child.tag]
            for child in case
            if child.tag in kinds
        ]
        found[f"{case.get('classname')}.{case.get('name')}"] = said[0] if said else "passed"
    return found
