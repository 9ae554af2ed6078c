"""Compiles the C++ kernels for each instruction-set level of this machine's type when a wheel is built.

The wheel then holds them beside their sources, as `graftlm.layers.shipped_kernels` describes. An editable installation
compiles nothing, and a machine without g++ builds a wheel without kernels. `CXX` names another compiler, which has to
be GCC: the kernels share torch's OpenMP runtime, which is GNU's. `HATCH_BUILD_NO_HOOKS=1` builds without kernels.
"""

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_LAYERS = Path("core/graftlm/layers")


def _load(root: Path, name: str) -> ModuleType:
    """Load a module of graftlm.layers by its path; importing graftlm would import torch."""
    spec = importlib.util.spec_from_file_location(f"graftlm_build_{name}", root / _LAYERS / f"{name}.py")
    if spec is None or spec.loader is None:
        raise RuntimeError(f"cannot load {root / _LAYERS / name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


class KernelHook(BuildHookInterface[Any]):
    """Adds compiled kernels to a wheel."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the kernels and have the wheel hold them, under a tag of this platform.

        Effects: compiled kernels are kept in build/kernels for the next build.
        """
        if version == "editable":
            return
        compiler = shutil.which(os.environ.get("CXX") or "g++") if sys.platform == "linux" else None
        if compiler is None:
            where = "no g++ was found" if sys.platform == "linux" else "kernels are compiled on Linux only"
            self.app.display_warning(f"The wheel holds no compiled kernels: {where}.")
            return
        root = Path(self.root)
        included = dict(_Kernels(root, compiler, self.app).compile_all(self.build_config.packages))
        if included:
            build_data["force_include"].update(included)
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


class _Kernels:
    """The kernels of a source tree and a compiler.

    Args:
        root: of the repository.
        compiler: GCC's path.
        app: shows lines.
    """

    def __init__(self, root: Path, compiler: str, app: Any) -> None:
        self._root = root
        self._compiler = compiler
        self._app = app
        self._levels = _load(root, "kernel_levels")
        self._key = _load(root, "kernel_key")
        self._sealed_file = _load(root, "sealed_file")
        version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
        self._folder = root / "build" / "kernels" / sha256(version).hexdigest()[:12]

    def compile_all(self, packages: list[str]) -> Iterator[tuple[str, str]]:
        """Yield each library's path and its place in the wheel.

        A level that the compiler does not know is left out with a warning.

        Args:
            packages: folders, relative to the repository's root.
        """
        sources = [
            (source, Path(package).name / source.relative_to(self._root / package).parent)
            for package in packages
            for source in sorted((self._root / package).rglob("*.cpp"))
        ]
        for level in self._levels.LEVELS:
            if level.machine != platform.machine():
                continue
            start_s = time.monotonic()
            try:
                with ThreadPoolExecutor(os.cpu_count()) as pool:
                    built = list(pool.map(lambda one, level=level: self._library(one[0], level), sources))
            except subprocess.CalledProcessError as error:
                reason = error.stderr.strip().splitlines()
                self._app.display_warning(
                    f"The wheel holds no kernels of level {level.name}: {self._compiler} fails with {reason[:1]}."
                )
                continue
            self._app.display_info(f"{len(built)} kernels of level {level.name} in {time.monotonic() - start_s:.0f} s")
            for (source, folder), library in zip(sources, built, strict=True):
                name = self._key.shipped_name(source, self._include_dir, level, self._levels.source_flags(source))
                yield str(library), str(folder / "compiled" / name)

    @property
    def _include_dir(self) -> Path:
        return self._root / _LAYERS / "include"

    def _library(self, source: Path, level: Any) -> Path:
        """Return the sealed library of a source; compile it if no build has done so.

        Raises:
            CalledProcessError: the compiler fails.
        """
        flags = self._levels.source_flags(source)
        library: Path = self._folder / self._key.shipped_name(source, self._include_dir, level, flags)
        if library.exists():
            return library
        library.parent.mkdir(parents=True, exist_ok=True)
        unfinished = library.with_suffix(f".{os.getpid()}.tmp")
        options = [*self._levels.BASE_FLAGS, *level.flags, *flags, "-s", f"-I{self._include_dir}"]
        command = [self._compiler, *options, str(source), "-o", str(unfinished)]
        try:
            subprocess.run(command, capture_output=True, text=True, check=True)
            self._sealed_file.seal(unfinished)
            unfinished.replace(library)
        finally:
            unfinished.unlink(missing_ok=True)
        return library
