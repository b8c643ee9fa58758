"""The house: which folder may import which (import-linter), what tools may take, names, and where tests stand.

Everything is read from the source; `patches` and `eval` at the top of the repository are links into the package.
Imports inside functions and under TYPE_CHECKING count. The names of the package's own `__init__` are lazy and may point
anywhere.
"""

from __future__ import annotations

import ast
import functools
import importlib
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rope_ext_hf.extending import OPEN

ROOT = Path(__file__).parent.parent
PACKAGE, TOOLS = "rope_ext_hf", "tools"
HEAVY = {
    "transformers",
    "matplotlib",
    "datasets",
    "huggingface_hub",
    "lm_eval",
    "accelerate",
    "pandas",
    "nltk",
    "peft",
    "gguf",
    "scipy",
    "tqdm",
    "vllm",
    "sglang",
}
"""Third-party libraries that a function may import for itself."""
TRAP_KEYS = ["versions", "key", "effect", "source"]
KNOWN: dict[str, tuple[str, ...]] = {}
"""test -> what still offends against it; entries are only ever deleted."""


@dataclass(frozen=True)
class Import:
    """One name that a module takes from another, or a whole module (name None).

    Attributes:
        source: the importing module; target: the module that is imported.
        name: of what is taken from it.
        inside: whether in a function.
        statement: whether by an import statement; else by an attribute of a module imported whole.
    """

    source: str
    target: str
    name: str | None
    inside: bool
    statement: bool = True

    def __str__(self) -> str:
        taken = f"{self.target}.{self.name}" if self.name else self.target
        return f"{self.source} imports {taken}"


@dataclass
class Module:
    """One source file."""

    name: str
    path: Path
    tree: ast.Module
    imports: list[Import] = field(default_factory=list)

    @property
    def room(self) -> str:
        """The folder or module of the package that it belongs to, or the folder of the tool box."""
        parts = self.name.split(".")[1:]
        return ".".join(parts[:2] if parts[0] == TOOLS else parts[:1]) if parts else ""


@functools.cache
def modules() -> dict[str, Module]:
    """Every module of the package by its installed name."""
    read = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        read[name] = Module(name, path, ast.parse(path.read_text(encoding="utf-8")))
    for module in read.values():
        module.imports = list(imports_of(module.name, module.tree, set(read)))
    return read


def nodes(tree: ast.AST, inside: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Every node, and whether it lies in a function."""
    for child in ast.iter_child_nodes(tree):
        yield child, inside
        yield from nodes(child, inside or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)))


def imports_of(source: str, tree: ast.Module, known: set[str]) -> Iterator[Import]:
    """Every import, and every `module.name` of a module imported whole."""
    aliases: dict[str, str] = {}
    for node, inside in nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(source, alias.name, None, inside)
                if alias.name in known and alias.asname:
                    aliases[alias.asname] = alias.name
        elif isinstance(node, ast.ImportFrom):
            assert not node.level or "docs" in source, f"{source}:{node.lineno}: imports are absolute"
            for alias in node.names:
                if (submodule := f"{node.module}.{alias.name}") in known:
                    aliases[alias.asname or alias.name] = submodule
                    yield Import(source, submodule, None, inside)
                else:
                    yield Import(source, str(node.module), alias.name, inside)
    for node, inside in nodes(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            yield Import(source, aliases[node.value.id], node.attr, inside, statement=False)


def own_imports() -> Iterator[Import]:
    """Imports of one module of the package by another, those of its lazy `__init__` left out."""
    for module in modules().values():
        if module.name != PACKAGE:
            yield from (each for each in module.imports if each.target in modules())


def check(offences: Iterable[str]) -> None:
    """Fail on an offence that is not known yet, and on a known one that is none any more: delete it below."""
    rule = os.environ["PYTEST_CURRENT_TEST"].split("::")[-1].split(" ")[0]
    known, present = set(KNOWN.get(rule, ())), set(offences)
    assert not present - known, f"{rule} fails for these; see docs/internals.md:\n" + "\n".join(sorted(present - known))
    assert not known - present, "no offences any more:\n" + "\n".join(sorted(known - present))


# --- arrows -------------------------------------------------------------------------------------------------------


def test_folders_import_as_the_contracts_say() -> None:
    """import-linter finds that folders import from lower floors alone, and never in a circle; see pyproject.toml."""
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint, "--no-cache", "--no-logo"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_internals_lists_every_folder() -> None:
    text = (ROOT / "docs" / "internals.md").read_text(encoding="utf-8")
    folders = [*(ROOT / PACKAGE).glob("*/__init__.py"), *(ROOT / PACKAGE / TOOLS).glob("*/__init__.py")]
    listed = set(re.findall(r"^\| `(\S+)/` \|", text, re.M))
    check({path.parent.relative_to(ROOT).as_posix() for path in folders} - listed)


def test_no_module_takes_a_name_of_a_package_around_it() -> None:
    """Names of packages are lazy and point to every floor: an import of one could lead in a circle."""
    check(
        str(each)
        for each in own_imports()
        if f"{each.source}.".startswith(f"{each.target}.") and (each.target, each.name) != (PACKAGE, "__version__")
    )


def test_the_library_names_no_tool() -> None:
    """Neither by an import nor by a path in a string, by which something could be loaded."""
    library = [module for module in modules().values() if module.room.partition(".")[0] != TOOLS]
    offences = [
        str(each) for module in library for each in module.imports if each.target.startswith(f"{PACKAGE}.{TOOLS}")
    ]
    offences += [
        f"{module.name}:{node.lineno} names {node.value!r}"
        for module in library
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if re.fullmatch(rf"{PACKAGE}[./]{TOOLS}\S*", node.value)
    ]
    check(offences)


def faces() -> set[tuple[str, str]]:
    """Return the names that `rope_ext_hf` and `rope_ext_hf.eval` export, each with the module that defines it.

    They import such a name as itself: `from module import name as name`.
    """
    return {
        (node.module, alias.name)
        for name in (PACKAGE, f"{PACKAGE}.eval")
        for node in ast.walk(modules()[name].tree)
        if isinstance(node, ast.ImportFrom) and node.module is not None
        for alias in node.names
        if alias.asname is not None
    }


def open_modules() -> set[str]:
    """Return the modules that rope_ext_hf/extending.py opens whole: the names in their `__all__`."""
    return {entry for entry in OPEN if ":" not in entry}


def test_tools_take_what_is_open() -> None:
    """The tool box takes public names of the library, and what rope_ext_hf/extending.py opens: something of each entry.

    An entry is a module, of which the names in `__all__` are open, or one object, written module:object.
    """
    objects = {(module, name) for module, _, name in (entry.partition(":") for entry in OPEN) if name}
    of_modules = {(module, name) for module in open_modules() for name in importlib.import_module(module).__all__}
    taken = {
        (each.target, each.name)
        for module in modules().values()
        if module.room.partition(".")[0] == TOOLS
        for each in module.imports
        if each.name is not None and each.target in modules()
        if modules()[each.target].room.partition(".")[0] != TOOLS and each.target not in (PACKAGE, f"{PACKAGE}.eval")
    }
    taken -= faces()
    check(
        [f"{module}.{name} is taken and not open" for module, name in taken - objects - of_modules]
        + [f"{module}:{name} is open and not taken" for module, name in objects - taken]
        + [
            f"{module} is open and nothing of it is taken"
            for module in open_modules() - {module for module, _ in taken}
        ]
        + [f"{module}:{name} is open by its module already" for module, name in objects if module in open_modules()]
    )


def test_names_of_open_modules_are_their_own() -> None:
    """An open module defines what its `__all__` names, so that there is one place to look."""
    check(
        f"{name}.{each} is defined elsewhere"
        for name in open_modules()
        for each in importlib.import_module(name).__all__
        if each not in defined(modules()[name])
    )


def engine_names() -> set[str]:
    """The names under which the modules of engines/ register their classes."""
    return {
        node.args[0].value
        for module in modules().values()
        if module.room.startswith("tools.engines")
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "register_engine"
        if isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str)
    }


def test_engines_are_named_in_their_folder_alone() -> None:
    names = engine_names() - {"transformers", "gguf"}  # the library, and a file format
    assert len(names) > 3
    check(
        f"{module.name} names {node.value!r} in line {node.lineno}: take it from an attribute of its class"
        for module in modules().values()
        if not module.room.startswith("tools.engines")
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Constant) and node.value in names
    )


def test_commands_are_spelt_by_one_function() -> None:
    """By `options.arguments.command_line`, which quotes them, and whose lines tests parse again."""

    def text(node: ast.JoinedStr) -> str:
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)

    check(
        f"{module.name}:{node.lineno} writes {text(node)!r}"
        for module in modules().values()
        if module.room not in ("cli", "options") and not module.path.stem.endswith(("commands", "options"))
        for node in ast.walk(module.tree)
        if isinstance(node, ast.JoinedStr) and re.search(r"rope-ext [a-z-]+ [^.;`]*\{\}", text(node))
    )


def test_traps_are_those_of_engines() -> None:
    traps = tomllib.loads((ROOT / PACKAGE / TOOLS / "engines" / "traps.toml").read_text(encoding="utf-8"))
    check(traps.keys() - engine_names())
    check(f"{name}: {each}" for name, listed in traps.items() for each in listed if list(each) != TRAP_KEYS)


@functools.cache
def brings_torch(name: str) -> bool:
    """Whether importing a module of the package imports torch, by itself or by a module that it imports."""
    outside = [each.target for each in modules()[name].imports if not each.inside and each.statement]
    typed = {
        each.module
        for node in ast.walk(modules()[name].tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for each in ast.walk(node)
        if isinstance(each, ast.ImportFrom)
    }
    return any(
        target.partition(".")[0] == "torch" or (target in modules() and target != PACKAGE and brings_torch(target))
        for target in outside
        if target not in typed
    )


def leaves_torch_out(each: Import) -> bool:
    """Whether an import in a function keeps torch out of a module that works without it in the usual case."""
    heavy = each.target == "torch" or (each.target in modules() and brings_torch(each.target))
    return heavy and not brings_torch(each.source)


def test_functions_import_heavy_libraries_alone() -> None:
    """And commands and questions what they run, so that --help is quick; and modules without torch those with it."""
    light = [
        str(each)
        for module in modules().values()
        for each in module.imports
        if each.inside
        and each.statement
        and module.room not in ("cli", "__main__", "stopping")  # those handle signals before they import the rest
        and not module.path.stem.endswith(("commands", "options"))
        and each.target.partition(".")[0] not in HEAVY
        and not leaves_torch_out(each)
    ]
    check(light)


# --- names --------------------------------------------------------------------------------------------------------


def test_no_private_name_crosses_modules() -> None:
    private = [
        str(each)
        for each in own_imports()
        if (each.name or "").startswith("_") and not (each.name or "").startswith("__")
    ]
    check(private)


@functools.cache
def taken_outside() -> set[tuple[str, str | None]]:
    """What tests, benchmarks, examples and the scripts of the pages take from modules."""
    folders = ("tests", "checks", "benchmarks", "examples", "docs")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return {
        (each.target, each.name)
        for path in files
        for each in imports_of(str(path), ast.parse(path.read_text(encoding="utf-8")), set(modules()))
    }


def test_what_benchmarks_import_exists() -> None:
    """Also inside functions that no test calls."""
    paths = sorted((ROOT / "benchmarks").glob("*.py"))
    check(
        f"{path.name} imports {each.name} of {each.target}"
        for path in paths
        for each in imports_of(str(path), ast.parse(path.read_text(encoding="utf-8")), set(modules()))
        if each.name is not None and each.target.split(".")[0] == PACKAGE
        if not hasattr(importlib.import_module(each.target), each.name)
    )


def test_names_without_an_underscore_are_used_outside() -> None:
    """By another module, a test, a benchmark or an example, or by a library that is given its name."""
    used = {(each.target, each.name) for each in own_imports()} | taken_outside()
    used |= {(each.target, each.name) for each in modules()[PACKAGE].imports}
    used |= {(module.name, name) for module in modules().values() for name in registered(module)}
    used |= plugged_in()
    check(
        f"{module.name}.{name}"
        for module in modules().values()
        if module.path.name not in ("__init__.py", "__main__.py")
        for name in defined(module)
        if not name.startswith("_") and (module.name, name) not in used and name not in given_by_name()
    )


def plugged_in() -> set[tuple[str, str]]:
    """What the package itself adds by entry points, as module and name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = [project["scripts"], *project["entry-points"].values()]
    return {
        (module, name) for group in groups for module, _, name in (value.partition(":") for value in group.values())
    }


@functools.cache
def given_by_name() -> set[str]:
    """Names at the end of a path such as "package.module.Name" or "package.module:name" in a string of the package."""
    strings = (
        node.value
        for module in modules().values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value
    )
    return {re.split("[.:]", text)[-1] for text in strings if "." in text}


def registered(module: Module) -> Iterator[str]:
    """Classes and functions that a decorator such as `register_engine` puts into a registry, where others find them."""
    for node in module.tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            decorators = [getattr(each, "func", each) for each in node.decorator_list]
            if any(isinstance(each, ast.Name) and each.id.startswith("register_") for each in decorators):
                yield node.name


def defined(module: Module) -> Iterator[str]:
    """Functions, classes and values at the top level of a module, without type variables."""
    for node in module.tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            kind = getattr(getattr(node.value, "func", None), "id", "")
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if kind not in ("TypeVar", "ParamSpec"):
                yield from (n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name))


def test_packages_and_open_modules_list_their_names() -> None:
    """`__all__` says what a package, or a module that rope_ext_hf/extending.py opens, offers to others.

    Inside the package, the underscore does.
    """
    check(
        module.name
        for module in modules().values()
        if module.path.name != "__init__.py"
        and module.name not in open_modules()
        and "__all__" in {n.id for n in ast.walk(module.tree) if isinstance(n, ast.Name)}
    )


def test_no_package_exports_a_name_of_a_module_in_it() -> None:
    """An import of the module would take the place of the object: `eval.perplexity` is a function."""
    check(
        f"{module.name}.{name}"
        for module in modules().values()
        if module.path.name == "__init__.py"
        for name in getattr(importlib.import_module(module.name), "__all__", ())
        if f"{module.name}.{name}" in modules()
    )


# --- tests ---------------------------------------------------------------------------------------------------------


OF_THE_WHOLE = frozenset(
    (
        "adding_in_a_copy",
        "adding_things",
        "architecture",
        "skill",
        "coverage",
        "docs",
        "examples",
        "fuzz",
        "gpu",
        "library_alone",
        "make_gpu",
        "simulated_cuda",
        "package",
        "torchao_and_onnx",
    )
)
"""Tests of the whole repository, in tests/ itself beside those of modules in no folder; they may need the tool box."""
DATA = "conformance"
"""A folder of data apart from the package, of the whole repository too: the tool box's mistakes are in its numbers."""


def of_the_whole(path: Path) -> bool:
    """Whether a file in tests/ may need the tool box: its own tests, and those of the whole repository."""
    folder = path.relative_to(ROOT / "tests").parts[0]
    return folder in (TOOLS, DATA) or path.stem.removeprefix("test_") in OF_THE_WHOLE


def test_tests_of_the_library_need_no_tool() -> None:
    """Neither they nor what they import from tests/ and checks/."""
    trees = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): (path, ast.parse(path.read_text(encoding="utf-8")))
        for folder in ("tests", "checks")
        for path in sorted((ROOT / folder).rglob("*.py"))
    }
    imports = {
        name: {
            target
            for each in imports_of(name, tree, {*modules(), *trees})
            for target in (each.target, f"{each.target}.{each.name}")
        }
        for name, (_, tree) in trees.items()
    }
    needed = {
        name
        for name, (path, _) in trees.items()
        if name.startswith("tests.") and path.name.startswith("test_") and not of_the_whole(path)
    }
    waiting = [*needed, "tests.conftest"]
    while waiting:
        new = imports[waiting.pop()] & trees.keys() - needed
        needed |= new
        waiting += new
    assert len(needed) > 100
    check(
        f"{name} imports {target}"
        for name in sorted(needed)
        for target in imports[name]
        if target.startswith((f"{PACKAGE}.{TOOLS}", f"tests.{TOOLS}"))
    )


# --- maps -----------------------------------------------------------------------------------------------------------


def test_the_map_of_a_folder_names_modules_that_exist() -> None:
    """In the docstring of a folder, a line "one, two: what they are for" names modules or folders of it."""
    missing = []
    for path in sorted((ROOT / PACKAGE).rglob("__init__.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        for line in re.findall(r"^ *([a-z_]+(?:, [a-z_]+)*): ", docstring, re.MULTILINE):
            missing += [
                f"{path.relative_to(ROOT)}: {name}"
                for name in line.split(", ")
                if not (path.parent / f"{name}.py").exists() and not (path.parent / name).is_dir()
            ]
    check(missing)
