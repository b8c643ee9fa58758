"""The arguments of a decoder, found under the names of every release of transformers and under new ones."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, Optional, Union

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.cache_utils import Cache
from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.modeling_outputs import BaseModelOutputWithPast

import rope_ext_hf as rope
from rope_ext_hf.errors import LengthError, UnsupportedModelError
from rope_ext_hf.models.decoder_arguments import (
    arguments,
    cache_argument,
    cache_of_output,
    cache_parameter,
    check_names,
    new_tokens,
    own_cache,
    paged_cache,
    past_length,
)
from rope_ext_hf.patches.forward.attention_interface import register_attention
from rope_ext_hf.patches.model_rope import ModelRope
from rope_ext_hf.patches.slots.patched_slot import patched_slots
from tests.support.method_examples import example_method
from tests.support.models import TRAINED, build, tokens

RELEASE = re.escape(transformers.__version__)


class Old(nn.Module):
    def forward(self, input_ids: Any = None, attention_mask: Any = None, past_key_values: Cache | None = None) -> None:
        """The name up to transformers 5.23, in a class without further keywords."""


class New(nn.Module):
    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        cache: Cache | None = None,
        inputs_embeds: Any = None,
        **kwargs: Any,
    ) -> None:
        """The name from transformers 5.24 on."""


class Later(nn.Module):
    def forward(self, input_ids: Any = None, kv_store: Cache | None = None, **kwargs: Any) -> None:
        """A name that no release has had."""


class Attribute(nn.Module):
    def forward(self, input_ids: Any = None, kv_store: transformers.cache_utils.Cache | None = None) -> None:
        """An annotation that is text with dots."""


class Both(nn.Module):
    def forward(self, input_ids: Any = None, encoder_cache: Cache | None = None, cache: Cache | None = None) -> None:
        """An encoder's cache in front of the decoder's own."""


class Untyped(nn.Module):
    def forward(self, input_ids=None, past_key_values=None):  # type: ignore[no-untyped-def]
        """No annotations, as some classes of transformers have none."""


class Nameless(nn.Module):
    def forward(self, input_ids: Any = None, kv_store: Any = None) -> None:
        """Neither an annotation nor a known name."""


class Wrapper(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> None:
        """It passes everything on."""


def annotated(annotation: Any) -> nn.Module:
    """Return a decoder whose forward has this annotation, as an object and not as text."""

    def forward(self: Any, input_ids: Any = None, kv_store: Any = None) -> None:
        """Its annotation is set below."""

    forward.__annotations__["kv_store"] = annotation
    module: nn.Module = type("Annotated", (nn.Module,), {"forward": forward})()
    return module


NAMES = [
    (Old(), "past_key_values"),
    (New(), "cache"),
    (Later(), "kv_store"),
    (Attribute(), "kv_store"),
    (Both(), "cache"),
    (Untyped(), "past_key_values"),
]


def paged() -> Any:
    """Return a paged cache of continuous batching, without its memory."""
    return PagedAttentionCache.__new__(PagedAttentionCache)


# --- by what they are ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("decoder", "name"), NAMES, ids=lambda decoder: type(decoder).__name__ if decoder else "")
def test_the_name_of_the_cache_is_that_of_the_class(decoder: nn.Module, name: str) -> None:
    assert cache_parameter(decoder) == name
    assert cache_parameter(Wrapper(), decoder) == name  # as of a PEFT model around it


@pytest.mark.parametrize(
    "annotation",
    [
        Cache,
        DynamicCache,
        Optional[Cache],  # noqa: UP045 - as older code writes it
        Union[list[Tensor], Cache, None],  # noqa: UP007
        Cache | None,
        list[Cache],
        Optional["Cache"],
        "Cache | None",
        "Optional['Cache']",
        "DynamicCache | None",
        "EncoderDecoderCache",
    ],
    ids=str,
)
def test_annotations_that_hold_a_cache(annotation: Any) -> None:
    assert cache_parameter(annotated(annotation)) == "kv_store"


@pytest.mark.parametrize("annotation", [None, int, Tensor, "CacheConfig", "torch.Tensor | None", list[Tensor]], ids=str)
def test_annotations_that_hold_none(annotation: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="no argument that holds a Cache"):
        cache_parameter(annotated(annotation))


def test_an_annotation_for_type_checkers_alone_is_read_by_its_word() -> None:
    class Typed(nn.Module):
        def forward(self, input_ids: Any = None, kv_store: Any = None) -> None:
            """Its annotation is set below."""

    Typed.forward.__annotations__["kv_store"] = "Cache | None"
    Typed.forward = _without_globals(Typed.forward)  # type: ignore[method-assign]
    assert cache_parameter(Typed()) == "kv_store"


def _without_globals(function: Any) -> Any:
    """Return the function as it would be in a module that has imported nothing."""
    bare = type(function)(function.__code__, {}, function.__name__, function.__defaults__)
    bare.__annotations__ = function.__annotations__
    return bare


def test_a_name_that_is_not_found_is_an_error_with_the_release() -> None:
    with pytest.raises(
        UnsupportedModelError, match=rf"Nameless \(transformers {re.escape(transformers.__version__)}\)"
    ):
        cache_parameter(Nameless())


@pytest.mark.parametrize("decoder", [Old(), New(), Later(), Nameless()], ids=lambda decoder: type(decoder).__name__)
@pytest.mark.parametrize("name", ["cache", "past_key_values", "kv_store"])
def test_a_cache_is_found_under_every_name(decoder: nn.Module, name: str) -> None:
    cache, ids = DynamicCache(), tokens(4)
    assert cache_argument(decoder, arguments(decoder, (), {"input_ids": ids, name: cache})) is cache
    assert cache_argument(decoder, arguments(decoder, (ids,), {name: cache})) is cache
    assert cache_argument(decoder, arguments(decoder, (ids,), {name: None})) is None
    assert cache_argument(decoder, arguments(decoder, (ids,), {})) is None


@pytest.mark.parametrize(("decoder", "name"), NAMES, ids=lambda decoder: type(decoder).__name__ if decoder else "")
def test_a_cache_is_found_by_its_place(decoder: nn.Module, name: str) -> None:
    cache = DynamicCache()
    place = list(inspect.signature(decoder.forward).parameters).index(name)
    assert cache_argument(decoder, arguments(decoder, (*[None] * place, cache), {})) is cache


def test_of_two_caches_the_one_under_the_decoders_own_name_counts() -> None:
    one, other = DynamicCache(), DynamicCache()
    for call in ({"past_key_values": one, "cache": other}, {"cache": other, "past_key_values": one}):
        assert cache_argument(Old(), call) is one
        assert cache_argument(New(), call) is other
    assert cache_argument(New(), {"past_key_values": one, "cache": one}) is one
    assert cache_argument(Both(), {"encoder_cache": one, "cache": other}) is other


def test_the_cache_beside_an_encoders() -> None:
    own = DynamicCache()
    both = EncoderDecoderCache(own, DynamicCache())
    assert own_cache(both) is own_cache(own) is own
    for name in ("cache", "past_key_values", "kv_store"):
        assert cache_argument(New(), {name: both}) is own
    assert (
        cache_of_output(BaseModelOutputWithPast(last_hidden_state=torch.zeros(1, 1, 1), **{_released(): both})) is own
    )


def _released() -> str:
    """Return the name of the cache in an output of this release."""
    return cache_parameter(build("llama"))


def test_the_cache_of_an_output() -> None:
    cache, hidden = DynamicCache(), torch.zeros(1, 1, 1)
    name = cache_parameter(build("llama"))  # that of this release
    assert cache_of_output(BaseModelOutputWithPast(last_hidden_state=hidden, **{name: cache})) is cache
    assert cache_of_output((hidden, cache)) is cache
    for nothing in (BaseModelOutputWithPast(last_hidden_state=hidden), (hidden,), hidden, None):
        assert cache_of_output(nothing) is None


@pytest.mark.parametrize("name", ["cache", "past_key_values", "kv_store"])
def test_a_paged_cache_is_told_by_its_type(name: str) -> None:
    blocks, cache = paged(), DynamicCache()
    assert paged_cache({name: blocks}) is blocks
    assert cache_argument(New(), {name: blocks}) is None
    assert paged_cache({name: cache}) is None
    with pytest.raises(LengthError, match=r"paged cache .*fixed_length"):
        rope.patch(build("llama"), "dynamic-ntk")(tokens(8), **{name: blocks})


def test_a_cache_of_an_unknown_class_is_refused() -> None:
    release = re.escape(transformers.__version__)
    for name in ("cache", "past_key_values"):
        with pytest.raises(
            LengthError, match=rf"transformers {release}\) was given a tuple as its {name}.*DynamicCache"
        ):
            cache_argument(New(), {name: ((1, 2),)})

    class Hybrid:
        def get_seq_length(self) -> int:
            return 0

    hybrid = Hybrid()  # as those of hybrid families in transformers 5.0
    assert cache_argument(New(), {"past_key_values": hybrid}) is hybrid


class Placed(nn.Module):
    def forward(self, input_ids: Any = None, cache_position: Any = None, past_key_values: Cache | None = None) -> None:
        """A decoder of transformers 5.0."""


class Counting(DynamicCache):  # type: ignore[misc]
    """A cache that counts three tokens, as a static cache of 5.0 does whose other keys are zero."""

    counted: Any = torch.tensor(3)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        return self.counted


def test_the_tokens_in_a_cache_are_those_before_the_place_that_is_given() -> None:
    cache, call = Counting(), {"cache_position": torch.tensor([5, 6])}
    assert past_length(Placed(), cache, call) == 5
    assert past_length(Placed(), cache, {"cache_position": None}) == 3
    assert past_length(Placed(), None, call) == 0
    assert past_length(Old(), cache, call) == 3  # which does not read it
    cache.counted = 3  # a number, which is right, and known without a wait for the device
    assert past_length(Placed(), cache, call) == 3


# --- by their name, which is checked -------------------------------------------------------------------------------


def renamed(model: Any, old: str, monkeypatch: pytest.MonkeyPatch) -> type[UnsupportedModelError]:
    """Rename an argument in the forward of a model's decoder, as a release of transformers may."""
    decoder_class = type(model.model)
    before = inspect.signature(decoder_class.forward)
    after = [
        parameter.replace(name=f"new_{name}") if name == old else parameter
        for name, parameter in before.parameters.items()
    ]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs = {name.removeprefix("new_"): value for name, value in kwargs.items()}
        return original(self, *args, **kwargs)

    original = decoder_class.forward
    forward.__signature__ = before.replace(parameters=after)  # type: ignore[attr-defined]
    monkeypatch.setattr(decoder_class, "forward", forward)
    return UnsupportedModelError


@pytest.mark.parametrize("method", ["rerope", "dynamic-ntk"])
@pytest.mark.parametrize("name", ["input_ids", "position_ids", "attention_mask"])
def test_a_rename_is_an_error_when_a_model_is_patched(name: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    error = renamed(model, name, monkeypatch)
    with pytest.raises(error, match=rf"LlamaModel \(transformers .*\) takes no {name}.*static method"):
        rope.patch(model, method, factor=4)
    assert not patched_slots(model)
    rope.patch(model, "yarn", factor=4)  # reads nothing but the positions that its module is given


def test_embeddings_under_another_name_are_an_error_at_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    error = renamed(model, "inputs_embeds", monkeypatch)
    rope.patch(model, "dynamic-ntk")
    embedded = model.get_input_embeddings()(tokens(4))
    with torch.no_grad():
        model.model(input_ids=tokens(4))
        with pytest.raises(error, match="takes no inputs_embeds"):
            model.model(new_inputs_embeds=embedded)


def test_the_names_of_a_made_up_decoder() -> None:
    check_names(New())
    for decoder, missing in ((Old(), "position_ids"), (Later(), "position_ids and no attention_mask")):
        with pytest.raises(UnsupportedModelError, match=rf"takes no {missing}, which"):
            check_names(decoder)
    ids, embedded = tokens(4), torch.zeros(1, 4, 8)
    assert new_tokens(New(), {"input_ids": ids, "inputs_embeds": None}) is ids
    assert new_tokens(New(), {"input_ids": None, "inputs_embeds": embedded}) is embedded
    assert new_tokens(New(), {}) is None
    with pytest.raises(UnsupportedModelError, match="takes no inputs_embeds"):
        new_tokens(Later(), {"embeddings": embedded})


def test_a_rename_in_mask_functions_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.masking_utils.sdpa_mask", lambda mask_function, padding_mask, local_size: None)
    with pytest.raises(UnsupportedModelError, match="take no attention_mask"):
        register_attention("rope_ext_hf.test", lambda: None, lambda: None)


# --- every method, with a cache ------------------------------------------------------------------------------------

PROMPT, STEPS = 2 * TRAINED + 2, 20  # no method changes its rule or its profile at a length in between
CACHES: dict[str, Callable[[Any], Cache]] = {
    "dynamic": lambda config: DynamicCache(config=config),
    "static": lambda config: StaticCache(config=config, max_cache_len=PROMPT + STEPS),
}
FOLLOWING = ("dynamic-ntk", "dynamic-yarn")
"""Methods whose frequencies change with each token: states of earlier tokens stay those of fewer tokens, so that in a
model of several layers steps are not one forward."""


def names_of_the_cache() -> list[str]:
    """Return the old name, which works up to transformers 5.39, and the name of this release."""
    return sorted({"past_key_values", cache_parameter(build("llama"))})


@pytest.mark.parametrize("name", names_of_the_cache())
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("method", rope.list_methods())
@pytest.mark.sampled(7)
def test_steps_with_a_cache_equal_one_forward(method: str, kind: str, name: str) -> None:
    model = build("llama", num_hidden_layers=1 if method in FOLLOWING else 2)
    rope.patch(model, example_method(rope.list_methods()[method], ModelRope.of_model(model).rotary))
    ids = tokens(PROMPT + STEPS, batch=2)
    cache = CACHES[kind](model.config)
    with torch.no_grad():
        expected = model(ids).logits[:, PROMPT:]
        model(ids[:, :PROMPT], **{name: cache})
        steps = [model(ids[:, at : at + 1], **{name: cache}).logits for at in range(PROMPT, PROMPT + STEPS)]
    if method in FOLLOWING:
        expected, steps = expected[:, -1:], steps[-1:]  # the frequencies are those of all tokens
    torch.testing.assert_close(torch.cat(steps, 1), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("method", ["dynamic-ntk", "dynamic-yarn", "rerope"])
def test_no_own_call_uses_a_deprecated_name(method: str) -> None:
    model = rope.patch(build("llama"), method)
    name = cache_parameter(model)
    ids = tokens(TRAINED + 8)
    with torch.no_grad():
        cache = cache_of_output(model(ids[:, : TRAINED + 4], use_cache=True))
        model(ids[:, TRAINED + 4 :], **{name: cache})
        model.generate(ids[:, :4], max_new_tokens=4, do_sample=False, pad_token_id=0)
