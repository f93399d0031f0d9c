"""States on the disk in place of memory: all stages of a model together may be larger than this machine's memory."""

from __future__ import annotations

import logging
from dataclasses import replace

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from swarm_peer.runtime.host.scratch import is_in_memory, scratch_folder, temporary_folder
from swarm_peer.runtime.state.index import StageState

log = logging.getLogger(__name__)


def spilled(state: StageState) -> StageState:
    """The same state, with tensors that lie in a temporary file and are read when somebody looks at them.

    The file has no name any more, so it goes with the tensors. If it cannot be written, the state stays in memory. The
    caller waits for the disk: it should be a worker thread.
    """
    if is_in_memory(temporary_folder()):
        return state
    try:
        with scratch_folder() as folder:
            save_file({name: tensor.contiguous() for name, tensor in state.tensors.items()}, folder / "state")
            return replace(state, tensors=load_file(folder / "state"))
    except (OSError, SafetensorError) as error:
        log.warning("state_stays_in_memory reason=%s", error)
        return state
