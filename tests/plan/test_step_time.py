"""The time model by its parts: placement of groups, volume of collectives, overlap, pipeline stages."""

from __future__ import annotations

import cProfile
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_specs import resolved
from published_runs import DGXC

from megalaunch.plan.cost import MEGATRON, UnknownChipSpeed, step_time
from megalaunch.plan.cost.communication import CommTime, Interconnect, context_parallel
from megalaunch.plan.cost.constants import HOST_LAUNCH, HOST_LINK, NETWORK
from megalaunch.plan.cost.stacks import ENGINE_EAGER, ENGINE_WITHOUT_TRITON, Stack, describe_kernels, engine_stack
from megalaunch.plan.flops import step_flops
from megalaunch.plan.memory.dtypes_and_groups import DtypesAndGroups
from megalaunch.plan.memory.profiles import profile_for
from megalaunch.plan.memory.saved_activations import saved_bytes
from megalaunch.plan.prediction import predict
from megalaunch.plan.resolve import derive
from megalaunch.plan.stage_params import chunks_by_rank, params_by_rank
from megalaunch.plan.topology import Topology
from megalaunch.platform.chips import CHIPS
from megalaunch.schema import with_values

WIRES = Interconnect(link=400.0, network=50.0, node=8)


@pytest.fixture(scope="module")
def seventy():
    return DGXC[1].spec


def _with(spec, **values):
    return derive(with_values(spec, {path.replace("__", "."): value for path, value in values.items()}))[0]


def test_states_in_host_memory_are_planned(seventy):
    """Half of 16 bytes a parameter of a rank (moments, and buffers of weight and gradient), for 8 devices of a node."""
    states = 2 * 4 + 2 * 4
    none, half = (predict(_with(seventy, optimizer__optimizer_offload_fraction=f)) for f in (0.0, 0.5))
    assert none.host_bytes == 0
    owned = none.memory.optimizer / 8
    assert half.memory.optimizer == pytest.approx(none.memory.optimizer / 2)
    assert half.host_bytes >= 0.5 * states * owned * 8 * 0.99
    assert none.time is not None
    assert half.time is not None
    assert half.time.optimizer > none.time.optimizer


def test_context_parallel_ranks_gather_and_reduce_alike_with_and_without_sharding():
    """Of one data-parallel rank both shard over cp alone."""
    base = ("recipe=llama3_8b", "cluster.nodes=1", "cluster.devices_per_node=8", "parallel=tp4cp2dp1")
    whole, sharded = (predict(resolved(*base, f"parallel.data_sharding={name}")[0]) for name in ("no_shard", "optim"))
    assert whole.time == sharded.time
    assert whole.memory.kinds == sharded.memory.kinds


def test_only_the_layers_that_are_recomputed_are_computed_again(seventy):
    """Of recompute.method=block the first `num_layers` of a stage; selective recomputation only where none offload."""
    full, block = (
        step_time(_with(seventy, recompute__granularity="full", recompute__method=method, recompute__num_layers=1))
        for method in ("uniform", "block")
    )
    layers = max(sum(count for _, count in chunk.kinds) for chunks in chunks_by_rank(seventy) for chunk in chunks)
    assert layers > 1
    assert block.recompute == pytest.approx(full.recompute / layers)
    plain = _with(seventy, parallel__pp=1, parallel__vpp=None, parallel__dp=8, recompute__granularity="selective")
    some = _with(plain, recompute__cpu_offloading_num_layers=20)
    assert step_time(some).recompute == pytest.approx(step_time(plain).recompute * 60 / 80)


def test_offloaded_activations_wait_for_the_link_to_the_host(seventy):
    """Of the copies of both ways that is exposed which takes longer than what it overlaps with."""
    spec = _with(seventy, parallel__pp=1, parallel__vpp=None, parallel__dp=8, recompute__granularity="none")
    none, some, most = (predict(_with(spec, recompute__cpu_offloading_num_layers=n)) for n in (0, 8, 79))
    assert none.offloaded_bytes == 0
    assert none.time.communication["host"] == CommTime()
    layer = saved_bytes(
        spec.model, chunks_by_rank(spec)[0][0].kinds[0][0], DtypesAndGroups.from_spec(spec), profile_for(spec)
    )
    tokens = Topology.from_spec(spec).micro_batch_size * spec.batch.sequence_length / 2  # of a cp rank
    assert some.offloaded_bytes == pytest.approx(8 * layer.without_recompute * tokens * 8)
    bus = HOST_LINK.value * CHIPS["h100"].host_bandwidth
    microbatches = Topology.from_spec(spec).microbatches
    for prediction in (some, most):
        host = prediction.time.communication["host"]
        assert host.exposed + host.hidden == pytest.approx(2 * microbatches * prediction.offloaded_bytes / 8 / bus)
        assert prediction.time.total - none.time.total == pytest.approx(host.exposed)
    assert some.time.communication["host"].exposed == 0  # the other layers take longer
    # All layers but one: their backward hides the copies back, one layer and the forward pass those to the host.
    host, layers = most.time.communication["host"], none.time
    computed = sum((layers.matmul, layers.attention, layers.memory, layers.recompute))
    expected = (host.exposed + host.hidden) / 2 - computed * (1 - 2 / 3 * 79 / 80)
    assert host.exposed == pytest.approx(expected, rel=0.02)  # `memory` has copies of FSDP, which hide nothing


def test_a_group_inside_a_node_uses_its_links():
    assert WIRES.ring(800.0, 8, 1) == 800 * 7 / 8 / 400
    assert WIRES.ring(800.0, 1, 1) == 0


def test_members_of_one_node_share_their_adapters():
    assert WIRES.inside(16, 2) == 4
    assert WIRES.ring(800.0, 16, 2) == 800 * 15 / 16 / (4 * 50)
    assert WIRES.ring(800.0, 4, 8) == 800 * 3 / 4 / 50  # one a node


def test_a_group_that_is_not_aligned_with_nodes_crosses_them():
    """Of groups of 6 on nodes of 8 the second has 2 members in the first node; a rack is not divided so."""
    assert WIRES.inside(6, 1) == 2
    assert WIRES.ring(600.0, 6, 1) == 600 * 5 / 6 / (2 * 50)
    assert WIRES.inside(12, 1) == 4
    assert WIRES.inside(2, 3) == 1  # the third pair is ranks 6 and 9
    assert WIRES.inside(4, 2) == 4
    assert replace(WIRES, node=72, rack=True).inside(64, 1) == 64


def test_all_to_all_waits_for_the_slower_part():
    assert WIRES.all_to_all(1600.0, 16, 1) == 1600 * 8 / 16 / 50
    assert WIRES.all_to_all(800.0, 8, 1) == 800 * 7 / 8 / 400


def test_the_parts_of_a_step_add_up(seventy):
    time_ = step_time(seventy)
    assert time_.total == pytest.approx(time_.compute + time_.exposed + time_.bubble + time_.optimizer)
    assert time_.flops == step_flops(seventy)
    assert time_.tokens_per_second_per_device == pytest.approx(128 * 8192 / 64 / time_.total)
    assert (
        time_.mfu_causal
        < time_.mfu_full
        == pytest.approx(time_.mfu_causal * step_flops(seventy, full_attention=True) / step_flops(seventy))
    )


def test_keys_of_dealt_documents_travel_once_each_way(seventy):
    """An all-gather counts a second gather in the backward pass."""
    spec = _with(seventy, parallel__cp=2, data__reset_attention_mask=True)
    gathered, dealt = (
        step_time(_with(spec, **{f"parallel__{key}": value})).communication["cp"]
        for key, value in (("cp_comm_type", "allgather"), ("dynamic_context_parallel", True))
    )
    assert dealt.exposed == pytest.approx(gathered.exposed * 2 / 3)
    assert dealt.hidden == 0


HSDP = ("recipe=llama3_8b", "platform=h100", "cluster.nodes=4", "batch.micro_batch_size=1")


@pytest.mark.parametrize("sharding", ["zero2", "zero3"])
def test_replicas_gather_within_a_node_and_all_reduce_their_shards_between_nodes(sharding):
    """With a node a replica only the all-reduce waits for the network: twice 3/4 of the fp32 gradients of a shard."""

    def seconds(layout: str, bandwidth: float) -> float:
        spec = resolved(*HSDP, f"parallel={layout}", f"cluster.node_bandwidth={bandwidth}")[0]
        dp = step_time(spec).communication["dp"]
        return dp.exposed + dp.hidden

    spec = resolved(*HSDP, f"parallel=hsdp4{sharding}")[0]
    shard = 4 * params_by_rank(spec, 1, 1)[0].dense / 8
    all_reduce = 2 * shard * 3 / 4 / (NETWORK.value * 10e9)
    layout = f"hsdp4{sharding}"
    assert seconds(layout, 10) - seconds(layout, 20) == pytest.approx(all_reduce / 2)
    inside = seconds(layout, 10) - all_reduce  # as of one node: its batch has as many microbatches
    alone = "parallel.dp=8", "cluster.nodes=1", f"batch.global_batch_size={spec.batch.global_batch_size // 4}"
    one = step_time(resolved(*HSDP, f"parallel={sharding}", *alone)[0]).communication["dp"]
    assert inside == pytest.approx(one.exposed + one.hidden)
    assert seconds(sharding, 10) > 1.5 * seconds(layout, 10)


@pytest.mark.parametrize("sharding", ["zero2", "zero3"])
def test_the_all_reduce_over_replicas_overlaps_with_the_last_backward_alone(sharding):
    """It runs once a step: with more microbatches nothing more of it is hidden."""

    def exposed(layout: str, samples: int) -> float:
        values = (f"parallel={layout}", "cluster.node_bandwidth=1", f"batch.global_batch_size={samples}")
        return step_time(resolved(*HSDP, *values)[0]).communication["dp"].exposed

    few, many = (exposed(f"hsdp4{sharding}", samples) for samples in (64, 512))
    assert few > 1
    assert many == pytest.approx(few, rel=0.01)


def test_a_ring_is_hidden_as_far_as_attention_lasts(seventy):
    """Keys, values and the fp32 gradients of both."""
    spec = _with(seventy, parallel__cp=2)

    def ring(attention: float) -> CommTime:
        topology = Topology.from_spec(spec)
        return context_parallel(
            spec,
            topology,
            Interconnect.from_cluster(spec, CHIPS[spec.platform.chip], 8),
            engine_stack(spec),
            4096,
            attention,
        )

    whole = ring(0.0)
    assert whole.hidden == 0 < whole.exposed
    assert ring(whole.exposed) == CommTime(0.0, whole.exposed)


def test_the_bubble_shrinks_with_virtual_stages_and_microbatches(seventy):
    plain = step_time(_with(seventy, parallel__vpp=None, parallel__overlap_p2p_comm=False))
    assert plain.bubble == pytest.approx(5 * step_time(seventy).bubble, rel=0.1)
    double = step_time(_with(seventy, batch__global_batch_size=256))
    assert double.bubble == pytest.approx(step_time(seventy).bubble)
    assert double.total < 2 * step_time(seventy).total


def test_weights_of_many_virtual_stages_are_gathered_again(seventy):
    """torch's pipeline runtime keeps those of three: gathered weights cost more from the fourth on."""

    def dp_seconds(vpp: int, stack: Stack) -> float:
        dp = step_time(_with(seventy, parallel__vpp=vpp), stack).communication["dp"]
        return dp.exposed + dp.hidden

    freed, kept = ENGINE_EAGER, replace(ENGINE_EAGER, frees_stages=False)
    assert seventy.parallel.vpp == 5
    assert dp_seconds(5, freed) > 2 * dp_seconds(5, kept)
    assert dp_seconds(2, freed) == dp_seconds(2, kept)
    assert step_time(seventy, freed).total > step_time(seventy, kept).total


@pytest.mark.parametrize(
    "change",
    [
        {"parallel__tp_comm_overlap": False},
        {"parallel__overlap_grad_reduce": False},
        {"recompute__granularity": "full"},
        {"cluster__node_bandwidth": 5.0},
        {"precision__compute_dtype": "fp32"},
        {"model__attention_output_gate": True},
    ],
)
def test_what_makes_a_step_slower(seventy, change):
    assert step_time(_with(seventy, **change)).total > step_time(seventy).total * 1.0001


def test_a_window_shortens_attention():
    overrides = ("platform=h100", "cluster.devices_per_node=8", "batch.sequence_length=8192",
                 "batch.global_batch_size=8", "train.steps=1", "precision=bf16", "model=llama3_8b")  # fmt: skip
    full, windowed = resolved(*overrides)[0], resolved(*overrides, "model.sliding_window=1024")[0]
    assert step_time(windowed, MEGATRON).attention < step_time(full, MEGATRON).attention / 3
    assert step_time(windowed).attention < step_time(full).attention  # by small blocks, which are merged


def test_a_node_of_four_ends_at_four_and_a_rack_does_not():
    overrides = ("model=llama3_8b", "parallel=tp8", "cluster.nodes=2", "cluster.devices_per_node=4", "precision=bf16",
             "batch.sequence_length=8192", "batch.global_batch_size=8", "train.steps=1")  # fmt: skip
    h100, rack = (step_time(resolved(*overrides, f"platform={chip}")[0]) for chip in ("h100", "gb200"))
    whole = step_time(resolved(*overrides, "platform=h100", "cluster.nodes=1", "cluster.devices_per_node=8")[0])
    assert h100.communication["tp"].exposed == pytest.approx(whole.communication["tp"].exposed * 360 / (4 * 42.5))
    assert rack.communication["tp"].exposed == pytest.approx(whole.communication["tp"].exposed / 2)


def test_a_chip_without_figures_has_no_time():
    spec, _ = resolved("recipe=tiny", "data.corpus=x")
    with pytest.raises(UnknownChipSpeed, match="the speed of cpu is unknown"):
        step_time(spec)
    spec, _ = resolved("recipe=llama3_8b", "platform=a100_80gb", "precision.compute_dtype=fp8")
    with pytest.raises(UnknownChipSpeed, match="no known peak in fp8"):
        step_time(spec)


def test_a_model_fits_a_search():
    """A search times thousands of layouts. Counted in calls, 2,000 a millisecond: seconds depend on the machine."""
    spec = DGXC[2].spec
    step_time(spec)  # fills the caches
    profile = cProfile.Profile()
    profile.runcall(step_time, spec)
    assert sum(entry.callcount for entry in profile.getstats()) < 2000


DEGREE = st.sampled_from([1, 1, 2, 3, 4, 8])
LAYOUTS = st.fixed_dictionaries(
    {
        **{f"parallel.{axis}": DEGREE for axis in ("tp", "pp", "cp", "ep")},
        "parallel.vpp": st.sampled_from([None, 2, 4]),
        "parallel.dp_replicate": st.sampled_from([1, 2]),
        "parallel.sequence_parallel": st.booleans(),
        "parallel.cp_comm_type": st.sampled_from(["p2p", "a2a", "allgather", "a2a+p2p"]),
        "parallel.data_sharding": st.sampled_from(["no_shard", "optim", "optim_grads", "optim_grads_params"]),
        "cluster.nodes": st.sampled_from([1, 2, 16]),
        "batch.sequence_length": st.sampled_from([1, 64, 4096]),
        "recompute.granularity": st.sampled_from(["none", "full", "selective"]),
    }
)


@settings(max_examples=50, deadline=None)
@given(st.sampled_from([("model=llama3_8b",), ("model=mixtral_8x7b",), ("model=deepseek_v2_lite",)]), LAYOUTS)
def test_any_layout_has_a_plan_or_a_reason(model, values):
    overrides = ("platform=h100", "precision=bf16", "cluster.devices_per_node=8", "train.steps=1")
    base, _ = resolved(*model, *overrides, "batch.sequence_length=64", "batch.global_batch_size=96")
    spec = derive(with_values(base, {"parallel.dp": None, **values}))[0]
    try:
        prediction = predict(spec)
    except ValueError:  # what the checker has findings about
        return
    assert prediction.time is not None
    assert 0 < prediction.time.mfu_causal < 1
    assert prediction.time.exposed >= 0
    assert all(size >= 0 for memory in prediction.by_rank for size in memory.kinds.values())


def test_matmuls_of_fp32_use_tensor_cores_only_in_tf32(seventy):
    plain = _with(seventy, precision__compute_dtype="fp32")
    rounded = _with(plain, precision__tf32=True)
    chip = CHIPS[seventy.platform.chip].peak_flops
    assert step_time(plain).matmul / step_time(rounded).matmul == pytest.approx(chip["tf32"] / chip["fp32"])


def test_the_kernels_are_those_of_the_spec(seventy):
    """Compiled blocks move less memory; dropout has no fused kernel; a ring merges what a2a computes whole.

    A soft cap in a ring has FlexAttention, at 0.86 of the rate, with 2 passes forward and 2.5 backward in place of 3.5.
    """
    eager = step_time(seventy)
    assert step_time(_with(seventy, train__compile=True)).memory < eager.memory
    assert eager.stack.name != step_time(seventy, MEGATRON).stack.name
    assert eager.attention > 1.5 * step_time(seventy, MEGATRON).attention  # flash attention of torch, for cuDNN
    dropped = step_time(_with(seventy, model__attention_dropout=0.1))  # a second call, whose values are 16 wide
    assert dropped.attention == pytest.approx((1 + 144 / 256) * 4.5 / 3.5 / 0.86 * eager.attention, rel=0.03)
    in_fp32 = {"model__attention_backend": "math", "model__attention_dropout": 0.1}
    assert step_time(_with(seventy, **in_fp32)).attention > 3 * eager.attention  # scores in memory
    capped = step_time(_with(seventy, model__attn_logit_softcapping=30.0))
    assert capped.attention == pytest.approx(4.5 / 3.5 / 0.86 * eager.attention, rel=0.03)
    assert step_time(_with(seventy, parallel__cp_comm_type="a2a")).attention < eager.attention
    cast = _with(seventy, precision__compute_dtype="fp8")
    assert step_time(cast).memory > 1.2 * eager.memory
    assert step_time(cast, ENGINE_WITHOUT_TRITON).memory > 2 * step_time(cast).memory


def test_matmuls_of_a_run_in_fp8_that_stay_in_bf16(seventy):
    """Of 80 layers 4 first and 4 last ones; of every layer in fp8 a third of its matmuls, those of weight gradients.

    With pp4 the middle stages hold no layer in bf16: the slowest stage has 4 of its 20.
    """
    one_stage = _with(seventy, precision__compute_dtype="fp8", parallel__pp=1, parallel__vpp=1, parallel__dp=8)
    bf16 = step_time(_with(one_stage, precision__compute_dtype="bf16")).matmul
    fp8 = step_time(one_stage)
    ends = {"precision__fp8__first_layers_bf16": 4, "precision__fp8__last_layers_bf16": 4}
    both = step_time(_with(one_stage, **ends))
    assert both.matmul == pytest.approx(fp8.matmul + 0.1 * (bf16 - fp8.matmul))
    assert both.memory < fp8.memory
    half = step_time(_with(one_stage, precision__fp8__wgrad=False))
    assert half.matmul == pytest.approx(fp8.matmul + (bf16 - fp8.matmul) / 3)
    staged = _with(one_stage, parallel__pp=4, parallel__dp=2)
    assert step_time(_with(staged, **ends)).matmul == pytest.approx(
        step_time(staged).matmul * (1 + 0.2 * (bf16 / fp8.matmul - 1))
    )


def test_casts_to_fp8_take_the_time_of_their_recipe(seventy):
    """A kernel that takes the amax with the cast reads a value once; with wgrad=false each value is cast once."""

    def traffic(**fp8):
        settings = {f"precision__fp8__{key}": value for key, value in fp8.items()}
        stack = engine_stack(_with(seventy, precision__compute_dtype="fp8", **settings))
        return stack.cast_traffic.value, stack.weight_cast_traffic.value

    assert traffic(recipe="tensorwise") == (8, 10)
    assert traffic(recipe="rowwise") == (10, 10)
    assert traffic(recipe="delayed") == (5, 6)
    assert traffic(recipe="blockwise") == traffic(recipe="mxfp8") == (5, 6)
    assert traffic(recipe="tensorwise", wgrad=False) == (5, 10)
    assert traffic(recipe="delayed", wgrad=False) == (3, 6)
    assert engine_stack(seventy) is ENGINE_EAGER


@pytest.mark.parametrize(("chip", "slower", "slower_in_tf32"), [("h100", 989 / 67, 2), ("a100_80gb", 16, 2)])
def test_emulated_fp8_multiplies_in_fp32(seventy, chip, slower, slower_in_tf32):
    """Fp32 units multiply what was cast to fp8 and back; weight gradients in 16 bits, a third, are not emulated."""
    bf16 = step_time(_with(seventy, platform__chip=chip))
    settings = {"platform__chip": chip, "precision__compute_dtype": "fp8", "precision__emulate": True}
    emulated = step_time(_with(seventy, **settings))
    assert emulated.matmul == pytest.approx(slower * bf16.matmul)
    assert (emulated.attention, emulated.head) == pytest.approx((bf16.attention, bf16.head))
    tf32 = step_time(_with(seventy, **settings, precision__tf32=True))
    assert tf32.matmul == pytest.approx(slower_in_tf32 * bf16.matmul)
    half = step_time(_with(seventy, **settings, precision__fp8__wgrad=False))
    assert half.matmul == pytest.approx((2 * slower + 1) / 3 * bf16.matmul)
    assert half.memory < emulated.memory


def test_emulated_fp8_moves_operands_in_fp32(seventy):
    """Of each product two operands, 13 bytes a value operator by operator or 5 compiled, and the result, 6."""

    def traffic(**changes):
        stack = engine_stack(_with(seventy, precision__compute_dtype="fp8", **changes))
        return stack.cast_traffic.value, stack.weight_cast_traffic.value

    assert traffic(precision__emulate=True) == (8 + 32, 10 + 32)
    assert traffic(precision__emulate=True, train__compile=True) == (10 + 16, 10 + 16)
    assert traffic(precision__emulate=True, precision__fp8__wgrad=False) == (5 + 19, 10 + 26)
    assert traffic(precision__emulate=True, platform__chip="a100_80gb") == (50.5 + 32, 66 + 32)  # no Triton casts
    assert traffic(platform__chip="mi300x") == (50.5, 66)
    emulated = _with(seventy, precision__compute_dtype="fp8", precision__emulate=True)
    assert step_time(emulated).memory > step_time(_with(emulated, precision__emulate=False)).memory
    kernels = dict(describe_kernels(emulated, engine_stack(emulated)))
    assert kernels["matmuls"] == "fp8 emulated in fp32, no tensor cores"
    on_a100 = _with(emulated, platform__chip="a100_80gb")
    assert "operator by operator" in dict(describe_kernels(on_a100, engine_stack(on_a100)))["casts to fp8"]


def test_an_all_to_all_hides_behind_no_more_than_the_compute():
    """Of 235B parameters over 32 expert-parallel ranks; with a faster network the assumed share is exposed."""
    spec, _ = resolved("recipe=qwen3_235b_a22b", "data.corpus=x", "parallel.overlap_moe_expert_parallel_comm=true")
    time = step_time(spec, MEGATRON)
    hidden = time.communication["ep"].hidden
    assert hidden == pytest.approx(time.matmul + time.attention + time.memory + time.recompute, rel=0.01)
    fast = step_time(_with(spec, cluster__node_bandwidth=400.0), MEGATRON).communication["ep"]
    assert fast.exposed == pytest.approx(0.2 * (fast.exposed + fast.hidden))


def test_depths_of_multi_token_prediction_are_no_last_layers():
    deep = resolved("recipe=deepseek_v3", "precision.compute_dtype=fp8", "precision.fp8.last_layers_bf16=1")[0]
    kinds = {kind for chunks in chunks_by_rank(deep) for chunk in chunks for kind, _ in chunk.kinds}
    assert {(kind.bf16, kind.mtp) for kind in kinds if kind.bf16 or kind.mtp} == {(True, False), (False, True)}


def test_a_small_model_waits_for_the_host_unless_its_layers_are_graphs():
    sizes = {"hidden_size": 256, "ffn_hidden_size": 512, "num_attention_heads": 4, "num_query_groups": 4}
    overrides = ("model=llama3_8b", *(f"model.{name}={size}" for name, size in sizes.items()), "platform=h100",
                 "model.vocab_size=1024", "cluster.devices_per_node=1", "precision=bf16", "train.steps=1",
                 "batch.sequence_length=256", "batch.global_batch_size=1")  # fmt: skip
    found = step_time(resolved(*overrides)[0])
    assert found.launch_overhead > 0.5 * found.total
    assert found.total > 32 * found.stack.launches.value * HOST_LAUNCH.value
    spec = resolved(*overrides, "train.cuda_graphs=true")[0]
    replayed = step_time(spec)
    assert replayed.launch_overhead < found.launch_overhead / 10
    assert dict(describe_kernels(spec, replayed.stack))["blocks"].endswith("layers replayed as CUDA graphs")


def test_more_chunks_of_the_loss_cost_time(seventy):
    few, many = (step_time(_with(seventy, train__loss_chunks=chunks)).head for chunks in (2, 16))
    assert few < many


@pytest.mark.parametrize("chunks", [1, 2])
def test_kernels_move_fewer_bytes_for_the_loss(seventy, chunks):
    """6 bytes a logit instead of 44: the difference is 38 over 6 of what those 6 take."""
    chunked = _with(seventy, train__loss_chunks=chunks)
    assert ENGINE_EAGER.fused_logit_traffic is not None
    more = ENGINE_EAGER.with_value("fused_logit_traffic", 2 * ENGINE_EAGER.fused_logit_traffic.value)
    fused, twice, apart = (step_time(chunked, stack).head for stack in (ENGINE_EAGER, more, ENGINE_WITHOUT_TRITON))
    assert apart - fused == pytest.approx(38 / 6 * (twice - fused), rel=1e-3)


@pytest.mark.parametrize(("platform", "triton"), [("h100", True), ("mtt_s4000", False), ("npu", False)])
def test_a_plan_names_triton_where_the_engine_has_its_kernels(platform, triton):
    spec, _ = resolved("recipe=llama3_8b", f"platform={platform}")
    stack = engine_stack(spec)
    assert ("Triton" in dict(describe_kernels(spec, stack))["blocks"]) == triton
    assert (stack.swiglu_traffic == ENGINE_EAGER.swiglu_traffic) == triton
    assert (stack.gated_traffic == ENGINE_EAGER.gated_traffic) == triton
