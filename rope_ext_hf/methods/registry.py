"""The registry of methods: registering one, finding it by name, and making it from what a user or a file states."""

from __future__ import annotations

import difflib
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, fields
from functools import cache
from typing import Any, TypeVar

from rope_ext_hf.bounds import MOST_TOKENS, Length, check_int, limit, parse_length
from rope_ext_hf.errors import MethodError, RopeExtError, did_you_mean
from rope_ext_hf.methods.base import Frequencies, RopeMethod, Rotary, TrainedScaling
from rope_ext_hf.methods.parameters import is_number
from rope_ext_hf.options.method_choice import folded, unknown_method
from rope_ext_hf.plug_ins import plug_in, plug_in_names

__all__ = [
    "class_of",
    "frequencies",
    "list_methods",
    "method_class",
    "register_method",
    "registered_name",
    "resolve_method",
    "stated_length",
]

_METHODS: dict[str, type[RopeMethod]] = {}
_ALIASES: dict[str, tuple[str, dict[str, Any]]] = {}
"""The method that another name stands for, and the parameters that the name implies."""
_S = TypeVar("_S", bound=RopeMethod)


def register_method(
    name: str, *, aliases: Iterable[str] | Mapping[str, Mapping[str, Any]] = ()
) -> Callable[[type[_S]], type[_S]]:
    """Return a decorator that registers a method class under its name.

    Args:
        name: the name of the method.
        aliases: other names of it; as a mapping, each with the parameters that it implies.

    Raises:
        TypeError: a name that another method has; case, hyphens, underscores and spaces make no difference.
    """
    implied: Mapping[str, Mapping[str, Any]] = aliases if isinstance(aliases, Mapping) else {key: {} for key in aliases}

    def register(cls: type[_S]) -> type[_S]:
        for new in (name, *implied):
            if _spelling(new) is not None:
                raise TypeError(f"the method name {new!r} is taken")
        cls.name, cls.aliases = name, implied
        cls.parameters = {item.name: item for item in fields(cls)}
        _METHODS[name] = cls
        _ALIASES.update({alias: (name, dict(values)) for alias, values in implied.items()})
        return cls

    return register


def registered_name(name: str) -> str:
    """Return the registered spelling of a method's name or alias; a name that no method has comes back as it is."""
    registered = _spelling(name)
    if registered is None:
        _load_plug_ins()
        registered = _spelling(name)
    return name if registered is None else registered


def _spelling(name: str) -> str | None:
    """Return the registered spelling of the name or alias of a method; None: no such name is registered so far.

    Case, hyphens, underscores and spaces make no difference.
    """
    return next((known for known in (*_METHODS, *_ALIASES) if folded(known) == folded(name)), None)


@cache
def _load_plug_ins() -> None:
    """Load the methods that other packages add. If one cannot be loaded, warn, and go on with the others."""
    for name in plug_in_names("methods"):
        try:
            plug_in("methods", name)
        except RopeExtError as error:
            warnings.warn(f"the method {error}", stacklevel=2)


def method_class(name: str) -> type[RopeMethod]:
    """Return the class of a method by its name or alias; raise UnknownMethodError where no method has it."""
    return _find(name)[0]


def class_of(method: str | RopeMethod | Mapping[str, Any]) -> type[RopeMethod]:
    """Return the class of a method that a user gives as `resolve_method` takes it.

    Raises:
        MethodError: no method has the name, or settings name none.
        TypeError: anything else.
    """
    if isinstance(method, RopeMethod):
        return type(method)
    if isinstance(method, (str, Mapping)):
        return method_class(method if isinstance(method, str) else _name_in(method))
    raise _not_a_method(method)


def _not_a_method(argument: object) -> TypeError:
    return TypeError(
        f"method must be a name, a method object, or a dict with a rope_type, got {type(argument).__name__}"
    )


def list_methods() -> dict[str, type[RopeMethod]]:
    """Return all method classes by their names; those from other packages come last."""
    _load_plug_ins()
    return dict(_METHODS)


def resolve_method(
    method: str | RopeMethod | Mapping[str, Any],
    rotary: Rotary | None,
    *,
    factor: float | None = None,
    target_length: Length | None = None,
    **params: Any,
) -> RopeMethod:
    """Return the method that a user names: by its name and parameters, or as a method object without parameters.

    Args:
        method: a name of `list_methods()` or an alias of one ("NTK-aware", "dynamic"), in any case and with any
            separators, or a method object, or the rope settings of a config: {"rope_type": "yarn", "factor": 4}.
        rotary: the rotary embedding of the model, with which target_length becomes a factor and parameters are checked;
            None: it is not known yet.
        factor: the extended length as a multiple of the context length. A method without a factor is not changed by it.
        target_length: the extended length in tokens. A method without a factor is not changed by it.
        **params: the other parameters of the method. If one of them is itself a method ("frequency" of remapping
            methods), also the parameters of that method.

    Raises:
        MethodError: unknown name or parameter (with the nearest one), both factor and target_length, or a value the
            method cannot work with.
        TypeError: parameters beside a method object.
    """
    if isinstance(method, Mapping):
        method, stated = _from_rope_settings(method, rotary, [*params, *(["factor"] if factor is not None else [])])
        factor = stated.pop("factor", factor)
        params |= stated
    if isinstance(method, RopeMethod):
        _check_alone(method, {"factor": factor, "target_length": target_length} | params)
        resolved = method
    elif isinstance(method, str):
        resolved = _from_name(method, rotary, factor, parse_length(target_length), params)
    else:
        raise _not_a_method(method)
    if rotary is not None:
        resolved.check_all(rotary)
    return resolved


def _from_rope_settings(
    settings: Mapping[str, Any], rotary: Rotary | None, given_beside: Collection[str]
) -> tuple[str, dict[str, Any]]:
    """Return the name and the parameters of the method that the rope settings of a config state.

    Every key is used or refused. Those that describe the model, and not the method, have to agree with the model.
    """
    name = _name_in(settings)
    parameters = {key: value for key, value in settings.items() if value is not None and key not in _NAME_KEYS}
    twice = sorted(parameters.keys() & set(given_beside))
    if twice:
        raise MethodError(f"{', '.join(twice)} is given in the settings and beside them; give it once")
    of_model = {} if rotary is None else {"rope_theta": rotary.theta, _ORIGINAL: rotary.context_length}
    for key, value in of_model.items():
        stated = parameters.pop(key, value)
        if stated != value:
            advice = "give context_length as well" if key == _ORIGINAL else "use the method 'theta' for another base"
            raise MethodError(f"the settings state {key}={stated}, and this model has {value:g}: {advice}")
    return name, parameters


def _name_in(settings: Mapping[str, Any]) -> str:
    """Return the name of the method that rope settings state; raise MethodError if they state none, or several."""
    names = {settings[key] for key in _NAME_KEYS if settings.get(key) is not None}
    if len(names) != 1:
        raise MethodError(f"the settings must name one method, as in {{'rope_type': 'yarn'}}; got {dict(settings)}")
    return str(names.pop())


_NAME_KEYS = ("rope_type", "type", "method")
_ORIGINAL = "original_max_position_embeddings"


def _check_alone(method: RopeMethod, beside: Mapping[str, Any]) -> None:
    extra = sorted(key for key, value in beside.items() if value is not None)
    if extra:
        raise TypeError(f"{', '.join(extra)} given beside a {type(method).__name__} object; put it into the object")


def _from_name(
    method: str, rotary: Rotary | None, factor: float | None, target_length: int | None, params: Mapping[str, Any]
) -> RopeMethod:
    cls, implied = _find(method)
    values = {**implied, **params}
    inner = cls.method_parameter()
    if inner is not None and isinstance(values.get(inner), str):
        # The parameters that this method lacks are those of the inner one, and both may have the factor.
        of_inner = {key: values.pop(key) for key in list(values) if key not in cls.parameters}
        shared = cls.takes_factor(values)
        if shared and factor is None and target_length is not None:
            factor, target_length = _factor_for(rotary, target_length), None
        values[inner] = resolve_method(values[inner], rotary, factor=factor, **of_inner)
        if not shared:
            factor = None
    elif inner is not None and isinstance(values.get(inner), Mapping):
        values[inner] = method_from_dict(values[inner])
    _check_known(cls.name, values, cls.parameters)
    if factor is not None and target_length is not None:
        raise MethodError(f"factor={factor} and target_length={target_length} both state the extended length; give one")
    if target_length is not None:
        factor = _factor_for(rotary, target_length)
    if factor is not None and cls.takes_factor(values):
        values["factor"] = float(factor) if is_number(factor) else factor
    elif factor is not None and target_length is None and not (is_number(factor) and 1 <= factor <= MOST_TOKENS):
        raise MethodError(
            f"{cls.name}: factor must be a number of at least 1 and at most {MOST_TOKENS:,}, got {factor!r}"
        )
    missing = [key for key, item in cls.parameters.items() if item.default is MISSING and key not in values]
    if missing:
        hint = " (or target_length)" if "factor" in missing else ""
        raise MethodError(f"{cls.name} needs {', '.join(missing)}{hint}")
    return cls(**values)


def split_parameters(
    method: str | RopeMethod | Mapping[str, Any] | None, arguments: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divide keyword arguments into the parameters of methods and all others.

    Methods of other packages count once they were named: loading takes no plug-in that nobody has asked for.

    An argument that looks like a misspelt parameter of `method` counts as a parameter.

    Raises:
        MethodError: an argument is a parameter of other methods, but not of `method`.
    """
    cls = _find(method)[0] if isinstance(method, str) else None
    own = () if cls is None else [*cls.parameters]
    known = {name for registered in _METHODS.values() for name in registered.parameters}
    misspelt = [key for key in arguments if method is not None and key in _MEANT]
    misspelt += [key for key in arguments if difflib.get_close_matches(key, own, n=1, cutoff=0.8)]
    params = {key: value for key, value in arguments.items() if key in known or key in misspelt}
    if cls is not None and own and cls.method_parameter() is None:  # else they may be those of the inner method
        _check_known(cls.name, params, own)
    return params, {key: value for key, value in arguments.items() if key not in params}


def _check_known(name: str, keys: Iterable[str], accepted: Collection[str]) -> None:
    """Raise MethodError if a key is not one of the accepted parameters of the method."""
    for key in keys:
        if key not in accepted:
            parameters = ", ".join(["factor", "target_length", *(k for k in accepted if k != "factor")])
            hint = f" Did you mean {_MEANT[key]!r}?" if key in _MEANT else did_you_mean(key, accepted)
            raise MethodError(f"{name} has no parameter {key!r}.{hint} It takes: {parameters}")


_MEANT = {"scale": "factor", "scaling_factor": "factor", "max_length": "target_length", "length": "target_length"}
"""Names by which other programs call the factor and the extended length."""


def _find(method: str) -> tuple[type[RopeMethod], dict[str, Any]]:
    """Return the method class for a name or alias, and the parameters that the alias implies."""
    if method in _METHODS:
        return _METHODS[method], {}
    registered = registered_name(method)
    name, implied = _ALIASES.get(registered, (registered, {}))
    if name not in _METHODS:
        raise unknown_method(method, [*list_methods(), *_ALIASES])
    return _METHODS[name], implied


def accepts_factor(name: str) -> bool:
    """Return whether the method of this name takes a factor when its other parameters have their default values."""
    registered = registered_name(name)
    name, implied = _ALIASES.get(registered, (registered, {}))
    return name in _METHODS and _METHODS[name].takes_factor(implied)


def _factor_for(rotary: Rotary | None, target_length: int) -> float:
    """Return the factor that extends a model to `target_length` tokens, a multiple of its context length."""
    check_int("target_length", target_length, least=-math.inf)
    if rotary is None:
        raise MethodError("target_length needs a model or a Rotary to be measured against; give factor")
    if target_length < (context_length := rotary.context_length):
        raise MethodError(
            f"target_length={target_length} is below the context length {context_length}: nothing to extend"
        )
    return target_length / context_length


def stated_length(method: RopeMethod, rotary: Rotary, factor: float | None) -> int | None:
    """Return the extended length in tokens that `factor` implies for a method without a factor of its own.

    None if no factor was given, or if the method, or the frequency method inside it, has a parameter for the factor.
    """
    if factor is None or any(getattr(method, name, None) is not None for name in ("factor", "frequency")):
        return None
    return round(factor * rotary.context_length)


def method_from_dict(saved: Mapping[str, Any]) -> RopeMethod:
    """Return the method that `RopeMethod.to_dict` turned into this dictionary."""
    values = dict(saved)
    if not isinstance(name := values.pop("method", None), str):
        raise MethodError(f"no method in {dict(saved)}")
    return resolve_method(name, None, **values)


def rotary_from_dict(saved: Mapping[str, Any]) -> Rotary:
    """Return the rotary embedding that `Rotary.to_dict` turned into this dictionary.

    Raises:
        MethodError: the dictionary holds anything else.
    """
    try:
        values = dict(saved)
        own = values.pop("own", None)
        _check_whole(values, dim=limit("head_dim"), trained_length=MOST_TOKENS, rotated_pairs=limit("head_dim"))
        rotary = Rotary(**values)
        if own is None:
            return rotary
        _check_whole(own, context_length=MOST_TOKENS)
        underneath = rotary_from_dict(own["rotary"])
        scaling = TrainedScaling(method_from_dict(own["method"]), underneath, own["context_length"])
        return Rotary(*rotary.plain_geometry, own=scaling)
    except (KeyError, TypeError, ValueError) as error:
        raise MethodError(f"not a saved rotary embedding: {error!r}") from error


def _check_whole(saved: Mapping[str, Any], **most: int) -> None:
    """Raise MethodError if a saved value is not a whole number between 0 and its limit.

    `most` has the limit for each key that is checked; a key may be missing from `saved`.
    """
    for key, limit_ in most.items():
        value = saved.get(key)
        if value is not None:
            check_int(f"not a saved rotary embedding: {key}", value, 0, limit_)


def frequencies(
    method: str | RopeMethod, rotary: Rotary, *, length: Length | None = None, **params: Any
) -> Frequencies:
    """Return the frequencies of a method, without a model.

    Args:
        method: a name of `list_methods()`, or a method object.
        rotary: the rotary embedding that the method is applied to.
        length: tokens in the input, for length-dependent methods; None: the context length.
        **params: the method's parameters, `factor` or `target_length` among them.

    Raises:
        MethodError: see `resolve_method`.
    """
    return resolve_method(method, rotary, **params).frequencies(rotary, parse_length(length))
