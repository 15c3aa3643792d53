"""Models of images: the patches that are their sequence, and what is made of these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from stagewright.model.fields import Count


@dataclass(frozen=True, slots=True)
class Vision:
    """Images as a sequence of square patches (ViT, arXiv 2010.11929), and what is made of them."""

    image_size: Annotated[int, Count(1)]
    patch_size: Annotated[int, Count(1)]
    channels: Annotated[int, Count(1)] = 3
    patch_bias: bool = True
    classes: Annotated[int, Count(0)] = 0
    """Classes of the classifier on the first position; 0: there is no classifier, as in a tower."""

    @property
    def patches(self) -> int:
        """Positions of an image, besides the one that stands before them for all of it."""
        return (self.image_size // self.patch_size) ** 2
