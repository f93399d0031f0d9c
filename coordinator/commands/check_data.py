"""`check-data`: shows what a run would learn from its data, before it begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from coordinator.commands.console import open_console
from coordinator.commands.shared_options import CacheDir, Config, Count, Overrides, Positive, load_and_resolve
from swarm_peer.logs import configure_logging
from swarm_peer.peer_options import RUN

if TYPE_CHECKING:
    from rich.console import Console

    from coordinator.run.data_check import DataCheck, Piece
    from swarm_peer.config import DataSection

# Around learnt text where there are no colours.
BEGIN, END = "[[", "]]"


def check_data(
    config: Config,
    /,
    *,
    set_: Overrides = (),
    documents: Annotated[Count, RUN, Positive] = 1000,
    samples: Annotated[Count, RUN, Positive] = 3,
    cache_dir: CacheDir = None,
) -> None:
    """Show what a run would learn from its data: some documents as text, their lengths, and how many are cut.

    Learnt text is green, or in double brackets where there are no colours.

    Args:
        documents: Documents to look at, the first ones of each file in turn.
        samples: Documents to show.
    """
    configure_logging("warning")
    resolved = load_and_resolve(config, set_, cache_dir)

    from coordinator.run import data_check

    found = data_check.check_data(resolved, documents, samples, cache_dir)
    console = open_console()
    for number, pieces in enumerate(found.shown, 1):
        _show(console, number, pieces)
    for line in _summary(found, resolved.manifest.data):
        console.print(line, markup=False, highlight=False)


def _show(console: Console, number: int, pieces: Sequence[Piece]) -> None:
    from rich.text import Text

    from swarm_peer.policy.plain_text import without_controls

    has_colours = console.color_system is not None
    text = Text()
    for piece, is_learnt in pieces:
        shown = without_controls(piece)
        if is_learnt and has_colours:
            text.append(shown, style="bold green")
        else:
            text.append(f"{BEGIN}{shown}{END}" if is_learnt else shown)
    console.rule(f"document {number}")
    console.print(text)


def _summary(found: DataCheck, section: DataSection) -> list[str]:
    counts, length = found.counts, section.sequence_length
    lines = [
        "",
        f"{sum(counts[key] for key in ('used', 'cut_off', 'without_target', 'unusable'))} documents looked at",
        f"lengths in tokens: half have up to {found.length_at(0.5)}, nine in ten up to {found.length_at(0.9)}, "
        f"the longest has {found.lengths[-1]}",
        f"learnt: {found.num_targets} of {found.num_tokens} tokens, {found.num_targets / max(found.num_tokens, 1):.0%}",
    ]
    if section.has_targets:
        # The first token of a sample is there for the second one to follow, and is not of its length.
        share = (found.num_tokens / found.num_samples - 1) / length if found.num_samples else 0.0
        lines += [
            f"samples: {found.num_samples} of {length} tokens, {share:.0%} full"
            + ("" if section.packing or share > 0.7 else "; data.packing=true would fill them"),
            f"cut off behind the first token and data.sequence_length={length} more: {counts['cut']} documents lose "
            f"their end, and {counts['cut_off']} all that would be learnt",
            f"left out: {counts['without_target']} without a token to learn, {counts['unusable']} unusable",
        ]
        if found.num_without_end:
            lines.append(
                f"{found.num_without_end} documents end in a learnt token that ends no turn: a model that learns from "
                f"them may not know when to stop; look at the chat template"
            )
    return lines
