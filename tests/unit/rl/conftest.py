"""The models and tasks of the tests of evaluation."""

from tests.unit.evaluation.tasks.conftest import biased_model, byte_tokenizer, make_task, random_model

__all__ = ["biased_model", "byte_tokenizer", "make_task", "random_model"]
