"""What holds for every test: hypothesis judges examples by what they find, never by how long one took."""

from __future__ import annotations

import contextlib

with contextlib.suppress(ImportError):  # the tests on GPUs need no hypothesis
    from hypothesis import HealthCheck, settings

    settings.register_profile("any_speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any_speed")
