"""Convert Megatron arguments to model keys that depend on more than one flag."""

from __future__ import annotations

import ast
from typing import Any

from megalaunch.importers.megatron.arguments import Arguments

Values = dict[str, Any]


def model_values(given: Arguments) -> Values:
    """Convert the keys of `model` that depend on several flags; mark flags in `given` that are not supported."""
    values: Values = {}
    _heads(given, values)
    _blocks(given, values)
    _biases(given, values)
    _window(given, values)
    _positions(given, values)
    if given.has("multi-latent-attention"):
        _latent(given, values)
    if given.has("num-experts"):
        _experts(given, values)
    vocabulary = given.integer("padded-vocab-size", given.integer("vocab-size"))
    if vocabulary is not None:
        values["model.vocab_size"] = vocabulary
    values["model.tie_word_embeddings"] = not given.has("untie-embeddings-and-output-weights")
    return values


def _heads(given: Arguments, values: Values) -> None:
    """Convert the attention heads: query groups, head width, softmax scale, output gate."""
    groups = given.integer("num-query-groups")
    if given.has("group-query-attention"):
        values["model.num_query_groups"] = groups or 1
    elif groups is not None:
        given.mark_ignored("num-query-groups", "has no effect without --group-query-attention")
    width, heads = given.integer("hidden-size"), given.integer("num-attention-heads")
    head_dim = given.integer("kv-channels")
    if given.has("multi-latent-attention"):
        given.mark_ignored("kv-channels", "latent attention sets its own head dimensions")
    elif head_dim is not None:
        values["model.head_dim"] = None if width and heads and head_dim * heads == width else head_dim
    scale = given.number("softmax-scale")
    if scale:
        values["model.query_pre_attn_scalar"] = 1 / scale**2
    values["model.attention_output_gate"] = given.has("attention-output-gate")


def _blocks(given: Arguments, values: Values) -> None:
    """Convert activation, FFN width, norm and QK norm, with Megatron's defaults."""
    offset = given.number("glu-linear-offset", 0.0)
    if given.has("swiglu"):
        values["model.activation"] = "swiglu"
    elif given.has("quick-geglu"):
        values["model.activation"] = "quick_geglu"
        if offset != 1.0:
            given.mark_unsupported(
                "quick-geglu", "quick_geglu always adds 1 to the up projection (--glu-linear-offset 1)"
            )
    else:
        plain = {"squared-relu": "squared_relu", "openai-gelu": "gelu_tanh"}
        fused = not (given.has("disable-bias-linear") or given.has("no-bias-gelu-fusion"))
        gelu = "gelu_tanh" if fused else "gelu"  # Megatron's kernel of bias and GELU has the tanh approximation
        values["model.activation"] = next((ours for flag, ours in plain.items() if given.has(flag)), gelu)
    if offset and not given.has("quick-geglu"):
        given.mark_unsupported("glu-linear-offset", "only quick_geglu has an offset of the up projection")
    width, inner = given.integer("hidden-size"), given.integer("ffn-hidden-size")
    if inner is None and width is not None:
        inner = int(8 * width / 3 / 64) * 64 if given.has("swiglu") else 4 * width
    if inner is not None:
        values["model.ffn_hidden_size"] = inner
    values["model.norm"] = {"RMSNorm": "rmsnorm"}.get(given.value("normalization") or "", "layernorm")
    if given.has("qk-layernorm") and given.has("multi-latent-attention"):
        given.mark_ignored("qk-layernorm", "latent attention always normalizes its latents")
    elif given.has("qk-layernorm"):
        values["model.qk_norm"] = "head"


def _biases(given: Arguments, values: Values) -> None:
    plain = given.has("disable-bias-linear")
    values["model.attention_output_bias"] = values["model.mlp_bias"] = not plain
    values["model.qkv_bias"] = not plain or given.has("add-qkv-bias")


def _window(given: Arguments, values: Values) -> None:
    """Convert sliding window, its layer pattern, and attention sinks."""
    window = given.value("window-size")
    if window is not None:
        try:
            values["model.sliding_window"] = int(window.strip("()").split(",")[0]) + 1  # Megatron counts past tokens
        except ValueError:
            given.mark_unsupported("window-size", f"must be two integers, got {window!r}")
    frequency = given.value("window-attn-skip-freq")
    if frequency is not None:
        every = _every_nth(frequency, 0)
        if every is None:
            given.mark_unsupported(
                "window-attn-skip-freq", f"only full attention in every n-th layer is supported, got {frequency}"
            )
        else:
            values["model.sliding_window_pattern"] = every
    sinks = given.value("softmax-type")
    if sinks == "off-by-one":
        given.mark_unsupported("softmax-type", "only learned sinks are supported")
    elif sinks is not None:
        values["model.attention_sinks"] = sinks == "learnable"


def _every_nth(text: str, mark: int) -> int | None:
    """Return n for `n`, or for a list of 0 and 1 that has `mark` at exactly every n-th position; None otherwise."""
    pattern = parse_list(text)
    if pattern is None:
        return int(text) if text.isdigit() and int(text) else None
    every = pattern.index(mark) + 1 if mark in pattern else 0
    fits = every and all((value == mark) == ((index + 1) % every == 0) for index, value in enumerate(pattern))
    return every if fits else None


def _positions(given: Arguments, values: Values) -> None:
    """Convert position embedding, RoPE base and RoPE scaling."""
    kind = given.value("position-embedding-type")
    if given.has("use-rotary-position-embeddings") and kind is None:
        kind = "rope"
    kinds = {"rope": "rope", "yarn": "rope", "learned_absolute": "learned", "none": "none", None: "learned"}
    if kind not in kinds:
        given.mark_unsupported("position-embedding-type", f"{kind} position embeddings are not supported")
        return
    values["model.position_embedding"] = kinds[kind]
    if kinds[kind] != "rope":
        return
    base = given.number("rotary-base", 10000.0)
    values["model.rope.theta"] = base
    skipped = given.value("no-rope-freq")
    if skipped is not None:
        values["model.no_rope_layer_interval"] = _every_nth(skipped, 1)
        if values["model.no_rope_layer_interval"] is None:
            given.mark_unsupported("no-rope-freq", f"only NoPE in every n-th layer is supported, got {skipped}")
    factor = given.number("rotary-seq-len-interpolation-factor")
    if factor is not None:
        values |= {"model.rope.scaling": "linear", "model.rope.factor": factor}
    if given.has("use-rope-scaling"):
        values["model.rope.scaling"] = "llama3"
        values["model.rope.factor"] = given.number("rope-scaling-factor", 8.0)
        values["model.rope.original_positions"] = 8192
    if kind == "yarn":
        _yarn(given, values, given.number("yarn-rotary-scaling-factor", given.number("rotary-scaling-factor", 1.0)))


def _latent(given: Arguments, values: Values) -> None:
    """Convert the norms and positions of latent attention. Its YaRN, the default, has arguments of its own."""
    if not given.has("qk-layernorm"):
        given.mark_unsupported("multi-latent-attention", "latents without norms (--qk-layernorm) are not supported")
    values["model.mla.norm_epsilon"] = given.number("norm-epsilon", given.number("layernorm-epsilon", 1e-5))
    plain = given.value("rope-type") == "rope"
    if not plain:
        values["model.rope.fraction"] = 1.0
        given.mark_ignored("rotary-percent", "YaRN of latent attention rotates all of its rotary dimensions")
    factor = given.number("rotary-scaling-factor", 1.0)
    if factor == 1.0:
        return
    if not plain:
        _yarn(given, values, factor)
    elif given.number("mscale-all-dim", 0.0):
        given.mark_unsupported("mscale-all-dim", "only YaRN has a scale of the softmax (--rope-type yarn)")


def _yarn(given: Arguments, values: Values, factor: float | None) -> None:
    """Convert YaRN's parameters, with Megatron's defaults."""
    original = given.integer("yarn-original-max-position-embeddings", given.integer("original-max-position-embeddings"))
    values["model.rope.scaling"] = "yarn"
    values["model.rope.factor"] = factor
    values["model.rope.original_positions"] = original or 4096
    values["model.rope.beta_fast"] = given.number("yarn-beta-fast", 32.0)
    values["model.rope.beta_slow"] = given.number("yarn-beta-slow", 1.0)
    values["model.rope.mscale"] = given.number("mscale", 1.0)
    values["model.rope.mscale_all_dim"] = given.number("mscale-all-dim", 0.0)


def _experts(given: Arguments, values: Values) -> None:
    """Convert MoE layer pattern, router and capacity."""
    frequency = given.value("moe-layer-freq")
    if frequency is not None:
        pattern = _expert_pattern(frequency)
        if pattern is None:
            given.mark_unsupported(
                "moe-layer-freq",
                f"only leading dense layers, then experts in every n-th layer, got {frequency}",
            )
        else:
            values["model.moe.first_k_dense_replace"], values["model.moe.layer_freq"] = pattern
    score = given.value("moe-router-score-function") or "softmax"
    values["model.moe.score"] = score
    if score != "softmax":
        values["model.moe.normalize_top_k"] = given.integer("moe-router-topk", 2) != 1
    else:
        values["model.moe.normalize_top_k"] = not given.has("moe-router-pre-softmax")
    values["model.moe.router_bias"] = not given.has("disable-bias-linear")
    router = given.value("moe-router-dtype")
    if router is not None:
        values["model.moe.router_dtype"] = router
    elif given.has("bf16"):
        values["model.moe.router_dtype"] = "bf16"
    if given.has("moe-enable-deepep"):
        values["parallel.moe_token_dispatcher_type"] = "flex"
    _balance(given, values)
    capacity = given.number("moe-expert-capacity-factor")
    if capacity is not None:
        values["model.moe.capacity_factor"] = None if capacity < 0 else capacity


def _balance(given: Arguments, values: Values) -> None:
    """Convert the load-balancing loss and its coefficient."""
    kinds, coeffs = given.values("moe-router-load-balancing-type"), given.values("moe-aux-loss-coeff")
    ours = {"aux_loss": "batch", "seq_aux_loss": "sequence", "global_aux_loss": "global", "none": "none"}
    kind = kinds[0] if kinds else "aux_loss"
    if len(kinds) > 1:
        given.mark_unsupported("moe-router-load-balancing-type", f"only one type is supported; {kind} is used")
    try:
        coeff = float(coeffs[0]) if coeffs else 0.0
    except ValueError:
        given.mark_unsupported("moe-aux-loss-coeff", f"must be a number, got {coeffs[0]!r}")
        coeff = 0.0
    if kind == "sinkhorn":
        # Its weights are those of a sigmoid for one expert per token, else of a softmax over all experts.
        values["model.moe.choice"] = "sinkhorn"
        values["model.moe.score"] = "sigmoid" if given.integer("moe-router-topk", 2) == 1 else "softmax"
        values["model.moe.normalize_top_k"] = False
        return
    if kind not in ours:
        given.mark_unsupported("moe-router-load-balancing-type", f"{kind} is not supported")
        return
    values["model.moe.balance_loss"] = ours[kind] if coeff else "none"
    values["model.moe.balance_loss_coeff"] = coeff if ours[kind] != "none" else 0.0


def _expert_pattern(text: str) -> tuple[int, int] | None:
    """Return (first dense layers, layer frequency) for `n` or a list of 0 (dense) and 1 (experts), else None."""
    pattern = parse_list(text)
    if pattern is None:
        return (0, int(text)) if text.isdigit() and int(text) else None
    if 1 not in pattern:
        return None
    dense = pattern.index(1)
    rest = pattern[dense:]
    every = rest.index(1, 1) if 1 in rest[1:] else len(rest)
    fits = all((value == 1) == (index % every == 0) for index, value in enumerate(rest))
    return (dense, every) if fits else None


def parse_list(text: str) -> list[int] | None:
    """Parse `([0]*3+[1]*58)` to a list of integers; None for anything else. Only + and * are evaluated."""
    if "[" not in text or len(text) > 2000:
        return None
    try:
        value = _pattern(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return value if isinstance(value, list) else None


def _pattern(node: ast.AST) -> list[int] | int:
    """Evaluate a list expression; raises ValueError for anything but integers, lists, + and *."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        items = [_pattern(item) for item in node.elts]
        if all(isinstance(item, int) for item in items):
            return [item for item in items if isinstance(item, int)]
    if isinstance(node, ast.BinOp):
        left, right = _pattern(node.left), _pattern(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(node.op, ast.Mult) and isinstance(left, list) and isinstance(right, int):
            if len(left) * right > 10_000:
                raise ValueError("too long")
            return left * right
    raise ValueError("not a list of integers")
