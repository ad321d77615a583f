"""Linear layers by Transformer Engine, on a stand-in that computes on CPUs: the numbers of a run without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformer_engine_stand_in as stand_in
from float8_runs import float8_spec, train
from forked_ranks import run_ranks
from oracle import assert_same, joined_stages, shake
from resumed_run import SAVED, loaded, saved_and_gone_on
from slow_cases import slow_but
from torch import nn
from transformer_engine_runs import install_stand_in, library_spec, run_by_library, train_in_fp8

from megalaunch.engine.mesh import Axis
from megalaunch.engine.model.config import NormConfig
from megalaunch.engine.model.layers import Norm
from megalaunch.engine.model.linear import Linear
from megalaunch.engine.parallel.tensor_parallel import TensorParallel
from megalaunch.engine.parallel.transformer_engine import TransformerEngineLinear
from megalaunch.engine.param_layout import COLUMN_PARALLEL, REPLICATED
from megalaunch.engine.precision import policy
from megalaunch.engine.precision.transformer_engine import Autocast, load_transformer_engine
from megalaunch.schema.precision import Float8Spec

LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "tp2 sp": {"tp": 2, "sequence_parallel": True},
    "tp2": {"tp": 2},
    "dp2 zero3": {"dp": 2, "data_sharding": "optim_grads_params"},
    "pp2 1f1b": {"pp": 2, "schedule": "1f1b"},
    "cp2": {"cp": 2, "cp_comm_type": ("p2p",)},
    "tp2 pp2 sp": {"tp": 2, "pp": 2, "schedule": "1f1b", "sequence_parallel": True},
}
# Four heads of keys and values on two ranks, and one that both share.
VALUES: dict[str, Any] = {"batch__micro_batch_size": 2, "model__num_query_groups": 4}


@pytest.fixture(autouse=True)
def library(monkeypatch):
    install_stand_in(monkeypatch)


def te_spec(layout: dict[str, Any], **values: Any) -> Any:
    return library_spec(layout, **{**VALUES, **values})


@pytest.fixture(scope="module")
def expected() -> Any:
    spec = float8_spec({}, "tensorwise", precision__compute_dtype="fp32", **VALUES)
    return joined_stages(run_ranks(1, train, spec, True, shake))


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, "one rank", "pp2 1f1b", every=["cp2", "dp2 zero3"]))
def test_layouts_have_the_numbers_of_one_process(layout, expected):
    found = run_by_library(te_spec(LAYOUTS[layout]))
    assert_same(found.numbers, expected)
    made = found.layers
    tp, layers = LAYOUTS[layout].get("tp", 1), 4 // LAYOUTS[layout].get("pp", 1)
    assert len(made) == layers * (4 if tp > 1 else 7)
    assert {mode for mode, _ in made} == ({"column", "row"} if tp > 1 else {None})
    assert found.with_norm == (layers if tp > 1 else 0), "that before query, key and value"
    assert found.casts == len(made) * 4, "once in each of three steps, and in the validation"
    assert found.normed


SP: dict[str, Any] = LAYOUTS["tp2 sp"]
LATENT = {
    "model__mla": {
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    },
    "model__head_dim": 16,
}
PARALLEL = {"model__parallel_residual": True}
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "key and value heads that ranks share": (SP, {"model__num_query_groups": 1}),
    "biases": (SP, {"model__qkv_bias": True, "model__attention_output_bias": True, "model__mlp_bias": True}),
    "latent attention": (SP, LATENT),
    "output gates": (SP, {"model__attention_output_gate": True}),
    "one projection up": ({"tp": 2}, {"model__activation": "gelu"}),
    "zero-centered norms": (SP, {"model__norm_plus_one": True, "model__norm_placement": "both"}),
    "zero-centered norms of means": (SP, {"model__norm": "layernorm", "model__norm_plus_one": True, **PARALLEL}),
    "norms in fp32": (SP, {"precision__residual_dtype": "fp32"}),
    "layers recomputed": (SP, {"recompute__granularity": "full"}),
    "blocks recomputed": (SP, {"recompute__granularity": "selective", "recompute__modules": ("attention", "mlp")}),
}


NORMS_IN_PROJECTIONS = {
    "latent attention": 0,
    "norms in fp32": 0,
    "zero-centered norms of means": 8,
}
"""How many, where it is not one for each of the four layers (all forms are of tp2)."""


@pytest.mark.parametrize("form", slow_but(FORMS, "key and value heads that ranks share", every=["blocks recomputed"]))
def test_forms_of_a_layer_have_the_numbers_of_the_native_ones(form):
    layout, values = FORMS[form]
    native = float8_spec(layout, "tensorwise", **{**VALUES, "precision__compute_dtype": "fp32", **values})
    found = run_by_library(te_spec(layout, **values))
    assert found.with_norm == NORMS_IN_PROJECTIONS.get(form, 4)
    assert_same(found.numbers, joined_stages(run_ranks(native.cluster.devices_per_node, train, native, True, shake)))


@pytest.mark.slow
def test_a_run_resumes_with_the_other_implementation(tmp_path):
    """Fused projections and zero-centered norms have the names of the native ones in checkpoints."""
    library = te_spec(SP, model__norm_plus_one=True)
    native = float8_spec(
        {}, "tensorwise", **{**VALUES, "precision__compute_dtype": "fp32", "model__norm_plus_one": True}
    )
    expected, _ = run_ranks(2, _in_fp32, saved_and_gone_on, library, tmp_path, False)
    (found,) = run_ranks(1, _in_fp32, loaded, native, tmp_path / "checkpoints" / f"step_{SAVED:08d}")
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        assert abs(found.gradients[name] - gradient).max() <= 1e-5 * abs(gradient).max()


def _in_fp32(function: Any, *args: Any) -> Any:
    policy._FORMATS["fp8"] = torch.float32  # in a forked process
    return function(*args)


def test_the_recipe_and_its_format_reach_the_library():
    """Tensorwise by the stand-in is this project's own tensorwise: on one rank both have the same scales."""
    for number_format in ("hybrid", "e4m3"):
        fp8 = {"recipe": "tensorwise", "format": number_format, "first_layers_bf16": 1}
        native = float8_spec({}, "tensorwise", **{**VALUES, "precision__fp8": fp8})
        library = te_spec({}, precision__fp8={**fp8, "implementation": "transformer_engine"})
        (expected,), (found,) = run_ranks(1, train, native, True), run_ranks(1, train_in_fp8, library)
        assert found.losses == expected.losses
        for name, gradient in expected.gradients.items():
            torch.testing.assert_close(found.gradients[name], gradient, rtol=0, atol=0)


@pytest.mark.parametrize("rows", [16, 3])
def test_rows_that_cannot_be_cast_are_computed_in_the_dtype_of_the_input(rows):
    layer, library = Linear(32, 48, REPLICATED), load_transformer_engine()
    nn.init.normal_(layer.weight)
    autocast = Autocast(library, Float8Spec())
    layer.library = TransformerEngineLinear(library, autocast, (32, 48), torch.float32, 16, None)
    x = torch.randn(1, rows, 32)
    assert torch.equal(layer(x), x @ layer.weight.T)
    assert stand_in.STATE.casts == int(rows == 16)


@pytest.mark.parametrize("rows", [16, 3])
def test_a_norm_is_computed_once_whoever_computes_the_projections(rows):
    projections, library = (Linear(32, 48, COLUMN_PARALLEL), Linear(32, 16, COLUMN_PARALLEL)), load_transformer_engine()
    norm = Norm(32, NormConfig(epsilon=1e-5, layer=False, zero_centered_gamma=False))
    for parameter in (norm.weight, *(each.weight for each in projections)):
        nn.init.normal_(parameter)
    autocast = Autocast(library, Float8Spec())
    projections[0].library = TransformerEngineLinear(library, autocast, (32, 64), torch.float32, 16, None, norm)
    x = torch.randn(1, rows, 32)
    expected = [norm(x) @ each.weight.T for each in projections]
    norm.in_projections = True
    found = TensorParallel(Axis("tp"), False).column_parallel_linear(norm(x), *projections)
    torch.testing.assert_close(found, tuple(expected))
    assert stand_in.STATE.casts == int(rows == 16)


def test_weights_that_changed_are_cast_again():
    library = load_transformer_engine()
    layer = TransformerEngineLinear(library, Autocast(library, Float8Spec()), (16, 32), torch.float32, 16, None)
    x, first, second = torch.randn(1, 16, 16), torch.randn(16, 16), torch.randn(16, 16)
    for scale in (1.0, 2.0):
        for _ in range(2):  # microbatches
            outputs = layer(x, scale * first, second)
            for y, weight in zip(outputs, (scale * first, second), strict=True):
                torch.testing.assert_close(y, x @ weight.T)
        layer.forget_weights()
    assert stand_in.STATE.casts == 2
