"""Draw the axes of parallelism from the engine's and the planner's own objects; scripts/reference writes the files."""

from __future__ import annotations

import torch
from made_specs import H100_NODE, resolved
from recorded_schedule import Placed, idle_fraction, place_in_time, run_order
from svg_drawing import WIDTH, Drawing

from megalaunch.engine.mesh import Axis
from megalaunch.engine.model.build import build_decoder
from megalaunch.engine.parallel.context_parallel import head_tail_runs
from megalaunch.engine.parallel.expert_parallel import ExpertBlocks
from megalaunch.engine.parallel.tensor_parallel import TensorParallel
from megalaunch.engine.param_layout import get_param_layout
from megalaunch.plan.memory.rank import memory_by_rank
from megalaunch.plan.topology import Topology
from megalaunch.schema import RunSpec
from megalaunch.schema.parallel import Schedule

_LEFT = 12
_RIGHT = WIDTH - 12


def _spec(*overrides: str, recipe: str = "llama3_8b") -> RunSpec:
    spec, _ = resolved(f"recipe={recipe}", *overrides, machine=H100_NODE)
    return spec


def mesh() -> str:
    """Draw the groups of rank 0 on every axis of a dense layout."""
    topology = Topology.from_spec(_spec("parallel=tp2cp2pp2dp2", "cluster.nodes=2"))
    grid, per_node = topology.dense_grid, topology.devices_per_node
    drawing = Drawing("The ranks that share a group with rank 0 on every axis of parallel=tp2cp2dp2pp2 on two nodes")
    drawing.write(_LEFT, 20, "parallel=tp2cp2pp2dp2: the groups of rank 0", "bold")
    start, cell = 42, 19
    for node in range(topology.nodes):
        at = start + node * (per_node * cell + 6)
        drawing.write(at + per_node * cell / 2, 38, f"node {node}", "quiet small middle")
    for row, (axis, size) in enumerate(grid.axes):
        y = 44 + row * 25
        drawing.write(_LEFT, y + 14, axis)
        group = grid.group(0, axis)
        assert len(group) == size
        for rank in range(grid.world):
            x = start + rank * cell + rank // per_node * 6
            drawing.box(x, y, cell, 19, f"c{row}" if rank in group else "none", str(rank), "small")
    drawing.write(_LEFT, 44 + 4 * 25 + 12, "Coloured: the ranks that rank 0 communicates with.", "quiet small")
    return drawing.svg()


def tensor() -> str:
    """Draw the shards of a layer's weights by tensor-parallel rank, as their modules declare them."""
    ranks = 4
    sizes = ("model.hidden_size=64", "model.ffn_hidden_size=96", "model.num_attention_heads=8", "model.head_dim=8")
    spec = _spec(*sizes, "model.num_query_groups=2", "model.num_layers=1", "model.vocab_size=64", recipe="tiny")
    with torch.device("meta"):
        layer = build_decoder(spec.model).layers["0"]
    weights = {
        f"{name}.{kind}".removesuffix(".weight"): (parameter, get_param_layout(module, kind))
        for name, module in layer.named_modules()
        for kind, parameter in module.named_parameters(recurse=False)
    }
    drawing = Drawing(f"The weights of one layer in their shards over {ranks} tensor-parallel ranks")
    drawing.write(_LEFT, 20, f"tp{ranks}: a layer's weights", "bold")
    for rank in range(ranks):
        drawing.box(200 + rank * 38, 10, 34, 15, f"c{rank}", f"tp{rank}", "small")
    x, y, block = float(_LEFT), 52.0, "attention"
    for name, (parameter, layout) in weights.items():
        if parameter.dim() != 2:  # norms are replicated
            continue
        rows, columns = (size * 0.8 for size in parameter.shape)
        if not name.startswith(block):
            x, y, block = _LEFT, y + 76, name.partition(".")[0]
        _draw_shards(drawing, x, y, rows, columns, layout.shard_dim, layout.max_shards, ranks)
        drawing.write(x, y - 6, name.rpartition(".")[2], "small")
        x += max(columns, 52) + 14
    drawing.write(_LEFT, y + 96, "Rows are output features, columns input features. With", "quiet small")
    drawing.write(_LEFT, y + 109, "two key/value heads for four ranks, two ranks share a shard.", "quiet small")
    return drawing.svg()


def _draw_shards(
    drawing: Drawing, x: float, y: float, rows: float, columns: float, dim: int | None, most: int | None, ranks: int
) -> None:
    """Draw a matrix; a shard that several ranks share has the stripes of all of them."""
    shards = min(ranks, most or ranks)
    for rank in range(ranks):
        shard, place = divmod(rank * shards, ranks)[0], rank % (ranks // shards)
        if dim == 0:
            high, wide = rows / shards, columns * shards / ranks
            drawing.box(x + place * wide, y + shard * high, wide, high, f"c{rank}")
        else:
            wide, high = columns / shards, rows * shards / ranks
            drawing.box(x + shard * wide, y + place * high, wide, high, f"c{rank}")


def sequence() -> str:
    """Draw which tokens and features every rank holds outside and inside of a tensor-parallel region."""
    ranks, tokens = 4, 8
    held = torch.arange(tokens)
    by_rank = [TensorParallel(Axis("tp", ranks, rank), True).scatter_to_sp(held).tolist() for rank in range(ranks)]
    drawing = Drawing(
        "Sequence parallelism: a rank holds a quarter of the tokens outside of a region, all tokens inside"
    )
    drawing.write(_LEFT, 20, f"tp{ranks} with sp: {tokens} tokens through one block", "bold")
    cell, top = 16, 52
    for x, label, by_token in (
        (_LEFT, "norm, residual", True),
        (148, "attention, MLP", False),
        (284, "residual", True),
    ):
        drawing.write(x, top - 8, label, "small")
        for token in range(tokens):
            owner = next(rank for rank in range(ranks) if token in by_rank[rank])
            for part in range(ranks):
                drawing.box(x + part * cell, top + token * cell, cell, cell, f"c{owner if by_token else part}")
    for x, first, second in ((80, "all-", "gather"), (216, "reduce-", "scatter")):
        drawing.write(x + 32, top + 54, first, "small middle")
        drawing.write(x + 32, top + 65, second, "small middle")
        drawing.write(x + 32, top + 82, "⟶", "bold middle")
    for rank in range(ranks):
        drawing.box(_LEFT + rank * 38, top + 140, 34, 15, f"c{rank}", f"tp{rank}", "small")
    drawing.write(170, top + 151, "Rows are tokens, columns features.", "quiet small")
    return drawing.svg()


def pipeline() -> str:
    """Draw a step of four schedules in time."""
    ranks, microbatches = 3, 6
    drawing = Drawing("Four pipeline schedules on three ranks with six microbatches, in time")
    drawing.write(_LEFT, 20, f"pp{ranks}, {microbatches} microbatches, from left to right in time", "bold")
    for x, fill, words in (
        (0, "c0", "forward"),
        (66, "c1", "backward"),
        (144, "c3", "of its input"),
        (230, "c2", "of its weights"),
    ):
        drawing.box(_LEFT + x, 30, 11, 11, fill)
        drawing.write(_LEFT + x + 15, 39, words, "small")
    panels: tuple[tuple[Schedule, int, str], ...] = (
        ("1f1b", 1, "1f1b"),
        ("interleaved", 2, "interleaved, vpp2"),
        ("zero_bubble", 1, "zero_bubble"),
        ("zbv", 2, "zbv: two stages a rank, in a V"),
    )
    schedules = [place_in_time(run_order(name, ranks, vpp, microbatches), vpp) for name, vpp, _ in panels]
    longest = max(one.start + one.length for placed in schedules for rank in placed for one in rank)
    scale = (_RIGHT - 36) / float(longest)
    for panel, ((_, vpp, title), placed) in enumerate(zip(panels, schedules, strict=True)):
        top = 62 + panel * 78
        drawing.write(_LEFT, top, title, "bold small")
        drawing.write(_RIGHT, top, f"idle: {float(idle_fraction(placed)):.0%}", "small end")
        for rank, parts in enumerate(placed):
            y = top + 6 + rank * 18
            drawing.write(_LEFT, y + 12, f"pp{rank}", "small")
            with drawing.group("small middle" if vpp == 1 else "tiny middle"):
                for one in parts:
                    _draw_part(drawing, one, 36 + float(one.start) * scale, y, float(one.length) * scale, ranks, vpp)
    drawing.write(_LEFT, 66 + 4 * 78, "Numbers are microbatches. Stronger colour: second stage.", "quiet small")
    drawing.write(
        _LEFT, 66 + 4 * 78 + 13, "Backward takes twice as long as forward; sending takes no time.", "quiet small"
    )
    return drawing.svg()


def _draw_part(drawing: Drawing, one: Placed, x: float, y: float, width: float, ranks: int, vpp: int) -> None:
    shade = "d" if one.part.stage >= ranks else "c"
    color = {"F": 0, "B": 1, "I": 3, "W": 2}[one.part.kind]
    drawing.box(x, y, width, 18, f"{shade}{color}", str(one.part.microbatch + 1), "small" if vpp == 1 else "tiny")


def context() -> str:
    """Draw the chunks of a sample on every rank, and the pairs of chunks that attend under a causal mask."""
    ranks = 4
    chunks = 2 * ranks
    owner = {token: rank for rank in range(ranks) for run in head_tail_runs(chunks, ranks, rank) for token in run}
    drawing = Drawing(
        f"Head-tail chunks over {ranks} context-parallel ranks: all have the same work under a causal mask"
    )
    drawing.write(_LEFT, 20, f"cp{ranks}: a sample in {chunks} chunks", "bold")
    cell, left, top = 22, 46, 52
    drawing.write(left + chunks * cell / 2, 34, "keys", "quiet small middle")
    drawing.write(_LEFT, top - 8, "queries", "quiet small")
    work = [0.0] * ranks
    for query in range(chunks):
        drawing.box(_LEFT, top + query * cell, cell, cell, f"c{owner[query]}", str(query), "small")
        for key in range(query + 1):
            drawing.box(
                left + key * cell,
                top + query * cell,
                cell,
                cell,
                f"c{owner[query]}",
                "" if key < query else "½",
                "small",
            )
            work[owner[query]] += 1 if key < query else 0.5
    x = left + chunks * cell + 14
    for rank in range(ranks):
        y = top + rank * 46
        drawing.box(x, y, 34, 15, f"c{rank}", f"cp{rank}", "small")
        held = [str(token) for token in owner if owner[token] == rank]
        drawing.write(x + 40, y + 11, f"chunks {' and '.join(held)}", "small")
        drawing.write(x, y + 28, f"{work[rank]:g} blocks of attention", "quiet small")
    return drawing.svg()


def data_sharding() -> str:
    """Draw what one rank holds under every ZeRO stage, by the planner."""
    drawing = Drawing("Weights, gradients and optimizer states of Llama 3 8B on one of eight GPUs, by ZeRO stage")
    drawing.write(_LEFT, 20, "Llama 3 8B on 8 GPUs: GiB on each of them", "bold")
    kinds = {"weights": "c0", "gradients": "c1", "optimizer": "c2"}
    for index, (kind, fill) in enumerate(kinds.items()):
        drawing.box(_LEFT + index * 84, 30, 11, 11, fill)
        drawing.write(_LEFT + index * 84 + 15, 39, kind, "small")
    rows = []
    for stage in range(4):
        spec = _spec(f"parallel=zero{stage}dp8", "cluster.nodes=1")
        (memory,) = memory_by_rank(spec)
        rows.append((f"zero{stage}", spec.parallel.data_sharding, {kind: memory.kinds[kind] / 2**30 for kind in kinds}))
    scale = (_RIGHT - _LEFT - 40) / max(sum(sizes.values()) for _, _, sizes in rows)
    for row, (name, sharding, sizes) in enumerate(rows):
        y = 64 + row * 42
        drawing.write(_LEFT, y - 4, f"{name}: {sharding}", "small")
        x = float(_LEFT)
        for kind, size in sizes.items():
            width = size * scale
            drawing.box(x, y, width, 20, kinds[kind], f"{size:.1f}" if width > 16 else "", "small")
            x += width
        drawing.write(x + 5, y + 14, f"{sum(sizes.values()):.0f}", "bold")
    drawing.write(_LEFT, 64 + 4 * 42 - 8, "In a backward pass, without activations: bf16, fp32 main", "quiet small")
    drawing.write(_LEFT, 64 + 4 * 42 + 5, "params, AdamW. Weights include what is all-gathered.", "quiet small")
    return drawing.svg()


def experts() -> str:
    """Draw the dense grid and the expert grid over the same ranks."""
    spec = _spec("parallel=tp2dp4ep4sp", "cluster.nodes=1", "model.num_layers=2", recipe="mixtral_8x7b")
    topology = Topology.from_spec(spec)
    dense, grid, number = topology.dense_grid, topology.expert_grid, spec.model.moe.num_experts
    assert number is not None
    drawing = Drawing("Dense layers and routed experts over the same eight ranks")
    drawing.write(_LEFT, 20, f"parallel=tp2dp4ep4sp, {number} experts in a layer", "bold")
    left, cell = 62, 35.5
    labels = ((34, "rank"), (66, "dense"), (80, "layers"), (118, "routed"), (132, "experts"))
    for y, words in labels:
        drawing.write(_LEFT, y + 12, words, "small")
    for rank in range(topology.world):
        x = left + rank * cell
        at, expert_at = dense.coordinates(rank), grid.coordinates(rank)
        axis = Axis("ep_etp", topology.ep * topology.etp, expert_at["ep"] * topology.etp + expert_at["etp"])
        blocks = ExpertBlocks(axis, number, topology.etp)
        drawing.box(x, 34, cell, 18, "none", str(rank))
        drawing.box(x, 60, cell, 40, f"{'cd'[at['tp']]}0")
        drawing.write(x + cell / 2, 76, f"dp{at['dp']}", "small middle")
        drawing.write(x + cell / 2, 90, f"tp{at['tp']}", "small middle")
        drawing.box(x, 108, cell, 54, f"c{expert_at['ep']}")
        held = range(blocks.first, blocks.first + blocks.num_local)
        drawing.write(x + cell / 2, 124, f"edp{expert_at['edp']}", "small middle")
        drawing.write(x + cell / 2, 138, f"ep{expert_at['ep']}", "small middle")
        drawing.write(x + cell / 2, 154, f"E{held[0]}-E{held[-1]}", "small bold middle")
    y = 168
    for group in grid.groups("ep"):
        x = left + group[0] * cell
        drawing.box(x + 2, y, len(group) * cell - 4, 16, "none", "all-to-all", "small")
    drawing.write(_LEFT, y + 30, "Ranks of one colour hold the same shard of the weights.", "quiet small")
    return drawing.svg()
