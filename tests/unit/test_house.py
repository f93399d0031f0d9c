"""tools/house.py: each of its rules finds what breaks it, and leaves alone what does not."""

import json

import house
import pytest

STRICT = {"strict": True, "files": ["pkg/policy", "pkg/config.py"]}


def rules_of(source):
    return [finding.rule for finding in house.read_module("pkg/module.py", source).findings]


def function(lines):
    return "def _f():\n" + "    pass\n" * (lines - 1)


def parameters(number):
    return ", ".join(f"p{i}" for i in range(number))


def method(text, of="class _C:"):
    return f"{of}\n    {text}"


def constructor(text):
    return method(f"def __init__(self, {text}): ...")


def dataclass(fields, decorator="@dataclass(frozen=True)", more=""):
    return f"{decorator}\nclass _D:\n" + "".join(f"    f{i}: int\n" for i in range(fields)) + more


def heir(field):
    return f"{dataclass(8)}@dataclass\nclass _E(_D):\n    {field}: int\n"


def documented(text):
    return f'def _f():\n    """{text}"""'


KNOWN = "class C:\n    'A thing.'"
NOT_GIVEN = "    g: ClassVar[int] = 0\n    h: int = field(init=False)\n"


@pytest.mark.parametrize(
    ("rule", "found", "left_alone"),
    [
        ("file-lines", "x = 1\n" * 501, "x = 1\n" * 500),
        ("function-lines", function(61), function(60)),
        ("function-lines", "async " + function(61), "@d\n" * 9 + function(60)),
        ("constructor", constructor(parameters(9)), constructor(parameters(8))),
        ("constructor", constructor(f"*, {parameters(8)}, **more"), constructor(f"{parameters(7)}, *more")),
        ("constructor", dataclass(9), dataclass(8)),
        ("constructor", dataclass(9, "@dataclasses.dataclass"), dataclass(9, "@dataclass(init=False)")),
        ("constructor", dataclass(8, more="    g: int = 0\n"), dataclass(8, more=NOT_GIVEN)),
        (
            "constructor",
            dataclass(9, "@dataclass(kw_only=True)"),
            dataclass(9, "@dataclass(frozen=True, kw_only=True)"),
        ),
        ("constructor", heir("one_more"), heir("f0")),
        ("parameters", f"def _f({parameters(9)}): ...", f"def _f({parameters(8)}): ..."),
        ("parameters", method(f"def f(self, {parameters(9)}): ..."), method(f"def f(self, {parameters(8)}): ...")),
        ("fmt-skip", "x = [1,2]  # fmt: skip\n", "x = '# fmt: skip'\n"),
        ("fmt-skip", "# fmt: off\n", "# Formats: skip\n"),
        ("docstring", "def f(): ...", "def f():\n    'Do it.'"),
        ("docstring", "async def f(): ...", "async def _f(): ..."),
        ("docstring", "class C:\n    x = 1", KNOWN),
        ("docstring", method("@property\n    def p(self): ...", KNOWN), method("@property\n    def p(self): ...")),
        ("docstring", method("def f(self): ...", KNOWN), method("def __len__(self): ...", KNOWN)),
        ("docstring", method("def f(self): ...", KNOWN), method("@typing.override\n    def f(self): ...", KNOWN)),
        (
            "summary",
            documented("Args:\n        x: a number\n    "),
            documented("Do.\n\n    Args:\n        x: it\n    "),
        ),
        ("summary", documented("\n    Do it.\n    "), documented("Do it.")),
        ("summary", documented("Raises UserError: no such file."), documented("Returns the number of files.")),
    ],
)
def test_a_rule_finds_what_breaks_it_and_nothing_else(rule, found, left_alone):
    assert rules_of(found) == [rule]
    assert rules_of(left_alone) == []


@pytest.mark.parametrize(
    "text",
    [
        "Who has left is forgotten.",
        "A lease ends. Who held it reads no further.",
        "A lease ends.\n\nWhat was read stays counted.",
        "Peers:\n* Whoever joins is told.",
        "What a peer announces.",
        "Whom to wait for before a stage is started over.",
        "Whose leases are respected.",
        "So whoever asks is told.",
        "Launch nothing more; what is in flight is finished.",
        "Dropped after an hour: whoever was downloading it is gone.",
        "The numbers are computed by who calls.",
        "Two states: one, and a newer one for who cannot wait.",
    ],
)
def test_a_sentence_without_an_actor_is_found_in_docstrings_and_comments(text):
    assert rules_of(f"'''{text}'''\n") == ["actor"]
    assert rules_of("x = 1\n" + "".join(f"# {line}\n" for line in text.split("\n"))) == ["actor"]


@pytest.mark.parametrize(
    "text",
    [
        "What may a peer read? Nothing else.",
        "Whatever the service answers, the peer goes on.",
        "The peer that has left is forgotten, and so is what it knew.",
        "The view tells who serves which stage.",
        "Gossip: who comes and goes.",
        "limit: what keeps them from more",
        "Take a peer's word for who leases a slice.",
        "All who see the same view choose the same peer.",
        'A log line that says "Gone. Who has left is forgotten."',
        "`What` is a name.",
        "Whether a peer is alive.",
    ],
)
def test_a_sentence_with_an_actor_is_left_alone(text):
    assert rules_of(f"'''{text}'''\n# {text}\n") == []


def test_strings_that_the_program_uses_are_not_read_as_prose():
    assert rules_of("x = 'What limits it: nothing.'\n") == []


def test_a_sentence_counts_once_and_names_the_line_that_it_begins_in():
    source = "x = 1\n'''A call.\n\nIt ends. What is left of it is\ndropped; what was sent is not.'''\n"
    (finding,) = house.read_module("m.py", source).findings
    assert finding.line == 4
    assert finding.text.endswith("What is left of it is dropped; what was sent is not.")


def test_comments_below_each_other_are_one_text_and_comments_beside_code_are_not():
    assert rules_of("# A lease ends for\n# What is a name here.\n") == []
    assert rules_of("x = 1  # a lease ends for\n# What is left is read again.\n") == ["actor"]


def test_lines_of_code_have_more_than_a_comment_or_a_docstring():
    source = '''"""A module.

Of three lines."""

# a comment
x = 1  # one

y = """a string

of two lines that are not blank"""


class C:
    """A thing."""

    z: int
    """Says what z is."""
'''
    assert house.read_module("m.py", source).code_lines == 5


def test_a_file_is_strict_if_mypy_lists_it_and_nothing_takes_it_out():
    assert house.is_strict("pkg/policy/deep/a.py", STRICT)
    assert house.is_strict("pkg/config.py", STRICT)
    assert house.is_strict("pkg/a.py", {"strict": True, "files": "other, pkg/"})
    assert house.is_strict("pkg/a.py", {"strict": True, "files": ["."]})
    assert not house.is_strict("pkg/policy_of_others.py", STRICT)
    assert not house.is_strict("pkg/policy/a.py", {"files": ["pkg"]})
    assert not house.is_strict("pkg/policy/a.py", {**STRICT, "exclude": "policy/a"})
    relaxed = [{"module": "pkg.policy.*", "ignore_errors": True}]
    assert not house.is_strict("pkg/policy/a.py", {**STRICT, "overrides": relaxed})
    assert not house.is_strict("pkg/config.py", {**STRICT, "overrides": [{"module": ["pkg.config"], "strict": False}]})
    assert house.is_strict("pkg/config.py", {**STRICT, "overrides": relaxed})


def checkout(root, files):
    for name, source in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)


def test_a_package_counts_its_own_files_and_the_totals_all_of_them(tmp_path):
    checkout(
        tmp_path,
        {
            "swarm_peer/a.py": "x = 1\n",
            "swarm_peer/policy/b.py": "def f(): ...\n",
            "swarm_peer/model/families/llama.py": "x = 1\nfor y in ():  # fmt: skip\n    pass\n",
            "coordinator/c.py": "x = 1\n",
            "benchmarks/d.py": "x = 1\n",
        },
    )
    modules = house.read_checkout(tmp_path, [*house.FOLDERS, "no_such_folder"])
    rows = house.table(modules, {"strict": True, "files": ["swarm_peer/policy"]})
    assert [(row["package"], row["files"], row["code"], row["untyped"]) for row in rows] == [
        ("benchmarks", 1, 1, 1),
        ("coordinator", 1, 1, 1),
        ("swarm_peer", 1, 1, 1),
        ("swarm_peer/model/families", 1, 3, 3),
        ("swarm_peer/policy", 1, 1, 0),
        ("swarm_peer + coordinator", 4, 6, 5),
        ("swarm_peer + coordinator - families", 3, 3, 2),
    ]
    assert [row["fmt-skip"] for row in rows] == [0, 0, 0, 1, 0, 1, 0]
    assert [row["docstring"] for row in rows] == [0, 0, 0, 0, 1, 1, 1]
    assert (rows[5]["longest"], rows[5]["longest file"]) == (3, "swarm_peer/model/families/llama.py")
    house.print_table(json.loads(json.dumps(rows)))


def test_the_check_names_each_place_and_fails_if_there_is_one(tmp_path, capsys):
    checkout(tmp_path, {"good/a.py": f"def _f({parameters(9)}): ...\n", "bad/b.py": "x = 1\n\ndef f(): ...\n"})
    assert house.main(["--root", str(tmp_path), "--check", "good"]) == 0
    assert capsys.readouterr().out == "No rule of the house is broken.\n"
    assert house.main(["--root", str(tmp_path), "--check", "good", "bad"]) == 1
    assert capsys.readouterr().out == "bad/b.py:3: f has no docstring [docstring]\n1 docstring\n"


def test_the_check_refuses_a_folder_without_code(tmp_path, capsys):
    with pytest.raises(SystemExit):
        house.main(["--root", str(tmp_path), "--check", "no_such_folder"])
    assert "no_such_folder" in capsys.readouterr().err
