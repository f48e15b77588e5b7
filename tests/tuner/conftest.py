"""What whole tunes need where there is no GPU."""

from __future__ import annotations

from tests.tuner import tunes

compiled, fake = tunes.compiled, tunes.fake
