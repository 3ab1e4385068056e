"""Arithmetic of traffic: ring all-reduce, the embedding unfused and fused, low-rank messages, and the counters."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from optimus_cc_ext import OptimusConfig
from optimus_cc_ext.collectives.legs import Bytes, Span, all_reduce
from optimus_cc_ext.config.classes import CLASSES, EMBEDDING, PIPELINE_FORWARD
from optimus_cc_ext.metrics.traffic import Traffic
from optimus_cc_ext.techniques.fused_embedding_sync import RankPlace, union_ranks
from optimus_cc_ext.techniques.messages import LinkPlan
from optimus_cc_ext.techniques.schedule import Message
from tests.embedding_bytes import embedding_bytes

VOCABULARY = 4 * 51200 * 1920
"""Bytes of the 2.5B model's embedding in fp32; divisible by every number of ranks used below."""


@pytest.mark.parametrize(("sharded", "unfused", "fused"), [(False, 2.5, 1.75), (True, 1.75, 1.0)])
def test_at_four_replicas_fused_sends_what_the_paper_says_and_of_shards_only_they_cross_the_stages(
    sharded: bool, unfused: float, fused: float
) -> None:
    for format, share in ((None, unfused), ("dense", fused)):
        assert embedding_bytes(VOCABULARY // 4, 4, sharded=sharded, fused=format) == share * VOCABULARY


def test_one_rank_alone_sends_nothing() -> None:
    assert all_reduce(VOCABULARY, Span(1)).nbytes == 0


@given(values=st.integers(1, 2**38), replicas=st.integers(1, 1024))
def test_the_embeddings_bytes_follow_the_papers_formulas(values: int, replicas: int) -> None:
    # Each all-reduce counts whole bytes, and so rounds down by less than one.
    nbytes = 4 * values
    exact = Fraction(nbytes * (3 * replicas - 2), replicas)
    assert exact - 2 < embedding_bytes(values, replicas) <= exact
    exact = Fraction(nbytes * (2 * replicas - 1), replicas)
    assert exact - 1 < embedding_bytes(values, replicas, fused="dense") <= exact


def test_the_fused_group_is_both_stages_replicas_of_one_tensor_rank() -> None:
    # Megatron orders the ranks of TP2 x PP4 x DP2 by tensor-parallel rank first, then by replica, then by stage.
    places = [
        RankPlace(rank=rank, stage=rank // 4, tensor_rank=rank % 2) for rank in (5, 12, 3, 0, 14, 1, 2, 15, 13, 8)
    ]
    assert union_ranks(places, 4) == [[0, 2, 12, 14], [1, 3, 13, 15]]


def test_a_message_of_the_8_3b_model_is_140_times_smaller_at_rank_16() -> None:
    plan = LinkPlan(OptimusConfig(), sending_stage=1, receiving_stage=0)
    shape = torch.Size((1024, 8, 3072))
    assert plan.compresses(Message(chunk=0, epilogue=True), shape)
    packed = torch.empty(plan.factors(shape, torch.bfloat16).numel, dtype=torch.bfloat16, device="meta")
    assert packed.numel() == 16 * (8192 + 3072)
    assert round(shape.numel() / packed.numel()) == 140


def test_counters_add_up_by_class_raw_and_sent() -> None:
    traffic = Traffic()
    traffic.add(EMBEDDING, Bytes(10, 6.4), Bytes(7, 2))
    traffic.add(EMBEDDING, Bytes(10, 0), Bytes(7, 0))
    traffic.add(PIPELINE_FORWARD, Bytes(3, 0), Bytes(3, 0))
    assert traffic.total() == dict.fromkeys(CLASSES, (0, 0)) | {PIPELINE_FORWARD: (3, 3), EMBEDDING: (20, 14)}
    listed = [n for traffic_class in CLASSES for n in traffic.total()[traffic_class]] + [6, 2]
    assert traffic.as_list() == traffic.since_last_report() == listed
    traffic.add(EMBEDDING, Bytes(1, 0), Bytes(0, 0))
    assert traffic.since_last_report() == [n == 2 * CLASSES.index(EMBEDDING) for n in range(16)]
    assert traffic.total()[EMBEDDING] == (21, 14)
