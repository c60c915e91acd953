"""What is learnt, and how its loss is estimated."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from config.base import Fraction, Section


class Counts(Section):
    """Masked counts, uniform on 1 ... n and stratified over the step's rows; weight n / k. Exactly the NELBO."""

    kind: Literal["counts"] = "counts"


class Bernoulli(Section):
    """LLaDA's estimator: t uniform, each token masked with probability p = (1 - epsilon) t + epsilon, weight 1 / p."""

    kind: Literal["bernoulli"] = "bernoulli"
    epsilon: Fraction = 1e-3
    """Least masking probability; bounds the weight."""


class MaskedDiffusion(Section):
    """Masked diffusion: reconstruct the masked tokens of a row from the others, in both directions."""

    kind: Literal["masked_diffusion"] = "masked_diffusion"
    estimator: Annotated[Counts | Bernoulli, Field(discriminator="kind")] = Counts()
    """How masks are drawn and weighted."""


Objective = MaskedDiffusion
