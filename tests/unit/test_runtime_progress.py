import asyncio
import time

import anyio
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarm_peer.errors import InvalidMessage
from swarm_peer.policy.ledger import StepCount
from swarm_peer.runtime.metrics import PeerMetrics
from swarm_peer.runtime.progress import MAX_STEPS_AHEAD, ProgressBook
from swarm_peer.runtime.signal import Signal
from swarm_peer.wire.identity import Identity
from swarm_peer.wire.records import Progress, StepReport, seal

RUN = "0123456789abcdef" * 2
GLOBAL_BATCH = 8
IDENTITIES = [Identity(Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32)) for seed in range(3)]
ME, AUTHOR, STRANGER = IDENTITIES


def make_book(identity=ME, authors=(ME, AUTHOR)):
    known = {author.peer_id for author in authors}
    return ProgressBook(RUN, GLOBAL_BATCH, identity, known.__contains__, PeerMetrics(), Signal())


def signed(samples, step=0, claimed=None, author=AUTHOR, run=RUN, loss_sum=1.0):
    record = Progress(step=step, samples=samples, claimed=claimed or samples, loss_sum=loss_sum)
    return author.peer_id, seal(record, run, author)


def refused(book):
    return book._metrics.invalid_messages.labels("count")._value.get()


def test_counts_travel_from_book_to_book():
    theirs, mine = make_book(AUTHOR), make_book()
    theirs.count_own(0, StepCount(4, 6, 10.0))
    mine.count_own(0, StepCount(2, 2, 5.0))
    mine.merge(theirs.signed_counts())
    theirs.merge(mine.signed_counts())
    assert list(mine.ledger.counts(0)) == list(theirs.ledger.counts(0))
    assert mine.ledger.samples(0) == 6
    assert mine.ledger.loss_sum(0) == 15.0
    assert sorted(mine.signed_counts()) == sorted(theirs.signed_counts()), "others' counts are passed on"


def test_own_counts_are_published_when_they_have_grown():
    book = make_book()
    first = book.count_own(0, StepCount(2, 4, 1.0))
    assert first == Progress(step=0, samples=2, claimed=4, loss_sum=1.0)
    [(author, envelope)] = book.signed_counts()
    assert author == ME.peer_id
    book.count_own(0, StepCount(1, 4, 1.0))
    assert book.signed_counts() == ((author, envelope),)
    book.count_own(0, StepCount(4, 4, 2.0))
    assert book.signed_counts() != ((author, envelope),)


def test_stale_counts_are_ignored():
    book = make_book()
    newer, older = signed(4), signed(2)
    book.merge([newer])
    book.merge([older])
    assert book.ledger.samples(0) == 4
    assert book.signed_counts() == (newer,)


def test_repeated_counts_add_nothing():
    book = make_book()
    book.merge([signed(4)] * 3)
    book.merge([signed(4)])
    assert book.ledger.samples(0) == 4


@pytest.mark.parametrize(
    "forged",
    [
        pytest.param((AUTHOR.peer_id, signed(4, author=STRANGER)[1]), id="signed by another"),
        pytest.param((AUTHOR.peer_id, signed(4, author=ME)[1]), id="signed by this peer"),
        pytest.param((AUTHOR.peer_id, signed(4)[1][:-1] + b"\0"), id="broken signature"),
        pytest.param((AUTHOR.peer_id, signed(4, run="other")[1]), id="of another run"),
        pytest.param(
            (AUTHOR.peer_id, seal(StepReport(step=0, updates=1, samples=4, loss=1.0, seconds=1.0), RUN, AUTHOR)),
            id="other kind",
        ),
        pytest.param((AUTHOR.peer_id, b""), id="empty"),
        pytest.param(signed(5, claimed=4), id="more counted than claimed"),
        pytest.param(signed(1, claimed=2 * GLOBAL_BATCH + 1), id="more claimed than there is"),
    ],
)
def test_forged_counts_are_refused(forged):
    book = make_book()
    with pytest.raises(InvalidMessage):
        book.merge([forged])
    assert book.ledger.samples(0) == 0
    assert book.signed_counts() == ()


def test_counts_of_peers_outside_of_stage_0_are_not_believed():
    book = make_book()
    book.merge([signed(8, author=STRANGER), signed(2)])
    assert book.ledger.samples(0) == 2
    assert refused(book) == 1
    assert [author for author, _ in book.signed_counts()] == [AUTHOR.peer_id], "nor passed on"


def test_a_peer_that_started_anew_goes_on_from_what_it_had_counted():
    book = make_book()
    book.merge([signed(8, author=ME)])
    assert book.ledger.count_of(0, ME.peer_id).samples == 8
    with pytest.raises(InvalidMessage):
        book.merge([(ME.peer_id, b"forged")])


def test_who_makes_no_progress_loses_patience_with(monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    book = make_book()
    peers = [AUTHOR.peer_id, ME.peer_id]
    assert book.talkative(peers, 10.0) == set(peers), "at the beginning of a step nobody has told anything"
    now = 109.0
    book.merge([signed(2)])
    now = 115.0
    assert book.talkative(peers, 10.0) == {AUTHOR.peer_id}
    now = 120.0
    assert book.talkative(peers, 10.0) == set()
    book.enter(1)
    assert book.talkative(peers, 10.0) == set(peers)


def test_counts_of_far_steps_are_ignored():
    book = make_book()
    book.enter(10)
    for step in (0, 8, 10 + MAX_STEPS_AHEAD + 1, 2**39):
        book.merge([signed(4, step=step)])
        assert book.ledger.samples(step) == 0
    for step in (9, 10, 10 + MAX_STEPS_AHEAD):
        book.merge([signed(4, step=step)])
        assert book.ledger.samples(step) == 4


def test_counts_of_this_step_and_of_the_one_before_are_passed_on():
    book = make_book()
    counts = {step: signed(4, step=step) for step in range(4)}
    book.merge(counts.values())
    book.enter(2)
    assert book.signed_counts() == (counts[1], counts[2])
    book.merge([counts[3]])
    assert book.ledger.samples(0) == 0, "forgotten"
    assert book.ledger.samples(1) == 4
    book.enter(3)
    assert book.signed_counts() == (counts[2], counts[3]), "what came early is kept"


async def test_a_step_is_over_when_its_global_batch_is_full():
    book = make_book()
    waiting = asyncio.ensure_future(book.wait_until_over(0))
    book.merge([signed(4)])
    await anyio.wait_all_tasks_blocked()
    assert not waiting.done()
    book.count_own(0, StepCount(4, 4, 1.0))
    await waiting


async def test_a_step_is_over_when_stage_mates_are_past_it():
    book = make_book()
    book.enter(1)
    waiting = asyncio.ensure_future(book.wait_until_over(1))
    book.saw_step(1)
    await anyio.wait_all_tasks_blocked()
    assert not waiting.done()
    book.saw_step(2)
    await waiting
    book.saw_step(1)
    assert book.newest_step_seen == 2


def test_a_stage_mate_vouches_for_authors_that_this_peer_has_not_seen():
    book = make_book()
    book.merge([signed(8, author=STRANGER)], vouched=True)
    assert book.ledger.count_of(0, STRANGER.peer_id).samples == 8
    assert refused(book) == 0
    with pytest.raises(InvalidMessage):
        book.merge([(STRANGER.peer_id, signed(4)[1])], vouched=True)
