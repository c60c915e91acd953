"""Tables, lists and text of a page."""

from __future__ import annotations

from logger.pages.tables import isolate, table, terms


def test_table_escapes_names_and_cells_and_marks_missing_ones() -> None:
    html = table(["<a>", "b"], [("<name>", ["<1>", ""])], first="First", classes="last")
    assert html.startswith('<div class="wide last" tabindex="0" role="group"><table><thead><tr><th>First</th>')
    assert '<th scope="col">&lt;a&gt;</th><th scope="col">b</th>' in html
    assert '<tr><th scope="row">&lt;name&gt;</th><td>&lt;1&gt;</td><td>-</td></tr>' in html
    assert "<thead>" not in table(["one"], [("name", ["1"])])


def test_terms() -> None:
    assert terms([("<a>", "1")], "facts") == '<dl class="facts"><div><dt>&lt;a&gt;</dt><dd>1</dd></div></dl>'


def test_only_text_that_would_reorder_its_neighbors_is_isolated() -> None:
    assert isolate("a<b") == "a&lt;b"
    assert isolate("\u05e9\u05dc") == "\u05e9\u05dc"
    assert isolate("\u202e<b") == "<bdi>\u202e&lt;b</bdi>"
