"""Images in the requests of agents: conversion of the three APIs' image parts to OpenAI's messages."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, model_validator

from areal_like.data.images import decode, from_data_url

TEXT_ALONE = "the run generates from text alone"
TEXT_AND_IMAGES = "the run generates from text and images"


@lru_cache(maxsize=64)  # agents send the same images with every turn
def _check_image(url: str) -> str:
    """Return the URL of an image that can be shown to a model; raise ImageError for any other."""
    decode(from_data_url(url))
    return url


type _DataUrl = Annotated[str, AfterValidator(_check_image)]


class _Image(BaseModel, ABC):
    """An image; rejected for text-only models, and if it is damaged, on which the servers would fail."""

    @model_validator(mode="before")
    @classmethod
    def _check(cls, given: Any, asked: Any) -> Any:
        if asked.context is not None and asked.context.tokenizer.vision is None:
            raise ValueError(TEXT_ALONE)
        return given

    @property
    @abstractmethod
    def url(self) -> str:
        """The data URL of the image."""


class _Url(BaseModel):
    url: _DataUrl


class ImageUrl(_Image):
    """A part of a chat completion's message."""

    type: Literal["image_url"]
    image_url: _Url

    @property
    def url(self) -> str:
        """The data URL of the image."""
        return self.image_url.url


class InputImage(_Image):
    """A part of a message of Responses."""

    type: Literal["input_image"]
    image_url: _DataUrl

    @property
    def url(self) -> str:
        """The data URL of the image."""
        return self.image_url


class _ImageSource(BaseModel):
    type: Literal["base64"]
    media_type: str
    data: str


class ImageBlock(_Image):
    """A block of an Anthropic message."""

    type: Literal["image"]
    source: Annotated[_ImageSource, AfterValidator(lambda source: _check_source(source))]

    @property
    def url(self) -> str:
        """The data URL of the image."""
        return _url_of(self.source)


def _url_of(source: _ImageSource) -> str:
    return f"data:{source.media_type};base64,{source.data}"


def _check_source(source: _ImageSource) -> _ImageSource:
    _check_image(_url_of(source))
    return source


def content_of(parts: list[Any]) -> str | list[Mapping[str, Any]]:
    """Return the content of a message in OpenAI's form: text, or parts if it has images."""
    if not any(isinstance(part, _Image) for part in parts):
        return "".join(part.text for part in parts)
    return [
        {"type": "image_url", "image_url": {"url": part.url}}
        if isinstance(part, _Image)
        else {"type": "text", "text": part.text}
        for part in parts
    ]


def has_image(parts: list[Any] | None) -> bool:
    """Return whether there is an image among the parts of a message."""
    return any(isinstance(part, _Image) for part in parts or ())
