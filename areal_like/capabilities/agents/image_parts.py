"""Images in the requests of agents: conversion of the three APIs' image parts to OpenAI's messages."""

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


class _Image(BaseModel):
    """An image; rejected for text-only models, and if it is damaged, on which the servers would fail."""

    @model_validator(mode="before")
    @classmethod
    def _check(cls, given: Any, asked: Any) -> Any:
        if asked.context is not None and asked.context.tokenizer.vision is None:
            raise ValueError(TEXT_ALONE)
        return given


class _Url(BaseModel):
    url: _DataUrl


class ImageUrl(_Image):
    """A part of a chat completion's message."""

    type: Literal["image_url"]
    image_url: _Url


class InputImage(_Image):
    """A part of a message of Responses."""

    type: Literal["input_image"]
    image_url: _DataUrl


class _ImageSource(BaseModel):
    type: Literal["base64"]
    media_type: str
    data: str

    @property
    def url(self) -> str:
        return f"data:{self.media_type};base64,{self.data}"

    @model_validator(mode="after")
    def _check(self) -> "_ImageSource":
        _check_image(self.url)
        return self


class ImageBlock(_Image):
    """A block of an Anthropic message."""

    type: Literal["image"]
    source: _ImageSource


def _url_of(image: _Image) -> str:
    """Return the data URL of an image."""
    match image:
        case ImageUrl():
            return image.image_url.url
        case InputImage():
            return image.image_url
        case ImageBlock():
            return image.source.url
    raise TypeError(image)


def content_of(parts: list[Any]) -> str | list[Mapping[str, Any]]:
    """Return the content of a message in OpenAI's form: text, or parts if it has images."""
    if not any(isinstance(part, _Image) for part in parts):
        return "".join(part.text for part in parts)
    return [
        {"type": "image_url", "image_url": {"url": _url_of(part)}}
        if isinstance(part, _Image)
        else {"type": "text", "text": part.text}
        for part in parts
    ]


def has_image(parts: list[Any] | None) -> bool:
    """Return whether there is an image among the parts of a message."""
    return any(isinstance(part, _Image) for part in parts or ())
