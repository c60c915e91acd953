"""Logging of runs. No torch."""

from logger.json_console import JsonConsole
from logger.progress import console_style
from logger.run_logger import (
    ConsoleLogger,
    JsonLinesLogger,
    LoggerGroup,
    NoLogger,
    RunLogger,
    format_duration,
)
from logger.sinks import open_sinks

__all__ = [
    "ConsoleLogger",
    "JsonConsole",
    "JsonLinesLogger",
    "LoggerGroup",
    "NoLogger",
    "RunLogger",
    "console_style",
    "format_duration",
    "open_sinks",
]
