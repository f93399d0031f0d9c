"""`export`: a checkpoint or a live run as a model of Hugging Face transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from coordinator.commands.shared_options import CacheDir, NotNegative, RunFolder, RunId, RunPeers
from coordinator.watch.promises import Promises
from swarm_peer.errors import UserError
from swarm_peer.initial_peers import check_initial_peers
from swarm_peer.logs import configure_logging
from swarm_peer.peer_options import CHECKPOINTS, RUN


def export(
    run: RunFolder = None,
    /,
    *,
    output: Annotated[Path, RUN],
    merge: Annotated[bool, RUN, Parameter(negative="")] = False,
    checkpoint: Annotated[str | None, CHECKPOINTS] = None,
    step: Annotated[int | None, CHECKPOINTS, NotNegative] = None,
    initial_peers: RunPeers = (),
    run_id: RunId = None,
    data_dir: Annotated[Path | None, RUN] = None,
    cache_dir: CacheDir = None,
) -> None:
    """Write the model of a checkpoint or of a live run, as a folder that Hugging Face transformers loads.

    Of a live run it is the newest snapshot that its peers keep of all stages. Of a run that trains adapters it is a
    folder of PEFT's, or with --merge a model without adapters.

    Args:
        output: Folder of the model, and of its tokenizer.
        merge: Add the run's adapters to the weights that they adapt, and write a model without adapters.
        checkpoint: Instead of a live run, folder or URL (such as s3://bucket/run) of checkpoints, or of one of them.
        step: Which checkpoint, by its optimizer step; the newest good one if not given.
        data_dir: Folder of this machine that a live run may have its tokenizer read from, and with --merge its base.
    """
    configure_logging("warning")
    if checkpoint is not None and (initial_peers or run is not None):
        raise UserError(f"--checkpoint {checkpoint}: it is exported instead of a live run; name one of them only")
    if step is not None and checkpoint is None:
        raise UserError(f"--step {step}: a live run gives its newest snapshot only; leave it out, or give --checkpoint")
    check_initial_peers(initial_peers)

    from coordinator.run.found_runs import addresses_of_run, ending_of, folder_of_run
    from coordinator.watch.run_file import MODEL, RUN_FILE

    folder = output.absolute().parent
    if output.name == MODEL and (folder / RUN_FILE).exists() and not ending_of(folder):
        # A coordinator that is started again would take it for the model of the last step, and end the run.
        raise UserError(
            f"--output {output}: the run of {folder} saves its own model there at its end; name another one"
        )

    from coordinator.checkpoints.model_folder import export_checkpoint, export_run

    with (promises := Promises()).told_at_end():
        if checkpoint is not None:
            optimizer_step = export_checkpoint(checkpoint, step, output, promises, cache_dir, merge=merge)
        else:
            run_folder = run if run is not None or initial_peers else folder_of_run(None)
            optimizer_step = export_run(
                addresses_of_run(run_folder, initial_peers),
                run_id,
                output,
                promises,
                cache_dir,
                data_dir,
                merge=merge,
                run_folder=run_folder,
            )
        print(f"Saved after {optimizer_step} optimizer steps: {output}")
