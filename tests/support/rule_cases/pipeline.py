"""Cases of the rules of pipelines: the split of layers, and schedules."""

from rule_cases.case import TINY, Case

SMALL = (*TINY, "batch.micro_batch_size=1")
FOUR = (*SMALL, "model.num_layers=4", "parallel.pp=2")
EIGHT = (*SMALL, "model.num_layers=8")
WITH_MTP = (*TINY, "model.num_layers=4", "model.mtp.num_layers=1", "parallel.pp=2")
INTERLEAVED = (*SMALL, "parallel=pp2vpp2", "model.num_layers=4")


def layout(text: str) -> str:
    return f"parallel.pipeline_layout={text}"


CASES = {
    "parallel.layers_by_pp": Case("model.num_layers=3 parallel=pp2", "model.num_layers=4 parallel=pp2"),
    "parallel.vpp_needs_pp": Case("parallel=vpp2", "parallel=vpp1"),
    "parallel.layers_by_vpp": Case("parallel=pp2vpp2 model.num_layers=6", "parallel=pp2vpp3 model.num_layers=6"),
    "parallel.one_division": Case(
        "parallel.num_layers_in_first_pipeline_stage=1 parallel.account_for_loss_in_pipeline_split=true",
        "parallel.num_layers_in_first_pipeline_stage=1",
        FOUR,
    ),
    "parallel.uneven_needs_pp": Case(
        "parallel.num_layers_in_first_pipeline_stage=2", "parallel.num_layers_in_first_pipeline_stage=1 parallel=pp2"
    ),
    "parallel.uneven_rest": Case(
        "parallel=pp4 parallel.num_layers_in_first_pipeline_stage=1",
        "parallel=pp4 parallel.num_layers_in_first_pipeline_stage=2",
        EIGHT,
    ),
    "parallel.layout_grammar": Case(layout("Ett|ttH"), layout("Ett|ttL"), FOUR),
    "parallel.layout_by_pp": Case(layout("Et|tt|tL"), layout("Et|t|t|tL"), FOUR),
    "parallel.layout_by_vpp": Case(
        f"{layout('Et|t|t|tL')} parallel.vpp=1", f"{layout('Et|t|t|tL')} parallel.vpp=2", FOUR
    ),
    "parallel.layout_ends": Case(layout("Ett|tt"), layout("E(tt|)ttL"), FOUR),
    "parallel.layout_layers": Case(layout("Ett|tL"), layout("Etttt|L"), FOUR),
    "parallel.layout_mtp": Case(layout("Ett|ttmmL"), layout("Ett|ttmL"), WITH_MTP),
    "parallel.layout_mtp_place": Case(layout("Ett|tmtL"), layout("Ett|ttmL"), WITH_MTP),
    "parallel.empty_stages": Case(layout("Ett||tt|L"), layout("Ett|t|t|L"), FOUR),
    "parallel.counted_ends_need_pp": Case(
        "parallel.account_for_loss_in_pipeline_split=true",
        "parallel=pp3 parallel.account_for_loss_in_pipeline_split=true model.num_layers=5",
    ),
    "parallel.balanced_ranks": Case(
        "parallel=pp2 parallel.num_layers_in_first_pipeline_stage=1 parallel.num_layers_in_last_pipeline_stage=7",
        "parallel=pp2 parallel.num_layers_in_first_pipeline_stage=3 parallel.num_layers_in_last_pipeline_stage=5",
        EIGHT,
    ),
    "parallel.embedding_copies": Case("model.tie_word_embeddings=true", "model.tie_word_embeddings=false", FOUR),
    "parallel.schedule_needs_pp": Case("parallel.schedule=gpipe", "parallel=pp2 parallel.schedule=gpipe"),
    "parallel.interleaved_needs_vpp": Case(
        "parallel=pp2 parallel.schedule=interleaved", "parallel=pp2vpp2 parallel.schedule=interleaved", EIGHT
    ),
    "parallel.one_stage_schedule": Case("parallel.schedule=1f1b", "parallel.schedule=interleaved", INTERLEAVED),
    "parallel.v_schedule": Case(
        "parallel=pp2vpp4 parallel.schedule=zbv", "parallel=pp2vpp2 parallel.schedule=zbv", EIGHT
    ),
    "parallel.enough_microbatches": Case(
        "parallel=pp2vpp2 parallel.schedule=dualpipev batch.global_batch_size=3",
        "parallel=pp2vpp2 parallel.schedule=dualpipev batch.global_batch_size=4",
        EIGHT,
    ),
    "parallel.full_pipeline": Case(
        "parallel=pp4 parallel.schedule=gpipe batch.global_batch_size=3",
        "parallel=pp4 parallel.schedule=gpipe batch.global_batch_size=4",
        EIGHT,
    ),
    "parallel.vpp_microbatches": Case("batch.global_batch_size=7", "batch.global_batch_size=8", INTERLEAVED),
    "parallel.microbatch_group_bounds": Case(
        "parallel.microbatch_group_size_per_vp_stage=1", "parallel.microbatch_group_size_per_vp_stage=2", INTERLEAVED
    ),
    "parallel.microbatch_group_rest": Case(
        "parallel.microbatch_group_size_per_vp_stage=3 batch.global_batch_size=7",
        "parallel.microbatch_group_size_per_vp_stage=3 batch.global_batch_size=8",
        INTERLEAVED,
    ),
    "parallel.microbatch_group_needs_vpp": Case(
        "parallel.microbatch_group_size_per_vp_stage=2",
        "parallel.microbatch_group_size_per_vp_stage=2 parallel.vpp=2",
        FOUR,
    ),
    "parallel.zero_bubble_rounds": Case(
        "parallel.schedule=zero_bubble batch.global_batch_size=7",
        "parallel.schedule=zero_bubble batch.global_batch_size=8",
        FOUR,
    ),
    "parallel.rampup_by_schedule": Case(
        "batch.rampup_batch_size=0:1~256:8", "batch.rampup_batch_size=0:4~256:8", INTERLEAVED
    ),
    "parallel.overlap_p2p_needs_vpp": Case(
        "parallel.overlap_p2p_comm=true", "parallel.overlap_p2p_comm=true parallel.vpp=2", FOUR
    ),
}
