"""What compiling for a GPU says where no assembler is."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

HIDDEN = (Path("/usr/local/cuda"), Path("/opt/cuda"), Path(sysconfig.get_path("purelib"), "nvidia", "cu13"))
"""Where XLA looks for ptxas."""

CODE = """
import jax
from mcjax.kernels.proof.gpu import compile_for_gpu
compile_for_gpu(lambda x: x + 1, jax.ShapeDtypeStruct((8,), "float32"))
"""


def may_hide() -> bool:
    """Whether a process may have mounts of its own."""
    tool = shutil.which("unshare")
    return tool is not None and subprocess.run([tool, "--mount", "true"], capture_output=True).returncode == 0


@pytest.mark.aot_gpu
def test_without_ptxas_the_extra_is_named() -> None:
    if not may_hide():
        pytest.skip("needs root, to hide directories from one process")
    hide = [f"mount -t tmpfs none {place.resolve()}" for place in HIDDEN if place.exists()]
    script = "\n".join(["set -e", "mount --make-rprivate /", *hide, f"exec {sys.executable} -c '{CODE}'"])
    done = subprocess.run(["unshare", "--mount", "bash", "-c", script], capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert (
        "MissingExtra: ptxas (nvidia-cuda-nvcc) is not installed; `pip install 'mcjax[aot-gpu]'` brings it"
        in done.stderr
    )
