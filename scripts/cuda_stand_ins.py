"""A stand-in for the CUDA libraries that PyPI's torch for Linux is linked with, so that it runs without them on a CPU.

torch_xla fits one version of torch each, and PyPI has that version for CUDA only, with some 3 GB of NVIDIA packages
beside it. Without these `import torch` fails: the dynamic linker misses their libraries. This makes one small library,
under the names of all that are missing, in torch's own folder. It has every function that torch asks them for, and each
returns 100: CUDA's "no device was detected". So torch finds no GPU, and never calls another one of them. And it takes
these packages out of what torch's metadata ask for, so that pip brings them with no other package either.

    pip install --no-deps torch==2.9.0
    python scripts/cuda_stand_ins.py     # of the environment that torch was installed in

It needs gcc and binutils (nm, readelf). Running it again does no harm.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

NO_DEVICE = 100  # cudaErrorNoDevice and CUDA_ERROR_NO_DEVICE
TOOLS = ("gcc", "nm", "readelf")
NAME = "libno_cuda.so"

_CUDA_LIBRARY = re.compile(r"lib(?:cu|nv|nccl)[\w.-]*\.so[\w.]*")
_CUDA_FUNCTION = re.compile(r"_*p?(?:cu|nv|nccl)\w*")  # torch's own are C++, with names that begin with _Z
_CUDA_PACKAGE = re.compile(r"Requires-Dist: (?:nvidia|cuda|triton)", re.IGNORECASE)
_NEEDED = re.compile(r"\(NEEDED\).*\[(.+)\]")
_VERSION_OF = re.compile(r"File: (\S+)|Name: (\S+)\s+Flags")


def torch_folder() -> Path:
    """Where torch's shared libraries are in this environment; torch is not imported."""
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"torch is not installed for {sys.executable}: pip install --no-deps torch first.")
    return Path(spec.submodule_search_locations[0], "lib")


def missing_libraries(libraries: Iterable[Path]) -> set[str]:
    """The CUDA libraries that these are linked with."""
    needed = {name for library in libraries for name in _NEEDED.findall(_output("readelf", "-dW", library))}
    return {name for name in needed if _CUDA_LIBRARY.fullmatch(name)}


def wanted_functions(libraries: Iterable[Path]) -> dict[str, set[str]]:
    """The CUDA functions that these take from elsewhere, by the version that they must have; "" is any."""
    wanted: dict[str, set[str]] = defaultdict(set)
    for library in libraries:
        for line in _output("nm", "-D", "--undefined-only", library).splitlines():
            name, _, version = line.split()[-1].partition("@")
            if _CUDA_FUNCTION.fullmatch(name):
                wanted[version.lstrip("@")].add(name)
    return wanted


def needed_versions(libraries: Iterable[Path]) -> Iterator[str]:
    """The versions that these ask the CUDA libraries for; the linker wants all, also those without functions."""
    for library in libraries:
        file = ""
        for of_file, version in _VERSION_OF.findall(_output("readelf", "-VW", library)):
            file = of_file or file
            if version and _CUDA_LIBRARY.fullmatch(file):
                yield version


def compile_library(target: Path, functions: dict[str, set[str]]) -> None:
    """One shared library with these functions, each under its version."""
    names = sorted(set().union(*functions.values()))
    script = [f"{version} {{ {_listed(names)} }};" for version, names in sorted(functions.items()) if version]
    with tempfile.TemporaryDirectory() as folder:
        source, versions = Path(folder, "functions.c"), Path(folder, "versions.map")
        source.write_text("\n".join(f"int {name}(void) {{ return {NO_DEVICE}; }}" for name in names))
        versions.write_text("\n".join(script))
        # -fno-builtin: gcc must not know better what a function of some name returns.
        command = ["gcc", "-w", "-O1", "-fno-builtin", "-shared", "-fPIC", f"-Wl,--version-script={versions}"]
        subprocess.run([*command, "-o", str(target), str(source)], check=True)


def forget_cuda_packages(site_packages: Path) -> int:
    """Take NVIDIA's packages and triton out of the requirements of the installed torch; returns how many."""
    (metadata,) = site_packages.glob("torch-*.dist-info/METADATA")
    lines = metadata.read_text().splitlines(keepends=True)
    kept = [line for line in lines if not _CUDA_PACKAGE.match(line)]
    metadata.write_text("".join(kept))
    return len(lines) - len(kept)


def main() -> None:
    """Make what is missing in this environment's torch."""
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    if absent:
        raise SystemExit(f"{', '.join(absent)} not found. On Debian: apt-get install gcc binutils")
    folder = torch_folder()
    if count := forget_cuda_packages(folder.parents[1]):
        print(f"{folder.parents[1]}: torch asks for {count} packages less")
    libraries = [path for path in sorted(folder.glob("lib*.so*")) if not path.is_symlink() and path.name != NAME]
    missing = {name for name in missing_libraries(libraries) if not (folder / name).exists()}
    if not missing:
        print(f"{folder}: nothing is missing")
        return
    functions = wanted_functions(libraries)
    for version in needed_versions(libraries):
        functions[version]  # defaultdict: an empty version is one, too
    compile_library(folder / NAME, functions)
    for name in sorted(missing):
        # The linker loads a file once, whatever names it is found by.
        (folder / name).symlink_to(NAME)
    count = sum(map(len, functions.values()))
    print(f"{folder}: {NAME} stands in for {len(missing)} CUDA libraries, with {count} functions")


def _listed(names: set[str]) -> str:
    return f"global: {'; '.join(sorted(names))};" if names else ""


def _output(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
