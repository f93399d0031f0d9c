"""Makes the state of the run, and one line for each optimizer step, of announcements and progress records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median_high, median_low

from coordinator.watch.metrics_file import MetricsLine, StageShares, ValidationLoss, metrics_line, stage_shares
from swarm_peer.config import RunManifest
from swarm_peer.policy.leadership import Term
from swarm_peer.policy.run_progress import Position, is_reached, position_of
from swarm_peer.policy.standstill import Standstill, find_divergence, find_standstill, find_troubled
from swarm_peer.policy.view import PeerView, SwarmView
from swarm_peer.wire.records import CoordinationRecord, ProgressRecord, RoundReport, Validation

# The shares of a validation come from several peers, one after the other. A line waits so long for the shares of peers
# that are gone, or that have ended the next round by now.
VALIDATION_WAIT_S = 20.0
# For the shares of peers that may still validate, a line waits so long. The run's end waits for its last line.
LONGEST_VALIDATION_S = 120.0
# Older lines are in metrics.jsonl alone.
LINES_KEPT = 1024
RECENT_STEPS = 3
# Most peers of all stages have to be in earlier rounds, on another timeline, for so many lifetimes of an announcement.
RETURN_PATIENCE = 2
# For this long after a stage-0 peer disappears, its last record is still read: it may have been killed, and its
# stage-mate may be too new to know those steps. The record is believed only as far as peers that are there bear it out.
AUTHORS_REMEMBERED_S = 60.0


class RunWatch:
    """Merges what stage-0 peers report, as far as the run's other peers bear it out (policy/run_progress.py).

    Args:
        waits: whether a step's line waits for the validation of its weights; False for who looks only once

    Attributes:
        view: the peers as they were seen last
        seen_s: when that was, on the clock of `observe`
        lines: the newest lines of metrics.jsonl, one for each optimizer step, in order; a rewind takes some back
        current_round: the round that stage-0 peers work on
        current_samples: samples that count in it so far
        coordination: the newest term, and the last record of its coordinator
        last_step: optimizer step of the run's last weights: that of its manifest, or of its decay, if that has begun
            before, as far as is known here
        has_finished: whether the run has made all its steps
        begun_at: optimizer step that the run is known to have made before this watch began, for `shown_step`
        checkpoint_step: optimizer step of the newest checkpoint that this coordinator has written, or has found at its
            beginning; None if none
        target_share: which part of the tokens of a late round was learnt; None where all are, or nobody has told
        standstill: that the run stands still, if it does
        waits_for: for whom of those who vote on its epochs the run waits; empty if for nobody, or as far as is known
        troubled: the peers that have been in trouble for a while
        divergence: that its weights have diverged, if all peers that have to know it say so
        returns: how often the run has gone back to earlier rounds, and the optimizer step up to which its lines held
            the last time. After a cut it may go on with a timeline that is older than the one seen here.
    """

    def __init__(self, manifest: RunManifest, view: SwarmView, *, waits: bool = True):
        self.manifest = manifest
        self.last_step = manifest.training.steps
        self._waits = waits
        self.view = view
        self.seen_s = 0.0
        self.lines: list[MetricsLine] = []
        self.current_samples = 0
        self.current_round = 0
        self.coordination: tuple[Term, CoordinationRecord] | None = None
        self.has_finished = False
        self.begun_at = 0
        self.checkpoint_step: int | None = None
        self.target_share: float | None = None
        self.standstill: Standstill | None = None
        self.waits_for = ""
        self.divergence: Standstill | None = None
        self.troubled: list[PeerView] = []
        self.returns = 0, 0
        self._progress: tuple[int, int, int] | None = None
        self._progressed_s = 0.0  # when it was last seen to grow
        self._done_since: float | None = None  # when most peers of each stage were first seen at the last step
        self._earlier_since: float | None = None  # when most peers were first seen in earlier rounds
        # Reports that have no line yet, by round, with peers and shares of time by stage, and the time when they were
        # believed.
        self._reports: dict[int, tuple[RoundReport, list[int], StageShares, float]] = {}
        self._validations: dict[tuple[int, str], Validation] = {}  # shares, by round and author
        self._authors: dict[str, float] = {}  # when each was seen last
        self._older_validation_loss: float | None = None  # the last one of lines that are not kept any more
        self._recalled: Sequence[MetricsLine] = ()
        self._told_line: MetricsLine | None = None  # of the last step, where a stage has nobody to bear it out

    def recall(self, lines: Sequence[MetricsLine]) -> None:
        """Go on from the lines that an earlier process has written, once there is a peer that tells of later ones."""
        self._recalled = lines

    def _go_on_from_recalled(self) -> None:
        """Put the recalled lines before those to come. The run may have gone on meanwhile, or back."""
        self.lines, self._recalled = list(self._recalled), ()
        self._forget_older_lines()

    def _forget_older_lines(self) -> None:
        for old in self.lines[:-LINES_KEPT]:
            self._older_validation_loss = old.get("validation_loss", self._older_validation_loss)
        del self.lines[:-LINES_KEPT]

    @property
    def last_line(self) -> MetricsLine | None:
        """The line of the last finished step."""
        return self.lines[-1] if self.lines else None

    @property
    def shown_line(self) -> MetricsLine | None:
        """The line of the last finished step, to be shown; of a run that waits, as most peers of stage 0 tell it."""
        return self.last_line or self._told_line

    @property
    def validation_loss(self) -> float | None:
        """The newest one, in nats per token."""
        losses = (line["validation_loss"] for line in reversed(self.lines) if "validation_loss" in line)
        return next(losses, self._older_validation_loss)

    @property
    def optimizer_step(self) -> int:
        """Finished steps: updates that the weights have had."""
        return self.lines[-1]["optimizer_step"] if self.lines else 0

    def _announced_steps(self) -> list[int]:
        """The optimizer step of most peers of each stage, or an earlier one; 0 for a stage without peers."""
        stages = [self.view.serving(stage) for stage in range(self.view.num_stages)]
        return [median_low(peer.optimizer_step for peer in peers) if peers else 0 for peers in stages]

    @property
    def shown_step(self) -> int:
        """Finished steps to show; before this watch has seen as many, those that are known of otherwise."""
        if self.lines:
            return max(self.begun_at, self.optimizer_step)
        return max([self.begun_at, *self._announced_steps()])

    def created_at_round(self, optimizer_step: int) -> int | None:
        """The round that began with the weights of this optimizer step; None if it is not known."""
        rounds = (line["round"] for line in self.lines if line["optimizer_step"] == optimizer_step)
        return next((round_number + 1 for round_number in rounds), None)

    def delivered(self) -> tuple[int, float]:
        """Samples of the last few steps, and the seconds that these took."""
        last = self.lines[-RECENT_STEPS:]
        return sum(line["samples"] for line in last), sum(line["seconds"] for line in last)

    @property
    def round_number(self) -> int:
        """The last finished round; -1 before the first."""
        return self.lines[-1]["round"] if self.lines else -1

    def peers_by_stage(self) -> list[int]:
        """How many peers serve each stage."""
        return [len(self.view.serving(stage)) for stage in range(self.manifest.stages.count)]

    def observe(self, view: SwarmView, progress: Mapping[str, ProgressRecord], now: float) -> list[MetricsLine]:
        """Take in the records of the DHT, and return the lines of steps that are complete now."""
        self.view, self.seen_s = view, now
        if self._recalled and view.peers:
            self._go_on_from_recalled()
        authors = sorted(peer.peer_id for peer in view.in_stage(0) if peer.has_work)
        known = {author: progress[author] for author in authors if author in progress}
        if known:
            self.current_round = median_high(record.current.round_number for record in known.values())
        self.current_samples = sum(
            record.current.samples for record in known.values() if record.current.round_number == self.current_round
        )
        self._authors |= dict.fromkeys(authors, now)
        self._authors = {author: seen for author, seen in self._authors.items() if now - seen < AUTHORS_REMEMBERED_S}
        told = {author: progress[author] for author in sorted(self._authors) if author in progress}
        self._look_for_return(now)
        self._believe(told, now)
        self._told_line = self._told_by_most(known) if view.empty_stages() else None
        if not self.lines and self._reports:
            earlier = min(self._reports)
            self._older_validation_loss = _last_validation_loss(told.values(), earlier)
        for author, record in told.items():
            for validation in record.validations:
                if validation.round_number - 1 in self._reports:
                    self._validations[validation.round_number, author] = validation
        new = []
        while (line := self._next_line(now)) is not None:
            new.append(line)
            if line["optimizer_step"] <= self.optimizer_step:  # the run has gone back
                self.begun_at = 0
            self.lines = [known for known in self.lines if known["optimizer_step"] < line["optimizer_step"]]
            self.lines.append(line)
            self._forget_older_lines()
        last = self.round_number
        self._reports = {number: known for number, known in self._reports.items() if number > last}
        self._look_for_end(now)
        self._look_for_standstill(now)
        # A line has the validation of the weights after its step.
        self._validations = {key: share for key, share in self._validations.items() if key[0] > last + 1}
        return new

    def observe_coordinator(self, newest: tuple[Term, CoordinationRecord] | None) -> None:
        """Take in the newest term and the last record of its coordinator, for the summary."""
        self.coordination = newest

    def observe_waiting(self, waits_for: str) -> None:
        """Take in for whom of those who vote the run waits."""
        self.waits_for = "" if self.has_finished else waits_for

    def observe_work(self, samples: int, weight: int) -> None:
        """Take in what a round's update was made of, as its entry has it.

        Args:
            weight: targets where samples say what is learnt, else samples
        """
        data = self.manifest.data
        if data.has_targets and samples > 0:
            self.target_share = weight / (samples * data.sequence_length)

    def observe_checkpoint(self, optimizer_step: int) -> None:
        """Take in that there is a checkpoint."""
        self.checkpoint_step = optimizer_step

    def _newest(self) -> Position:
        """Where the run was when it was believed last to have made a step."""
        if self._reports:
            return _reached_by(self._reports[max(self._reports)][0])
        return Position(self.round_number + 1, self.optimizer_step)

    def _look_for_end(self, now: float) -> None:
        """Find out whether all steps are made: by the lines, or by most peers of each stage.

        All who reported the last step may have gone, or have gone back to its end, before this watch began.
        """
        steps = self.last_step
        if self._reports or min(self._announced_steps()) < steps:
            self._done_since = None
        elif self._done_since is None:
            self._done_since = now
        patience_s = RETURN_PATIENCE * self.manifest.limits.announcement_s
        is_announced = self._done_since is not None and now >= self._done_since + patience_s
        self.has_finished = self.optimizer_step >= steps or is_announced

    def _look_for_standstill(self, now: float) -> None:
        """Find out whether the run stands still, and whether it will not go on by itself."""
        progress = self.current_round, self.current_samples, self.round_number
        if progress != self._progress:
            self._progress, self._progressed_s = progress, now
        self.troubled = [] if self.has_finished else find_troubled(self.view, now)
        self.standstill = None if self.has_finished else find_standstill(self.view, now, self._progressed_s)
        self.divergence = None if self.has_finished else find_divergence(self.view, now, self._progressed_s)

    def _look_for_return(self, now: float) -> None:
        """Give lines up if the run goes on in earlier rounds than theirs, without the updates that they tell of."""
        position = self._earlier_position()
        if position is None:
            self._earlier_since = None
            return
        if self._earlier_since is None:
            self._earlier_since = now
        if now < self._earlier_since + RETURN_PATIENCE * self.manifest.limits.announcement_s:
            return
        kept = [index for index, line in enumerate(self.lines) if position.follows(_made_by(line))]
        given_up = self.lines[kept[-1] + 1 if kept else 0 :]
        self.lines = self.lines[: len(self.lines) - len(given_up)]
        self._reports.clear()
        self._validations.clear()
        self._earlier_since = None
        if given_up:
            self.begun_at = 0
            self.returns = self.returns[0] + 1, given_up[0]["optimizer_step"] - 1

    def _earlier_position(self) -> Position | None:
        """Where the run is if more than half of each stage are in earlier rounds than the newest, on another timeline.

        After a rewind to later rounds, most peers may seem so as well, but only until they have announced themselves.
        """
        newest, found = self._newest(), list[Position]()
        for stage in range(self.view.num_stages):
            told = [position_of(peer) for peer in self.view.serving(stage)]
            earlier = [each for each in told if each.round_number < newest.round_number and not newest.follows(each)]
            if 2 * len(earlier) <= len(told):
                return None
            found.append(median_low(earlier))
        return min(found)

    def _believe(self, known: Mapping[str, ProgressRecord], now: float) -> None:
        """Take over what stage-0 peers report of rounds since the last one, as far as it can be true."""
        told: dict[str, list[Position]] = {}
        reports: dict[Position, list[RoundReport]] = {}
        last = self._newest()
        for author, record in known.items():
            for report in record.finished:
                told.setdefault(author, []).append(_reached_by(report))
                reports.setdefault(_reached_by(report), []).append(report)
        for position in sorted(reports):
            if position.round_number > last.round_number and is_reached(position, told, self.view, last):
                report = _middle(reports[position])
                self._reports[report.round_number] = (report, self.peers_by_stage(), stage_shares(self.view), now)
                last = position

    def _told_by_most(self, known: Mapping[str, ProgressRecord]) -> MetricsLine | None:
        """The line of the last step that most peers of stage 0 tell of; None if they tell of none."""
        reports = [report for record in known.values() for report in record.finished]
        newest = [max(map(_reached_by, record.finished)) for record in known.values() if record.finished]
        if 2 * len(newest) <= len([peer for peer in self.view.in_stage(0) if peer.has_work]):
            return None
        reached = median_low(newest)
        return self._line_of(
            _middle([report for report in reports if _reached_by(report) == reached]),
            self.peers_by_stage(),
            stage_shares(self.view),
        )

    def _validation(self, round_number: int) -> tuple[ValidationLoss | None, bool]:
        """The validation loss of the weights that a round began with, and whether all held-out samples are in it."""
        shares = [share for (number, _), share in self._validations.items() if number == round_number]
        samples = sum(share.samples for share in shares)
        if not samples:
            return None, False
        held_out = min(max(share.held_out for share in shares), self.manifest.training.validation_samples)
        return ValidationLoss(sum(share.loss_sum for share in shares) / samples, samples), samples >= held_out

    def _validation_wait_s(self, round_number: int) -> float:
        """For how long after a round's report the shares of the validation of its weights are waited for.

        The peers of stage 0 validate before they train on. How long that takes depends on model and links.
        """
        told = {author for number, author in self._validations if number == round_number + 1}
        seen_s = [seen_s for number, (*_, seen_s) in sorted(self._reports.items()) if number >= round_number]
        if len(seen_s) > 1:
            return seen_s[1] - seen_s[0] + VALIDATION_WAIT_S
        if all(peer.peer_id in told for peer in self.view.serving(0)):
            return VALIDATION_WAIT_S
        return LONGEST_VALIDATION_S

    def _next_line(self, now: float) -> MetricsLine | None:
        later = [round_number for round_number in self._reports if round_number > self.round_number]
        if not later:
            return None
        report, peers, shares, seen = self._reports[min(later)]
        validation, is_whole = self._validation(report.round_number + 1)
        due = self.manifest.training.validates_at(report.optimizer_step, self.last_step)
        if due and not is_whole and self._waits and now < seen + self._validation_wait_s(report.round_number):
            return None
        return self._line_of(report, peers, shares, validation)

    def _line_of(
        self,
        report: RoundReport,
        peers: list[int],
        shares: StageShares,
        validation: ValidationLoss | None = None,
    ) -> MetricsLine:
        length = self.manifest.data.sequence_length
        return metrics_line(
            **report.model_dump(), sequence_length=length, peers=peers, validation=validation, shares=shares
        )


def _last_validation_loss(records: Iterable[ProgressRecord], last_round: int) -> float | None:
    """The newest validation loss of weights with which a round up to `last_round` began, if anybody tells one."""
    told = (share for record in records for share in record.validations)
    shares = [share for share in told if share.round_number <= last_round and share.samples]
    newest = max((share.round_number for share in shares), default=None)
    shares = [share for share in shares if share.round_number == newest]
    return sum(share.loss_sum for share in shares) / sum(share.samples for share in shares) if shares else None


def _made_by(line: MetricsLine) -> Position:
    return Position(line["round"] + 1, line["optimizer_step"])


def _reached_by(report: RoundReport) -> Position:
    return Position(report.round_number + 1, report.optimizer_step)


def _middle(reports: Sequence[RoundReport]) -> RoundReport:
    """The medians of all reports of one round: authors have heard of different counts, or make them up."""
    told = ("samples", "loss", "seconds")
    return reports[0].model_copy(
        update={name: median_low(getattr(report, name) for report in reports) for name in told}
    )
