"""What each engine serves, what goes wrong there, and how the classes of the engines compare."""

from __future__ import annotations

from .registry import figure, markdown_table, read_result

SERVED = ("vllm", "sglang", "mlx", "llama.cpp", "ollama")
"""The engines of the table; transformers serves every static method, and gguf is what ollama runs."""


@figure
def serving_table() -> str:
    from rope_ext_hf.engines.base import Target, find_engine
    from rope_ext_hf.errors import ServingError
    from tests.serving_models import SERVED as FAMILIES  # the families are those that the tests serve
    from tests.serving_models import targets

    def served(engine: str, target: Target) -> str:
        try:
            form = find_engine(engine).config_for(target).form
        except ServingError:
            return "-"
        return "longrope" if form.startswith("longrope") else form.split()[0] if "divisors" in form else form

    rows = []
    for family in FAMILIES:
        for over in ("own", "original"):
            known: dict[tuple[str, ...], list[str]] = {}
            for method, target in targets(family, over):
                if isinstance(target, Target):
                    known.setdefault(tuple(served(engine, target) for engine in SERVED), []).append(method.name)
            rows += [(family, over, ", ".join(names), *cells) for cells, names in known.items()]
    return markdown_table(["model", "over", "methods", *SERVED], rows)


@figure
def serving_traps() -> str:
    from rope_ext_hf.engines.base import list_engines

    rows = [
        (name, trap.versions, f"`{trap.key}`" if " " not in trap.key else trap.key, trap.effect, trap.source)
        for name, engine in list_engines().items()
        if name not in ("gguf", "ollama")
        for trap in engine.traps
    ]
    return markdown_table(["engine", "versions", "key", "what happens", "source"], rows)


@figure
def engine_classes() -> str:
    results = read_result("engine-classes")["engines"]
    rows = [
        (
            result["engine"],
            result["version"],
            str(len(result["rows"])),
            f"{max(row['frequencies'] for row in result['rows']):.1e}",
            f"{max(row['magnitude'] for row in result['rows']):.1e}",
            ", ".join(result["skipped"]) or "none",
        )
        for result in results
    ]
    head = ["engine", "version", "configurations", "frequencies, largest relative difference (float32 tables)"]
    return markdown_table([*head, "magnitude", "families not built by its factory"], rows)
