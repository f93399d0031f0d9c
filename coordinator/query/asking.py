"""Questions that a saved model is asked before a run and after it, so that people see what it has learnt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from coordinator.query.chatting import prompt_of, template_and_ends
from swarm_peer.errors import UserError
from swarm_peer.model.pretrained import ModelSource
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.runtime.data.tokenizers import load_tokenizer
from swarm_peer.runtime.host.processes import free_memory

if TYPE_CHECKING:
    from transformers._typing import GenerativePreTrainedModel

# An answer that is longer than that is cut off: three of them have to be read side by side.
MOST_TOKENS = 60


class Questions:
    """Questions, as tokens of a run's chat template.

    Args:
        texts: the questions

    Raises:
        UserError: the run has no chat template or no model to ask before it begins, or a question is too long
    """

    def __init__(self, resolved: ResolvedManifest, texts: Sequence[str], cache_dir: Path | None = None):
        section, self._pretrained = resolved.manifest.data, resolved.manifest.model.pretrained
        if self._pretrained is None:
            raise UserError("--ask: the run begins with random weights, which answer nothing: leave it out")
        self.texts = texts
        self._cache_dir = cache_dir
        self._tokenizer = load_tokenizer(section, resolved.vocab_size, cache_dir)
        template, self._ends = template_and_ends(section, self._tokenizer)
        self._prompts = [prompt_of(template, [{"role": "user", "content": text}]) for text in texts]
        self._length = section.sequence_length
        for text, prompt in zip(texts, self._prompts, strict=True):
            if len(prompt) >= self._length:
                raise UserError(
                    f"--ask: the question {text[:40]!r} has {len(prompt)} tokens in the run's chat template, and its "
                    f"sequences have {self._length}: write a shorter one"
                )

    def ask_base(self) -> list[str]:
        """The answers of the run's pretrained model."""
        assert self._pretrained is not None
        source = ModelSource(self._pretrained, self._cache_dir)
        if source.folder is not None:
            return self.ask(str(source.folder))
        name, _, revision = self._pretrained.partition("@")
        return self.ask(name, revision or "main")

    def ask(self, model: str, revision: str = "main") -> list[str]:
        """The likeliest answers of a model, or of adapters with their base, loaded as anybody would load it.

        Args:
            model: a folder, or a name on the hub
        """
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        cast(Callable[[], None], disable_progress_bar)()  # transformers declares no types here
        loaded = AutoModelForCausalLM.from_pretrained(
            model, revision=revision, cache_dir=self._cache_dir, dtype="auto", trust_remote_code=False
        )
        tokens = self._generate(cast("GenerativePreTrainedModel", loaded))
        del loaded
        free_memory()  # the peers of this machine need it
        return [self._text(answer.tolist()) for answer in tokens]

    def _generate(self, model: GenerativePreTrainedModel) -> torch.Tensor:
        """The answers (N, T), all at once: behind the end of one there may be anything."""
        longest = max(map(len, self._prompts))
        padding = [longest - len(prompt) for prompt in self._prompts]  # before a prompt, and not attended to
        tokens = [[self._tokenizer.separator_id] * n + p for n, p in zip(padding, self._prompts, strict=True)]
        mask = [[0] * n + [1] * len(p) for n, p in zip(padding, self._prompts, strict=True)]
        written = model.generate(
            torch.tensor(tokens),
            attention_mask=torch.tensor(mask),
            max_new_tokens=min(MOST_TOKENS, self._length - longest),
            do_sample=False,
            # Some models come with others, which belong to sampling.
            temperature=None,
            top_p=None,
            top_k=None,
            eos_token_id=sorted(self._ends),
            pad_token_id=self._tokenizer.separator_id,
        )
        return cast("torch.Tensor", written)[:, longest:]

    def _text(self, answer: list[int]) -> str:
        end = next((number for number, token in enumerate(answer) if token in self._ends), None)
        return self._tokenizer.decode(answer[:end]).strip() + (" ..." if end is None else "")


def read_questions(path: Path) -> list[str]:
    """The questions of a text file, one a line.

    Raises:
        UserError: it cannot be read, or has none
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise UserError(
            f"--ask {path}: cannot be read: {reason}; name a text file with a question in each line"
        ) from error
    if not (questions := [line.strip() for line in lines if line.strip()]):
        raise UserError(f"--ask {path}: has no questions: write one in each line")
    return questions
