import asyncio

import anyio
import msgpack
import pytest
from contexts import ReadClock, begin_counting, make_context, unparsed
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarm_peer.errors import InvalidMessage
from swarm_peer.policy.data.ranges import WindowRange
from swarm_peer.policy.progress_counter import MAX_LIVES, RoundCount
from swarm_peer.policy.timeline import Timeline
from swarm_peer.policy.step_state import StepState
from swarm_peer.policy.view import Life
from swarm_peer.runtime.network import progress
from swarm_peer.runtime.network.progress import (
    MAX_AUTHORS,
    MAX_CHECKED,
    MAX_COUNTED_ROUNDS_AHEAD,
    MAX_MESSAGE_BYTES,
    MAX_MICROBATCH_BYTES,
    MAX_ROUND_BYTES,
    ProgressBook,
)
from swarm_peer.wire.fields import MAX_LOSS
from swarm_peer.wire.frames import MAX_HEADER_BYTES, Frame, FrameType
from swarm_peer.wire.identity import Identity
from swarm_peer.wire.messages import CountsReply
from swarm_peer.wire.records import Progress, RoundReport, seal

RUN = "0123456789abcdef" * 2
GLOBAL_BATCH = 8
IDENTITIES = [Identity(Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32)) for seed in range(3)]
ME, AUTHOR, STRANGER = IDENTITIES


def make_book(identity=ME, authors=(ME, AUTHOR), clock=None, strangers=None, incarnation=1, step=StepState):
    known = {author.peer_id for author in authors}
    return ProgressBook(
        context=make_context(unparsed(RUN, global_batch_size=GLOBAL_BATCH), identity=identity, clock=clock),
        incarnation=incarnation,
        is_author=known.__contains__,
        on_stranger=[].append if strangers is None else strangers.append,
        step=step,
    )


def signed(samples, round_number=0, claimed=None, author=AUTHOR, run=RUN, loss_sum=1.0, incarnation=0, ranges=()):
    record = Progress(
        round_number=round_number,
        samples=samples,
        claimed=claimed or samples,
        loss_sum=loss_sum,
        incarnation=incarnation,
        ranges=ranges,
    )
    return author.peer_id, seal(record, run, author)


def refused(book):
    return book._context.metrics.invalid_messages.labels("count")._value.get()


def test_counts_travel_from_book_to_book():
    theirs, mine = make_book(AUTHOR), make_book()
    theirs.count_own(0, RoundCount(4, 6, 10.0))
    mine.count_own(0, RoundCount(2, 2, 5.0))
    mine.merge(theirs.signed_counts())
    theirs.merge(mine.signed_counts())
    assert list(mine.counter.counts(0)) == list(theirs.counter.counts(0))
    assert mine.counter.samples(0) == 6
    assert mine.counter.loss_sum(0) == 15.0
    assert sorted(mine.signed_counts()) == sorted(theirs.signed_counts()), "others' counts are passed on"


def test_counts_of_another_timeline_are_none_of_this_peers():
    """Two parts of a run that was cut in two may be in rounds of the same number."""
    steps = {ME: StepState(round_number=9), AUTHOR: StepState(round_number=9, timeline=Timeline(8, 5, 5))}
    mine, theirs = make_book(step=lambda: steps[ME]), make_book(AUTHOR, step=lambda: steps[AUTHOR])
    theirs.forget_past()
    theirs.count_own(9, RoundCount(4, 6, 10.0))
    mine.count_own(9, RoundCount(2, 2, 5.0))
    mine.merge(theirs.signed_counts())
    assert mine.counter.samples(9) == 2
    steps[ME] = steps[AUTHOR]
    mine.forget_past()
    assert mine.counter.samples(9) == 0, "what has counted on the timeline that was left"
    mine.merge(theirs.signed_counts())
    assert mine.counter.samples(9) == 4


def test_own_counts_are_published_when_they_have_grown():
    book = make_book()
    first = book.count_own(0, RoundCount(2, 4, 1.0))
    assert first == Progress(round_number=0, samples=2, claimed=4, loss_sum=1.0, incarnation=1)
    [(author, envelope)] = book.signed_counts()
    assert author == ME.peer_id
    book.count_own(0, RoundCount(1, 4, 1.0))
    assert book.signed_counts() == ((author, envelope),)
    book.count_own(0, RoundCount(4, 4, 2.0))
    assert book.signed_counts() != ((author, envelope),)


def test_stale_counts_are_ignored():
    book = make_book()
    newer, older = signed(4), signed(2)
    book.merge([newer])
    book.merge([older])
    assert book.counter.samples(0) == 4
    assert book.signed_counts() == (newer,)


def test_repeated_counts_add_nothing():
    book = make_book()
    book.merge([signed(4)] * 3)
    book.merge([signed(4)])
    assert book.counter.samples(0) == 4


@pytest.mark.parametrize(
    "forged",
    [
        pytest.param((AUTHOR.peer_id, signed(4, author=STRANGER)[1]), id="signed by another"),
        pytest.param((AUTHOR.peer_id, signed(4, author=ME)[1]), id="signed by this peer"),
        pytest.param((AUTHOR.peer_id, signed(4)[1][:-1] + b"\0"), id="broken signature"),
        pytest.param((AUTHOR.peer_id, signed(4, run="other")[1]), id="of another run"),
        pytest.param(
            (
                AUTHOR.peer_id,
                seal(RoundReport(round_number=0, optimizer_step=1, samples=4, loss=1.0, seconds=1.0), RUN, AUTHOR),
            ),
            id="other kind",
        ),
        pytest.param((AUTHOR.peer_id, b""), id="empty"),
        pytest.param(signed(5, claimed=4), id="more counted than claimed"),
        pytest.param(signed(1, claimed=2 * GLOBAL_BATCH + 1), id="more claimed than there is"),
        pytest.param(signed(2, loss_sum=3 * MAX_LOSS), id="a larger loss than there is"),
        pytest.param(signed(0, claimed=2, loss_sum=1.0), id="a loss of no samples"),
    ],
)
def test_forged_counts_are_refused(forged):
    book = make_book()
    with pytest.raises(InvalidMessage):
        book.merge([forged])
    assert book.counter.samples(0) == 0
    assert book.signed_counts() == ()


def test_counts_of_peers_outside_of_stage_0_are_not_believed():
    book = make_book()
    book.merge([signed(8, author=STRANGER), signed(2)])
    assert book.counter.samples(0) == 2
    assert refused(book) == 1
    assert [author for author, _ in book.signed_counts()] == [AUTHOR.peer_id], "nor passed on"


def test_a_peer_that_started_anew_counts_from_zero_beside_what_it_had_counted():
    book, other = make_book(authors=(), incarnation=2), make_book(AUTHOR)
    former = signed(6, author=ME, incarnation=1)
    other.merge([former])
    book.merge([former])
    assert book.counter.count_of(0, book.author).samples == 0
    book.count_own(0, RoundCount(2, 2, 1.0))
    assert book.counter.samples(0) == 8
    assert len(book.signed_counts()) == 2, "both are told"
    other.merge(book.signed_counts())
    assert other.counter.samples(0) == 8
    assert other.counter.count_of(0, Life(ME.peer_id, 2)).samples == 2, "the former counts do not hide the new one"
    assert other.counter.is_full(0)
    assert refused(book) == 0, "a peer believes its own signature"
    with pytest.raises(InvalidMessage):
        book.merge([(ME.peer_id, b"forged")])


def test_a_peer_cannot_fill_memory_with_lives():
    book, told = make_book(), []
    book.add_listener(lambda round_number, author, before: told.append(author.incarnation))
    book.merge([signed(1, incarnation=incarnation) for incarnation in range(100)])
    assert told == list(range(MAX_LIVES))
    assert book.counter.samples(0) == len(book.signed_counts()) == MAX_LIVES
    assert refused(book) == 100 - MAX_LIVES
    late = [signed(1, incarnation=100), signed(2, incarnation=3), signed(1, incarnation=100, round_number=1)]
    book.merge(late)
    assert book.counter.samples(0) == MAX_LIVES + 1, "the rest of the message counts, and known lives go on"
    assert book.counter.samples(1) == 1


def test_who_makes_no_progress_loses_patience_with():
    now = 100.0
    book = make_book(clock=ReadClock(lambda: now))
    begin_counting(book, 0)
    peers = [AUTHOR.peer_id, ME.peer_id]
    assert book.active(peers, 10.0) == set(peers), "at the beginning of a round nobody has told anything"
    now = 109.0
    book.merge([signed(2)])
    now = 115.0
    assert book.active(peers, 10.0) == {AUTHOR.peer_id}
    now = 120.0
    assert book.active(peers, 10.0) == set()
    begin_counting(book, 1)
    assert book.active(peers, 10.0) == set(peers)


def test_who_has_counted_nothing_keeps_the_next_rounds_waiting_no_more():
    """It waits for its data, perhaps, or nobody reaches it."""
    now = 100.0
    book = make_book(clock=ReadClock(lambda: now))
    begin_counting(book, 0)
    peers = [AUTHOR.peer_id, ME.peer_id]
    now = 111.0
    book.count_own(0, RoundCount(2, 2))
    assert book.active(peers, 10.0) == set()
    begin_counting(book, 1)
    assert book.active(peers, 10.0) == {ME.peer_id}
    book.merge([signed(0, round_number=1, claimed=2, loss_sum=0.0)])
    assert book.active(peers, 10.0) == {ME.peer_id}, "what it claims may come to nothing, as before"
    book.merge([signed(2, round_number=1)])
    assert book.active(peers, 10.0) == set(peers), "it is back"
    now = 122.0
    assert book.active(peers, 10.0) == set()
    begin_counting(book, 2)
    assert book.active(peers, 10.0) == set(peers), "it had counted its share"


def test_who_claims_and_counts_nothing_keeps_the_next_rounds_waiting_no_more():
    now = 100.0
    book = make_book(clock=ReadClock(lambda: now))
    begin_counting(book, 0)
    peers = [AUTHOR.peer_id, ME.peer_id]
    book.merge([signed(0, claimed=2, loss_sum=0.0)])
    now = 111.0
    book.count_own(0, RoundCount(2, 2))
    book.active(peers, 10.0)
    begin_counting(book, 1)
    assert book.active(peers, 10.0) == {ME.peer_id}


@pytest.mark.parametrize("comes_back", [False, True])
def test_who_counts_nothing_while_nobody_can_is_not_to_blame(comes_back):
    """A later stage may be away. Each would otherwise claim the whole of the next global batch."""
    now = 100.0
    book = make_book(clock=ReadClock(lambda: now))
    begin_counting(book, 0)
    peers = [AUTHOR.peer_id, ME.peer_id]
    book.merge([signed(0, claimed=2, loss_sum=0.0)])
    book.count_own(0, RoundCount(0, 2))
    now = 111.0
    assert book.active(peers, 10.0) == set()
    if comes_back:
        book.count_own(0, RoundCount(2, 2))
        assert book.active(peers, 10.0) == set()
    begin_counting(book, 1)
    assert book.active(peers, 10.0) == set(peers)


def test_who_waits_for_a_silent_peer_and_then_counts_all_of_a_round_waits_once():
    """With one microbatch in a round, it has no reason to look any more once that has counted."""
    now = 100.0
    book = make_book(clock=ReadClock(lambda: now))
    begin_counting(book, 0)
    peers = [AUTHOR.peer_id, ME.peer_id]
    now = 111.0
    assert book.active(peers, 10.0) == set()
    book.count_own(0, RoundCount(0, GLOBAL_BATCH))
    now = 112.0
    book.count_own(0, RoundCount(GLOBAL_BATCH, GLOBAL_BATCH))
    begin_counting(book, 1)
    assert book.active(peers, 10.0) == {ME.peer_id}


def test_counts_of_far_rounds_are_ignored():
    book = make_book()
    begin_counting(book, 10)
    for round_number in (0, 8, 10 + MAX_COUNTED_ROUNDS_AHEAD + 1, 2**39):
        book.merge([signed(4, round_number=round_number)])
        assert book.counter.samples(round_number) == 0
    for round_number in (9, 10, 10 + MAX_COUNTED_ROUNDS_AHEAD):
        book.merge([signed(4, round_number=round_number)])
        assert book.counter.samples(round_number) == 4


def test_counts_of_this_round_and_of_the_one_before_are_passed_on():
    book = make_book()
    counts = {round_number: signed(4, round_number=round_number) for round_number in range(4)}
    book.merge(counts.values())
    begin_counting(book, 2)
    assert book.signed_counts() == (counts[1], counts[2])
    book.merge([counts[3]])
    assert book.counter.samples(0) == 0, "forgotten"
    assert book.counter.samples(1) == 4
    begin_counting(book, 3)
    assert book.signed_counts() == (counts[2], counts[3]), "what came early is kept"


async def test_a_round_is_over_when_its_global_batch_is_full():
    book = make_book()
    waiting = asyncio.ensure_future(book.wait_until_over(0))
    book.merge([signed(4)])
    await anyio.wait_all_tasks_blocked()
    assert not waiting.done()
    book.count_own(0, RoundCount(4, 4, 1.0))
    await waiting


async def test_a_round_is_over_when_stage_mates_are_past_it():
    book = make_book()
    begin_counting(book, 1)
    waiting = asyncio.ensure_future(book.wait_until_over(1))
    book.saw_round(1)
    await anyio.wait_all_tasks_blocked()
    assert not waiting.done()
    book.saw_round(2)
    await waiting
    book.saw_round(1)
    assert book.newest_round_seen == 2


def test_a_stage_mate_vouches_for_authors_that_this_peer_has_not_seen():
    book = make_book()
    book.merge([signed(8, author=STRANGER)], vouched=True)
    assert book.counter.count_of(0, Life(STRANGER.peer_id)).samples == 8
    assert refused(book) == 0
    with pytest.raises(InvalidMessage):
        book.merge([(STRANGER.peer_id, signed(9)[1])], vouched=True)


def identities(count):
    return [
        Identity(Ed25519PrivateKey.from_private_bytes(number.to_bytes(32, "big"))) for number in range(1, count + 1)
    ]


# Slice ends, which hold no windows, so that a count may have many: about 20 kB.
LONG = tuple(WindowRange(2**40 - 1, 2**20 - 1, 2**40 - 1, 2**40 - 1) for _ in range(800))


@pytest.fixture
def verified(monkeypatch):
    """The authors of the envelopes whose signatures were checked."""
    checked = []
    check = progress.open_envelope

    def noting(envelope, author):
        checked.append(author)
        return check(envelope, author)

    monkeypatch.setattr(progress, "open_envelope", noting)
    return checked


def test_counts_that_are_no_news_are_dropped_before_their_signatures_are_checked(verified):
    book = make_book()
    begin_counting(book, 10)
    news = signed(4, round_number=10, ranges=LONG[:3])
    book.merge([news])
    del verified[:]
    old = [signed(samples, round_number=number) for number in (0, 8, 13) for samples in (1, 2)]
    book.merge([*old, news, signed(4, 10), signed(2, 10, claimed=4), (AUTHOR.peer_id, seal_unsigned(3, 10))])
    assert verified == []
    assert book.counter.samples(10) == 4
    book.merge([signed(4, 10, claimed=6)])
    assert verified == [AUTHOR.peer_id]


def seal_unsigned(samples, round_number):
    kind, run, body, _ = msgpack.unpackb(signed(samples, round_number)[1])
    return msgpack.packb([kind, run, body, bytes(64)])


def test_many_authors_with_long_counts_do_not_make_any_message_too_long():
    """Each of many identities announces stage 0 and counts next to nothing in a very long count."""
    liars = identities(60)
    book = make_book(authors=(ME, AUTHOR, *liars))
    book.count_own(0, RoundCount(2, 2, 1.0))
    book.merge([signed(1, author=author, ranges=LONG) for author in liars] + [signed(3)])
    assert sum(len(envelope) for _, envelope in every_count(book)) > MAX_HEADER_BYTES
    for max_bytes in (MAX_MESSAGE_BYTES, MAX_MICROBATCH_BYTES):
        told = book.signed_counts(max_bytes)
        authors = [author for author, _ in told]
        assert {ME.peer_id, AUTHOR.peer_id} < set(authors), "what honest peers have counted goes with each message"
        assert len(set(told)) == len(told)
        head = Frame(FrameType.REPLY, 1, "", CountsReply(round_number=0, timeline=0, counts=told).model_dump()).head()
        assert len(head) < max_bytes + 4096 < MAX_HEADER_BYTES


def every_count(book):
    return book.signed_counts(2**30)


def test_too_many_short_counts_take_turns_and_ones_own_goes_with_each_message():
    authors = identities(400)
    book = make_book(authors=(ME, *authors))
    for first in (0, 200):
        book.merge([signed(1, author=author) for author in authors[first : first + 200]])
    book.count_own(0, RoundCount(2, 2, 1.0))
    heard = set()
    for _ in range(10):
        told = book.signed_counts(MAX_MICROBATCH_BYTES)
        assert sum(len(author) + len(envelope) for author, envelope in told) <= MAX_MICROBATCH_BYTES
        assert ME.peer_id in dict(told)
        heard.update(told)
    assert heard == set(every_count(book))


def test_the_counts_of_as_many_peers_as_fit_make_a_message():
    """Else no call and no reply could be made any more, and the peer would end."""
    authors = identities(400)
    book = make_book(authors=(ME, *authors))
    for incarnation in range(6):
        counts = [signed(1, author=author, incarnation=incarnation) for author in authors]
        while book.merge(counts):
            pass
    told = book.signed_counts()
    assert len(told) < len(every_count(book)), "the message is full"
    assert CountsReply(round_number=0, timeline=0, counts=told).counts == told


def test_only_so_many_signatures_are_checked_for_one_message_and_the_others_come_again(verified):
    authors = identities(MAX_CHECKED + 10)
    book = make_book(authors=authors)
    counts = [signed(1, author=author) for author in authors]
    assert book.merge(counts) == 10
    assert len(verified) == MAX_CHECKED
    assert book.merge(counts) == 0
    assert book.counter.samples(0) == MAX_CHECKED + 10


def test_the_authors_of_a_round_and_the_bytes_of_their_counts_are_bounded(monkeypatch):
    monkeypatch.setattr(progress, "MAX_AUTHORS", 3)
    monkeypatch.setattr(progress, "MAX_ROUND_BYTES", 2 * len(signed(1, ranges=LONG)[1]))
    assert (MAX_AUTHORS, MAX_ROUND_BYTES) == (1024, 2**22)
    authors = identities(5)
    book = make_book(authors=(ME, *authors))
    book.merge([signed(1, author=author, ranges=LONG) for author in authors])
    assert {author for author, _ in every_count(book)} == {author.peer_id for author in authors[:2]}, "of two long ones"
    book.merge([signed(1, author=author) for author in authors])
    assert book.counter.samples(0) == 3 == len(every_count(book)), "of three authors"
    assert refused(book) == 3 + 2
    book.merge([signed(2, author=authors[0])])
    assert book.counter.samples(0) == 4, "those that are known go on"
    book.count_own(0, RoundCount(2, 2, 1.0, LONG))
    assert ME.peer_id in dict(every_count(book)), "one's own is always kept"
    other = make_book()
    other.merge([(ME.peer_id, dict(every_count(book))[ME.peer_id])])
    assert other.counter.count_of(0, Life(ME.peer_id, 1)).samples == 2
