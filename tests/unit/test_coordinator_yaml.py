"""YAML as people write it: numbers are numbers, texts are texts, and a key stands once."""

from pathlib import Path
from typing import Any

import pytest

from coordinator.config_files import check_overrides, load_manifest, read_yaml
from coordinator.planning.gpus import gpus
from coordinator.yaml_text import parse_yaml
from swarm_peer.errors import UserError

DEMO = Path(__file__).parents[2] / "configs" / "demo.yaml"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("1e-06", 1e-6), ("1e6", 1e6), ("2e0", 2.0), ("1E+6", 1e6), ("-1.5e-3", -1.5e-3), ("+1e3", 1e3)),
        *((".5e3", 500.0), ("5.e2", 500.0), ("1.0e6", 1e6), (".5", 0.5), ("5.", 5.0), ("1e-3 # of AdamW", 1e-3)),
        *(("12", 12), ("-3", -3), ("0.1", 0.1), ("true", True), ("null", None), ("", None)),
    ],
)
def test_numbers_are_numbers(text: str, value: Any) -> None:
    found = parse_yaml(text)
    assert found == value
    assert type(found) is type(value)
    assert parse_yaml(f"[{text.partition(' #')[0]}]") == [value] or text == ""


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("'1e6'", "1e6"), ('"1e-06"', "1e-06"), ("!!str 1e6", "1e6")),
        *(("1e6b", "1e6b"), ("e6", "e6"), ("1e", "1e"), ("v1e6", "v1e6"), ("1e6e7", "1e6e7"), ("1e-", "1e-")),
        ("12e4567", "12e4567"),  # a commit's first digits
        ("someone/model@12e45", "someone/model@12e45"),
    ],
)
def test_texts_are_texts(text: str, value: str) -> None:
    assert parse_yaml(text) == value


def test_files_are_in_utf_8_or_say_that_they_are_in_utf_16(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        path.write_text("name: Grüße\n", encoding=encoding)
        assert read_yaml(path) == {"name": "Grüße"}
    path.write_bytes("a: 1\nb: Grüße\n".encode("latin-1"))
    with pytest.raises(UserError, match=r"run\.yaml: line 2 is no text in UTF-8; save it in that encoding"):
        read_yaml(path)


def test_what_is_no_file_of_a_run_is_told_as_such(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a folder: name a YAML file, or one that comes with Swarm"):
        load_manifest(tmp_path)
    with pytest.raises(UserError, match="/dev/null is no regular file: name a YAML file"):
        load_manifest(Path("/dev/null"))
    (tmp_path / "empty.yaml").touch()
    with pytest.raises(UserError, match=r"empty\.yaml: expected a mapping of .*, got nothing: the file is empty"):
        load_manifest(tmp_path / "empty.yaml")


def test_spaces_before_the_key_of_a_setting_do_not_matter() -> None:
    assert load_manifest(DEMO, (" training.steps = 500",)).training.steps == 500


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", "a stands twice, in lines 1 and 3: remove one of them"),
        ("a: 1\na: 1", "a stands twice, in lines 1 and 2"),
        ("a:\n  b: 1\n  c:\n    d: 1\n    d: 2", r"a\.c\.d stands twice, in lines 4 and 5"),
        ("- x: 1\n- x: 1\n  y: 2\n  y: 3", r"1\.y stands twice, in lines 3 and 4"),
        ("{a: 1, 'a': 2}", "a stands twice, in line 1"),
        ("a: {b: [{c: 1, c: 1}]}", r"a\.b\.0\.c stands twice, in line 1"),
        ("a: [", "this is no valid YAML"),
        ("a: b: c", "this is no valid YAML"),
        ("a:\n\tb: c", r"this is no valid YAML: .* line 2, column 1.*; indent with spaces, not with tabs"),
        ("2026-13-45", "this is no valid YAML: month"),
        ("\0", "this is no valid YAML: unacceptable character"),
        ("!!python/object:os.system x", "this is no valid YAML"),
        ("[" * 5000, "this is no valid YAML"),
        *((f"a: !!{value}", "this is no valid YAML") for value in ("bool maybe", "timestamp x", "float ''")),
    ],
)
def test_what_is_wrong_is_said_in_one_line(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        parse_yaml(text)
    assert "\n" not in str(caught.value)


def test_what_replaces_an_aliased_key_does_not_stand_twice() -> None:
    assert parse_yaml("a: &x {b: 1, c: 1}\nd: {<<: *x, b: 2}\ne: *x")["d"] == {"b": 2, "c": 1}


def test_a_file_is_read_so(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    text = DEMO.read_text()
    path.write_text(text.replace("optimizer:\n", "optimizer:\n  eps: 1e-6\n", 1))
    assert load_manifest(path).optimizer.eps == 1e-6
    path.write_text(text + "\nseed: 1\n")
    first, second = (number for number, line in enumerate(path.read_text().splitlines(), 1) if line[:5] == "seed:")
    with pytest.raises(UserError, match=rf"run\.yaml: seed stands twice, in lines {first} and {second}"):
        load_manifest(path)
    path.write_bytes(b"name: \xff")
    with pytest.raises(UserError, match="line 1 is no text in UTF-8"):
        read_yaml(path)
    path.write_bytes("\ufeffname: é".encode())
    assert read_yaml(path) == {"name": "é"}


def test_a_setting_is_read_so() -> None:
    settings = ("optimizer.eps=1e-6", "training.steps=1e3", "model.config.layer_norm_epsilon=1e-06", "name='1e6'")
    manifest = load_manifest(DEMO, settings)
    assert (manifest.optimizer.eps, manifest.training.steps, manifest.name) == (1e-6, 1000, "1e6")
    assert isinstance(manifest.model.config, dict)
    assert manifest.model.config["layer_norm_epsilon"] == 1e-6
    with pytest.raises(UserError, match=r"--set 'schedule=.*': warmup_steps stands twice, in line 1"):
        load_manifest(DEMO, ("schedule={warmup_steps: 1, warmup_steps: 2}",))


def test_the_table_of_gpus_names_each_key_once() -> None:
    assert gpus()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("seed=1", "training.steps=5", "seed=2"), "--set seed=2 would replace --set seed=1 before it: leave one out"),
        (
            ("model.config.n_layer=3", "model.config={n_layer: 2}"),
            r"--set model.config=.* replace --set model.config.n_",
        ),
        (("model.config.n_layer=3", "model={}"), "--set model={} would replace --set model.config.n_layer=3"),
    ],
)
def test_a_setting_that_takes_another_back_is_refused(settings: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_overrides(settings)


def test_settings_that_add_to_each_other_are_taken() -> None:
    check_overrides(("seed=1", "seed=1", "model.config={n_layer: 2}", "model.config.n_layer=3", "model.configs=1"))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("yes", "yes"), ("on", "on"), ("1:30", "1:30"), ("1_000", "1_000"), ("017", 17), ("0o17", 15), ("0x1f", 31)),
        *(("true", True), ("FALSE", False), (".5", 0.5), ("+4", 4), ("1.", 1.0), ("~", None), ("'4'", "4")),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text, value):
    assert parse_yaml(text) == value
    assert type(parse_yaml(text)) is type(value)
