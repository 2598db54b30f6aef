"""The name of a set of weights: which run, which step, and a digest of the bytes. Never an address in memory."""

from __future__ import annotations

from dataclasses import dataclass

from shoestring.errors import UserError


class UnfitWeights(UserError):
    """The values of this version must not be served; those of a later one may."""


@dataclass(frozen=True)
class WeightsVersion:
    run: str
    step: int
    digest: str = ""

    def __str__(self) -> str:
        return f"{self.run}@{self.step}" + (f"-{self.digest[:12]}" if self.digest else "")
