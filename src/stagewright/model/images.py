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


@dataclass(frozen=True, slots=True)
class Diffusion:
    """Noisy images as patches, modulated by step and class (DiT, arXiv 2212.09748)."""

    image_size: Annotated[int, Count(1)]
    """Height and width of the latent image."""
    patch_size: Annotated[int, Count(1)]
    channels: Annotated[int, Count(1)]
    classes: Annotated[int, Count(1)]
    """Classes, the one that stands for no class included."""
    out_channels: Annotated[int, Count(1)]
    """Channels of the predicted noise, and of its variance where that is learned."""
    waves: Annotated[int, Count(1)] = 256
    """Sines and cosines that embed a time step."""

    @property
    def patches(self) -> int:
        """Positions of an image; one more stands before them, for step and class."""
        return (self.image_size // self.patch_size) ** 2
