"""Decoding with torch.compile, as `generate(cache_implementation="static")` does it by itself on CUDA."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import rope_ext_hf as rope
from rope_ext_hf.patches.slots.patched_slot import patched_slots, tables_of
from tests.support.length_examples import RULES
from tests.support.models import TRAINED, build, logits, tokens

PROMPT, STEPS, SETTLED = TRAINED + 6, 6, 2

METHODS: dict[str, tuple[str, dict[str, Any], int]] = {
    "yarn": ("yarn", {"factor": 4}, 2),
    "dynamic-yarn": (*RULES["dynamic-yarn"], 10),
    "even": (*RULES["even"], 10),
    "sticky": ("dynamic-ntk", {"growth": "even", "sticky": True}, 10),
    "self-extend": ("self-extend", {"group": 4, "window": 16}, 3),
    "dca": ("dca", {"chunk": 48, "window": 16}, 3),
    "rerope": ("rerope", {"window": 32}, 3),
}
"""Methods, and how many graphs all steps together may take in a model of two layers."""


class Graphs:
    """A backend of torch.compile that runs graphs as they are and keeps what they return."""

    def __init__(self) -> None:
        self.count = 0
        self.outputs: list[Tensor] = []

    def __call__(self, graph: Any, examples: Any) -> Any:
        self.count += 1

        def run(*args: Any) -> Any:
            outputs = graph.forward(*args)
            self.outputs += [output for output in outputs if isinstance(output, Tensor)]
            return outputs

        return run

    def returned(self, tensor: Tensor) -> bool:
        """Return whether a graph returned this tensor, or another one in its memory."""
        storage = tensor.untyped_storage().data_ptr()
        return any(output.untyped_storage().data_ptr() == storage for output in self.outputs)


def kept_between_steps(model: Any, cache: Any) -> list[Tensor]:
    """Return every tensor that the package reads again in a later step."""
    memory = vars(cache).get("_rope_ext_hf_cache_memory")
    rows = getattr(memory, "rows", None)
    seen = [table.longest_seen for table in tables_of(patched_slots(model)) if table.method.sticky_length]
    return [*seen, *([] if rows is None else [rows.lengths, rows.positions])]


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("prefill", ["eager", pytest.param("compiled", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("kind", ["static", pytest.param("dynamic", marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    "which",
    [
        pytest.param(which, marks=[pytest.mark.thorough] * (which in ("sticky", "even", "dca", "rerope")))
        for which in METHODS
    ],
)
def test_a_step_compiles_into_few_graphs_and_keeps_none_of_their_outputs(which: str, kind: str, prefill: str) -> None:
    """CUDA graphs write over their outputs at the next step, so that no output may be kept between steps."""
    name, params, most = METHODS[which]
    model, ids, graphs = rope.patch(build("llama"), name, **params), tokens(PROMPT + STEPS), Graphs()
    compiled: Any = torch.compile(model, backend=graphs)
    cache: Any = transformers.DynamicCache(config=model.config)
    if kind == "static":
        cache = transformers.StaticCache(config=model.config, max_cache_len=PROMPT + STEPS)
    eager_cache: Any = transformers.DynamicCache(config=model.config)
    made = []
    with torch.no_grad():
        (compiled if prefill == "compiled" else model)(ids[:, :PROMPT], past_key_values=cache)
        model(ids[:, :PROMPT], past_key_values=eager_cache)
        at_first = graphs.count
        for at in range(PROMPT, PROMPT + STEPS):
            step = {"input_ids": ids[:, at : at + 1], "position_ids": torch.tensor([[at]])}
            actual = compiled(**step, past_key_values=cache).logits
            made.append(graphs.count - at_first)
            torch.testing.assert_close(actual, model(**step, past_key_values=eager_cache).logits, atol=1e-4, rtol=0)
            assert not any(graphs.returned(tensor) for tensor in kept_between_steps(model, cache))
    assert made[-1] <= most
    assert made[-1] == made[SETTLED - 1]  # the later steps run what the first ones compiled
    assert graphs.outputs


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    "which",
    [pytest.param(which, marks=[pytest.mark.thorough] * (which != "dynamic-yarn")) for which in METHODS],
)
def test_generate_compiles_by_itself_into_few_graphs(which: str) -> None:
    """transformers does so on CUDA with a static cache; here it is made to."""
    from transformers.generation.configuration_utils import CompileConfig

    name, params, most = METHODS[which]
    graphs = Graphs()
    model, ids = rope.patch(build("llama"), name, **params), tokens(PROMPT)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(ids)
    expected = model.generate(ids, attention_mask=mask, **options)
    config = CompileConfig(backend=lambda *given: graphs(*given), mode=None)  # it is copied, and a function is not
    config._compile_all_devices = True
    actual = model.generate(ids, attention_mask=mask, cache_implementation="static", compile_config=config, **options)
    assert torch.equal(actual, expected)
    assert 0 < graphs.count <= most


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("which", ["yarn", "dca", "self-extend", "rerope"])
@pytest.mark.parametrize("padding", [(0,), (0, 9)], ids=["one row", "padded rows"])
def test_one_graph_serves_every_step_onto_a_static_cache(which: str, padding: tuple[int, ...]) -> None:
    """No graph ends before the step does, so that `mode="reduce-overhead"` repeats the whole of it."""
    from torch._dynamo.utils import counters
    from transformers.generation.configuration_utils import CompileConfig

    name, params, _ = METHODS[which]
    graphs = Graphs()
    model, ids = rope.patch(build("llama"), name, **params), tokens(PROMPT, batch=len(padding))
    mask = (torch.arange(PROMPT) >= torch.tensor(padding)[:, None]).long()
    options = {"max_new_tokens": 65, "min_new_tokens": 65, "do_sample": False, "pad_token_id": 0}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    expected = model.generate(ids, attention_mask=mask, **options)
    counters.clear()
    config = CompileConfig(backend=lambda *given: graphs(*given), mode=None)
    config._compile_all_devices = True
    actual = model.generate(ids, attention_mask=mask, cache_implementation="static", compile_config=config, **options)
    torch.testing.assert_close(torch.stack(actual.logits), torch.stack(expected.logits), atol=1e-4, rtol=0)
    assert (graphs.count, dict(counters["graph_break"])) == (1, {})


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=[pytest.mark.thorough] * (name not in ("cohere", "gpt_oss")))
        for name in ("cohere", "gpt_neox", "phi3", "deepseek_v3", "gemma2", "gpt_oss")
    ],
)
def test_steps_of_other_families_give_the_logits_of_eager_ones(family: str) -> None:
    """Interleaved pairs, a part of the dims, latent attention; and layers with windows, which are left to tiles."""
    model, ids = rope.patch(build(family), "self-extend", group=4, window=16), tokens(PROMPT + 4)
    compiled: Any = torch.compile(model, backend="eager")
    caches = [transformers.StaticCache(config=model.config, max_cache_len=PROMPT + 8) for _ in range(2)]
    with torch.no_grad():
        for cache in caches:
            model(ids[:, :PROMPT], past_key_values=cache)
        for at in range(PROMPT, PROMPT + 4):
            step = {"input_ids": ids[:, at : at + 1], "position_ids": torch.tensor([[at]])}
            actual, expected = (
                run(**step, past_key_values=cache).logits for run, cache in zip((compiled, model), caches, strict=True)
            )
            torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    "case", ["first token", "padding at the end", "a hole", "positions of places", "later positions"]
)
def test_calls_that_are_no_usual_steps_give_the_logits_of_eager_ones(case: str) -> None:
    """Of a cache without keys, with padding elsewhere, or whose positions do not count its tokens."""
    model, ids = rope.patch(build("llama"), "self-extend", group=4, window=16), tokens(PROMPT + 3, batch=2)
    compiled: Any = torch.compile(model, backend="eager")
    past, places = (0, 96) if case == "first token" else (PROMPT, 96)
    mask = torch.ones(2, places, dtype=torch.int64)
    if case == "padding at the end":
        mask[0, 50:PROMPT] = 0
    elif case == "a hole":
        mask[0, 10:14] = 0
    elif case == "positions of places":
        mask[0, :9] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    if case == "positions of places":
        positions = torch.arange(places).expand(2, -1)
    if case == "later positions":
        positions = positions + 1000
    caches = [transformers.StaticCache(config=model.config, max_cache_len=places) for _ in range(2)]
    with torch.no_grad():
        for cache in caches if past else ():
            part = {"attention_mask": mask[:, :past], "position_ids": positions[:, :past]}
            model(ids[:, :past], past_key_values=cache, **part)
        for at in range(past, past + 3):
            step = {"input_ids": ids[:, at : at + 1], "position_ids": positions[:, at : at + 1].contiguous()}
            actual, expected = (
                run(**step, attention_mask=mask, past_key_values=cache).logits
                for run, cache in zip((compiled, model), caches, strict=True)
            )
            torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_step_refuses_positions_that_do_not_continue() -> None:
    model, ids = rope.patch(build("llama"), "dca", chunk=48, window=16), tokens(PROMPT + 1)
    compiled: Any = torch.compile(model, backend="eager")
    cache = transformers.StaticCache(config=model.config, max_cache_len=PROMPT + 8)
    with torch.no_grad():
        model(ids[:, :PROMPT], past_key_values=cache)
        with pytest.raises(RuntimeError, match="position_ids do not continue"):
            compiled(ids[:, PROMPT:], position_ids=torch.tensor([[5]]), past_key_values=cache)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_one_operator_stands_for_the_attention_of_a_remapping_method() -> None:
    """Its tag has CUDA graphs leave it out. The forward has padding and no cache."""
    model, ids = rope.patch(build("llama"), "self-extend", group=4, window=16), tokens(PROMPT, batch=2)
    mask = torch.ones_like(ids)
    mask[0, :30] = 0
    expected = logits(model, ids, attention_mask=mask)
    compiled: Any = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(logits(compiled, ids, attention_mask=mask)[1], expected[1], atol=1e-5, rtol=0)
    torch.testing.assert_close(logits(compiled, ids, attention_mask=mask)[0, 30:], expected[0, 30:], atol=1e-5, rtol=0)
    assert torch.Tag.cudagraph_unsafe in torch.ops.rope_ext_hf.remapped_attention.default.tags
