"""Codecs that leave most values out, and the feedback by which what they lose comes later."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import replace
from types import SimpleNamespace

import anyio
import numpy as np
import pytest
import torch
from contexts import make_context, unparsed
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_transport import MemoryNetwork
from pydantic import ValidationError
from test_model_training import make_manifest
from test_runtime_averaging import HASH, Members, gradients_of

from swarm_peer.codecs import DENSE, NEED_FEEDBACK, PLAIN, find_codec, parts
from swarm_peer.codecs.base import is_within
from swarm_peer.codecs.feedback import KEPT_TRIES, ErrorFeedback, flat
from swarm_peer.codecs.parts import averaged, shares_of
from swarm_peer.codecs.sparse import CHUNK_SIZE, KEPT, TOPK_2BIT
from swarm_peer.config import AveragingSection, WireSection
from swarm_peer.model.costs import stage_costs
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.policy.decay import Decay
from swarm_peer.protocol.epochs import BEGINNING, Restart
from swarm_peer.runtime.step.averaging import AveragingFailed
from swarm_peer.runtime.step.cut_averager import CutAverager
from swarm_peer.runtime.step.driver_parts import AverageFailed
from swarm_peer.wire.codecs import encode, encoded_bytes

EACH = pytest.mark.parametrize("name", sorted(NEED_FEEDBACK))


def values(num_values, seed=0):
    return torch.randn(num_values, generator=torch.Generator().manual_seed(seed))


@EACH
@given(num_chunks=st.integers(1, 10**6))
def test_bytes_are_a_twentieth_of_fp32_with_places_and_levels(name, num_chunks):
    assert encoded_bytes((num_chunks * CHUNK_SIZE,), name) <= 4 * num_chunks * CHUNK_SIZE / 20


def test_a_chunk_of_the_sparse_codec_has_772_bytes():
    assert [encoded_bytes((size,), "topk_2bit") for size in (1, 4096, 4097)] == [772, 772, 1544]


def test_numbers_that_are_alike_are_kept_as_far_as_there_is_room():
    for value in (0.0, 2.0):
        decoded = TOPK_2BIT.decode(TOPK_2BIT.encode(torch.full((9000,), value)), 9000)
        assert int((decoded != 0).sum()) == (2 * KEPT + 808 if value else 0)


def test_zeros_among_those_that_are_kept_stay_zeros():
    tensor = torch.zeros(2 * CHUNK_SIZE)
    tensor[5:300] = values(295)
    decoded = TOPK_2BIT.decode(TOPK_2BIT.encode(tensor), len(tensor))
    assert set(decoded.nonzero().view(-1).tolist()) <= set(range(5, 300))
    assert (tensor - decoded).norm() < 0.6 * tensor.norm()


@pytest.mark.parametrize("bits", [0, 1023, 1025, 4096])
def test_bits_of_more_or_fewer_numbers_than_are_kept_make_no_numbers(bits):
    raw = TOPK_2BIT.encode(values(CHUNK_SIZE)).clone()
    raw[4:516] = torch.from_numpy(np.packbits(np.arange(CHUNK_SIZE) < bits, bitorder="little"))
    assert TOPK_2BIT.decode(raw, CHUNK_SIZE).isnan().all()


@settings(deadline=None, max_examples=10)
@given(num_values=st.integers(CHUNK_SIZE, 3 * CHUNK_SIZE), seed=st.integers(0, 9))
def test_the_largest_of_each_chunk_are_kept_with_their_signs_in_two_levels(num_values, seed):
    tensor = values(num_values, seed)
    decoded = TOPK_2BIT.decode(TOPK_2BIT.encode(tensor), num_values)
    for chunk, kept in zip(tensor.split(CHUNK_SIZE), decoded.split(CHUNK_SIZE), strict=True):
        chosen = set(chunk.abs().topk(min(KEPT, len(chunk))).indices.tolist())
        found = set(kept.nonzero().view(-1).tolist())
        assert found == chosen if len(chunk) == CHUNK_SIZE else found <= chosen
        assert torch.equal(kept.sign(), torch.where(kept != 0, chunk.sign(), 0.0))
        assert len(kept.abs().unique()) <= 3, "two levels, and nothing"


@EACH
@given(seed=st.integers(0, 99), scale=st.sampled_from([1e-30, 1e-6, 1.0, 1e9]))
@settings(deadline=None, max_examples=20)
def test_what_is_kept_is_nearer_to_the_values_than_nothing(name, seed, scale):
    codec, tensor = find_codec(name), scale * values(5000, seed)
    lost = (tensor - codec.decode(codec.encode(tensor), 5000)).double()
    assert float(lost.norm()) < 0.9 * float(tensor.double().norm())


@EACH
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_not_encoded(name, bad):
    tensor = torch.zeros(5000)
    tensor[4321] = bad
    with pytest.raises(OverflowError, match="not finite"):
        encode(tensor, name)


@EACH
def test_zeros_stay_zeros(name):
    assert not find_codec(name).decode(find_codec(name).encode(torch.zeros(5000)), 5000).any()


@EACH
@pytest.mark.parametrize("field", ["activations", "gradients"])
def test_wires_do_without_them(name, field):
    with pytest.raises(ValidationError, match=r"'none', .* or 'int4_hadamard'"):
        WireSection.model_validate({field: name})


# --- the average


@EACH
@settings(deadline=None, max_examples=30)
@given(num_members=st.integers(1, 5), num_values=st.integers(1, 9000), seed=st.integers(0, 99))
def test_what_is_averaged_and_what_is_left_over_are_what_was_brought(name, num_members, num_values, seed):
    brought = {f"{number}": values(num_values, seed + number) for number in range(num_members)}
    before = {peer: values(num_values, seed + 50) for peer in brought}
    leftovers = {peer: tensor.clone() for peer, tensor in before.items()}
    average = averaged(brought, 7.0, find_codec(name), leftovers)
    sent = 7 * average + sum(leftovers[peer] - before[peer] for peer in brought)
    torch.testing.assert_close(sent, sum(brought.values()), rtol=0, atol=1e-4)


@pytest.mark.parametrize("num_members", [2, 4, 16])
def test_bytes_of_a_member_do_not_grow_with_the_members(num_members):
    num_values = 3 * 2**19
    shares = shares_of(torch.zeros(num_values), num_members)
    sizes = [sum(encoded_bytes(part.shape, "topk_2bit") for part in share) for share in shares]
    sent = max(sum(sizes) - own + (num_members - 1) * own for own in sizes)
    assert sent <= 2 * encoded_bytes((num_values,), "topk_2bit") * 1.07


def mean_by_feedback(means, shares, tries, codec):
    """The average of one process, whose tries note what is left over."""
    brought = {peer: flat(means[peer]) for peer in shares}
    if not (total := sum(shares.values())):
        for each in tries.values():
            each.keep()
        return torch.zeros_like(next(iter(brought.values())))
    for peer, weight in shares.items():
        tries[peer].bring(brought[peer], weight)
    return averaged(brought, total, find_codec(codec), {peer: each.after for peer, each in tries.items()})


@pytest.mark.parametrize("codec", [*sorted(NEED_FEEDBACK), DENSE])
async def test_members_come_to_the_average_of_one_process_round_after_round(codec, monkeypatch):
    """One is missing in a round, one has nothing to bring but what is left over, and nobody has anything in another."""
    monkeypatch.setattr(parts, "MAX_PART_VALUES", 2 * CHUNK_SIZE)
    async with MemoryNetwork() as network:
        members = Members(network, "topk_2bit", kind="streamed")
        await members.serve()
        num_values = members.averagers[0].num_values
        own, reference = ({peer: ErrorFeedback(num_values) for peer in members.ids} for _ in range(2))
        for round_number, weights in enumerate([(1, 3, 2), (1, 3), (5, 0, 2), (0, 0, 0), (4, 4, 4)]):
            shares = dict(zip(members.ids, weights, strict=False))
            means = {
                peer: [tensor * (weight > 0) for tensor in gradients_of(members.ids.index(peer), round_number)]
                for peer, weight in shares.items()
            }
            found = {}

            async def take_part(peer, name=str(round_number), shares=shares, means=means, found=found):
                averager = members.averagers[members.ids.index(peer)]
                begun = own[peer].begin_try("cut", int(name), codec)
                found[peer] = flat(await averager.average(name, means[peer], shares, begun))

            async with anyio.create_task_group() as tasks:
                for peer in shares:
                    tasks.start_soon(take_part, peer)
            tries = {peer: reference[peer].begin_try("cut", round_number, codec) for peer in shares}
            expected = mean_by_feedback(means, shares, tries, codec)
            for peer in shares:
                assert torch.equal(found[peer], expected), round_number
                for feedback in (own[peer], reference[peer]):
                    assert feedback.settle("cut", round_number, is_member=True)
                assert torch.equal(own[peer].leftover, reference[peer].leftover)
                assert own[peer].norm > 0


async def test_a_member_alone_sends_nothing_and_leaves_nothing_over():
    async with MemoryNetwork() as network:
        members = Members(network, "topk_2bit", kind="streamed")
        feedback = ErrorFeedback(members.averagers[0].num_values)
        feedback.begin_try("first", 0, PLAIN).after.add_(2.0)
        feedback.settle("first", 0, is_member=True)
        begun = feedback.begin_try("second", 1, PLAIN)
        means = gradients_of(0, 0)
        average = await members.averagers[0].average("second", means, {members.ids[0]: 4}, begun)
        feedback.settle("second", 1, is_member=True)
        torch.testing.assert_close(flat(average), flat(means) + 0.5)
        assert feedback.norm == 0


# --- from one try to the next


def tried(feedback, cut, round_number, value):
    begun = feedback.begin_try(cut, round_number, "topk_2bit")
    begun.after.add_(value)
    return begun


def settled(value=1.0):
    feedback = ErrorFeedback(3)
    tried(feedback, "first", 0, value)
    assert feedback.settle("first", 0, is_member=True)
    return feedback


def test_a_try_changes_nothing_until_an_entry_holds_its_cut():
    feedback = ErrorFeedback(3)
    tried(feedback, "first", 0, 1.0)
    assert feedback.leftover is None
    feedback.settle("first", 0, is_member=True)
    assert feedback.leftover.tolist() == [1.0] * 3


def test_what_is_left_over_is_brought_again_in_each_try_and_sent_in_one():
    feedback = settled()
    tries = [tried(feedback, f"attempt {number}", 1, 10.0 + number) for number in range(2)]
    for each in tries:
        values = torch.ones(3)
        each.bring(values, 2)
        assert values.tolist() == [3.0] * 3
    assert feedback.settle("attempt 0", 1, is_member=True), "of two, the one before the newest may become the entry"
    assert feedback.leftover.tolist() == [10.0] * 3
    assert tried(feedback, "next", 2, 0.0).before is feedback.leftover


def test_an_entry_that_is_told_again_counts_once():
    feedback = settled()
    tried(feedback, "second", 1, 5.0)
    for cut, number in (("first", 0), ("second", 1), ("first", 0), ("second", 1)):
        assert feedback.settle(cut, number, is_member=True)
    assert feedback.leftover.tolist() == [5.0] * 3


def test_who_is_left_out_of_an_entry_keeps_what_it_has():
    feedback = settled()
    tried(feedback, "attempt 0", 1, 7.0)
    assert feedback.settle("attempt 1, of others", 1, is_member=False)
    assert feedback.leftover.tolist() == [1.0] * 3
    assert not feedback._tries, "it is not taken for the entry of a later round"


def test_a_member_that_does_not_know_what_was_sent_of_it_is_told_so():
    feedback = settled()
    for number in range(1 + KEPT_TRIES):
        tried(feedback, f"attempt {number}", 1, 7.0)
    assert not feedback.settle("attempt 0", 1, is_member=True)


def test_a_member_is_told_if_it_has_not_seen_the_entry_of_an_earlier_try():
    feedback = settled()
    tried(feedback, "second", 1, 7.0)
    assert not feedback.settle("of others", 2, is_member=False)


def test_a_newcomer_has_nothing_left_over_and_entries_from_before_take_nothing():
    feedback = ErrorFeedback(3)
    assert feedback.settle("of others", 8, is_member=False)
    begun = feedback.begin_try("first", 9, "topk_2bit")
    assert begun.before is None
    values = torch.ones(3)
    begun.bring(values, 2)
    assert values.tolist() == [2.0] * 3


@pytest.mark.parametrize("codec", [*sorted(NEED_FEEDBACK), DENSE])
def test_a_leftover_that_has_become_too_large_is_brought_as_far_as_others_take_it(codec):
    values = torch.ones(3)
    tried(settled(-1e36), "next", 1, 0.0).bring(values, 2)
    assert values.tolist() == [-parts.LARGEST_BROUGHT] * 3
    received = find_codec(codec).decode(find_codec(codec).encode(values), 3)
    assert is_within(received, parts.LARGEST_SUM / 1000)


def test_a_try_that_may_be_in_an_entry_counts_for_the_norm():
    feedback = ErrorFeedback(4)
    assert feedback.norm == 0
    tried(feedback, "first", 0, 1.0)
    assert feedback.norm == 2
    feedback.settle("of others", 0, is_member=False)
    assert feedback.norm == 0


def test_dropping_forgets_tries_as_well():
    feedback = settled()
    tried(feedback, "second", 1, 5.0)
    feedback.drop()
    feedback.settle("second", 1, is_member=True)
    assert feedback.leftover is None


# --- where it begins and ends


@pytest.mark.parametrize(
    ("step", "codec"), [(1, DENSE), (80, DENSE), (81, "topk_2bit"), (980, "topk_2bit"), (981, DENSE), (1000, DENSE)]
)
def test_a_run_begins_and_ends_with_dense_averages(step, codec):
    assert AveragingSection(compression="topk_2bit").codec_at(step, 1000) == codec
    assert AveragingSection(compression="fp16").codec_at(step, 1000) == "fp16"


Averaged = namedtuple("Averaged", "name, shares, codec, before")


class Recorder:
    """Stands for the averager of one stage."""

    num_values = 3

    def __init__(self):
        self.seen = []
        self.fails = False

    async def average(self, name, means, shares, feedback):
        before = None if feedback is None or feedback.before is None else feedback.before.tolist()
        self.seen.append(Averaged(name, shares, feedback and feedback.codec, before))
        if self.fails:
            raise AveragingFailed("lost")
        if feedback is not None:
            feedback.after.add_(len(self.seen))
        return [torch.zeros(3)]


def cut_averager(compression="topk_2bit", **averaging):
    resolved = unparsed(HASH)
    section = AveragingSection(compression=compression, **averaging)
    training = resolved.manifest.training.model_copy(update={"steps": 100})
    manifest = resolved.manifest.model_copy(update={"averaging": section, "training": training})
    context = make_context(replace(resolved, manifest=manifest))
    recorder = Recorder()
    averager = CutAverager(context=context, stage=0, averager=recorder, word_at=lambda epoch: epoch)
    return averager, recorder, context


def cut_of(context, number, others=("other",), attempt=0, averages=True, word=""):
    seats = [SimpleNamespace(peer=peer) for peer in (context.identity.peer_id, *others)]
    parts = tuple(SimpleNamespace(seat=seat, weight=1) for seat in seats)
    name = f"{number}/{attempt}"
    return SimpleNamespace(hash=name, round=number, parts=parts, seats=seats, averages=averages, epoch=word)


def dropped(context):
    return context.metrics.leftovers_dropped._value.get()


async def test_a_try_that_fails_is_repeated_with_the_same_leftover():
    averager, recorder, context = cut_averager(dense_share=0.0)
    await averager.average(cut_of(context, 0), [torch.zeros(3)], 1)
    averager.settle(cut_of(context, 0))
    recorder.fails = True
    with pytest.raises(AverageFailed):
        await averager.average(cut_of(context, 1), [torch.zeros(3)], 1)
    recorder.fails = False
    await averager.average(cut_of(context, 1, attempt=1), [torch.zeros(3)], 1)
    assert [each.before for each in recorder.seen] == [None, [1.0] * 3, [1.0] * 3]
    averager.settle(cut_of(context, 1, attempt=1))
    await averager.average(cut_of(context, 2), [torch.zeros(3)], 1)
    assert recorder.seen[-1].before == [3.0] * 3
    assert not dropped(context)


async def test_the_run_goes_back_without_what_was_left_over():
    averager, recorder, context = cut_averager()
    averager.begin(BEGINNING)
    await averager.average(cut_of(context, 50), [torch.zeros(3)], 1)
    averager.settle(cut_of(context, 50))
    assert not dropped(context)
    averager.begin(Restart(60, 20))
    assert dropped(context) == 1
    for number in (60, 70, 137, 138):
        await averager.average(cut_of(context, number), [torch.zeros(3)], 1)
    assert [each.codec for each in recorder.seen] == ["topk_2bit", "topk_2bit", "topk_2bit", "topk_2bit", DENSE]
    assert recorder.seen[1].before is None


async def test_the_decay_of_a_run_says_when_it_ends():
    averager, recorder, context = cut_averager()
    averager.begin(Restart(60, 20))
    for number in (88, 89):  # that make the weights of steps 49 and 50
        await averager.average(cut_of(context, number, word=Decay(20, 30).word), [torch.zeros(3)], 1)
    assert [each.codec for each in recorder.seen] == ["topk_2bit", DENSE]


async def test_who_is_alone_sends_all_and_who_was_averaged_unawares_drops_it():
    averager, recorder, context = cut_averager(dense_share=0.0)
    await averager.average(cut_of(context, 0), [torch.zeros(3)], 1)
    averager.settle(cut_of(context, 0))
    await averager.average(cut_of(context, 1, others=()), [torch.zeros(3)], 1)
    assert recorder.seen[-1].codec == PLAIN
    averager.settle(cut_of(context, 1, averages=False))
    averager.settle(cut_of(context, 1, attempt=5))
    assert dropped(context) == 1


async def test_other_codecs_leave_nothing_over():
    averager, recorder, context = cut_averager("blockwise_8bit")
    await averager.average(cut_of(context, 0), [torch.zeros(3)], 1)
    averager.settle(cut_of(context, 0))
    assert recorder.seen[0].codec is None


@EACH
def test_memory_is_counted_for_what_is_left_over(name):
    manifests = [make_manifest(averaging={"compression": compression}) for compression in ("blockwise_8bit", name)]
    without, with_it = (stage_costs(ResolvedManifest.of(manifest), "cuda") for manifest in manifests)
    for less, more in zip(without, with_it, strict=True):
        assert more.host_bytes - less.host_bytes == 4 * (1 + KEPT_TRIES) * more.trained


def test_a_log_in_the_place_of_another_may_have_its_rounds_once_more():
    feedback = ErrorFeedback(2)
    feedback.begin_try("a", 5, "sign").after.fill_(1.0)
    assert feedback.settle("a", 5, is_member=True)
    feedback.drop()
    feedback.begin_try("b", 4, "sign").after.fill_(2.0)
    assert feedback.settle("b", 4, is_member=True)
    assert feedback.leftover.tolist() == [2.0, 2.0]
