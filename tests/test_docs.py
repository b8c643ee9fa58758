"""README and pages: their code and commands run, their figures are current, their links lead somewhere."""

from __future__ import annotations

import ast
import doctest
import json
import math
import re
import shlex
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import bench
import pytest
import torch

from checks.additions import CHANGES
from docs import links, make_figures, site
from rope_ext_hf import errors
from tests.support.forks import run_blocks, run_commands, run_forked, run_script
from tests.support.texts import ONE_MODULE, TWO_MODULES

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]
OTHERS = ["CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "examples/README.md"]


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", read(page), flags=re.DOTALL)


def commands(page: str) -> list[list[str]]:
    lines = [line for block in blocks(page, "sh") for line in block.splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def test_the_version_is_the_same_everywhere() -> None:
    from rope_ext_hf import __version__

    assert f"\nversion: {__version__}\n" in read("CITATION.cff")
    assert f"\n## {__version__} " in read("CHANGELOG.md")


def test_internals_lists_the_changes_that_are_tried() -> None:
    table = read("docs/internals.md").split("| change | file | what is written |\n")[1].split("\n\n")[0]
    rows = [line.split(" | ") for line in table.splitlines()[1:]]
    assert [row[0].removeprefix("| ") for row in rows] == [change.title for change in CHANGES]
    for (_, file, _), change in zip(rows, CHANGES, strict=True):
        assert re.fullmatch(file.strip("`").replace("NAME", r"[\w-]+"), change.file), change.title
    assert len(rows) >= 30


# --- the table of docs/index.md: what a config entry does alone -----------------------------------------------------


def load_with(entry: dict[str, Any], context_length: int = 256) -> Any:
    """The bundled model, as transformers loads it from a config with this entry."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from rope_ext_hf.reference import path

    config = AutoConfig.from_pretrained(path())
    config.rope_parameters = {"rope_theta": 10_000.0, **entry}
    config.max_position_embeddings = context_length
    return AutoModelForCausalLM.from_pretrained(path(), config=config, dtype=torch.float32).eval()


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def test_an_entry_replaces_the_scaling_that_a_patch_keeps() -> None:
    """The slowest pair: divided by 8 under llama3, by 2 where a yarn entry takes its place, by 16 under a patch."""
    import rope_ext_hf as rope

    plain = 10_000.0 ** -(62 / 64)
    trained = LLAMA3 | {"original_max_position_embeddings": 256}
    entry = load_with({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096}, 8192)
    model = load_with(trained, 4096)
    slowest = {
        "llama3": model.model.rotary_emb.inv_freq[-1].item(),
        "entry": entry.model.rotary_emb.inv_freq[-1].item(),
    }
    description = rope.describe(rope.patch(model, "yarn", factor=2))
    slowest["patch"] = 2 * math.pi / description.wavelengths[-1]
    assert slowest == pytest.approx({"llama3": plain / 8, "entry": plain / 2, "patch": plain / 16}, rel=1e-5)
    assert description.extended_length == 2 * 4096


@pytest.mark.slow
@torch.no_grad()
def test_a_dynamic_entry_depends_on_earlier_inputs_and_on_the_batch() -> None:
    import rope_ext_hf as rope

    long = torch.randint(3, 250, (1, 600), generator=torch.Generator().manual_seed(0))
    short = long[:, :300]
    batch = torch.cat([long, torch.nn.functional.pad(short, (0, 300))])
    mask = (torch.arange(600) < torch.tensor([[600], [300]])).long()

    def changes(model: Any) -> list[float]:
        """How much the logits of the short input change in a batch, and after the long input."""
        alone = model(short).logits[0]
        batched = model(batch, attention_mask=mask).logits[1, :300]
        return [(logits - alone).abs().max().item() for logits in (batched, model(short).logits[0])]

    assert min(changes(load_with({"rope_type": "dynamic", "factor": 4.0}))) > 1
    assert max(changes(rope.patch(load_with({"rope_type": "default"}), "dynamic", factor=4.0))) < 1e-3


def test_an_entry_with_an_impossible_value_loads_and_a_patch_refuses_it() -> None:
    import rope_ext_hf as rope

    load_with({"rope_type": "yarn", "factor": 0.5})
    load_with({"rope_type": "yarn", "factor": 4.0, "beta_fsat": 3.0})
    with pytest.raises(KeyError, match="self-extend"):
        load_with({"rope_type": "self-extend", "factor": 4.0})
    model = load_with({"rope_type": "default"})
    with pytest.raises(rope.MethodError, match="factor"):
        rope.patch(model, "yarn", factor=0.5)
    with pytest.raises(rope.MethodError, match="beta_fast"):
        rope.patch(model, "yarn", factor=4, beta_fsat=3.0)


# --- what pages show runs -------------------------------------------------------------------------------------------

FEW = ["--max-spans", "2", "--data", TWO_MODULES]
ONE_TRIAL = ["--trials", "1", "--depths", "0.5", "--haystack", ONE_MODULE]
QUICK = {"ppl": FEW, "sweep": FEW, "passkey": ONE_TRIAL}


QUICK_PAGES = ("README.md", "docs/index.md")
"""Pages whose commands and code `make test-slow` runs; `make test-thorough` runs those of all."""
HUB_MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
"""The model of README.md, in whose place the tests load the bundled one."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.thorough] * (page not in QUICK_PAGES))
        for page in PAGES
        if blocks(page, "python")
    ],
)
def test_python_runs(page: str, tmp_path: Path) -> None:
    from rope_ext_hf.reference import path

    local = [block.replace(HUB_MODEL, str(path())) for block in blocks(page, "python")]
    run_forked(run_blocks, local, folder=tmp_path)


def runnable(page: str) -> list[list[str]]:
    """Commands without what a test does not have: a published model (MODEL, model.gguf) and a server."""
    lines = [words[1:] for words in commands(page) if words[0] == "rope-ext" and not {"MODEL", "model.gguf"} & {*words}]
    return [words for words in lines if not any(word.startswith("http://") for word in words)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.thorough] * (page not in QUICK_PAGES)) for page in PAGES if runnable(page)],
)
def test_commands_run(page: str, tmp_path: Path) -> None:
    """Every `rope-ext` line, with few spans so that it is quick."""
    run_forked(run_commands, [[*words, *QUICK.get(words[0], [])] for words in runnable(page)], folder=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("page", [*PAGES, *OTHERS])
def test_options_and_targets_exist(page: str) -> None:
    """Also those of commands that are not run: `make` and `nox` lines, and `rope-ext` lines about MODEL."""
    import typer

    from rope_ext_hf.cli.app import app
    from rope_ext_hf.methods.registry import list_methods

    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), flags=re.MULTILINE))
    sessions = set(re.findall(r"^@nox\.session.*\ndef (\w+)", read("noxfile.py"), flags=re.MULTILINE))
    fields = {f"--{name.replace('_', '-')}" for cls in list_methods().values() for name in cls.__dataclass_fields__}
    group = typer.main.get_command(app)
    for words in commands(page):
        if words[0] == "make":
            assert {word for word in words[1:] if "=" not in word} <= targets, words
        elif words[0].endswith("nox") and "-s" in words:
            named = words[words.index("-s") + 1 :]
            assert {word.replace("-", "_") for word in named[: (*named, "--").index("--")]} <= sessions, words
        elif words[0] == "rope-ext":
            command = group.commands[words[1]]  # type: ignore[attr-defined]
            known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
            assert {word for word in words[2:] if word.startswith("--")} <= known | fields, words


def test_names_of_the_api_page_exist() -> None:
    """What mkdocs finds in the sources: a module, or a name that one defines."""
    for name in re.findall(r"^::: (\S+)$", read("docs/api.md"), flags=re.MULTILINE):
        module, _, last = name.rpartition(".")
        of_module, of_name = ((ROOT / each.replace(".", "/")).with_suffix(".py") for each in (name, module))
        found = of_module.exists() or re.search(rf"^(def|class) {last}\b", of_name.read_text("utf-8"), re.MULTILINE)
        assert found, name


@pytest.mark.parametrize(
    "package",
    ["", ".eval", *(f".tools.{room}" for room in ("advice", "modules", "servers", "serving", "suites", "training"))],
)
def test_public_names_stand_on_the_api_page(package: str) -> None:
    text = read("docs/api.md")
    shown = {name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)$", text, flags=re.MULTILINE)}
    shown |= {name for members in re.findall(r"members: \[(.*?)\]", text) for name in members.split(", ")}
    public = set(import_module(f"rope_ext_hf{package}").__all__) - {"__version__"}
    assert not public - shown - set(vars(errors))


def test_methods_protocols_and_commands_have_their_place() -> None:
    from rope_ext_hf.methods.registry import list_methods
    from rope_ext_hf.reading.protocols import PROTOCOLS

    for name in list_methods():
        assert read("docs/methods.md").count(f"\n## {name}\n") == 1, (
            f"method {name!r} has no section: run `make figures`"
        )
    for name in PROTOCOLS:
        assert f"| `{name}` |" in read("docs/evaluation.md"), f"protocol {name!r} has no row: run `make figures`"


def test_the_first_table_of_choosing_names_every_method_that_is_advised() -> None:
    from rope_ext_hf.methods.registry import list_methods
    from rope_ext_hf.tools.advice.guidance import guidance_of

    table = read("docs/choosing.md").partition("\n\n| your situation")[2].partition("\n\n")[0]
    advised = {name for name in list_methods() if (guidance := guidance_of(name)) and guidance.purposes}
    assert advised <= set(re.findall(r"`([\w-]+)`", table))


def test_the_navigation_leads_to_every_page() -> None:
    listed = re.findall(r": ([\w-]+\.md)$", read("mkdocs.yml"), flags=re.MULTILINE)
    assert sorted(f"docs/{page}" for page in listed) == sorted(set(PAGES) - {"README.md"})


def test_every_engine_has_one_section() -> None:
    """A section that somebody wrote, or one that `make figures` makes below the others."""
    from rope_ext_hf.tools.engines.base import list_engines

    text = "".join(map(read, PAGES))
    for name, engine in list_engines().items():
        written = f"<!-- figure: engine-{name.replace('.', '-')} -->"
        assert text.count(written) + text.count(f"\n## {name}\n\n```\n") == 1, f"{name}: run `make figures`"
        linked = re.findall(
            rf"\| `{re.escape(name)}` \| \[{re.escape(engine.title or name)}\]\(", read("docs/engines.md")
        )
        assert len(linked) == 1


def messages_in(files: Iterable[Path]) -> list[str]:
    """Every string of these sources, with an ellipsis for what is formatted into it."""
    texts = []
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
                texts.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return texts


@pytest.mark.slow
def test_every_message_of_troubleshooting_is_one_that_is_written() -> None:
    import peft.config
    import transformers.generation.stopping_criteria
    import transformers.generation.utils
    import transformers.modeling_rope_utils
    import transformers.tokenization_utils_base

    ours = [file for folder in ("rope_ext_hf", "patches", "eval") for file in (ROOT / folder).rglob("*.py")]
    foreign = [
        Path(str(module.__file__))
        for module in (
            peft.config,
            transformers.generation.stopping_criteria,
            transformers.generation.utils,
            transformers.modeling_rope_utils,
            transformers.tokenization_utils_base,
        )
    ]
    written = {"this package": messages_in(ours), "transformers and PEFT": messages_in([*foreign, *ours])}
    checked = 0
    for chapter in re.split(r"^## Messages of ", read("docs/troubleshooting.md"), flags=re.MULTILINE)[1:]:
        program = chapter.partition("\n")[0]
        for message in re.findall(r"^### `+(.+?)`+$", chapter, flags=re.MULTILINE):
            pattern = re.compile(".*".join(map(re.escape, message.split("…"))), re.DOTALL)
            assert any(pattern.search(text) for text in written[program]), message
            checked += 1
    assert checked >= 20


# --- figures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_figures_are_current(page: str) -> None:
    assert make_figures.fill(read(page)) == read(page), "run `make figures`"


def test_files_made_whole_are_current() -> None:
    for file, make in make_figures.FILES.items():
        assert make() == file.read_text(encoding="utf-8"), f"{file.name}: run `make figures`"


def test_every_figure_is_shown_and_every_marker_closed() -> None:
    text = "".join(map(read, PAGES))
    named = re.findall(r"<!-- figure: (\S+) -->", text)
    assert set(named) == set(make_figures.FIGURES)
    assert len(named) == text.count("<!-- /figure -->")


@pytest.mark.parametrize("page", PAGES)
def test_no_figure_breaks_a_paragraph(page: str) -> None:
    """A comment at the beginning of a line ends the paragraph before it, in Markdown."""
    assert not re.findall(r"[^\n]\n(<!-- figure: \S+ -->[^\n].*)", read(page))


def test_older_measurements_name_their_command_and_versions() -> None:
    results = sorted((ROOT / "docs" / "results").glob("*.json"))
    assert results
    for file in results:
        result = json.loads(file.read_text(encoding="utf-8"))
        assert result["command"]
        assert {"rope-ext-hf", "torch", "transformers"} <= result["versions"].keys()
        if "note" in result:  # written by hand; other figures take their versions from the file
            assert result["versions"]["rope-ext-hf"].removesuffix(".dev0") in result["note"]


def test_bench_runs_every_benchmark() -> None:
    sources = {file.name: file.read_text("utf-8") for file in (ROOT / "benchmarks").glob("*.py")}
    scripts = {name for name, text in sources.items() if re.search(r"^from record import .*\brecord$", text, re.M)}
    scripts -= {"gpu.py", "real_models.py", "ruler_table.py"}  # which are about a model that somebody has
    assert {name for name, *_ in bench.commands("python")} == scripts | {*bench.WITHOUT_OUT}


@pytest.mark.thorough
def test_a_real_model_is_measured_and_drawn(tmp_path: Path) -> None:
    """What `make real-models` does, for the bundled model; a second call goes on where the first one was stopped."""
    from real_models import ANSWER_MULTIPLES, ANSWERS

    from docs.figures.real_models import rise, section, with_short_losses

    out = tmp_path / "real-models.json"
    script = ROOT / "benchmarks" / "real_models.py"
    options = "--model reference --data stdlib?join=20000 --texts 3 --trials 1 --task key-value"
    command = [*options.split(), "--out", str(out)]
    run_forked(run_script, script, *command, "--multiples", "2", "--minutes", "0.05", folder=tmp_path)
    run_forked(run_script, script, *command, "--minutes", "10", folder=tmp_path)
    (entry,) = json.loads(out.read_text(encoding="utf-8"))["models"]
    methods = list(dict.fromkeys(row["method"] for row in entry["texts"]))
    rows = [(row["text"], row["method"], row["multiple"]) for row in entry["texts"]]
    assert len(rows) == len(set(rows)) == 2 * 3 * len(methods)
    assert len(entry["answers"]) == len(ANSWERS) * len(ANSWER_MULTIPLES)
    entry = with_short_losses(entry)
    assert rise(entry, "unpatched", 2, 256)[:3] == (0.0, 0.0, 0.0)
    assert rise(entry, "unpatched", 2, 512).low > 0.5  # nats per token: it breaks
    assert rise(entry, "dca", 2, 512).high < 0.5
    page = section(entry)
    assert all(f"| {method if method == 'unpatched' else f'`{method}`'} |" in page for method in methods)


MODULES = [*ROOT.glob("rope_ext_hf/*/*.py"), *ROOT.glob("rope_ext_hf/*.py")]
WITH_EXAMPLES = sorted(str(file.relative_to(ROOT)) for file in MODULES if ">>> " in file.read_text(encoding="utf-8"))


@pytest.mark.parametrize("file", WITH_EXAMPLES)
def test_examples_in_docstrings_run(file: str) -> None:
    module = import_module(file.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    result = doctest.testmod(
        module, extraglobs={"torch": torch}, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    )
    assert result.attempted
    assert not result.failed


# --- links ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [*PAGES, *OTHERS])
def test_links_lead_to_files_and_headings(page: str) -> None:
    text = re.sub(r"```.*?```", "", read(page), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match("[a-z]+:", target):
            continue
        path, _, heading = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), target
        if heading:
            headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
            assert heading in {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in headings}, target


def test_relative_links_become_absolute() -> None:
    text = "![a](docs/a.png) [b](docs/b.md#c) [d](https://e.org/f) [g](#h)"
    assert links.absolute_links(text, "https://p.org/q") == (
        "![a](https://p.org/q/raw/main/docs/a.png) [b](https://p.org/q/blob/main/docs/b.md#c) "
        "[d](https://e.org/f) [g](#h)"
    )
    above = links.absolute_links("[a](b.md) [c](../d/e.py)", "https://p.org/q", "docs", only_above=True)
    assert above == "[a](b.md) [c](https://p.org/q/blob/main/d/e.py)"


def test_names_of_options_stay_in_one_piece_on_the_site() -> None:
    page = site.on_page_content("<p>a--b <code>ppl MODEL --max-spans 3</code></p>")
    assert page == '<p>a--b <code>ppl MODEL <span class="option">--max-spans</span> 3</code></p>'


def test_the_address_stands_in_one_place() -> None:
    address = links.repository_url(ROOT)
    for page in [*PAGES, *OTHERS, "mkdocs.yml", "setup.py"]:
        assert address not in read(page), page
    assert f'"{address}"' in read("CITATION.cff")  # a format that has no other way
