"""A seeded sampler of layouts that the checker allows: degrees, shardings, schedules and exchanges, up to some ranks.

A layout is a dict of `small_spec`'s values (`parallel__tp`: 2); the model that goes with it has heads for every axis.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from itertools import product
from typing import Any

from oracle import small_spec

from megalaunch.plan.check import check
from megalaunch.plan.rules.suggestions import suggestions_disabled
from megalaunch.plan.topology import Topology
from megalaunch.schema import RunSpec

Layout = dict[str, Any]

# Grouped queries with fewer groups than tp may have, a vocabulary and heads that every degree divides.
MODEL: Layout = {
    "model__num_layers": 8,
    "model__num_attention_heads": 8,
    "model__num_query_groups": 2,
    "model__head_dim": 4,
    "model__vocab_size": 64,
    "data__mock": True,
}
_DEGREES = (1, 2, 4)
_SHARDINGS = ("no_shard", "optim", "optim_grads", "optim_grads_params")
_SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero_bubble", "zbv", "dualpipev")
# Losses of balancing depend on what a microbatch is, which the one process has no notion of: none here.
_MIXTURES: tuple[Layout, ...] = (
    {"num_experts": 4, "top_k": 2},
    {
        "num_experts": 8,
        "top_k": 3,
        "ffn_hidden_size": 16,
        "shared_ffn_hidden_size": 16,
        "first_k_dense_replace": 1,
        "score": "sigmoid",
        "num_groups": 4,
        "top_k_groups": 2,
        "group_score_top_k": 2,
    },
)
_EXCHANGES = ("p2p", "allgather", "a2a", "a2a+p2p")


def random_layouts(seed: int, most_ranks: int = 8, **fixed: Any) -> Iterator[Layout]:
    """Layouts without end, the same for the same seed; `fixed` values are in each of them (and may rule some out).

    With `model__moe` among them, experts are spread too.
    """
    source, spreading = random.Random(seed), random.Random(f"{seed}, experts")
    while True:
        layout = {**_drawn(source), **(_spread(spreading) if "model__moe" in fixed else {}), **fixed}
        if ranks_of(layout) <= most_ranks and _allowed(layout):
            yield layout


def random_runs(seed: int, most_ranks: int = 8) -> Iterator[Layout]:
    """Layouts each with an awkward model, recomputation and packed documents of its own; some with MTP depths."""
    source, dealing = random.Random(seed), random.Random(f"{seed}, dealt by length")
    spreading, predicting = random.Random(f"{seed}, experts"), random.Random(f"{seed}, MTP depths")
    while True:
        run = {**_drawn(source), **dict(_awkward(source)), **_uneven(source)}
        if spreading.random() < 0.5:  # more than half of these are refused
            run |= {"model__moe": spreading.choice(_MIXTURES), **_spread(spreading)}
        if predicting.random() < 0.3:
            run["model__mtp"] = {"num_layers": predicting.choice((1, 2)), "loss_coeff": 0.7}
        if run["data__reset_attention_mask"] and run.get("parallel__cp_comm_type") == "p2p" and dealing.random() < 0.5:
            run["parallel__dynamic_context_parallel"] = True
        if ranks_of(run) <= most_ranks and _allowed(run):
            yield run


def spec_of(layout: Layout, **values: Any) -> RunSpec:
    """The resolved spec of a layout; `values` are more of `small_spec`'s arguments."""
    return small_spec(**{**MODEL, **layout, **values})


def smallest_sizes(*layouts: Layout) -> Layout:
    """Return the fewest layers and the smallest batch, of two microbatches at least, under which all layouts run."""
    for layers, batch in product((2, 4, 8), (4, 8)):
        sizes = {"model__num_layers": layers, "batch__global_batch_size": batch}
        given = [{**layout, **sizes} for layout in layouts]
        if all(_allowed(one) and Topology.from_spec(spec_of(one)).microbatches > 1 for one in given):
            return sizes
    return {}


def ranks_of(layout: Layout) -> int:
    """How many ranks a layout takes."""
    return math.prod(layout[f"parallel__{axis}"] for axis in ("dp", "pp", "cp", "tp"))


def name_of(layout: Layout) -> str:
    """`dp2 tp2, sequence_parallel True`: for messages and the names of tests."""
    keys = {f"parallel__{axis}": axis for axis in ("dp", "pp", "cp", "tp", "ep", "etp")}
    axes = [f"{axis}{layout[key]}" for key, axis in keys.items() if layout.get(key, 1) > 1]
    moe = [f"{moe['num_experts']} experts"] if (moe := layout.get("model__moe")) else []
    rest = [f"{key.split('__')[1]} {value}" for key, value in layout.items() if key not in {*keys, "model__moe"}]
    return ", ".join([" ".join(axes) or "one rank", *moe, *rest])


def _drawn(source: random.Random) -> Layout:
    """Any layout; most are refused."""
    degrees = {axis: source.choice(_DEGREES) for axis in ("dp", "pp", "cp", "tp")}
    layout: Layout = {f"parallel__{axis}": degree for axis, degree in degrees.items()}
    layout["parallel__data_sharding"] = source.choice(_SHARDINGS)
    layout["batch__micro_batch_size"] = source.choice((1, 2))
    if degrees["dp"] > 2 and source.random() < 0.5:
        layout["parallel__dp_replicate"] = 2
    if degrees["tp"] > 1:
        layout["parallel__sequence_parallel"] = source.random() < 0.5
    if degrees["cp"] > 1:
        layout["parallel__cp_comm_type"] = source.choice(_EXCHANGES)
        if layout["parallel__cp_comm_type"] == "a2a+p2p":
            layout["parallel__hierarchical_context_parallel_sizes"] = (2, degrees["cp"] // 2)
    if degrees["pp"] > 1:
        layout["parallel__schedule"] = source.choice(_SCHEDULES)
        if source.random() < 0.5:
            layout["parallel__vpp"] = 2
    return layout


def _spread(source: random.Random) -> Layout:
    """Any expert parallelism; refused where the ranks of a stage do not hold it."""
    return {
        "parallel__ep": source.choice((1, 2, 2, 4)),
        "parallel__etp": source.choice((1, 1, 2)),
        "parallel__moe_token_dispatcher_type": source.choice(("alltoall", "allgather")),
    }


def _awkward(source: random.Random) -> Iterator[tuple[str, Any]]:
    yield "model__num_layers", source.choice((3, 4, 6, 7, 8))
    yield "model__num_query_groups", source.choice((1, 2, 4, 8))
    yield "model__vocab_size", source.choice((61, 64))
    yield "model__tie_word_embeddings", source.random() < 0.5
    yield "data__reset_attention_mask", source.random() < 0.5
    granularity = source.choice(("none", "none", "full", "selective"))
    yield "recompute__granularity", granularity
    if granularity == "full":
        yield "recompute__num_layers", source.choice((1, 2, 3))
    if granularity == "selective":
        yield "recompute__modules", source.choice((["attention"], ["norm", "mlp"], ["activation"]))


def _uneven(source: random.Random) -> Layout:
    """Stages of their own sizes, or none of it; refused without a pipeline."""
    return source.choice(
        (
            {},
            {},
            {"parallel__account_for_loss_in_pipeline_split": True},
            {"parallel__num_layers_in_first_pipeline_stage": 2},
        )
    )


def _allowed(layout: Layout) -> bool:
    with suggestions_disabled():
        return not any(finding.severity == "error" for finding in check(spec_of(layout), purpose="train"))
