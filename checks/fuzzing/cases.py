"""Random command lines over damaged copies of valid inputs.

    case = make_case(inputs, seed=0, number=17, folder=Path("case"))
    answer = run(case.arguments, case.work)

The same seed and number make the same case, whatever ran before.
"""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from checks.fuzzing.damage import ODD_TEXTS, damage_file, damage_folder, damage_value, write_odd_gguf
from checks.fuzzing.inputs import Inputs
from rope_ext_hf.methods.dynamic import DynamicNTK
from rope_ext_hf.methods.registry import list_methods

__all__ = ["COMMANDS", "Case", "make_case"]


@dataclass(frozen=True)
class Case:
    """A command line, and the folders around it.

    Attributes:
        number: of the case.
        arguments: of rope-ext.
        what: the damage that was done to the inputs.
        work: the process's own folder; here and in `out` it may write.
        out: the folder for its output.
        kept: folders in which nothing may change.
        new: a folder that the command makes whole or not at all; None for other commands.
    """

    number: int
    arguments: list[str]
    what: str
    work: Path
    out: Path
    kept: tuple[Path, ...]
    new: Path | None = None


_ODD_TEXTS = (
    *(text for text in ODD_TEXTS if "\0" not in text),
    *(
        "9" * 400,
        "1" + "0" * 30,
        "inf",
        "-inf",
        "1e308",
        "1e-320",
        "1e400",
        "-1",
        "-0.5",
        "0",
        "0x10",
        "1_000",
        "1,nan",
    ),
    *("[[[", "{" * 200, "[1,2", "]", ",", "," * 500, "1," * 3000 + "1", "4k;8k", "4kk", "\u0661\u0662", "1\u00b2"),
    *("--", "-", "-m", "--method", "--json", "=", "?", "&", "*", "~", "~nobody/x", ".", "/", os.fsdecode(b"\xff\xfe")),
    *("999999999", "1M", "1000000000000", "2147483648", "null", "'", '"', "\\", "@file", "stdlib", "reference"),
)
_METHODS = (*list_methods(), "dynamic")
_PARAMETERS = tuple(
    sorted(
        {
            f"--{field.name.replace('_', '-')}"
            for method in list_methods().values()
            for field in dataclasses.fields(method)
        }
    )
)
_LISTS = ("1,2", "1," * 7 + "1", "1," * 15 + "1", "1," * 31 + "1")  # per pair of dims: 8, 16 and 32 here
_VALUES: dict[str, tuple[str, ...]] = {
    "--method": (*_METHODS, "yarn,ntk", "linear"),
    "--factor": ("1", "2", "4", "8", "1.5", "2,4"),
    "--target-length": ("128", "256", "1k", "4k"),
    "--over": ("own", "original", "patched"),
    "--context-length": ("32", "64", "256"),
    "--revision": ("main",),
    "--dtype": ("auto", "float32", "bfloat16", "float16"),
    "--device": ("auto", "cpu", "meta", "cuda", "cuda:7", "mps", "cpu:1", "xpu", "vulkan"),
    "--device-map": ("auto", "cpu", "balanced", "sequential", "disk", '{"": "cpu"}'),
    "--tokens-per-pass": ("16", "64", "15"),
    "--protocol": ("matched", "blocks", "sliding", "tail", "whole"),
    "--targets": ("1", "8", "16"),
    "--stride": ("1", "8", "256"),
    "--max-spans": ("1", "2", "all"),
    "--key-window": ("1", "8", "4k"),
    "--lengths": ("16", "16,32", "24,32,48", "64"),
    "--depths": ("0", "0.5", "0,1"),
    "--trials": ("1", "2"),
    "--keys": ("1", "2"),
    "--distractors": ("1", "3"),
    "--task": ("passkey", "needle", "key-value", "assignment", "quote", "copy"),
    "--seed": ("0", "5", "-3"),
    "--processes": ("1", "2"),
    "--to": ("half", "interleaved", "meta"),
    "--from": ("half", "interleaved"),
    "--model-parallel": ("1", "2", "3", "64"),
    "--batch": ("1", "1,8", "64"),
    "--purpose": ("serve", "python", "train"),
    "--engine": ("transformers", "vllm", "sglang", "llama.cpp", "gguf", "mlx", "ollama"),
    "--engine-version": ("0.10.2", "0.33.0", "b12000"),
    "--dim": ("2", "64", "128"),
    "--theta": ("100", "10000", "1e6"),
    "--trained-length": ("256", "4k"),
    "--tasks": ("nope", "niah_single_1"),
    "--batch-size": ("0", "-1", "many"),
    "--max-length": ("x", "-1"),
    "--limit": ("-1", "x"),
    "--num-fewshot": ("-1", "x"),
    "--spans": ("0", "x"),
    **dict.fromkeys(_PARAMETERS, ("1", "2", "32", "0.5", "true", "false", *_LISTS)),
    **dict.fromkeys(("--native", "--bos", "--no-bos", "--offload-cache", "--force", "--resume", "--verify"), ()),
}
"""Values that are right somewhere; an option without values is a flag."""

_METHOD_OPTIONS = ("--factor", "--target-length", "--over", "--context-length")
_LOAD_OPTIONS = ("--revision", "--dtype", "--device", "--device-map", "--tokens-per-pass", "--offload-cache")
_SPAN_OPTIONS = ("--lengths", "--protocol", "--targets", "--stride", "--max-spans", "--bos", "--no-bos")
_OPTIONS: dict[str, tuple[str, ...]] = {
    "describe": (*_METHOD_OPTIONS, "--revision"),
    "patch": (*_METHOD_OPTIONS, "--revision", "--native"),
    "ppl": (*_METHOD_OPTIONS, *_LOAD_OPTIONS, *_SPAN_OPTIONS),
    "sweep": (*_METHOD_OPTIONS, *_LOAD_OPTIONS, *_SPAN_OPTIONS, "--processes"),
    "passkey": (
        *(*_METHOD_OPTIONS, *_LOAD_OPTIONS, "--lengths", "--depths", "--trials", "--keys", "--distractors", "--task"),
        "--seed",
    ),
    "convert": ("--to", "--from", "--force", "--resume", "--verify", "--model-parallel", "--revision"),
    "detect": ("--revision",),
    "serve-config": (*_METHOD_OPTIONS, "--engine", "--engine-version", "--revision"),
    "audit": ("--revision",),
    "extend": ("--engine", "--over", "--context-length", "--dtype"),
    "extend --dry-run": ("--engine", "--over", "--context-length", "--batch", "--purpose", "--revision"),
    "report": (),
    "methods": (),
    "lm-eval": (*_METHOD_OPTIONS, "--tasks", "--limit", "--num-fewshot", "--max-length"),
    "demo": ("--device",),
}


_RARE = ("meta", "meta in two parts", "own code", "interleaved")  # which most commands refuse


class _Maker:
    """Makes one case."""

    def __init__(self, inputs: Inputs, draw: random.Random, folder: Path) -> None:
        self.inputs, self.draw, self.folder = inputs, draw, folder
        self.given, self.work, self.out, self.elsewhere = (
            folder / name for name in ("given", "work", "out", "elsewhere")
        )
        for path in (self.given, self.work, self.out, self.elsewhere):
            path.mkdir(parents=True)
        (self.elsewhere / "secret").write_text("secret", encoding="utf-8")
        self.what: list[str] = []
        self.new: Path | None = None
        focus = draw.random()
        self.odd_files = focus < 0.7
        self.odd_options = focus > 0.5

    # --- inputs ---

    def model(self, *, any_format: bool = False) -> str:
        """A folder with a damaged copy of a model; sometimes one as it is, or another name."""
        draw = self.draw
        if self.odd_options and draw.random() < 0.06:
            return draw.choice((*_ODD_TEXTS, str(self.elsewhere), str(self.elsewhere / "secret"), "reference"))
        kinds = list(self.inputs.models)
        kind = draw.choices(kinds, [0.3 if kind in _RARE and not any_format else 1.0 for kind in kinds])[0]
        source = self.inputs.models[kind]
        if not self.odd_files:
            self.what.append(kind)
            return str(source)
        folder = self.given / draw.choice(("model", "model", "model", "a b", "$x$ [red]", os.fsdecode(b"\xff")))
        shutil.copytree(source, folder, copy_function=os.link)
        self.what.append(f"{kind}: {damage_folder(draw, folder, self.elsewhere)}")
        return str(folder)

    def text(self) -> str:
        """A damaged copy of a corpus with options that may be odd."""
        draw = self.draw
        corpora = self.inputs.corpora
        if draw.random() < 0.07:
            odd = (text for text in _ODD_TEXTS if text != "/")  # all texts of this machine
            return draw.choice((*odd, str(self.elsewhere), "hf:owner/name", "hf:../x", "/dev/zero", "/dev/null"))
        kind = draw.choice(list(corpora))
        path = self.given / corpora[kind].name
        os.link(corpora[kind], path)
        if self.odd_files and draw.random() < 0.5:
            self.what.append(damage_file(draw, path, self.elsewhere))
        suffix = ""
        if self.odd_options and draw.random() < 0.5:
            key = draw.choice(("column", "join", "config", "split", "nope"))
            suffix = f"?{key}={draw.choice(('1', 'text', 'name', 'true', *_ODD_TEXTS))}"
        return f"{path if draw.random() < 0.8 else path.parent}{suffix}"

    def options(self, command: str, most: int = 4) -> list[str]:
        """Some options of a command, most of them right or all but one."""
        draw = self.draw
        names = list(_OPTIONS[command])
        arguments = self.method() if "--factor" in names and draw.random() < 0.6 else []
        if "--factor" in names and not arguments and draw.random() < 0.9:
            names = [name for name in names if name not in _METHOD_OPTIONS]
        chosen = draw.sample(names, min(len(names), draw.randint(0, most)))
        odd = draw.choice((*chosen, None)) if self.odd_options else None
        for name in chosen:
            if name == odd and draw.random() < 0.1:
                name = draw.choice((*_VALUES, "--nope", "-x", name[:-1], *_ODD_TEXTS))
            values = _VALUES.get(name, ())
            if name == odd:
                values = _ODD_TEXTS
            if not values:
                arguments.append(name)
                continue
            value = draw.choice(values)
            arguments += [f"{name}={value}"] if draw.random() < 0.3 else [name, value]
        return arguments

    def method(self) -> list[str]:
        """A method with some of its own parameters."""
        draw = self.draw
        name = draw.choice(_METHODS)
        fields = [field.name for field in dataclasses.fields(list_methods().get(name, DynamicNTK))]
        arguments = ["--method", name]
        for field in draw.sample(fields, min(len(fields), draw.choice((0, 0, 1, 2)))):
            option = f"--{field.replace('_', '-')}"
            odd = self.odd_options and draw.random() < 0.5
            arguments += [option, draw.choice(_ODD_TEXTS if odd else _VALUES[option])]
        if draw.random() < 0.6:
            extended = draw.choice(("--factor", "--target-length"))
            arguments += [extended, draw.choice(_VALUES[extended])]
        return arguments

    def json(self, command: str) -> list[str]:
        """--json, where nothing before takes it for its value."""
        return ["--json"] if self.draw.random() < 0.2 and command not in ("none", "resume") else []

    def new_folder(self, source: str) -> Path:
        """Return a path for a new folder: in `out`, or in a place where no folder can be made."""
        draw = self.draw
        path = self.out / "new"
        if draw.random() < 0.85:
            self.new = path
            return path
        kind = draw.randrange(6)
        if kind == 0:
            path.write_text("a file", encoding="utf-8")
        elif kind == 1:
            path.symlink_to(self.elsewhere)
        elif kind == 2:
            return Path(source) / "sub" / "new"
        elif kind == 3:
            return Path("/dev/null/new")
        elif kind == 4:
            return self.out / ("n" * draw.choice((100, 250, 300)))
        else:
            return self.out / draw.choice(("deep/er/new", "a\nb", "\x1b[31m", os.fsdecode(b"\xff"), "x" * 240))
        return path

    def no_place(self) -> str:
        """Return a path where nothing can be written, not even by root."""
        draw, secret = self.draw, self.elsewhere / "secret"
        link, pipe, long = self.out / "link", self.out / "pipe", self.out / ("n" * 300)
        link.symlink_to("/dev/null")
        os.mkfifo(pipe)
        system = map(Path, ("/proc/new", "/sys/new", "/sys/new/er", "/dev/null/new"))
        places = (secret, secret / "new", secret / "deep" / "er", link, link / "new", pipe, long, *system)
        return str(draw.choice(places))

    # --- commands ---

    def config(self) -> list[str]:
        """A command over a model whose config.json has one odd value."""
        draw = self.draw
        kind = draw.choice([kind for kind in self.inputs.models if kind not in _RARE])
        folder = self.given / "model"
        shutil.copytree(self.inputs.models[kind], folder, copy_function=os.link)
        name = "adapter_config.json" if kind == "adapter" else "config.json"
        self.what.append(f"{kind}: {damage_value(draw, folder / name)}")
        model, out = str(folder), str(self.out / "new")
        length = ["--target-length", draw.choice(("128", "256", "1k"))]
        method = ["--method", draw.choice(_METHODS), "--factor", "4"]
        engine = ["--engine", draw.choice(_VALUES["--engine"])]
        lines = {
            "extend": [model, *length, *engine, *draw.choice((["--dry-run"], ["--no-measure", "--yes", "--out", out]))],
            "serve-config": [model, *engine, *draw.choice(([], method))],
            "audit": [draw.choice((model, f"{model}/config.json"))],
            "describe": [model, *draw.choice(([], method))],
            "patch": [model, *method, "--out", out],
            "convert": [model, out, "--to", draw.choice(("half", "interleaved"))],
            "detect": [model],
        }
        weights = [1 if name in ("patch", "convert", "detect", "describe") else 3 for name in lines]
        command = draw.choices(list(lines), weights)[0]
        self.new = Path(out) if command in ("patch", "convert") else None
        return [command, *self.json(command), *lines[command]]

    def no_out(self) -> list[str]:
        """A command that writes, over inputs that are right, where nothing can be written."""
        draw, out = self.draw, self.no_place()
        model, text = str(self.inputs.models["llama"]), str(self.inputs.corpora[".txt"])
        method = ["--method", "yarn", "--factor", "4"]
        spans = ["--lengths", "16,32", "--max-spans", "2", "--data", text]
        _, run = draw.choice(list(self.inputs.runs.values()))
        lines = {
            "patch": [model, *method],
            "convert": [model, out, "--to", "interleaved"],
            "extend": [model, "--target-length", "256", "--no-measure", "--yes"],
            "ppl": [model, *spans],
            "sweep": [model, *method, *spans],
            "passkey": [model, "--task", "copy", "--lengths", "48", "--trials", "1"],
            "tasks": ["reference", "--suite", "json-kv", "--lengths", "768", "--score", "rank", "--samples", "1"],
            "demo": ["--texts", "3", "--questions", "5"],
            "finetune": [model, *method, "--data", text, "--steps", "1"],
            "report": [str(run)],
        }
        command = draw.choice(list(lines))
        last = [] if out in lines[command] else ["--out", out]
        return [command, *lines[command], *last]

    def describe(self) -> list[str]:
        return [self.model(), *self.options("describe")]

    def dry_run(self) -> list[str]:
        length = self.draw.choice(_VALUES["--target-length"])
        options = ["--target-length", length, "--dry-run", *self.options("extend --dry-run")]
        return ["extend", *self.json("extend"), self.model(), *options]

    def serve_config(self) -> list[str]:
        return [self.model(), "--engine", self.draw.choice(_VALUES["--engine"]), *self.options("serve-config")]

    def audit(self) -> list[str]:
        if find_spec("gguf") is not None and self.draw.random() < 0.4:
            path = self.given / "model.gguf"
            self.what.append(write_odd_gguf(self.draw, path))
            if self.draw.random() < 0.2:
                self.what.append(damage_file(self.draw, path, self.elsewhere))
            return [str(path)]
        model = self.model()
        return [self.draw.choice((model, f"{model}/config.json")), *self.options("audit")]

    def patch(self) -> list[str]:
        model = self.model()
        new = self.new_folder(model)
        method = ["--method", "yarn", "--factor", "4"] if self.draw.random() < 0.6 else []
        return [model, "--out", str(new), *method, *self.options("patch")]

    def _measured(self, command: str) -> list[str]:
        draw = self.draw
        most = ["--max-spans", "2"] if command != "passkey" else ["--trials", "1", "--depths", "0.5"]
        model = self.model()
        arguments = [model, "--lengths", "16,32" if command != "passkey" else "48", *most]
        if command == "passkey":
            arguments += ["--task", "copy"] if draw.random() < 0.8 else []
            arguments += ["--haystack", self.text()] if draw.random() < 0.2 else []
        else:
            arguments += ["--data", self.text()]
        arguments += ["--method", "yarn", "--factor", "2"] if command == "sweep" else []
        out = self.new_folder(model) if self.odd_options and draw.random() < 0.2 else self.out
        if Path(model) in out.parents:  # results may lie in a model's folder, but this one other cases have, too
            out = self.out
        self.new = None
        return [*arguments, "--out", str(out), *self.options(command)]

    def ppl(self) -> list[str]:
        return self._measured("ppl")

    def passkey(self) -> list[str]:
        return self._measured("passkey")

    def _run_folder(self) -> tuple[list[str], Path]:
        kind = self.draw.choice(list(self.inputs.runs))
        command, source = self.inputs.runs[kind]
        shutil.copytree(source, self.out, copy_function=os.link, dirs_exist_ok=True)
        (folder,) = self.out.iterdir()
        if self.draw.random() < 0.9:
            self.what.append(f"{kind} run: {damage_folder(self.draw, folder, self.elsewhere)}")
        return command, folder

    def sweep(self) -> list[str]:
        return self._measured("sweep")

    def resume(self) -> list[str]:
        """The command of a finished run, over a damaged copy of its folder."""
        command, _ = self._run_folder()
        return [*command, "--out", str(self.out)]

    def report(self) -> list[str]:
        _, folder = self._run_folder()
        return [str(folder), *self.options("report", 1)]

    def convert(self) -> list[str]:
        model = self.model()
        return [
            model,
            str(self.new_folder(model)),
            "--to",
            self.draw.choice(_VALUES["--to"]),
            *self.options("convert", 3),
        ]

    def extend(self) -> list[str]:
        model = self.model()
        given = [model, "--target-length", self.draw.choice(_VALUES["--target-length"]), "--no-measure", "--yes"]
        out, self.new = self.new_folder(model), None  # it may write a folder, and then find no engine for it
        return [*given, "--out", str(out), *self.options("extend")]

    def detect(self) -> list[str]:
        text = ["--text", self.text()] if self.draw.random() < 0.15 else []
        return [self.model(), *text, *self.options("detect", 1)]

    def methods(self) -> list[str]:
        return self.options("methods")

    def lm_eval(self) -> list[str]:
        """Refused before the harness is imported, which takes long."""
        return [self.model(), "--tasks", "nope", *self.options("lm-eval"), "--batch-size", "0"]

    def demo(self) -> list[str]:
        return ["--out", str(self.out), *self.options("demo"), "--texts", self.draw.choice(("0", "x", "-1", ""))]

    def none(self) -> list[str]:
        """No command, or one that there is not."""
        return self.draw.sample(
            (*_ODD_TEXTS, "--help", "--version", "--traceback", "describ", "report"), self.draw.randint(0, 2)
        )


COMMANDS: dict[str, tuple[int, Callable[[_Maker], list[str]]]] = {
    "describe": (22, _Maker.describe),
    "patch": (15, _Maker.patch),
    "convert": (16, _Maker.convert),
    "detect": (10, _Maker.detect),
    "ppl": (12, _Maker.ppl),
    "sweep": (4, _Maker.sweep),
    "passkey": (6, _Maker.passkey),
    "report": (8, _Maker.report),
    "dry run": (4, _Maker.dry_run),
    "serve-config": (6, _Maker.serve_config),
    "audit": (4, _Maker.audit),
    "resume": (3, _Maker.resume),
    "methods": (2, _Maker.methods),
    "lm-eval": (1, _Maker.lm_eval),
    "demo": (1, _Maker.demo),
    "none": (1, _Maker.none),
    "extend": (4, _Maker.extend),
    "config": (20, _Maker.config),
    "no out": (6, _Maker.no_out),
}
"""Kind -> how often it is drawn, and what makes its arguments; "resume" is a measurement continued."""
_WHOLE_LINES = ("dry run", "none", "resume", "config", "no out")
"""Kinds whose arguments begin with the command."""


def make_case(inputs: Inputs, seed: int, number: int, folder: Path, command: str | None = None) -> Case:
    """Make the inputs of a case in a new folder.

    Args:
        command: a key of COMMANDS; default: drawn.
    """
    draw = random.Random(f"{seed} {number}")
    drawn = draw.choices(list(COMMANDS), [weight for weight, _ in COMMANDS.values()])[0]
    name = command or drawn
    maker = _Maker(inputs, draw, folder)
    arguments = COMMANDS[name][1](maker)
    leading = [] if name in _WHOLE_LINES else [name, *maker.json(name)]
    kept = (maker.given, maker.elsewhere)
    return Case(number, [*leading, *arguments], " | ".join(maker.what), maker.work, maker.out, kept, maker.new)
