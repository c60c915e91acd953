"""``[objective]`` with ``kind = "preference"``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from config.base import NonNegativeFloat, PositiveFloat, PositiveInt, Section, expand_kind


class BlockLengths:
    """The block lengths of an objective. None is one block for the whole row."""

    @property
    def block_lengths(self) -> Sequence[int | None]:
        """All block lengths, in order."""
        return (None,)

    @property
    def longest_block_length(self) -> int | None:
        """Longest block of all steps: what fills it also fills the shorter ones that divide it."""
        lengths = [length for length in self.block_lengths if length is not None]
        return max(lengths) if lengths else None

    @property
    def final_block_length(self) -> int | None:
        """Block length for decoding with the finished model."""
        return self.longest_block_length


class _PreferenceLossOptions(Section):
    """What the losses differ in, beside their formulae."""

    has_reference: ClassVar[bool] = True
    """False: no reference is loaded or computed."""
    is_per_token: ClassVar[bool] = False
    """The bound of an answer is divided by its tokens, without EOS padding."""
    is_unpaired: ClassVar[bool] = False
    """The examples are single answers with a label."""


class DPOLossConfig(_PreferenceLossOptions):
    """-log sigmoid(beta (g_w - g_l)), with g = B - B_ref: DPO (Rafailov et al. 2023). Noise in g raises its mean."""

    kind: Literal["dpo"] = "dpo"
    beta: PositiveFloat = 0.1
    """Strength of the reference: a larger value keeps the model nearer to it."""


class IPOLossConfig(_PreferenceLossOptions):
    """(g_w/n_w - g_l/n_l - 1/(2 beta))^2: IPO (Azar et al. 2023), per token as in TRL. Noise adds its variance."""

    is_per_token: ClassVar[bool] = True
    kind: Literal["ipo"] = "ipo"
    beta: PositiveFloat = 0.1
    """Strength of the reference: the difference that is learned is 1 / (2 beta)."""


class SimPOLossConfig(_PreferenceLossOptions):
    """-log sigmoid(beta (B_w/n_w - B_l/n_l - gamma_beta_ratio)): SimPO (Meng et al. 2024). No reference, which would
    cancel some of the noise."""

    has_reference: ClassVar[bool] = False
    is_per_token: ClassVar[bool] = True
    kind: Literal["simpo"] = "simpo"
    beta: PositiveFloat = 2.0
    """Scale of the reward, the bound per token."""
    gamma_beta_ratio: NonNegativeFloat = 0.5
    """Margin gamma / beta, in nats per token, by which the chosen answer is to be more likely."""


class ORPOLossConfig(_PreferenceLossOptions):
    """-B_w/n_w - beta log sigmoid(o_w - o_l), o = log(P/(1 - P)), P = exp(B/n): ORPO (Hong et al. 2024). The first
    term, supervised fine-tuning, is unbiased."""

    has_reference: ClassVar[bool] = False
    is_per_token: ClassVar[bool] = True
    kind: Literal["orpo"] = "orpo"
    beta: PositiveFloat = 0.1
    """Weight of the odds ratio, the paper's lambda."""


class KTOLossConfig(_PreferenceLossOptions):
    """sigmoid(beta (z - g)) of a desirable answer, sigmoid(beta (g - z)) of another: KTO (Ethayarajh et al. 2024, eq.
    8). z >= 0 is the mean of g over the step, of prompt i with answer i + 1. Noise flattens the sigmoid."""

    is_unpaired: ClassVar[bool] = True
    kind: Literal["kto"] = "kto"
    beta: PositiveFloat = 0.1
    """Strength of the reference: a larger value keeps the model nearer to it."""
    desirable_weight: NonNegativeFloat = 1.0
    """Weight of desirable answers; times their number it should be 1 to 4/3 of that of undesirable ones."""
    undesirable_weight: NonNegativeFloat = 1.0
    """Weight of undesirable answers."""


PreferenceLossConfig = Annotated[
    DPOLossConfig | IPOLossConfig | SimPOLossConfig | ORPOLossConfig | KTOLossConfig,
    Field(discriminator="kind"),
    BeforeValidator(expand_kind),
]
"""A name, or a table with ``kind`` and its options."""


class PreferenceConfig(BlockLengths, Section):
    """Prefer chosen to rejected answers, with evidence bounds in place of log-likelihoods: as VRPO (LLaDA 1.5) does;
    exact for blocks of one token. Needs a source of preferences and a model to start from, which is the reference."""

    kind: Literal["preference"] = "preference"
    loss: PreferenceLossConfig = DPOLossConfig()
    """What is minimized: dpo, ipo, simpo, orpo or kto. kto learns from single answers with a label."""
    block_length: PositiveInt | None = None
    """Tokens of a block, counted from the start of each conversation. None: the whole answer, with attention in both
    directions."""
    num_draws: PositiveInt = 8
    """Masked versions of each answer, in pairs of opposite noise levels and masks; 1 is used for blocks of one token,
    which leave nothing random. All that is compared has the same ones. The compute grows with it."""

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        if self.num_draws > 1 and self.num_draws % 2:
            raise ValueError(f"num_draws = {self.num_draws} must be 1 or even, because draws come in opposite pairs")
        return self

    @property
    def block_lengths(self) -> tuple[int | None]:
        return (self.block_length,)
