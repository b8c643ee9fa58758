"""families.toml: its loader refuses what it does not know, and every pairing in it is what transformers computes."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import rope_ext_hf as rope
from rope_ext_hf.models.families import (
    KV_HEADS,
    ConfigNumber,
    Family,
    ModuleRows,
    choose,
    families,
    families_toml,
    family,
    parse_families,
)
from tests.support import every_model
from tests.support.models import (
    FAMILIES,
    PAIRINGS,
    ROTATING,
    TRAINED,
    WITH_A_CLASS,
    build,
    known_config,
    modeling,
    static_cases,
)
from tests.support.tiers import needs_family

DIM = 8

# --- the loader ---------------------------------------------------------------------------------------------------


def test_reads_tables_in_order() -> None:
    text = """
        [one]
        pairing = "half"
        rope_types = ["default", "longrope"]

        [two]
        like = "one"
        pairing = "interleaved"

        [three]
        like = "two"
        softmax_mscale = true

        [four]
    """
    read = parse_families(text)
    assert list(read) == ["one", "two", "three", "four"]
    assert read["one"] == Family(pairing="half", rope_types=["default", "longrope"])
    assert read["two"] == Family(pairing="interleaved", rope_types=["default", "longrope"])
    assert read["three"] == Family(pairing="interleaved", rope_types=["default", "longrope"], softmax_mscale=True)
    assert read["four"] == Family()


def test_reads_rows_and_numbers() -> None:
    read = parse_families("""
        [one.rotated]
        plain = ["q"]
        fused = { blocks = ["q", "k", "v"], repeat = "num_key_value_heads" }
        several = [{ blocks = ["k"], repeat = 2, when = "outer.inner" }, { blocks = ["q"] }]

        [one.config_keys]
        head_dim = "kv_channels"
        rope_theta = 10000
        rotary_dim = { product = [0.5, "kv_channels"] }
        num_key_value_heads = [{ product = ["groups"], when = "grouped" }, 1]
    """)["one"]
    assert read.rotated == {
        "plain": [ModuleRows(blocks=["q"])],
        "fused": [ModuleRows(blocks=["q", "k", "v"], repeat="num_key_value_heads")],
        "several": [ModuleRows(blocks=["k"], repeat=2, when="outer.inner"), ModuleRows(blocks=["q"])],
    }
    assert read.config_keys == {
        "head_dim": [ConfigNumber(product=["kv_channels"])],
        "rope_theta": [ConfigNumber(product=[10000])],
        "rotary_dim": [ConfigNumber(product=[0.5, "kv_channels"])],
        "num_key_value_heads": [ConfigNumber(product=["groups"], when="grouped"), ConfigNumber(product=[1])],
    }
    assert choose(read.rotated["several"], {"outer": {"inner": True}}).blocks == ["k"]
    for other in ({}, {"outer": None}, {"outer": {"inner": False}}):
        assert choose(read.rotated["several"], other).blocks == ["q"]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ('pairng = "half"', "pairng"),
        ("head_dim = 64", "head_dim"),
        ('like = "nobody"', "nobody"),
        ("like = 3", "3"),
        ('pairing = "both"', "both"),
        ("pairing = 1", "1"),
        ('pairing = ""', "''"),
        ("rope_types = 3", "rope_types.*expected a list, got int"),
        ('rope_types = "longrope"', "longrope"),
        ("rope_types = [1]", "rope_types"),
        ("softmax_mscale = 1", "1"),
        ("pairing_switch = 3", "pairing_switch.*expected str, got int"),
        ('unrotated = "a"', "unrotated.*expected a list, got str"),
        ("rotated = 3", "'int' object has no attribute 'items'"),
        ("rotated = { a = 3 }", "blocks.*expected a list, got int"),
        ('rotated = { a = "q" }', "blocks.*expected a list, got str"),
        ('rotated = { a = ["q", 3] }', "Invalid item at index 1 in list 'blocks'"),
        ("rotated = { a = { repeat = 4 } }", "missing .* 'blocks'"),
        ('rotated = { a = { blocks = ["q"], repeat = "heads" } }', "repeat.*'num_key_value_heads'.*heads"),
        ('rotated = { a = { blocks = ["q"], times = 4 } }', "unexpected keyword argument 'times'"),
        ('config_keys = "head_dim"', "'str' object has no attribute 'items'"),
        ("config_keys = { head_dim = [] }", "product"),
        ("config_keys = { head_dim = {} }", "missing .* 'product'"),
        ("config_keys = { head_dim = { sum = [1] } }", "unexpected keyword argument 'sum'"),
        ("attention = true", "attention.*expected str, got bool"),
        ("rope_labels = {}", "rope_labels"),
    ],
)
def test_refuses_what_it_does_not_know(table: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parse_families(f'[fine]\npairing = "half"\n\n[wrong]\n{table}\n\n[later]\n')
    assert "[wrong]" in str(caught.value)


def test_a_family_that_is_not_in_the_table_has_nothing_special() -> None:
    assert "no_such_model" not in families()
    assert family("no_such_model") == Family()


# --- the entries --------------------------------------------------------------------------------------------------

CONFIG_KEYS = (
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "index_n_heads", "index_head_dim"),
    *("rotary_dim", "rope_theta", "max_position_embeddings"),
)
"""The numbers that the package reads by the keys of a family."""


@pytest.mark.parametrize("entry", families())
def test_the_values_of_a_table_are_possible_ones(entry: str) -> None:
    known, names = family(entry), list(families_toml())
    assert "like" not in families_toml()[entry] or families_toml()[entry]["like"] in names[: names.index(entry)], (
        "`like`: one above"
    )
    assert known.config_keys.keys() <= {*CONFIG_KEYS}
    every: dict[str, Any] = {**known.rotated, **known.config_keys}
    for name, alternatives in every.items():
        conditions = [alternative.when for alternative in alternatives]
        assert conditions[-1] is None, f"{name}: the last alternative must not have `when`"
        assert None not in conditions[:-1], f"{name}: every alternative but the last must have `when`"
    for rows in chain.from_iterable(known.rotated.values()):
        assert rows.blocks
        assert rows.repeat == KV_HEADS or int(rows.repeat) > 0
    for number in chain.from_iterable(known.config_keys.values()):
        assert number.product
        assert all(isinstance(factor, str) or 0 < factor < float("inf") for factor in number.product)
    if known.attention is not None:
        assert re.fullmatch(r"\w+\.\{\}\.\w+", known.attention), "like 'layers.{}.self_attention'"
        assert known.rotated, "no class is there to be probed for the rows that rotate"
    if known.remote:
        assert known.attention is not None
        assert "rotary_dim" in known.config_keys, "there is no model from which it could be read"


def rotation(model_type: str) -> Callable[[Tensor], Tensor]:
    """Return the function of a family that rotates x (batch, heads, length, DIM), each pair by an angle of its own.

    cos and sin are arranged as the rotary module of the family gives them.
    """
    module = modeling(model_type)
    angle = torch.linspace(0.3, 1.2, DIM // 2).view(1, 1, -1)

    if model_type == "roformer":  # a method of its attention, which takes a row of its table
        attention, row = module.RoFormerSelfAttention, torch.cat((angle.sin(), angle.cos()), -1)
        return lambda x: attention.apply_rotary_position_embeddings(row, x, x)[0]

    if hasattr(module, "apply_rotary_emb") and not hasattr(module, "apply_rotary_pos_emb"):
        turn = torch.polar(torch.ones_like(angle), angle)
        if model_type == "llama4_text":  # wants (batch, length, heads, dim)
            return lambda x: module.apply_rotary_emb(x.transpose(1, 2), x.transpose(1, 2), turn)[0].transpose(1, 2)
        return lambda x: module.apply_rotary_emb(x, x, turn)[0]

    config = known_config(model_type)
    name = "apply_rotary_pos_emb"
    if hasattr(module, "apply_rotary_pos_emb_interleave") and getattr(config, "rope_interleave", True):
        name = "apply_rotary_pos_emb_interleave"
    function = getattr(module, name)
    parameters = list(inspect.signature(function).parameters)
    if parameters == ["tensor", "sin", "cos"]:  # GPT-J wants (batch, length, heads, dim)
        return lambda x: function(x.transpose(1, 2), angle.sin(), angle.cos()).transpose(1, 2)
    both = {
        "interleaved": torch.repeat_interleave(angle, 2, dim=-1),
        "half": torch.cat((angle, angle), -1),
        "once": angle,
    }[arranged(model_type, config)]
    if parameters[:3] == ["x", "cos", "sin"]:
        return lambda x: function(x, both.cos(), both.sin())
    return lambda x: function(x, x, both.cos(), both.sin())[0]


def arranged(model_type: str, config: Any) -> str:
    """Return how the rotary module of a family arranges cosines: each twice ("interleaved" or "half"), or "once"."""
    module = modeling(model_type)
    classes = {name: value for name, value in vars(module).items() if name.endswith("RotaryEmbedding")}
    rotary = next(value for name, value in classes.items() if "Vision" not in name)(config)
    layer_type = {}
    if "layer_type" in inspect.signature(rotary.forward).parameters:
        layer_type = {"layer_type": next(name for name, settings in config.rope_parameters.items() if settings)}
    row = rotary(torch.zeros(1), torch.ones(1, 1, dtype=torch.int64), **layer_type)[0].flatten()
    if torch.equal(row[0::2], row[1::2]):
        return "interleaved"
    return "half" if torch.equal(row[: len(row) // 2], row[len(row) // 2 :]) else "once"


@pytest.mark.parametrize("model_type", ROTATING)
def test_pairing_is_what_transformers_computes(model_type: str) -> None:
    rotate = rotation(model_type)
    lit = []  # the outputs that each input dim reaches; the two dims of a pair reach the same two
    for i in range(DIM):
        x = torch.zeros(1, 1, 1, DIM)
        x[..., i] = 1.0
        lit.append(frozenset(rotate(x).flatten().nonzero().flatten().tolist()))
    assert all(len(outputs) == 2 for outputs in lit)
    pairs = {(i, j) for i, j in combinations(range(DIM), 2) if lit[i] == lit[j]}
    expected = {
        "half": {(i, i + DIM // 2) for i in range(DIM // 2)},
        "interleaved": {(2 * i, 2 * i + 1) for i in range(DIM // 2)},
    }
    assert pairs == expected[PAIRINGS[model_type]]


def tiny_on_meta(model_type: str) -> nn.Module:
    """Return a tiny model of a family on the meta device."""
    every_model.stand_in_for_timm()
    config_class: Any = transformers.CONFIG_MAPPING[model_type]
    config = config_class(**every_model.settings(config_class))
    entries = [entry for entry in every_model.entries() if entry.model_type == model_type]
    classes = [getattr(transformers, entry.name) for entry in entries]
    if not classes:  # the part for text of a model of text and images
        beside = importlib.import_module(config_class.__module__.replace("configuration_", "modeling_"))
        classes = [
            value
            for value in vars(beside).values()
            if getattr(value, "config_class", None) is config_class and "forward" in vars(value)
        ]
    assert classes, f"transformers has no model class whose config has the model_type {model_type!r}"
    with torch.device("meta"):
        built: nn.Module = classes[0](config)
    return built


@pytest.mark.parametrize("entry", [name for name in WITH_A_CLASS if family(name).rotated])
@pytest.mark.sampled(3)
def test_the_table_names_what_the_class_holds(entry: str) -> None:
    """This takes a tenth of a second for each family; other tests need models that run."""
    known = family(entry)
    model = tiny_on_meta(entry)
    held: set[str] = set()
    for module in model.modules():
        inside = [name for name, _ in module.named_parameters()]
        linear = "Delta" in type(module).__name__  # linear attention, which may have the same names and does not rotate
        if not linear and any(f"{name}.weight" in inside for name in known.rotated):
            held |= {name.removesuffix(".weight").removesuffix(".bias") for name in inside}
    where = f"[{entry}] in models/families.toml"
    assert held, (
        f"{where}: no attention module of {type(model).__name__} holds any of {sorted(known.rotated)}; name under "
        "`rotated` the modules that make queries and keys, or choose another `like`"
    )
    stated = {*known.rotated, *known.unrotated}
    missing = sorted(name for name in held if not any(f"{name}.".startswith(f"{part}.") for part in stated))
    assert not missing, (
        f"{where}: attention modules of {type(model).__name__} also hold {missing}; name each under `rotated`, where "
        "its rows rotate, or under `unrotated`"
    )


@pytest.mark.parametrize("model_type", families())
def test_every_model_type_exists(model_type: str) -> None:
    """Or has code of its own: never both."""
    if not family(model_type).remote:
        needs_family(model_type)
    assert (model_type in transformers.CONFIG_MAPPING) == (not family(model_type).remote), (
        f"[{model_type}] in models/families.toml must be the model_type of a config of transformers; a family whose "
        "code comes with its checkpoints states `remote`, and no other does"
    )


def test_every_pairing_of_the_table_is_one_that_is_tested() -> None:
    stated = {name: known.pairing for name, known in families().items() if known.pairing and not known.remote}
    assert stated == {name: PAIRINGS.get(name) for name in stated}


def test_a_pairing_is_said_where_rows_rotate() -> None:
    half = [name for name, known in families().items() if bool(known.rotated) != bool(known.pairing)]
    assert not half, f"models/families.toml: {half} must give both `pairing` and `rotated`, or neither"


@pytest.mark.parametrize("name", FAMILIES)
def test_the_accepted_rope_types_are_those_of_the_config(name: str) -> None:
    model = build(name)
    table = family(model.config.model_type).rope_types
    accepted = set()
    for rope_type, which in {"default": "theta", "linear": "linear", "yarn": "yarn", "llama3": "llama3"}.items():
        form = static_cases("llama")[which].form
        try:
            built = build(name, form, max_position_embeddings=4 * TRAINED)
        except (ValueError, KeyError, StrictDataclassError):
            continue
        written = built.config.rope_parameters
        if written.get("full_attention", written)["rope_type"] == rope_type:  # Phi-3 silently turns yarn into longrope
            accepted.add(rope_type)
    assert accepted == {"default", "linear", "yarn", "llama3"} & set(table or ("default", "linear", "yarn", "llama3"))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_live_model_has_the_pairing_of_its_family(name: str) -> None:
    model = build(name)
    assert rope.describe(model).pairing == PAIRINGS[model.config.get_text_config().model_type]


def test_softmax_mscale_is_in_the_attention_of_the_families_that_say_so() -> None:
    settings = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED}
    plain = build("deepseek_v3", settings)
    scaled = build("deepseek_v3", settings | {"mscale": 1.0, "mscale_all_dim": 1.0})
    assert family("deepseek_v3").softmax_mscale
    assert scaled.model.layers[0].self_attn.scaling > plain.model.layers[0].self_attn.scaling


@pytest.mark.parametrize("model_type", [name for name in WITH_A_CLASS if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES])
def test_softmax_mscale_stands_where_the_code_reads_it(model_type: str) -> None:
    source = Path(str(modeling(model_type).__file__)).read_text(encoding="utf-8")
    assert family(model_type).softmax_mscale == ("mscale_all_dim" in source)


def causal_families() -> dict[str, Path]:
    """Every model_type of a causal language model and the source of its modeling module."""
    package = Path(str(transformers.__file__)).parent / "models"
    actual = {}
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        for name in (model_type, model_type.removesuffix("_text")):
            if (source := package / name / f"modeling_{name}.py").exists():
                actual[model_type] = source
    return actual


def test_no_family_that_scales_its_softmax_is_missing() -> None:
    """Elsewhere a patch would save settings that rebuild the attention with another scale than the live one."""
    scaling = {
        model_type
        for model_type, source in causal_families().items()
        if "mscale_all_dim" in source.read_text(encoding="utf-8")
    }
    assert {"deepseek_v2", "deepseek_v3"} <= scaling
    assert {model_type for model_type in scaling if not family(model_type).softmax_mscale} == set()
