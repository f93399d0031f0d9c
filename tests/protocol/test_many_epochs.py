"""However many epochs follow one another while a round is open: nobody forgets those that the round needs."""

import pytest
from quiet import Quiet

from swarm_peer.protocol.epochs import COORDINATORS, KEPT_EPOCHS, MAX_VOTERS, Certified, Epoch, Place
from swarm_peer.protocol.known_epochs import KnownEpochs
from swarm_peer.protocol.round_rules import RoundRules
from swarm_peer.protocol.statements import Accepted, Ballot, EpochId, KeySigned, Seat, Signed

# What has been followed is remembered for a while after others have come in its place.
MANY = 2 * KEPT_EPOCHS + 8


def rejoins(run, process, times):
    """A peer crashes and comes back, each time by a new epoch."""
    for _ in range(times):
        run.start(process)
        run.run_until(run.now_s + 60, lambda: process.core.membership.stages == process.stages)
        run.run_until(run.now_s + 0.5)


@pytest.fixture
def computes(monkeypatch):
    """Have all compute, or not."""

    def set_computes(run, does):
        if does:
            monkeypatch.undo()
        else:
            monkeypatch.setattr(run.driver, "_train", lambda *_: None)

    return set_computes


def all_hold_receipts(run):
    """Whether all of stage 0 hold receipts of q2 that are of this epoch."""
    rounds = [core.members[0].working for core in run.cores if 0 in core.members]
    held = [present.computed.receipts.values() if present is not None else () for present in rounds]
    wanted = "q2", run.cores[0].epoch.id
    return all(wanted in {(each.body.author.peer, each.body.epoch) for each in receipts} for receipts in held)


def test_a_leader_that_comes_after_many_epochs_can_show_the_newest_entry(computes):
    run = Quiet(RoundRules(num_stages=1, batch=4, roots_every=(0,)))
    for number in range(3):
        run.add(f"p{number}", {0}, ticket=f"of {number}")
    late = run.add("late", {0}, ticket="of late")
    run.run_until(40)
    computes(run, False)
    rejoins(run, late, MANY)
    leader = run.cores[0].epoch.leader(0)
    run.processes[leader.peer].core = None
    computes(run, True)
    before = run.next_round()
    run.run_until(run.now_s + 90)
    assert run.next_round() > before + 3


def test_receipts_of_many_epochs_ago_still_close_a_round(computes):
    run = Quiet(RoundRules(num_stages=2, batch=80, roots_every=(0,)))
    for number in range(3):
        run.add(f"p{number}", {0})
        run.add(f"q{number}", {1})
    late = run.add("late", {1})
    run.run_until(60)
    number = run.next_round()
    run.run_until(90, lambda: min(run.next_round(0), run.next_round(1)) > number)
    rejoins(run, late, 1)  # no entry is of this epoch
    run.run_until(90, lambda: all_hold_receipts(run))
    assert all_hold_receipts(run)
    computes(run, False)
    run.processes["q2"].core = None
    rejoins(run, late, MANY)
    assert run.next_round() == number + 1
    computes(run, True)
    before = run.next_round()
    run.run_until(run.now_s + 60)
    assert run.next_round() > before + 3


ALONE, OTHER = (Seat(name, 1, name) for name in ("alone", "other"))


def epochs(first, number, *seats):
    """Epochs of some seats that follow one, each certified by the voter of the one before."""
    chain = []
    for _ in range(number):
        epoch = Epoch(first.id.next(), tuple(Place(0, seat) for seat in seats))
        (voter,) = first.voters
        accepted = Accepted(voter, first.id, Ballot(1, voter), epoch.hash)
        chain.append(Certified(epoch, (Signed(accepted, b""),)))
        first = epoch
    return chain


@pytest.fixture
def first():
    made = Epoch(EpochId(1, ALONE, 0), (Place(COORDINATORS, ALONE),))
    return Certified(made, (Signed(KeySigned(made.hash), b"key"),))


def test_who_was_the_only_voter_once_makes_no_epochs_later_than_the_newest_or_in_place_of_others(first):
    own = KnownEpochs(first)
    genuine, forged = epochs(first.epoch, 3, OTHER), epochs(first.epoch, 9, ALONE)
    own.learn(genuine)
    own.learn([first, *forged])
    assert own.newest == genuine[-1].epoch
    assert [own.epoch_of(each.epoch.id) for each in forged[3:]] == [None] * 6
    own.named = lambda: [genuine[-1].epoch.id]
    term = Epoch(EpochId(2, ALONE, 0), (Place(0, OTHER),))
    own.learn([Certified(term, (Signed(KeySigned(term.hash), b"key"),)), *epochs(term, KEPT_EPOCHS, OTHER)])
    own.learn([first, *forged])
    assert [own.epoch_of(each.epoch.id) for each in forged[3:]] == [None] * 6
    assert [own.epoch_of(each.epoch.id) for each in forged[:3]] == [each.epoch for each in genuine]
    assert [each.epoch for each in own.chain[:1]] == [term]


def test_the_way_of_an_epoch_that_is_named_to_one_of_the_key_is_kept(first):
    own = KnownEpochs(first)
    chain = epochs(first.epoch, MANY, OTHER)
    own.learn(chain)
    own.named = lambda: [chain[-2].epoch.id]
    term = Epoch(EpochId(2, ALONE, 0), chain[-1].epoch.places)
    own.learn([Certified(term, (Signed(KeySigned(term.hash), b"key"),))])
    own.learn(epochs(term, MANY, OTHER))
    for number in (3, 4):
        later = Epoch(EpochId(number, ALONE, 0), term.places)
        own.learn([Certified(later, (Signed(KeySigned(later.hash), b"key"),)), *epochs(later, MANY, OTHER)])
    assert own.newest.id == later.id._replace(number=MANY)
    assert own.up_to(chain[-2].epoch.id) == (first, *chain[:-1])
    assert own.num_past < 4 * MANY
    assert own.epoch_of(term.id.next()) is None


def test_an_epoch_that_is_remembered_can_be_shown_once_something_names_it(first):
    own = KnownEpochs(first)
    own.kept = 1
    own.learn(chain := epochs(first.epoch, 4, OTHER))
    term = Epoch(EpochId(2, ALONE, 0), (Place(0, OTHER),))
    own.learn([Certified(term, (Signed(KeySigned(term.hash), b"key"),))])
    own.named = lambda: [chain[-1].epoch.id]
    own.learn(epochs(term, 4, OTHER))
    assert own.up_to(chain[-1].epoch.id) == (first, *chain)


def test_an_epoch_that_goes_on_in_the_chain_alone_is_not_forgotten(first):
    own = KnownEpochs(first)
    own.kept = 1
    own.learn(chain := epochs(first.epoch, 4, OTHER))
    own.named = lambda: [chain[1].epoch.id]
    term = Epoch(EpochId(2, ALONE, 0), (Place(0, OTHER),))
    own.learn([Certified(term, (Signed(KeySigned(term.hash), b"key"),)), *epochs(term, 4, OTHER)])
    assert own.up_to(chain[1].epoch.id) == (first, *chain[:2])


def key_signed(certified):
    return Certified(certified.epoch, (*certified.certificate, Signed(KeySigned(certified.epoch.hash), b"key")))


def test_who_chose_alone_once_puts_nothing_in_the_place_of_the_newest_epoch(first):
    """Where few tickets choose, one of them could make any number of epochs that follow."""
    places = *(Place(0, Seat(name, 1, name)) for name in ("alone", "b", "c")), Place(0, OTHER)
    genuine, forged = (
        Certified(epoch, (Signed(Accepted(ALONE, first.epoch.id, Ballot(1, ALONE), epoch.hash), b""),))
        for epoch in (Epoch(first.epoch.id.next(), places[number:]) for number in (0, 1))
    )
    for newest, other in ((genuine, forged), (forged, genuine)):
        own = KnownEpochs(first)
        own.learn([newest])
        assert not own.learn([other])
        assert own.newest == newest.epoch
        assert own.learn([key_signed(other)]), "the run key says which one counts"
        assert not own.learn([key_signed(newest)] if newest.epoch.hash > other.epoch.hash else [newest])
        assert own.newest == other.epoch


def test_an_epoch_with_more_statements_than_one_can_have_is_passed_over(first):
    own = KnownEpochs(first)
    own.learn(chain := epochs(first.epoch, 2, OTHER))
    fat = key_signed(chain[0])
    own.learn([Certified(fat.epoch, (*fat.certificate, *(fat.certificate[:1] * MAX_VOTERS)))])
    assert own.chain == (first, *chain)
    other = KnownEpochs(first)
    other.learn([Certified(chain[0].epoch, chain[0].certificate * (MAX_VOTERS + 1)), chain[1]])
    assert other.chain == (first,), "with the run key's signature nobody would take it any more"


def test_the_run_key_s_copy_of_an_epoch_is_where_others_begin(first):
    own = KnownEpochs(first)
    own.learn(chain := epochs(first.epoch, MANY, OTHER))
    assert len(own.chain) == 1 + MANY
    assert not own.learn([key_signed(chain[-2])]), "it is in the same epoch as before"
    assert own.chain == (*chain[-KEPT_EPOCHS:-2], key_signed(chain[-2]), chain[-1])
    assert own.up_to(chain[-1].epoch.id) == (key_signed(chain[-2]), chain[-1])


def test_a_coordinator_that_does_not_vote_tells_all_of_some_epochs_with_the_run_key_s_signature(computes):
    run = Quiet(RoundRules(num_stages=1, batch=4, roots_every=(0,)))
    for number in range(3):
        run.add(f"p{number}", {0}, ticket=f"of {number}")
    computes(run, False)
    run.run_until(20)
    assert "coordinator" not in {seat.peer for seat in run.cores[0].epoch.voters}
    rejoins(run, run.processes["p2"], MANY)
    assert all(len(core.membership.known.chain) <= 2 * KEPT_EPOCHS for core in run.cores)


def test_an_epoch_that_the_run_key_has_signed_takes_the_place_of_its_copy_without(first):
    own = KnownEpochs(first)
    chain = epochs(first.epoch, 3, OTHER)
    own.learn(chain)
    signed = Certified(chain[1].epoch, (Signed(KeySigned(chain[1].epoch.hash), b"key"),))
    term = Epoch(EpochId(2, ALONE, 0), (Place(0, OTHER),))
    own.learn([Certified(term, (Signed(KeySigned(term.hash), b"key"),)), *epochs(term, KEPT_EPOCHS, OTHER)])
    assert len(own.chain) == KEPT_EPOCHS + 1
    own.learn([signed, chain[2]])
    assert own.up_to(chain[2].epoch.id) == (signed, chain[2])
