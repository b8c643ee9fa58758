"""Thirty everyday changes, one source file each, as data: what is written into which file, and what then works.

    python -m checks.additions

tests/test_adding_in_a_copy.py makes all of them in one copy of the tree and runs this module there, which prints as
JSON what the checks say: nothing, or an error, by title. docs/internals.md lists the titles and files.
"""

from __future__ import annotations

import json
import math
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


Edits = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Change:
    """One change.

    Attributes:
        title: what it is, as in the table of docs/internals.md.
        file: the one that is changed, or made.
        check: raises AssertionError where the change has no effect.
        edits: what stands there once, and what is written in its place; "": at the end of the file.
    """

    title: str
    file: str
    check: Callable[[], None]
    edits: Edits

    def written(self, source: str) -> str:
        """The file with the change."""
        for old, new in self.edits:
            assert not old or source.count(old) == 1, f"{self.file} has {old!r} {source.count(old)} times"
            source = source.replace(old, new) if old else source + new
        return source


def at_end(text: str) -> Edits:
    return [("", text)]


def frequencies(method: str, **given: Any) -> list[float]:
    """Of a rotary embedding of 8 dims with theta 10,000, trained at 4,096 tokens."""
    import rope_ext_hf as rope

    return list(rope.frequencies(method, rope.Rotary(8, 1e4, 4096), **given).inv_freq.tolist())


def printed(*words: str) -> str:
    """Return what a command prints."""
    from typer.testing import CliRunner

    from rope_ext_hf.cli.app import app

    return str(CliRunner(env={"COLUMNS": "200"}).invoke(app, list(words)).output)


def page(name: str) -> str:
    """A page of docs/, as `make figures` wrote it."""
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


# --- methods --------------------------------------------------------------------------------------------------------

SLOW_HALF = '''

@register_method("slow-half")
@dataclass(frozen=True, kw_only=True)
class SlowHalf(RopeMethod):
    """Interpolation of the slower half of the pairs: theta_i / factor there, theta_i in the faster half."""

    factor: float

    def compute(self, rotary: Rotary, length: Tensor) -> tuple[Tensor, Tensor | float]:
        inv_freq = rotary.inv_freq(length.device)
        slow = torch.arange(rotary.dim // 2, device=length.device) >= rotary.dim // 4
        return torch.where(slow, inv_freq / self.factor, inv_freq), 1.0
'''


def slow_half() -> None:
    assert frequencies("slow-half", factor=4) == [1.0, 0.1, 0.01 / 4, 0.001 / 4]
    assert "\n## slow-half\n" in page("methods")


FAR_THIRDS = '''"""Distances beyond a window, a third as long."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor

from rope_ext_hf.methods.base import UNBOUNDED
from rope_ext_hf.methods.registry import register_method
from rope_ext_hf.methods.remapping import RemappedPosition, RemappingMethod


@register_method("far-thirds")
@dataclass(frozen=True, kw_only=True)
class FarThirds(RemappingMethod):
    """Beyond the window, distances grow a third as fast."""

    window: int = 16

    def with_defaults(self, limit: int, target_length: int | None) -> Self:
        self.check_reach(limit, "window", self.window)
        if target_length is not None:
            self.check_reach(limit, "the longest distance", self.window + (target_length - self.window) / 3)
        return replace(self)

    @property
    def exact_length(self) -> int:
        return self.window + 1

    def zone_distances(self, length: int) -> tuple[tuple[int, int], ...]:
        return (0, self.window), (self.window, UNBOUNDED)

    def zone(self, m: Tensor, n: Tensor) -> Tensor:
        return (m - n >= self.window).long()

    def key_position(self, n: Tensor) -> RemappedPosition:
        return RemappedPosition(n, divisor=3.0)

    def query_position(self, m: Tensor, zone: int) -> RemappedPosition:
        return RemappedPosition(m, divisor=3.0, offset=self.window * 2 / 3)
'''


def far_thirds() -> None:
    import torch

    from rope_ext_hf.methods.registry import list_methods

    method: Any = list_methods()["far-thirds"](max_distance=64)  # type: ignore[call-arg]
    assert float(method.distance(torch.tensor(100), torch.tensor(54))) == 16 + 30 / 3
    assert "\n## far-thirds\n" in page("methods")


BIAS = '''

@register_method("stepped-bias")
@dataclass(frozen=True, kw_only=True)
class SteppedBias(_ScoreBias):
    """Scores fall by one for every 100 tokens beyond `start`."""

    def bias(self, distance: Tensor, heads: int) -> Tensor:
        return -(distance // 100)
'''


def stepped_bias() -> None:
    import torch

    from rope_ext_hf.methods.registry import list_methods

    method: Any = list_methods()["stepped-bias"](start=8)  # type: ignore[call-arg]
    assert method.bias(torch.tensor([0.0, 250.0]), 2).tolist() == [0.0, -2.0]


def growth() -> None:
    grown = frequencies("dynamic-ntk", length=3 * 4096, growth="squared")
    assert math.isclose(grown[-1], frequencies("default")[-1] / 9)


def temperature() -> None:
    from rope_ext_hf.methods.registry import list_methods

    assert list_methods()["rerope"](window=8, temperature="square-root")  # type: ignore[call-arg]


def guidance() -> None:
    assert "the frequencies must stay in whole octaves" in page("choosing")


# --- models ---------------------------------------------------------------------------------------------------------

FAMILY = """
[hrm_text]
like = "llama"
unrotated = ["v_proj", "o_proj", "gate_proj"]
"""


def family() -> None:
    from rope_ext_hf.models.families import family as known

    assert known("hrm_text").rotated == known("llama").rotated
    assert known("hrm_text").unrotated != known("llama").unrotated


RECIPE = """
[[recipe]]
name = "Nobody's"
example = "nobody/nobodys-7b"
model_types = ["llama"]
where = { max_position_embeddings = 4321, rope_theta = 12345.0, rope_type = "default" }
context_length = 4321
entry = { rope_type = "yarn", factor = 3.0, original_max_position_embeddings = 4321 }
extended_length = 12963
source = "https://example.org/nobodys"
"""


def recipe() -> None:
    from transformers import LlamaConfig

    from rope_ext_hf.models.recipes import find_recipe

    settings = {"rope_type": "default", "rope_theta": 12345.0}
    found = find_recipe(LlamaConfig(max_position_embeddings=4321, rope_parameters=settings))
    assert found is not None
    assert (found.name, found.extended_length) == ("Nobody's", 12963)


REPORTED = """
[[reported]]
source = "Nobody et al."
url = "https://example.org/nobody"
place = "table 1"
model = "Llama-2-7B"
model_types = ["llama"]
benchmark = "counting"
unit = "%, higher is better"
lengths = ["8k"]
values = { "unpatched" = [1.0], "yarn" = [2.0] }
"""


def reported() -> None:
    from rope_ext_hf.tools.advice.reported import reported as tables

    assert tables()[-1].source == "Nobody et al."
    assert "Nobody et al." in page("choosing")


def configuration() -> None:
    from tests.conformance.generate import KIT, configuration

    entry = json.loads((KIT / "configurations" / "tiny-7b.json").read_text(encoding="utf-8"))
    (row,) = configuration(entry)["rows"]  # what `python -m tests.conformance.generate` writes
    assert row["inv_freq"][1] == 5000.0**-0.25


def tolerance() -> None:
    assert "int8" in printed_by_kit("--help")


def printed_by_kit(*words: str) -> str:
    import subprocess
    import sys

    program = str(ROOT / "conformance" / "run.py")
    return subprocess.run([sys.executable, program, *words], capture_output=True, text=True, check=True).stdout


# --- text, tasks, runs ----------------------------------------------------------------------------------------------

PROTOCOL = '''

@register_protocol("tail", uses_targets=True)
def tail(tokens: int, lengths: Sequence[int], options: ProtocolOptions) -> Iterator[Span]:
    """The last targets of each document, at every length that the document has."""
    for length in lengths:
        if tokens >= length:
            yield Span(length, tokens - length, tokens, tokens - options.targets, tokens, length)
'''


def protocol() -> None:
    assert "`tail` | The last targets of each document" in page("evaluation")


def text_format() -> None:
    from rope_ext_hf.reading.text.load import load

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "rows.lines").write_text('{"text": "one"}\n{"text": "two"}\n', encoding="utf-8")
        assert [document.text for document in load(f"{folder}/rows.lines")] == ["one", "two"]


SUITE = '''"""Colours that stand in a text."""

from __future__ import annotations

from rope_ext_hf.tools.suites.base import PromptSettings, Sample, Suite, register_suite


@register_suite
class Colours(Suite):
    """One task: the colour of a ball."""

    name = "colours"
    tasks = ("ball",)

    def make(self, task: str, settings: PromptSettings) -> list[Sample]:
        return [Sample("The ball is red. Which colour has the ball?", " It is", ("red",), 4, 60)] * settings.count
'''


def suite() -> None:
    from rope_ext_hf.hub import load_tokenizer
    from rope_ext_hf.tools.suites.base import suite as known

    samples = known("colours").samples("ball", load_tokenizer("reference"), length=256, count=2, seed=0, haystack="")
    assert [sample.references for sample in samples] == [("red",), ("red",)]


LEVEL = """
[tasks.level]
name = "identifier"
value = "number"
held_out = [["\\n{name}: level {value}.\\n", "\\n{name}: level"]]
"""


def retrieval() -> None:
    import random

    from rope_ext_hf.eval.retrieval.statements import RETRIEVALS, ask

    assert "level" in ask(RETRIEVALS["level"], random.Random(0)).statements[0]


def wording() -> None:
    from rope_ext_hf.hub import load_tokenizer
    from rope_ext_hf.tools.suites.base import suite as known

    asked = known("babilong").samples(
        "qa1", load_tokenizer("reference"), length=4096, count=1, seed=0, haystack="a " * 4096
    )
    assert "Read with care." in asked[0].prompt


NOTE = """    note: str | None = argument(None, "A remark for whoever reads the results.", metavar="TEXT")
    data_name: str | None = argument(
"""


def option_field() -> None:
    from rope_ext_hf.eval import Perplexity

    assert Perplexity(lengths=["1k"], note="twice").note == "twice"  # type: ignore[attr-defined, call-arg]
    assert "A remark for whoever reads the results." in printed("ppl", "--help")
    assert "A remark for whoever reads the results." in page("cli")


def default() -> None:
    from rope_ext_hf.tools.training.finetuning_options import Finetuning

    assert Finetuning(model="m", method="yarn", factor=4, data="b", minutes=1).rank == 24
    assert "`--rank N` (`24`)" in page("cli")


def colour() -> None:
    from rope_ext_hf.pictures.charts import LineChart

    lines = {f"line {i}": [(1024, 2.0), (2048, 3.0)] for i in range(10)}
    assert "#123456" in LineChart(lines, 1024, "bits per byte").svg()


def style() -> None:
    from rope_ext_hf.pictures.html_page import html_page

    assert "max-width: 66rem" in html_page("A title", "A summary.")


# --- engines and servers --------------------------------------------------------------------------------------------


def mlx_two() -> str:
    """mlx-lm's file under another name."""
    source = (ROOT / "rope_ext_hf/tools/engines/programs/mlx.py").read_text("utf-8")
    return source.replace('@register_engine("mlx")', '@register_engine("mlx-two")').replace("MLX", "MLXTwo")


def engine() -> None:
    assert "mlx-two" in printed("serve-config", "--help")
    assert "\n## mlx-two\n" in page("engines")


TRAP = """
[[mlx]]
versions = "0.32"
key = "rope_slumber"
effect = "ignored"
source = "nowhere"
"""


def trap() -> None:
    assert "rope_slumber" in page("engines")


def engine_version() -> None:
    from rope_ext_hf.tools.engines.base import find_engine

    assert find_engine("tensorrt-llm").version == "1.2.1"
    assert "1.2.1" in page("engines")


def engine_family() -> None:
    from rope_ext_hf.tools.engines.base import find_engine

    config = {"model_type": "granite", "head_dim": 64, "max_position_embeddings": 4096, "rope_theta": 1e4}
    assert len(find_engine("exllamav3").computes(config).inv_freq) == 32


def mistake() -> None:
    from rope_ext_hf.methods.base import Rotary
    from rope_ext_hf.methods.registry import resolve_method
    from rope_ext_hf.tools.servers.mistakes import different_frequencies

    rotary = Rotary(64, 1e4, 4096)
    names = [name for name, _ in different_frequencies(resolve_method("yarn", rotary, factor=4), rotary, 16384)]
    assert "the frequencies halved" in names


CLIENT = """class _StubClient(_OpenAIClient):
    program, probes = "a stub", ("/stub",)


_CLIENTS = (VLLMClient, _SGLangClient, _LlamaCppClient, _StubClient, _OpenAIClient)
"""


def client() -> None:
    from rope_ext_hf.tools.servers.clients import connect

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/stub" else 404)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: Any) -> None:
            return

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert connect(f"http://127.0.0.1:{server.server_port}", None, 5.0).program == "a stub"
        server.shutdown()


# --- commands, names, bounds ----------------------------------------------------------------------------------------


def option() -> None:
    assert printed("audit", "reference", "--quietly") == ""
    assert "--quietly" in page("cli")


def help_text() -> None:
    assert "reads its config alone" in printed("describe", "--help")
    assert "reads its config alone" in page("cli")


def unit() -> None:
    from rope_ext_hf.bounds import parse_length

    assert parse_length("1g") == 2**30


def bound() -> None:
    from rope_ext_hf.bounds import limit

    assert limit("layers") == 3000


def public_name() -> None:
    import rope_ext_hf as rope

    assert rope.parse_length("4k") == 4096
    assert "parse_length" in rope.__all__


METHODS, MODELS, EVAL, TOOLS = (f"rope_ext_hf/{folder}" for folder in ("methods", "models", "eval", "tools"))
NEWS = '"source": "nobody/tiny-7b, config.json", "method": "default", "context_length": 512, "original_length": 512'
TINY = '{"model_type": "llama", "head_dim": 8, "max_position_embeddings": 512, "rope_theta": 5000.0}'
INT8 = '"inv_freq": 2e-5, "magnitude": 1e-6, "angle": 5e-6, "cos_sin": 8e-3, "logits": 1.0, "reason": "as bfloat16"'
QUIETLY = '    quietly: bool = argument(False, "Print nothing."),\n'
AUDIT = ') -> None:\n    """Compare what serving engines compute'
PRINT = "    print_result(result, as_json)\n    if not result.agrees"
LIMITS = "    from rope_ext_hf.bounds import limits as limits\n"
CHANGES = (
    Change("a frequency method, length-dependent or not", f"{METHODS}/static.py", slow_half, at_end(SLOW_HALF)),
    Change("a remapping method", f"{METHODS}/far_thirds.py", far_thirds, at_end(FAR_THIRDS)),
    Change("a bias on scores", f"{TOOLS}/modules/score_biases.py", stepped_bias, at_end(BIAS)),
    Change(
        "a rule by which dynamic-ntk grows",
        f"{METHODS}/dynamic.py",
        growth,
        [
            ('"even", "pow2"]\n', '"even", "pow2", "squared"]\n'),
            ("        return grown\n", '        return grown**2 if self.growth == "squared" else grown\n'),
        ],
    ),
    Change(
        "a temperature of remapping methods",
        f"{METHODS}/remapping.py",
        temperature,
        [
            (
                '    "none": None,\n',
                '    "none": None,\n    "square-root": lambda m, known: (m / known).clamp(min=1).sqrt(),\n',
            )
        ],
    ),
    Change(
        "when a method is advised",
        f"{TOOLS}/advice/guidance.toml",
        guidance,
        [("a factor above the length that is needed can be given", "the frequencies must stay in whole octaves")],
    ),
    Change("a model family that the probe does not understand", f"{MODELS}/families.toml", family, at_end(FAMILY)),
    Change("a published recipe for a longer context", f"{MODELS}/recipes.toml", recipe, at_end(RECIPE)),
    Change("what a paper reports of methods", f"{TOOLS}/advice/reported.toml", reported, at_end(REPORTED)),
    Change(
        "a published configuration",
        "conformance/configurations/tiny-7b.json",
        configuration,
        at_end(f'{{{NEWS}, "config": {TINY}}}\n'),
    ),
    Change(
        "a tolerance of the conformance kit",
        "conformance/kit.json",
        tolerance,
        [(' "tolerances": {\n', f' "tolerances": {{\n  "int8": {{{INT8}}},\n')],
    ),
    Change("an evaluation protocol", "rope_ext_hf/reading/protocols.py", protocol, at_end(PROTOCOL)),
    Change(
        "a format of text files",
        "rope_ext_hf/reading/text/text_files.py",
        text_format,
        [('    ".arrow": _read_arrow,\n', '    ".arrow": _read_arrow,\n    ".lines": _read_json_lines,\n')],
    ),
    Change("a suite of tasks", f"{TOOLS}/suites/benchmarks/colours.py", suite, at_end(SUITE)),
    Change("a retrieval task", f"{EVAL}/retrieval/retrievals.toml", retrieval, at_end(LEVEL)),
    Change(
        "the wording of a suite",
        f"{TOOLS}/suites/benchmarks/wordings.toml",
        wording,
        [
            (
                "\nI will give you context with the facts about positions",
                "\nRead with care. The facts are about positions",
            )
        ],
    ),
    Change(
        "an option of a measurement",
        f"{EVAL}/measurement_options.py",
        option_field,
        [("    data_name: str | None = argument(\n", NOTE)],
    ),
    Change(
        "the default of an option",
        f"{TOOLS}/training/finetuning_options.py",
        default,
        [('argument(16, "Rank of the adapters."', 'argument(24, "Rank of the adapters."')],
    ),
    Change("a colour of charts", "rope_ext_hf/pictures/drawing.py", colour, [("#3151ff", "#123456")]),
    Change(
        "the style of pages", "rope_ext_hf/pictures/html_page.py", style, [("max-width: 62rem", "max-width: 66rem")]
    ),
    Change("a serving engine", f"{TOOLS}/engines/programs/mlx_two.py", engine, at_end(mlx_two())),
    Change("what an engine does silently", f"{TOOLS}/engines/traps.toml", trap, at_end(TRAP)),
    Change(
        "the version of an engine",
        f"{TOOLS}/engines/programs/tensorrt_llm.py",
        engine_version,
        [('version = "1.2.0rc2"', 'version = "1.2.1"')],
    ),
    Change(
        "a family that an engine runs",
        f"{TOOLS}/engines/programs/exllamav3.toml",
        engine_family,
        [("llama = {}\n", "granite = {}\nllama = {}\n")],
    ),
    Change(
        "a mistake that check-server names",
        f"{TOOLS}/servers/mistakes.py",
        mistake,
        [
            (
                '    yield "no attention factor"',
                '    yield "the frequencies halved", (inv_freq / 2, factor)\n    yield "no attention factor"',
            )
        ],
    ),
    Change(
        "a program that check-server asks",
        f"{TOOLS}/servers/clients.py",
        client,
        [("_CLIENTS = (VLLMClient, _SGLangClient, _LlamaCppClient, _OpenAIClient)\n", CLIENT)],
    ),
    Change(
        "an option of a command",
        f"{TOOLS}/serving/serving_commands.py",
        option,
        [(AUDIT, QUIETLY + AUDIT), (PRINT, f"    if not quietly:\n    {PRINT}")],
    ),
    Change(
        "the help of a command",
        "rope_ext_hf/cli/models.py",
        help_text,
        [("RoPE method a model has; reads no weights.", "RoPE method a model has; reads its config alone.")],
    ),
    Change(
        "a unit of lengths",
        "rope_ext_hf/bounds.py",
        unit,
        [("([kKmM]?)", "([kKmMgG]?)"), ('"m": 1024**2}', '"m": 1024**2, "g": 1024**3}')],
    ),
    Change("a bound on what files hold", "rope_ext_hf/bounds.py", bound, [('"layers": 2_000,', '"layers": 3_000,')]),
    Change(
        "a public name",
        "rope_ext_hf/__init__.py",
        public_name,
        [(LIMITS, f"{LIMITS}    from rope_ext_hf.bounds import parse_length as parse_length\n")],
    ),
)


def main() -> None:
    results = {}
    for change in CHANGES:
        try:
            change.check()
            results[change.title] = ""
        except Exception:
            results[change.title] = traceback.format_exc()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
