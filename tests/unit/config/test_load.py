"""Config machinery: sections, loading, overrides, error messages and dumping."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, model_validator

from config.base import ConfigPath, Fraction, NonEmptyStr, PositiveFloat, PositiveInt, Probability, Section, TupleOf
from config.dump import list_differences, to_toml
from config.load import ConfigError, find_key_lines, json_schema, load_config


class Source(Section):
    name: NonEmptyStr
    weight: PositiveFloat = 1.0
    tags: TupleOf[str] = ()


class Data(Section):
    path: ConfigPath
    """Where the tokens are."""
    mixture: TupleOf[Source] = ()
    cache: ConfigPath | None = None
    held_out: Fraction = 0.1
    limits: dict[str, int] = Field(default_factory=dict)


class Adam(Section):
    kind: Literal["adam"] = "adam"
    betas: TupleOf[float] = (0.9, 0.95)
    rate: PositiveFloat = 1e-3


class Sgd(Section):
    kind: Literal["sgd"] = "sgd"
    momentum: Probability = 0.5


class Training(Section):
    max_steps: PositiveInt = 10
    seed: int | None = None
    batch: Literal["auto"] | PositiveInt = "auto"
    gates: int | TupleOf[int] = 1
    label: int | str = 0
    optimizer: Annotated[Adam | Sgd, Field(discriminator="kind")] = Adam()
    compile: bool = False
    mode: Literal["full", "half"] = "full"
    cache: Literal["none", "block"] | None = None

    @model_validator(mode="after")
    def _check(self) -> Training:
        if self.compile and self.mode == "half":
            raise ValueError('compile needs mode = "full"')
        return self


class Run(Section):
    data: Data
    training: Training = Training()
    stages: TupleOf[Source] = (Source(name="one"), Source(name="two"))
    title: str = "run"


DATA = '[data]\npath = "tokens"\n'
OPTIMIZER = DATA + "[training.optimizer]\n"


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Load a text as `run.toml`."""
    monkeypatch.chdir(tmp_path)

    def load_text(text: str | bytes, *overrides: str, **options: Any) -> Run:
        Path("run.toml").write_bytes(text.encode() if isinstance(text, str) else text)
        return load_config(Run, Path("run.toml"), overrides, **options)

    return load_text


@pytest.fixture
def problems(load: Any) -> Any:
    """The lines of the error that a text gives, without the header."""

    def lines(text: str, *overrides: str, **options: Any) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            load(text, *overrides, **options)
        header, *rest = str(caught.value).split("\n")
        count = "1 problem" if len(rest) == 1 else f"{len(rest)} problems"
        assert header == f"run.toml is not a valid Run: {count}"
        return rest

    return lines


class TestSection:
    def test_optional_field_must_default_to_none(self) -> None:
        with pytest.raises(TypeError, match=r"Bad\.size may be None, so None must be its default"):

            class Bad(Section):
                size: int | None = 3

    def test_docstrings_are_descriptions(self) -> None:
        schema = json.loads(json_schema(Run))
        assert schema["$defs"]["Data"]["properties"]["path"]["description"] == "Where the tokens are."
        assert schema["additionalProperties"] is False


class TestFile:
    def test_byte_order_mark_and_windows_lines(self, load: Any) -> None:
        assert load(b'\xef\xbb\xbf[data]\r\npath = "x"\r\n').data.path == Path("x")

    def test_without_a_file(self) -> None:
        assert load_config(Run, None, ["data.path=x"]).data.path == Path("x")
        with pytest.raises(ConfigError) as caught:
            load_config(Run, None, ["data.cache=x"])
        assert str(caught.value).split("\n") == [
            "the configuration is not a valid Run: 1 problem",
            "--set data.cache=x: data.path: missing (add --set data.path=...: a path)",
        ]

    @pytest.mark.parametrize(("name", "why"), [("no.toml", "No such file"), (".", "Is a directory")])
    def test_missing_file_and_directory(self, tmp_path: Path, name: str, why: str) -> None:
        with pytest.raises(ConfigError, match=why):
            load_config(Run, tmp_path / name)

    def test_bad_utf8(self, load: Any) -> None:
        with pytest.raises(ConfigError, match=r"^run\.toml: is not UTF-8 .*save it as UTF-8"):
            load(b"x=1\n#\xff")

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("a = 1\nb = x\n", "run.toml:2: not valid TOML: Invalid value (at line 2, column 5): b = x"),
            ("a = ", "run.toml: not valid TOML: Invalid value (at end of document)"),
        ],
    )
    def test_syntax_error(self, load: Any, text: str, message: str) -> None:
        with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
            load(text)


class TestOverrides:
    @pytest.mark.parametrize(
        ("override", "value"),
        [
            ("data.path=5", Path("5")),
            ("data.path='a b'", Path("a b")),
            ("data.held_out=.25", 0.25),
            ("data.cache=none", None),
            ("data.limits.a=3", {"a": 3}),
            ("title=1e5", "1e5"),
            ("title=", ""),
            ("title=[1]", "[1]"),
            ("training.gates=[4, 5]", (4, 5)),
            ("training.mode=half", "half"),
            ("training.cache=none", "none"),
            ("training.optimizer.betas=1,2.5", (1.0, 2.5)),
        ],
    )
    def test_value_is_typed_by_the_schema(self, load: Any, override: str, value: object) -> None:
        node: Any = load(DATA + 'cache = "c"\n', override)
        for part in override.partition("=")[0].split("."):
            if not part.isdecimal() and not isinstance(node, dict) and part != "a":
                node = getattr(node, part)
        assert node == value
        assert type(node) is type(value) or isinstance(node, Path)

    @pytest.mark.parametrize("text", ["1,a b", '["1", "a b"]', "[1, a b]", '"1","a b"'])
    def test_array_of_strings(self, load: Any, text: str) -> None:
        config = load(DATA + '[[data.mixture]]\nname="a"\n', f"data.mixture.0.tags={text}")
        assert config.data.mixture[0].tags == ("1", "a b")

    def test_entries_of_an_array_of_tables(self, load: Any) -> None:
        config = load(
            DATA + '[[data.mixture]]\nname = "a"\n',
            "data.mixture.0.weight=2",
            "data.mixture.1.name=2",
            "stages.0.name=b",
        )
        assert config.data.mixture == (Source(name="a", weight=2.0), Source(name="2"))
        assert config.stages == (Source(name="b"),)

    def test_whole_section_and_last_one_wins(self, load: Any) -> None:
        config = load(DATA, 'training={max_steps = 3, mode = "half"}', "training.max_steps=4", "training.max_steps=5")
        assert (config.training.max_steps, config.training.mode) == (5, "half")

    def test_union_member_chosen_by_override_file_and_default(self, load: Any) -> None:
        text = DATA + '[training.optimizer]\nkind = "sgd"\n'
        assert load(text, "training.optimizer.momentum=1").training.optimizer == Sgd(momentum=1.0)
        later = load(DATA, "training.optimizer.momentum=1", "training.optimizer.kind=sgd")
        assert later.training.optimizer == Sgd(momentum=1.0)
        assert load(DATA, "training.optimizer.rate=1").training.optimizer == Adam(rate=1.0)

    def test_errors_name_the_override(self, problems: Any) -> None:
        overrides = {
            "foo": "expected section.key=value",
            "a b=3": "expected section.key=value",
            "#a=3": "expected section.key=value",
            "training.batch.x=3": "training.batch is the integer -4 and has no keys",
            "data.mixture.x.name=3": "data.mixture has no entries in the file, the next one is data.mixture.0",
            "training.optimizer.betas.1=0.5": "training.optimizer.betas is not in the file: set the whole array",
            "data.held_out=inf": "must be a finite number",
            "training.seed=abc": 'expected an integer, got the string "abc"',
            "training.compile=True": 'expected true or false, got the string "True" (write true without quotes)',
            "training.max_steps=5.0": "expected an integer, got the number 5.0 (write 5)",
            "training.mode=5": 'expected "full" or "half", got the integer 5',
            "training.optimizer.momentum=2": 'unknown key (momentum needs kind = "sgd")',
            "trainin.max_steps=3": "[trainin]: unknown section (did you mean training?)",
            "training.step=3": "unknown key (did you mean max_steps?)",
        }
        messages = problems(DATA + "[training]\nbatch = -4\n", *overrides)
        assert messages[0] == "run.toml:4: training.batch = -4: must be greater than 0"
        assert sorted(messages[1:]) == sorted(f"--set {text}: {message}" for text, message in overrides.items())

    def test_override_replaces_the_line_of_the_file(self, problems: Any) -> None:
        text = DATA + '[[data.mixture]]\nname = "a"\nweight = 1\n'
        assert problems(text, 'data.mixture=[{name = "b", weight = -1}]') == [
            '--set data.mixture=[{name = "b", weight = -1}]: data.mixture.0.weight = -1: must be greater than 0'
        ]


class TestMessages:
    def test_all_problems_at_once_in_the_order_of_the_file(self, problems: Any) -> None:
        text = """max_steps = 3
[data]
pth = "x"
[[data.mixture]]
name = ""
weight = -1
[[data.mixture]]
weigth = 3

[training]
max_steps = "5"
batch = "atuo"
mode = "haf"
held_out = 3
gates = [1, "2"]
label = 1.5
seed = [1]
[training.optimizer]
momentum = 3
[trainig]
x = 1
[optimizer]
rate = 3
"""
        expected = """run.toml:1: max_steps = 3: unknown key (max_steps belongs in [training])
run.toml:2: data.path: missing (add path = ... to [data]: a path)
run.toml:3: data.pth = "x": unknown key (did you mean path?)
run.toml:5: data.mixture.0.name = "": must not be empty
run.toml:6: data.mixture.0.weight = -1: must be greater than 0
run.toml:7: data.mixture.1.name: missing (add name = ... to entry 1 of [[data.mixture]]: a string)
run.toml:8: data.mixture.1.weigth = 3: unknown key (did you mean weight?)
run.toml:11: training.max_steps = "5": expected an integer, got the string "5" (write 5 without quotes)
run.toml:12: training.batch = "atuo": expected "auto" or an integer, got the string "atuo" (did you mean auto?)
run.toml:13: training.mode = "haf": expected "full" or "half", got the string "haf" (did you mean half?)
run.toml:14: training.held_out = 3: unknown key (held_out belongs in [data])
run.toml:15: training.gates.1 = "2": expected an integer, got the string "2" (write 2 without quotes)
run.toml:16: training.label = 1.5: expected an integer or a string, got the number 1.5 (write "1.5" with quotes)
run.toml:17: training.seed = [1]: expected an integer, got an array
run.toml:19: training.optimizer.momentum = 3: unknown key (momentum needs kind = "sgd")
run.toml:20: [trainig]: unknown section (did you mean training?)
run.toml:22: [optimizer]: unknown section (did you mean [training.optimizer]?)"""
        assert problems(text) == expected.splitlines()

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("", "run.toml: [data]: missing section (add [data] with path)"),
            ("data = 3", "run.toml:1: data = 3: expected a table, got the integer 3"),
            (
                DATA + "[data.mixture]\nname = 'x'",
                "run.toml:3: [data.mixture]: expected an array of tables, got a table (put it in [ ])",
            ),
            (
                OPTIMIZER + "betas = 1",
                "run.toml:4: training.optimizer.betas = 1: expected an array of numbers, got the integer 1 (write [1])",
            ),
            (
                OPTIMIZER + "kind = 'adm'",
                (
                    'run.toml:4: training.optimizer.kind = "adm": expected "adam" or "sgd", got the string "adm"'
                    " (did you mean adam?)"
                ),
            ),
            (DATA + "[training]\ncompile = true\nmode = 'half'", 'run.toml:3: [training]: compile needs mode = "full"'),
            (
                DATA + "zzz = 1",
                "run.toml:3: data.zzz = 1: unknown key (known keys: path, mixture, cache, held_out, limits)",
            ),
        ],
    )
    def test_one_problem(self, problems: Any, text: str, problem: str) -> None:
        assert problems(text) == [problem]

    def test_optional_union_of_sections(self, tmp_path: Path) -> None:
        class Holder(Section):
            optimizers: TupleOf[Annotated[Adam | Sgd, Field(discriminator="kind")]] = ()
            other: Annotated[Adam | Sgd, Field(discriminator="kind")] | None = None

        path = tmp_path / "a.toml"
        path.write_text('[other]\nkind = "sgd"\nmomentum = 2\n[[optimizers]]\nkind = "adam"\nbetas = ["x"]\n')
        with pytest.raises(ConfigError) as caught:
            load_config(Holder, path)
        assert [line.partition("a.toml:")[2] for line in str(caught.value).split("\n")[1:]] == [
            "3: other.momentum = 2: must be at most 1",
            '6: optimizers.0.betas.0 = "x": expected a number, got the string "x"',
        ]


def test_key_lines() -> None:
    text = """# a = 1
top = [ # [no]
  1, 2,
]
text = '''
[no]
no = 1
'''
more = \"\"\"
no = \\"\"\" [
\"\"\"
[a.b] # comment
"x.y".z = "= [" # [
c = { d = 1 }
[[a.e]]
k = 1
[[a.e.f]]
m = 1
[[a.e]]
[a.e.g]
k = 2
[a]
last = 1"""
    tomllib.loads(text)
    lines = {".".join(map(str, key)): line for key, line in find_key_lines(text).items()}
    assert lines == {"top": 2, "text": 5, "more": 9, "a": 22, "a.last": 23} | {
        f"a.{key}": line
        for key, line in {
            "b": 12,
            "b.x.y": 13,
            "b.x.y.z": 13,
            "b.c": 14,
            "b.c.d": 14,
            "e": 15,
            "e.0": 15,
            "e.0.k": 16,
        }.items()
    } | {"a.e.0.f": 17, "a.e.0.f.0": 17, "a.e.0.f.0.m": 18, "a.e.1": 19, "a.e.1.g": 20, "a.e.1.g.k": 21}


class TestDump:
    def test_round_trip(self, load: Any) -> None:
        config = Run(
            data=Data(
                path=Path("a/ü"),
                mixture=(Source(name="p", weight=0.1 + 0.2, tags=("x", 'q"\n\\')), Source(name="q", weight=1e-30)),
                limits={"a b": 1, "c": 2},
            ),
            training=Training(batch=3, gates=(1,), label="l", optimizer=Sgd(momentum=1 / 3), seed=2**70),
            stages=(),
        )
        text = to_toml(config)
        assert load(text) == config
        assert "cache" not in text

    def test_differences(self) -> None:
        old = Run(data=Data(path=Path("x"), mixture=(Source(name="a"),)))
        new = Run(
            data=Data(path=Path("x"), mixture=(Source(name="a", weight=2.0), Source(name="b")), cache=Path("c")),
            training=Training(optimizer=Sgd(), gates=(1, 2)),
        )
        assert list_differences(old, old) == []
        assert list_differences(old, new) == [
            "data.mixture.0.weight: 1.0 -> 2.0",
            "training.gates: 1 -> [1, 2]",
            'training.optimizer.kind: "adam" -> "sgd"',
            "training.optimizer.betas: [0.9, 0.95] -> (not set)",
            "training.optimizer.rate: 0.001 -> (not set)",
            'data.mixture.1.name: (not set) -> "b"',
            "data.mixture.1.weight: (not set) -> 1.0",
            "data.mixture.1.tags: (not set) -> []",
            'data.cache: (not set) -> "c"',
            "training.optimizer.momentum: (not set) -> 0.5",
        ]
