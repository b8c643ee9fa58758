"""Find the arguments of a decoder's forward, by their type wherever that is possible.

transformers renames arguments: what was `past_key_values` up to 5.23 is `cache` from 5.24 on, and until 5.40 a decoder
may be called by either name. Code that looks for an argument under its old name would find nothing, and no error
would say so. Therefore each argument is either found by its type, or its name is checked when a model is patched:

| argument | found by | if it is renamed |
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
from collections.abc import Iterable, Mapping
from typing import Any, ForwardRef, get_args

from torch import Tensor, nn

from rope_ext_hf.errors import LengthError, UnsupportedModelError, listed

_CACHE_NAMES = ("cache", "past_key_values")
"""Names of the cache that transformers has used, the newest first."""
_TOKEN_NAMES = ("input_ids", "inputs_embeds")
_READ_BY_NAME = ("input_ids", "position_ids", "attention_mask")
_PAGED = "transformers.generation.continuous_batching.cache", "PagedAttentionCache"


def takes_tokens(module: nn.Module) -> bool:
    """Return whether a module's forward takes token ids or embeddings, as those of decoders do."""
    parameters = inspect.signature(type(module).forward).parameters
    # The layers of DeepSeek V4 take `input_ids` beside their hidden states.
    return not set(_TOKEN_NAMES).isdisjoint(parameters) and "hidden_states" not in parameters


def is_of_transformers(module: nn.Module) -> bool:
    """Return whether the forward of a module is code of transformers, and not of a class of somebody's own."""
    return package_of_forward(module) == "transformers"


def package_of_forward(module: nn.Module) -> str:
    """Return the name of the package that defines the forward of a module."""
    defined_in = next(kind for kind in type(module).__mro__ if "forward" in vars(kind))
    return defined_in.__module__.partition(".")[0]


def check_names(decoder: nn.Module) -> None:
    """Check that a decoder's forward has every argument that is read by its name; else raise UnsupportedModelError.

    `inputs_embeds` is left out, because some families take ids alone (ESM C, DiffusionGemma).
    """
    parameters = inspect.signature(type(decoder).forward).parameters
    missing = [name for name in _READ_BY_NAME if name not in parameters]
    if missing:
        raise _renamed(decoder, *missing)


def _renamed(decoder: nn.Module, *missing: str) -> UnsupportedModelError:
    """Return the error for a decoder that lacks arguments which it should have."""
    if not is_of_transformers(decoder):
        return UnsupportedModelError(
            f"the forward of {type(decoder).__name__} takes no {' and no '.join(missing)}, which length-dependent and "
            f"remapping methods read: give it {listed(_READ_BY_NAME)} (docs/own-models.md), or use a static method "
            "(yarn, ntk, linear, ...)"
        )
    return UnsupportedModelError(
        f"{_class_and_release(decoder)} takes no {' and no '.join(missing)}, which length-dependent and remapping "
        "methods read; this release may have given it another name. Use a static method (yarn, ntk, linear, ...), or "
        "another release of transformers"
    )


def arguments(decoder: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments of a call by name; those given by position get the names of the decoder's forward."""
    if not args:
        return kwargs
    by_position: dict[str, Any] = inspect.signature(type(decoder).forward).bind_partial(decoder, *args).arguments
    return {**by_position, **kwargs}


def new_tokens(decoder: nn.Module, call: Mapping[str, Any]) -> Tensor | None:
    """Return the token ids (rows, tokens) or embeddings (rows, tokens, hidden size) of a call; None: it has neither.

    Raises:
        UnsupportedModelError: it has neither, and embeddings may have another name in this release.
    """
    for name in _TOKEN_NAMES:
        if call.get(name) is not None:
            tokens: Tensor = call[name]
            return tokens
    if "inputs_embeds" not in inspect.signature(type(decoder).forward).parameters:
        raise _renamed(decoder, "inputs_embeds")
    return None


def cache_argument(decoder: nn.Module, call: Mapping[str, Any]) -> Any:
    """Return the cache of the decoder's own tokens in the arguments of a call, whatever its name; None: it has none.

    Where a call has several, as under the old and the new name at once, the decoder uses the one under the name that it
    takes itself, and so does this function.

    Raises:
        LengthError: the cache is of a class whose contents are not known.
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


def past_length(decoder: nn.Module, cache: Any, call: Mapping[str, Any]) -> int:
    """Return the number of tokens that the cache of a call holds, see `cache_argument`; 0 if the call has no cache.

    In 5.0 a static cache counts its keys that are not zero, and so leaves out tokens with a zero embedding, such as
    padding. Its decoders store new keys at the places that `generate` names in `cache_position`: the first of them is
    the number that is wanted.
    """
    if cache is None:
        return 0
    length, places = cache.get_seq_length(), call.get("cache_position")
    if isinstance(length, Tensor) and isinstance(places, Tensor):
        named = "cache_position" in inspect.signature(type(decoder).forward).parameters
        length = places[0] if named else length
    return int(length)


def paged_cache(call: Mapping[str, Any]) -> Any:
    """Return the paged cache of continuous batching in the arguments of a call; None: it has none."""
    return next((value for value in call.values() if _is_paged(value)), None)


def _is_paged(value: Any) -> bool:
    """Return whether a value is the cache of continuous batching."""
    module, name = _PAGED
    paged_class = getattr(sys.modules.get(module), name, None)  # without an import: no such value exists before it
    return paged_class is not None and isinstance(value, paged_class)


def cache_of_output(output: Any) -> Any:
    """Return the cache of the decoder's own tokens in an output of its forward; None: there is none."""
    from transformers.cache_utils import Cache

    values: Iterable[Any] = ()
    if isinstance(output, Mapping):
        values = output.values()
    elif isinstance(output, tuple):
        values = output
    return own_cache(next((value for value in values if isinstance(value, Cache)), None))


def own_cache(cache: Any) -> Any:
    """Return the cache of the decoder's own tokens, taken from a cache that may hold an encoder's keys too."""
    return getattr(cache, "self_attention_cache", cache)


def cache_parameter(*modules: nn.Module) -> str:
    """Return the name of the argument that takes the cache, from the first of these modules that has one.

    A wrapper such as PEFT's takes `**kwargs` and passes them on, so the modules inside are given after it.

    Raises:
        UnsupportedModelError: none of them has one.
    """
    for module in modules:
        forward = type(module).forward
        parameters = inspect.signature(forward).parameters
        names = getattr(inspect.unwrap(forward), "__globals__", {})
        annotated = [name for name, parameter in parameters.items() if _holds_cache(parameter.annotation, names)]
        named = [name for name in _CACHE_NAMES if name in parameters]
        # An encoder's cache may stand beside the decoder's, so a known name counts before the order of the arguments.
        best = [name for name in named if name in annotated] + annotated + named
        if best:
            return best[0]
    own_class = not is_of_transformers(modules[0])
    raise UnsupportedModelError(
        f"the forward of {_class_and_release(modules[0])} has no argument that holds a Cache, nor one of the names "
        f"{' and '.join(_CACHE_NAMES)}; "
        + ("give it one (docs/own-models.md)" if own_class else "use another release of transformers")
    )


def _holds_cache(annotation: Any, names: Mapping[str, Any]) -> bool:
    """Return whether the annotation of an argument, or a part of it, is a class of caches.

    `names`: the global names of the module with the annotation, which may be a string of such names.
    """
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
