"""The arguments of a decoder's forward, found by what they are wherever that is possible.

transformers renames arguments: what was `past_key_values` up to 5.23 is `cache` from 5.24 on, and until 5.40 a decoder
may be called by either name. An argument that a hook misses under its new name would be missed in silence, so each is
either found by its type, or its name is checked when a model is patched:

| argument | found by | a rename is noticed |
| --- | --- | --- |
| cache of keys and values | a value that is a `Cache` | it does not matter |
| the same in our own calls | an annotation that holds a `Cache`, then the known names | error at the call |
| the same in an output | a value that is a `Cache` | it does not matter |
| paged cache of continuous batching | a value that is a `PagedAttentionCache` | error at the call |
| cache beside an encoder's | the `self_attention_cache` of a value | error at the call: both together have no layers |
| `input_ids` | name | error at the patch |
| `inputs_embeds` | name | error at a call without `input_ids` |
| `position_ids` | name | error at the patch |
| `attention_mask` | name | error at the patch |
| `use_cache` in our own calls | name | it does not matter: where no cache is returned, one is given |
| `output_attentions` | name | the caller gets None in place of weights |
| `cache_position` (5.0) | name, where the decoder takes it | it does not matter: caches have a length |

The arguments of mask functions are checked in attention_interface.py.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Mapping
from typing import Any, ForwardRef, get_args

from torch import Tensor, nn

from rope_ext_hf.errors import LengthError, UnsupportedModelError

_CACHE_NAMES = ("cache", "past_key_values")
"""Names of the cache that transformers has used, the newest first."""
_TOKEN_NAMES = ("input_ids", "inputs_embeds")
_READ_BY_NAME = ("input_ids", "position_ids", "attention_mask")
_PAGED = "transformers.generation.continuous_batching.cache", "PagedAttentionCache"


def takes_tokens(module: nn.Module) -> bool:
    """Whether a module's forward takes ids or embeddings, as decoders do; DeepSeek V4's layers take both kinds."""
    parameters = inspect.signature(type(module).forward).parameters
    return not set(_TOKEN_NAMES).isdisjoint(parameters) and "hidden_states" not in parameters


def check_names(decoder: nn.Module) -> None:
    """Check that a decoder's forward has every argument that is read by its name; else UnsupportedModelError.

    Not `inputs_embeds`: some families take ids alone (ESM C, DiffusionGemma).
    """
    parameters = inspect.signature(type(decoder).forward).parameters
    missing = [name for name in _READ_BY_NAME if name not in parameters]
    if missing:
        raise _renamed(decoder, *missing)


def _renamed(decoder: nn.Module, *missing: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{_class_and_release(decoder)} takes no {' and no '.join(missing)}, which length-dependent and remapping "
        "methods read; this release may have given it another name. Use a static method (yarn, ntk, linear, ...), or "
        "another release of transformers"
    )


def arguments(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mapping[str, Any]:
    """The arguments of a call by name; those given by position have the names of the decoder's forward."""
    if not args:
        return kwargs
    by_position: dict[str, Any] = inspect.signature(type(decoder).forward).bind_partial(decoder, *args).arguments
    return {**by_position, **kwargs}


def new_tokens(decoder: nn.Module, call: Mapping[str, Any]) -> Tensor | None:
    """The ids (rows, tokens) or embeddings (rows, tokens, hidden size) of a call; None: it has neither."""
    for name in _TOKEN_NAMES:
        if call.get(name) is not None:
            tokens: Tensor = call[name]
            return tokens
    if "inputs_embeds" not in inspect.signature(type(decoder).forward).parameters:  # they may have another name
        raise _renamed(decoder, "inputs_embeds")
    return None


def cache_argument(decoder: nn.Module, call: Mapping[str, Any]) -> Any:
    """The cache of the decoder's own tokens in the arguments of a call, whatever its name; None: no such cache.

    Where several are given, as under the old and the new name at once, the decoder uses the one under its own name.
    """
    from transformers.cache_utils import Cache

    caches = [value for value in call.values() if isinstance(value, Cache) and not _is_paged(value)]
    if any(cache is not caches[0] for cache in caches):
        named = call.get(cache_parameter(decoder))
        caches = [cache for cache in caches if cache is named] or caches
    if caches:
        return own_cache(caches[0])
    for name in _CACHE_NAMES:
        cache = call.get(name)
        if cache is None or _is_paged(cache):
            continue
        if not hasattr(cache, "get_seq_length"):  # hybrid families of 5.0 have caches of other classes
            raise LengthError(
                f"{_class_and_release(decoder)} was given a {type(cache).__name__} as its {name}, and what such a "
                "cache holds is not known: give a Cache of transformers, such as DynamicCache(config=model.config)"
            )
        return cache
    return None


def past_length(decoder: nn.Module, call: Mapping[str, Any]) -> int:
    """Return the number of tokens that the cache of a call holds; 0 if the call has no cache.

    In 5.0 the length of a static cache is the number of its keys that are not zero, which leaves out tokens with a zero
    embedding, such as padding; its decoders store keys at the places that `generate` names.
    """
    cache = cache_argument(decoder, call)
    if cache is None:
        return 0
    length, places = cache.get_seq_length(), call.get("cache_position")
    if isinstance(length, Tensor) and isinstance(places, Tensor):
        named = "cache_position" in inspect.signature(type(decoder).forward).parameters
        length = places[0] if named else length
    return int(length)


def paged_cache(call: Mapping[str, Any]) -> Any:
    """The paged cache of continuous batching in the arguments of a call; None: it has none."""
    return next((value for value in call.values() if _is_paged(value)), None)


def _is_paged(value: Any) -> bool:
    """Whether a value is the cache of continuous batching; none exists before transformers has imported its class."""
    module, name = _PAGED
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)


def cache_of_output(output: Any) -> Any:
    """The cache of the decoder's own tokens in what its forward returned; None: it returned none."""
    from transformers.cache_utils import Cache

    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple) else ()
    return own_cache(next((value for value in values if isinstance(value, Cache)), None))


def own_cache(cache: Any) -> Any:
    """The cache of a decoder's own tokens, where it is given together with that of an encoder's."""
    return getattr(cache, "self_attention_cache", cache)


def cache_parameter(*modules: nn.Module) -> str:
    """The name of the cache among the arguments of the first of these modules that names one.

    A wrapper such as PEFT's passes all on by keyword, and takes the name that the decoder inside takes.
    """
    for module in modules:
        forward = type(module).forward
        parameters = inspect.signature(forward).parameters
        names = getattr(inspect.unwrap(forward), "__globals__", {})
        annotated = [name for name, each in parameters.items() if _holds_cache(each.annotation, names)]
        named = [name for name in _CACHE_NAMES if name in parameters]
        # An encoder's cache may stand beside the decoder's, so a known name counts before the order of the arguments.
        best = [name for name in named if name in annotated] + annotated + named
        if best:
            return best[0]
    raise UnsupportedModelError(
        f"the forward of {_class_and_release(modules[0])} has no argument that holds a Cache, nor one of the names "
        f"{' and '.join(_CACHE_NAMES)}; use another release of transformers"
    )


def _holds_cache(annotation: Any, names: Mapping[str, Any]) -> bool:
    """Whether an annotation, or a part of it, is a class of caches; words of a text are looked up in `names`."""
    from transformers.cache_utils import Cache

    if isinstance(annotation, ForwardRef):
        annotation = annotation.__forward_arg__
    if isinstance(annotation, str):
        words = re.findall(r"\w+", annotation)
        # A name that is imported for type checkers alone cannot be looked up.
        return any(_holds_cache(names[word], {}) if word in names else word == Cache.__name__ for word in words)
    if isinstance(annotation, type) and issubclass(annotation, Cache):
        return True
    return any(_holds_cache(part, names) for part in get_args(annotation))


def _class_and_release(module: nn.Module) -> str:
    from transformers import __version__

    return f"{type(module).__name__} (transformers {__version__})"
