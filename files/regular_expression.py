"""Regular expressions that users and files bring: checked, and matched within a time limit."""

from __future__ import annotations


def check_pattern(pattern: str) -> str:
    """Check that a text is a regular expression, and return it.

    Raises:
        ValueError: it is none.
    """
    import regex  # type: ignore[import-untyped, unused-ignore]  # here, so that --help does not wait for it

    try:
        regex.compile(pattern)
    except (regex.error, RecursionError) as error:
        raise ValueError(f"{pattern[:200]!r} is no regular expression: {error}") from error
    return pattern


def matches_pattern(pattern: str, text: str, seconds: float, *, whole: bool = True) -> bool:
    """Whether a pattern matches a text.

    Args:
        seconds: CPU time of the process.
        whole: the pattern matches the whole text; else a part of it.

    Raises:
        ValueError: it takes longer.
    """
    import regex  # type: ignore[import-untyped, unused-ignore]

    match = regex.fullmatch if whole else regex.search
    try:
        return match(pattern, text, timeout=seconds) is not None
    except TimeoutError:
        raise ValueError(
            f"the regular expression {pattern[:200]!r} takes more than {seconds:g} s for {text[:200]!r}: avoid "
            "repetitions within repetitions, such as (a|aa)+"
        ) from None
