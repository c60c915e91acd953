"""Logging of runs. No torch."""

from logger.run_logger import ConsoleLogger, JsonLinesLogger, LoggerGroup, NoLogger, RunLogger, console_style, duration

__all__ = ["ConsoleLogger", "JsonLinesLogger", "LoggerGroup", "NoLogger", "RunLogger", "console_style", "duration"]
