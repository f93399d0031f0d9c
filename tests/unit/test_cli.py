"""The command lines as newcomers type them: what --help shows, and one line for each mistake, before anything heavy."""

import errno
import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import warnings
from itertools import pairwise
from typing import Annotated

import pytest
from cyclopts import Parameter

import coordinator.cli
import swarm_peer.cli
import swarm_peer.logs
from coordinator.commands.shared_options import Count
from coordinator.config_files import PEERS, RUNS, find_file
from coordinator.planning.peers_file import load_peers
from coordinator.query import queries
from coordinator.run import found_runs
from swarm_peer.errors import InvalidMessage, SwarmError, UserError, machine_fault
from swarm_peer.runtime.network.transport import check_body, error_from_body
from swarm_peer.wire.identity import Identity
from swarm_peer.wire.messages import AgreeCall
from swarm_peer.wire.passes import Invite

log = logging.getLogger(__name__)

ENTRIES = {"swarm-peer": swarm_peer.cli.run, "swarm-coordinator": coordinator.cli.run}
COMMANDS = [
    ("swarm-peer",),
    *(("swarm-peer", command.__name__.replace("_", "-")) for command in swarm_peer.cli.EXAMPLES),
    ("swarm-coordinator",),
    *(("swarm-coordinator", command.__name__.replace("_", "-")) for command in coordinator.cli.EXAMPLES),
]
ADDRESS = f"/ip4/127.0.0.1/tcp/9/p2p/{Identity.generate().peer_id}"


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs a command line; returns its exit code and what it printed."""

    def run_line(program, *words):
        monkeypatch.setattr(sys, "argv", [program, *words])
        try:
            ENTRIES[program]()
            code = 0
        except SystemExit as ended:
            code = ended.code
        said = capsys.readouterr()
        return code, said.out, said.err

    return run_line


def test_what_each_look_finds_again_is_complained_of_once_a_minute():
    filter_ = swarm_peer.logs.RepeatFilter()

    def passes(message, at_s):
        record = logging.LogRecord("dht", logging.WARNING, "", 0, message, (), None)
        record.created = at_s
        return filter_.filter(record)

    revoked, expired = "invalid_record key=1 reason=revoked", "invalid_record key=1 reason=expired"
    assert [passes(revoked, at_s) for at_s in (0.0, 0.5, 59.0, 60.0, 61.0)] == [True, False, False, True, False]
    assert passes(expired, 61.0)
    full = "peers_not_kept path=peers reason=no space", "look_incomplete work=invites reason=no space"
    assert [[passes(message, at_s) for at_s in (0.0, 2.0)] for message in full] == [[True, False], [True, False]]
    assert all(passes("moving from=1 to=2", at_s) for at_s in (0.0, 1.0)), "what happens twice is told twice"
    assert [passes(f"invalid_record key={number}", 0.0) for number in range(3000)] == [True] * 3000
    assert len(filter_._next_s) <= filter_.MOST_REMEMBERED


# What a member may put into the name of a field, an error, or what its logits make of a prompt.
FORGED = "x\n2026-11-26 03:00:00,000 ERROR run_ended reason=stop\x1b]0;owned\x07\r\x7f\x85\x9b2J\u2028\u2029"
SAID = r"x\n2026-11-26 03:00:00,000 ERROR run_ended reason=stop\x1b]0;owned\x07\r\x7f\x85\x9b2J\u2028\u2029"


BARS = ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS")


@pytest.fixture
def stderr(monkeypatch):
    """What the programs' log is written to."""
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(logging.root, "handlers", [])
    for name in ("HIVEMIND_LOGLEVEL", "TOKENIZERS_PARALLELISM", "USE_LEGACY_BFLOAT16", *BARS):
        monkeypatch.setenv(name, "")
    level = logging.root.level
    swarm_peer.logs.configure_logging("info")
    yield stderr
    logging.root.setLevel(level)


def test_what_a_member_sends_makes_no_line_of_the_log_and_commands_no_terminal(stderr):
    with pytest.raises(InvalidMessage) as caught:
        check_body(AgreeCall, {FORGED: 1})
    log.warning("invalid_message peer=a reason=%s", caught.value)
    log.info("peer_avoided reason=%s", error_from_body({"code": "failed", "message": FORGED, "round_number": None}))
    invalid, avoided = stderr.getvalue().splitlines()
    assert re.match(r"[-\d]{10} [:\d]{8},\d{3} WARN(ING)? invalid_message peer=a reason=AgreeCall: ", invalid)
    assert SAID in invalid
    assert avoided.endswith(f" INFO peer_avoided reason={SAID}")


@pytest.mark.parametrize("is_imported_first", [True, False])
def test_a_librarys_errors_are_lines_of_our_log_once_each(stderr, is_imported_first):
    """Whatever handler, level and way to the root logger the library has given its own logger."""
    name = f"library_{is_imported_first}"

    def import_it():
        logger = logging.getLogger(name)
        logger.addHandler(logging.StreamHandler(stderr))
        logger.setLevel(logging.DEBUG)
        logger.propagate = False

    if is_imported_first:
        import_it()
    swarm_peer.logs.LibraryLogger.adopt(name)
    if not is_imported_first:
        import_it()
    logging.getLogger(f"{name}.part").warning("a warning")
    logging.getLogger(name).info("a hint")
    logging.getLogger(f"{name}.part").error("cannot read\nit")
    (line,) = stderr.getvalue().splitlines()
    assert line.endswith(r" ERROR cannot read\nit")


def test_the_libraries_that_log_beside_us_are_adopted(stderr):
    for name in ("datasets", "transformers", "huggingface_hub", "matplotlib", "torch"):
        assert isinstance(logging.getLogger(name), swarm_peer.logs.LibraryLogger), name


def test_a_warning_of_python_is_a_line_of_our_log_once(stderr):
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        for _ in range(3):
            warnings.warn("look\nout", UserWarning, stacklevel=1)
    (line,) = stderr.getvalue().splitlines()
    assert re.search(r" WARN python_warning category=UserWarning place=.*test_cli\.py:\d+ text=look\\nout$", line)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_bars_are_drawn_on_terminals_alone(is_terminal, stderr, monkeypatch):
    for name in BARS:
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "stderr", stderr)  # pytest's is there again, once the fixtures are
    monkeypatch.setattr(stderr, "isatty", lambda: is_terminal, raising=False)
    swarm_peer.logs.configure_logging("info")
    assert [os.environ.get(name) for name in BARS] == [None if is_terminal else "1"] * 3


def test_a_second_sigterm_ends_a_peer_at_once_and_without_a_traceback():
    before = signal.getsignal(signal.SIGTERM)
    try:
        swarm_peer.cli._exit_on_sigterm()
        with pytest.raises(SystemExit) as caught:
            signal.raise_signal(signal.SIGTERM)
        assert caught.value.code == 0
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_traceback_has_lines_of_its_own_and_none_that_looks_like_the_log(stderr):
    try:
        raise ValueError(FORGED)
    except ValueError:
        log.exception("handler_failed peer=%s", FORGED)
    first, *traceback = stderr.getvalue().splitlines()
    assert first.endswith(f" ERROR handler_failed peer={SAID}")
    assert traceback[0] == "  Traceback (most recent call last):"
    assert len(traceback) >= 4
    assert all(line.startswith("  ") and line.isprintable() for line in traceback)
    assert "\n".join(traceback).endswith(SAID.partition("x")[2].partition("n")[2]), "what the error quotes is there"


@pytest.mark.parametrize(("error", "code"), [(SwarmError(FORGED), 1), (UserError(FORGED), 2)])
def test_the_error_that_ends_a_program_is_one_line_and_commands_no_terminal(error, code, monkeypatch, capsys):
    app = swarm_peer.cli.make_app("swarm-peer", "")

    @app.default
    def fail():
        raise error

    monkeypatch.setattr(sys, "argv", ["swarm-peer"])
    with pytest.raises(SystemExit) as ended:
        swarm_peer.cli.run_app(app)()
    said = capsys.readouterr().err
    assert ended.value.code == code
    assert said.startswith("swarm-peer: x")
    assert said.endswith("\n")
    assert said[:-1].isprintable()
    assert r"stop\x1b]0;owned\x07" in said


MACHINE = {
    errno.ENOSPC: "No space left on device: /data/x; free some space, or name a folder elsewhere (--output",
    errno.EROFS: "Read-only file system: /data/x; name a folder that can be written to (--output",
    errno.EACCES: "Permission denied: /data/x; let this user use it, or name another folder (--output",
    errno.EMFILE: "Too many open files: /data/x; let this process open more files, with `ulimit -n 65536`",
    errno.ENOLCK: "No locks available: /data/x; name a folder whose file system has locks (--output",
    errno.EIO: "Input/output error: /data/x; mend that disk, or name a folder elsewhere (--output",
}


@pytest.mark.parametrize("code", MACHINE)
def test_what_the_machine_lacks_is_one_line(code, monkeypatch, capsys):
    app = swarm_peer.cli.make_app("swarm-peer", "")

    @app.default
    def fail():
        raise OSError(code, "as a library says it", "/data/x")

    monkeypatch.setattr(sys, "argv", ["swarm-peer"])
    for hook in ("excepthook", "unraisablehook"):  # a program ends with it, and this one does not
        monkeypatch.setattr(sys, hook, getattr(sys, hook))
    with pytest.raises(SystemExit) as ended:
        swarm_peer.cli.run_app(app)()
    sys.unraisablehook("a library's object, which is half made")
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.startswith(f"swarm-peer: {MACHINE[code]}")
    assert said.count("\n") == 1


def test_a_library_that_hides_what_the_machine_lacks_does_not_hide_it_from_people():
    def deep():
        try:
            try:
                raise PermissionError(errno.EACCES, "Permission denied", "/home/x/.cache")
            except OSError as error:
                raise ValueError("no such data set") from error
        except ValueError:
            raise RuntimeError("cannot load") from None

    with pytest.raises(RuntimeError) as caught:
        deep()
    assert machine_fault(caught.value).startswith("Permission denied: /home/x/.cache; let this user use it")
    assert machine_fault(FileNotFoundError(errno.ENOENT, "no such file", "book.txt")) is None
    looped = ValueError()
    looped.__context__ = looped
    assert machine_fault(looped) is None


@pytest.mark.parametrize("words", [("--name", "caf\udce9"), ("--initial-peers", "@\ud800")])
def test_bytes_that_are_no_text_are_refused(words, run):
    code, _, err = run("swarm-peer", *words)
    assert code == 2
    assert re.fullmatch(
        r"swarm-peer: '@?(caf)?\\u[0-9a-f]{4}' is no text in this shell's encoding \(utf-8\): type it .*\n", err
    )


@pytest.mark.parametrize("option", ["--output", "--checkpoints"])
def test_an_unset_variable_is_no_value(option, run):
    code, _, err = run("swarm-coordinator", "serve", "demo", option, "")
    assert code == 2
    assert err.startswith(
        f"swarm-coordinator: {option} has an empty value: give one, or leave it out (is a shell variable"
    )


def test_a_folder_that_is_gone_is_left(run, tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    code, _, err = run("swarm-coordinator", "status")
    assert (code, err) == (2, "swarm-coordinator: the folder that this was started in is gone: change to another one\n")


def test_who_reads_no_more_gets_no_traceback():
    program = (
        "import sys; from swarm_peer.cli import make_app, run_app\n"
        "app = make_app('swarm-peer', '')\n"
        "@app.default\ndef main():\n  for _ in range(100000): print('a line')\n"
        "sys.argv = ['swarm-peer']\nrun_app(app)()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(30) == 1
        assert process.stderr.read() == b""


@pytest.mark.parametrize(("encoding", "is_told"), [("ascii", True), ("utf-8", False)])
def test_a_locale_that_lacks_a_files_letters_is_named(encoding, is_told, monkeypatch, capsys):
    app = swarm_peer.cli.make_app("swarm-peer", "")
    app.default(lambda: "b\xfccher".encode("ascii"))
    monkeypatch.setattr(sys, "argv", ["swarm-peer"])
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: encoding)
    with pytest.raises(SystemExit if is_told else UnicodeEncodeError):
        swarm_peer.cli.run_app(app)()
    told = "swarm-peer: this shell's encoding (ascii) has no '\\xfc': take a UTF-8 locale (LC_ALL=C.UTF-8)\n"
    assert capsys.readouterr().err == (told if is_told else "")


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_a_stream_that_is_closed_is_as_one_that_leads_nowhere(closed):
    words = (sys.executable, "-c", "from swarm_peer.cli import run; run()", "--initial-peers", "nobody")
    ended = subprocess.run(["sh", "-c", f'exec "$@" {closed}', "sh", *words], capture_output=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, b"", b"")


def test_a_connection_that_breaks_is_no_reader_that_has_enough(monkeypatch):
    app = swarm_peer.cli.make_app("swarm-peer", "")

    @app.default
    def fail():
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(sys, "argv", ["swarm-peer"])
    with pytest.raises(BrokenPipeError):
        swarm_peer.cli.run_app(app)()


def test_a_terminal_that_lacks_letters_gets_escapes(monkeypatch):
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", stdout)
    app = swarm_peer.cli.make_app("swarm-peer", "")
    app.default(lambda: print("caf\xe9 \u6f22"))
    monkeypatch.setattr(sys, "argv", ["swarm-peer"])
    swarm_peer.cli.run_app(app)()
    stdout.flush()
    assert stdout.buffer.getvalue() == b"caf\xe9 \\u6f22\n"


@pytest.mark.parametrize("length", [73, 74])
def test_a_folder_for_temporary_files_has_a_path_that_sockets_can_have(length, run, monkeypatch):
    folder = "/" + "x" * (length - 1)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: folder)
    code, _, err = run("swarm-peer", "--version")
    assert code == (0 if length == 73 else 2)
    if length == 74:
        said = "the path of the folder for temporary files has 74 bytes, and sockets in it can have 73: name a folder"
        assert err == f"swarm-peer: {said} with a shorter one in TMPDIR ({folder})\n"


@pytest.mark.parametrize("name", ["TMPDIR", "TEMPDIR"])
def test_a_folder_for_temporary_files_that_is_not_there_is_named(name, run, monkeypatch):
    monkeypatch.setenv(name, "/nowhere")
    code, _, err = run("swarm-peer", "--version")
    assert (code, err) == (
        2,
        f"swarm-peer: {name} names /nowhere, which is no folder that can be written to: correct or unset it\n",
    )


def test_a_machine_without_a_folder_for_temporary_files_says_so(run, monkeypatch):
    def nowhere():
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    code, _, err = run("swarm-coordinator", "status")
    assert (code, err.count("\n")) == (2, 1)
    assert "No usable temporary directory found in ['/tmp']: name a folder that can be written to in TMPDIR" in err


def test_what_a_model_writes_commands_no_terminal(run, monkeypatch):
    pieces = ["def\tadd(a, b):\r\n", "\x1b[2J\x07", "\x9b31m\u00e9\x00"]

    def sample_run(addresses, run_id, prompt, sampling, write, *folders):
        for piece in pieces:
            write(piece)

    monkeypatch.setattr(queries, "sample_run", sample_run)
    monkeypatch.setattr(found_runs, "addresses_of_run", lambda run, initial_peers: ())
    code, out, _ = run("swarm-coordinator", "sample", "--prompt", "def", "--initial-peers", ADDRESS)
    assert (code, out) == (0, "def\tadd(a, b):\n[2J31m\u00e9\n")


def test_a_command_stands_beside_what_a_program_does_without_one(monkeypatch, capsys):
    called = []
    app = swarm_peer.cli.make_app("swarm-peer", "")

    @app.default
    def join(*, names: Annotated[tuple[str, ...], Parameter(consume_multiple=1, negative="")]):
        called.append(("join", names))

    def look_around(name: str = "", /):
        """Look around."""
        called.append(("look-around", name))

    swarm_peer.cli.add_commands(app, {look_around: "swarm-peer look-around\nswarm-peer look-around anna"})
    for words in (["look-around"], ["look-around", "anna"], ["--names", "anna", "look-around"]):
        monkeypatch.setattr(sys, "argv", ["swarm-peer", *words])
        swarm_peer.cli.run_app(app)()
    assert called == [("look-around", ""), ("look-around", "anna"), ("join", ("anna", "look-around"))]
    monkeypatch.setattr(sys, "argv", ["swarm-peer", "look-around", "--help"])
    swarm_peer.cli.run_app(app)()
    assert "\nswarm-peer look-around\nswarm-peer look-around anna\n" in capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_reads_as_one_types(command, run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run(*command, "--help")
    assert code == 0
    assert "()" not in out
    assert "',)" not in out
    assert not re.search(r"default: (None|False|inf|)\]", out)
    # A parameter that is named in capitals beside its option reads as if it were positional.
    assert not re.search(r"[A-Z]+ --", out)
    example = out.partition("\nExample")[2] or out.partition("\nMore")[2]
    assert re.search(rf"\n *{' '.join(command)}", example)
    assert all(len(line) < 80 for line in example.splitlines()), "it can be copied"
    for line, following in pairwise(out.partition("╭")[0].splitlines()):
        assert not (line and following) or len(f"{line.rstrip()} {following.split()[0]}") > 79, "lines are filled"


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_each_program_and_command_has_its_version(command, run):
    program = command[0]
    assert run(*command, "--version") == (0, f"{program} {swarm_peer.__version__}\n", "")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("", "--initial-peers is missing (addresses of any peers of the run, as the coordinator prints them"),
        ("--initial-peers", "--initial-peers needs a value; see swarm-peer --help"),
        ("--initial-peers ADDRESS --metrics-port 99999", "--metrics-port: Input should be less than or equal to 65535"),
        ("--initial-peers ADDRESS --metrics-port", "--metrics-port needs a value"),
        (
            "--initial-peers ADDRESS --metrics-host 0.0.0.0",
            "--metrics-host 0.0.0.0: no metrics are served without --metrics-port: name a port",
        ),
        ("--initial-peers ADDRESS --max-memory lots", "--max-memory: expected a size such as 8GiB (got 'lots')"),
        (
            "--initial-peers ADDRESS --data-dir /nowhere",
            "--data-dir: there is no folder /nowhere: correct the path, or",
        ),
        ("--initial-peers ADDRESS --stage first", "--stage: expected a number or auto, got 'first'"),
        ("--initial-peers ADDRESS --host-maddrs", "--host-maddrs needs a value"),
        ("--initial-peers ADDRESS --announce-maddrs 1.2.3.4:0", "--announce-maddrs 1.2.3.4:0: nobody can dial port 0"),
        ("--initial-peers 1.2.3.4:5", "'1.2.3.4:5' does not say who listens there"),
        ("--initial-peers ADDRESS --sped 3", "Unknown option: --sped"),
    ],
)
def test_mistakes_of_a_peer(words, line, run, monkeypatch):
    monkeypatch.setitem(sys.modules, "swarm_peer.runtime.startup", None)  # found out before what takes seconds
    code, out, err = run("swarm-peer", *words.replace("ADDRESS", ADDRESS).split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"swarm-peer: {line}")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "serve",
            "CONFIG is missing (the run's YAML file, or a run that comes with Swarm, such as demo); see swarm-coo",
        ),
        (
            "serve dmo",
            "dmo: no such file, and none of that name comes with Swarm (demo, gpt2-124m, llama, llama-70b-qlo",
        ),
        ("serve demo --metrics-port 99999", 'Invalid value "99999" for --metrics-port. Must be <= 65535'),
        ("serve demo --initial-peers", "--initial-peers needs a value"),
        ("serve demo --initial-peers 1.2.3.4:5", "'1.2.3.4:5' does not say who listens there"),
        ("serve demo --host-maddrs localhost", "'localhost' is no address"),
        ("serve demo --announce-maddrs a.example.org:0", "--announce-maddrs a.example.org:0: nobody can dial port 0"),
        (
            "serve demo --set training.step=5",
            "demo: training.step: unknown key: remove it or correct its spelling (ste",
        ),
        ("serve demo --min-replicas 0", 'Invalid value "0" for --min-replicas. Must be > 0'),
        (
            "serve demo --no-rebalance --min-replicas 3",
            "--min-replicas 3 is for moves, and --no-rebalance allows none: leave one out",
        ),
        (
            "serve demo --metrics-host 10.0.0.5",
            "--metrics-host 10.0.0.5: no metrics are served without --metrics-port: name a port",
        ),
        ("local demo --steps 1.5", "Invalid value for --steps: '1.5' is no whole number"),
        (
            "baseline demo --output /dev/null/x",
            "--output /dev/null/x: cannot write there (Not a directory); name another",
        ),
        (
            "simulate --stages 2 --trace /nowhere",
            "--trace: cannot read /nowhere: No such file or directory; check the p",
        ),
        (
            "simulate --stages 2 --peers 4 --hours 1 --figure /nowhere/x.png",
            "--figure /nowhere/x.png: cannot write there (No such file or directory)",
        ),
        ("local demo --steps 0.0015K", "Invalid value for --steps: '0.0015K' is no whole number"),
        ("local demo --steps B", "Invalid value for --steps: 'B' is no whole number"),
        ("local demo --peers one", "--peers one: expected a number for each stage, such as 2,2"),
        ("status --initial-peers 1.2.3.4:5", "'1.2.3.4:5' does not say who listens there"),
        (
            "dashboard runs/x --initial-peers 1.2.3.4:5/12D3KooWRndVhVZPCiQwHBBBdg769GyrPUW13zxwqQyf9r3ANaba",
            "runs/x and --initial-peers: both name a run; leave one of them out",
        ),
        ("end", "name the folder of the run to end, such as runs/demo, or its key with --identity-path"),
        ("end /nowhere", "there is no folder /nowhere: name that of a run"),
        ("end /usr", "/usr/identity is not there: only the run's key allows this"),
        ("end /usr --identity-path /nowhere", "/nowhere is not there: only the run's key allows this"),
        ("report /nowhere", "there is no folder /nowhere: name that of a run"),
        ("invite x --label a --at-once 0", 'Invalid value "0" for --at-once. Must be > 0'),
        ("invite x --label a --at-once 1048576", 'Invalid value "1048576" for --at-once. Must be <= 1048575'),
        ("sample", "--prompt is missing: give the text to continue, or --chat to talk with the model"),
        ("sample --prompt a --seed 18446744073709551616", 'Invalid value "18446744073709551616" for --seed.'),
        (
            "plan demo --peers volunters",
            "--peers: volunters: no such file, and none of that name comes with Swarm (six-24gb, spot-",
        ),
        ("statsu", 'Unknown command "statsu". Did you mean "status"?; see swarm-coordinator --help\n'),
    ],
)
def test_mistakes_of_a_coordinator(words, line, run):
    code, out, err = run("swarm-coordinator", *words.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"swarm-coordinator: {line}")


def test_no_model_is_exported_to_where_a_run_will_save_its_own(run, tmp_path):
    (tmp_path / "run.json").write_text("{}")
    code, out, err = run("swarm-coordinator", "export", "--output", str(tmp_path / "model"))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "saves its own model there at its end; name another one" in err


def test_runs_that_come_with_swarm_have_names_in_any_folder(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_file(RUNS / "demo.yaml", RUNS).name == "demo.yaml"
    assert find_file(PEERS / "spot-t4.yaml", PEERS) == PEERS / "spot-t4.yaml"
    (tmp_path / "demo").mkdir()  # a folder of the user's is no run
    code, out, _ = run("swarm-coordinator", "plan", "demo", "--peers", "volunteers", "--tokens", "3e9", "--json")
    assert (code, '"tokens": 3000000000,' in out) == (0, True)
    assert load_peers(tmp_path.joinpath("volunteers").relative_to(tmp_path), "bf16")


@pytest.mark.parametrize(
    ("text", "number"),
    [("300", 300), ("3e11", 3 * 10**11), ("300B", 3 * 10**11), ("1.1T", 11 * 10**11), ("1.5K", 1500)],
)
def test_large_numbers_are_written_as_people_do(text, number):
    app = swarm_peer.cli.make_app("swarm-coordinator", "")
    given = []

    @app.default
    def take(*, tokens: Count):
        given.append(tokens)

    app(["--tokens", text], exit_on_error=False, print_error=False, result_action="return_value")
    assert given == [number]


def test_a_file_comes_before_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "demo"
    path.write_text("mine")
    assert find_file(path.relative_to(tmp_path), RUNS).read_text() == "mine"
    with pytest.raises(UserError, match=r"no such file.*did you mean llama\?$"):
        find_file(path.with_name("lama"), RUNS)


def test_a_short_run_warms_up_for_as_long_as_it_lasts(caplog):
    from coordinator.commands.shared_options import load_and_resolve

    manifest = load_and_resolve(RUNS / "demo.yaml", (), None, steps=5).manifest
    assert (manifest.training.steps, manifest.schedule.warmup_steps) == (5, 5)
    assert [record.getMessage() for record in caplog.records] == [
        "warmup_shortened from=20 to=5 reason=the run ends with --steps"
    ]
    caplog.clear()
    manifest = load_and_resolve(RUNS / "demo.yaml", (), None, steps=50).manifest
    assert (manifest.training.steps, manifest.schedule.warmup_steps, caplog.records) == (50, 20, [])


def test_invites_are_made_listed_and_revoked_with_a_key_that_is_elsewhere(run, tmp_path):
    key, folder = tmp_path / "key", tmp_path / "run"
    run_id = Identity.load_or_create(key).peer_id
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"run_id": run_id}))
    (folder / "coordinator").write_text(f"/ip4/127.0.0.1/tcp/1/p2p/{run_id}\n")
    code, _, said = run("swarm-coordinator", "invite", str(folder), "--label", "alice")
    assert (code, "identity is not there: only the run's key allows this" in said) == (2, True)
    named = (str(folder), "--identity-path", str(key))
    code, made, _ = run("swarm-coordinator", "invite", *named, "--label", "alice")
    assert code == 0
    assert Invite.parse(made.split()[-1]).run_id == run_id
    assert run("swarm-coordinator", "revoke", "alice", *named)[0] == 0
    code, listed, _ = run("swarm-coordinator", "invites", *named, "--json")
    assert [(each["label"], each["state"]) for each in json.loads(listed)] == [("alice", "revoked")]


def test_a_key_ends_no_other_run(run, tmp_path):
    key = tmp_path / "key"
    Identity.generate().save(key)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.json").write_text('{"run_id": "12D3KooWrun"}')
    code, _, said = run("swarm-coordinator", "end", str(folder), "--identity-path", str(key))
    assert code == 2
    assert f"{key} is not the key of the run in {folder}: name the folder of its own run, or the right key" in said
    (folder / "run.json").unlink()
    code, _, said = run("swarm-coordinator", "end", str(folder), "--identity-path", str(key))
    assert "no addresses of a run are kept there" in said


def test_what_goes_to_a_file_is_not_wrapped(monkeypatch, capsys):
    from coordinator.commands.console import open_console

    monkeypatch.delenv("COLUMNS", raising=False)
    words = "word " * 30 + "end"
    open_console().print(words)
    assert capsys.readouterr().out == f"{words}\n"
    monkeypatch.setenv("COLUMNS", "60")
    open_console().print(words)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 60, "as it is asked for"
