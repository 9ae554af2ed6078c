"""The limits of pictures in requests."""

from dataclasses import dataclass

__all__ = ["MediaLimits"]


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """The limits of pictures in requests, from the section `media` of the configuration.

    Attributes:
        max_items: maximum number of pictures of a request.
        max_bytes: maximum size of a picture's file in bytes.
        max_pixels: maximum number of pixels of a picture.
        allowed_hosts: hosts from which pictures may be downloaded, such as "example.org" or "example.org:8443".
        download_timeout_s: maximum time of a download in seconds.
    """

    max_items: int = 16
    max_bytes: int = 20 * 2**20
    max_pixels: int = 32 * 2**20
    allowed_hosts: tuple[str, ...] = ()
    download_timeout_s: float = 10.0
