import gzip

import pytest
import torch
from tiny_swarms import LENGTH, make_manifest
from transformers import AutoModelForCausalLM

from coordinator.query.queries import draw_samples
from coordinator.query.sampling import PROMPT, TextStream, choose_token, generate
from swarm_peer.errors import UserError
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.runtime.data.slices import validation_samples
from swarm_peer.runtime.data.tokenizers import BytesTokenizer

MANIFEST = make_manifest(
    model={
        "config": {
            "model_type": "gpt2",
            "vocab_size": 256,
            "n_positions": LENGTH,
            "n_embd": 8,
            "n_layer": 3,
            "n_head": 2,
        }
        | {"tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0}
    }
)


def test_temperature_zero_takes_the_likeliest():
    assert choose_token(torch.tensor([0.1, 3.0, 2.9]), 0.0, 1, torch.Generator()) == 1


@pytest.mark.parametrize(("top_k", "possible"), [(1, {3}), (2, {3, 1}), (0, {0, 1, 2, 3}), (99, {0, 1, 2, 3})])
def test_tokens_are_drawn_among_the_likeliest(top_k, possible):
    generator = torch.Generator().manual_seed(0)
    drawn = {choose_token(torch.tensor([0.0, 0.5, 0.2, 0.7]), 1.0, top_k, generator) for _ in range(300)}
    assert drawn == possible


def test_tokens_are_drawn_in_proportion():
    generator = torch.Generator().manual_seed(0)
    logits_V = 2 * torch.tensor([0.2, 0.8]).log() + 1000
    drawn = [choose_token(logits_V, 2.0, 0, generator) for _ in range(4000)]
    assert sum(drawn) / 4000 == pytest.approx(0.8, abs=0.03)


@pytest.mark.parametrize("temperature", [1e-30, 5e-324])
def test_a_low_temperature_does_not_overflow(temperature):
    assert choose_token(torch.tensor([1e30, -1e30, 5.0]), temperature, 0, torch.Generator()) == 0


def test_a_saved_model_writes_no_further_than_it_was_trained(tmp_path, monkeypatch):
    """It takes longer texts than its samples were."""
    monkeypatch.setattr(BytesTokenizer, "decode", lambda _, ids: "".join(map(chr, ids)))  # a character for each token
    model = MANIFEST.model.model_copy(update={"config": MANIFEST.model.config | {"n_positions": 4 * LENGTH}})
    resolved = ResolvedManifest.of(MANIFEST.model_copy(update={"model": model}))
    AutoModelForCausalLM.from_config(resolved.config).save_pretrained(tmp_path)
    assert len(PROMPT) < LENGTH
    for num_tokens, length in ((2, len(PROMPT) + 2), (4 * LENGTH, LENGTH)):
        written = generate(resolved, tmp_path, num_tokens)
        assert written.startswith(PROMPT)
        assert len(written) == length


@pytest.mark.parametrize("text", ["plain", "zwölf Äpfel", "日本語 🎉!", "\x00"])
def test_text_streams_in_whole_characters(text):
    stream, tokenizer = TextStream(BytesTokenizer(), [65, 66]), BytesTokenizer()
    pieces = [stream.push(token) for token in tokenizer.encode(text)]
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)
    assert stream.rest() == ""


@pytest.mark.parametrize(
    "ids",
    [
        [0xFF, 0x41, 0xE6, 0x97, 0x41, 0xF0, 0x9F],
        [0xFF, 0xFF, *"🎉".encode()],
        [0x80] * 9,
        [0xF0, 0x9F, 0x8E, 0x41],
        [65, 300, 50_303, 66],  # of a vocabulary with more than bytes
    ],
)
def test_text_that_is_no_text_streams_all_the_same(ids):
    stream = TextStream(BytesTokenizer())
    written = "".join(stream.push(token) for token in ids) + stream.rest()
    assert written == BytesTokenizer().decode(ids)
    assert written


def test_samples_are_the_runs_held_out_ones():
    drawn = draw_samples(MANIFEST, 5)
    assert drawn.shape == (5, LENGTH + 1)
    assert (drawn == validation_samples(MANIFEST, 5)).all()


def test_samples_of_files(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("0123456789abcdefghij")
    drawn = draw_samples(MANIFEST, 99, (path,))
    assert [bytes(sample.astype("uint8").tolist()) for sample in drawn] == [b"0123456", b"6789abc", b"cdefghi"]
    assert len(draw_samples(MANIFEST, 2, (path, path))) == 2


def test_files_that_cannot_be_used_are_named(tmp_path):
    (tmp_path / "short.txt").write_text("abc")
    with pytest.raises(UserError, match="fewer tokens than one sample of 7"):
        draw_samples(MANIFEST, 1, (tmp_path / "short.txt",))
    with pytest.raises(UserError, match=r"--files: cannot read .*missing\.txt: there is no such file"):
        draw_samples(MANIFEST, 1, (tmp_path / "missing.txt",))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt.gz", gzip.compress(b"0123456789abcdefghij", mtime=0)),
        ("a.txt", gzip.compress(b"0123456789abcdefghij", mtime=0)),
        ("a.jsonl", b'{"text": "0123456789abcdefghij"}\n'),
        ("a.json", b'[{"text": "0123456789abcdefghij"}]'),
        ("a.csv", b"n,text\n1,0123456789abcdefghij\n"),
        ("a.md", "0123456789abcdefghij".encode("utf-16")),
        ("README", b"0123456789abcdefghij"),
    ],
)
def test_files_are_read_by_their_format(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    drawn = draw_samples(MANIFEST, 99, (tmp_path / name,))
    assert [bytes(sample.astype("uint8").tolist()) for sample in drawn] == [b"0123456", b"6789abc", b"cdefghi"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", bytes(range(256)) * 9, "it is binary"),
        ("a.txt", "Grüße und Küsse".encode("latin-1"), "it is text in another encoding"),
        ("a.jsonl", b'{"body": "x"}', "it has no field 'text', which data.text_field names, but body"),
        ("a.txt", b"", "empty"),
    ],
)
def test_files_that_are_no_text_are_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        draw_samples(MANIFEST, 99, (tmp_path / name,))


def test_a_run_reads_no_files_here_that_it_may_not(tmp_path):
    path = tmp_path / "private.txt"
    path.write_text("\n\n".join(f"paragraph {number} of secrets" for number in range(40)))
    manifest = make_manifest(
        model={"config": MANIFEST.model.config},
        data={"sequence_length": LENGTH, "dataset": "text", "files": (str(path),)},
    )
    for data_dir in (None, tmp_path / "public"):
        with pytest.raises(UserError, match="read from this machine with --data-dir FOLDER, which is that"):
            draw_samples(manifest, 1, data_dir=data_dir)
    assert len(draw_samples(manifest, 1, data_dir=tmp_path)) == 1


def test_a_run_reads_no_tokenizer_here_that_it_may_not(tmp_path):
    path = tmp_path / "own.txt"
    path.write_text("a text of one's own")
    data = {"sequence_length": LENGTH, "tokenizer": str(tmp_path)}
    manifest = make_manifest(model={"config": MANIFEST.model.config}, data=data)
    for files in ((), (path,)):
        with pytest.raises(UserError, match=r"wants to read the tokenizer .* on this machine.*--data-dir"):
            draw_samples(manifest, 1, files)
        with pytest.raises(UserError, match=r"vocabulary|cannot load data\.tokenizer"):
            draw_samples(manifest, 1, files, data_dir=tmp_path)
