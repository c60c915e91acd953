"""Rewards of right, wrong and malformed answers, and functions of users that misbehave."""

from __future__ import annotations

import itertools
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from diffusionlm.data.sources.synthetic import shidoku_grids
from diffusionlm.rl import rewards
from diffusionlm.rl.reward_process import RewardError
from diffusionlm.rl.rewards import GradedAnswer, RewardConfig, find_expression, is_sudoku

REWARD: TypeAdapter[Any] = TypeAdapter(RewardConfig)


def make(kind: str, **options: Any) -> Any:
    return REWARD.validate_python({"kind": kind, **options})


def score(reward: Any, text: str, gold: str = "", **fields: Any) -> float:
    answer = GradedAnswer(text, gold=gold, fields=fields)
    reward.check(answer)
    value: float = reward.score(answer)
    return value


@pytest.mark.parametrize(
    ("reward", "gold", "right", "wrong"),
    [
        (make("exact_match"), " a b", ["a b", "\na b "], ["a  b", "A b", "", "a b."]),
        (make("number"), "3 + 4 = 7 #### 1,018", ["\\boxed{1018}", "#### 1018.0", "it is $1,018."], ["1019", "", "x"]),
        (make("number"), "5", [r"1 \boxed{5} 2", "#### 5 and then 7"], [r"\boxed{4} 5", r"\boxed{} 5", "5 6"]),
        (make("number", extraction=["flexible"]), "5", [r"\boxed{4} 5"], ["#### 5 and then 7"]),
        (make("options"), "C", ["C", "(C).", "A? It is C", r"\boxed{\text{c}} not A"], ["c", "A", "CD", "", "C or D"]),
        (make("options"), "2", ["C"], ["2", "B"]),
        (make("options", num_options=2), "b", ["B, as C is none"], ["A", "C"]),
        (make("regex", pattern="a+b"), "", ["xaab", "ab"], ["b", ""]),
        (make("regex", pattern="a+b", match="full"), "", ["aab"], ["xaab", "ab\n"]),
    ],
)  # fmt: skip
def test_answers_are_right_or_wrong(reward: Any, gold: str, right: list[str], wrong: list[str]) -> None:
    for text in right:
        assert score(reward, text, gold) == 1.0, text
    for text in wrong:
        assert score(reward, text, gold) == 0.0, text


@pytest.mark.parametrize(
    ("reward", "fields", "message"),
    [
        (make("exact_match"), {}, "answer_field"),
        (make("number"), {"gold": "many"}, "expected a number"),
        (make("options"), {"gold": "E"}, "'E' is no option: expected a letter from A to D"),
        (make("options"), {"gold": "4"}, "num_options"),
        (make("json_schema", schema_field="schema"), {}, "has no schema"),
        (make("json_schema", schema_field="schema"), {"schema": "{"}, "Expecting"),
        (make("json_schema", json_schema={"type": "strange"}), {}, "strange"),
        (make("sudoku"), {}, "has no puzzle"),
        (make("sudoku"), {"puzzle": "12.4"}, "no grid"),
        (make("sudoku"), {"puzzle": "1234" * 4}, "blanks"),
        (make("sudoku"), {"puzzle": "15.4" * 4}, "digits up to 4"),
        (make("sudoku", partial=True), {"puzzle": "1..." * 4}, "has no solution"),
        (make("sudoku", partial=True), {"puzzle": "1..." * 4, "solution": "1234"}, "another size"),
        (make("countdown"), {"target": 3}, "has no numbers or nums"),
        (make("countdown"), {"nums": [1, 2.5], "target": 3}, "whole numbers"),
        (make("countdown"), {"nums": [1, 2], "target": "3"}, "whole numbers"),
        (make("code"), {"test": "", "entry_point": "f"}, "Set run_code = true to allow"),
        (make("code", run_code=True), {"entry_point": "f"}, "has no test"),
        (make("code", run_code=True), {"test": "def check(", "entry_point": "f"}, "its test is no valid code"),
    ],
)
def test_an_item_that_cannot_be_graded_is_refused(reward: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        score(reward, "", **fields)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "regex", "pattern": "("}, "is no regular expression"),
        ({"kind": "json_schema"}, "set one of them"),
        ({"kind": "json_schema", "json_schema": {}, "schema_field": "s"}, "set one of them"),
        ({"kind": "number", "extraction": []}, "at least 1 item"),
        ({"kind": "other"}, "does not match any of the expected tags"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        REWARD.validate_python(options)


def test_a_pattern_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewards, "MATCH_SECONDS", 0.01)
    with pytest.raises(ValueError, match=r"takes more than 0\.01 s.*avoid repetitions"):
        score(make("regex", pattern="(?:.|..|...)+(?<=z)"), "a" * 60)


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "tags": {"type": "array", "items": {"enum": ["x", "y"]}}},
    "required": ["name"],
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"name": "a"}', 1.0),
        ('{\n  "tags": ["x", "y"],\n  "name": "\\u00e9"\n}\n', 1.0),  # another order, indented
        ('Here:\n```json\n{"name": "é", "tags": []}\n```\nDone', 1.0),
        ('{"name": "a", "tags": ["z"]}', 0.0),
        ('{"tags": []}', 0.0),
        ('{"name": "a", "more": 1}', 0.0),
        ('{"name": "a"', 0.0),
        ('{"name": "\\ud800"}', 0.0),
        ("[" * 100_000, 0.0),
        ("", 0.0),
    ],
)
def test_json_of_a_schema(text: str, expected: float) -> None:
    assert score(make("json_schema", json_schema=SCHEMA), text) == expected
    for schema in (SCHEMA, json.dumps(SCHEMA)):
        assert score(make("json_schema", schema_field="schema"), text, schema=schema) == expected


NINE = "534678912672195348198342567859761423426853791713924856961537284287419635345286179"


def test_sudoku_grids() -> None:
    grids = set(shidoku_grids())
    digits = random.Random(0)
    rows = list(itertools.permutations("1234"))
    texts = ["".join(itertools.chain(*digits.choices(rows, k=4))) for _ in range(2000)]
    assert all(is_sudoku(text) == (text in grids) for text in [*grids, *texts])
    swapped = NINE[1] + NINE[0] + NINE[2:]
    assert is_sudoku(NINE) and not is_sudoku(swapped)


@pytest.mark.parametrize(
    ("text", "expected", "share"),
    [
        ("1234341221434321", 1.0, 1.0),
        ("1 2 3 4\n3 4 1 2\n2 1 4 3\n4 3 2 1", 1.0, 1.0),
        ("2 34341221434321", 1.0, 1.0),  # the 15 blanks
        ("1234 3412 4321 2143", 1.0, 7 / 15),  # another solution
        ("2134341221434321", 0.0, 14 / 15),  # changes the given
        ("134341221434321", 0.0, 0.0),
        ("234341221434325", 0.0, 14 / 15),
        ("12343412214343210", 0.0, 0.0),
        ("no", 0.0, 0.0),
    ],
)
def test_sudoku_answers(text: str, expected: float, share: float) -> None:
    fields = {"puzzle": "1_0.\n....\n....\n....", "solution": "1234341221434321"}
    if text == "134341221434321":  # 15 digits, so these are the blanks
        share = sum(a == b for a, b in zip(text, fields["solution"][1:], strict=True)) / 15
    assert score(make("sudoku"), text, **fields) == expected
    assert score(make("sudoku", partial=True), text, **fields) == pytest.approx(share)


def test_a_sudoku_of_nine() -> None:
    puzzle = "".join("." if index % 3 else digit for index, digit in enumerate(NINE))
    blanks = "".join(digit for index, digit in enumerate(NINE) if index % 3)
    assert score(make("sudoku"), blanks, puzzle=puzzle) == score(make("sudoku"), NINE, puzzle=puzzle) == 1.0
    assert score(make("sudoku"), blanks[::-1], puzzle=puzzle) == 0.0


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("(3 + 7) * 4 / 2", 1.0),
        ("4 / (2 / (3 + 7))", 1.0),
        ("3 + 7 * 4 - 2 * 2", 0.1),
        ("3 + 4 * 7 - 2", 0.1),
        ("20", 0.1),
        ("4 / (7 - 3 - 4) + 2", 0.1),  # divides by 0
        ("10 * 2", 0.1),
        ("99**87**65", 0.0),
        ("4 // 2 * (3 + 7)", 0.0),
        ("-3 + 7", 0.0),
        ("3 + 7 +", 0.0),
        ("3.0 + 7", 0.0),
        ("(3 + 7)(4)", 0.0),
        ("__import__('os')", 0.0),
        ("1" + "+1" * 200, 0.0),
        ("(" * 250 + "1", 0.0),
        ("", 0.0),
    ],
)
def test_countdown(expression: str, expected: float) -> None:
    fields: dict[str, Any] = {"nums": [2, 3, 4, 7], "target": 20}
    reward = make("countdown", format_reward=0.1)
    assert score(reward, expression, **fields) == expected
    for text in (
        f"1 + 1 <answer>\n{expression} = 20</answer> 2",
        f"<answer>x</answer> <answer>so \\boxed{{{expression}}}",
        f"1 + 2\n\\boxed{{{expression}}}\n3",
        f"First 3 + 7.\n{expression}=20\n" if expression else "\n",
    ):
        assert score(reward, text, **fields) == expected, text


def test_countdown_by_exact_fractions_and_with_some_numbers() -> None:
    assert score(make("countdown"), "8 / (3 - 8 / 3)", numbers=[3, 3, 8, 8], target=24) == 1.0
    for use_all, expected in ((True, 0.0), (False, 1.0)):
        assert score(make("countdown", use_all=use_all), "8 * 3", numbers=[3, 3, 8], target=24) == expected
        assert score(make("countdown", use_all=use_all), "8 * 3 * 1", numbers=[3, 3, 8], target=24) == 0.0
    assert find_expression("<answer></answer>") == ""


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("```python\ndef twice(x):\n    return 2 * x\n```", {}, 1.0),
        ("def twice(x):\n    return x", {}, 0.0),
        ("    return x + x\n", {"prompt_field": "prompt", "answer": "completion"}, 1.0),
    ],
)
def test_code(text: str, options: dict[str, Any], expected: float) -> None:
    fields = {"test": "def check(candidate):\n    assert candidate(4) == 8", "entry_point": "twice"}
    reward = make("code", run_code=True, **options)
    assert score(reward, text, prompt="def twice(x):\n", **fields) == expected


FUNCTIONS = """
import os, sys, time
from dataclasses import dataclass
from fractions import Fraction
print("imported")
NUM_CALLS = 0

@dataclass
class Options:  # needs its module
    low: int = 0

def reward(values):
    global NUM_CALLS
    NUM_CALLS += 1
    print("called", values)
    print("called", file=sys.stderr)
    os.write(1, b"called")
    case = values["answer"]
    if case == "sum":
        return len(values["prompt"]) + len(values["gold"]) + values["fields"]["a"]["b"]
    if case == "raise":
        raise KeyError("missing")
    if case == "exit":
        sys.exit(3)
    if case == "end":
        os._exit(4)
    if case == "hang":
        os.fork()  # this process has to end as well
        time.sleep(60)
    if case == "read":
        return float(len(sys.stdin.read()))
    if case == "steps":
        return [len(step) for step in values["steps"]]
    return {"none": None, "nan": float("nan"), "inf": -float("inf"), "text": "1.0", "true": True, "calls": NUM_CALLS,
            "dict": {}, "large": 10**400, "texts": [1.0, "2"], "one": [1.0], "half": Fraction(1, 2)}[case]
"""


@pytest.fixture(scope="module")
def function_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reward") / "reward.py"
    path.write_text(FUNCTIONS)
    return path


def call(reward: Any, text: str, steps: tuple[str, ...] = ()) -> Any:
    return reward.score(GradedAnswer(text, "pp", "ggg", {"a": {"b": 0.5}}, steps))


def test_a_python_reward(function_file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    reward = make("python", path=str(function_file))
    assert call(reward, "sum") == 5.5
    assert call(reward, "true") == 1.0 and call(reward, "half") == 0.5 and call(reward, "read") == 0.0
    assert call(reward, "steps", ("a", "ab", "")) == (1.0, 2.0, 0.0)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("case", "message", "survives"),
    [
        ("raise", r"reward\.py: reward raised KeyError: 'missing' \(line \d+\)", True),
        ("exit", "raised SystemExit: 3", True),
        ("unknown", "raised KeyError: 'unknown'", True),
        ("none", "returned None, expected a finite number", True),
        ("nan", "returned nan", True),
        ("inf", "returned -inf", True),
        ("text", r"returned '1\.0'", True),
        ("dict", r"returned \{\}", True),
        ("large", "returned 1000", True),
        ("texts", r"returned \[1\.0, '2'\]", True),
        ("one", "returned 1 numbers for 2 steps", True),
        ("end", r"ended its process \(exit code 4\)", False),
        ("hang", r"took more than 0\.3 s", False),
    ],
)
def test_a_python_reward_that_misbehaves(function_file: Path, case: str, message: str, survives: bool) -> None:
    """The next answer has a reward, of a new process if need be."""
    reward = make("python", path=str(function_file), timeout_seconds=0.3 if case == "hang" else 20.0)
    before = call(reward, "calls")
    started_at = time.monotonic()
    with pytest.raises(RewardError, match=message):
        call(reward, case, ("a", "b"))
    assert time.monotonic() - started_at < 20.0
    assert call(reward, "calls") == (before + 2 if survives else 1)


def test_a_process_that_hangs_is_ended(tmp_path: Path) -> None:
    path, note = tmp_path / "reward.py", tmp_path / "pid"
    path.write_text(
        "import os, pathlib, signal, time\n"
        "def reward(values):\n"
        f"    pathlib.Path({str(note)!r}).write_text(str(os.getpid()))\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    time.sleep(60)\n"
    )
    with pytest.raises(RewardError, match="took more"):
        call(make("python", path=str(path), timeout_seconds=0.5), "")
    with pytest.raises(ProcessLookupError):
        os.kill(int(note.read_text()), 0)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (None, "No such file"),
        ("def reward(:", "SyntaxError"),
        ("import missing_module", r"No module named 'missing_module' \(line 1\)"),
        ("reward = 1", "has no function 'reward'"),
        ("import os; os._exit(7)", r"ended its process \(exit code 7\)"),
    ],
)
def test_a_file_that_cannot_be_imported_is_refused(tmp_path: Path, code: str | None, message: str) -> None:
    path = tmp_path / "reward.py"
    if code is not None:
        path.write_text(code)
    with pytest.raises(ValueError, match=message) as caught:
        make("python", path=str(path)).check(GradedAnswer(""))
    assert f"path = '{path}'" in str(caught.value)
