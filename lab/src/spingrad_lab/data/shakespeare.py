"""Tiny Shakespeare: a million characters of plays."""

from spingrad_lab.data.files import Known, fetch

_KNOWN = Known(1_115_394, "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed")
_SOURCE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"


def tiny_shakespeare() -> str:
    """1,115,394 characters, 65 different ones (Karpathy); custom is to train on the first 90 %."""
    return fetch("tinyshakespeare/input.txt", _KNOWN, _SOURCE).decode("ascii")
