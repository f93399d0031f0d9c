"""What doctor concludes: each fault is named in exactly one line, and nothing is where nothing is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarm_peer.policy.diagnosis.finding import Level, can_take_part, in_bytes
from swarm_peer.policy.diagnosis.machine_findings import (
    LEAST_OPEN_FILES,
    DeviceFacts,
    FolderRoom,
    MachineFacts,
    judge_machine,
)
from swarm_peer.policy.diagnosis.run_findings import (
    ClockLimits,
    MemberWay,
    NetworkPosition,
    RouterKind,
    RunFacts,
    StageFit,
    judge_run,
    router_of,
)
from swarm_peer.policy.probe_budget import ALL_BYTES, CALLER_BYTES, LEAST_BYTES, PERIOD_S, ProbeBudget

GB = 10**9
CPU = DeviceFacts(all_bytes=16 * GB, free_bytes=8 * GB, flops_per_s=1e11)
GPU = replace(CPU, device="cuda:0", name="NVIDIA H200", num_gpus=1, driver="580.65.06", torch_cuda="13.0")
STATE = FolderRoom(
    purpose="the peer's key", path="/state", option="XDG_STATE_HOME", free_bytes=90 * GB, needed_bytes=10**6
)
CACHE = FolderRoom(
    purpose="downloads", path="/cache", option="--cache-dir", disk=1, free_bytes=90 * GB, needed_bytes=GB
)
SCRATCH = FolderRoom(
    purpose="snapshots", path="/tmp", option="TMPDIR", disk=1, free_bytes=90 * GB, needed_bytes=30 * GB
)
MACHINE = MachineFacts(device=CPU, rooms=(STATE, CACHE, SCRATCH), open_files=65536, proxies={})

WAY = MemberWay(
    peer_id="12D3KooWmember-1",
    is_direct=True,
    is_reached=True,
    round_trip_s=0.05,
    clock_off_s=0.02,
    up_bytes_per_s=5e6,
    down_bytes_per_s=2e7,
)
LOST = MemberWay(peer_id="12D3KooWmember-2", is_direct=False, is_reached=False, reason="no connection")
HOME = NetworkPosition(ports=(31338,), own_hosts=("192.168.1.5",), seen_hosts=("11.0.0.9",) * 3, is_reachable=True)
CLOSED = replace(HOME, is_reachable=False, closed=("11.0.0.9:31338",))
RUN = RunFacts(
    name="test",
    clocks=ClockLimits(tolerance_s=3.0, ahead_s=30.0, behind_s=20.0),
    position=HOME,
    ways=(WAY, WAY, WAY),
    microbatch_bytes=3e6,
    hop_timeout_s=60.0,
    num_stages=4,
    fits=(StageFit(stage=1, samples_per_s=2.0, is_linked=True, others_samples_per_s=3.0),),
    tokens_per_sample=1024,
)


def with_disk(**changes):
    return replace(MACHINE, rooms=(STATE, replace(CACHE, **changes), replace(SCRATCH, **changes)))


def with_clocks(*offsets_s):
    return replace(RUN, ways=[replace(WAY, clock_off_s=offset_s) for offset_s in offsets_s])


def wrong(findings):
    return [finding for finding in findings if finding.level is not Level.OK]


@pytest.mark.parametrize("facts", [MACHINE, replace(MACHINE, device=GPU)])
def test_nothing_is_wrong_with_a_good_machine(facts):
    findings = judge_machine(facts)
    assert [finding.check for finding in findings] == ["device", "memory", "disk", "open files", "proxies"]
    assert not wrong(findings)


UNSEEN = replace(CPU, driver="470.57.02", torch_cuda="13.0")


@pytest.mark.parametrize(
    ("facts", "check", "level", "words"),
    [
        (
            replace(MACHINE, device=replace(CPU, error="cuda:0 cannot be used (it is on fire): mend that")),
            "device",
            Level.FAILURE,
            "it is on fire",
        ),
        # torch passes over a GPU that it cannot use, and says nothing.
        (
            replace(MACHINE, device=UNSEEN),
            "device",
            Level.WARNING,
            "(driver 470.57.02, torch for CUDA 13.0): inst",
        ),
        (replace(MACHINE, device=UNSEEN), "device", Level.WARNING, "install driver 580 or newer"),
        (
            replace(MACHINE, device=replace(UNSEEN, driver="590.1")),
            "device",
            Level.WARNING,
            "let this process use it (in a container, `docker run --gpus all`)",
        ),
        (
            replace(MACHINE, device=replace(UNSEEN, torch_cuda="")),
            "device",
            Level.WARNING,
            "torch for CUDA none): install a build of torch for CUDA, or say --device cpu",
        ),
        (
            replace(MACHINE, device=replace(UNSEEN, wanted="cuda", error="--device cuda: 0 CUDA devices")),
            "device",
            Level.FAILURE,
            "install driver 580",
        ),
        (replace(MACHINE, device=replace(CPU, free_bytes=10**8)), "memory", Level.WARNING, "100 MB of 16.0 GB free"),
        (with_disk(free_bytes=20 * GB), "disk", Level.WARNING, "20.0 GB free at /tmp, and downloads and snapshots may"),
        (with_disk(free_bytes=20 * GB), "disk", Level.WARNING, "take 31.0 GB: free some, or name a folder elsewhere"),
        (with_disk(free_bytes=0), "disk", Level.FAILURE, "0 B free at /tmp"),
        (with_disk(error="Read-only file system"), "disk", Level.FAILURE, "name another folder with --cache-dir"),
        (replace(MACHINE, open_files=256), "open files", Level.WARNING, "256 at a time are few: raise the limit with"),
        (replace(MACHINE, proxies={"all_proxy": "socks5://me:pw@h:1"}), "proxies", Level.WARNING, "a socks5 proxy"),
        (
            replace(MACHINE, proxies={"http_proxy": "http://[::1"}),
            "proxies",
            Level.WARNING,
            "http_proxy names no proxy",
        ),
        (
            replace(MACHINE, proxies={"https_proxy": "me:pw@h:1"}, silent_proxies=frozenset({"https_proxy"})),
            "proxies",
            Level.WARNING,
            "nothing answers at h:1, which https_proxy names",
        ),
    ],
)
def test_each_fault_of_a_machine_is_one_line(facts, check, level, words):
    findings = judge_machine(facts)
    (finding,) = wrong(findings)
    assert (finding.check, finding.level) == (check, level)
    assert words in finding.text
    assert "pw" not in finding.text, "passwords of proxies"
    assert can_take_part(findings) is (level is Level.WARNING)


@pytest.mark.parametrize("changes", [{"wanted": "cpu"}, {"hides_gpus": True}, {"num_gpus": 1}])
def test_a_gpu_that_is_not_meant_is_passed_over(changes):
    assert not wrong(judge_machine(replace(MACHINE, device=replace(UNSEEN, **changes))))


def test_room_that_a_disk_has_once_is_counted_once():
    assert not wrong(judge_machine(with_disk(free_bytes=31 * GB)))
    apart = (STATE, replace(CACHE, free_bytes=2 * GB), replace(SCRATCH, disk=2, free_bytes=30 * GB))
    assert not wrong(judge_machine(replace(MACHINE, rooms=apart)))


def test_the_proxies_that_are_used_are_named():
    (found,) = [f for f in judge_machine(replace(MACHINE, proxies={"https_proxy": "h:1"})) if f.check == "proxies"]
    assert (found.level, found.text) == (Level.OK, "downloads go by h:1; connections between peers do not")
    assert not wrong(judge_machine(replace(MACHINE, open_files=LEAST_OPEN_FILES)))


def test_nothing_is_wrong_where_a_machine_fits_its_run():
    findings = judge_run(RUN)
    text = {finding.check: finding.text for finding in findings}
    assert not wrong(findings)
    assert text["clock"] == "0.0 s behind the clocks of 3 members"
    assert text["members"] == "3 of 3 answer, 3 at addresses of their own, round trips of 50 to 50 ms"
    assert text["router"] == "one that translates addresses, as 11.0.0.9"
    assert text["links"] == "about 5.0 MB/s up and 20.0 MB/s down"
    assert text["stages"] == "memory for all"
    assert text["speed"] == "about 2,050 tokens/s in stage 1, by its link; a peer there computes 3,070"


def test_what_nobody_tells_is_no_fault():
    unknown = replace(RUN, position=NetworkPosition(ports=(31338,)), ways=[replace(WAY, clock_off_s=None)], fits=())
    silent = replace(WAY, up_bytes_per_s=None, down_bytes_per_s=None, reason="this peer has measured enough")
    assert not wrong(judge_run(unknown))
    (links,) = [each for each in judge_run(replace(RUN, ways=[silent])) if each.check == "links"]
    assert links.text == "not measured (this peer has measured enough)"


@pytest.mark.parametrize(
    ("facts", "check", "level", "words"),
    [
        (with_clocks(10.0, 10.1, 9.9), "clock", Level.WARNING, "10.0 s behind the clocks of 3 members: set it by"),
        (with_clocks(-10.0), "clock", Level.WARNING, "10.0 s ahead of the clock of 1 member: "),
        (with_clocks(25.0), "clock", Level.FAILURE, "25.0 s behind"),
        (with_clocks(-31.0), "clock", Level.FAILURE, "31.0 s ahead"),
        (replace(RUN, ways=()), "members", Level.WARNING, "none was found to try"),
        (replace(RUN, ways=(LOST, LOST)), "members", Level.FAILURE, "none of 2 answers (no connection): let this"),
        (replace(RUN, ways=(WAY, LOST)), "members", Level.WARNING, "1 of 2 answer, 1 at addresses of their own"),
        (
            replace(RUN, position=CLOSED),
            "port",
            Level.WARNING,
            "closed to others at 11.0.0.9:31338: forward port 31338 of the router (TCP) to this",
        ),
        (
            replace(RUN, position=replace(CLOSED, own_hosts=("11.0.0.9",))),
            "port",
            Level.WARNING,
            "let port 31338 through the firewall of this machine or of its cloud",
        ),
        (
            replace(RUN, position=replace(CLOSED, own_hosts=("100.70.1.2",))),
            "port",
            Level.WARNING,
            "ask the provider for an address",
        ),
        (
            replace(RUN, ways=[replace(WAY, up_bytes_per_s=1e4)]),
            "links",
            Level.WARNING,
            "about 10.0 kB/s up and 20.0 MB/s down: take another link: peers need 64.0 kB/s",
        ),
        (
            replace(RUN, microbatch_bytes=1e8),
            "links",
            Level.WARNING,
            "a microbatch of 100 MB takes 20 s: take a faster link, since a hop may take 60 s",
        ),
        (replace(RUN, too_small="no stage fits; take more"), "stages", Level.FAILURE, "no stage fits; take more"),
    ],
)
def test_each_fault_in_a_run_is_one_line(facts, check, level, words):
    findings = judge_run(facts)
    (finding,) = wrong(findings)
    assert (finding.check, finding.level) == (check, level)
    assert words in finding.text
    assert can_take_part(findings) is (level is Level.WARNING)


def test_one_member_whose_clock_is_wrong_says_nothing_of_this_machine():
    assert not wrong(judge_run(with_clocks(0.1, 500.0, -0.1)))


def test_stages_that_are_too_large_are_left_out():
    (stages,) = [each for each in judge_run(replace(RUN, too_large=(0, 3))) if each.check == "stages"]
    assert stages.text == "memory for 1, 2"


@pytest.mark.parametrize(
    ("own", "seen", "router"),
    [
        (("192.168.1.5",), (), RouterKind.UNKNOWN),
        (("192.168.1.5",), ("11.0.0.9",), RouterKind.TRANSLATES),
        (("192.168.1.5", "11.0.0.9"), ("11.0.0.9", "11.0.0.9"), RouterKind.NONE),
        (("100.64.0.7",), ("11.0.0.9",), RouterKind.SHARED),
        (("192.168.1.5",), ("11.0.0.9", "11.0.0.10"), RouterKind.SEVERAL),
        (("192.168.1.5", "2a00::5"), ("2a00::5",), RouterKind.NONE),
        (("192.168.1.5", "2a00::5"), ("2a00::5", "11.0.0.9"), RouterKind.TRANSLATES),
    ],
)
def test_a_router_is_known_by_the_addresses_on_its_two_sides(own, seen, router):
    assert router_of(NetworkPosition(own_hosts=own, seen_hosts=seen)) is router


@pytest.mark.parametrize(
    ("count", "words"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (123_456_789, "123 MB"), (2.5e12, "2.5 TB")]
)
def test_bytes_are_written_as_people_do(count, words):
    assert in_bytes(count) == words


def test_a_caller_has_few_bytes_a_minute_and_all_have_some_more():
    budget = ProbeBudget()
    assert budget.take(0.0, "alice", CALLER_BYTES)
    assert not budget.take(1.0, "alice", 1)
    callers = [str(number) for number in range(ALL_BYTES // CALLER_BYTES)]
    assert [budget.take(2.0, caller, CALLER_BYTES) for caller in callers] == [True] * (len(callers) - 1) + [False]
    assert budget.take(PERIOD_S, "alice", CALLER_BYTES), "the minute is over"


def test_many_small_probes_are_not_remembered_for_ever():
    budget = ProbeBudget()
    taken = sum(budget.take(0.0, f"peer-{number}", 1) for number in range(100_000))
    assert taken == len(budget._spent) == ALL_BYTES // LEAST_BYTES
