"""`AxialRotaryEmbedding`: relative positions per axis, transformers' own modules, a method per axis, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rope_ext_hf import Rotary, RotaryEmbedding
from rope_ext_hf.errors import MethodError
from rope_ext_hf.methods.registry import resolve_method
from rope_ext_hf.methods.static import Default, Linear
from rope_ext_hf.tools.modules import AxialRotaryEmbedding
from tests.support import oracles
from tests.support.rotary_examples import emptied

ANY = torch.zeros(1)


def grid(*sizes: int) -> Tensor:
    """Return the positions of every cell of a grid, (axes, 1, cells)."""
    return torch.stack(torch.meshgrid(*map(torch.arange, sizes), indexing="ij")).flatten(1)[:, None]


# --- transformers' own modules ----------------------------------------------------------------------------------------

TEXT: dict[str, tuple[str, str, list[int], Any, Any]] = {  # model_type: class, config, sections, arrangement, layout
    "qwen2_vl": ("Qwen2VLRotaryEmbedding", "Qwen2VLTextConfig", [16, 24, 24], "contiguous", "half"),
    "qwen2_5_vl": ("Qwen2_5_VLRotaryEmbedding", "Qwen2_5_VLTextConfig", [16, 24, 24], "contiguous", "half"),
    "glm4v": ("Glm4vTextRotaryEmbedding", "Glm4vTextConfig", [16, 24, 24], "contiguous", "interleaved"),
    "qwen3_vl": ("Qwen3VLTextRotaryEmbedding", "Qwen3VLTextConfig", [24, 20, 20], "interleaved", "half"),
}


def module_of(model_type: str, name: str) -> Any:
    package = getattr(transformers.models, model_type)
    return getattr(getattr(package, f"modeling_{model_type}"), name)


@pytest.mark.parametrize("model_type", TEXT)
@pytest.mark.parametrize("method", ["default", "linear"])
def test_mrope_of_text_models_is_one_setting(model_type: str, method: str) -> None:
    name, config_name, sections, arrangement, layout = TEXT[model_type]
    rope_parameters = {"rope_type": method, "rope_theta": 1e6, "mrope_section": sections}
    parameters: dict[str, Any] = {} if method == "default" else {"factor": 4.0}
    config = getattr(getattr(transformers.models, model_type), config_name)(
        hidden_size=256, num_attention_heads=2, head_dim=128, rope_parameters=rope_parameters | parameters
    )
    theirs = module_of(model_type, name)(config)
    ours = AxialRotaryEmbedding(
        method, Rotary(128, 1e6, 32768), sections=sections, arrangement=arrangement, layout=layout, **parameters
    )
    positions = torch.randint(0, 500, (3, 2, 40), generator=torch.Generator().manual_seed(0))
    for actual, expected in zip(ours(ANY, positions), theirs(ANY, positions), strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)  # their angles are float32 products
    axes = _axes(sections, arrangement)
    merged = RotaryEmbedding(method, Rotary(128, 1e6, 32768), axis_of_pair=axes, layout=layout, **parameters)
    for actual, expected in zip(ours(ANY, positions), merged(ANY, positions), strict=True):
        assert torch.equal(actual, expected)


def _axes(sections: list[int], arrangement: str) -> list[int]:
    """Return cos and sin in the two arrangements as their authors write them."""
    if arrangement == "contiguous":
        return [0] * sections[0] + [1] * sections[1] + [2] * sections[2]
    axes = [0] * sum(sections)
    for axis in (1, 2):
        for pair in range(axis, 3 * sections[axis], 3):
            axes[pair] = axis
    return axes


@pytest.mark.parametrize(
    ("model_type", "name", "config_name", "table"),
    [
        ("qwen2_vl", "Qwen2VLVisionRotaryEmbedding", "Qwen2VLVisionConfig", "own"),
        ("qwen3_vl", "Qwen3VLVisionRotaryEmbedding", "Qwen3VLVisionConfig", "own"),
        ("pixtral", "PixtralVisionRotaryEmbedding", "PixtralVisionConfig", "dealt"),
    ],
)
def test_rope_of_vision_towers_is_one_setting(model_type: str, name: str, config_name: str, table: Any) -> None:
    theirs = module_of(model_type, name)(getattr(getattr(transformers.models, model_type), config_name)())
    expected = theirs(ANY, grid(12, 9)[:, 0].T)  # (patches, 2) -> (patches, head_dim)
    dim = expected[0].shape[-1]
    ours = AxialRotaryEmbedding("default", Rotary(dim, 1e4, 32), sections=(dim // 4, dim // 4), table=table)
    for actual, wanted in zip(ours(ANY, grid(12, 9)), expected, strict=True):
        torch.testing.assert_close(actual[0], wanted.reshape(108, dim), atol=1e-5, rtol=0)


# --- the law ----------------------------------------------------------------------------------------------------------

SECTIONS = st.lists(st.integers(2, 5), min_size=1, max_size=4)
METHODS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4},
    "ntk": {"factor": 4},
    "yarn": {"factor": 4},
    "dynamic-ntk": {"growth": "even"},
}


@settings(max_examples=60, deadline=None)
@given(
    sections=SECTIONS,
    arrangement=st.sampled_from(["contiguous", "interleaved"]),
    table=st.sampled_from(["shared", "dealt", "own"]),
    layout=st.sampled_from(["half", "interleaved"]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    data=st.data(),
)
def test_scores_depend_on_the_differences_per_axis_alone(
    sections: list[int], arrangement: Any, table: Any, layout: Any, dtype: torch.dtype, data: st.DataObject
) -> None:
    dim, axes = 2 * sum(sections), len(sections)
    methods = data.draw(st.lists(st.sampled_from(sorted(METHODS)), min_size=axes, max_size=axes))
    objects = [resolve_method(name, None, **METHODS[name]) for name in methods]
    module = AxialRotaryEmbedding(
        objects, Rotary(dim, 1e4, 64), sections=sections, arrangement=arrangement, table=table, layout=layout
    )
    shift = torch.tensor(data.draw(st.lists(st.integers(0, 40), min_size=axes, max_size=axes)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    positions = torch.randint(0, 20, (axes, 1, 6), generator=generator)  # below 64: no length changes a frequency
    q, k = torch.randn(2, 1, 6, dim, generator=generator).to(dtype)

    def scores(at: Tensor) -> Tensor:
        cos, sin = module(q, at)
        assert cos.dtype == dtype
        return _rotate(q, cos, sin, layout).double() @ _rotate(k, cos, sin, layout).double().mT

    tolerance = {torch.bfloat16: 0.02, torch.float32: 1e-5, torch.float64: 1e-5}[dtype] * dim
    torch.testing.assert_close(scores(positions + shift[:, None, None]), scores(positions), atol=tolerance, rtol=0)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    if layout == "half":
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin
    turned = torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)
    return x * cos + turned * sin


def test_every_axis_counts() -> None:
    module = AxialRotaryEmbedding("default", Rotary(24, 1e4, 64), sections=(4, 4, 4))
    here = module(ANY, torch.zeros(3, 1, 1, dtype=torch.int64))[1]
    for axis in range(3):
        moved = torch.zeros(3, 1, 1, dtype=torch.int64)
        moved[axis] = 1
        changed = (module(ANY, moved)[1] != here).flatten().nonzero().flatten() % 12
        assert set(changed.tolist()) == set(range(4 * axis, 4 * axis + 4))


# --- tables and arrangements ------------------------------------------------------------------------------------------


def sines(**arguments: Any) -> list[float]:
    """Return the sine of each pair's angle at position 1 of every axis, which is the sine of its frequency."""
    module = AxialRotaryEmbedding("default", Rotary(12, 1e3, 64), layout="bare", **arguments)
    sin: Tensor = module(ANY, torch.ones(1, 1, dtype=torch.int64))[1]
    return sin.flatten().tolist()


def test_the_tables_by_hand() -> None:
    whole = [1e3 ** (-i / 6) for i in range(6)]
    cases: list[tuple[dict[str, Any], list[float]]] = [
        ({"sections": (2, 4)}, whole),
        ({"sections": (2, 4), "arrangement": "interleaved"}, whole),
        ({"sections": (2, 4), "table": "dealt"}, [whole[i] for i in (0, 2, 1, 3, 4, 5)]),
        ({"sections": (2, 4), "table": "dealt", "arrangement": "interleaved"}, whole),
        ({"sections": (2, 4), "table": "own"}, [1.0, 1e3**-0.5, 1.0, 1e3**-0.25, 1e3**-0.5, 1e3**-0.75]),
        (
            {"sections": (2, 4), "table": "own", "arrangement": "interleaved"},
            [1.0, 1.0, 1e3**-0.5, 1e3**-0.25, 1e3**-0.5, 1e3**-0.75],
        ),
    ]
    for arguments, frequencies in cases:
        expected = torch.tensor(frequencies, dtype=torch.float64).sin().tolist()
        assert sines(**arguments) == pytest.approx(expected, abs=1e-6), arguments


def test_one_axis_is_rotary_embedding_bit_for_bit() -> None:
    rotary, positions = Rotary(32, 1e4, 64), torch.arange(300).expand(2, -1)
    for method, parameters in METHODS.items():
        ours = AxialRotaryEmbedding(method, rotary, sections=(16,), **parameters)
        plain = RotaryEmbedding(method, rotary, **parameters)
        for given_positions in (positions, positions[None]):
            for actual, expected in zip(ours(ANY, given_positions), plain(ANY, positions), strict=True):
                assert torch.equal(actual, expected)


# --- methods per axis -------------------------------------------------------------------------------------------------


def test_each_axis_has_its_method_and_trained_length() -> None:
    rotary = Rotary(32, 1e4, 1000)
    module = AxialRotaryEmbedding(
        [Default(), Linear(factor=4.0)], rotary, sections=(8, 8), table="own", trained_lengths=(1000, 16), layout="bare"
    )
    cos, _ = module(ANY, grid(5, 7))
    inv_freq = torch.tensor(oracles.plain(Rotary(16, 1e4, 1)), dtype=torch.float64)
    rows, columns = (axis[0, :, None].double() * inv_freq for axis in grid(5, 7))
    expected = torch.cat((rows.cos(), (columns / 4).cos()), -1).float()
    torch.testing.assert_close(cos[0], expected, atol=1e-6, rtol=0)
    rotaries: list[Any] = [table.rotary for table in module.tables]
    assert [rotary.trained_length for rotary in rotaries] == [1000, 16]


def test_an_attention_factor_multiplies_its_own_axis() -> None:
    rotary = Rotary(32, 1e4, 64)
    module = AxialRotaryEmbedding(["default", "yarn"], rotary, sections=(8, 8), layout="bare", factor=4)
    cos, _ = module(ANY, torch.zeros(2, 1, 1, dtype=torch.int64))
    assert cos.flatten().tolist() == pytest.approx([1.0] * 8 + [oracles.yarn_attention_factor(4)] * 8)


def test_each_axis_has_a_length_of_its_own() -> None:
    """This holds for the rows of one batch, too; a fixed length takes precedence."""
    rotary = Rotary(32, 1e4, 64)
    module = AxialRotaryEmbedding("dynamic-ntk", rotary, sections=(8, 8), table="own", layout="bare", growth="even")
    positions = torch.zeros(2, 2, 5, dtype=torch.int64)
    positions[1] = torch.tensor([[0, 1, 2, 3, 4], [0, 1, 2, 3, 250]])
    positions[0] = 3
    cos, _ = module(ANY, positions)

    def expected(position: int, alpha: float) -> list[float]:
        return (position * torch.tensor(oracles.ntk(Rotary(16, 1e4, 64), alpha), dtype=torch.float64)).cos().tolist()

    assert cos[0, 4].tolist() == pytest.approx(expected(3, 1) + expected(4, 1), abs=1e-6)
    assert cos[1, 4].tolist() == pytest.approx(expected(3, 1) + expected(250, 4), abs=1e-6)
    table: Any = module.tables[1]
    with table.at_length(500):
        cos, _ = module(ANY, positions)
    assert cos[1, 4].tolist() == pytest.approx(expected(3, 1) + expected(250, 8), abs=1e-6)


@pytest.mark.slow
def test_it_survives_casts_and_moves_and_compiles() -> None:
    module = AxialRotaryEmbedding(
        "yarn", Rotary(32, 1e4, 64), sections=(8, 8), arrangement="interleaved", table="own", factor=4
    )
    positions = 10**6 + grid(4, 4)
    before = module(ANY, positions)
    for changed in (module.to(torch.bfloat16), emptied(nn.ModuleList([module]).to("meta"))[0]):
        for actual, expected in zip(changed(ANY, positions), before, strict=True):
            assert torch.equal(actual, expected)
    assert module.state_dict() == {}
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for actual, expected in zip(compiled(ANY, positions), before, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-6, rtol=0)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sections": (8, 4)}, "with the sum 16; got"),
        ({"sections": ()}, "with the sum 16; got"),
        ({"sections": (16, 0)}, "at least 1"),
        ({"sections": (8, 8), "arrangement": "blocks"}, "arrangement must be one of contiguous, interleaved"),
        ({"sections": (8, 8), "table": "both"}, "table must be one of shared, dealt, own"),
        ({"sections": (8, 8), "layout": "both"}, "layout must be one of"),
        ({"sections": (8, 8), "method": ["default"]}, "methods must have one entry for each of 2 axes, got 1"),
        (
            {"sections": (8, 8), "trained_lengths": [1, 2, 3]},
            "trained_lengths must have one entry for each of 2 axes",
        ),
        ({"sections": (8, 8), "method": "rerope"}, "rerope changes what attention does"),
        ({"sections": (8, 8), "rotary": Rotary(32, 1e4, 64, rotated_pairs=4), "table": "own"}, "without rotated_pairs"),
        ({"sections": (15, 1), "table": "own", "method": "ntk", "factor": 2}, "ntk"),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict[str, Any], message: str) -> None:
    arguments = dict[str, Any](method="default", rotary=Rotary(32, 1e4, 64)) | arguments
    with pytest.raises(MethodError, match=message):
        AxialRotaryEmbedding(arguments.pop("method"), arguments.pop("rotary"), **arguments)


def test_positions_that_do_not_fit_are_refused() -> None:
    module = AxialRotaryEmbedding("default", Rotary(32, 1e4, 64), sections=(8, 8))
    with pytest.raises(ValueError, match=r"must be \(2, batch, length\), got \(3, 1, 4\)"):
        module(ANY, torch.zeros(3, 1, 4, dtype=torch.int64))
    with pytest.raises(TypeError, match="must be integers"):
        module(ANY, torch.zeros(2, 1, 4))
