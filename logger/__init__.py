"""Logging of runs. No torch."""

from logger.console import ConsoleLogger, JsonConsole, console_style, format_duration
from logger.jsonl import JsonLinesLogger
from logger.run_logger import LoggerGroup, RunLogger
from logger.sinks import open_sinks

__all__ = [
    "ConsoleLogger",
    "JsonConsole",
    "JsonLinesLogger",
    "LoggerGroup",
    "RunLogger",
    "console_style",
    "format_duration",
    "open_sinks",
]
